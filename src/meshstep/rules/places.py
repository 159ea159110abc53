"""Local forms of ops that read or write at positions along a sharded dim: each rank does its own positions.

Reading gives zero for the positions of other ranks, so the result is a sum over the ranks. Writing sends them to one
more row behind the shard, which is then cut off.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from ..ir.collectives import axis_index
from ..ir.types import TensorType
from .rule import Local

aten = torch.ops.aten
Form = Callable[[Local], tuple[fx.Node, ...]]


def own_places(local: Local, index: fx.Node, length: int) -> tuple[fx.Node, fx.Node]:
    """Positions counted from the start of this rank's shard, and whether they are outside of it.

    Args:
        local: The local form.
        index: Positions in the whole; negative ones count from its end.
        length: Length of a shard.
    """
    rank = local.emit(axis_index, local.axis, torch.device(index.meta["type"].device))
    positive = local.emit(aten.remainder.Scalar, index, length * local.size)
    own = local.emit(aten.sub.Tensor, positive, local.emit(aten.mul.Scalar, rank, length))
    below, above = local.emit(aten.lt.Scalar, own, 0), local.emit(aten.ge.Scalar, own, length)
    return own, local.emit(aten.logical_or.default, below, above)


def length_of(local: Local, name: str, dim: int) -> int:
    """Length of a shard of the argument `name`."""
    return local.call[name].shape[dim] // local.size


def can_be_summed(type_: TensorType) -> bool:
    """Whether a sum over the ranks in which all but one are zero gives the value."""
    return type_.dtype.is_signed and type_.dtype is not torch.bool


def read_where(index_name: str, length: Callable[[Local], int], trailing: Callable[[Local], int]) -> Form:
    """The op on this rank's shard, zero where a position is another rank's.

    Args:
        index_name: The argument with the positions.
        length: Length of a shard.
        trailing: How many dims the result has after those of the positions.
    """

    def form(local: Local) -> tuple[fx.Node, ...]:
        own, outside = own_places(local, local[index_name], length(local))
        found = local.again(**{index_name: local.emit(aten.masked_fill.Scalar, own, outside, 0)})
        return (zero_where(local, found, outside, trailing(local)),)

    return form


def zero_where(local: Local, value: fx.Node, outside: fx.Node, trailing: int) -> fx.Node:
    """Zero where a mask is true whose dims come before the last `trailing` ones."""
    shape = list(outside.meta["type"].shape)
    mask = local.emit(aten.view.default, outside, shape + [1] * trailing) if trailing else outside
    return local.emit(aten.masked_fill.Scalar, value, mask, 0)


def write_where(index_name: str, dim: Callable[[Local], int]) -> Form:
    """The op on this rank's shard, with the positions of other ranks in a row behind it that is dropped."""

    def form(local: Local) -> tuple[fx.Node, ...]:
        at = dim(local)
        length = length_of(local, "self", at)
        own, outside = own_places(local, local[index_name], length)
        behind = local.emit(aten.masked_fill.Scalar, own, outside, length)
        written = local.again(**{"self": with_row(local, local["self"], at), index_name: behind})
        return (local.emit(aten.slice.Tensor, written, at, 0, length),)

    return form


def with_row(local: Local, x: fx.Node, dim: int) -> fx.Node:
    """One more row of zeros at the end of a dim."""
    after = x.meta["type"].ndim - 1 - dim
    return local.emit(aten.constant_pad_nd.default, x, [0, 0] * after + [0, 1])


def on_first_rank(local: Local) -> tuple[fx.Node, ...]:
    """The op, with zero in place of `self` on all ranks but the first."""
    x = local["self"]
    rank = local.emit(axis_index, local.axis, torch.device(x.meta["type"].device))
    return (local.again(self=local.emit(aten.masked_fill.Scalar, x, local.emit(aten.ne.Scalar, rank, 0), 0)),)
