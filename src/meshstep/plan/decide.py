"""From a plan to the rule of every call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import fx
from torch.distributed.tensor.placement_types import Placement

from ..ir.program import STATE_KINDS, Program, Slot, SlotKind, producer
from ..layout import REPLICATE, blocks, shard, shard_dim
from .calls import Calls
from .choose import choose
from .cost import Hardware
from .decision import Decision
from .plan import AxisPlan
from .propagate import Natural, Open, keep_sharded
from .sequence import wanted_placements
from .state import Named, computed_in_place, place_state


def decide(
    program: Program,
    plan: AxisPlan,
    arguments: Mapping[Slot, Placement],
    *,
    named: Named | None = None,
    whole_outputs: bool = False,
    hardware: Hardware | None = None,
) -> tuple[Decision, AxisPlan]:
    """Choose a rule for every call of a program along one axis.

    Args:
        program: The program, not yet partitioned along the axis.
        plan: What is decided for the axis.
        arguments: Placement of each ARGUMENT slot, and of state that lies already.
        named: The placements that the plans of axes name; see `named_placements`.
        whole_outputs: Whether user outputs come back whole; else those that are sharded along dim 0 stay so.
        hardware: Gives the times; None is a CPU core with loopback.

    Returns:
        The decision, and the plan with the placement of all state and every value written down.

    Raises:
        PlanError: Nothing fits.
    """
    state = place_state(program, plan, named or {})
    placed = {**state.placements, **arguments}
    inputs = [placed.get(slot, REPLICATE) for slot in program.slots]
    in_play = frozenset(map(blocks, inputs)) | _merged(program, inputs)
    calls = Calls(program, program.mesh[plan.axis], in_play - {0, 1})
    wanted = wanted_placements(program, plan, calls)
    pinned = computed_in_place(program, plan)
    left = keep_sharded(program, calls, inputs, pinned=pinned, wanted=wanted)
    outputs = [
        placed.get(result.slot, REPLICATE) if result.slot else _user_output(left, node, plan, whole_outputs)
        for result, node in program.outputs
    ]
    found = choose(program, plan.axis, calls, left.rules, inputs, outputs, hardware or Hardware())
    if plan.regather:
        found = replace(found, regather=left.stored())
    values = tuple((node.name, rule.outputs) for node, rule in found.rules.items())
    lies = tuple((str(slot), placement) for slot, placement in placed.items() if slot.kind in STATE_KINDS)
    why = dict(state.reasons) | dict.fromkeys(arguments, "lies so already")
    reasons = tuple((str(slot), why[slot]) for slot in placed if slot.kind in STATE_KINDS)
    decided = replace(plan, values=values, state=lies, whole=state.whole, reasons=reasons)
    return replace(found, allowed=left.rules, calls=calls), decided


def _merged(program: Program, inputs: Sequence[Placement]) -> frozenset[int]:
    """The numbers of blocks that sharded arguments have where their leading dims are merged: rows of sequences."""
    return frozenset(
        math.prod(node.meta["type"].shape[:dim])
        for (slot, node), placement in zip(program.inputs, inputs, strict=True)
        if slot.kind is SlotKind.ARGUMENT and (dim := shard_dim(placement)) is not None
    )


def _user_output(left: Open, node: fx.Node, plan: AxisPlan, whole: bool) -> Placement:
    """What a rank returns: its rows of what is sharded like the batch, else all."""
    if plan.batch_dim is None or whole:
        return REPLICATE
    rows = shard(plan.batch_dim)
    return rows if left.natural[producer(node)] == Natural(rows) else REPLICATE
