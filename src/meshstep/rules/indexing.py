"""Ops that read and write at positions held in a tensor. The dim that is looked up stays whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement

from ..ir.types import TensorType
from ..layout import PARTIAL, REPLICATE, shard
from .factors import Linear, Rules, alike, dims_of, factor, partials, together
from .places import (
    Form,
    can_be_summed,
    length_of,
    on_first_rank,
    own_places,
    read_where,
    with_row,
    write_where,
    zero_where,
)
from .rule import Entry, Local, OpCall, Rule, Table

aten = torch.ops.aten

_WRITTEN = (together("self", "src"), together("self", "source"), together("self", "values"))


def _written(call: OpCall) -> Linear:
    return tuple(names for names in _WRITTEN if names <= set(call.arguments))


# ---- gather and scatter: the index has a dim for each of the tensor's


def gather(call: OpCall) -> Iterator[Rule]:
    """Other dims than the one looked up go together where they are equally long; so does the index alone."""
    yield from _equal_dims(call)
    if call.tensors[0].ndim:
        dim = shard(_looked_up(call))
        yield Rule((REPLICATE, dim), (dim,))
        if can_be_summed(call["self"]):
            yield Rule((dim, REPLICATE), (PARTIAL,), _READ)
    yield from partials(call, "first")


def scatter(call: OpCall) -> Iterator[Rule]:
    """Other dims than the one written to go together; a sum passes where what is written is a sum, or zero."""
    yield from _equal_dims(call)
    yield from _own_positions(call)
    if call.arguments.get("value") == 0:
        yield from partials(call, (together("self"),))
    if "reduce" not in call.arguments:
        yield from partials(call, _written(call))


def scatter_add(call: OpCall) -> Iterator[Rule]:
    """As `scatter`; where the ranks hold different things to add, the result is a sum."""
    yield from scatter(call)
    self, index, src = call.tensors
    dim = _looked_up(call)
    if self.ndim and index.shape[dim] == src.shape[dim]:
        yield from _added(Rule((PARTIAL, shard(dim), shard(dim)), (PARTIAL,)))


def _added(rule: Rule) -> Iterator[Rule]:
    """Where each rank adds its own to a sum; what it is added to may also be whole: then the first rank has it."""
    yield rule
    yield Rule((REPLICATE, *rule.inputs[1:]), rule.outputs, on_first_rank)


def _equal_dims(call: OpCall) -> Iterator[Rule]:
    for dim in range(call.tensors[0].ndim):
        if dim != _looked_up(call) and len({t.shape[dim] for t in call.tensors}) == 1:
            yield alike(call, dim)


def _own_positions(call: OpCall) -> Iterator[Rule]:
    """The dim written to, each rank taking what falls into its shard."""
    if call["self"].ndim:
        dim = shard(_looked_up(call))
        yield Rule(tuple(dim if name == "self" else REPLICATE for name in call.names), (dim,), _WRITE)


_READ = read_where("index", lambda local: length_of(local, "self", _looked_up(local.call)), lambda local: 0)
_SELECT = read_where(
    "index",
    lambda local: length_of(local, "self", _looked_up(local.call)),
    lambda local: local.call["self"].ndim - 1 - _looked_up(local.call),
)
_WRITE = write_where("index", lambda local: _looked_up(local.call))


def _looked_up(call: OpCall) -> int:
    return call["dim"] % max(call.tensors[0].ndim, 1)


# ---- index_select and its like: one index for a whole dim


def index_select(call: OpCall) -> Iterator[Rule]:
    """Other dims carry on; a shard of the index reads a shard of the result."""
    yield from _other_dims(call)
    if call["index"].ndim:
        yield Rule((REPLICATE, shard(0)), (shard(_looked_up(call)),))
    if call["self"].ndim and can_be_summed(call["self"]):
        yield Rule((shard(_looked_up(call)), REPLICATE), (PARTIAL,), _SELECT)
    yield from partials(call, "first")


def index_write(call: OpCall) -> Iterator[Rule]:
    """Other dims go together; a sum passes where what is written is a sum, or zero."""
    yield from _other_dims(call)
    yield from _own_positions(call)
    yield from partials(call, (together("self"),) if call.arguments.get("value") == 0 else _written(call))


def index_reduce(call: OpCall) -> Iterator[Rule]:
    """Other dims go together."""
    yield from _other_dims(call)
    yield from _own_positions(call)


def index_add(call: OpCall) -> Iterator[Rule]:
    """As `index_write`; where the ranks hold different things to add, the result is a sum."""
    yield from index_write(call)
    if call["index"].ndim and call.tensors[0].ndim:
        yield from _added(Rule((PARTIAL, shard(0), shard(_looked_up(call))), (PARTIAL,)))


def _other_dims(call: OpCall) -> Iterator[Rule]:
    for dim in range(call.tensors[0].ndim):
        if dim != _looked_up(call):
            inputs = (REPLICATE if name == "index" else shard(dim) for name in call.names)
            yield Rule(tuple(inputs), (shard(dim),))


# ---- x[i, :, j]: several indices, broadcast against each other


@dataclass(frozen=True, slots=True)
class _Indexed:
    """Where the dims of `x[indices]` come from.

    Args:
        kept: Dims of `x` that are not indexed, with the dims of the result that they become.
        start: First dim of the result that comes from the indices.
        shape: Shape of the indices, broadcast.
        ndim: Number of dims of the result.
    """

    kept: tuple[tuple[int, int], ...]
    start: int
    shape: tuple[int, ...]
    ndim: int

    @classmethod
    def of(cls, x: TensorType, indices: Sequence[TensorType | None]) -> _Indexed:
        """Source: NumPy, "Combining advanced and basic indexing": apart from each other, the indexed dims go first."""
        given = [dim for dim, index in enumerate(indices) if index is not None]
        shape = torch.broadcast_shapes(*(index.shape for index in indices if index is not None))
        start = given[0] if given[-1] - given[0] == len(given) - 1 else 0
        rest = [dim for dim in range(x.ndim) if dim not in given]
        kept = tuple((dim, i if i < start else i + len(shape)) for i, dim in enumerate(rest))
        return cls(kept, start, tuple(shape), len(rest) + len(shape))


def index(call: OpCall) -> Iterator[Rule]:
    """Dims that are not indexed carry on; the indices may be sharded together."""
    for indexed in _positions(call):
        for dim, to in indexed.kept:
            yield Rule(_placed(call, indexed, None, self=shard(dim)), (shard(to),))
        for dim in range(len(indexed.shape)):
            yield Rule(_placed(call, indexed, dim, self=REPLICATE), (shard(indexed.start + dim),))
        for dim in _indexed_dims(call) if can_be_summed(call["self"]) else ():
            yield Rule(_placed(call, indexed, None, self=shard(dim)), (PARTIAL,), _index_own(indexed, dim))
    yield from partials(call, "first")


def index_put(call: OpCall) -> Iterator[Rule]:
    """As `index`, for the tensor that is written to; where the ranks add different values, the result is a sum."""
    for indexed in _positions(call):
        for dim, to in indexed.kept:
            yield Rule(_placed(call, indexed, None, self=shard(dim), values=to), (shard(dim),))
        for dim in range(len(indexed.shape) if call["accumulate"] else 0):
            to = indexed.start + dim
            yield from _added(Rule(_placed(call, indexed, dim, self=PARTIAL, values=to), (PARTIAL,)))
        for dim in _indexed_dims(call):
            yield Rule(_placed(call, indexed, None, self=shard(dim)), (shard(dim),), _put_own(dim))
    yield from partials(call, _written(call))


def _indexed_dims(call: OpCall) -> list[int]:
    return [dim for dim, index in enumerate(call["indices"]) if index is not None]


def _index_own(indexed: _Indexed, dim: int) -> Form:
    """Zero where the index of the sharded dim is another rank's."""

    def form(local: Local) -> tuple[fx.Node, ...]:
        indices = list(local["indices"])
        own, outside = own_places(local, indices[dim], length_of(local, "self", dim))
        indices[dim] = local.emit(aten.masked_fill.Scalar, own, outside, 0)
        found = local.again(indices=indices)
        return (zero_where(local, found, outside, indexed.ndim - indexed.start - len(indexed.shape)),)

    return form


