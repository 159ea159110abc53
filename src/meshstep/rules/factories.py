"""Ops that make a tensor out of nothing but its type: a shard of one is a smaller one."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..layout import PARTIAL, REPLICATE, shard
from .rule import Entry, OpCall, Rule, Table
from .views import output_size

aten = torch.ops.aten

UNINITIALIZED = frozenset({aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default})
_ZEROS = frozenset({aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default})


def made(call: OpCall) -> Iterator[Rule]:
    """Any shard can be made without the rest, and zeros are a sum of zeros. A tensor given is only a pattern."""
    (y,) = call.outputs
    assert y is not None
    pattern = (REPLICATE,) * len(call.tensors)
    yield from (Rule(pattern, (shard(dim),)) for dim in range(y.ndim))
    if call.op in _ZEROS or call.arguments.get("fill_value", 1) == 0:
        yield Rule(pattern, (PARTIAL,))


def like(call: OpCall) -> Iterator[Rule]:
    """As the tensor given is sharded; one that is a sum is as good a pattern as any."""
    (x,) = call.tensors
    yield from (Rule((shard(dim),), (shard(dim),)) for dim in range(x.ndim))
    yield Rule((PARTIAL,), (REPLICATE,))
    if call.op in _ZEROS or call.arguments.get("fill_value", 1) == 0:
        yield Rule((REPLICATE,), (PARTIAL,))


def _nothing(call: OpCall) -> Iterator[Rule]:
    """Every rank makes the whole."""
    del call
    yield from ()


_MADE = Entry(made, output_size("size"))
_LIKE = Entry(like)
_WHOLE = Entry(_nothing)

TABLE: Table = {
    aten.empty.memory_format: _MADE,
    aten.full.default: _MADE,
    aten.ones.default: _MADE,
    aten.zeros.default: _MADE,
    aten.new_empty.default: _MADE,
    aten.new_full.default: _MADE,
    aten.new_ones.default: _MADE,
    aten.new_zeros.default: _MADE,
    aten.empty_like.default: _LIKE,
    aten.full_like.default: _LIKE,
    aten.ones_like.default: _LIKE,
    aten.zeros_like.default: _LIKE,
    aten.arange.default: _WHOLE,
    aten.arange.start: _WHOLE,
    aten.arange.start_step: _WHOLE,
    aten.eye.default: _WHOLE,
    aten.eye.m: _WHOLE,
    aten.linspace.default: _WHOLE,
    aten.scalar_tensor.default: _WHOLE,
}
