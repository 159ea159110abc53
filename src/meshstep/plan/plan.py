"""Every decision about placement, as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from torch.distributed.tensor.placement_types import Placement

from ..errors import PlanError
from ..layout import placement_text
from ..mesh import Mesh


@dataclass(frozen=True, slots=True)
class AxisPlan:
    """What is decided for one axis.

    Args:
        axis: Name of the mesh axis.
        kind: Name of the plan that it comes from.
        splits_batch: Whether each rank along the axis has rows of its own.
        stage: What of the state is sharded along it: 0 nothing, 1 the optimizer's, 2 gradients too, 3 parameters too.
        state: Placement of state by fully-qualified name; what is not named lies as `stage` says.
        values: Placement of every computed value by its name in the program, once it is decided.
    """

    axis: str
    kind: str
    splits_batch: bool = False
    stage: int = 0
    state: tuple[tuple[str, Placement], ...] = ()
    values: tuple[tuple[str, tuple[Placement | None, ...]], ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        """One line a named state, after the axis."""
        lines = [f"{self.kind} on {self.axis}"]
        lines += [f"  {name}: {placement_text(placement)}" for name, placement in self.state]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Plan:
    """Plans of different axes together.

    >>> from meshstep import plans
    >>> plans.data_parallel() == plans.data_parallel("dp")
    True
    """

    axes: tuple[AxisPlan, ...]

    def __iter__(self) -> Iterator[AxisPlan]:
        """The plans of the axes."""
        return iter(self.axes)

    def __add__(self, other: Plan) -> Plan:
        """Both plans together.

        Raises:
            PlanError: Both decide about one axis.
        """
        ours = {plan.axis for plan in self}
        for plan in other:
            if plan.axis in ours:
                raise PlanError(
                    f"two plans for axis {plan.axis!r}",
                    at=f"{self[plan.axis].kind} + {plan.kind}",
                    hint="give one of them another axis of the mesh",
                )
        return replace(self, axes=self.axes + other.axes)

    def __getitem__(self, axis: str) -> AxisPlan:
        """The plan of an axis."""
        return next(plan for plan in self if plan.axis == axis)

    def __str__(self) -> str:
        """The plans of the axes, one after another."""
        return "\n".join(map(str, self))

    def check(self, mesh: Mesh) -> None:
        """See that plan and mesh speak of the same axes.

        Raises:
            PlanError: They do not.
        """
        planned = [plan.axis for plan in self]
        for axis in planned:
            if axis not in mesh:
                raise PlanError(
                    f"the plan is about axis {axis!r}, which the mesh lacks",
                    at=f"{self[axis].kind}(axis={axis!r}) on {mesh!r}",
                    hint=f"axis={mesh.axes[0]!r}, or a mesh with {axis!r}",
                )
        for axis in mesh:
            if axis not in planned:
                raise PlanError(
                    f"the plan says nothing about axis {axis!r} of the mesh",
                    at=f"{' + '.join(p.kind for p in self)} on {mesh!r}",
                    hint=f"add a plan for {axis!r} (plan_a + plan_b), or take the axis out of the mesh",
                )

    def batch_axes(self) -> tuple[str, ...]:
        """Axes along which every rank has rows of its own."""
        return tuple(plan.axis for plan in self if plan.splits_batch)
