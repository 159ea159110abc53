"""A forward and a backward program, under torch's autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from ..capture.capture import Captured
from ..capture.places import AttributePlace
from ..capture.tree import unflatten
from ..ir.program import Slot, SlotKind
from ..passes.lower import kept_results
from ..passes.split import Split
from ..runtime.backends import Backend, Runner, build
from ..runtime.sharded import is_sharded, to_dtensor
from ..runtime.simulate import without_autocast
from .traced import Traced


class Pair:
    """A forward program and its backward.

    Args:
        alone: The forward as it was captured alone: says what is returned.
        captured: Forward and backward captured together; the forward alone if nothing has a gradient.
        cut: The two programs.
        modules: The lowered programs.
        backends: Build the forward and the backward at their first runs.
        traced: How it was captured.
    """

    def __init__(
        self,
        alone: Captured,
        captured: Captured,
        cut: Split,
        modules: Sequence[fx.GraphModule],
        backends: tuple[Backend, Backend],
        traced: Traced,
    ) -> None:
        self.alone, self.captured, self.cut = alone, captured, cut
        self.modules, self.backends, self.mesh = modules, backends, cut.forward.mesh
        self.runners: list[Runner | None] = [None, None]
        self.index = {slot: i for i, slot in enumerate(captured.program.slots)}
        self.outputs = len(traced.outputs)
        self.differentiable = [i for i, output in enumerate(traced.outputs) if output.requires_grad]
        self.kept = [i for i in kept_results(cut.forward) if i < len(cut.forward_results)]
        self.layouts = [node.meta["layout"] for _, node in cut.backward.outputs] if cut.backward_results else []
        self.sources = [self._source(i, traced) for i in cut.backward_results]
        tangents = {f"gradient of output {i}": place for place, i in enumerate(self.differentiable)}
        self.places = [self._place(slot, tangents) for slot in cut.backward.slots] if cut.backward_results else []

    def __call__(self, leaves: list[Any], inputs: list[Any]) -> Any:
        """Run the forward; the backward hangs on what it returns."""
        local = [t.to_local() if isinstance(t, DTensor) else t for t in inputs]
        if self.cut.backward_results and torch.is_grad_enabled():
            sources = [leaves[i] if is_leaf else inputs[i] for is_leaf, i in self.sources]
            outputs = list(_Call.apply(self, leaves, local, *sources))
        else:
            outputs, _ = self.forward(leaves, local)
        values = [leaf.value if leaf.result is None else outputs[leaf.result] for leaf in self.alone.returned]
        return unflatten(values, self.alone.returned_spec)

    def forward(self, leaves: list[Any], local: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """What the module returns, and what the backward needs."""
        found = self._run(0, [local[self.index[slot]] for slot in self.cut.forward.slots])
        made = dict(zip(self.kept, found, strict=False))
        for i, value in made.items():
            target = self.captured.targets[self.cut.forward_results[i]] if i >= self.outputs else None
            if isinstance(target, AttributePlace):
                target.create(leaves, value)
        for place, fixed in self.captured.python_state:
            place.create(leaves, fixed)
        return [made[i] for i in range(self.outputs)], list(found[len(self.kept) :])

    def needed(self, local: list[Tensor], saved: list[Tensor]) -> list[Tensor]:
        """What is to be kept for the backward."""
        return [*(local[i] for kind, i in self.places if kind == "slot"), *saved]

    def backward(self, kept: Sequence[Tensor], tangents: Sequence[Tensor]) -> list[Tensor]:
        """The gradient of each source, placed as the source is."""
        slots = sum(kind == "slot" for kind, _ in self.places)
        given, saved = iter(kept[:slots]), kept[slots:]
        arguments = [
            next(given) if kind == "slot" else (saved if kind == "saved" else tangents)[i] for kind, i in self.places
        ]
        found = self._run(1, arguments)
        return [
            to_dtensor(value, layout, self.mesh) if not is_leaf and is_sharded(layout) else value
            for value, layout, (is_leaf, _) in zip(found, self.layouts, self.sources, strict=True)
        ]

    def _run(self, which: int, arguments: list[Tensor]) -> Any:
        with torch.no_grad(), without_autocast():
            runner = self.runners[which]
            if runner is None:
                runner = self.runners[which] = build(self.backends[which], self.modules[which], arguments)
            return runner(*arguments)

    def _source(self, result: int, traced: Traced) -> tuple[bool, int]:
        """Whose gradient a result is: a leaf of the arguments, or a parameter by its slot."""
        slot = self.captured.program.results[result].slot
        if slot is not None:
            return False, self.index[Slot(SlotKind.PARAMETER, slot.name)]
        gradients = self.captured.returned[len(self.captured.returned) - len(traced.inputs) :]
        return True, next(
            leaf for leaf, returned in zip(traced.inputs, gradients, strict=True) if returned.result == result
        )

    def _place(self, slot: Slot, tangents: Mapping[str, int]) -> tuple[str, int]:
        """Where the backward finds a slot: among the forward's inputs, what it saved, or gradients of outputs."""
        if slot in self.index and slot.name not in tangents:
            return "slot", self.index[slot]
        return ("tangent", tangents[slot.name]) if slot.name in tangents else ("saved", int(slot.name.split()[1]))


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pair: Pair, leaves: list[Any], local: list[Tensor], *sources: Tensor) -> tuple[Tensor, ...]:
        outputs, saved = pair.forward(leaves, local)
        ctx.pair = pair
        ctx.save_for_backward(*pair.needed(local, saved))
        ctx.mark_non_differentiable(*(t for i, t in enumerate(outputs) if i not in pair.differentiable))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Any, ...]:
        pair: Pair = ctx.pair
        given = [tangents[i] for i in pair.differentiable]
        return None, None, None, *pair.backward(ctx.saved_tensors, given)
