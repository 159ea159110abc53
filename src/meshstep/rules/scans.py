"""Ops that look for something along a dim, or add up along it, where that dim may be sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import fx

from ..ir import collectives
from ..layout import REPLICATE, shard
from .factors import alike, apart_from, dims_of, follow, partials
from .rule import Entry, Local, OpCall, Rule, Table

aten = torch.ops.aten
Form = Callable[[Local], tuple[fx.Node, ...]]


def _rank(local: Local, device: str) -> fx.Node:
    return local.emit(collectives.axis_index, local.axis, torch.device(device))


def _gathered(local: Local, x: fx.Node, dim: int) -> fx.Node:
    return local.emit(collectives.all_gather, x, dim, local.axis, local.size)


# ---- the largest, the smallest, the first few


def _extreme(op: object) -> Entry:
    """`max` and `min` over a dim, with the position."""

    def form(local: Local) -> tuple[fx.Node, ...]:
        dim = local["dim"] % local.call["self"].ndim
        value, place = _found(local, op, local["self"], dim)
        if local["keepdim"]:
            return value, place
        return local.emit(aten.squeeze.dim, value, dim), local.emit(aten.squeeze.dim, place, dim)

    def rules(call: OpCall) -> Iterator[Rule]:
        yield from _kept(call, form)

    return Entry(rules)


def _position(op: object) -> Entry:
    """`argmax` and `argmin` over a dim."""

    def form(local: Local) -> tuple[fx.Node, ...]:
        dim = local["dim"] % local.call["self"].ndim
        _, place = _found(local, op, local["self"], dim)
        return (place if local["keepdim"] else local.emit(aten.squeeze.dim, place, dim),)

    def rules(call: OpCall) -> Iterator[Rule]:
        yield from () if call["dim"] is None else _kept(call, form)

    return Entry(rules)


def _kept(call: OpCall, form: Form) -> Iterator[Rule]:
    x = call["self"]
    gone = call["dim"] % x.ndim if x.ndim else 0
    for dim in range(x.ndim):
        if dim == gone:
            yield Rule((shard(dim),), call.placed(REPLICATE), form)
        else:
            yield alike(call, dim, dim if call["keepdim"] else dim - (gone < dim))


def _found(local: Local, op: object, x: fx.Node, dim: int) -> tuple[fx.Node, fx.Node]:
    """The best of the best of each rank, and where in the whole it is; the dim is kept."""
    value, place = local.parts(local.emit(op, x, dim, True))
    values, places = _gathered(local, value, dim), _gathered(local, _in_whole(local, place, dim), dim)
    best, which = local.parts(local.emit(op, values, dim, True))
    return local.emit(aten.clone.default, best), local.emit(aten.gather.default, places, dim, which)


def _in_whole(local: Local, place: fx.Node, dim: int) -> fx.Node:
    """Positions in a shard as positions in the whole."""
    x = local.call["self"]
    first = local.emit(aten.mul.Scalar, _rank(local, x.device), x.shape[dim] // local.size)
    return local.emit(aten.add.Tensor, place, first)


def _topk(call: OpCall) -> Iterator[Rule]:
    """The first `k` of the first `k` of each rank, where a shard has that many."""
    yield from follow(apart_from("dim"))(call)
    x = call["self"]
    if x.ndim and call["k"]:
        yield Rule((shard(call["dim"] % x.ndim),), call.placed(REPLICATE), _topk_form)


def _topk_form(local: Local) -> tuple[fx.Node, ...]:
    x = local.call["self"]
    dim = local["dim"] % x.ndim
    count = min(local["k"], x.shape[dim] // local.size)
    value, place = local.parts(local.again(k=count))
    values, places = _gathered(local, value, dim), _gathered(local, _in_whole(local, place, dim), dim)
    best, which = local.parts(local.emit(aten.topk.default, values, local["k"], dim, local["largest"], local["sorted"]))
    return local.emit(aten.clone.default, best), local.emit(aten.gather.default, places, dim, which)


# ---- running sums


def _cumsum(call: OpCall) -> Iterator[Rule]:
    """A shard's running sum begins with the sum of the shards before it."""
    yield from follow(apart_from("dim"))(call)
    x = call["self"]
    for dim in dims_of(call["dim"], x.ndim) if x.ndim else ():
        yield Rule((shard(dim),), (shard(dim),), _cumsum_form)
    yield from partials(call, "all")


def _cumsum_form(local: Local) -> tuple[fx.Node, ...]:
    dim = local["dim"] % local.call["self"].ndim
    (output,) = local.call.outputs
    assert output is not None
    total = local.emit(aten.sum.dim_IntList, local["self"], [dim], True, dtype=output.dtype)
    totals = _gathered(local, total, dim)
    ranks = local.emit(aten.arange.default, local.size, device=torch.device(output.device))
    later = local.emit(aten.ge.Tensor, ranks, _rank(local, output.device))
    mask = local.emit(aten.view.default, later, [local.size] + [1] * (output.ndim - 1 - dim))
    before = local.emit(aten.masked_fill.Scalar, totals, mask, 0)
    first = local.emit(aten.sum.dim_IntList, before, [dim], True)
    return (local.emit(aten.add.Tensor, local.again(), first),)


TABLE: Table = {
    aten.max.dim: _extreme(aten.max.dim),
    aten.min.dim: _extreme(aten.min.dim),
    aten.argmax.default: _position(aten.max.dim),
    aten.argmin.default: _position(aten.min.dim),
    aten.topk.default: Entry(_topk),
    aten.cumsum.default: Entry(_cumsum),
}
