"""Ops that reduce dims, and ops that work along one dim and keep it whole."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from ..ir import collectives
from ..layout import PARTIAL, REPLICATE, shard
from .factors import Linear, alike, apart_from, dims_of, follow, partials
from .rule import Entry, Local, OpCall, Rule, Table

aten = torch.ops.aten
Across = Callable[[OpCall, int], Iterator[Rule]]


def reduction(across: Across | None = None, linear: Linear = ()) -> Entry:
    """An op that reduces the dims of its argument `dim` (all if it has none).

    Args:
        across: The rule for a sharded dim that is reduced; None if there is none.
        linear: See `factors.partials`.
    """

    def rules(call: OpCall) -> Iterator[Rule]:
        gone = reduced_dims(call)
        for dim in range(call.tensors[0].ndim):
            if dim not in gone:
                yield alike(call, dim, _where(call, dim, gone))
            elif across:
                yield from across(call, dim)
        yield from partials(call, linear)

    return Entry(rules)


def reduced_dims(call: OpCall) -> tuple[int, ...]:
    """The dims that a call reduces."""
    return dims_of(call.arguments.get("dim"), call.tensors[0].ndim)


def _where(call: OpCall, dim: int, gone: tuple[int, ...]) -> int:
    return dim if call.arguments.get("keepdim") else dim - sum(d < dim for d in gone)


def gives(placement: Placement) -> Across:
    """The parts of each shard are put together by a reduction over the ranks."""
    return lambda call, dim: iter([Rule((shard(dim),), (placement,))])


def _largest(op: str) -> Across:
    """The largest (smallest) element of a shard, unless the elements are not ordered numbers."""

    def across(call: OpCall, dim: int) -> Iterator[Rule]:
        if call.tensors[0].dtype is not torch.bool:
            yield Rule((shard(dim),), (Partial(op),))

    return across


def _both(call: OpCall, dim: int) -> Iterator[Rule]:
    """`aminmax`: the smallest and the largest."""
    if call.tensors[0].dtype is not torch.bool:
        yield Rule((shard(dim),), (Partial("min"), Partial("max")))


# ---- local forms


def _mean(call: OpCall, dim: int) -> Iterator[Rule]:
    """The mean is the sum of the shards' means, each divided by the number of ranks."""
    yield Rule((shard(dim),), (PARTIAL,), share_of_mean, anywhere=True)


def share_of_mean(local: Local) -> tuple[fx.Node, ...]:
    """A local form: what the op gives for this rank's shard, divided by the number of ranks."""
    mean = local.again()
    return (local.emit(aten.div.Tensor, mean, local.size),)


def _norm(call: OpCall, dim: int) -> Iterator[Rule]:
    """A norm over all ranks from the norms of the shards."""
    yield Rule((shard(dim),), (REPLICATE,), _norm_of_norms, anywhere=True)


def _norm_of_norms(local: Local) -> tuple[fx.Node, ...]:
    norm, order = local.again(), _order(local.call.arguments)
    return (_NORMS[order](local, norm) if order in _NORMS else _power_mean(local, norm, order),)


def _order(arguments: Mapping[str, Any]) -> Any:
    order = arguments["ord"] if "ord" in arguments else arguments["p"]
    return 2 if order is None else order


def _euclidean(local: Local, norm: fx.Node) -> fx.Node:
    """In float32 at least: the square of a norm of half precision may not be representable."""
    dtype = norm.meta["type"].dtype
    half = dtype in (torch.float16, torch.bfloat16)
    wide = local.emit(aten._to_copy.default, norm, dtype=torch.float32) if half else norm
    squares = local.emit(aten.mul.Tensor, wide, wide)
    root = local.emit(aten.sqrt.default, local.emit(collectives.all_reduce, squares, "sum", local.axis))
    return local.emit(aten._to_copy.default, root, dtype=dtype) if half else root


