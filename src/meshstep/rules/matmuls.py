"""Matrix products, embedding, and other ops that are an einsum by nature."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..layout import PARTIAL, REPLICATE, shard
from .factors import factor, together
from .places import can_be_summed, length_of, read_where
from .rule import Entry, OpCall, Rule, Table

aten = torch.ops.aten


def _added(spec: str, *names: str) -> Entry:
    """`beta * self + alpha * (product of names)`, linear in `self` together with each of the others."""
    rules = factor(spec, tuple(together("self", name) for name in names))

    def exact(call: OpCall) -> Iterator[Rule]:
        floating = call["self"].dtype.is_floating_point or call["self"].dtype.is_complex
        yield from (rule for rule in rules(call) if floating or not _adds_shares(rule))

    return Entry(exact, _share_of_beta)


def _share_of_beta(call: OpCall, rule: Rule, size: int) -> Mapping[str, Any]:
    """Where the product is summed over the ranks, each of them adds its share of `self`."""
    return {"beta": call["beta"] / size} if _adds_shares(rule) else {}


def _adds_shares(rule: Rule) -> bool:
    return rule.inputs[0] == REPLICATE and rule.outputs == (PARTIAL,)


def _embedding(call: OpCall) -> Iterator[Rule]:
    """Rows and columns of the result; where the ranks hold some rows of the table each, their results add up."""
    yield from factor("Vd,...->...d", "first")(call)
    if can_be_summed(call["weight"]):
        yield Rule((shard(0), REPLICATE), (PARTIAL,), _FROM_OWN_ROWS)


_FROM_OWN_ROWS = read_where("indices", lambda local: length_of(local, "weight", 0), lambda local: 1)

TABLE: Table = {
    aten.mm.default: Entry(factor("mk,kn->mn", "each")),
    aten.mm.dtype: Entry(factor("mk,kn->mn", "each")),
    aten.bmm.default: Entry(factor("bmk,bkn->bmn", "each")),
    aten.bmm.dtype: Entry(factor("bmk,bkn->bmn", "each")),
    aten.addmm.default: _added("mn,mk,kn->mn", "mat1", "mat2"),
    aten.addmm.dtype: _added("mn,mk,kn->mn", "mat1", "mat2"),
    aten.baddbmm.default: _added("bmn,bmk,bkn->bmn", "batch1", "batch2"),
    aten.addbmm.default: _added("mn,bmk,bkn->mn", "batch1", "batch2"),
    aten.mv.default: Entry(factor("mk,k->m", "each")),
    aten.addmv.default: _added("m,mk,k->m", "mat", "vec"),
    aten.dot.default: Entry(factor("k,k->", "each")),
    aten.vdot.default: Entry(factor("k,k->", "each")),
    aten.addr.default: _added("mn,m,n->mn", "vec1", "vec2"),
    aten.embedding.default: Entry(_embedding),
}
