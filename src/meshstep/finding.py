"""Finds a plan: candidates of every axis, each lowered and costed, the fastest that fits.

Programs with repeated layers are costed on two short ones, with two and with three of the equal layers: what one more
costs is what each of the others costs.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .errors import PlanError
from .ir.program import Program
from .layout import REPLICATE
from .partition import partition
from .passes import EAGER, Pipeline
from .passes.liveness import memory
from .passes.timeline import timeline
from .phases import Placements
from .plan import hardware
from .plan.candidates import by_hand, with_sequence
from .plan.decide import decide
from .plan.fold import Row, fold, rows, shared_names
from .plan.free import find_free, options
from .plan.hardware import Hardware
from .plan.plan import AxisPlan, Plan
from .plan.search import Search, Tried, fastest, ranked
from .plan.state import named_placements

Arguments = Callable[[Plan], Placements]  # the placements of the arguments under a plan
EVERY = 10_000  # calls: as many are costed in all before whole products of candidates are given up
_Cost = tuple[float, int]


def find_plan(
    program: Program, plan: Plan, arguments: Arguments, *, any_batch: bool, passes: Pipeline | None = None
) -> Search:
    """The fastest plan that fits, for the axes that `plan` says nothing about.

    Args:
        program: A global program.
        plan: One that asks for a search; the plans of axes in it are kept.
        arguments: Gives the placements of the arguments under a plan.
        any_batch: Whether the batch may be whole along an axis; else every rank has rows of its own, as it is called.
        passes: As for `local_program`.

    Raises:
        PlanError: Nothing fits the memory, or the plan not the mesh.
    """
    assert plan.auto is not None
    plan.check(program.mesh)
    began = time.perf_counter()
    times = hardware.get(plan.auto.device or "cpu")
    finding = _Finding(program, plan, arguments, any_batch, passes or EAGER, times)
    tried = ranked(finding.run())
    return Search(
        fastest(tried, plan.auto),
        tried,
        plan.auto.memory,
        finding.gap,
        finding.variables,
        sum(row.count - 2 for row in finding.rows),
        time.perf_counter() - began,
    )


@dataclass(slots=True)
class _Finding:
    program: Program
    plan: Plan
    arguments: Arguments
    any_batch: bool
    passes: Pipeline
    hardware: Hardware
    rows: tuple[Row, ...] = ()
    short: tuple[Program, ...] = ()
    gap: float = 0.0
    variables: int = 0
    shared: Mapping[str, str] = field(default_factory=dict)
    costs: dict[Plan, Tried] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = rows(self.program)
        self.short = tuple(fold(self.program, self.rows, keep) for keep in (2, 3)) if self.rows else (self.program,)
        self.shared = shared_names(self.program)

    @property
    def memory(self) -> int | None:
        """The bound on the bytes of a rank."""
        return self.plan.auto.memory if self.plan.auto else None

    def run(self) -> list[Tried]:
        axes = self.plan.asked(self.program.mesh)
        choices = {axis: self._candidates(axis) for axis in axes}
        for combined in self._products(choices):
            self._try(combined)
        return list(self.costs.values())

    def _products(self, choices: dict[str, tuple[AxisPlan, ...]]) -> Iterator[tuple[AxisPlan, ...]]:
        """All products, if the program is small enough; else one axis after another, the others as they are best."""
        count = math.prod(map(len, choices.values()))
        if count * len(self.short[-1].calls) <= EVERY or len(choices) < 2:
            yield from itertools.product(*choices.values())
            return
        best = {axis: plans[-1] for axis, plans in choices.items()}
        for axis in reversed(choices):
            products = [tuple((best | {axis: plan}).values()) for plan in choices[axis]]
            yield from products
            best[axis] = self._best(products)[axis]

    def _best(self, products: Sequence[tuple[AxisPlan, ...]]) -> Plan:
        tried = [found for p in products if (found := self.costs.get(self._joined(p))) is not None]
        fitting = [t for t in tried if self._fits(t)]
        return ranked(fitting)[0].plan if fitting else min(tried, key=lambda t: t.memory).plan

    def _fits(self, tried: Tried) -> bool:
        return self.memory is None or tried.memory <= self.memory

    def _joined(self, found: Sequence[AxisPlan]) -> Plan:
        own = {axis.axis: axis for axis in (*self.plan.axes, *found)}
        return Plan(tuple(own[axis] for axis in self.program.mesh))

    # ---- candidates

    def _candidates(self, axis: str) -> tuple[AxisPlan, ...]:
        bounds = [None] if self.memory is None else [None, self.memory / 2]
        free = [p for bound in bounds for p in self._free(axis, 0, bound)]
        if self.any_batch:
            whole = [p for bound in bounds for p in self._free(axis, None, bound)]
            free += whole + [p for plan in whole if (p := with_sequence(self.program, plan, self.shared)) is not None]
        return tuple(dict.fromkeys((*by_hand(self.program, axis), *free)))

    def _free(self, axis: str, batch_dim: int | None, state_bytes: float | None) -> Iterator[AxisPlan]:
        """What a 0/1 program finds, with the other axes as data parallel, unless a plan of theirs is given."""
        program = self.short[-1]
        mesh = program.mesh
        given = {plan.axis: plan for plan in self.plan}
        others = {a: given.get(a, AxisPlan(a, "data_parallel", batch_dim=0)) for a in mesh if a != axis}
        plan = Plan(tuple(others.get(a, AxisPlan(a, "auto", batch_dim=batch_dim)) for a in mesh))
        if mesh[axis] == 1:
            return
        places = self.arguments(plan)
        named = named_placements(program, plan)
        may = options(program, mesh[axis])
        for other in others:
            if mesh[other] > 1:
                decision, _ = decide(program, plan[other], places(other), named=named, hardware=self.hardware)
                program = partition(program, decision)
        inputs = [places(axis).get(slot, REPLICATE) for slot in program.slots]
        try:
            found = find_free(
                program, axis, inputs, may, self.shared, self.hardware, batch_dim=batch_dim, state_bytes=state_bytes
            )
        except PlanError:  # along this axis alone the state cannot be that small
            return
        self.gap, self.variables = max(self.gap, found.gap), self.variables + found.variables
        yield found.plan

    # ---- costs

    def _try(self, found: Sequence[AxisPlan]) -> None:
        plan = self._joined(found)
        if plan in self.costs:
            return
        costs = [self._cost(program, plan) for program in self.short]
        us, held = costs[0]
        if self.rows:
            more = [row.count - 2 for row in self.rows]
            # rows grow together: what one more layer of each costs is shared by their counts
            times = sum(more) / len(more)
            us += times * max(0.0, costs[1][0] - us)
            held += round(times * max(0, costs[1][1] - held))
        self.costs[plan] = Tried(plan, us, held)

    def _cost(self, program: Program, plan: Plan) -> _Cost:
        places, named = self.arguments(plan), named_placements(program, plan)
        for axis in program.mesh.axes:
            decision, _ = decide(program, plan[axis], places(axis), named=named)
            program = partition(program, decision)
        program = self.passes(program)
        return timeline(program, self.hardware).total, memory(program).peak
