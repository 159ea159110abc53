"""Views, and ops that move elements without changing them. All are linear."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement

from ..layout import REPLICATE, local_shape, shard, strided
from .factors import Origins, alike, all_but_last, apart_from, dims_of, follow, partials
from .rule import Entry, Local, OpCall, Rule, Table

aten = torch.ops.aten
Blocks = Callable[[OpCall, frozenset[int], int], Iterator[Rule]]


def output_size(name: str) -> Callable[[OpCall, Rule, int], Mapping[str, Any]]:
    """The argument `name` is the shape of the output: it becomes the shape of one shard."""

    def localize(call: OpCall, rule: Rule, size: int) -> Mapping[str, Any]:
        output, placement = call.outputs[0], rule.outputs[0]
        assert output is not None and placement is not None
        return {name: list(local_shape(output.shape, placement, "", size))}

    return localize


# ---- view: dims are merged and split


def view(call: OpCall) -> Iterator[Rule]:
    """A shard of the leading dim of a group of dims is a shard of the leading dim that the group becomes."""
    (x,), (y,) = call.tensors, call.outputs
    assert y is not None
    yield from (alike(call, dim, to) for dim, to in view_dims(x.shape, y.shape))
    yield from partials(call, "all")


def view_dims(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The leading dims of the smallest groups of consecutive dims that hold the same number of elements.

    >>> list(view_dims((8, 16, 32), (128, 4, 8)))
    [(0, 0), (2, 1)]
    """
    if 0 in before:
        return
    rest = [iter(_lasting(shape)) for shape in (before, after)]
    for (i, m), (j, n) in zip(*rest, strict=False):
        yield i, j
        while m != n:
            if m < n:
                m *= next(rest[0])[1]
            else:
                n *= next(rest[1])[1]


def view_blocks(call: OpCall, counts: frozenset[int], size: int) -> Iterator[Rule]:
    """A shard of each of so many blocks of a group of dims, wherever it is one dim that is split so."""
    (x,), (y,) = call.tensors, call.outputs
    assert y is not None
    allowed = counts | {1}
    for before, after in _groups(x.shape, y.shape):
        for source, flat in _flat_blocks(x.shape, before, allowed, size):
            for target, same in _flat_blocks(y.shape, after, allowed, size):
                if flat == same:
                    yield Rule((source,), (target,))


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[range, range]]:
    """The smallest groups of consecutive dims that hold the same number of elements."""
    starts = [*view_dims(before, after), (len(before), len(after))]
    for (i, j), (end_i, end_j) in itertools.pairwise(starts):
        yield range(i, end_i), range(j, end_j)


def _flat_blocks(
    shape: Sequence[int], dims: range, counts: frozenset[int], size: int
) -> Iterator[tuple[Placement, int]]:
    """The placements of a group's dims, each with the number of blocks that it makes of the group as a whole."""
    outer = 1
    for dim in dims:
        for count in sorted(counts):
            if shape[dim] % (count * size) == 0:
                yield strided(dim, count), outer * count
        outer *= shape[dim]


def _lasting(shape: Sequence[int]) -> list[tuple[int, int]]:
    return [(dim, n) for dim, n in enumerate(shape) if n != 1]


# ---- dims are reordered, dropped, or added


def _transposed(call: OpCall) -> list[int]:
    dims = list(range(call.tensors[0].ndim))
    a, b = call["dim0"], call["dim1"]
    if dims:
        dims[a], dims[b] = dims[b], dims[a]
    return dims


def _moved(call: OpCall) -> list[int]:
    ndim = call.tensors[0].ndim
    source, target = dims_of(call["source"], ndim), dims_of(call["destination"], ndim)
    rest = (d for d in range(ndim) if d not in source)
    return [source[target.index(d)] if d in target else next(rest) for d in range(ndim)]


def _without(*names: str) -> Origins:
    """The dims that these arguments name are gone."""
    return lambda call: [d for d in apart_from(*names)(call) if d is not None]


def _added(call: OpCall) -> list[int | None]:
    """A new dim at the argument `dim`."""
    dims: list[int | None] = list(range(call.tensors[0].ndim))
    dims.insert(call["dim"] % (len(dims) + 1), None)
    return dims


def _sliced(call: OpCall) -> list[int | None]:
    """Every dim but the sliced one, and that one too where the slice is the whole of it."""
    x, y = call.tensors[0], call.outputs[0]
    assert y is not None
    whole = x.shape == y.shape and call["step"] == 1
    return [d if whole or d != call["dim"] % x.ndim else None for d in range(x.ndim)]


def _selected_from(call: OpCall) -> list[int | None]:
    """`select_backward`: the dim comes back."""
    ndim = len(call["input_sizes"])
    dims: list[int | None] = list(range(ndim - 1))
    dims.insert(call["dim"] % ndim, None)
    return dims


