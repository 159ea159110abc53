"""Where a plan puts state."""

from __future__ import annotations

from torch.distributed.tensor.placement_types import Placement

from ..ir.program import Slot, SlotKind
from ..ir.types import TensorType
from ..layout import REPLICATE, shard
from .plan import AxisPlan

_FROM_STAGE = {SlotKind.OPTIMIZER_STATE: 1, SlotKind.GRADIENT: 2, SlotKind.PARAMETER: 3}


def state_placement(plan: AxisPlan, slot: Slot, type_: TensorType, size: int) -> Placement:
    """Placement of one tensor of state along the plan's axis.

    Args:
        plan: The plan of the axis.
        slot: What the tensor is.
        type_: Its type, whole along the axis.
        size: Number of ranks along the axis.

    Returns:
        As the plan names it; else sharded on the first dim that divides evenly, if the plan shards state of that kind;
        else whole.
    """
    named = dict(plan.state).get(slot.name)
    if named is not None:
        return named
    if size == 1 or plan.stage < _FROM_STAGE.get(slot.kind, 4):
        return REPLICATE
    return next((shard(dim) for dim, n in enumerate(type_.shape) if n and n % size == 0), REPLICATE)
