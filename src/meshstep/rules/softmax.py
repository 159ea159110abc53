"""Softmax and its like along a dim that may be sharded: the largest element and the sum are taken over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import fx

from ..ir import collectives
from ..layout import REPLICATE, shard
from .factors import Linear, alike, apart_from, dims_of, follow
from .rule import Entry, Local, OpCall, Rule, Table

aten = torch.ops.aten
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def along_sharded(form: Callable[[Local], tuple[fx.Node, ...]], linear: Linear = ()) -> Entry:
    """All other dims carry on; the dim itself by a local form."""
    others = follow(apart_from("dim"), linear)

    def rules(call: OpCall) -> Iterator[Rule]:
        yield from others(call)
        x = call.tensors[0]
        for dim in dims_of(call["dim"], x.ndim) if x.ndim else ():
            rule = alike(call, dim)
            yield Rule(rule.inputs, rule.outputs, form)

    return Entry(rules)


def wide(local: Local, x: fx.Node) -> fx.Node:
    """In the dtype that sums are kept in."""
    have = x.meta["type"].dtype
    return cast(local, x, _WIDE.get(have, have))


def cast(local: Local, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    """In another dtype."""
    return x if x.meta["type"].dtype == dtype else local.emit(aten._to_copy.default, x, dtype=dtype)


def over_all(local: Local, x: fx.Node, op: str = "sum") -> fx.Node:
    """Reduced over the ranks."""
    return local.emit(collectives.all_reduce, x, op, local.axis)


def _exponentials(local: Local, dims: list[int]) -> tuple[fx.Node, fx.Node, fx.Node]:
    """The elements less the largest one, their exponentials, and the sum of these over all ranks."""
    x = wide(local, cast(local, local["self"], _result(local)))
    below = local.emit(aten.sub.Tensor, x, over_all(local, local.emit(aten.amax.default, x, dims, True), "max"))
    powers = local.emit(aten.exp.default, below)
    return below, powers, over_all(local, local.emit(aten.sum.dim_IntList, powers, dims, True))


def _result(local: Local) -> torch.dtype:
    (output,) = local.call.outputs
    assert output is not None
    return output.dtype


def _softmax(local: Local) -> tuple[fx.Node, ...]:
    _, powers, total = _exponentials(local, [local["dim"]])
    return (cast(local, local.emit(aten.div.Tensor, powers, total), _result(local)),)


def _log_softmax(local: Local) -> tuple[fx.Node, ...]:
    below, _, total = _exponentials(local, [local["dim"]])
    found = local.emit(aten.sub.Tensor, below, local.emit(aten.log.default, total))
    return (cast(local, found, _result(local)),)


def _softmax_backward(local: Local) -> tuple[fx.Node, ...]:
    grad, y = wide(local, local["grad_output"]), wide(local, local["output"])
    product = local.emit(aten.mul.Tensor, grad, y)
    total = over_all(local, local.emit(aten.sum.dim_IntList, product, [local["dim"]], True))
    found = local.emit(aten.sub.Tensor, product, local.emit(aten.mul.Tensor, y, total))
    return (cast(local, found, _result(local)),)


def _log_softmax_backward(local: Local) -> tuple[fx.Node, ...]:
    grad, y = wide(local, local["grad_output"]), wide(local, local["output"])
    total = over_all(local, local.emit(aten.sum.dim_IntList, grad, [local["dim"]], True))
    share = local.emit(aten.mul.Tensor, local.emit(aten.exp.default, y), total)
    return (cast(local, local.emit(aten.sub.Tensor, grad, share), _result(local)),)


# ---- logsumexp: the dims are gone


def _logsumexp(call: OpCall) -> Iterator[Rule]:
    x = call["self"]
    gone = dims_of(call["dim"], x.ndim) if x.ndim else ()
    for dim in range(x.ndim):
        if dim in gone:
            yield Rule((shard(dim),), (REPLICATE,), _logsumexp_form)
        else:
            yield alike(call, dim, dim if call["keepdim"] else dim - sum(d < dim for d in gone))


def _logsumexp_form(local: Local) -> tuple[fx.Node, ...]:
    x = wide(local, cast(local, local["self"], _result(local)))
    dims = list(dims_of(local["dim"], local.call["self"].ndim))
    largest = over_all(local, local.emit(aten.amax.default, x, dims, True), "max")
    infinite = local.emit(aten.isinf.default, largest)
    base = local.emit(aten.masked_fill.Scalar, largest, infinite, 0)
    powers = local.emit(aten.exp.default, local.emit(aten.sub.Tensor, x, base))
    total = over_all(local, local.emit(aten.sum.dim_IntList, powers, dims, True))
    found = local.emit(aten.add.Tensor, local.emit(aten.log.default, total), base)
    found = found if local["keepdim"] else local.emit(aten.squeeze.dims, found, dims)
    return (cast(local, found, _result(local)),)


TABLE: Table = {
    aten._softmax.default: along_sharded(_softmax),
    aten._log_softmax.default: along_sharded(_log_softmax),
    aten._softmax_backward_data.default: along_sharded(_softmax_backward, "first"),
    aten._log_softmax_backward_data.default: along_sharded(_log_softmax_backward, "first"),
    aten.logsumexp.default: Entry(_logsumexp),
}