def _repeated(call: OpCall) -> list[int | None]:
    more = len(call["repeats"]) - call.tensors[0].ndim
    return [dim - more if dim >= more and n == 1 else None for dim, n in enumerate(call["repeats"])]


def _on_diagonal(call: OpCall) -> list[int | None]:
    """`diag_embed`: the last dim becomes two."""
    ndim = call.tensors[0].ndim + 1
    fixed, kept = dims_of([call["dim1"], call["dim2"]], ndim), iter(range(ndim - 2))
    return [None if d in fixed else next(kept) for d in range(ndim)]


def _unfolded(call: OpCall) -> list[int | None]:
    """`unfold_backward`: the windows, kept in the last dim, go back to where they are from."""
    ndim = len(call["input_sizes"])
    return [None if d == call["dim"] % ndim else d for d in range(ndim)]


def _diagonal(call: OpCall) -> list[int | None]:
    return [*_without("dim1", "dim2")(call), None]


def _diagonal_of(call: OpCall) -> list[int | None]:
    """`diagonal_backward`: the two dims come back."""
    fixed = dims_of([call["dim1"], call["dim2"]], len(call["input_sizes"]))
    kept = iter(range(call.tensors[0].ndim - 1))
    return [None if d in fixed else next(kept) for d in range(len(call["input_sizes"]))]


# ---- squeeze: a shard may have a dim of size 1 where the whole has not


def squeeze(call: OpCall) -> Iterator[Rule]:
    """Drops the dims that are 1 in the whole, and no others."""
    gone, shape = _squeezed(call), call.tensors[0].shape
    for to, dim in enumerate(d for d in range(len(shape)) if d not in gone):
        rule = alike(call, dim, to)
        yield Rule(rule.inputs, rule.outputs, _squeeze_whole, anywhere=True)
    yield from partials(call, "all")


def _squeezed(call: OpCall) -> list[int]:
    shape = call.tensors[0].shape
    return [d for d in dims_of(call.arguments.get("dim"), len(shape)) if shape and shape[d] == 1]


def _squeeze_whole(local: Local) -> tuple[fx.Node, ...]:
    return (local.emit(aten.squeeze.dims, local["self"], _squeezed(local.call)),)


# ---- cat and stack


def _joined(call: OpCall) -> list[int | None]:
    ndim = call.tensors[0].ndim
    same = all(type_.ndim == ndim for type_ in call.tensors)  # PyTorch passes over f32[0]
    return list(apart_from("dim")(call)) if same else []


