"""The named plans: `meshstep.plans`."""

from __future__ import annotations

from .plan import AxisPlan, Plan


def data_parallel(axis: str = "dp") -> Plan:
    """State replicated, the batch split over `axis`; what depends on the batch is computed where its rows are.

    Args:
        axis: Name of the mesh axis.
    """
    return Plan((AxisPlan(axis, "data_parallel", splits_batch=True),))


__all__ = ["data_parallel"]
