"""The collectives of the IR: dim-aware, named by axis, functional, without process groups.

Each is a torch op with a fake implementation, so that a program holding them can be traced, planned and partitioned
again. `size` is the number of ranks along the axis; the text form leaves it out, as the mesh in its header says it.

    all_reduce(x, op, axis)                        every rank gets the reduction of all parts
    all_gather(x, dim, axis, size)                 every rank gets all parts, concatenated along dim
    reduce_scatter(x, dim, op, axis, size)         every rank gets its shard of the reduction
    all_to_all(x, split_dim, concat_dim, axis, size)   the shard moves from concat_dim to split_dim
    axis_slice(x, dim, axis, size)                 this rank's shard of a replicated value: nothing is sent
    axis_index(axis, device)                       i64[]: this rank's position along the axis

Only the runtime can execute them: lowered to `c10d`, or over all virtual ranks in `simulate`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_SCHEMAS = {
    "all_reduce": "(Tensor x, str op, str axis) -> Tensor",
    "all_gather": "(Tensor x, int dim, str axis, int size) -> Tensor",
    "reduce_scatter": "(Tensor x, int dim, str op, str axis, int size) -> Tensor",
    "all_to_all": "(Tensor x, int split_dim, int concat_dim, str axis, int size) -> Tensor",
    "axis_slice": "(Tensor x, int dim, str axis, int size) -> Tensor",
    "axis_index": "(str axis, Device device) -> Tensor",
}


def _resized(x: Tensor, dim: int, times: int = 1, parts: int = 1) -> Tensor:
    return x.new_empty([n * times // parts if d == dim else n for d, n in enumerate(x.shape)])


def _all_reduce(x: Tensor, op: str, axis: str) -> Tensor:
    return x.new_empty(x.shape)


def _all_gather(x: Tensor, dim: int, axis: str, size: int) -> Tensor:
    return _resized(x, dim, times=size)


def _reduce_scatter(x: Tensor, dim: int, op: str, axis: str, size: int) -> Tensor:
    return _resized(x, dim, parts=size)


def _all_to_all(x: Tensor, split_dim: int, concat_dim: int, axis: str, size: int) -> Tensor:
    return _resized(_resized(x, split_dim, parts=size), concat_dim, times=size)


def _axis_slice(x: Tensor, dim: int, axis: str, size: int) -> Tensor:
    return _resized(x, dim, parts=size)


def _axis_index(axis: str, device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


_FAKES: dict[str, Any] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "axis_slice": _axis_slice,
    "axis_index": _axis_index,
}


def _register() -> None:
    for name, schema in _SCHEMAS.items():
        torch.library.define(f"meshstep::{name}", schema)
        torch.library.register_fake(f"meshstep::{name}", _FAKES[name])


_register()

all_reduce = torch.ops.meshstep.all_reduce.default
all_gather = torch.ops.meshstep.all_gather.default
reduce_scatter = torch.ops.meshstep.reduce_scatter.default
all_to_all = torch.ops.meshstep.all_to_all.default
axis_slice = torch.ops.meshstep.axis_slice.default
axis_index = torch.ops.meshstep.axis_index.default

COLLECTIVES = frozenset({all_reduce, all_gather, reduce_scatter, all_to_all, axis_slice, axis_index})
SENDS_NOTHING = frozenset({axis_slice, axis_index})
_AXIS: dict[Any, int] = {all_reduce: 2, all_gather: 2, reduce_scatter: 3, all_to_all: 3, axis_slice: 2, axis_index: 0}


def parts_first(dim: int, ndim: int) -> list[int]:
    """The order that brings the dim of the parts to the front: `[.., parts, n, ..]` to `[parts, .., n, ..]`."""
    return [dim, *(d for d in range(ndim) if d != dim)]


def parts_back(dim: int, ndim: int) -> list[int]:
    """The order that takes it back before `dim`."""
    return [*range(1, dim + 1), 0, *range(dim + 1, ndim)]


def axis_of(op: object, args: tuple) -> str:
    """The mesh axis of a call of a collective."""
    return args[_AXIS[op]]


def bytes_sent(op: object, nbytes: int, size: int) -> int:
    """Bytes that each rank sends in a bandwidth-optimal (ring) collective.

    Args:
        op: One of the collectives.
        nbytes: Bytes of the input on one rank.
        size: Ranks along the axis.

    Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of Collective Communication Operations in MPICH".
    """
    if op in SENDS_NOTHING:
        return 0
    if op is all_gather:
        return nbytes * (size - 1)
    share = nbytes * (size - 1) // size
    return 2 * share if op is all_reduce else share
