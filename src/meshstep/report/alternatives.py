"""What could be done instead of sending a value: another rule for the op that makes it, or for the one that uses it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import fx
from torch.distributed.tensor.placement_types import Placement

from ..ir.cause import Cause
from ..ir.printer import op_text
from ..ir.program import producer
from ..ir.types import TensorType
from ..layout import placement_text
from ..plan.calls import Calls
from ..plan.cost import Hardware, shrinks
from ..plan.decision import Stage
from ..rules import Rule
from .facts import Alternative

Value = tuple[fx.Node, int]
_Send = tuple[TensorType, Placement, Placement]  # what, how it lies, how it is wanted


@dataclass(slots=True, eq=False)
class Alternatives:
    """Prices the rules that were not chosen along one axis.

    Only one call is changed at a time: the price is what it computes and what is sent to and from it, against the same
    for the rule that it has. What another call wants in the same placement is sent anyway, and costs nothing.

    Args:
        stage: What was decided along the axis.
        hardware: Gives the times.
    """

    stage: Stage
    hardware: Hardware
    nodes: dict[str, fx.Node] = field(init=False)
    wanted: dict[Value, list[tuple[fx.Node | None, Placement]]] = field(init=False)
    lies: dict[Value, Placement] = field(init=False)
    known: dict[object, tuple[Alternative, ...]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Note how every value lies, and who wants it how."""
        program, decision = self.stage.program, self.stage.decision
        self.nodes = {node.name: node for node in program.graph.nodes}
        self.wanted, self.lies = {}, {}
        for node, placement in zip(program.placeholders, decision.inputs, strict=True):
            self.lies[node, 0] = placement
        for node, rule in decision.rules.items():
            self.lies |= {(node, i): p for i, p in enumerate(rule.outputs) if p is not None}
            for value, placement in zip(self.calls.tensors(node), rule.inputs, strict=True):
                self.wanted.setdefault(producer(value), []).append((node, placement))
        for (_, node), placement in zip(program.outputs, decision.outputs, strict=True):
            self.wanted.setdefault(producer(node), []).append((None, placement))

    @property
    def calls(self) -> Calls:
        """The rules of all calls."""
        assert self.stage.decision.calls is not None
        return self.stage.decision.calls

    def cheapest(self, cause: Cause) -> Alternative | None:
        """The cheapest one of those that the plan leaves open; of those that it rules out, if it leaves none.

        Doing the very same an op earlier or later is none.
        """
        found: list[Alternative] = []
        if cause.user.node:
            node = self.nodes[cause.user.node]
            found += self._others(node, self._place(node), self._place(node), ())
        made = self.nodes[cause.maker.node], cause.index
        found += self._of_maker(made, cause.maker.placement, cause.user.placement)
        return min(found, key=lambda a: (not a.open, a.price), default=None)

    def _of_maker(self, made: Value, have: Placement, want: Placement) -> tuple[Alternative, ...]:
        """What could make a value as it is wanted: the op that made it, through what only passes it on."""
        first, target = made, want
        while (before := self._passed_on(made, target)) is not None:
            made, target = before
        node, index = made
        if node not in self.stage.decision.rules:
            return ()
        now = place = self._place(node)
        sent: tuple[_Send, ...] = ()
        if made != first:
            now, place = now.wanted(index, self.lies[made]), now.wanted(index, target)
            sent = ((self._type(first), have, want),)
        return self._others(node, now, place, sent)

    def _passed_on(self, made: Value, want: Placement) -> tuple[Value, Placement] | None:
        """Where a value comes from that an op with one input hands on to one user, and how it is wanted there."""
        node = made[0]
        tensors = self.calls.tensors(node) if node in self.stage.decision.rules else []
        if len(tensors) != 1 or len({placement for _, placement in self.wanted.get(made, ())}) > 1:
            return None
        before = producer(tensors[0])
        rules = (rule.inputs[0] for rule in self.calls.rules(node) if rule.outputs[made[1]] == want)
        found = next(rules, None)
        return None if found is None or len(self.wanted[before]) > 1 else (before, found)

    def _type(self, made: Value) -> TensorType:
        type_ = made[0].meta["type"]
        return type_[made[1]] if isinstance(type_, tuple) else type_

    def _others(self, node: fx.Node, now: _Place, place: _Place, besides: tuple[_Send, ...]) -> tuple[Alternative, ...]:
        """All other rules of a call; equal calls in equal places (repeated layers) are priced once.

        Args:
            node: The call.
            now: What is around it.
            place: What would be around it.
            besides: What is sent now and would not be then.
        """
        rules, chosen = self.calls.rules(node), self.stage.decision.rules[node]
        open_ = self.stage.decision.allowed.get(node, ())
        key = (id(rules), None if len(open_) == len(rules) else open_, chosen, now, place, besides)
        if key not in self.known:
            sent = [*self._sent(node, chosen, now), *besides]
            found = [(rule, self._sent(node, rule, place)) for rule in rules if rule != chosen]
            priced = [(rule, self._price(node, rule, sends)) for rule, sends in found if _kinds(sends) != _kinds(sent)]
            today = self._price(node, chosen, sent)
            assert today is not None
            self.known[key] = tuple(
                Alternative(_text(node, rule), price - today, rule in open_)
                for rule, price in priced
                if price is not None
            )
        return self.known[key]

    def _place(self, node: fx.Node) -> _Place:
        """What is around a call."""
        values = [producer(value) for value in self.calls.tensors(node)]
        others = [
            frozenset(p for user, p in self.wanted[value] if user is not node) | {self.lies[value]} for value in values
        ]
        outputs = range(len(self.stage.decision.rules[node].outputs))
        users = [tuple(dict.fromkeys(p for _, p in self.wanted.get((node, i), ()))) for i in outputs]
        return _Place(tuple(self.lies[v] for v in values), tuple(others), tuple(users))

    def _sent(self, node: fx.Node, rule: Rule, place: _Place) -> list[_Send]:
        """What is sent to and from a call."""
        call = self.calls.call(node)
        return [*_sent_to(call.tensors, rule, place), *_sent_from(call.outputs, rule, place)]

    def _price(self, node: fx.Node, rule: Rule, sent: Sequence[_Send]) -> float | None:
        """Time of a call by a rule and of what is sent for it; None if something cannot be sent."""
        call, size = self.calls.call(node), self.calls.size
        times = [self.hardware.redistribution(type_, have, want, size) for type_, have, want in sent]
        parts = shrinks((*rule.inputs, *rule.outputs), size)
        computed = self.hardware.computation(node.target, call.tensors, call.outputs, parts)
        return None if None in times else computed + sum(time for time in times if time is not None)


