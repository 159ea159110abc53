"""Where an element of one rank's part lies in the whole tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..layout import Layout, blocks, own_part, shard_dim, strided
from ..mesh import Mesh


def global_index(index: Sequence[int], shape: Sequence[int], layout: Layout, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """The index in the whole tensor.

    Args:
        index: Of an element of the part.
        shape: Of the part.
        layout: How the tensor lies.
        mesh: The mesh.
        rank: Whose part it is.
    """
    at, whole = mesh.coordinate(rank), layout.global_shape(shape, mesh)
    found = []
    for dim, place in enumerate(index):
        splits = [
            (strided(0, blocks(placement)), mesh[axis], at[axis])
            for axis, placement in layout.placements
            if shard_dim(placement) == dim
        ]
        found.append(int(own_part(torch.arange(whole[dim]), splits)[place]))
    return tuple(found)
