"""Every decision about placement, as data."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from ..errors import PlanError
from ..ir.types import bytes_text
from ..layout import placement_text, shard_dim
from ..mesh import Mesh
from . import files

_WRITTEN_APART = ("patterns", "state", "whole", "values", "reasons")
Choice = str | int | Placement  # a style ("colwise"), a ZeRO stage, or the placement itself


@dataclass(frozen=True, slots=True)
class AxisPlan:
    """What is decided for one axis.

    Args:
        axis: Name of the mesh axis.
        kind: Name of the plan that it comes from.
        batch_dim: The dim of arguments that is split over the ranks along the axis; None if arguments are whole.
        stage: What of the state is sharded along it: 0 nothing, 1 the optimizer's, 2 gradients too, 3 parameters too.
        patterns: What is said of parameters and modules by name, in `fnmatch` patterns; the first that fits counts.
        in_place: Whether parameters that `patterns` shard are computed with as they lie, instead of being gathered.
        min_bytes: Parameters with fewer bytes stay whole, and their state with them.
        regather: Whether a sharded parameter is gathered again for the backward instead of being held.
        sequence_dim: The dim that the style "sequence" shards.
        state: Placement of state by name as a plan's text has it (`parameter fc1.weight`), once it is decided.
        whole: State that was to be sharded, and of which no dim divides, once it is decided.
        values: Placement of every computed value by its name in the program, once it is decided.
        reasons: Why each state lies as it does, by the names of `state`, once it is decided.
    """

    axis: str
    kind: str
    batch_dim: int | None = None
    stage: int = 0
    patterns: tuple[tuple[str, Choice], ...] = ()
    in_place: bool = False
    min_bytes: int = 0
    regather: bool = False
    sequence_dim: int = 1
    state: tuple[tuple[str, Placement], ...] = ()
    whole: tuple[str, ...] = ()
    values: tuple[tuple[str, tuple[Placement | None, ...]], ...] = field(default=(), repr=False)
    reasons: tuple[tuple[str, str], ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        """See that it can be.

        Raises:
            PlanError: A name or a number is none, or a choice is one that parameters cannot have.
        """
        where = f"a plan of kind {self.kind}"
        if not isinstance(self.axis, str):
            raise PlanError(f"{self.axis!r} is no name of an axis", at=where, hint="the axis of the mesh: axis='dp'")
        for name in ("batch_dim", "sequence_dim", "min_bytes"):
            value = getattr(self, name)
            if not is_count(value) and not (name == "batch_dim" and value is None):
                raise PlanError(f"{name} is {value!r}", at=f"{where}, axis {self.axis!r}", hint="a number from 0 on")
        for pattern, choice in self.patterns:
            if isinstance(choice, Partial):
                raise PlanError(
                    f"{pattern!r} is to lie as {placement_text(choice)}",
                    at=f"{where}, axis {self.axis!r}",
                    hint="Shard(dim) or Replicate(): state is never a sum over ranks",
                )

    def data(self) -> dict[str, Any]:
        """What a file has of it: all but what follows from the rest."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _WRITTEN_APART}
        return plain | {
            "patterns": {pattern: files.written(choice) for pattern, choice in self.patterns},
            "state": {name: placement_text(placement) for name, placement in self.state},
            "whole": list(self.whole),
        }

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> AxisPlan:
        """The plan that a file has.

        Raises:
            ValueError: It is none.
        """
        return cls(
            **files.scalars(data, {f.name for f in fields(cls)} - {"values", "reasons"}),
            patterns=tuple((str(pattern), files.choice(choice)) for pattern, choice in data["patterns"].items()),
            state=tuple((str(name), files.placement(text, str(name))) for name, text in data["state"].items()),
            whole=tuple(map(str, data["whole"])),
        )

    def __str__(self) -> str:
        """One line for what is said of names, of state that is sharded, and of state that cannot be."""
        lines = [f"{self.kind} on {self.axis}"]
        lines += [f"  {pattern} -> {_choice_text(choice)}" for pattern, choice in self.patterns]
        lines += [f"  {name}: {placement_text(p)}" for name, p in self.state if shard_dim(p) is not None]
        lines += [f"  {name}: whole, no dim divides" for name in self.whole]
        return "\n".join(lines)