@dataclass(frozen=True, slots=True)
class _Place:
    """What is around a call.

    Args:
        lies: How each input lies.
        there: In which placements each input is there anyway.
        users: In which placements each output is wanted.
    """

    lies: tuple[Placement, ...]
    there: tuple[frozenset[Placement], ...]
    users: tuple[tuple[Placement, ...], ...]

    def wanted(self, index: int, placement: Placement) -> _Place:
        """The same with one output wanted in one placement."""
        return replace(self, users=(*self.users[:index], (placement,), *self.users[index + 1 :]))


def _kinds(sent: Sequence[_Send]) -> list[tuple[str, str, int]]:
    """What is sent, whatever the dims."""
    return sorted((type(have).__name__, type(want).__name__, type_.nbytes) for type_, have, want in sent)


def _sent_to(types: Sequence[TensorType], rule: Rule, place: _Place) -> Iterator[_Send]:
    for type_, want, have, there in zip(types, rule.inputs, place.lies, place.there, strict=True):
        if want not in there:
            yield type_, have, want


def _sent_from(types: Sequence[TensorType | None], rule: Rule, place: _Place) -> Iterator[_Send]:
    for type_, have, wants in zip(types, rule.outputs, place.users, strict=True):
        if type_ is not None and have is not None:
            yield from ((type_, have, want) for want in wants if want != have)


def _text(node: fx.Node, rule: Rule) -> str:
    """`aten.mm of R, S(0) to S(0)`."""
    inputs = ", ".join(map(placement_text, rule.inputs))
    outputs = ", ".join(placement_text(p) for p in rule.outputs if p is not None)
    return f"{op_text(node.target)} of {inputs} to {outputs}"
