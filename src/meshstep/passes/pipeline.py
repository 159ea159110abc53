"""The one loop over the passes: it verifies, and nothing else does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..errors import PassError
from ..ir.program import Program
from ..ir.verifier import verify_program


@runtime_checkable
class Pass(Protocol):
    """A rewrite of a local program: a frozen dataclass, its fields its options.

    It edits a private copy (`program.copy()`) and returns a new program, or the very same one if nothing changed.
    """

    def __call__(self, program: Program) -> Program:
        """The rewritten program."""
        ...


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Passes, one after another.

    Args:
        passes: The passes in order.
        check_types: Compare types with every op's fake implementation after each pass; slow, for tests.
    """

    passes: tuple[Pass, ...]
    check_types: bool = False

    def __iter__(self) -> Iterator[Pass]:
        """The passes."""
        return iter(self.passes)

    def __call__(self, program: Program) -> Program:
        """Run all passes.

        Raises:
            PassError: A pass made something that is no program.
        """
        for pass_ in self.passes:
            changed = pass_(program)
            if not isinstance(changed, Program):
                raise PassError(
                    f"the pass returned {type(changed).__name__}", at=f"pass {pass_!r}", hint="a pass returns a Program"
                )
            if changed is not program:
                verify_program(changed, types=self.check_types, by=f"pass {pass_!r}")
            program = changed
        return program
