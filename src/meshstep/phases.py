"""From a captured program to one rank's: plan and partition axis by axis, then the passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.distributed.tensor.placement_types import Placement

from .ir.program import Program, Slot
from .ir.verifier import verify_program
from .partition import partition_traced
from .passes import DEFAULT, PassRecord, Pipeline
from .plan.decide import decide
from .plan.decision import Decision, Stage
from .plan.plan import AxisPlan, Plan
from .plan.state import named_placements

Placements = Callable[[str], Mapping[Slot, Placement]]  # of the arguments along an axis


def local_program(
    program: Program,
    plan: Plan,
    placements: Placements,
    *,
    whole_outputs: bool = False,
    passes: Pipeline | None = None,
    observe: Callable[[PassRecord], Any] | None = None,
    decided: Callable[[Stage], Any] | None = None,
) -> tuple[Program, Plan]:
    """Plan and partition a program along every axis of its mesh.

    The outermost first: where two axes split one dim, ranks in order then hold its parts in order, as torch's DTensor
    has it.

    Args:
        program: A global program.
        plan: Has a plan for every axis.
        placements: Gives the placements of the arguments along an axis.
        whole_outputs: Whether user outputs come back whole.
        passes: What runs over the local program; None is the default pipeline.
        observe: Told what each pass did.
        decided: Told what was decided along each axis.

    Returns:
        The local program, and the plan with the placement of every value.

    Raises:
        PlanError: The plan does not fit the mesh or the program.
    """
    plans = []
    for stage in partitions(program, plan, placements, whole_outputs=whole_outputs):
        if decided is not None:
            decided(Stage(stage.before, stage.decision))
        program = stage.after
        plans.append(stage.plan)
    verify_program(program, by="partition")
    return (passes or DEFAULT)(program, observe), Plan(tuple(plans))


@dataclass(frozen=True, slots=True, eq=False)
class Partitioned:
    """A program before and after it is partitioned along one axis.

    Args:
        decision: The placements along the axis.
        plan: The plan of the axis with the placement of every value.
        before: The program before.
        after: The program after.
        images: For each value of `before`, by producer and output index, the node of `after` that is one rank's part.
    """

    decision: Decision
    plan: AxisPlan
    before: Program
    after: Program
    images: Mapping[tuple[fx.Node, int], fx.Node]


def partitions(
    program: Program, plan: Plan, placements: Placements, *, whole_outputs: bool = False
) -> Iterator[Partitioned]:
    """Plan and partition a program, axis by axis; see `local_program`.

    Raises:
        PlanError: The plan does not fit the mesh or the program.
    """
    plan.check_found()
    plan.check(program.mesh)
    named = named_placements(program, plan)
    for axis in program.mesh.axes:
        decision, decided = decide(program, plan[axis], placements(axis), named=named, whole_outputs=whole_outputs)
        after, images = partition_traced(program, decision)
        yield Partitioned(decision, decided, program, after, images)
        program = after
