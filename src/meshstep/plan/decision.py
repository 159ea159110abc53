"""What a plan comes to for one program and one axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx
from torch.distributed.tensor.placement_types import Placement

from ..ir.program import Program
from ..rules import Rule
from .calls import Calls


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """The placements of one axis.

    Args:
        axis: Name of the mesh axis.
        inputs: Placement of each slot.
        outputs: Placement of each result.
        rules: The rule of each call.
        regather: Values that are kept in shards, and gathered anew for the backward instead of being held.
        allowed: The rules that the plan left open for each call; empty if that was not noted.
        calls: All rules of each call; None if they were not noted.
    """

    axis: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    rules: Mapping[fx.Node, Rule]
    regather: frozenset[tuple[fx.Node, int]] = frozenset()
    allowed: Mapping[fx.Node, tuple[Rule, ...]] = field(default_factory=dict)
    calls: Calls | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A program on its way to one rank's, and what was decided for the next axis.

    Args:
        program: Partitioned along the axes before.
        decision: What was decided.
    """

    program: Program
    decision: Decision
