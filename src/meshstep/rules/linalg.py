"""Decompositions and solutions of matrices: each matrix of a batch on its own."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..layout import PARTIAL, REPLICATE
from .factors import Linear, dims_of, factor, partials
from .pointwise import split
from .rule import Entry, OpCall, Rule, Table

aten = torch.ops.aten


def _batch(spec: str, linear: Linear = ()) -> Entry:
    """`...` are the dims of the batch; capital letters those of a matrix."""
    return Entry(factor(spec, linear))


def _solve(call: OpCall) -> Iterator[Rule]:
    """`A X = B`: B is a batch of vectors if it has the shape of A without the last dim."""
    a, b = call["A"], call["B"]
    vector = b.ndim == 1 or b.shape == a.shape[:-1]
    spec = "...MN,...M->...N,...MN,...M,..." if vector else "...MN,...MK->...NK,...MN,...M,..."
    for rule in factor(spec)(call):  # what is computed of A alone is whole where A is
        yield Rule(rule.inputs, tuple(REPLICATE if p == PARTIAL else p for p in rule.outputs))


def _cross(call: OpCall) -> Iterator[Rule]:
    """Every dim but that of the vectors."""
    (y,) = call.outputs
    assert y is not None
    yield from (split(call, dim, y.shape) for dim in range(y.ndim) if dim not in dims_of(call["dim"], y.ndim))
    yield from partials(call, "each")


_MATRIX = _batch("...MN->...MN")

TABLE: Table = {
    aten._linalg_det.default: _batch("...MN->...,...MN,...M"),
    aten._linalg_eigh.default: _batch("...MN->...M,...MN"),
    aten._linalg_eigvals.default: _batch("...MN->...M"),
    aten._linalg_slogdet.default: _batch("...MN->...,...,...MN,...M"),
    aten._linalg_solve_ex.default: Entry(_solve),
    aten._linalg_svd.default: _batch("...MN->...MK,...K,...KN"),
    aten.cholesky.default: _MATRIX,
    aten.cholesky_inverse.default: _MATRIX,
    aten.cholesky_solve.default: _batch("...MK,...MN->...MK", "first"),
    aten.geqrf.default: _batch("...MN->...MN,...K"),
    aten.linalg_cholesky_ex.default: _batch("...MN->...MN,..."),
    aten.linalg_cross.default: Entry(_cross),
    aten.linalg_eig.default: _batch("...MN->...M,...MN"),
    aten.linalg_householder_product.default: _batch("...MN,...K->...MN"),
    aten.linalg_inv_ex.default: _batch("...MN->...MN,..."),
    aten.linalg_ldl_factor_ex.default: _batch("...MN->...MN,...M,..."),
    aten.linalg_ldl_solve.default: _batch("...MN,...M,...MK->...MK"),
    aten.linalg_lu.default: _batch("...MN->...MM,...MK,...KN"),
    aten.linalg_lu_factor_ex.default: _batch("...MN->...MN,...K,..."),
    aten.linalg_lu_solve.default: _batch("...MN,...M,...KL->...KL"),
    aten.linalg_matrix_exp.default: _MATRIX,
    aten.linalg_pinv.atol_rtol_tensor: _batch("...MN,...,...->...NM"),
    aten.linalg_qr.default: _batch("...MN->...MK,...KN"),
    aten.linalg_solve_triangular.default: _batch("...MN,...KL->...KL"),
    aten.lu_unpack.default: _batch("...MN,...K->...MM,...MK,...KN"),
    aten.ormqr.default: _batch("...MN,...K,...PQ->...PQ"),
    aten.triangular_solve.default: _batch("...MK,...MN->...MK,...MN"),
    aten._euclidean_dist.default: _batch("...pM,...rM->...pr"),
    aten._cdist_forward.default: _batch("...pM,...rM->...pr"),
    aten._cdist_backward.default: _batch("...pr,...pM,...rM,...pr->...pM", "first"),
}
