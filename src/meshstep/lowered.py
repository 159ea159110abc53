"""A step to look at, before it runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import fx

from .errors import InputError
from .ir.printer import op_text, program_text
from .ir.program import Communication, Program, communication
from .plan.plan import Plan
from .rules import is_known


@dataclass(frozen=True, slots=True, eq=False)
class Lowered:
    """A captured, planned and partitioned step.

    Args:
        program: What one device would compute on the global batch.
        local_program: What each rank computes, with collectives, after all passes.
        plan: The plan with the placement of every value.
        graph_module: The local program as torch runs it; the groups have the names of their axes, and what depends
            on the rank is that of rank 0.
    """

    program: Program
    local_program: Program
    plan: Plan
    graph_module: fx.GraphModule

    def as_text(self, stage: str = "local") -> str:
        """The text form.

        Args:
            stage: "global", "local", or "torch" for the Python code of the graph module.

        Raises:
            InputError: There is no such stage.
        """
        match stage:
            case "global":
                return program_text(self.program)
            case "local":
                return program_text(self.local_program)
            case "torch":
                return self.graph_module.code
        raise InputError(f"no stage {stage!r}", at="as_text(stage=...)", hint='"global", "local", "torch"')

    @property
    def communication(self) -> tuple[Communication, ...]:
        """Every collective of a step, in program order; bytes are what each rank sends."""
        return communication(self.local_program)

    @property
    def fallbacks(self) -> tuple[tuple[str, int], ...]:
        """Ops that have no sharding rule and are computed whole on every rank, each with its number of calls."""
        targets: list[Any] = [node.target for node in self.program.calls]
        counts = Counter(op_text(target) for target in targets if not is_known(target))
        return tuple(sorted(counts.items()))

    def __str__(self) -> str:
        """The local program."""
        return self.as_text()
