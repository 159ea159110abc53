"""What is cheapest for every parameter along one axis, with nothing pinned: a 0/1 program over state and calls at once.

State is free, too: each parameter, and its optimizer state, has a variable for each placement; equal parameters of
repeated layers share theirs. What comes out is said as a plan: a parameter that is computed with as it lies has its
placement, one that is gathered first the stage 3, one whose optimizer state alone is sharded the stage 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import fx
from torch.distributed.tensor.placement_types import Placement

from ..errors import PlanError
from ..ir.program import Program, Slot, SlotKind
from ..ir.types import TensorType
from ..layout import REPLICATE, blocks, shard, shard_dim
from .calls import Calls
from .choose import _Choice, _Sum
from .cost import Hardware
from .plan import AxisPlan, Choice
from .state import owner_of
from .styles import Styles

GAP = 1e-3  # of the optimum: a thousandth of a step's time is not worth the search for it
Options = Mapping[str, tuple[Placement, ...]]  # of parameters by name


@dataclass(frozen=True, slots=True)
class FreePlan:
    """The plan of an axis that a 0/1 program has found.

    Args:
        plan: The plan.
        gap: How far it may be from the optimum of its model, relatively.
        variables: Number of the model's variables.
    """

    plan: AxisPlan
    gap: float
    variables: int


@dataclass(slots=True)
class _Group:
    """State that lies alike.

    Args:
        placements: What it may lie as, with the variable of each.
    """

    placements: dict[Placement, int] = field(default_factory=dict)


def options(program: Program, size: int) -> Options:
    """The placements that each parameter may have, whole first.

    Args:
        program: A program that is partitioned along no axis.
        size: Number of ranks along the axis.
    """
    styles, found = Styles(program), dict[str, tuple[Placement, ...]]()
    for slot, node in program.inputs:
        if slot.kind is SlotKind.PARAMETER:
            type_: TensorType = node.meta["type"]
            plain = [shard(d) for d, n in enumerate(type_.shape) if n and n % size == 0]
            roles = [p for style in ("colwise", "rowwise") if (p := _role(styles, node, style, slot.name, size))]
            found[slot.name] = tuple(dict.fromkeys([REPLICATE, *roles, *plain]))
    return found


def _role(styles: Styles, node: fx.Node, style: str, name: str, size: int) -> Placement | None:
    try:
        return styles.placement(node, style, name, "", size)
    except PlanError:  # heads or features do not divide: not an option
        return None


def find_free(
    program: Program,
    axis: str,
    inputs: Sequence[Placement],
    may: Options,
    shared: Mapping[str, str],
    hardware: Hardware,
    *,
    batch_dim: int | None,
    state_bytes: float | None = None,
) -> FreePlan:
    """The cheapest plan of an axis.

    Args:
        program: Not yet partitioned along the axis.
        axis: Name of the mesh axis.
        inputs: Placement of each slot; that of parameters and optimizer state is not looked at.
        may: See `options`.
        shared: The pattern of each parameter, see `shared_names`; those of one pattern lie alike.
        hardware: Gives the times.
        batch_dim: The dim of the batch that is split along the axis.
        state_bytes: What the state may take on a rank; None is no bound.

    Raises:
        PlanError: Nothing fits.
    """
    in_play = {blocks(p) for placements in may.values() for p in placements}
    calls = Calls(program, program.mesh[axis], frozenset(in_play) - {0, 1})
    return _Free(program, axis, calls, inputs, may, shared, hardware).find(batch_dim, state_bytes)


class _Free(_Choice):
    def __init__(
        self,
        program: Program,
        axis: str,
        calls: Calls,
        inputs: Sequence[Placement],
        may: Options,
        shared: Mapping[str, str],
        hardware: Hardware,
    ) -> None:
        super().__init__(program, axis, calls, {n: calls.rules(n) for n in program.calls}, inputs, hardware)
        self.size = calls.size
        self.types = {s.name: n.meta["type"] for s, n in program.inputs if s.kind is SlotKind.PARAMETER}
        self.groups: dict[tuple[str, str], _Group] = {}
        self.held: list[tuple[int, float]] = []
        self.whole = 0.0
        self.may, self.shared = may, shared

    def find(self, batch_dim: int | None, state_bytes: float | None) -> FreePlan:
        for slot, node in self.program.inputs:
            group = self._group(slot, node.meta["type"])
            if group is not None:
                self.offers[node, 0] = {p: _Sum((v,)) for p, v in group.placements.items()}
                self._hold(group, node.meta["type"])
        for node in self.program.calls:
            self._declare(node)
        for node in self.program.calls:
            self._connect(node)
        existing = set(self.program.slots)
        for result, node in self.program.outputs:
            group = self._group(result.slot, node.meta["type"]) if result.slot else None
            if group is None:
                self._lie_anyhow(node) if result.slot is None else self._need(node, REPLICATE, _Sum(constant=1))
                continue
            if result.slot not in existing:
                self._hold(group, node.meta["type"])
            for placement, variable in group.placements.items():
                self._need(node, placement, _Sum((variable,)))
        if state_bytes is not None:
            self.model.constrain(self.held, -np.inf, state_bytes - self.whole)
        solution = self.model.solve(GAP)
        return FreePlan(self._plan(solution, batch_dim), self.model.gap, len(self.model.cost))

    def _lie_anyhow(self, node: fx.Node) -> None:
        """A user's output may come back in rows; what is small must be whole."""
        if node.meta["type"].ndim == 0:
            self._need(node, REPLICATE, _Sum(constant=1))

    def _hold(self, group: _Group, type_: TensorType) -> None:
        self.held += [(v, type_.nbytes / (1 if p == REPLICATE else self.size)) for p, v in group.placements.items()]

    def _group(self, slot: Slot, type_: TensorType) -> _Group | None:
        owner = owner_of(slot, self.types)
        if owner is None or owner not in self.may or type_.ndim == 0 or type_.shape != self.types[owner].shape:
            self.whole += type_.nbytes if owner else 0
            return None
        key = (self.shared[owner], "state" if slot.kind is SlotKind.OPTIMIZER_STATE else "parameter")
        group = self.groups.setdefault(key, _Group())
        if not group.placements:
            allowed = self._allowed_placements(owner, type_)
            group.placements = {p: self.model.variable(0.0) for p in allowed}
            self.model.constrain([(v, 1.0) for v in group.placements.values()], 1.0, 1.0)
        return group

    def _allowed_placements(self, owner: str, type_: TensorType) -> tuple[Placement, ...]:
        """Those that divide on what other axes have left of the parameter."""
        return tuple(
            p
            for p in self.may[owner]
            if (dim := shard_dim(p)) is None or type_.shape[dim] % (self.size * blocks(p)) == 0
        )

    def _plan(self, solution: np.ndarray, batch_dim: int | None) -> AxisPlan:
        chosen: dict[str, Choice] = {}
        for name in self.types:
            pattern = self.shared[name]
            if pattern not in chosen:
                chosen[pattern] = self._choice(pattern, name, solution)
        stages = Counter(c for c in chosen.values() if isinstance(c, int))
        stage = max(stages, key=lambda s: (stages[s], -s)) if stages else 0
        patterns = tuple((p, c) for p, c in chosen.items() if c != stage)
        return AxisPlan(
            self.axis,
            "auto",
            batch_dim=batch_dim,
            stage=stage,
            patterns=patterns,
            in_place=any(isinstance(c, Placement) for c in chosen.values()),
            regather=3 in stages,
        )

    def _choice(self, pattern: str, name: str, solution: np.ndarray) -> Choice:
        parameter = self._lies(pattern, "parameter", solution)
        if parameter == REPLICATE:
            return 0 if self._lies(pattern, "state", solution) == REPLICATE else 1
        return 3 if self._is_gathered(name, solution) else parameter

    def _lies(self, pattern: str, kind: str, solution: np.ndarray) -> Placement:
        group = self.groups.get((pattern, kind))
        return REPLICATE if group is None else next(p for p, v in group.placements.items() if solution[v])

    def _is_gathered(self, name: str, solution: np.ndarray) -> bool:
        node = next(n for s, n in self.program.inputs if s.kind is SlotKind.PARAMETER and s.name == name)
        return any(solution[move] for move in self.moves.get(((node, 0), REPLICATE), ()))
