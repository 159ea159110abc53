"""When each call of a local program would run: what is computed, and what is sent meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from ..ir.collectives import COLLECTIVES, SENDS_NOTHING, axis_of, bytes_sent
from ..ir.program import Program, is_part
from ..ir.types import TensorType
from ..plan.cost import Hardware
from .liveness import may_be_view


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


def timeline(program: Program, hardware: Hardware) -> Timeline:
    """The predicted step.

    Calls are computed one after another in the order of the program, each when its inputs are there. A collective is
    launched when the calls before it are done, and sent after those launched before it.

    Args:
        program: A local program, scheduled.
        hardware: Gives the times.
    """
    free = {"compute": 0.0, "communication": 0.0}  # when each lane is
    ready: dict[fx.Node, float] = {}
    events: list[Event] = []
    for node in program.graph.nodes:
        ready[node] = max((ready[before] for before in node.all_input_nodes), default=0.0)
        if node.op != "call_function" or is_part(node):
            continue
        sends = node.target in COLLECTIVES and node.target not in SENDS_NOTHING
        lane = "communication" if sends else "compute"
        start = max(free[lane], ready[node], free["compute"])
        size, time = _sending(node, program, hardware) if sends else (0, _computing(node, hardware))
        ready[node] = free[lane] = start + time
        events.append(Event(node, lane, start, start + time, size))
    return _timeline(_exposed(events))


def _sending(node: fx.Node, program: Program, hardware: Hardware) -> tuple[int, float]:
    sent: TensorType = node.all_input_nodes[0].meta["type"]
    size = bytes_sent(node.target, sent.nbytes, program.mesh[axis_of(node.target, node.args)])
    return size, hardware.latency + size / hardware.link


def _computing(node: fx.Node, hardware: Hardware) -> float:
    if may_be_view(node):
        return 0.0
    inputs = [type_ for before in node.all_input_nodes for type_ in _types(before) if type_ is not None]
    return hardware.computation(node.target, inputs, _types(node), 1)


def _types(node: fx.Node) -> tuple[TensorType | None, ...]:
    types = node.meta["type"]
    return types if isinstance(types, tuple) else (types,)


def _exposed(events: Iterable[Event]) -> tuple[Event, ...]:
    """The events, each that sends with the time during which nothing is computed."""
    events = tuple(events)
    computed = [(event.start, event.end) for event in events if event.lane == "compute"]
    found, first = list[Event](), 0
    for event in events:
        if event.lane == "compute":
            found.append(event)
            continue
        while first < len(computed) and computed[first][1] <= event.start:
            first += 1
        found.append(replace(event, exposed=event.end - event.start - _busy(event, computed, first)))
    return tuple(found)


def _busy(event: Event, computed: Sequence[tuple[float, float]], first: int) -> float:
    """How long something is computed during an event; no span before `first` reaches it."""
    busy = 0.0
    for start, end in (computed[i] for i in range(first, len(computed))):
        if start >= event.end:
            break
        busy += min(end, event.end) - max(start, event.start)
    return busy


def _timeline(events: tuple[Event, ...]) -> Timeline:
    spent = dict.fromkeys(("compute", "communication"), 0.0)
    for event in events:
        spent[event.lane] += event.end - event.start
    total = max((event.end for event in events), default=0.0)
    return Timeline(events, total, spent["compute"], spent["communication"], sum(event.exposed for event in events))
