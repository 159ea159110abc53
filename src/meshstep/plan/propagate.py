"""Which rules a data-parallel axis leaves open: what depends on the batch is computed where its rows are.

A forward walk without communication gives every value its natural placement: sharded like the batch, partial, whole,
or free (made from nothing, so it can be made in any placement). A call that can use its sharded inputs as they lie
must do so; only where a partial value is reduced, and what cannot be computed in place, stays open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from ..ir.program import Program, SlotKind, is_part, producer
from ..layout import REPLICATE, shard_dim
from ..rules import Rule
from .calls import Calls


@dataclass(frozen=True, slots=True, eq=False)
class Open:
    """What is left to choose.

    Args:
        rules: The rules allowed for each call, at least one.
        natural: The natural placement of each value; None if it is free.
    """

    rules: Mapping[fx.Node, tuple[Rule, ...]]
    natural: Mapping[tuple[fx.Node, int], Placement | None]


def keep_batch_sharded(program: Program, calls: Calls, inputs: Sequence[Placement]) -> Open:
    """The rules that keep what depends on a sharded input sharded."""
    natural: dict[tuple[fx.Node, int], Placement | None] = {
        (node, 0): None if slot.kind is SlotKind.SEED else placement  # random tensors are made in any placement
        for (slot, node), placement in zip(program.inputs, inputs, strict=True)
    }
    rules: dict[fx.Node, tuple[Rule, ...]] = {}
    for node in program.graph.nodes:
        if node.op != "call_function" or is_part(node):
            continue
        have = [natural[producer(n)] for n in calls.tensors(node)]
        rules[node] = _allowed(calls.rules(node), have)
        outputs = _natural_outputs(rules[node], have)
        natural |= {(node, index): placement for index, placement in enumerate(outputs)}
    return Open(rules, natural)


def _allowed(rules: Sequence[Rule], have: Sequence[Placement | None]) -> tuple[Rule, ...]:
    if all(placement is None for placement in have):
        return tuple(rules)
    in_place = tuple(rule for rule in rules if _in_place(rule, have))
    return in_place or tuple(rule for rule in rules if _whole(rule, have)) or tuple(rules[:1])


def _in_place(rule: Rule, have: Sequence[Placement | None]) -> bool:
    """Whether a rule takes sharded inputs as they lie; whole ones may be sliced if another is sharded."""
    sharded = any(h is not None and shard_dim(h) is not None for h in have)
    return all(_takes(want, h, sharded) for want, h in zip(rule.inputs, have, strict=True))


def _takes(want: Placement, have: Placement | None, sharded: bool) -> bool:
    if have is None:
        return sharded or want == REPLICATE
    if isinstance(have, Partial):
        return want in (have, REPLICATE)
    if have == REPLICATE:
        return want == REPLICATE or (sharded and shard_dim(want) is not None)
    return want == have


def _whole(rule: Rule, have: Sequence[Placement | None]) -> bool:
    return all(want in (h, REPLICATE) for want, h in zip(rule.inputs, have, strict=True))


def _natural_outputs(rules: Sequence[Rule], have: Sequence[Placement | None]) -> tuple[Placement | None, ...]:
    if all(placement is None for placement in have):
        return (None,) * len(rules[0].outputs)
    changes = [sum(h is not None and want != h for want, h in zip(r.inputs, have, strict=True)) for r in rules]
    return rules[changes.index(min(changes))].outputs
