"""When each call of a local program would run: what is computed, and what is sent meanwhile."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from .._torch import OpOverload
from ..ir.collectives import COLLECTIVES, SENDS_NOTHING, axis_of, bytes_sent
from ..ir.program import Program, is_part
from ..ir.types import TensorType
from ..mesh import Mesh
from ..plan.flops import flops
from ..plan.hardware import Hardware, computed_in
from .liveness import views
from .state import in_place

aten = torch.ops.aten

# What Inductor computes in the kernel of the elementwise calls that it reads.
_REDUCTIONS = frozenset({aten.sum, aten.mean, aten.amax, aten.amin, aten.var_mean, aten.native_layer_norm})


@dataclass(frozen=True, slots=True)
class Event:
    """One call.

    Args:
        node: The call.
        lane: "compute" or "communication".
        start: When it begins, in us.
        end: When it is done, in us.
        bytes: What a rank sends.
        exposed: Time during which it is sent and nothing is computed, in us.
    """

    node: fx.Node
    lane: str
    start: float
    end: float
    bytes: int = 0
    exposed: float = 0.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step of one rank.

    Args:
        events: In the order of the program.
        total: From the first call to the end of the last, in us.
        compute: Sum over what is computed, in us.
        communication: Sum over what is sent, in us.
        exposed: The part of that during which nothing is computed, in us.
    """

    events: tuple[Event, ...]
    total: float
    compute: float
    communication: float
    exposed: float

    def __str__(self) -> str:
        """`1.5 ms a step: 1.2 ms computed, 0.6 ms sent, of which 0.3 ms exposed`."""
        parts = (self.total, self.compute, self.communication, self.exposed)
        return "{:.4g} ms a step: {:.4g} ms computed, {:.4g} ms sent, of which {:.4g} ms exposed".format(
            *(part / 1e3 for part in parts)
        )


def timeline(program: Program, hardware: Hardware, backend: str = "eager") -> Timeline:
    """The predicted step.

    Calls are computed one after another in the order of the program, each when its inputs are there. A collective is
    launched when the calls before it are done, and waited for at its first use; those of one axis are sent one after
    another, those of different axes at once, as each axis has a process group of its own. Views cost nothing.

    Args:
        program: A local program, scheduled.
        hardware: Gives the times.
        backend: "inductor" keeps what elementwise calls make in registers if only elementwise calls and reductions read
            it: it is neither written nor read, and what reads it has no launch of its own.
    """
    costs = _Costs(program, hardware, fused=_fused(program) if backend == "inductor" else frozenset())
    free = dict.fromkeys(("", *program.mesh.axes), 0.0)  # when each lane is; "" computes
    ready: dict[fx.Node, float] = {}
    events: list[Event] = []
    for node in program.graph.nodes:
        ready[node] = max((ready[before] for before in node.all_input_nodes), default=0.0)
        if node.op != "call_function" or is_part(node) or node in costs.views:
            continue
        axis = axis_of(node.target, node.args) if _sends(node) else ""
        start = max(free[axis], ready[node], free[""])
        size, time = costs.sending(node, axis) if axis else (0, costs.computing(node))
        ready[node] = free[axis] = start + time
        events.append(Event(node, "communication" if axis else "compute", start, start + time, size))
    return _timeline(_exposed(events))


def stride(mesh: Mesh, axis: str) -> int:
    """How far apart the ranks of an axis are: the product of the sizes of the axes further inside."""
    return math.prod(mesh[inner] for inner in mesh.axes[mesh.axes.index(axis) + 1 :])


def _sends(node: fx.Node) -> bool:
    return node.target in COLLECTIVES and node.target not in SENDS_NOTHING