def _all_reduced(op: str, local: Local, norm: fx.Node) -> fx.Node:
    return local.emit(collectives.all_reduce, norm, op, local.axis)


def _power_mean(local: Local, norm: fx.Node, order: float) -> fx.Node:
    powers = local.emit(aten.pow.Tensor_Scalar, norm, order)
    return local.emit(aten.pow.Tensor_Scalar, _all_reduced("sum", local, powers), 1 / order)


_NORMS: dict[float, Callable[[Local, fx.Node], fx.Node]] = {
    0: functools.partial(_all_reduced, "sum"),
    1: functools.partial(_all_reduced, "sum"),
    2: _euclidean,
    math.inf: functools.partial(_all_reduced, "max"),
    -math.inf: functools.partial(_all_reduced, "min"),
}


def _truth(op: str) -> Across:
    """Whether any (all) is true on any (all) of the ranks; collectives reduce numbers, so as 0 and 1."""

    def form(local: Local) -> tuple[fx.Node, ...]:
        number = local.emit(aten._to_copy.default, local.again(), dtype=torch.int32)
        return (local.emit(aten.ne.Scalar, local.emit(collectives.all_reduce, number, op, local.axis), 0),)

    return lambda call, dim: iter([Rule((shard(dim),), (REPLICATE,), form, anywhere=True)])


_ANY, _ALL = reduction(_truth("max")), reduction(_truth("min"))
_SUM = reduction(gives(PARTIAL), linear="all")
_MEAN = reduction(_mean, linear="all")
_KEPT = reduction()
_PRODUCT = reduction(gives(Partial("product")))
_RENORM = Entry(lambda call: [alike(call, call["dim"] % call["self"].ndim)])
_ALONG_DIM = Entry(follow(apart_from("dim")))

TABLE: Table = {
    aten.sum.default: _SUM,
    aten.sum.dim_IntList: _SUM,
    aten.nansum.default: reduction(gives(PARTIAL)),
    aten.count_nonzero.dim_IntList: reduction(gives(PARTIAL)),
    aten.mean.default: _MEAN,
    aten.mean.dim: _MEAN,
    aten.linalg_vector_norm.default: reduction(_norm),
    aten.norm.Scalar: reduction(_norm),
    aten.norm.ScalarOpt_dim: reduction(_norm),
    aten.amax.default: reduction(_largest("max")),
    aten.amin.default: reduction(_largest("min")),
    aten.max.default: reduction(_largest("max")),
    aten.min.default: reduction(_largest("min")),
    aten.aminmax.default: reduction(_both),
    aten.kthvalue.default: _KEPT,
    aten.median.dim: _KEPT,
    aten.mode.default: _KEPT,
    aten.nanmedian.dim: _KEPT,
    aten.prod.default: _PRODUCT,
    aten.prod.dim_int: _PRODUCT,
    aten.renorm.default: _RENORM,
    aten.any.default: _ANY,
    aten.any.dim: _ANY,
    aten.any.dims: _ANY,
    aten.all.default: _ALL,
    aten.all.dim: _ALL,
    aten.all.dims: _ALL,
    aten.var.correction: _KEPT,
    aten.std.correction: _KEPT,
    aten.std_mean.correction: _KEPT,
    aten.cumprod.default: _ALONG_DIM,
    aten.logcumsumexp.default: _ALONG_DIM,
    aten.cummax.default: _ALONG_DIM,
    aten.cummin.default: _ALONG_DIM,
    aten.sort.default: _ALONG_DIM,
    aten.sort.stable: _ALONG_DIM,
    aten.glu.default: _ALONG_DIM,
    aten._safe_softmax.default: _ALONG_DIM,
    aten._fft_c2c.default: Entry(follow(apart_from("dim"), "all")),
    aten._fft_c2r.default: Entry(follow(apart_from("dim"), "all")),
    aten._fft_r2c.default: Entry(follow(apart_from("dim"), "all")),
    aten.glu_backward.default: Entry(follow(apart_from("dim"), "first")),
}