def is_count(value: object) -> bool:
    """Whether it is a whole number from 0 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _choice_text(choice: Choice) -> str:
    return placement_text(choice) if isinstance(choice, Placement) else str(choice)


@dataclass(frozen=True, slots=True)
class Auto:
    """Asks for a plan of every axis that no other plan is about.

    Args:
        memory: Bytes that a rank may hold at most; None is no bound.
        device: Name of the device in the hardware table; None is the default one.
    """

    memory: int | None = None
    device: str | None = None

    def __str__(self) -> str:
        """`auto on every other axis, within 80 GiB on h100`."""
        within = "" if self.memory is None else f", within {bytes_text(self.memory)}"
        return f"auto on every other axis{within}" + (f" on {self.device}" if self.device else "")


@dataclass(frozen=True, slots=True)
class Plan:
    """Plans of different axes together.

    >>> from meshstep import plans
    >>> plans.data_parallel() == plans.data_parallel("dp")
    True
    """

    axes: tuple[AxisPlan, ...]
    auto: Auto | None = None  # what finds the plans of the other axes, until they are found

    def __iter__(self) -> Iterator[AxisPlan]:
        """The plans of the axes."""
        return iter(self.axes)

    def __add__(self, other: Plan) -> Plan:
        """Both plans together.

        Raises:
            PlanError: Both decide about one axis, both find the others, or one is no plan.
        """
        _check_plan(other, "plan + ...")
        if self.auto and other.auto:
            raise PlanError("two plans that find themselves", at="auto + auto", hint="one plans.auto() for all axes")
        ours = {plan.axis for plan in self}
        for plan in other:
            if plan.axis in ours:
                raise PlanError(
                    f"two plans for axis {plan.axis!r}",
                    at=f"{self[plan.axis].kind} + {plan.kind}",
                    hint="give one of them another axis of the mesh",
                )
        return replace(self, axes=self.axes + other.axes, auto=self.auto or other.auto)

    def __getitem__(self, axis: str) -> AxisPlan:
        """The plan of an axis.

        Raises:
            PlanError: There is none.
        """
        for plan in self:
            if plan.axis == axis:
                return plan
        known = ", ".join(repr(plan.axis) for plan in self)
        raise PlanError(f"no plan for axis {axis!r}", at=" + ".join(plan.kind for plan in self), hint=f"one of {known}")

    def __str__(self) -> str:
        """The plans of the axes, one after another."""
        return "\n".join(map(str, (*self, self.auto) if self.auto else self))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, for `plans.load`.

        A plan of `lower(...)` has the placement of all state, which is then not decided again.

        Args:
            path: The file; replaced if it is there, and complete or not there.

        Raises:
            PlanError: It cannot be written, or is not found yet.
        """
        self.check_found()
        files.write(path, [axis.data() for axis in self])

    def diff(self, other: Plan) -> tuple[str, ...]:
        """What another plan decides otherwise, a line each: `dp: parameter fc1.weight: S(0) -> R`.

        Raises:
            PlanError: The other one is no plan.
        """
        _check_plan(other, "plan.diff(...)")
        lines: list[str] = []
        for axis in dict.fromkeys(p.axis for plan in (self, other) for p in plan):
            ours, theirs = (next((p.data() for p in plan if p.axis == axis), None) for plan in (self, other))
            if ours is None or theirs is None:
                lines.append(f"{axis}: {'only in the other plan' if ours is None else 'not in the other plan'}")
            else:
                lines += [f"{axis}: {line}" for line in files.differing(ours, theirs)]
        return tuple(lines)

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
            if axis not in planned and self.auto is None:
                raise PlanError(
                    f"the plan says nothing about axis {axis!r} of the mesh",
                    at=f"{' + '.join(p.kind for p in self)} on {mesh!r}",
                    hint=f"add a plan for {axis!r} (plan_a + plan_b), or take the axis out of the mesh",
                )

    def check_found(self) -> None:
        """See that every axis has its plan.

        Raises:
            PlanError: The plan is one that is found for a step, and was not.
        """
        if self.auto is not None:
            raise PlanError(
                "the plan is not found yet: it depends on the step",
                at=str(self),
                hint="step.lower(...).plan, or meshstep plan --plan auto --save plan.json",
            )

    def over(self, mesh: Mesh) -> Plan:
        """The plan before anything is found: ranks have rows of their own along the axes that it is asked for."""
        if self.auto is None:
            return self
        return Plan(self.axes + tuple(AxisPlan(axis, "auto", batch_dim=0) for axis in self.asked(mesh)))

    def asked(self, mesh: Mesh) -> tuple[str, ...]:
        """The axes for which a plan is to be found, in the order of the mesh."""
        planned = [plan.axis for plan in self]
        return tuple(axis for axis in mesh if axis not in planned) if self.auto else ()

    def batch_dims(self) -> dict[str, int]:
        """The dim of arguments that is split along each axis along which every rank has a part of its own."""
        return {plan.axis: plan.batch_dim for plan in self if plan.batch_dim is not None}


def _check_plan(other: object, where: str) -> None:
    if not isinstance(other, Plan):
        raise PlanError(
            f"a {type(other).__name__} instead of a plan", at=where, hint="one of meshstep.plans, or plans.load(path)"
        )


def load(path: str | os.PathLike[str]) -> Plan:
    """Read a plan that `Plan.save` has written; nothing of the file is executed.

    Raises:
        PlanError: There is no such file, or it is no plan; says what is wrong in it.
    """
    axes = files.read(path)
    with files.reading(path):
        return Plan(tuple(map(AxisPlan.of, axes)))
