"""Where a plan puts state along its axis."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache

from torch import fx
from torch.distributed.tensor.placement_types import Placement

from ..errors import PlanError
from ..ir.program import STATE_KINDS, Program, Slot, SlotKind
from ..ir.types import TensorType, bytes_text
from ..layout import REPLICATE, blocks, placement_text, shard, shard_dim
from .plan import AxisPlan, Choice, Plan
from .styles import Styles

_FROM_STAGE = {SlotKind.OPTIMIZER_STATE: 1, SlotKind.GRADIENT: 2, SlotKind.PARAMETER: 3}
_OTHER_SHAPE = "not of its parameter's shape"
Named = Mapping[str, Mapping[str, Placement]]  # of parameters that are computed with as they lie: by axis, then name


@dataclass(frozen=True, slots=True)
class StatePlaces:
    """The state of a program along one axis.

    Args:
        placements: The placement of every slot of state, existing or new.
        whole: State that was to be sharded and of which no dim divides.
        reasons: Why each lies so, in words.
    """

    placements: Mapping[Slot, Placement] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    reasons: Mapping[Slot, str] = field(default_factory=dict)


def named_placements(program: Program, plan: Plan) -> Named:
    """The placements of parameters that the plans of axes name, of those that are computed with as they lie.

    Args:
        program: Partitioned along no axis.
        plan: The plans.

    Raises:
        PlanError: A pattern fits nothing, or what it says cannot be.
    """
    styles, found = Styles(program), dict[str, dict[str, Placement]]()
    for axis in plan:
        _check_patterns(program, axis)
        _check_decided(program, axis)
        size, named, decided = program.mesh[axis.axis], dict[str, Placement](), dict(axis.state)
        for slot, node in program.inputs:
            if axis.in_place and slot.kind is SlotKind.PARAMETER and str(slot) in decided:
                if shard_dim(decided[str(slot)]) is not None and not is_stored(axis, slot.name):
                    named[slot.name] = decided[str(slot)]
                continue
            choice = choice_of(axis, slot.name) if slot.kind is SlotKind.PARAMETER and axis.in_place else None
            if isinstance(choice, Placement):
                named[slot.name] = _fitting(choice, node.meta["type"], slot, axis, size)
            elif choice in ("colwise", "rowwise"):
                named[slot.name] = styles.placement(node, str(choice), slot.name, axis.axis, size)
        found[axis.axis] = named
    return found


def place_state(program: Program, plan: AxisPlan, named: Named) -> StatePlaces:
    """The placement of all state along the plan's axis.

    As the plan has decided before; else as it names it; else sharded on the first dim that divides evenly and that no
    other axis computes with, if the plan shards state of that kind; else whole.

    Args:
        program: Not yet partitioned along the axis.
        plan: The plan of the axis.
        named: See `named_placements`.

    Raises:
        PlanError: A named placement cannot be.
    """
    return _Placing(program, plan, named).run()


def is_stored(plan: AxisPlan, parameter: str) -> bool:
    """Whether the state of a parameter is sharded only to be kept, in a plan that computes with others as they lie."""
    choice = choice_of(plan, parameter)
    return isinstance(choice, int) or (choice is None and plan.stage > 0)


def computed_in_place(program: Program, plan: AxisPlan) -> frozenset[Slot]:
    """The state that is computed with as it lies, if it is sharded.

    Args:
        program: The program.
        plan: The plan of an axis.
    """
    if not plan.in_place:
        return frozenset()
    slots = [slot for slot in program.slots if slot.kind in STATE_KINDS]
    parameters = {s.name: node.meta["type"] for s, node in program.inputs if s.kind is SlotKind.PARAMETER}
    owners = {slot: owner_of(slot, parameters) for slot in slots}
    return frozenset(slot for slot, owner in owners.items() if owner is None or not is_stored(plan, owner))


class _Placing:
    def __init__(self, program: Program, plan: AxisPlan, named: Named) -> None:
        self.program, self.plan, self.size = program, plan, program.mesh[plan.axis]
        self.named = named.get(plan.axis, {})
        self.others = [places for axis, places in named.items() if axis != plan.axis]
        self.decided = dict(plan.state)
        self.types = {slot: node.meta["type"] for slot, node in _state(program)}
        self.parameters = {slot.name: type_ for slot, type_ in self.types.items() if slot.kind is SlotKind.PARAMETER}
        self.whole: list[str] = []

    def run(self) -> StatePlaces:
        found = {slot: self._place(slot, type_) for slot, type_ in self.types.items()}
        placements = {slot: placement for slot, (placement, _) in found.items()}
        return StatePlaces(placements, tuple(self.whole), {slot: reason for slot, (_, reason) in found.items()})

    def _place(self, slot: Slot, type_: TensorType) -> tuple[Placement, str]:
        """The placement of a slot, and why."""
        decided = self.decided.get(str(slot))
        if decided is not None:
            return _fitting(decided, type_, slot, self.plan, self.size), "decided by the plan that was given"
        owner = owner_of(slot, self.parameters)
        if owner is None:
            return REPLICATE, "belongs to no parameter"
        if self.size == 1:
            return REPLICATE, "there is one rank along this axis"
        if owner in self.named:
            if type_.shape != self.parameters[owner].shape:
                return REPLICATE, _OTHER_SHAPE
            return self.named[owner], self._said(owner)
        return self._by_stage(slot, type_, owner)

    def _said(self, owner: str) -> str:
        """What the plan says of a parameter, as a reason."""
        said = pattern_of(self.plan, owner)
        assert said is not None
        pattern, choice = said
        text = placement_text(choice) if isinstance(choice, Placement) else str(choice)
        return f"{self.plan.kind} names {pattern!r}: {text}"

    def _by_stage(self, slot: Slot, type_: TensorType, owner: str) -> tuple[Placement, str]:
        choice = choice_of(self.plan, owner)
        stage = choice if isinstance(choice, int) else self.plan.stage
        if stage < _FROM_STAGE.get(slot.kind, 4):
            what = f"{slot.kind.value}s" if stage else "state"
            said = self._said(owner) if isinstance(choice, int) else f"{self.plan.kind} shards no {what}"
            return REPLICATE, said
        if self.parameters[owner].nbytes < self.plan.min_bytes:
            return REPLICATE, f"the parameter is smaller than {bytes_text(self.plan.min_bytes)}"
        if isinstance(choice, Placement):
            if type_.shape != self.parameters[owner].shape:
                return REPLICATE, _OTHER_SHAPE
            return _fitting(choice, type_, slot, self.plan, self.size), self._said(owner)
        taken = {shard_dim(places[owner]) for places in self.others if owner in places}
        fitting = (d for d, n in enumerate(type_.shape) if n and n % self.size == 0 and d not in taken)
        dim = next(fitting, None)
        if dim is not None:
            first = f"{self.plan.kind}: dim {dim} is the first that {self.size} ranks divide"
            return shard(dim), first + _but(taken, dim)
        if type_.ndim:
            self.whole.append(str(slot))
        return REPLICATE, f"no free dim divides by {self.size}" if type_.ndim else "a single number"


def _but(taken: set[int | None], dim: int) -> str:
    """What is said of dims before `dim` that another axis computes with."""
    others = [str(d) for d in sorted(t for t in taken if t is not None) if d < dim]
    return f", and dim {', '.join(others)} is split by another axis" if others else ""


def choice_of(plan: AxisPlan, name: str) -> Choice | None:
    """What a plan says of a parameter or module: the first pattern that fits it, or a module that it is in."""
    said = pattern_of(plan, name)
    return None if said is None else said[1]


def pattern_of(plan: AxisPlan, name: str) -> tuple[str, Choice] | None:
    """The first pattern of a plan that fits a parameter or module, or a module that it is in, with its choice."""
    above = _above(name)
    return next((said for said in plan.patterns if any(fnmatchcase(n, said[0]) for n in above)), None)


@cache
def _above(name: str) -> tuple[str, ...]:
    """`blocks.0.up.weight`, `blocks.0.up`, `blocks.0`, `blocks`."""
    return (name, *_above(name.rpartition(".")[0])) if "." in name else (name,)


def owner_of(slot: Slot, parameters: Mapping[str, TensorType]) -> str | None:
    """The name of the parameter that a slot of state belongs to, itself for one; None if there is none."""
    if slot.kind in (SlotKind.PARAMETER, SlotKind.GRADIENT):
        return slot.name if slot.name in parameters else None
    if slot.kind is not SlotKind.OPTIMIZER_STATE:
        return None
    name = slot.name.rpartition(".")[0]
    while name and name not in parameters:  # several optimizers: their path comes first
        name = name.partition(".")[2]
    return name or None


def _state(program: Program) -> Iterator[tuple[Slot, fx.Node]]:
    """All slots of state, existing ones first, each with a node of its type."""
    yield from ((slot, node) for slot, node in program.inputs if slot.kind in STATE_KINDS)
    existing = set(program.slots)
    for result, node in program.outputs:
        if result.slot is not None and result.slot not in existing and result.slot.kind in STATE_KINDS:
            yield result.slot, node


def _fitting(placement: Placement, type_: TensorType, slot: Slot, plan: AxisPlan, size: int) -> Placement:
    dim = shard_dim(placement)
    if dim is None:
        return placement
    if not 0 <= dim < type_.ndim or type_.shape[dim] % (size * blocks(placement)):
        raise PlanError(
            f"{placement_text(placement)} of a tensor of shape {list(type_.shape)} over {size} ranks",
            at=f"{slot}, axis {plan.axis!r}",
            hint="a dim that divides evenly, or leave it out of the plan: it stays whole",
        )
    return placement


def _check_decided(program: Program, plan: AxisPlan) -> None:
    """See that what was decided is about parameters that there are.

    Raises:
        PlanError: It is about others; says the nearest name.
    """
    known = [str(slot) for slot in program.slots if slot.kind is SlotKind.PARAMETER]
    kind = f"{SlotKind.PARAMETER.value} "
    strange = [name for name, _ in plan.state if name.startswith(kind) and name not in set(known)]
    if strange:
        near = difflib.get_close_matches(strange[0], known, 1)
        raise PlanError(
            f"the plan places {strange[0]}, which the program lacks",
            at=f"{plan.kind} on axis {plan.axis!r}, and {len(strange) - 1} more",
            hint=repr(near[0]) if near else "a plan of this step: step.lower(...).plan",
        )


def _likeness(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _check_patterns(program: Program, plan: AxisPlan) -> None:
    """See that every pattern fits something.

    Raises:
        PlanError: One does not; says the nearest name.
    """
    parameters = [slot.name for slot in program.slots if slot.kind is SlotKind.PARAMETER]
    modules = {node.meta.get("module", "") for node in program.calls}
    known = sorted({above for name in (*parameters, *modules) for above in _above(name)} - {""})
    for pattern, _ in plan.patterns:
        if any(fnmatchcase(name, pattern) for name in known):
            continue
        near = sorted(
            difflib.get_close_matches(pattern, known, 3, 0.3), key=lambda name: (-_likeness(name, pattern), name)
        )
        raise PlanError(
            f"the plan names {pattern!r}, and nothing has such a name",
            at=f"{plan.kind} on axis {plan.axis!r}",
            hint=repr(near[0]) if near else f"one of {', '.join(map(repr, known[:5]))}",
        )