def _padded(call: OpCall) -> list[int | None]:
    x, y = call.tensors[0], call.outputs[0]
    assert y is not None
    pads = {x.ndim - 1 - i // 2 for i, n in enumerate(call["pad"]) if n}
    return [None if d in pads else d for d in range(x.ndim)]


def _pad(call: OpCall) -> Iterator[Rule]:
    yield from follow(_padded, "all" if call["value"] == 0 else ())(call)


# ---- expand: a dim that was not there, or was 1, is there on every rank


def expand(call: OpCall) -> Iterator[Rule]:
    """Dims carry on; what is new can be had in shards of a whole input."""
    (x,), (y,) = call.tensors, call.outputs
    assert y is not None
    more = y.ndim - x.ndim
    for to, n in enumerate(y.shape):
        carried = to >= more and x.shape[to - more] == n
        yield alike(call, to - more, to) if carried else Rule((REPLICATE,), (shard(to),))
    yield from partials(call, "all")


def _linear(origins: Origins, size: str | None = None, blocks: Blocks | None = None) -> Entry:
    return Entry(follow(origins, "all"), output_size(size) if size else None, blocks=blocks)


def _copies(table: Table) -> Table:
    """The ops that give a copy of what the view gives: `view_copy` for `view`."""
    found = {}
    for op, entry in table.items():
        packet = getattr(aten, f"{op._schema.name.removeprefix('aten::')}_copy", None)
        if packet is not None and op._overloadname in packet.overloads():
            found[getattr(packet, op._overloadname)] = entry
    return found


# ---- parts of a dim that is sharded in blocks


def split_blocks(call: OpCall, counts: frozenset[int], size: int) -> Iterator[Rule]:
    """Equal parts of a dim of as many blocks, or a multiple: each rank has a shard of every part."""
    x, parts = call.tensors[0], len(call.outputs)
    dim = call["dim"] % max(x.ndim, 1)
    if len(set(call.outputs)) > 1:
        return
    for count in sorted(counts):
        if count % parts == 0:
            part = strided(dim, count // parts)
            yield Rule((strided(dim, count),), call.placed(part), _split_evenly(dim, parts))


def _split_evenly(dim: int, parts: int) -> Callable[[Local], tuple[fx.Node, ...]]:
    def local(form: Local) -> tuple[fx.Node, ...]:
        length = form["self"].meta["type"].shape[dim] // parts
        return form.parts(form.emit(aten.split_with_sizes.default, form["self"], [length] * parts, dim))

    return local


def joined_blocks(call: OpCall, counts: frozenset[int], size: int) -> Iterator[Rule]:
    """Shards of equal parts, one after another, are a shard of each block."""
    parts = len(call.tensors)
    dim = call["dim"] % max(call.tensors[0].ndim, 1)
    if len(set(call.tensors)) > 1:
        return
    for count in sorted(counts):
        if count % parts == 0:
            yield Rule((strided(dim, count // parts),) * parts, (strided(dim, count),))


def slice_blocks(call: OpCall, counts: frozenset[int], size: int) -> Iterator[Rule]:
    """A slice of some of the blocks."""
    backward = call.op is aten.slice_backward.default
    whole, dim = (list(call["input_sizes"]) if backward else call.tensors[0].shape), call["dim"]
    dim %= len(whole)
    length = whole[dim]
    start = _bound(call["start"], length, 0)
    end = _bound(call["end"], length, length)
    if call["step"] != 1 or end <= start or end - start == length:
        return
    for count in sorted(counts):
        block = length // count
        if length % count == 0 and start % block == 0 and end % block == 0:
            placements = strided(dim, count), strided(dim, (end - start) // block)
            form = _slice_of_blocks(dim, start, end, size)
            first, last = reversed(placements) if backward else placements
            yield Rule((first,), (last,), form)


def _bound(value: int | None, length: int, default: int) -> int:
    if value is None:
        return default
    return min(value + length if value < 0 else value, length)


def _slice_of_blocks(dim: int, start: int, end: int, size: int) -> Callable[[Local], tuple[fx.Node, ...]]:
    def local(form: Local) -> tuple[fx.Node, ...]:
        changed: dict[str, Any] = {"start": start // size, "end": end // size}
        if "input_sizes" in form.call.arguments:
            sizes = form["input_sizes"]
            changed["input_sizes"] = [n // size if d == dim else n for d, n in enumerate(sizes)]
        return (form.again(**changed),)

    return local


_VIEW = Entry(view, output_size("size"), blocks=view_blocks)
_SQUEEZE = Entry(squeeze)
_ALONG_DIM = _linear(apart_from("dim"))
_SPLIT = _linear(apart_from("dim"), blocks=split_blocks)
_IN_BATCH = _linear(all_but_last(2))

_VIEWS: Table = {
    aten.view.default: _VIEW,
    aten._unsafe_view.default: _VIEW,
    aten.reshape.default: Entry(view, output_size("shape"), blocks=view_blocks),
    aten.t.default: _linear(lambda call: range(call.tensors[0].ndim)[::-1]),
    aten.transpose.int: _linear(_transposed),
    aten.permute.default: _linear(lambda call: dims_of(call["dims"], call.tensors[0].ndim)),
    aten.movedim.int: _linear(_moved),
    aten.movedim.intlist: _linear(_moved),
    aten.squeeze.default: _SQUEEZE,
    aten.squeeze.dim: _SQUEEZE,
    aten.squeeze.dims: _SQUEEZE,
    aten.unsqueeze.default: _linear(_added),
    aten.expand.default: Entry(expand, output_size("size")),
    aten.alias.default: _linear(all_but_last(0)),
    aten.detach.default: _linear(all_but_last(0)),
    aten.select.int: _linear(_without("dim")),
    aten.select_backward.default: _linear(_selected_from, "input_sizes"),
    aten.slice.Tensor: _linear(_sliced, blocks=slice_blocks),
    aten.slice_backward.default: _linear(_sliced, "input_sizes", blocks=slice_blocks),
    aten.split.Tensor: _SPLIT,
    aten.split_with_sizes.default: _SPLIT,
    aten.unsafe_split.Tensor: _SPLIT,
    aten.chunk.default: _SPLIT,
    aten.narrow.default: _ALONG_DIM,
    aten.unbind.int: _linear(_without("dim")),
    aten.diagonal.default: _linear(_diagonal),
    aten.diagonal_backward.default: _linear(_diagonal_of, "input_sizes"),
    aten.diag_embed.default: _linear(_on_diagonal),
    aten.unfold.default: _linear(apart_from("dimension")),
    aten.unfold_backward.default: _linear(_unfolded, "input_sizes"),
    aten.flip.default: _linear(apart_from("dims")),
    aten.roll.default: _linear(apart_from("dims")),
    aten.repeat.default: _linear(_repeated),
    aten.tril.default: _IN_BATCH,
    aten.triu.default: _IN_BATCH,
    aten.cat.default: _linear(_joined, blocks=joined_blocks),
    aten.stack.default: _linear(_added),
    aten.constant_pad_nd.default: Entry(_pad),
    aten.view_as_complex.default: _linear(all_but_last(1)),
    aten.view_as_real.default: _linear(all_but_last(0)),
}

TABLE: Table = _VIEWS | _copies(_VIEWS)
