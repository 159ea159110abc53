"""From a plan to the rule of every call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.distributed.tensor.placement_types import Placement

from ..ir.program import Program, Slot, SlotKind, producer
from ..layout import REPLICATE, shard
from .calls import Calls
from .choose import choose
from .cost import Hardware
from .decision import Decision
from .plan import AxisPlan
from .propagate import Open, keep_batch_sharded


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
    inputs = [_input(slot, dict(plan.state), arguments) for slot in program.slots]
    calls = Calls(program, program.mesh[plan.axis])
    left = keep_batch_sharded(program, calls, inputs)
    outputs = _outputs(program, dict(plan.state), arguments, left, whole_outputs)
    return choose(program, plan.axis, calls, left.rules, inputs, outputs, hardware or Hardware())


def decided(plan: AxisPlan, decision: Decision) -> AxisPlan:
    """The plan with the placement of every value written down."""
    return replace(plan, values=tuple((node.name, rule.outputs) for node, rule in decision.rules.items()))


def _input(slot: Slot, state: Mapping[str, Placement], arguments: Mapping[Slot, Placement]) -> Placement:
    return arguments[slot] if slot.kind is SlotKind.ARGUMENT else state.get(slot.name, REPLICATE)


def _outputs(
    program: Program,
    state: Mapping[str, Placement],
    arguments: Mapping[Slot, Placement],
    left: Open,
    whole: bool,
) -> Sequence[Placement]:
    placements = []
    for result, node in program.outputs:
        natural = left.natural[producer(node)]
        if result.slot is not None:
            placements.append(_input(result.slot, state, arguments))
        else:
            placements.append(shard(0) if natural == shard(0) and not whole else REPLICATE)
    return placements
