"""The named plans: `meshstep.plans`."""

from __future__ import annotations

from ..errors import PlanError
from .plan import AxisPlan, Plan


def data_parallel(axis: str = "dp") -> Plan:
    """State replicated, the batch split over `axis`; what depends on the batch is computed where its rows are.

    Args:
        axis: Name of the mesh axis.
    """
    return Plan((AxisPlan(axis, "data_parallel", splits_batch=True),))


def zero(stage: int, axis: str = "dp") -> Plan:
    """Data parallel, and each rank keeps only its share of some of the state.

    Args:
        stage: 1 shards the optimizer's state, 2 gradients that outlive the step too, 3 parameters too.
        axis: Name of the mesh axis.

    Raises:
        PlanError: There is no such stage.

    Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
    """
    if stage not in (1, 2, 3):
        raise PlanError(f"no ZeRO stage {stage!r}", at="plans.zero(stage)", hint="1, 2 or 3")
    return Plan((AxisPlan(axis, f"zero{stage}", splits_batch=True, stage=stage),))


def fsdp(axis: str = "dp") -> Plan:
    """Parameters, gradients and optimizer state sharded; `zero(3)` by its other name.

    Args:
        axis: Name of the mesh axis.
    """
    return Plan((AxisPlan(axis, "fsdp", splits_batch=True, stage=3),))


__all__ = ["data_parallel", "fsdp", "zero"]
