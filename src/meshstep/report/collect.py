"""Gathers the facts about a lowered step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from ..ir.cause import Cause, Party
from ..ir.collectives import COLLECTIVES, SENDS_NOTHING, axis_of
from ..ir.printer import arguments_text, op_text, type_text, value_text
from ..ir.program import Communication, Program, Slot, SlotKind, is_part, record
from ..ir.types import TensorType, dtype_text
from ..layout import Layout, placement_text
from ..passes.liveness import Curve, held_at, live_bytes, memory
from ..passes.timeline import Event, Timeline, timeline
from ..plan.decision import Stage
from ..plan.hardware import Hardware
from ..plan.plan import Plan
from ..plan.state import owner_of
from .alternatives import Alternatives
from .facts import (
    Alternative,
    Axis,
    Call,
    Collective,
    Device,
    Disagreement,
    Facts,
    Held,
    Memory,
    Parameter,
    Side,
    Time,
)
from .words import does

SHOWN_HELD = 8  # of the values that are held at the peak


def facts(
    local: Program,
    plan: Plan,
    stages: Sequence[Stage],
    hardware: Hardware,
    device: Device,
    *,
    whole: Sequence[tuple[str, int]] = (),
    passes: Sequence[str] = (),
) -> Facts:
    """All that a report says.

    Args:
        local: One rank's program, scheduled.
        plan: With the placement of every value.
        stages: What was decided along each axis; without it nothing is said of alternatives.
        hardware: Gives the times.
        device: What it is.
        whole: Ops without a rule, with their numbers of calls.
        passes: What each pass did.
    """
    found = _Collected(local, plan, stages, hardware)
    return Facts(
        step=local.name,
        ranks=local.mesh.size,
        device=device,
        mesh=tuple(found.axis(axis) for axis in local.mesh),
        time=Time(*(getattr(found.timeline, n) for n in ("total", "compute", "communication", "exposed"))),
        memory=found.memory(device.memory),
        parameters=found.parameters,
        collectives=found.collectives,
        calls=found.calls,
        whole=tuple(whole),
        passes=tuple(passes),
    )


@dataclass(eq=False)
class _Collected:
    """What is found out once and said in several places."""

    local: Program
    plan: Plan
    stages: Sequence[Stage]
    hardware: Hardware
    alternatives: Mapping[str, Alternatives] = field(init=False)

    def __post_init__(self) -> None:
        priced = [stage for stage in self.stages if stage.decision.calls is not None]
        self.alternatives = {stage.decision.axis: Alternatives(stage, self.hardware) for stage in priced}

    @cached_property
    def timeline(self) -> Timeline:
        return timeline(self.local, self.hardware)

    @cached_property
    def events(self) -> Mapping[fx.Node, Event]:
        return {event.node: event for event in self.timeline.events}

    @cached_property
    def curve(self) -> Curve:
        return live_bytes(self.local)

    @cached_property
    def phases(self) -> Mapping[fx.Node, str]:
        """What each call is part of: the update is what comes of gradients, or of the optimizer's own state alone."""
        own = {SlotKind.OPTIMIZER_STATE, SlotKind.HYPERPARAMETER}
        found = {node: "state" if slot.kind in own else "forward" for slot, node in self.local.inputs}
        for node in self.local.graph.nodes:
            if node.op != "call_function":
                continue
            found[node] = _phase(node, {found[before] for before in node.all_input_nodes})
        return found

    # ---- the mesh

    def axis(self, name: str) -> Axis:
        plan = self.plan[name]
        sent = [collective for collective in self.collectives if collective.axis == name]
        place = self.local.mesh.axes.index(name)
        return Axis(
            axis=name,
            size=self.local.mesh[name],
            kind=plan.kind,
            does=does(plan),
            sharded=sum(parameter.placements[place] != "R" for parameter in self.parameters),
            collectives=len(sent),
            bytes=sum(collective.bytes for collective in sent),
            time=sum(collective.time for collective in sent),
            exposed=sum(collective.exposed for collective in sent),
        )

    # ---- memory

    def memory(self, limit: int | None) -> Memory:
        held = memory(self.local)
        parts = {name: getattr(held, name) for name in held.__dataclass_fields__ if name != "at"}
        existing = set(self.local.slots)
        new = [node for result, node in self.local.outputs if result.slot is not None and result.slot not in existing]
        new_state = sum(node.meta["type"].nbytes for node in new)
        return Memory(parts, held.peak, limit, held.at, self._largest(), new_state)

    def _largest(self) -> tuple[Held, ...]:
        """The largest values that are held at the peak."""
        if not self.curve.nodes:
            return ()
        found = sorted(held_at(self.local, self.curve.top), key=lambda held: -held[1])
        return tuple(self._held(*held) for held in found[:SHOWN_HELD] if held[1])

    def _held(self, node: fx.Node, size: int, is_activation: bool) -> Held:
        type_, layout = _first(node)
        return Held(
            value=value_text(node),
            op=op_text(node.target),
            type=type_text(type_, layout, self.local.mesh) if type_ else "",
            bytes=size,
            kind="activations" if is_activation else "temporaries",
            module=node.meta.get("module", ""),
            source=node.meta.get("source", ""),
        )

    # ---- parameters

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        slots = [(slot, node) for slot, node in self.local.inputs if slot.kind is SlotKind.PARAMETER]
        state = self._state_bytes({slot.name: node.meta["type"] for slot, node in slots})
        reasons = {axis.axis: dict(axis.reasons) for axis in self.plan}
        return tuple(self._parameter(slot, node, state[slot.name], reasons) for slot, node in slots)

    def _state_bytes(self, parameters: Mapping[str, TensorType]) -> Counter[str]:
        """Bytes of optimizer state of each parameter; new state too."""
        sizes = Counter[str]()
        for slot, node in self._optimizer_state():
            owner = owner_of(slot, parameters)
            if owner is not None:
                sizes[owner] += node.meta["type"].nbytes
        return sizes

    def _optimizer_state(self) -> Iterator[tuple[Slot, fx.Node]]:
        existing = set(self.local.slots)
        results = ((r.slot, node) for r, node in self.local.outputs if r.slot is not None and r.slot not in existing)
        for slot, node in (*self.local.inputs, *results):
            if slot.kind is SlotKind.OPTIMIZER_STATE:
                yield slot, node

    def _parameter(self, slot: Slot, node: fx.Node, state: int, reasons: Mapping[str, Mapping[str, str]]) -> Parameter:
        type_, layout, mesh = node.meta["type"], node.meta["layout"], self.local.mesh
        shape = layout.global_shape(type_.shape, mesh)
        return Parameter(
            name=slot.name,
            dtype=dtype_text(type_.dtype),
            shape=shape,
            local=type_.shape,
            placements=tuple(placement_text(layout[axis]) for axis in mesh),
            bytes=type_.nbytes,
            state_bytes=state,
            whole_bytes=type_.with_shape(shape).nbytes,
            why=tuple(reasons[axis].get(str(slot), "") for axis in mesh),
        )

    # ---- collectives

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        sends = (n for n in self.local.calls if n.target in COLLECTIVES and n.target not in SENDS_NOTHING)
        return tuple(self._collective(node, record(node, self.local.mesh)) for node in sends)

    def _collective(self, node: fx.Node, sent: Communication) -> Collective:
        event, causes = self.events[node], node.meta.get("causes", ())
        return Collective(
            name=value_text(node),
            kind=sent.kind,
            axis=sent.axis,
            dtype=dtype_text(sent.dtype),
            bytes=sent.bytes,
            values=sent.count,
            start=event.start,
            time=event.end - event.start,
            exposed=event.exposed,
            source=sent.source,
            module=node.meta.get("module", ""),
            phase=self.phases[node],
            why=sent.why,
            causes=tuple(Disagreement(c.value, _side(c.maker), _side(c.user)) for c in causes),
            alternative=self._alternative(causes[0]) if causes else None,
        )

    def _alternative(self, cause: Cause) -> Alternative | None:
        found = self.alternatives.get(cause.axis)
        return None if found is None else found.cheapest(cause)

    # ---- the program

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        held = {n: both for n, *both in zip(self.curve.nodes, self.curve.activations, self.curve.temporaries)}
        return tuple(self._call(node, held[node]) for node in self.local.calls)

    def _call(self, node: fx.Node, held: Sequence[int]) -> Call:
        type_, layout = _first(node)
        event = self.events.get(node)
        sends = node.target in COLLECTIVES and node.target not in SENDS_NOTHING
        return Call(
            name=node.name,
            op=op_text(node.target),
            arguments=arguments_text(node),
            type=type_text(type_, layout, self.local.mesh) if type_ else "",
            layout=str(layout) if type_ else "",
            source=node.meta.get("source", ""),
            module=node.meta.get("module", ""),
            phase=self.phases[node],
            lane=axis_of(node.target, node.args) if sends else "compute",
            start=event.start if event else 0.0,
            time=event.end - event.start if event else 0.0,
            held=(held[0], held[1]),
        )


def _phase(node: fx.Node, before: set[str]) -> str:
    if node.meta.get("backward"):
        return "backward"
    if is_part(node):
        return before.pop()
    if node.meta.get("module"):
        return "forward"  # of another module, perhaps, whose loss is made of what an optimizer has changed
    return "update" if before == {"state"} or before & {"backward", "update"} else "forward"


def _first(node: fx.Node) -> tuple[TensorType | None, Layout]:
    """Type and layout of the first output."""
    types, layouts = node.meta["type"], node.meta["layout"]
    return (types[0], layouts[0]) if isinstance(types, tuple) else (types, layouts)


def _side(party: Party) -> Side:
    return Side(party.what, placement_text(party.placement), party.source, party.module)