def _put_own(dim: int) -> Form:
    """Positions of other ranks go into a row behind the shard, which is dropped."""

    def form(local: Local) -> tuple[fx.Node, ...]:
        indices, length = list(local["indices"]), length_of(local, "self", dim)
        own, outside = own_places(local, indices[dim], length)
        indices[dim] = local.emit(aten.masked_fill.Scalar, own, outside, length)
        written = local.again(self=with_row(local, local["self"], dim), indices=indices)
        return (local.emit(aten.slice.Tensor, written, dim, 0, length),)

    return form


def _positions(call: OpCall) -> Iterator[_Indexed]:
    """The one way that a call indexes, none if by masks: what they pick depends on the data."""
    given = [i for i in call["indices"] if i is not None]
    if given and all(i.dtype in (torch.int32, torch.int64) for i in given):
        yield _Indexed.of(call["self"], call["indices"])


def _placed(
    call: OpCall, indexed: _Indexed, index_dim: int | None, *, self: Placement, values: int | None = None
) -> tuple[Placement, ...]:
    """Inputs with the indices sharded on one of their broadcast dims, and the values on a dim of the result."""
    result = [1] * indexed.ndim
    found = []
    for type_, name in zip(call.tensors, call.names):
        if name == "self":
            found.append(self)
        elif name == "indices":
            found.append(_broadcast(type_, index_dim, len(indexed.shape)))
        else:
            found.append(_broadcast(type_, values, len(result)))
    return tuple(found)


