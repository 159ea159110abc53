"""Named axis sizes, without devices."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Never

from .errors import InputError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Mesh:
    """An immutable, hashable grid of ranks with named axes; the last axis is the innermost (ranks next to each other).

    >>> mesh = Mesh(dp=2, tp=4)
    >>> mesh.size, mesh["tp"], mesh.coordinate(5)
    (8, 4, {'dp': 1, 'tp': 1})

    Args:
        axes: Axis name to number of ranks along it, outermost first.

    Raises:
        InputError: There is no axis, or a size is not a positive integer.
    """

    __slots__ = ("_sizes",)
    _sizes: dict[str, int]

    def __init__(self, *unnamed: Never, **axes: int) -> None:
        """Check the sizes and keep them."""
        if unnamed:
            raise InputError(
                f"an axis of size {unnamed[0]!r} has no name", at="Mesh(...)", hint="name the axes: Mesh(dp=2)"
            )
        if not axes:
            raise InputError("a mesh needs at least one axis", at="Mesh()", hint="Mesh(dp=2)")
        for axis, size in axes.items():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise InputError(
                    f"axis {axis!r} has size {size!r}",
                    at="Mesh(...)",
                    hint="a whole number of ranks, at least 1",
                )
        object.__setattr__(self, "_sizes", dict(axes))

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse: a mesh is a value."""
        raise AttributeError("a Mesh cannot be changed; make another one")

    @property
    def axes(self) -> tuple[str, ...]:
        """Axis names, outermost first."""
        return tuple(self._sizes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self._sizes.values())

    def __getitem__(self, axis: str) -> int:
        """Number of ranks along `axis`.

        Raises:
            InputError: The mesh has no such axis.
        """
        if axis not in self._sizes:
            known = ", ".join(map(repr, self._sizes))
            raise InputError(f"the mesh has no axis {axis!r}", at=str(self), hint=f"one of {known}")
        return self._sizes[axis]

    def __contains__(self, axis: object) -> bool:
        """Whether the mesh has an axis of this name."""
        return axis in self._sizes

    def __iter__(self) -> Iterator[str]:
        """Axis names, outermost first."""
        return iter(self._sizes)

    def __eq__(self, other: object) -> bool:
        """Equal names and sizes in equal order."""
        return isinstance(other, Mesh) and tuple(self._sizes.items()) == tuple(other._sizes.items())

    def __hash__(self) -> int:
        """Hash of names and sizes."""
        return hash(tuple(self._sizes.items()))

    def __repr__(self) -> str:
        """The call that makes it."""
        return f"Mesh({', '.join(f'{axis}={size}' for axis, size in self._sizes.items())})"

    def __str__(self) -> str:
        """As the text form of a program has it."""
        return f"mesh({', '.join(f'{axis}={size}' for axis, size in self._sizes.items())})"

    def __reduce__(self) -> tuple:
        """Pickle by the axis sizes."""
        return _mesh, (self._sizes,)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Position of `rank` along each axis.

        Raises:
            InputError: The mesh has no such rank.
        """
        if not 0 <= rank < self.size:
            raise InputError(f"the mesh has no rank {rank}", at=str(self), hint=f"a rank from 0 to {self.size - 1}")
        position = {}
        for axis in reversed(self.axes):
            rank, position[axis] = divmod(rank, self._sizes[axis])
        return {axis: position[axis] for axis in self.axes}

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axis` only, in order, itself included.

        Raises:
            InputError: The mesh has no such rank, or no such axis.
        """
        count = self[axis]
        stride = math.prod(self._sizes[a] for a in self.axes[self.axes.index(axis) + 1 :])
        first = rank - self.coordinate(rank)[axis] * stride
        return tuple(first + i * stride for i in range(count))

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh) -> Mesh:
        """The axis names and sizes of a torch `DeviceMesh`.

        Raises:
            InputError: It is no device mesh, or its dimensions have no names.
        """
        from torch.distributed.device_mesh import DeviceMesh

        given: Any = mesh
        if not isinstance(given, DeviceMesh):
            raise InputError(
                f"a {type(given).__name__} instead of a DeviceMesh",
                at="Mesh.from_device_mesh(...)",
                hint="what torch's init_device_mesh returns; Mesh(dp=2) needs none",
            )
        if not mesh.mesh_dim_names:
            raise InputError(
                "the axes of the DeviceMesh have no names",
                at=str(mesh),
                hint="init_device_mesh(..., mesh_dim_names=('dp',))",
            )
        return cls(**dict(zip(mesh.mesh_dim_names, mesh.mesh.shape, strict=True)))

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """A torch `DeviceMesh` of the same axes over all ranks; the process group must be up.

        Args:
            device_type: `"cpu"`, `"cuda"`, ...
        """
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(device_type, tuple(self._sizes.values()), mesh_dim_names=self.axes)


def _mesh(sizes: dict[str, int]) -> Mesh:
    return Mesh(**sizes)
