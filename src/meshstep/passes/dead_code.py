"""Erases what nobody uses."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.program import Program, prune


@dataclass(frozen=True, slots=True)
class DeadCode:
    """Erase calls whose values are not used. Exact."""

    def __call__(self, program: Program) -> Program:
        """The program without them."""
        if all(node.users or node.op in ("placeholder", "output") for node in program.graph.nodes):
            return program
        new, _ = program.copy()
        prune(new.graph)
        return new
