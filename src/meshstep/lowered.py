"""A step to look at, before it runs."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from .errors import InputError
from .ir.printer import op_text, program_text
from .ir.program import Communication, Program, communication
from .passes import PassRecord
from .passes.liveness import Memory, memory
from .passes.timeline import Timeline, timeline
from .plan import hardware
from .plan.decision import Stage
from .plan.plan import Plan
from .plan.search import Search
from .report.collect import facts
from .report.facts import Device, Facts
from .report.page import page
from .report.summary import complete
from .report.text import report_text
from .report.trace import trace
from .rules import Found, OpCall, found_by_running

FORMS: dict[str, Callable[[Facts], str]] = {
    ".html": page,
    ".txt": report_text,
    ".json": lambda found: json.dumps(complete(found), indent=1),
}


@dataclass(frozen=True, slots=True)
class Discovered:
    """An op whose rules were found by running it.

    Args:
        op: Its name.
        calls: Number of its calls.
        rules: Number of rules found, over all kinds of its calls.
        runs: How often it was run for that.
        seconds: Time that it took in this process.
        from_file: Whether all rules were read from the cache, and only tried again.
    """

    op: str
    calls: int
    rules: int
    runs: int
    seconds: float
    from_file: bool

    def __str__(self) -> str:
        """`my.scale: 4 rules found by 310 runs in 0.05 s (2 calls)`."""
        how = "read from the cache and tried again by" if self.from_file else "found by"
        calls = f"{self.calls} call{'' if self.calls == 1 else 's'}"
        return f"{self.op}: {self.rules} rules {how} {self.runs} runs in {self.seconds:.2f} s ({calls})"


@dataclass(frozen=True, slots=True, eq=False)
class Lowered:
    """A captured, planned and partitioned step.

    Args:
        program: What one device would compute on the global batch.
        local_program: What each rank computes, with collectives, after all passes.
        plan: The plan with the placement of every value.
        graph_module: The local program as torch runs it; the groups have the names of their axes, and what depends
            on the rank is that of rank 0.
        passes: What each pass did, and how long it took.
        stages: What was decided along each axis, in order.
        search: How the plan was found; None if it was given.
    """

    program: Program
    local_program: Program
    plan: Plan
    graph_module: fx.GraphModule
    passes: tuple[PassRecord, ...] = ()
    stages: tuple[Stage, ...] = ()
    search: Search | None = None

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
    def memory(self) -> Memory:
        """What a rank holds at most, in bytes, and where."""
        return memory(self.local_program)

    def timeline(self, device: hardware.Hardware | str | None = None, backend: str = "eager") -> Timeline:
        """The predicted step of one rank: when each call would run, and the sums; times are in us.

        Args:
            device: Gives the times: hardware, or its name in the table; None is a CPU core with loopback.
            backend: "eager" or "inductor", which fuses elementwise calls.

        Raises:
            InputError: The hardware table has no such device.
        """
        found = device if isinstance(device, hardware.Hardware) else hardware.get(device or "cpu")
        return timeline(self.local_program, found, backend)

    def cost(self, device: hardware.Hardware | str | None = None, backend: str = "eager") -> float:
        """Predicted time of a step, in us; the arguments are those of `timeline`."""
        return self.timeline(device, backend).total

    @property
    def fallbacks(self) -> tuple[tuple[str, int], ...]:
        """Ops that have no sharding rule and are computed whole on every rank, each with its number of calls."""
        counts = Counter(op_text(op) for op, found in self._run() if not found.learned)
        return tuple(sorted(counts.items()))

    @property
    def discovered(self) -> tuple[Discovered, ...]:
        """Ops whose rules nobody wrote and that were run to find them, by name."""
        kept: dict[str, list[Found]] = {}
        for op, found in self._run():
            if found.learned:
                kept.setdefault(op_text(op), []).append(found)
        return tuple(_together(name, kept[name]) for name in sorted(kept))

    def _run(self) -> Iterator[tuple[Any, Found]]:
        """The calls whose rules nobody wrote, with what running their ops has shown."""
        for node in self.program.calls:
            call = OpCall.of(node.target, node.args, node.kwargs, node.meta["type"])  # type: ignore[arg-type]
            found = found_by_running(call)
            if found is not None:
                yield node.target, found

    def facts(self, *, device: str | None = None, memory: int | None = None) -> Facts:
        """What `report` and `trace` say, as plain data; nothing is run.

        Args:
            device: What the times are for, by its name in the hardware table; None is a CPU core with loopback.
            memory: Bytes that a rank may hold; None is what the device has, if that is known.

        Raises:
            InputError: The hardware table has no such device.
        """
        found = hardware.get(device or "cpu")
        limit = found.capacity if memory is None else memory
        return facts(
            self.local_program,
            self.plan,
            self.stages,
            found,
            Device(found.title, limit, f"Times are predicted, by {found.source}."),
            whole=self.fallbacks,
            passes=tuple(map(str, self.passes)),
        )

    def report(self, path: str | os.PathLike[str], *, device: str | None = None, memory: int | None = None) -> None:
        """Write what the step would cost and hold, and why: one self-contained page, text, or JSON.

        Args:
            path: A file; by its ending `.html`, `.txt` or `.json`.
            device: As for `facts`.
            memory: As for `facts`.

        Raises:
            InputError: The file has another ending.
        """
        kind = Path(path).suffix
        if kind not in FORMS:
            raise InputError(f"no report of the kind {kind!r}", at=f"report({str(path)!r})", hint=", ".join(FORMS))
        Path(path).write_text(FORMS[kind](self.facts(device=device, memory=memory)), encoding="utf-8")

    def trace(self, path: str | os.PathLike[str], *, device: str | None = None) -> None:
        """Write the predicted step of one rank for Perfetto or chrome://tracing.

        Args:
            path: The file.
            device: As for `facts`.
        """
        Path(path).write_text(json.dumps(trace(self.facts(device=device))), encoding="utf-8")

    def __str__(self) -> str:
        """The local program."""
        return self.as_text()


def _together(name: str, calls: Sequence[Found]) -> Discovered:
    """What was found for all calls of an op; equal calls share one finding."""
    kinds = list({id(found): found for found in calls}.values())
    return Discovered(
        op=name,
        calls=len(calls),
        rules=len({rule for found in kinds for rule in found.learned}),
        runs=sum(found.runs for found in kinds),
        seconds=sum(found.seconds for found in kinds),
        from_file=all(found.from_file for found in kinds),
    )
