"""Random tensors: a shard is computed from its own place in the whole, so any placement costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import fx

from ..ir import random
from ..ir.collectives import axis_index
from ..layout import REPLICATE, shard
from .rule import Entry, Local, OpCall, Rule, Table

aten = torch.ops.aten


def placed(call: OpCall) -> Iterator[Rule]:
    """Any dim may be sharded."""
    whole = (REPLICATE,) * len(call.tensors)
    yield from (Rule(whole, (shard(dim),), _part_of(dim)) for dim in range(len(call["size"])))


def _part_of(dim: int) -> Callable[[Local], tuple[fx.Node, ...]]:
    def local(form: Local) -> tuple[fx.Node, ...]:
        length = form["size"][dim] // form.size
        index = form.emit(axis_index, form.axis, torch.device(form.call.tensors[0].device))
        first = form.emit(aten.mul.Scalar, index, length)
        start, size = list(form["start"]), list(form["size"])
        start[dim] = first if start[dim] is None else form.emit(aten.add.Tensor, start[dim], first)
        size[dim] = length
        op = form.call.op
        return (form.emit(op, form["seed"], start, form["stream"], size, form["whole"], form["dtype"]),)

    return local


TABLE: Table = {op: Entry(placed) for op in random.EXPANSIONS}
