"""Picks one rule for every call, all at once: a 0/1 program solved by HiGHS (`scipy.optimize.milp`).

Variables: one for each open (call, rule), and one for each (value, from, to) redistribution, which all consumers of the
value share. A consumer that wants a placement needs the producer to give it or a redistribution that makes it. The
objective is time (`cost.py`); of equal choices, the one that reduces late is taken: a loss rides along with gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix
from torch import fx
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from ..errors import PlanError
from ..ir.program import Program, producer
from ..ir.types import TensorType
from ..rules import Rule
from .calls import Calls
from .cost import Hardware, shrinks
from .decision import Decision

Value = tuple[fx.Node, int]
LATE = 1e-3  # us: what it is worth to carry a partial value through one more call


@dataclass(slots=True)
class _Sum:
    """A sum of 0/1 variables and a constant."""

    variables: tuple[int, ...] = ()
    constant: int = 0


@dataclass(slots=True)
class _Model:
    cost: list[float] = field(default_factory=list)
    rows: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    gap: float = 0.0  # how far the solution may be from the optimum, relatively

    def variable(self, cost: float) -> int:
        self.cost.append(cost)
        return len(self.cost) - 1

    def constrain(self, row: Sequence[tuple[int, float]], low: float, high: float) -> None:
        self.rows.append(tuple(row))
        self.low.append(low)
        self.high.append(high)

    def solve(self, gap: float = 0.0) -> np.ndarray:
        """The cheapest values, at most the relative `gap` from the optimum.

        Raises:
            PlanError: There are none.
        """
        if not self.cost:
            return np.zeros(0)
        entries = [(i, j, v) for i, row in enumerate(self.rows) for j, v in row]
        rows, columns, values = zip(*entries, strict=True)
        matrix = csr_matrix((values, (rows, columns)), shape=(len(self.rows), len(self.cost)))
        found = milp(
            np.array(self.cost),
            constraints=LinearConstraint(matrix, self.low, self.high),
            integrality=np.ones(len(self.cost)),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": gap},
        )
        if found.x is None:
            raise PlanError("no placement of the program fits the plan", hint="replicate more, or another mesh")
        self.gap = float(found.mip_gap or 0.0)
        return found.x > 0.5


def choose(
    program: Program,
    axis: str,
    calls: Calls,
    allowed: Mapping[fx.Node, Sequence[Rule]],
    inputs: Sequence[Placement],
    outputs: Sequence[Placement],
    hardware: Hardware,
) -> Decision:
    """The cheapest rules.

    Args:
        program: The program, global along `axis`.
        axis: Name of the mesh axis.
        calls: Its calls.
        allowed: The rules open for each call.
        inputs: Placement of each slot.
        outputs: Placement that each result must have.
        hardware: Gives the times.

    Raises:
        PlanError: No choice gives the outputs their placements.
    """
    return _Choice(program, axis, calls, allowed, inputs, hardware).run(outputs)


class _Choice:
    def __init__(
        self,
        program: Program,
        axis: str,
        calls: Calls,
        allowed: Mapping[fx.Node, Sequence[Rule]],
        inputs: Sequence[Placement],
        hardware: Hardware,
    ) -> None:
        self.program, self.axis, self.calls, self.hardware = program, axis, calls, hardware
        self.allowed, self.inputs = allowed, tuple(inputs)
        self.model = _Model()
        self.variables: dict[fx.Node, list[int]] = {}
        self.offers: dict[Value, dict[Placement, _Sum]] = {
            (node, 0): {placement: _Sum(constant=1)}
            for node, placement in zip(program.placeholders, inputs, strict=True)
        }
        self.moves: dict[tuple[Value, Placement], list[int]] = {}

    def run(self, outputs: Sequence[Placement]) -> Decision:
        for node in self.program.calls:
            self._declare(node)
        for node in self.program.calls:
            self._connect(node)
        for (_, node), placement in zip(self.program.outputs, outputs, strict=True):
            self._need(node, placement, _Sum(constant=1))
        solution = self.model.solve()
        return Decision(self.axis, self.inputs, tuple(outputs), self._rules(solution))

    def _declare(self, node: fx.Node) -> None:
        """A variable for each open rule, and what the call offers."""
        rules = self.allowed[node]
        if len(rules) > 1:
            self.variables[node] = [self.model.variable(self._cost(node, rule)) for rule in rules]
            self.model.constrain([(v, 1.0) for v in self.variables[node]], 1.0, 1.0)
        for index in range(len(rules[0].outputs)):
            offer: dict[Placement, _Sum] = {}
            for k, rule in enumerate(rules):
                placement = rule.outputs[index]
                if placement is None:
                    continue
                taken = _Sum((self.variables[node][k],)) if node in self.variables else _Sum(constant=1)
                before = offer.get(placement, _Sum())
                offer[placement] = _Sum(before.variables + taken.variables, before.constant + taken.constant)
            self.offers[node, index] = offer

    def _cost(self, node: fx.Node, rule: Rule) -> float:
        call = self.calls.call(node)
        parts = shrinks((*rule.inputs, *rule.outputs), self.calls.size)
        late = LATE * sum(isinstance(p, Partial) for p in rule.inputs)
        return self.hardware.computation(node.target, call.tensors, call.outputs, parts) - late

    def _connect(self, node: fx.Node) -> None:
        """Every wanted placement of every input must be there."""
        for position, value in enumerate(self.calls.tensors(node)):
            wanted: dict[Placement, list[int]] = {}
            for k, rule in enumerate(self.allowed[node]):
                wanted.setdefault(rule.inputs[position], []).append(k)
            for placement, which in wanted.items():
                if node in self.variables:
                    self._need(value, placement, _Sum(tuple(self.variables[node][k] for k in which)))
                else:
                    self._need(value, placement, _Sum(constant=1))

    def _need(self, node: fx.Node, placement: Placement, wanted: _Sum) -> None:
        value = producer(node)
        given = self.offers[value].get(placement, _Sum())
        if given.constant:
            return
        row = [(v, 1.0) for v in wanted.variables]
        row += [(v, -1.0) for v in (*given.variables, *self._moves_to(value, placement, node.meta["type"]))]
        self.model.constrain(row, -np.inf, -float(wanted.constant))

    def _moves_to(self, value: Value, placement: Placement, type_: TensorType) -> list[int]:
        key = (value, placement)
        if key not in self.moves:
            self.moves[key] = []
            for source, given in self.offers[value].items():
                cost = self.hardware.redistribution(type_, source, placement, self.calls.size)
                if source == placement or cost is None:
                    continue
                move = self.model.variable(cost)
                self.moves[key].append(move)
                if not given.constant:
                    row = [(move, 1.0), *((v, -1.0) for v in given.variables)]
                    self.model.constrain(row, -np.inf, 0.0)
        return self.moves[key]

    def _rules(self, solution: np.ndarray) -> dict[fx.Node, Rule]:
        chosen = {}
        for node, rules in self.allowed.items():
            taken = [k for k, v in enumerate(self.variables.get(node, ())) if solution[v]]
            chosen[node] = rules[taken[0] if taken else 0]
        return chosen