def _broadcast(type_: TensorType, dim: int | None, ndim: int) -> Placement:
    """A shard on `dim` out of `ndim` for a tensor that is broadcast to that many; whole where it has 1 there."""
    own = -1 if dim is None else dim - (ndim - type_.ndim)
    return shard(own) if own >= 0 and type_.shape[own] != 1 else REPLICATE


# ---- writing into a slice


def select_scatter(call: OpCall) -> Iterator[Rule]:
    """Other dims than the one selected from."""
    selected = call["dim"] % call["self"].ndim
    for dim in range(call["self"].ndim):
        if dim != selected:
            yield Rule((shard(dim), shard(dim - (dim > selected))), (shard(dim),))
    yield from partials(call, "all")


def slice_scatter(call: OpCall) -> Iterator[Rule]:
    """Other dims than the sliced one; all where the slice is the whole."""
    self, src = call.tensors
    whole = self.shape == src.shape and call["step"] == 1
    for dim in range(self.ndim):
        if whole or dim != _looked_up(call):
            yield alike(call, dim)
    yield from partials(call, "all")


def diagonal_scatter(call: OpCall) -> Iterator[Rule]:
    """Other dims than the two of the diagonal."""
    fixed = dims_of([call["dim1"], call["dim2"]], call["self"].ndim)
    others = (dim for dim in range(call["self"].ndim) if dim not in fixed)
    for source, dim in enumerate(others):
        yield Rule((shard(dim), shard(source)), (shard(dim),))
    yield from partials(call, "all")


# ---- embedding, and search in a sequence


def embedding_backward(call: OpCall) -> Iterator[Rule]:
    """Every rank's rows add to the gradient, unless they are scaled by how often they occur."""
    yield from _EMBEDDING_SCALED(call) if call["scale_grad_by_freq"] else _EMBEDDING(call)
    if not call["scale_grad_by_freq"]:
        yield Rule((REPLICATE, REPLICATE), (shard(0),), _own_rows)


def _own_rows(local: Local) -> tuple[fx.Node, ...]:
    """Each rank has the gradient of its rows; what belongs to others, or to the padding, is taken for zero."""
    indices, length = local["indices"], local["num_weights"] // local.size
    own, outside = own_places(local, indices, length)
    if local["padding_idx"] >= 0:
        padding = local.emit(aten.eq.Scalar, indices, local["padding_idx"])
        outside = local.emit(aten.logical_or.default, outside, padding)
    grad = zero_where(local, local["grad_output"], outside, 1)
    row = local.emit(aten.masked_fill.Scalar, own, outside, 0)
    return (local.emit(local.call.op, grad, row, length, -1, False),)


_EMBEDDING: Rules = factor("...d,...->Vd", "first")
_EMBEDDING_SCALED: Rules = factor("BCDEd,BCDE->Vd", "first")


def searchsorted(call: OpCall) -> Iterator[Rule]:
    """Each value on its own, where all are sought in the one sequence."""
    if call["sorted_sequence"].ndim == 1:
        yield from factor("=,...,=->...")(call)


TABLE: Table = {
    aten.gather.default: Entry(gather),
    aten.scatter.src: Entry(scatter),
    aten.scatter.value: Entry(scatter),
    aten.scatter.reduce: Entry(scatter),
    aten.scatter_reduce.two: Entry(scatter),
    aten.scatter_add.default: Entry(scatter_add),
    aten.index_select.default: Entry(index_select),
    aten.index_add.default: Entry(index_add),
    aten.index_copy.default: Entry(index_write),
    aten.index_fill.int_Scalar: Entry(index_write),
    aten.index_reduce.default: Entry(index_reduce),
    aten.index.Tensor: Entry(index),
    aten._unsafe_index.Tensor: Entry(index),
    aten.index_put.default: Entry(index_put),
    aten._unsafe_index_put.default: Entry(index_put),
    aten.select_scatter.default: Entry(select_scatter),
    aten.slice_scatter.default: Entry(slice_scatter),
    aten.diagonal_scatter.default: Entry(diagonal_scatter),
    aten.embedding_dense_backward.default: Entry(embedding_backward),
    aten.bucketize.Tensor: Entry(factor("...,=->...")),
    aten.isin.Tensor_Tensor: Entry(factor("...,=->...")),
    aten.searchsorted.Tensor: Entry(searchsorted),
}
