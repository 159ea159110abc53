"""Starts a script on several ranks of this machine by torchrun, and says in a few lines why one has died."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from .runtime.faults import EXIT_CODE, NOTES

_LINE = re.compile(r"^\[default(\d+)\]:(?:\[rank\d+\]: ?)?(.*)$", re.DOTALL)
_ROOT = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)
_TAIL = 12  # lines of a traceback that are shown


@dataclass(frozen=True, slots=True)
class Death:
    """How a run ended.

    Args:
        code: Exit code of the launcher; 0 if all is well.
        report: What to tell the user; "" if all is well.
    """

    code: int
    report: str = ""


def run(script: str, arguments: Sequence[str], ranks: int, *, least: int | None = None, restarts: int = 0) -> int:
    """Run a script, again after a failure if that is asked for.

    Args:
        script: The file.
        arguments: What it gets.
        ranks: Number of processes.
        least: If a rank dies, go on with one less, down to so many; None is always `ranks`.
        restarts: How often to start again.

    Returns:
        The exit code of the last attempt.
    """
    for attempt in range(restarts + 1):
        death = _attempt(script, arguments, ranks)
        if not death.code:
            return 0
        print(death.report, file=sys.stderr, flush=True)
        if attempt < restarts:
            ranks = max(least or ranks, ranks - 1)
            print(f"meshstep run: starts again with {ranks} ranks", file=sys.stderr, flush=True)
    return death.code


def _attempt(script: str, arguments: Sequence[str], ranks: int) -> Death:
    logs = Path(tempfile.mkdtemp(prefix="meshstep-run-"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    launcher += ["--tee", "2", "--log-dir", str(logs)]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {NOTES: str(logs / "checkpoint")}
    process = subprocess.Popen(
        [sys.executable, *launcher, script, *arguments],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    heard = _Heard()
    assert process.stderr is not None
    with _forwarded(process):
        heard.listen(process.stderr)
        code = process.wait()
    if not code:
        heard.flush()
        return Death(0)
    (logs / "launcher.log").write_text("".join(heard.launcher))
    return Death(code, _report(heard, logs, code))


class _forwarded:  # noqa: N801
    """A request to stop reaches the ranks, which may save before they end."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def __enter__(self) -> None:
        self.before = signal.signal(signal.SIGTERM, lambda *_: self.process.terminate())

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self.before)


@dataclass(slots=True)
class _Heard:
    """What ranks and launcher write to stderr.

    A rank's lines are shown as they come, until a traceback begins: of several, only the one that was first to die has
    something to tell.
    """

    launcher: list[str] = field(default_factory=list)
    held: dict[int, list[str]] = field(default_factory=dict)

    def listen(self, stream: IO[str]) -> None:
        for line in stream:
            found = _LINE.match(line)
            if found is None:
                self.launcher.append(line)
            else:
                self._of_rank(int(found[1]), found[2])

    def _of_rank(self, rank: int, line: str) -> None:
        if rank in self.held or line.startswith("Traceback (most recent call last)"):
            self.held.setdefault(rank, []).append(line)
        else:
            print(line, end="", file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Show what was held: all went well."""
        for lines in self.held.values():
            print("".join(lines), end="", file=sys.stderr, flush=True)


def _report(heard: _Heard, logs: Path, code: int) -> str:
    """Three parts: who died and how, the end of its traceback, what to do."""
    found = _ROOT.search("".join(heard.launcher))
    rank, died = (int(found[1]), int(found[2])) if found else (None, code)
    lines = [f"meshstep run: {_who(rank)} {_how(died)}"]
    lines += [f"  at   {line}" for line in _traceback(heard.held, rank)]
    notes = logs / "checkpoint"
    kept = f"go on from {notes.read_text()}; " if notes.is_file() else ""
    lines.append(f"  try  {kept}all that was written is in {logs}")
    return "\n".join(lines)


def _who(rank: int | None) -> str:
    return "the launcher" if rank is None else f"rank {rank}"


def _how(code: int) -> str:
    if code == EXIT_CODE:
        return "ended, as another rank does not answer"
    if code < 0:
        name = signal.Signals(-code).name
        return f"was ended by {name}" + (": out of memory?" if name == "SIGKILL" else "")
    return f"failed (exit code {code})"


def _traceback(held: Mapping[int, Sequence[str]], rank: int | None) -> list[str]:
    """The end of what the rank that died had to tell, without the launcher's blank lines."""
    lines = held.get(rank, []) if rank is not None else []
    return [line.rstrip("\n") for line in lines if line.strip()][-_TAIL:]
