"""Matrix products, embedding, and other ops that are an einsum by nature."""

from __future__ import annotations

import torch

from .factors import Linear, all_but_last, factor, follow, together
from .rule import Entry

aten = torch.ops.aten


def _added_to(*names: str) -> Linear:
    """Linear in `self` together with each of the factors."""
    return tuple(together("self", name) for name in names)


_OF_EACH = Entry(follow(all_but_last(2)))  # of each matrix of a batch

TABLE: dict[torch._ops.OpOverload, Entry] = {
    aten.mm.default: Entry(factor("mk,kn->mn", "each")),
    aten.mm.dtype: Entry(factor("mk,kn->mn", "each")),
    aten.bmm.default: Entry(factor("bmk,bkn->bmn", "each")),
    aten.bmm.dtype: Entry(factor("bmk,bkn->bmn", "each")),
    aten.addmm.default: Entry(factor("+mn,mk,kn->mn", _added_to("mat1", "mat2"))),
    aten.addmm.dtype: Entry(factor("+mn,mk,kn->mn", _added_to("mat1", "mat2"))),
    aten.baddbmm.default: Entry(factor("+bmn,bmk,bkn->bmn", _added_to("batch1", "batch2"))),
    aten.addbmm.default: Entry(factor("+mn,bmk,bkn->mn", _added_to("batch1", "batch2"))),
    aten.mv.default: Entry(factor("mk,k->m", "each")),
    aten.addmv.default: Entry(factor("+m,mk,k->m", _added_to("mat", "vec"))),
    aten.dot.default: Entry(factor("k,k->", "each")),
    aten.vdot.default: Entry(factor("k,k->", "each")),
    aten.addr.default: Entry(factor("+mn,m,n->mn", _added_to("vec1", "vec2"))),
    aten.embedding.default: Entry(factor("Vd,...->...d", "first")),
    aten._linalg_det.default: _OF_EACH,
    aten._linalg_eigh.default: _OF_EACH,
    aten._linalg_slogdet.default: _OF_EACH,
    aten._linalg_svd.default: _OF_EACH,
    aten.linalg_cholesky_ex.default: _OF_EACH,
    aten.linalg_inv_ex.default: _OF_EACH,
    aten.linalg_qr.default: _OF_EACH,
}
