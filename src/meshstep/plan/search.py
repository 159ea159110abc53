"""What a search for a plan has compared, and which it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import PlanError
from ..ir.types import bytes_text
from .plan import Auto, AxisPlan, Plan


@dataclass(frozen=True, slots=True)
class Tried:
    """A plan that was costed.

    Args:
        plan: The plan.
        us: Time of a step by the cost model, in microseconds.
        memory: Bytes on a rank at most.
    """

    plan: Plan
    us: float
    memory: int

    @property
    def name(self) -> str:
        """`zero1 on dp + auto on tp`."""
        return " + ".join(f"{_kind(axis)} on {axis.axis}" for axis in self.plan)

    def __str__(self) -> str:
        """`4.21 ms, 12 GiB: fsdp on dp`."""
        return f"{self.us / 1e3:.2f} ms, {bytes_text(self.memory)}: {self.name}"


def _kind(axis: AxisPlan) -> str:
    held = axis.kind == "fsdp" and not axis.regather
    return f"{axis.kind}, held," if held else axis.kind


@dataclass(frozen=True, slots=True)
class Search:
    """How a plan was found.

    Args:
        found: The plan.
        tried: All that were costed, the fastest first; of equal ones, the one that holds less, then the simplest.
        memory: The bound on the bytes of a rank; None if there was none.
        gap: How far the 0/1 programs may be from the optima of their models, relatively, at most.
        variables: Of all 0/1 programs together.
        folded: Layers that were left out, as they repeat others: their cost follows from those that are kept.
        seconds: Time that the search took.
    """

    found: Tried
    tried: tuple[Tried, ...]
    memory: int | None
    gap: float
    variables: int
    folded: int
    seconds: float = field(compare=False)

    def __str__(self) -> str:
        """The plan found, the five next, and how."""
        lines = [f"{self.found}  (found)"]
        lines += [str(tried) for tried in self.tried if tried is not self.found][:5]
        folded = f", {self.folded} layers left out as repeated" if self.folded else ""
        lines.append(
            f"{len(self.tried)} plans costed in {self.seconds:.1f} s; 0/1 programs of {self.variables} variables, "
            f"at most {self.gap:.1%} from their optima{folded}"
        )
        return "\n".join(lines)


def ranked(tried: Sequence[Tried]) -> tuple[Tried, ...]:
    """The fastest first; of equal ones the one that holds less, then the one that was tried first."""
    order = sorted(range(len(tried)), key=lambda i: (round(tried[i].us, 3), tried[i].memory, i))
    return tuple(tried[i] for i in order)


def fastest(tried: Sequence[Tried], auto: Auto) -> Tried:
    """The fastest plan that fits.

    Args:
        tried: As `ranked` gives them, at least one.
        auto: Has the bound.

    Raises:
        PlanError: None fits; says how much is missing, and which needs least.
    """
    found = next((t for t in tried if auto.memory is None or t.memory <= auto.memory), None)
    if found is None:
        assert auto.memory is not None
        least = min(tried, key=lambda t: t.memory)
        missing = bytes_text(least.memory - auto.memory)
        raise PlanError(
            f"no plan fits {bytes_text(auto.memory)} a rank: {missing} are missing",
            at=f"the smallest of {len(tried)}: {least.name}, {bytes_text(least.memory)}",
            hint="more ranks, a smaller batch, or checkpointed activations",
        )
    return found
