"""The one loop over the passes: it verifies, and nothing else does. A pipeline is a value, and has a text form."""

from __future__ import annotations

import ast
import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ..errors import InputError, PassError
from ..ir.printer import program_text
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


@runtime_checkable
class LooksAhead(Protocol):
    """A pass whose choices depend on the passes that follow it."""

    def before(self, rest: Pipeline) -> Pass:
        """The pass, when `rest` comes after it."""
        ...


@dataclass(frozen=True, slots=True)
class PassRecord:
    """What one pass did.

    Args:
        name: The pass with its options, as the text form of a pipeline has it.
        seconds: Time that it took, without the verification after it.
        changed: Whether it changed anything.
        calls: Calls of ops before and after it.
        before: The program's text before it; None unless it was asked for.
        after: Likewise, after it.
    """

    name: str
    seconds: float
    changed: bool
    calls: tuple[int, int]
    before: str | None = None
    after: str | None = None

    def __str__(self) -> str:
        """`dead_code: 120 -> 100 calls in 0.012 s`."""
        done = f"{self.calls[0]} -> {self.calls[1]} calls" if self.changed else "nothing to do"
        return f"{self.name}: {done} in {self.seconds:.3f} s"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Passes, one after another.

    >>> from meshstep.passes import Bucket, DeadCode
    >>> print(Pipeline((DeadCode(), Bucket(bucket_bytes=4096))))
    dead_code | bucket(bucket_bytes=4096)

    Args:
        passes: The passes in order.
        check_types: Compare types with every op's fake implementation after each pass; slow, for tests.
    """

    passes: tuple[Pass, ...]
    check_types: bool = False

    def __post_init__(self) -> None:
        """See that there are passes.

        Raises:
            InputError: There is something else.
        """
        given: Any = self.passes
        wrong = [given] if not isinstance(given, tuple) else [p for p in given if not callable(p)]
        if wrong:
            raise InputError(
                f"{wrong[0]!r} is no pass",
                at="Pipeline(passes)",
                hint="a tuple of passes: Pipeline((DeadCode(), Bucket())); of text: meshstep.passes.pipeline(text)",
            )

    def __iter__(self) -> Iterator[Pass]:
        """The passes."""
        return iter(self.passes)

    def __call__(
        self, program: Program, observe: Callable[[PassRecord], Any] | None = None, *, texts: bool = False
    ) -> Program:
        """Run all passes.

        Args:
            program: A local program.
            observe: Told of every pass when it is done.
            texts: Whether it is told the texts before and after, too.

        Raises:
            PassError: A pass made something that is no program.
        """
        for i, pass_ in enumerate(self.passes):
            began = time.perf_counter()
            run = pass_.before(Pipeline(self.passes[i + 1 :])) if isinstance(pass_, LooksAhead) else pass_
            changed = run(program)
            seconds = time.perf_counter() - began
            if not isinstance(changed, Program):
                raise PassError(
                    f"the pass returned {type(changed).__name__}", at=f"pass {pass_!r}", hint="a pass returns a Program"
                )
            if changed is not program:
                verify_program(changed, types=self.check_types, by=f"pass {pass_!r}")
            if observe is not None:
                both = [program_text(p) for p in (program, changed)] if texts else [None, None]
                counts = (len(program.calls), len(changed.calls))
                observe(PassRecord(pass_text(pass_), seconds, changed is not program, counts, *both))
            program = changed
        return program

    def __str__(self) -> str:
        """The text form: names of passes, each with the options that are not the default ones."""
        return " | ".join(map(pass_text, self.passes))


def pass_text(pass_: Pass) -> str:
    """`bucket(bucket_bytes=4096)`."""
    name, own = (
        snake_case(type(pass_).__name__),
        getattr(pass_, "__dataclass_fields__", {}),
    )  # a pass may be any callable
    given = {f.name: (getattr(pass_, f.name), f.default) for f in own.values()}
    options = ", ".join(f"{key}={value!r}" for key, (value, default) in given.items() if value != default)
    return f"{name}({options})" if options else name


def snake_case(name: str) -> str:
    """`LaunchEarly` as `launch_early`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def parse(text: str, known: dict[str, type]) -> Pipeline:
    """The pipeline of a text form. Nothing of the text is executed.

    Args:
        text: As `str` of a pipeline gives it.
        known: The classes of passes by name.

    Raises:
        InputError: It names a pass that there is not, or an option that the pass has not.
    """
    return Pipeline(tuple(_parsed(part.strip(), known) for part in text.split("|") if part.strip()))


def _parsed(text: str, known: dict[str, type]) -> Pass:
    where = f"pipeline, pass {text!r}"
    try:
        tree = ast.parse(text, mode="eval").body
        call = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        options = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        if not name or call.args:
            raise ValueError("a name, and options as name=value")
    except (SyntaxError, ValueError) as error:
        raise InputError(f"no pass: {error}", at=where, hint="dead_code | bucket(bucket_bytes=4096)") from None
    if name not in known:
        raise InputError(f"no pass {name!r}", at=where, hint=", ".join(sorted(known)))
    fields = {field.name: field for field in dataclasses.fields(known[name])}
    if not options.keys() <= fields.keys():
        raise InputError(f"{name} has no such options", at=where, hint=", ".join(fields) or "no options")
    for key, field in fields.items():
        if key not in options and field.default is dataclasses.MISSING:
            raise InputError(f"{name} needs {key}", at=where, hint=f"{name}({key}=...)")
    for key, value in options.items():
        if not _fits(value, str(fields[key].type)):
            raise InputError(f"{key} is {value!r}", at=where, hint=f"{key}: {fields[key].type}, from 0 on if a number")
    made: Pass = known[name](**options)
    return made


def _fits(value: Any, annotation: str) -> bool:
    """Whether an option may have a value: of one of the types that are written for it, and from 0 on if a number."""
    kinds = annotation.split(" | ")
    named = type(value).__name__ in kinds or (value is None and "None" in kinds)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return (named or (number and "float" in kinds)) and not (number and value < 0)
