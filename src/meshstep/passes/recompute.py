"""Computes activations again for the backward instead of holding them, as far as a memory budget asks for it."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from .._torch import OpOverload
from ..errors import PlanError
from ..ir.collectives import COLLECTIVES, SENDS_NOTHING
from ..ir.program import Program, copy_node, is_part, is_random
from ..ir.types import TensorType, bytes_text
from ..ir.updates import BY_OP
from ..plan.cost import usual
from .liveness import may_be_view, memory
from .pipeline import Pass, Pipeline
from .transform import Transform

# How much of a forward may be computed again for one value: a longer way back needs fewer values to be kept, but what
# lies on it is held, too, until the backward comes to it.
REACH = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)


@dataclass(frozen=True, slots=True)
class Recompute:
    """Drop activations until a rank holds no more than `memory`, those first that cost least time a byte. Exact.

    What is dropped is computed again where the backward first needs it. No result of a collective is dropped, though
    stored parameters may be gathered once more for it; random numbers are the same again, as they depend on their place
    alone. Of several distances that values may be computed again
    over, the shortest that is enough is taken.

    Args:
        memory: Bytes that a rank may hold: parameters and other state, arguments, activations, temporaries.

    Source: Chen, Xu, Zhang & Guestrin 2016, "Training Deep Nets with Sublinear Memory Cost".
    """

    memory: int

    def __call__(self, program: Program) -> Program:
        """As `before` nothing."""
        return self.before(Pipeline(()))(program)

    def before(self, rest: Pipeline) -> Pass:
        """The pass, when other passes follow: what counts is the memory after them."""
        passes = [pass_ for pass_ in rest if not isinstance(pass_, Transform)]  # users' edits are made once

        def peak(program: Program) -> int:
            return memory(functools.reduce(lambda made, pass_: pass_(made), passes, program)).peak

        return lambda program: _fitted(program, self.memory, peak)


def _fitted(program: Program, limit: int, peak: Callable[[Program], int]) -> Program:
    least = before = peak(program)
    if before <= limit:
        return program
    forward = _Forward(program)
    orders = dict.fromkeys(tuple(forward.order(reach * forward.total)) for reach in REACH)
    for order in orders:
        found = peak(_without(program, forward, order))
        least = min(least, found)
        if found <= limit:
            return _without(program, forward, _shortest(program, forward, order, limit, peak))
    raise PlanError(
        f"a rank holds {bytes_text(before)}, and at least {bytes_text(least)} if activations are computed again",
        at=f"a memory of {bytes_text(limit)}",
        hint="more ranks, fsdp, or a smaller batch",
    )


def _shortest(
    program: Program, forward: _Forward, order: Sequence[fx.Node], limit: int, peak: Callable[[Program], int]
) -> Sequence[fx.Node]:
    """The shortest beginning of `order` that is found to be enough."""
    low, high = 0, len(order)  # the first is not enough, the last is
    while high - low > 1:
        middle = (low + high) // 2
        if peak(_without(program, forward, order[:middle])) <= limit:
            high = middle
        else:
            low = middle
    return order[:high]


class _Forward:
    """What the forward makes, and what it takes to make it again."""

    def __init__(self, program: Program) -> None:
        self.maker: dict[fx.Node, fx.Node] = {}  # who makes the memory that a value lies in
        for node in program.graph.nodes:
            lies_in = node.args[0] if is_part(node) or may_be_view(node) else node
            self.maker[node] = self.maker.get(lies_in, node)
        returned = {self.maker[node] for node in program.output_node.all_input_nodes}
        calls = [node for node in program.graph.nodes if node.op == "call_function"]
        self.saved = {self.maker[used] for node in calls if _is_late(node) for used in node.all_input_nodes}
        self.cost = {node: _cost(node) for node in calls if self._again(node)}
        self.open = [node for node in calls if node in self.saved and node in self.cost and node not in returned]
        self.total = sum(self.cost.values())

    def _again(self, node: fx.Node) -> bool:
        """Whether a call makes memory, and may be made again."""
        return self.maker[node] is node and not _is_late(node) and _is_pure(node)

    def order(self, reach: float) -> list[fx.Node]:
        """What to drop, the cheapest for its bytes first, each taking no more than `reach` us."""
        dropped, again, found = set[fx.Node](), set[fx.Node](), list[fx.Node]()
        waiting = [(0.0, i, node) for i, node in enumerate(self.open)]
        while waiting:
            known, i, node = heapq.heappop(waiting)
            way = self.way(node, dropped)
            if sum(self.cost[n] for n in way) > reach:
                continue
            price = sum(self.cost[n] for n in way - again) / max(1, _bytes(node))
            if waiting and price > max(known, waiting[0][0]):
                heapq.heappush(waiting, (price, i, node))
                continue
            dropped.add(node)
            again |= way
            found.append(node)
        return found

    def way(self, node: fx.Node, dropped: Set[fx.Node]) -> set[fx.Node]:
        """The calls that must be made again to have a value, if some are dropped."""
        found, stack = set[fx.Node](), [node]
        while stack:
            here = stack.pop()
            if here not in found:
                found.add(here)
                stack += [maker for used in here.all_input_nodes if self.is_gone(maker := self.maker[used], dropped)]
        return found

    def is_gone(self, maker: fx.Node, dropped: Set[fx.Node]) -> bool:
        """Whether a value is not there any more when the backward comes, but can be made again."""
        return maker in dropped or (maker in self.cost and maker not in self.saved)


def _without(program: Program, forward: _Forward, dropped: Sequence[fx.Node]) -> Program:
    """The program that computes some values again."""
    return _Again(program, forward, set(dropped)).run() if dropped else program


@dataclass(slots=True, eq=False)
class _Again:
    program: Program
    forward: _Forward
    dropped: Set[fx.Node]
    graph: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    again: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def run(self) -> Program:
        for node in self.program.graph.nodes:
            late = node.op == "call_function" and _is_late(node)
            inputs = {used: self._made(used) if late else self.copies[used] for used in node.all_input_nodes}
            self.copies[node] = copy_node(self.graph, node, inputs)
        return replace(self.program, graph=self.graph)

    def _made(self, node: fx.Node) -> fx.Node:
        """A value for the backward: made again, with what that takes, or as it is."""
        if not self._is_made_again(node):
            return self.copies[node]
        stack = [node]
        while stack:
            here = stack[-1]
            missing = [n for n in here.all_input_nodes if self._is_made_again(n) and n not in self.again]
            if here in self.again or not missing:
                stack.pop()
                self._make(here)
            else:
                stack += missing
        return self.again[node]

    def _is_made_again(self, node: fx.Node) -> bool:
        """Also of a view of what is gone; what the backward makes is there."""
        return not _is_late(node) and self.forward.is_gone(self.forward.maker[node], self.dropped)

    def _make(self, node: fx.Node) -> None:
        if node in self.again:
            return
        inputs = {used: self.again.get(used, self.copies[used]) for used in node.all_input_nodes}
        self.again[node] = copy_node(self.graph, node, inputs, f"{node.name}_again")
        self.again[node].meta.update(backward=True, recomputed=True)


def _is_late(node: fx.Node) -> bool:
    return bool(node.meta.get("backward"))


def _is_pure(node: fx.Node) -> bool:
    """Whether a call gives the same again, sends nothing and changes nothing."""
    op = node.target
    if is_part(node) or op in BY_OP or is_random(node) or (op in COLLECTIVES and op not in SENDS_NOTHING):
        return False
    return isinstance(op, OpOverload) and op.namespace in ("aten", "meshstep") and not op._schema.is_mutable


def _types(node: fx.Node) -> tuple[TensorType | None, ...]:
    type_: Any = node.meta["type"]
    return type_ if isinstance(type_, tuple) else (type_,)


def _bytes(node: fx.Node) -> int:
    return sum(type_.nbytes for type_ in _types(node) if type_)


def _cost(node: fx.Node) -> float:
    """Time in us."""
    made = _types(node)
    given = [type_ for used in node.all_input_nodes for type_ in _types(used) if type_]
    device = next((type_.device for type_ in made if type_), "cpu")
    return usual(device).computation(node.target, given, made, 1)
