"""Traces a train step once, with fake tensors of global shape, into a functional program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import FakeTensorMode, compiling
from ..errors import CaptureError, InputError
from ..ir.program import Program, Result, Slot, SlotKind, prune
from ..mesh import Mesh
from .places import (
    ArgumentPlace,
    ConstantPlace,
    GradientPlace,
    HyperparameterPlace,
    OptimizerStatePlace,
    Place,
)
from .scalars import compute_scalars_in_float64
from .state import Held, State, collect, hyperparameters, python_values, state_slot
from .swap import fake_like, swapped
from .tracer import Tracer
from .tree import Spec, flatten, paths


@dataclass(frozen=True, slots=True)
class Returned:
    """A leaf of what the user's function returned: a result of the program, or a Python value.

    Args:
        result: Index of the program's result; `None` for a Python value.
        value: The Python value.
    """

    result: int | None
    value: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """A captured step.

    Args:
        program: The global program.
        state: The modules, optimizers and tensors that it was captured with.
        places: Where the tensor of each slot is read.
        targets: Where each result is written: None for a user output.
        returned: The leaves of the return value.
        returned_spec: Puts them together.
        cleared: Gradients that are None after the step.
        python_state: Optimizer state that is no tensor, set when the program has run.
        creates_state: Whether optimizer state or gradients come into being: the next call has another program.
    """

    program: Program
    state: State
    places: tuple[Place, ...]
    targets: tuple[Place | None, ...]
    returned: tuple[Returned, ...]
    returned_spec: Spec
    cleared: tuple[GradientPlace, ...]
    python_state: tuple[tuple[OptimizerStatePlace, Any], ...]
    creates_state: bool


def capture(
    function: Callable[..., Any],
    invoke: Callable[[list[Any]], Any],
    leaves: Sequence[Any],
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...] | None],
    mesh: Mesh,
) -> Captured:
    """Trace one call.

    Args:
        function: The user's function: gives the program its name.
        invoke: Calls it with other leaves of the same structure.
        leaves: The leaves of the real arguments; not changed.
        names: Their paths.
        shapes: The global shape of each leaf that is a tensor.
        mesh: The mesh that the program is for.

    Raises:
        CaptureError: The Python needs the value of a tensor, or does what cannot be recorded.
        InputError: There is nothing to train among the arguments.
    """
    state = collect(leaves, names)
    if not state.modules and not any(isinstance(leaf, Tensor) for leaf in leaves):
        raise InputError(
            f"{function.__name__} gets no module and no tensor",
            at=f"arguments {', '.join(names) or 'none'}",
            hint="pass the model, the optimizer and the batch to the step as arguments",
        )
    return _Capture(function, state, mesh).run(invoke, leaves, names, shapes)


class _Capture:
    """What one capture knows while it runs."""

    def __init__(self, function: Callable[..., Any], state: State, mesh: Mesh) -> None:
        self.function, self.state, self.mesh = function, state, mesh
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True)
        self.tracer = Tracer()
        self.places: dict[Slot, Place] = {}
        self.results: list[tuple[Result, fx.Node, Place | None]] = []
        self.fakes: dict[int, Tensor] = {}
        self.cleared: list[GradientPlace] = []
        self.python_state: list[tuple[OptimizerStatePlace, Any]] = []
        self._before = python_values(state)

    def run(
        self,
        invoke: Callable[[list[Any]], Any],
        leaves: Sequence[Any],
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...] | None],
    ) -> Captured:
        for held in self.state.held:
            self.fakes[id(held.tensor)] = self._input(held.slot, held.place, fake_like(held.tensor, self.mode))
        live = [
            (slot, place, self._input(slot, place, self._number(place))) for slot, place in hyperparameters(self.state)
        ]
        arguments = self._arguments(leaves, names, shapes)
        with swapped(self.state, self.fakes, live):
            returned = self._trace(invoke, arguments)
            self._check_live(live)
            with self.mode, self.tracer, torch.no_grad():
                self._collect_returned(returned)
                self._collect_state()
                self._collect_arguments(leaves, arguments, names)
        return self._finish(returned)

    def _input(self, slot: Slot, place: Place, fake: Tensor) -> Tensor:
        self.tracer.placeholder(slot, fake)
        self.places[slot] = place
        return fake

    def _number(self, place: HyperparameterPlace) -> Tensor:
        with self.mode:
            return torch.empty((), dtype=torch.float64, device=place.device)

    def _arguments(
        self, leaves: Sequence[Any], names: Sequence[str], shapes: Sequence[tuple[int, ...] | None]
    ) -> list[Any]:
        arguments = list(leaves)
        for index, (leaf, name, shape) in enumerate(zip(leaves, names, shapes, strict=True)):
            if not isinstance(leaf, Tensor):
                continue
            if id(leaf) in self.fakes:
                arguments[index] = self.fakes[id(leaf)]
                continue
            with self.mode:
                fake = torch.empty(shape or (), dtype=leaf.dtype, device=leaf.device)
                fake.requires_grad_(leaf.requires_grad)
            arguments[index] = self._input(Slot(SlotKind.ARGUMENT, name), ArgumentPlace(index), fake)
        return arguments

    def _trace(self, invoke: Callable[[list[Any]], Any], arguments: list[Any]) -> Any:
        with compiling(), torch.autograd.set_multithreading_enabled(False), self.mode, self.tracer:
            return invoke(arguments)

    def _check_live(self, live: list[tuple[Slot, HyperparameterPlace, Tensor]]) -> None:
        for _, place, fake in live:
            if place.optimizer.param_groups[place.group][place.key] is not fake:
                raise CaptureError(
                    f"the step changes {place.key!r} of the optimizer",
                    at=f"{type(place.optimizer).__name__}.param_groups[{place.group}]",
                    hint="call scheduler.step() after the compiled step, not in it: a new value needs no recompile",
                )

    def _collect_returned(self, returned: Any) -> None:
        leaves, spec = flatten(returned)
        for leaf, path in zip(leaves, paths(spec), strict=True):
            if isinstance(leaf, Tensor):
                self.results.append((Result(path or "0"), self.tracer.value(leaf), None))

    def _collect_state(self) -> None:
        for held in self.state.held:
            fake = self.fakes[id(held.tensor)]
            if held.slot.kind is SlotKind.BUFFER:
                fake = held.place.read([])  # type: ignore[assignment]  # the step may have put another tensor there
            if held.slot.kind in (SlotKind.PARAMETER, SlotKind.BUFFER):
                self._changed(held.slot, held.place, fake)
        for held in self.state.parameters():
            self._collect_gradient(held)
        for path, optimizer in self.state.optimizers:
            by_fake = {id(self.fakes[id(h.tensor)]): h for h in self.state.parameters()}
            for fake, entries in optimizer.state.items():
                for key, value in entries.items():
                    owner = by_fake[id(fake)]
                    place = OptimizerStatePlace(optimizer, owner.place, key)
                    self._collect_entry(state_slot(self.state, path, owner, key), place, value)

    def _collect_gradient(self, held: Held) -> None:
        slot, place = Slot(SlotKind.GRADIENT, held.slot.name), GradientPlace(held.place)
        gradient = self.fakes[id(held.tensor)].grad
        if gradient is not None:
            self._changed(slot, place, gradient)
        elif slot in self.places:
            self.cleared.append(place)

    def _collect_entry(self, slot: Slot, place: OptimizerStatePlace, value: Any) -> None:
        if isinstance(value, Tensor):
            self._changed(slot, place, value)
            return
        before = self._before.get((id(place.optimizer), slot.name))
        if before is None and value is not None:
            self.python_state.append((place, value))
        elif before != value:
            raise CaptureError(
                f"the optimizer keeps {place.key!r} as a Python value that changes in every step",
                at=f"{type(place.optimizer).__name__}, {slot.name}",
                hint="keep it as a 0-d tensor, as the optimizers of torch.optim do",
            )

    def _collect_arguments(self, leaves: Sequence[Any], arguments: list[Any], names: Sequence[str]) -> None:
        for index, (leaf, fake, name) in enumerate(zip(leaves, arguments, names, strict=True)):
            slot = Slot(SlotKind.ARGUMENT, name)
            if isinstance(leaf, Tensor) and slot in self.places:
                self._changed(slot, ArgumentPlace(index), fake)
                if fake.grad is not None:
                    raise CaptureError(
                        "an argument gets a gradient that outlives the step",
                        at=f"argument {name}",
                        hint="torch.autograd.grad, and return the gradient",
                    )

    def _changed(self, slot: Slot, place: Place, tensor: Tensor) -> None:
        """A result, if the value of the slot at the end is not the one at the start."""
        node = self.tracer.value(tensor)
        if slot not in self.places or not self._is_input(slot, node):
            self.results.append((Result(slot.name, slot), node, place))

    def _is_input(self, slot: Slot, node: fx.Node) -> bool:
        return node.op == "placeholder" and self.tracer.slot_of(node) == slot

    def _finish(self, returned: Any) -> Captured:
        graph = self.tracer.graph
        graph.output(tuple(node for _, node, _ in self.results))
        prune(graph)
        program = Program(
            name=self.function.__name__,
            mesh=self.mesh,
            graph=graph,
            slots=tuple(self.tracer.slots),
            results=tuple(result for result, _, _ in self.results),
            constants=dict(self.tracer.constants),
        )
        places = self.places | {slot: ConstantPlace(t) for slot, t in self.tracer.constants.items()}
        leaves, spec = flatten(returned)
        indices = iter(range(len(leaves)))
        known = set(program.slots)
        return Captured(
            program=compute_scalars_in_float64(program),
            state=self.state,
            places=tuple(places[slot] for slot in program.slots),
            targets=tuple(place for _, _, place in self.results),
            returned=tuple(
                Returned(next(indices)) if isinstance(leaf, Tensor) else Returned(None, leaf) for leaf in leaves
            ),
            returned_spec=spec,
            cleared=tuple(self.cleared),
            python_state=tuple(self.python_state),
            creates_state=any(result.slot and result.slot not in known for result in program.results),
        )
