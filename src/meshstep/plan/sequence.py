"""Sequence parallelism: which values the style "sequence" wants in shards of the sequence."""

from __future__ import annotations

from torch import fx
from torch.distributed.tensor.placement_types import Placement

from ..ir.program import Program, is_part, producer
from ..layout import shard
from .calls import Calls
from .plan import AxisPlan
from .state import choice_of

Value = tuple[fx.Node, int]


def wanted_placements(program: Program, plan: AxisPlan, calls: Calls) -> dict[Value, Placement]:
    """What modules of the style "sequence" compute in the forward, and what they get, through elementwise calls.

    The residual stream lies so from one norm to the next: the sums on the way are asked for the same placement.

    Args:
        program: Not yet partitioned along the plan's axis.
        plan: The plan of the axis.
        calls: The calls of the program.
    """
    wanted: dict[Value, Placement] = {}
    if not any(choice == "sequence" for _, choice in plan.patterns):
        return wanted
    along = shard(plan.sequence_dim)
    modules = {node.meta.get("module", "") for node in program.calls}
    chosen = {module for module in modules if choice_of(plan, module) == "sequence"}
    for node in reversed(program.graph.nodes):
        if node.op != "call_function" or is_part(node) or node.meta.get("backward"):
            continue
        inside = node.meta.get("module", "") in chosen
        if not inside and (node, 0) not in wanted:
            continue
        fitting = [rule for rule in calls.rules(node) if rule.outputs[0] == along]
        if not fitting:
            wanted.pop((node, 0), None)
            continue
        wanted[node, 0] = along
        rule = max(fitting, key=lambda rule: rule.inputs.count(along))
        if inside or _is_elementwise(node, calls):
            for value, placement in zip(calls.tensors(node), rule.inputs, strict=True):
                if placement == along:
                    wanted[producer(value)] = along
    return wanted


def _is_elementwise(node: fx.Node, calls: Calls) -> bool:
    """Whether the inputs of a call are as long as its output along every dim: a sum, not a product of matrices."""
    call = calls.call(node)
    output = call.outputs[0]
    return output is not None and all(t.shape == output.shape or t.ndim < output.ndim for t in call.tensors)
