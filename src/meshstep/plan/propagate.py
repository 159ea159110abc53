"""Which rules a plan leaves open: what a sharded input goes into is computed where its parts are.

A forward walk without communication gives every value its natural placement: sharded (like the batch, or like a
parameter that is computed with as it lies), partial, whole, stored (state that is sharded only to be kept: it may be
used as it lies or gathered), or free (made from nothing, so it can be made in any placement). A call that can use its
sharded inputs as they lie must do so; only where a partial value is reduced, where stored state is gathered, and what
cannot be computed in place, stays open.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import fx
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from ..ir.program import STATE_KINDS, Program, Slot, SlotKind, is_part, producer
from ..ir.updates import BY_OP
from ..layout import REPLICATE, shard_dim
from ..rules import Rule
from .calls import Calls

Value = tuple[fx.Node, int]


@dataclass(frozen=True, slots=True)
class Natural:
    """How a value comes to lie.

    Args:
        placement: Its placement; None if it is free.
        stored: Whether it is sharded only to be kept.
        pinned: Whether it is a parameter that is computed with as it lies, or made from such alone.
    """

    placement: Placement | None
    stored: bool = False
    pinned: bool = False

    @property
    def sharded(self) -> bool:
        """Whether it lies in shards."""
        return self.placement is not None and shard_dim(self.placement) is not None


FREE = Natural(None)


@dataclass(frozen=True, slots=True, eq=False)
class Open:
    """What is left to choose.

    Args:
        rules: The rules allowed for each call, at least one.
        natural: How each value comes to lie.
    """

    rules: Mapping[fx.Node, tuple[Rule, ...]]
    natural: Mapping[Value, Natural]

    def stored(self) -> frozenset[Value]:
        """The values that are sharded only to be kept."""
        return frozenset(value for value, natural in self.natural.items() if natural.stored)


def keep_sharded(
    program: Program,
    calls: Calls,
    inputs: Sequence[Placement],
    *,
    pinned: Collection[Slot] = (),
    wanted: Mapping[Value, Placement] | None = None,
) -> Open:
    """The rules that keep what depends on a sharded input sharded.

    Args:
        program: The program.
        calls: Its calls.
        inputs: Placement of each slot.
        pinned: Sharded state that is computed with as it lies.
        wanted: Placements that values should be computed in, if they can be.
    """
    return _Walk(calls, inputs, pinned, wanted or {}).run(program, inputs)


class _Walk:
    def __init__(
        self, calls: Calls, inputs: Sequence[Placement], pinned: Collection[Slot], wanted: Mapping[Value, Placement]
    ) -> None:
        self.calls, self.pinned, self.wanted = calls, pinned, wanted
        self.natural: dict[Value, Natural] = {}
        self.scatters = bool(wanted)  # whether partial and whole values may be brought into shards
        self.moves = bool(pinned)  # whether shards may be moved to another dim where they cannot be used as they lie

    def run(self, program: Program, inputs: Sequence[Placement]) -> Open:
        for (slot, node), placement in zip(program.inputs, inputs, strict=True):
            self.natural[node, 0] = self._of_input(slot, placement)
        self.moves |= any(_dim_of(value) > 0 for value in self.natural.values() if not value.stored)
        self.scatters |= any(value.stored or value.pinned for value in self.natural.values())
        rules: dict[fx.Node, tuple[Rule, ...]] = {}
        for node in program.graph.nodes:
            if node.op != "call_function" or is_part(node):
                continue
            have = [self.natural[producer(n)] for n in self.calls.tensors(node)]
            rules[node] = self._allowed(node, self.calls.rules(node), have)
            outputs = _natural_outputs(rules[node], have)
            self.natural |= {(node, index): value for index, value in enumerate(outputs)}
        return Open(rules, self.natural)

    def _of_input(self, slot: Slot, placement: Placement) -> Natural:
        if slot.kind is SlotKind.SEED:
            return FREE  # random tensors are made in any placement
        is_kept = slot.kind in STATE_KINDS and shard_dim(placement) is not None
        return Natural(placement, stored=is_kept and slot not in self.pinned, pinned=is_kept and slot in self.pinned)

    def _allowed(self, node: fx.Node, rules: Sequence[Rule], have: Sequence[Natural]) -> tuple[Rule, ...]:
        want = self.wanted.get((node, 0))
        if want is not None and (as_wanted := tuple(r for r in rules if r.outputs[0] == want and _moves(r, have))):
            return as_wanted
        if all(value == FREE for value in have):
            return tuple(rules)
        if node.target in BY_OP:  # elementwise on state: it lies as the state does, which is cheaper to see than to say
            return tuple(rule for rule in rules if _moves(rule, have)) or tuple(rules[:1])
        in_place = tuple(rule for rule in rules if self._in_place(rule, have))
        if in_place:
            return in_place
        if any(value.pinned for value in have):
            kept = tuple(rule for rule in rules if _keeps_pinned(rule, have))
            if kept:
                return kept
        return tuple(rule for rule in rules if _whole(rule, have, self.moves)) or tuple(rules[:1])

    def _in_place(self, rule: Rule, have: Sequence[Natural]) -> bool:
        """Whether a rule takes sharded inputs as they lie; whole ones may be sliced if another is sharded."""
        sharded = any(value.sharded for value in have)
        return all(self._takes(want, value, sharded) for want, value in zip(rule.inputs, have, strict=True))

    def _takes(self, want: Placement, value: Natural, sharded: bool) -> bool:
        have = value.placement
        if have is None:
            return want == REPLICATE or (sharded and shard_dim(want) is not None)
        if isinstance(have, Partial):
            return want in (have, REPLICATE) or ((sharded or self.scatters) and shard_dim(want) is not None)
        if have == REPLICATE:
            return want == REPLICATE or (sharded and shard_dim(want) is not None)
        return want == have or (value.stored and want == REPLICATE)


def _dim_of(value: Natural) -> int:
    """The dim that a value is sharded on; 0 if it is not."""
    return 0 if value.placement is None else shard_dim(value.placement) or 0


def _moves(rule: Rule, have: Sequence[Natural]) -> bool:
    """Whether inputs can be brought to what a rule takes without a change of what is pinned."""
    return all(
        want == value.placement or (not value.pinned and not isinstance(want, Partial))
        for want, value in zip(rule.inputs, have, strict=True)
    )


def _keeps_pinned(rule: Rule, have: Sequence[Natural]) -> bool:
    """Whether a rule takes pinned values as they lie, and shards what else is sharded."""
    return _moves(rule, have) and all(
        not value.sharded or shard_dim(want) is not None for want, value in zip(rule.inputs, have, strict=True)
    )


def _whole(rule: Rule, have: Sequence[Natural], all_to_all: bool) -> bool:
    """Whether a rule takes its inputs as they lie, gathered or sliced; or, if that may be, moved to another dim."""
    return all(
        want in (value.placement, REPLICATE)
        or (shard_dim(want) is not None and (value.placement in (None, REPLICATE) or (all_to_all and value.sharded)))
        for want, value in zip(rule.inputs, have, strict=True)
    )


def _natural_outputs(rules: Sequence[Rule], have: Sequence[Natural]) -> tuple[Natural, ...]:
    if all(value == FREE for value in have):
        return (FREE,) * len(rules[0].outputs)
    changes = [
        sum(value != FREE and want != value.placement for want, value in zip(rule.inputs, have, strict=True))
        for rule in rules
    ]
    stored = any(value.stored for value in have) and not any(value.sharded and not value.stored for value in have)
    pinned = all(value.pinned for value in have)
    return tuple(
        Natural(placement, stored, pinned) if placement is not None and shard_dim(placement) is not None
        else Natural(placement)
        for placement in rules[changes.index(min(changes))].outputs
    )  # fmt: skip
