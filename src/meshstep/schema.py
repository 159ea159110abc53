"""How tensors lie on a mesh, in the words of torch: a mesh, and one placement for each of its dims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor.placement_types import Placement

from .errors import LayoutError
from .layout import Layout, placement_text
from .mesh import Mesh


@dataclass(frozen=True, slots=True, init=False)
class Schema:
    """A mesh and the placement along each of its axes, outermost first.

    >>> from torch.distributed.tensor import Replicate, Shard
    >>> print(Schema(Mesh(dp=2, tp=2), [Shard(0), Replicate()]))
    S(0)@dp R@tp

    Args:
        mesh: The mesh: meshstep's, or a torch `DeviceMesh` with named dims.
        placements: One for each axis.

    Raises:
        LayoutError: There are not as many placements as axes, or one is none.
        InputError: The dims of the device mesh have no names.
    """

    mesh: Mesh
    placements: tuple[Placement, ...]

    def __init__(self, mesh: Any, placements: Sequence[Placement]) -> None:
        """Check the count; `Layout` checks the placements."""
        own = mesh if isinstance(mesh, Mesh) else Mesh.from_device_mesh(mesh)
        if len(placements) != len(own.axes):
            raise LayoutError(
                f"{len(placements)} placements for {len(own.axes)} axes",
                at=f"Schema({own}, ...)",
                hint="one placement for each axis, outermost first",
            )
        object.__setattr__(self, "mesh", own)
        object.__setattr__(self, "placements", tuple(placements))
        Layout(tuple(zip(own.axes, self.placements, strict=True)))

    @property
    def layout(self) -> Layout:
        """The same by the names of the axes."""
        return Layout(tuple(zip(self.mesh.axes, self.placements, strict=True)))

    @classmethod
    def of(cls, layout: Layout, mesh: Mesh) -> Schema:
        """The schema of a layout; replicated along axes of which it says nothing."""
        return cls(mesh, [layout[axis] for axis in mesh.axes])

    def __str__(self) -> str:
        """`S(0)@dp R@tp`."""
        named = zip(self.mesh.axes, self.placements, strict=True)
        return " ".join(f"{placement_text(placement)}@{axis}" for axis, placement in named)
