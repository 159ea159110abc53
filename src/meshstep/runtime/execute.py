"""Runs a compiled program on the tensors of one call and puts the results where they belong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch import mark_stepped
from ..capture.capture import Captured
from ..capture.places import AttributePlace, GradientPlace, OptimizerStatePlace
from ..capture.tree import unflatten
from ..ir.program import Program
from ..ir.updates import laid_out_like
from ..layout import Layout
from ..mesh import Mesh
from ..passes.lower import kept_results
from .backends import Runner
from .replicas import Replicas
from .sharded import Shards, sharded_results, to_dtensor
from .simulate import gather, run_ranks, scatter, without_autocast

Wrap = Callable[[Tensor, Layout], Any]
Held = Callable[[int, Tensor], Tensor]  # of a result by its index


class LocalExecutor:
    """This rank's part of a step, by a backend.

    Args:
        captured: The captured step.
        program: Its local program.
        run: The lowered program.
        shards: Gives this rank's part of the state.
        wrap: Makes what the user gets of a result and its layout.
        number: Which of the step's programs it is, the same on all ranks.
    """

    def __init__(
        self, captured: Captured, program: Program, run: Runner, shards: Shards, wrap: Wrap, number: int = 0
    ) -> None:
        """Note which results the lowered program returns."""
        self._captured, self._run, self._shards, self._wrap = captured, run, shards, wrap
        self._mesh, self._sharded = program.mesh, sharded_results(program)
        self._kept = kept_results(program)
        self.replicas, self.number = Replicas(program), number
        self._layouts = [node.meta["layout"] for _, node in program.outputs]

    def __call__(self, leaves: list[Any], inputs: list[Tensor]) -> Any:
        """Run one step.

        Args:
            leaves: The leaves of the arguments.
            inputs: The tensor of each slot.

        Returns:
            What the user's function returns.
        """
        with torch.no_grad(), without_autocast():
            found = self._run(*self._shards.bind(leaves, inputs))
        results = dict(zip(self._kept, found, strict=True))
        _finish(self._captured, leaves, results, self._held)
        return _returned(self._captured, {i: self._wrap(t, self._layouts[i]) for i, t in results.items()})

    def _held(self, index: int, value: Tensor) -> Tensor:
        """New state as the user's objects hold it."""
        layout = self._sharded.get(index)
        return value if layout is None else to_dtensor(value, layout, self._mesh)


class SimulatedExecutor:
    """All ranks of a mesh in this process, on whole tensors.

    Args:
        captured: The captured step.
        program: Its local program.
    """

    def __init__(self, captured: Captured, program: Program) -> None:
        """Note the layouts."""
        self._captured, self._program = captured, program
        self._inputs = [node.meta["layout"] for node in program.placeholders]
        self._outputs = [(str(result), node.meta["layout"]) for result, node in program.outputs]

    def __call__(self, leaves: list[Any], inputs: list[Tensor]) -> Any:
        """Run one step: scatter, run every rank, gather, write the state."""
        mesh = self._program.mesh
        parts = [scatter(t.detach(), layout, mesh) for t, layout in zip(inputs, self._inputs, strict=True)]
        found = run_ranks(self._program, [[p[rank] for p in parts] for rank in range(mesh.size)])
        results = {
            i: gather([ranks[i] for ranks in found], layout, mesh, name)
            for i, (name, layout) in enumerate(self._outputs)
        }
        self._write(leaves, inputs, results)
        return _returned(self._captured, results)

    def _write(self, leaves: list[Any], inputs: Sequence[Tensor], results: dict[int, Tensor]) -> None:
        held = dict(zip(self._program.slots, inputs, strict=True))
        writes = [
            (held[result.slot], results[i].clone())
            for i, result in enumerate(self._program.results)
            if result.slot is not None and result.slot in held
        ]
        with torch.no_grad():
            for tensor, value in writes:
                tensor.copy_(value)
        created = {i: t for i, t in results.items() if self._program.results[i].slot not in held}
        _finish(self._captured, leaves, created, lambda index, value: value)


def _finish(captured: Captured, leaves: list[Any], results: dict[int, Tensor], held: Held) -> None:
    """Set state that did not exist before, and what of the state is no tensor."""
    _create_state(captured, leaves, results, held)
    for gradient in captured.cleared:
        gradient.create(leaves, None)
    for place, fixed in captured.python_state:
        place.create(leaves, fixed)
    for _, optimizer in captured.state.optimizers:
        mark_stepped(optimizer)
    for action in captured.afterwards:
        action()


def _create_state(captured: Captured, leaves: list[Any], results: dict[int, Tensor], held: Held) -> None:
    """Optimizer state and gradients; equal values get storage of their own, and state that is a part of more does."""
    storages: set[int] = set()
    overlapping = _overlapping({i: t for i, t in results.items() if isinstance(captured.targets[i], GradientPlace)})
    for index, value in results.items():
        place = captured.targets[index]
        if not isinstance(place, (OptimizerStatePlace, GradientPlace, AttributePlace)):
            continue
        storage = value.untyped_storage().data_ptr()
        shared = value.numel() > 0 and (storage in storages or value.untyped_storage().nbytes() > value.nbytes)
        storages.add(storage)
        if isinstance(place, OptimizerStatePlace):
            value = _as_its_parameter(place, leaves, value.clone() if shared else value)
        elif index in overlapping:
            value = value.clone()
        place.create(leaves, held(index, value))


def _overlapping(gradients: Mapping[int, Tensor]) -> set[int]:
    """Those that share memory with one before them, or with themselves: a change of one would change others."""
    found, end = set[int](), 0
    for start, size, index in sorted((t.data_ptr(), _span(t), i) for i, t in gradients.items() if t.numel()):
        if start < end or size < gradients[index].nbytes:
            found.add(index)
        end = max(end, start + size)
    return found


def _span(tensor: Tensor) -> int:
    """Bytes from the first element to the last."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _as_its_parameter(place: OptimizerStatePlace, leaves: list[Any], value: Tensor) -> Tensor:
    """New state in memory as its parameter lies, as torch makes it: kernels take the two together."""
    owner = place.owner.read(leaves)
    local = owner.to_local() if isinstance(owner, DTensor) else owner
    return value if local is None else laid_out_like([value], [local.detach()])[0]


def _returned(captured: Captured, results: dict[int, Any]) -> Any:
    values = [leaf.value if leaf.result is None else results[leaf.result] for leaf in captured.returned]
    return unflatten(values, captured.returned_spec)


def dtensor_wrap(mesh: Mesh) -> Wrap:
    """Gives results as DTensors."""

    def wrap(value: Tensor, layout: Layout) -> Tensor:
        return to_dtensor(value, layout, mesh)

    return wrap
