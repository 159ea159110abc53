"""Which rules a data-parallel axis leaves open: what depends on the batch is computed where its rows are.

A forward walk without communication gives every value its natural placement: sharded like the batch, partial, whole,
stored (state that is sharded only to be kept: it may be used as it lies or gathered), or free (made from nothing, so it
can be made in any placement). A call that can use its batch-sharded inputs as they lie must do so; only where a partial
value is reduced, where stored state is gathered, and what cannot be computed in place, stays open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from ..ir.program import STATE_KINDS, Program, Slot, SlotKind, is_part, producer
from ..layout import REPLICATE, shard_dim
from ..rules import Rule
from .calls import Calls


@dataclass(frozen=True, slots=True)
class Natural:
    """How a value comes to lie.

    Args:
        placement: Its placement; None if it is free.
        stored: Whether it is sharded only to be kept.
    """

    placement: Placement | None
    stored: bool = False


FREE = Natural(None)


@dataclass(frozen=True, slots=True, eq=False)
class Open:
    """What is left to choose.

    Args:
        rules: The rules allowed for each call, at least one.
        natural: How each value comes to lie.
    """

    rules: Mapping[fx.Node, tuple[Rule, ...]]
    natural: Mapping[tuple[fx.Node, int], Natural]


def keep_batch_sharded(program: Program, calls: Calls, inputs: Sequence[Placement]) -> Open:
    """The rules that keep what depends on a sharded argument sharded."""
    natural = {
        (node, 0): _of_input(slot, placement) for (slot, node), placement in zip(program.inputs, inputs, strict=True)
    }
    shards_state = any(value.stored for value in natural.values())
    rules: dict[fx.Node, tuple[Rule, ...]] = {}
    for node in program.graph.nodes:
        if node.op != "call_function" or is_part(node):
            continue
        have = [natural[producer(n)] for n in calls.tensors(node)]
        rules[node] = _allowed(calls.rules(node), have, shards_state)
        outputs = _natural_outputs(rules[node], have)
        natural |= {(node, index): value for index, value in enumerate(outputs)}
    return Open(rules, natural)


def _of_input(slot: Slot, placement: Placement) -> Natural:
    if slot.kind is SlotKind.SEED:
        return FREE  # random tensors are made in any placement
    return Natural(placement, slot.kind in STATE_KINDS and shard_dim(placement) is not None)


def _allowed(rules: Sequence[Rule], have: Sequence[Natural], shards_state: bool) -> tuple[Rule, ...]:
    if all(value == FREE for value in have):
        return tuple(rules)
    in_place = tuple(rule for rule in rules if _in_place(rule, have, shards_state))
    return in_place or tuple(rule for rule in rules if _whole(rule, have)) or tuple(rules[:1])


def _in_place(rule: Rule, have: Sequence[Natural], shards_state: bool) -> bool:
    """Whether a rule takes batch-sharded inputs as they lie; whole ones may be sliced if another is sharded."""
    sharded = any(value.placement is not None and shard_dim(value.placement) is not None for value in have)
    return all(_takes(want, value, sharded, shards_state) for want, value in zip(rule.inputs, have, strict=True))


def _takes(want: Placement, value: Natural, sharded: bool, shards_state: bool) -> bool:
    have = value.placement
    if have is None:
        return want == REPLICATE or (sharded and shard_dim(want) is not None)
    if isinstance(have, Partial):
        return want in (have, REPLICATE) or (shards_state and shard_dim(want) is not None)
    if have == REPLICATE:
        return want == REPLICATE or (sharded and shard_dim(want) is not None)
    return want == have or (value.stored and want == REPLICATE)


def _whole(rule: Rule, have: Sequence[Natural]) -> bool:
    return all(want in (value.placement, REPLICATE) for want, value in zip(rule.inputs, have, strict=True))


def _natural_outputs(rules: Sequence[Rule], have: Sequence[Natural]) -> tuple[Natural, ...]:
    if all(value == FREE for value in have):
        return (FREE,) * len(rules[0].outputs)
    changes = [
        sum(value != FREE and want != value.placement for want, value in zip(rule.inputs, have, strict=True))
        for rule in rules
    ]
    stored = not any(_is_of_batch(value) for value in have)
    return tuple(
        Natural(placement, stored and placement is not None and shard_dim(placement) is not None)
        for placement in rules[changes.index(min(changes))].outputs
    )


def _is_of_batch(value: Natural) -> bool:
    return value.placement is not None and not value.stored and shard_dim(value.placement) is not None
