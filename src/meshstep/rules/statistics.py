"""Variance and mean over dims that are sharded: of each rank's elements, then of all ranks'."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import fx

from ..ir import collectives
from ..layout import REPLICATE, shard
from .reductions import reduced_dims, reduction
from .rule import Local, OpCall, Rule, Table
from .softmax import cast, over_all, wide

aten = torch.ops.aten
SMALL = 2**16  # bytes that take no longer to send than a second message


def _across(call: OpCall, dim: int) -> Iterator[Rule]:
    if not call.tensors[0].dtype.is_complex:
        yield Rule((shard(dim),), (REPLICATE,) * 2, _var_mean, anywhere=True)


def _var_mean(local: Local) -> tuple[fx.Node, ...]:
    x = wide(local, local["self"])
    dims, shape = list(reduced_dims(local.call)), local.call["self"].shape
    count = math.prod(shape[d] for d in dims)
    mean, squares = _all_ranks(local, x, dims, count)
    variance = local.emit(aten.div.Tensor, squares, max(0, count - _correction(local)))
    found: tuple[fx.Node, ...] = (variance, mean)
    if not local["keepdim"]:
        found = tuple(local.emit(aten.squeeze.dims, value, dims) for value in found)
    return tuple(cast(local, value, local.call.outputs[i].dtype) for i, value in enumerate(found))  # type: ignore[union-attr]


def _correction(local: Local) -> float:
    given = local["correction"]
    return 1 if given is None else given


def _all_ranks(local: Local, x: fx.Node, dims: list[int], count: int) -> tuple[fx.Node, fx.Node]:
    """The mean over all ranks, and the sum of the squares of what is away from it.

    If they are small, the ranks' means and sums are sent together. Source: Chan, Golub & LeVeque 1979, "Updating
    formulae and a pairwise algorithm for computing sample variances".
    """
    total = local.emit(aten.sum.dim_IntList, x, dims, True)
    if total.meta["type"].nbytes * 2 * local.size > SMALL:
        mean = local.emit(aten.div.Tensor, over_all(local, total), count)
        return mean, over_all(local, _squares(local, x, mean, dims))
    own = local.emit(aten.div.Tensor, total, count // local.size)
    means, squares = _sent_together(local, own, _squares(local, x, own, dims))
    mean = local.emit(aten.mean.dim, means, [0])
    apart = _squares(local, means, mean, [0], keepdim=False)
    within = local.emit(aten.sum.dim_IntList, squares, [0])
    return mean, local.emit(aten.add.Tensor, within, local.emit(aten.mul.Tensor, apart, count // local.size))


def _squares(local: Local, x: fx.Node, mean: fx.Node, dims: list[int], keepdim: bool = True) -> fx.Node:
    away = local.emit(aten.sub.Tensor, x, mean)
    return local.emit(aten.sum.dim_IntList, local.emit(aten.mul.Tensor, away, away), dims, keepdim)


def _sent_together(local: Local, *values: fx.Node) -> tuple[fx.Node, ...]:
    """Each value of every rank, one rank after another along a new dim 0, by one message."""
    shape = list(values[0].meta["type"].shape)
    rows = [local.emit(aten.unsqueeze.default, value, 0) for value in values]
    sent = local.emit(collectives.all_gather, local.emit(aten.cat.default, rows, 0), 0, local.axis, local.size)
    apart = local.emit(aten.reshape.default, sent, [local.size, len(values), *shape])
    return tuple(local.emit(aten.select.int, apart, 1, i) for i in range(len(values)))


TABLE: Table = {aten.var_mean.correction: reduction(_across)}