@dataclass(slots=True, eq=False)
class _Costs:
    """Times of the calls of a program.

    Args:
        program: The program.
        hardware: Gives the times.
        fused: The calls whose values are never in memory.
        views: Those that share the memory of what they read.
        joined: Those that run in the kernel of an earlier one: updates of optimizers, which lowering puts into lists.
    """

    program: Program
    hardware: Hardware
    fused: frozenset[fx.Node]
    views: frozenset[fx.Node] = field(init=False)
    joined: frozenset[fx.Node] = field(init=False)

    def __post_init__(self) -> None:
        self.views = views(self.program)
        found = in_place(self.program)
        self.joined = frozenset((*list(found.updates)[1:], *list(found.counters)[1:]))

    def sending(self, node: fx.Node, axis: str) -> tuple[int, float]:
        sent, mesh = node.all_input_nodes[0].meta["type"].nbytes, self.program.mesh
        time = self.hardware.collective(node.target, sent, mesh[axis], stride(mesh, axis))
        return bytes_sent(node.target, sent, mesh[axis]), time

    def computing(self, node: fx.Node) -> float:
        outputs = _types(node)
        inputs = [type_ for before in node.all_input_nodes for type_ in _types(before) if type_ is not None]
        work = flops(node.target, node.args, node.kwargs, node.meta["type"])
        time = self.hardware.op(work, self._moved(node), computed_in(inputs, outputs))
        inside = node in self.joined or any(before in self.fused for before in node.all_input_nodes)
        return time - self.hardware.launch if inside else time

    def _moved(self, node: fx.Node) -> int:
        """Bytes to and from memory; of a lookup, the rows and not the table."""
        written = 0 if node in self.fused else _bytes(node)
        read = [n for n in node.all_input_nodes if n not in self.fused]
        if _picks(node):
            return 2 * written + sum(_bytes(n) for n in read[1:])
        return written + sum(map(_bytes, read))


def _picks(node: fx.Node) -> bool:
    """Whether a call reads as much of its first input as it writes."""
    packet = node.target.overloadpacket if isinstance(node.target, OpOverload) else None
    return packet in (aten.embedding, aten.index_select, aten.gather, aten.index, aten.slice)


def _bytes(node: fx.Node) -> int:
    return sum(type_.nbytes for type_ in _types(node) if type_ is not None)


def _types(node: fx.Node) -> tuple[TensorType | None, ...]:
    types: Any = node.meta["type"]
    return types if isinstance(types, tuple) else (types,)


def _fused(program: Program) -> frozenset[fx.Node]:
    """The elementwise calls that only elementwise calls and reductions read."""
    return frozenset(
        node
        for node in program.calls
        if _is_pointwise(node) and all(_is_pointwise(user) or _reduces(user) for user in node.users)
    )


def _is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def _reduces(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.overloadpacket in _REDUCTIONS


def _exposed(events: Iterable[Event]) -> tuple[Event, ...]:
    """The events, each that sends with the time during which nothing is computed.

    While collectives of two axes are sent at once, the time is the one's that was launched first.
    """
    events = tuple(events)
    taken = sorted((event.start, event.end) for event in events if event.lane == "compute")
    sends = sorted((i for i, e in enumerate(events) if e.lane == "communication"), key=lambda i: events[i].start)
    found, sent = list(events), 0.0
    first = 0
    for i in sends:
        start, end = max(events[i].start, sent), events[i].end
        while first < len(taken) and taken[first][1] <= start:
            first += 1
        found[i] = replace(events[i], exposed=max(0.0, end - start) - _busy(start, end, taken[first:]))
        sent = max(sent, end)
    return tuple(found)


def _busy(start: float, end: float, taken: Sequence[tuple[float, float]]) -> float:
    """How long something is computed between two times."""
    busy = 0.0
    for begin, done in taken:
        if begin >= end:
            break
        busy += max(0.0, min(end, done) - max(start, begin))
    return busy


def _timeline(events: tuple[Event, ...]) -> Timeline:
    spent = dict.fromkeys(("compute", "communication"), 0.0)
    for event in events:
        spent[event.lane] += event.end - event.start
    total = max((event.end for event in events), default=0.0)
    return Timeline(events, total, spent["compute"], spent["communication"], sum(event.exposed for event in events))
