"""Traces a train step once, with fake tensors of global shape, into a functional program."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from .._torch import FakeTensorMode, compiling, storage_id
from ..errors import CaptureError, InputError
from ..ir.program import Program, Result, Slot, SlotKind, prune
from ..mesh import Mesh
from .attributes import MISSING, Attributes, has_tensors
from .numbers import LiveNumbers
from .places import (
    ArgumentPlace,
    AttributePlace,
    BufferPlace,
    ConstantPlace,
    GradientPlace,
    HyperparameterPlace,
    OptimizerStatePlace,
    ParameterPlace,
    Place,
    RequiresGradPlace,
    SeedPlace,
)
from .questions import Question, ask
from .randomness import undisturbed
from .scalars import compute_scalars_in_float64
from .schedules import Schedules
from .source import definition_line, name_of, no_data, user_line
from .state import Held, State, collect, hyperparameters, overlap, python_values, state_slot
from .swap import fake_like, standing_in, swapped
from .tracer import Tracer
from .tree import Spec, flatten, paths

StandIns = Callable[[Sequence[tuple[str, nn.Module]]], Mapping[int, nn.Module]]


_capturing = threading.local()


def is_capturing() -> bool:
    """Whether a step is being traced in this thread: a step that it calls is a part of it."""
    return getattr(_capturing, "now", False)


@contextlib.contextmanager
def _as_capturing() -> Iterator[None]:
    before, _capturing.now = is_capturing(), True
    try:
        yield
    finally:
        _capturing.now = before


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
        python_state: What of the state is no tensor, set when the program has run.
        attributes: The Python values that are compiled in.
        questions: What the step asked of numbers of its state: the answers are compiled in.
        afterwards: What is to be done after each run: steps of schedulers.
        creates_state: Whether optimizer state or gradients come into being: the next call has another program.
    """

    program: Program
    state: State
    places: tuple[Place, ...]
    targets: tuple[Place | None, ...]
    returned: tuple[Returned, ...]
    returned_spec: Spec
    cleared: tuple[GradientPlace, ...]
    python_state: tuple[tuple[OptimizerStatePlace | AttributePlace | RequiresGradPlace, Any], ...]
    attributes: Attributes
    questions: tuple[Question, ...]
    afterwards: tuple[Callable[[], Any], ...]
    creates_state: bool


def capture(
    function: Callable[..., Any],
    invoke: Callable[[list[Any]], Any],
    leaves: Sequence[Any],
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...] | None],
    mesh: Mesh,
    seed: Callable[[torch.device], Tensor],
    stand_ins: StandIns | None = None,
) -> Captured:
    """Trace one call.

    Args:
        function: The user's function: gives the program its name.
        invoke: Calls it with other leaves of the same structure.
        leaves: The leaves of the real arguments; not changed.
        names: Their paths.
        shapes: The global shape of each leaf that is a tensor.
        mesh: The mesh that the program is for.
        seed: Gives (seed, step) as i64[2] on a device, at every call of the program.
        stand_ins: Of the modules by name: what takes the place of some while the step is traced, by their `id`.

    Raises:
        CaptureError: The Python needs the value of a tensor, or does what cannot be recorded.
        InputError: There is nothing to train among the arguments.
    """
    for leaf, name in zip(leaves, names, strict=True):
        _check_leaf(leaf, name, function)
    state = collect(leaves, names)
    if not state.modules and not any(isinstance(leaf, Tensor) for leaf in leaves):
        raise InputError(
            f"{name_of(function)} gets no module and no tensor",
            at=f"{definition_line(function)}, arguments {', '.join(names) or 'none'}",
            hint="pass the model, the optimizer and the batch to the step as arguments",
        )
    replaced = stand_ins([(state.names[id(m)], m) for _, m in state.modules]) if stand_ins else {}
    return _Capture(function, state, mesh, seed, replaced).run(invoke, leaves, names, shapes)


def _check_leaf(leaf: Any, name: str, function: Callable[..., Any]) -> None:
    if isinstance(leaf, torch.optim.LBFGS):
        raise CaptureError(
            "LBFGS computes the loss as often as its value demands",
            at=f"{definition_line(function)}, argument {name}",
            hint="compile the computation of loss and gradients, and step LBFGS outside",
        )
    if isinstance(leaf, Tensor) and leaf.layout != torch.strided:
        raise CaptureError(
            f"a tensor of layout {leaf.layout}",
            at=f"{definition_line(function)}, argument {name}",
            hint="x.to_dense(), or its indices and values as arguments",
        )


