"""Losses that come as one op: rows are independent until they are averaged by what depends on all of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..layout import PARTIAL
from .factors import factor
from .pointwise import split
from .reductions import share_of_mean
from .rule import Entry, OpCall, Rule, Table

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


TABLE: Table = {
    aten.binary_cross_entropy_with_logits.default: Entry(elementwise_loss),
    aten.nll_loss_forward.default: Entry(nll_loss),
    aten.nll_loss_backward.default: Entry(factor("n,nC,n,C,=->nC", "first")),
}
