"""How one tensor lies along the axes of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .errors import LayoutError
from .mesh import Mesh

REPLICATE = Replicate()
PARTIAL = Partial("sum")


@lru_cache
def shard(dim: int) -> Shard:
    """The one `Shard(dim)` object of a dim."""
    return Shard(dim)


def shard_dim(placement: Placement) -> int | None:
    """The dim that a placement splits, `None` if it splits none."""
    return placement.dim if isinstance(placement, Shard) else None


def strided(dim: int, blocks: int) -> Placement:
    """Placeholder until strided shards are there (helper "strided" replaces this)."""
    return shard(dim)


def blocks(placement: Placement) -> int:
    """Placeholder until strided shards are there (helper "strided" replaces this)."""
    return 1


def placement_text(placement: Placement) -> str:
    """`R`, `S(0)` or `P(sum)`."""
    match placement:
        case Shard():
            return f"S({placement.dim})"
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
        LayoutError: An axis is there twice, or what is said of it is no placement.
    """

    placements: tuple[tuple[str, Placement], ...] = ()

    def __post_init__(self) -> None:
        """Check axes and placements."""
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
    if shape[dim] % size:
        padded = -(-shape[dim] // size) * size
        raise LayoutError(
            f"dim {dim} of size {shape[dim]} cannot be split over axis {axis!r} ({size} shards)",
            at=f"shape {list(shape)}",
            hint=f"Replicate() on {axis!r}, or pad the dim to {padded}",
        )
    return (*shape[:dim], shape[dim] // size, *shape[dim + 1 :])