class _Capture:
    """What one capture knows while it runs."""

    def __init__(
        self,
        function: Callable[..., Any],
        state: State,
        mesh: Mesh,
        seed: Callable[[torch.device], Tensor],
        replaced: Mapping[int, nn.Module],
    ) -> None:
        self.replaced = replaced
        self.function, self.state, self.mesh, self.seed = function, state, mesh, seed
        self.mode = FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True)
        self.tracer = Tracer(definition_line(function), self._ask)
        self.places: dict[Slot, Place] = {}
        self.results: list[tuple[Result, fx.Node, Place | None]] = []
        self.fakes: dict[int, Tensor] = {}
        self.cleared: list[GradientPlace] = []
        self.python_state: list[tuple[OptimizerStatePlace | AttributePlace | RequiresGradPlace, Any]] = []
        self.attributes = Attributes(state.owners())
        self.stepped: dict[int, str] = {}
        self.schedules = Schedules()
        self._names = state.names | {id(m): state.names[of] for of, m in replaced.items()}
        self._passed: list[Held] = []
        self.numbers: dict[Slot, Tensor] = {}  # the live numbers as they are now
        self._before = python_values(state)
        self._owner_of: dict[Any, Slot] = {}
        self._named = {
            (id(module), name)
            for module in state.submodules()
            for table in (module._parameters, module._buffers)
            for name, tensor in table.items()
            if tensor is not None
        }

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
        self.numbers = {slot: place.read([]) for slot, place, _ in live}
        arguments = self._arguments(leaves, names, shapes)
        with undisturbed(), swapped(self.state, self.fakes, live):
            with self._noting_steps():
                returned = self._trace(invoke, arguments)
            with self.mode, self.tracer, torch.no_grad():
                self._collect_returned(returned)
                self._collect_state()
                self._collect_attributes()
                self._collect_arguments(leaves, arguments, names)
        self._check_shared()
        return self._finish(returned)

    def _input(self, slot: Slot, place: Place, fake: Tensor) -> Tensor:
        self.tracer.placeholder(slot, fake)
        self.places[slot] = place
        return fake

    def _number(self, place: HyperparameterPlace) -> Tensor:
        with self.mode:
            return torch.empty((), dtype=torch.float64, device=place.device)

    def _ask(self, node: fx.Node, slot_of: Callable[[fx.Node], Slot]) -> Question | None:
        """What Python asks, answered by the real values: fakes are in their places now."""
        constants = {slot: ConstantPlace(tensor) for slot, tensor in self.tracer.constants.items()}
        values = {held.slot: held.tensor for held in self.state.held} | self.tracer.constants
        return ask(node, slot_of, self.places | constants, values | self.numbers)

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
            slot, place = Slot(SlotKind.ARGUMENT, name), ArgumentPlace(index)
            arguments[index] = self._input(slot, place, fake)
            self._passed.append(Held(slot, place, leaf))
        return arguments

    def _trace(self, invoke: Callable[[list[Any]], Any], arguments: list[Any]) -> Any:
        arguments = [self.replaced.get(id(a), a) if isinstance(a, nn.Module) else a for a in arguments]
        with (
            _as_capturing(),
            standing_in(self.state.submodules(), self.replaced),
            compiling(),
            torch.autograd.set_multithreading_enabled(False),
            self.tracer.noting_modules(self._path),
            LiveNumbers(),
            self.mode,
            self.tracer,
            no_data(),
        ):
            return invoke(arguments)

    def _path(self, module: nn.Module) -> str:
        """The path of a module, as the names of its parameters begin; "" for the root and for one that is unknown."""
        return self._names.get(id(module), "").removesuffix(".")

    @contextlib.contextmanager
    def _noting_steps(self) -> Iterator[None]:
        """Remember the line at which each optimizer steps."""
        with contextlib.ExitStack() as stack:
            for _, optimizer in self.state.optimizers:
                hook = optimizer.register_step_post_hook(self._note_step)
                stack.callback(hook.remove)
            for scheduler in self.state.schedulers:
                stack.enter_context(self.schedules.noting(scheduler))
            yield

    def _note_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.schedules.check(optimizer)
        self.stepped[id(optimizer)] = user_line()

    def _collect_returned(self, returned: Any) -> None:
        leaves, spec = flatten(returned)
        for leaf, path in zip(leaves, paths(spec), strict=True):
            if isinstance(leaf, Tensor):
                self.results.append((Result(path or "0"), self.tracer.value(leaf), None))

    def _collect_state(self) -> None:
        for held in self.state.held:
            if held.slot.kind in (SlotKind.PARAMETER, SlotKind.BUFFER):
                self._collect_held(held)
        for held in self.state.parameters():
            self._collect_gradient(held)
        by_fake = {id(self.fakes[id(h.tensor)]): h for h in self.state.parameters()}
        for path, optimizer in self.state.optimizers:
            for fake, entries in optimizer.state.items():
                owner = by_fake.get(id(fake))
                if owner is None:
                    raise CaptureError(
                        "the optimizer keeps state of a tensor that it did not have before",
                        at=f"{self.stepped.get(id(optimizer), '')} {type(optimizer).__name__}".strip(),
                        hint="give it all its parameters before the step",
                    )
                for key, value in entries.items():
                    place = OptimizerStatePlace(optimizer, owner.place, key)
                    self._collect_entry(state_slot(self.state, path, owner, key), place, value)

    def _collect_held(self, held: Held) -> None:
        """The new value of a parameter, a buffer or an attribute."""
        fake, place = self.fakes[id(held.tensor)], held.place
        now = place.read([]) if isinstance(place, (ParameterPlace, BufferPlace, AttributePlace)) else fake
        if isinstance(place, AttributePlace) and now is not fake:
            if isinstance(now, Tensor):
                self._collect_new(place, now)
            return
        if now is None or (isinstance(place, ParameterPlace) and now is not fake):
            raise CaptureError(
                f"the step {'removes' if now is None else 'replaces'} {held.slot}",
                at=type(place.module).__name__,  # type: ignore[union-attr]
                hint="change its values under torch.no_grad(), by copy_ for example",
            )
        self._changed(held.slot, place, now)
        self._check_alone(held.slot, now)
        if held.slot.kind is SlotKind.PARAMETER and now.requires_grad is not held.tensor.requires_grad:
            self.python_state.append((RequiresGradPlace(place), now.requires_grad))

    def _check_alone(self, slot: Slot, tensor: Tensor) -> None:
        other = self._owner_of.setdefault(self.tracer.memory(tensor), slot)
        if other != slot:
            raise CaptureError(
                f"{other} and {slot} share memory after the step",
                at=self.tracer.value(tensor).meta["source"] or None,
                hint="assign a copy: .clone()",
            )

    def _check_shared(self) -> None:
        """Refuse to change one of two tensors that share memory: the other one would stay as it was."""
        written = {result.slot for result, _, _ in self.results}
        by_storage: dict[int, list[Held]] = {}
        for held in (*self.state.held, *self._passed):
            others = by_storage.setdefault(storage_id(held.tensor), [])
            for other in others:
                if overlap(held.tensor, other.tensor) and not written.isdisjoint((held.slot, other.slot)):
                    raise CaptureError(
                        f"{other.slot} and {held.slot} share memory, and the step changes it",
                        at=definition_line(self.function),
                        hint="make them one (module.b = module.a), or give each its own memory (.clone())",
                    )
            others.append(held)

    def _collect_attributes(self) -> None:
        """Attributes that the step has set; tensors that were there before are state like any other."""
        changed = self.attributes.changed_table()
        if changed is not None:
            raise CaptureError(f"after the step, {changed}", hint="change submodules and hooks outside of the step")
        for module in self.state.submodules():
            self._check_tables(module)
        for owner, name, before, now in self.attributes.changes():
            place, shown = AttributePlace(owner, name), f"{type(owner).__name__}.{name}"
            if isinstance(now, Tensor):
                if not isinstance(before, Tensor):
                    self._collect_new(place, now)
            elif now is MISSING:
                raise CaptureError(f"the step deletes the attribute {shown}", hint="set it to None")
            elif has_tensors(now):
                raise CaptureError(
                    f"the step leaves tensors in the {type(now).__name__} {shown}",
                    at=f"attribute {self.state.name(owner, name)}",
                    hint="return them from the step, or empty it before the step ends",
                )
            else:
                self.python_state.append((place, copy.deepcopy(now)))

    def _collect_new(self, place: AttributePlace, tensor: Tensor) -> None:
        """A tensor that the step has put into an attribute: set anew after each run."""
        slot = Slot(SlotKind.BUFFER, f"{self.state.name(place.owner, place.name)} (set)")
        self.results.append((Result(slot.name, slot), self.tracer.value(tensor), place))

    def _check_tables(self, module: nn.Module) -> None:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and (id(module), name) not in self._named:
                raise CaptureError(
                    f"the step gives the module a new parameter or buffer {name!r}",
                    at=f"{type(module).__name__}, {self.state.name(module, name)}",
                    hint="register it before the step",
                )

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
            line = self.stepped.get(id(place.optimizer), "")
            raise CaptureError(
                f"the optimizer keeps {place.key!r} as a Python value that changes in every step",
                at=", ".join(filter(None, (line, type(place.optimizer).__name__, slot.name))),
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
        if slot in self.places and self._is_input(slot, node):
            return
        if slot in self.places and node.meta["type"] != self.tracer.type_of(slot):
            raise CaptureError(
                f"the step changes the type of {slot} from {self.tracer.type_of(slot)} to {node.meta['type']}",
                at=node.meta["source"] or None,
                hint="write into it (copy_), or give it the type before the step",
            )
        self.results.append((Result(slot.name, slot), node, place))

    def _is_input(self, slot: Slot, node: fx.Node) -> bool:
        return node.op == "placeholder" and self.tracer.slot_of(node) == slot

    def _finish(self, returned: Any) -> Captured:
        graph = self.tracer.graph
        graph.output(tuple(node for _, node, _ in self.results))
        prune(graph)
        program = Program(
            name=name_of(self.function),
            mesh=self.mesh,
            graph=graph,
            slots=tuple(self.tracer.slots),
            results=tuple(result for result, _, _ in self.results),
            constants=dict(self.tracer.constants),
        )
        places = self.places | {slot: ConstantPlace(t) for slot, t in self.tracer.constants.items()}
        places |= {slot: SeedPlace(self.seed, device) for slot, (device, _) in self.tracer.seeds.items()}
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
            attributes=self.attributes,
            questions=tuple(self.tracer.questions.values()),
            afterwards=tuple(self.schedules.noted),
            creates_state=any(
                result.slot and result.slot not in known and not isinstance(place, AttributePlace)
                for result, _, place in self.results
            ),
        )
