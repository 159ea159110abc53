"""What a plan comes to for one program and one axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx
from torch.distributed.tensor.placement_types import Placement

from ..rules import Rule


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """The placements of one axis.

    Args:
        axis: Name of the mesh axis.
        inputs: Placement of each slot.
        outputs: Placement of each result.
        rules: The rule of each call.
        regather: Values that are kept in shards, and gathered anew for the backward instead of being held.
    """

    axis: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    rules: Mapping[fx.Node, Rule]
    regather: frozenset[tuple[fx.Node, int]] = frozenset()
