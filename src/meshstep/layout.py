"""How one tensor lies along the axes of a mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ._torch import StridedShard
from .errors import LayoutError
from .mesh import Mesh

REPLICATE = Replicate()
PARTIAL = Partial("sum")


@lru_cache
def shard(dim: int) -> Shard:
    """The one `Shard(dim)` object of a dim."""
    return Shard(dim)


@lru_cache
def strided(dim: int, blocks: int) -> Placement:
    """A dim of `blocks` equal parts one after another, each of which is split: every rank has its share of each.

    So lies a fused projection of queries, keys and values (3 blocks) whose heads are split over ranks. It is what torch
    calls a strided shard.
    """
    return shard(dim) if blocks == 1 else StridedShard(dim, split_factor=blocks)


def shard_dim(placement: Placement) -> int | None:
    """The dim that a placement splits, `None` if it splits none."""
    return placement.dim if isinstance(placement, (Shard, StridedShard)) else None


def blocks(placement: Placement) -> int:
    """Into how many blocks a placement sees its dim, each of which it splits; 1 for a plain shard."""
    return int(placement.split_factor) if isinstance(placement, StridedShard) else 1


def split(tensor: Tensor, placement: Placement, size: int) -> list[Tensor]:
    """The part of each of `size` ranks; views where they can be."""
    dim, count = shard_dim(placement), blocks(placement)
    if dim is None:
        return [tensor] * size
    if count == 1:
        return list(tensor.chunk(size, dim))
    shape, n = tensor.shape, tensor.shape[dim]
    pieces = tensor.reshape(*shape[:dim], count, size, n // (count * size), *shape[dim + 1 :]).unbind(dim + 1)
    return [piece.reshape(*shape[:dim], n // size, *shape[dim + 1 :]) for piece in pieces]


def own_part(whole: Tensor, splits: Iterable[tuple[Placement, int, int]]) -> Tensor:
    """The part of one rank, a view where it can be.

    Args:
        whole: The whole tensor.
        splits: For each axis, in order, the placement along it, the number of ranks, and this rank's place among them.
    """
    for placement, size, index in splits:
        whole = split(whole, placement, size)[index]
    return whole


def join(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    """The whole from the part of each rank."""
    dim, count = shard_dim(placement), blocks(placement)
    if dim is None:
        return parts[0]
    if count == 1:
        return torch.cat(list(parts), dim)
    shape = parts[0].shape
    n = shape[dim]
    pieces = [part.reshape(*shape[:dim], count, n // count, *shape[dim + 1 :]) for part in parts]
    return torch.cat(pieces, dim + 1).reshape(*shape[:dim], n * len(parts), *shape[dim + 1 :])


def placement_text(placement: Placement) -> str:
    """`R`, `S(0)`, `S(0 in 3)` for a shard of each of 3 blocks, or `P(sum)`."""
    match placement:
        case Shard():
            return f"S({placement.dim})"
        case StridedShard():
            return f"S({placement.dim} in {placement.split_factor})"
        case Partial():
            return f"P({placement.reduce_op})"
    return "R"


@dataclass(frozen=True, slots=True)
class Layout:
    """The placements of one value, axis by axis, in the order in which they split a dim.

    >>> layout = Layout((("dp", Shard(0)), ("tp", Replicate())))
    >>> print(layout, layout.local_shape((8, 16), Mesh(dp=2, tp=2)))
    S(0)@dp R@tp (4, 16)

    Raises:
        LayoutError: An axis is there twice, or what is said of it is no placement, or there are no pairs.
    """

    placements: tuple[tuple[str, Placement], ...] = ()

    def __post_init__(self) -> None:
        """Check axes and placements."""
        pairs: object = self.placements
        if not (isinstance(pairs, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs)):
            raise LayoutError(
                f"{pairs!r} is no layout",
                at="Layout(...)",
                hint="a tuple of axes with their placements: Layout((('dp', Shard(0)),))",
            )
        for axis, placement in self.placements:
            if not isinstance(placement, Placement):
                raise LayoutError(
                    f"{placement!r} is no placement",
                    at=f"axis {axis!r}",
                    hint="Replicate(), Shard(dim) or Partial() of torch.distributed.tensor",
                )
        axes = [axis for axis, _ in self.placements]
        if len(set(axes)) < len(axes):
            twice = next(axis for axis in axes if axes.count(axis) > 1)
            raise LayoutError(f"axis {twice!r} is there twice", at=f"layout {self}", hint="one placement for each axis")

    def __getitem__(self, axis: str) -> Placement:
        """Placement along `axis`; `Replicate()` where nothing is said."""
        return dict(self.placements).get(axis, REPLICATE)

    def extended(self, axis: str, placement: Placement) -> Layout:
        """This layout, split further along one more axis."""
        return replace(self, placements=(*self.placements, (axis, placement)))

    def splits(self, dim: int, mesh: Mesh) -> int:
        """Into how many shards `dim` is split over all axes."""
        count = 1
        for axis, placement in self.placements:
            count *= mesh[axis] if shard_dim(placement) == dim else 1
        return count

    def local_shape(self, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        """Shape of one rank's part of a value of global `shape`.

        Raises:
            LayoutError: A dim does not divide evenly, or is not there.
        """
        local = tuple(shape)
        for axis, placement in self.placements:
            local = local_shape(local, placement, axis, mesh[axis])
        return local

    def global_shape(self, local: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        """Shape of the whole value of which one rank holds `local`."""
        return tuple(size * self.splits(dim, mesh) for dim, size in enumerate(local))

    def __str__(self) -> str:
        """As the text form of a program has it."""
        return " ".join(f"{placement_text(placement)}@{axis}" for axis, placement in self.placements)


def local_shape(shape: Sequence[int], placement: Placement, axis: str, size: int) -> tuple[int, ...]:
    """Shape of one shard of a value of `shape` along one axis of `size` ranks.

    Raises:
        LayoutError: The dim does not divide evenly, or is not there.
    """
    dim = shard_dim(placement)
    if dim is None:
        return tuple(shape)
    if not 0 <= dim < len(shape):
        raise LayoutError(
            f"Shard({dim}) on axis {axis!r} of a {len(shape)}-d tensor",
            at=f"shape {list(shape)}",
            hint="a dim that the tensor has, counted from 0",
        )
    if shape[dim] % (size * blocks(placement)):
        padded = -(-shape[dim] // (size * blocks(placement))) * size * blocks(placement)
        raise LayoutError(
            f"dim {dim} of size {shape[dim]} cannot be split over axis {axis!r} ({size} shards)",
            at=f"shape {list(shape)}",
            hint=f"Replicate() on {axis!r}, or pad the dim to {padded}",
        )
    return (*shape[:dim], shape[dim] // size, *shape[dim + 1 :])
