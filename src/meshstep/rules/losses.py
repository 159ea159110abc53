"""Losses that come as one op: rows are independent until they are averaged by what depends on all of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from ..layout import PARTIAL, shard
from .factors import factor, partials
from .pointwise import split
from .reductions import share_of_mean
from .rule import Entry, Local, OpCall, Rule, Table

aten = torch.ops.aten


def elementwise_loss(call: OpCall) -> Iterator[Rule]:
    """A function of each element, then (by `reduction`) 0 nothing, 1 the mean of all elements, 2 their sum."""
    shape = torch.broadcast_shapes(*(type_.shape for type_ in call.tensors))
    for dim in range(len(shape)):
        rule = split(call, dim, tuple(shape))
        match call["reduction"]:
            case 0:
                yield rule
            case 1:
                yield Rule(rule.inputs, (PARTIAL,), share_of_mean)
            case _:
                yield Rule(rule.inputs, (PARTIAL,))


def nll_loss(call: OpCall) -> Iterator[Rule]:
    """A mean is not covered: it divides by the weights of the valid rows."""
    match call["reduction"]:
        case 0:
            yield from factor("nC,n,C->n,=")(call)
        case 2:
            yield from factor("nC,n,C->,")(call)


def margin_loss(call: OpCall) -> Iterator[Rule]:
    """Rows `n` of classes `C`; (by `reduction`) 0 one loss a row, 1 their mean, 2 their sum."""
    for rows in _rows(call):
        yield Rule(rows.inputs, rows.outputs, _share_of_first if call["reduction"] == 1 else None)


def _share_of_first(local: Local) -> tuple[fx.Node, ...]:
    """What the op gives, the first output divided by the number of ranks."""
    found = local.again()
    if len(local.call.outputs) == 1:
        return (local.emit(aten.div.Tensor, found, local.size),)
    first, *rest = local.parts(found)
    return (local.emit(aten.div.Tensor, first, local.size), *(local.emit(aten.clone.default, part) for part in rest))


def margin_loss_backward(call: OpCall) -> Iterator[Rule]:
    """A mean divides by the number of rows, and each rank has its share of them."""
    for rows in _rows(call):
        yield Rule(rows.inputs, (shard(0),), _share_of_first if call["reduction"] == 1 else None)
    yield from partials(call, "first")


def _rows(call: OpCall) -> Iterator[Rule]:
    if call["self"].ndim == 2:
        yield from factor(_MARGIN[call.op])(call)


_MARGIN = {
    aten.multi_margin_loss.default: "nC,n,C->n",
    aten.multi_margin_loss_backward.default: "n,nC,n,C->nC",
    aten.multilabel_margin_loss_forward.default: "nC,nC->n,nC",
    aten.multilabel_margin_loss_backward.default: "n,nC,nC,nC->nC",
}

TABLE: Table = {
    **dict.fromkeys(list(_MARGIN)[::2], Entry(margin_loss)),
    **dict.fromkeys(list(_MARGIN)[1::2], Entry(margin_loss_backward)),
    aten.binary_cross_entropy_with_logits.default: Entry(elementwise_loss),
    aten.nll_loss_forward.default: Entry(nll_loss),
    aten.nll_loss_backward.default: Entry(factor("n,nC,n,C,=->nC", "first")),
}
