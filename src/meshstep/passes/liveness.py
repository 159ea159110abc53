"""What a local program holds in memory, call by call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import OpOverload, storage_id
from ..ir.collectives import COLLECTIVES, SENDS_NOTHING
from ..ir.program import Program, SlotKind, is_part
from ..ir.types import TensorType, bytes_text
from .state import in_place

aten = torch.ops.aten

_FIXED = {
    SlotKind.PARAMETER: "parameters",
    SlotKind.BUFFER: "buffers",
    SlotKind.GRADIENT: "gradients",
    SlotKind.OPTIMIZER_STATE: "optimizer_state",
}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank, at the call where most are held.

    Counted are the tensors of the program, without what an allocator loses, kernels take for themselves, or Python and
    the libraries hold.

    Args:
        parameters: Of this rank's parts of parameters.
        buffers: Of buffers.
        gradients: Of gradients that outlive the step.
        optimizer_state: Of optimizer state.
        arguments: Of arguments, constants and live numbers, held during the whole call.
        activations: Of what the forward has made and the backward still needs.
        temporaries: Of all else that is computed: gradients, buckets, gathered parameters, results.
        at: The call, with the user's line.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    arguments: int
    activations: int
    temporaries: int
    at: str

    @property
    def state(self) -> int:
        """What is held between calls."""
        return self.parameters + self.buffers + self.gradients + self.optimizer_state

    @property
    def peak(self) -> int:
        """All together."""
        return self.state + self.arguments + self.activations + self.temporaries

    def __str__(self) -> str:
        """`12 MiB a rank: 4 MiB parameters, ...; most at %mm (model.py:3)`."""
        names = ("parameters", "buffers", "gradients", "optimizer_state", "arguments", "activations", "temporaries")
        parts = [f"{bytes_text(getattr(self, n))} {n.replace('_', ' ')}" for n in names if getattr(self, n)]
        return f"{bytes_text(self.peak)} a rank: {', '.join(parts)}; most at {self.at}"


@dataclass(slots=True)
class _Storage:
    """Memory that one call makes, and that views share.

    Args:
        bytes: How much.
        born: When it is made.
        last: When it is last used.
        forward: Whether the forward makes it.
        for_backward: Whether a backward uses it.
    """

    bytes: int
    born: int
    last: int
    forward: bool
    for_backward: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """What is held at each call.

    Args:
        nodes: The calls, in order.
        activations: Bytes of what the forward made and a backward still needs, at each.
        temporaries: Bytes of all else that the program has made, at each.
    """

    nodes: tuple[fx.Node, ...]
    activations: tuple[int, ...]
    temporaries: tuple[int, ...]

    @property
    def top(self) -> int:
        """The index of the call where most is held."""
        both = [a + t for a, t in zip(self.activations, self.temporaries, strict=True)]
        return both.index(max(both)) if both else 0


def memory(program: Program) -> Memory:
    """What a rank holds at most.

    Args:
        program: A local program, scheduled: the order of its calls is the one in which they run.
    """
    fixed = dict.fromkeys((*_FIXED.values(), "arguments"), 0)
    for slot, node in program.inputs:
        fixed[_FIXED.get(slot.kind, "arguments")] += node.meta["type"].nbytes
    curve = live_bytes(program)
    if not curve.nodes:
        return Memory(**fixed, activations=0, temporaries=0, at="the start")
    top = curve.top
    node = curve.nodes[top]
    line = node.meta.get("source", "")
    at = f"%{node.name}" + (f" ({line})" if line else "")
    return Memory(**fixed, activations=curve.activations[top], temporaries=curve.temporaries[top], at=at)


def live_bytes(program: Program) -> Curve:
    """The bytes that are held while each call runs, apart from the inputs.

    A view shares the memory of what it is of; a collective holds what it sends until its result is first used; new
    state that replaces the old is held until the end, where it is copied, unless it is computed where the old one lies.
    """
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    storages = _Storages(program, calls).found
    steps = [(0, 0)] * (len(calls) + 1)
    for storage in storages:
        kind = storage.forward and storage.for_backward
        for when, amount in ((storage.born, storage.bytes), (storage.last + 1, -storage.bytes)):
            a, t = steps[when]
            steps[when] = (a + amount, t) if kind else (a, t + amount)
    activations, temporaries, now = [], [], (0, 0)
    for step in steps[: len(calls)]:
        now = (now[0] + step[0], now[1] + step[1])
        activations.append(now[0])
        temporaries.append(now[1])
    return Curve(tuple(calls), tuple(activations), tuple(temporaries))


def views(program: Program) -> frozenset[fx.Node]:
    """The calls whose values lie in the memory of what they read: those compute nothing."""
    return frozenset(_Storages(program, [node for node in program.graph.nodes if node.op == "call_function"]).views)


def held_at(program: Program, place: int) -> tuple[tuple[fx.Node, int, bool], ...]:
    """What is held while a call runs, apart from the inputs: what made it, its bytes, and whether it is an activation.

    Args:
        program: As for `live_bytes`.
        place: The index of the call, as `Curve.nodes` has it.
    """
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    return tuple(
        (calls[storage.born], storage.bytes, storage.forward and storage.for_backward)
        for storage in _Storages(program, calls).found
        if storage.born <= place <= storage.last
    )


@dataclass(slots=True, eq=False)
class _Storages:
    """Finds who makes memory, who shares it, and when it is free.

    Views are run on meta tensors: whether a reshape is one depends on strides.
    """

    program: Program
    calls: list[fx.Node]
    found: list[_Storage] = field(default_factory=list)
    views: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        done_in_place = in_place(self.program)
        place = {node: i for i, node in enumerate(self.calls)}
        held: dict[fx.Node, list[_Storage]] = {}  # by node: the memory that its value lies in
        values: dict[fx.Node, Any] = {node: _meta(node.meta["type"]) for node in self.program.placeholders}
        for i, node in enumerate(self.calls):
            for used in node.all_input_nodes:
                self._use(held.get(used, ()), i, bool(node.meta.get("backward")))
            values[node], shared = _value(node, values)
            if shared:
                self.views.add(node)
            if node in done_in_place:
                held[node] = []
            elif shared:
                held[node] = _of_part(node, held) if is_part(node) else held.get(node.args[0], [])  # type: ignore[arg-type]
            else:
                held[node] = self._made(node, i)
            if node.target in COLLECTIVES and node.target not in SENDS_NOTHING:
                awaited = min((place[u] for u in node.users if u in place), default=i)
                for used in node.all_input_nodes:  # what is being sent stays until it is waited for
                    self._use(held.get(used, ()), awaited, False)
        for node in self.program.output_node.all_input_nodes:
            self._use(held.get(node, ()), len(self.calls) - 1, False)

    def _use(self, storages: Any, when: int, by_backward: bool) -> None:
        for storage in storages:
            storage.last = max(storage.last, when)
            storage.for_backward |= by_backward

    def _made(self, node: fx.Node, place: int) -> list[_Storage]:
        types = node.meta["type"] if isinstance(node.meta["type"], tuple) else (node.meta["type"],)
        forward = not node.meta.get("backward")
        made = [_Storage(type_.nbytes if type_ else 0, place, place, forward) for type_ in types]
        self.found += made
        return made


def _of_part(node: fx.Node, held: Mapping[fx.Node, list[_Storage]]) -> list[_Storage]:
    """The memory of one output of several; all of them share one if the call is a view."""
    parts = held[node.args[0]]  # type: ignore[index]
    return [parts[node.args[1]]] if len(parts) > 1 else parts  # type: ignore[index]


def _value(node: fx.Node, values: Mapping[fx.Node, Any]) -> tuple[Any, bool]:
    """A meta tensor of the strides that a value has, and whether it lies in its first argument's memory."""
    if is_part(node):
        return values[node.args[0]][node.args[1]], True  # type: ignore[index]
    if not may_be_view(node):
        types = node.meta["type"]
        return ([_meta(t) for t in types] if isinstance(types, tuple) else _meta(types)), False
    op: Any = _COPIES.get(node.target, node.target)  # type: ignore[call-overload]
    arguments: Any = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    args, kwargs = arguments
    value = op(*args, **kwargs)
    first = value[0] if isinstance(value, (list, tuple)) else value
    return value, storage_id(first) == storage_id(args[0])


def _meta(type_: TensorType | None) -> Tensor | None:
    return None if type_ is None else torch.empty(type_.shape, dtype=type_.dtype, device="meta")


def may_be_view(node: fx.Node) -> bool:
    """Whether the value of a call may lie in the memory of its first argument."""
    op: Any = node.target
    if not isinstance(op, OpOverload) or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    return op in _COPIES or any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


# Lowering makes of a view a reshape, which copies where it must.
_COPIES = {
    aten.reshape.default: aten.reshape.default,
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
    aten.contiguous.default: aten.contiguous.default,
}
