"""From a plan to the rule of every call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx
from torch.distributed.tensor.placement_types import Placement

from ..ir.program import Program, Slot, producer
from ..layout import REPLICATE, shard
from .calls import Calls
from .choose import choose
from .cost import Hardware
from .decision import Decision
from .plan import AxisPlan
from .propagate import Natural, Open, keep_batch_sharded
from .state import state_placement


def decide(
    program: Program,
    plan: AxisPlan,
    arguments: Mapping[Slot, Placement],
    *,
    whole_outputs: bool = False,
    hardware: Hardware | None = None,
) -> Decision:
    """Choose a rule for every call of a program along one axis.

    Args:
        program: The program, not yet partitioned along the axis.
        plan: What is decided for the axis.
        arguments: Placement of each ARGUMENT slot.
        whole_outputs: Whether user outputs come back whole; else those that are sharded along dim 0 stay so.
        hardware: Gives the times; None is a CPU core with loopback.

    Raises:
        PlanError: Nothing fits.
    """
    size = program.mesh[plan.axis]

    def of_slot(slot: Slot, node: fx.Node) -> Placement:
        placed = arguments.get(slot)
        return state_placement(plan, slot, node.meta["type"], size) if placed is None else placed

    inputs = [of_slot(slot, node) for slot, node in program.inputs]
    calls = Calls(program, size)
    left = keep_batch_sharded(program, calls, inputs)
    outputs = [
        of_slot(result.slot, node) if result.slot else _user_output(left, node, whole_outputs)
        for result, node in program.outputs
    ]
    return choose(program, plan.axis, calls, left.rules, inputs, outputs, hardware or Hardware())


def decided(plan: AxisPlan, decision: Decision) -> AxisPlan:
    """The plan with the placement of every value written down."""
    return replace(plan, values=tuple((node.name, rule.outputs) for node, rule in decision.rules.items()))


def _user_output(left: Open, node: fx.Node, whole: bool) -> Placement:
    natural = left.natural[producer(node)]
    return shard(0) if natural == Natural(shard(0)) and not whole else REPLICATE
