"""Ranks that stop answering: each one beats, and each looks whether the others do.

A thread beats, so that a rank that compiles for a minute still does; one that is stopped, swapped out or gone does not.
What waits for it then ends with a report, instead of waiting for as long as the backend would.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._torch import default_store

TIMEOUT_S = 60.0
EXIT_CODE = 75  # of a rank that ended because another one does not answer
NOTES = "MESHSTEP_NOTES"  # a file in which `meshstep run` reads what ranks have to say
_last: dict[str, Path] = {}


def note_checkpoint(path: Path) -> None:
    """Remember the last good checkpoint: a report of a fault names it."""
    _last["checkpoint"] = path
    if (notes := os.environ.get(NOTES)) and os.environ.get("RANK", "0") == "0":
        Path(notes).write_text(str(path.absolute()))


def last_checkpoint() -> Path | None:
    """The checkpoint that was saved or loaded last."""
    return _last.get("checkpoint")


@dataclass(slots=True, eq=False)
class Heartbeat:
    """Beats through the store of the process group, and looks at the beats of the others.

    Args:
        rank: Of this process.
        size: Number of ranks.
        timeout: Seconds without a beat after which a rank counts as gone.
    """

    rank: int
    size: int
    timeout: float = TIMEOUT_S
    _beats: int = 0
    _seen: dict[int, tuple[bytes, float]] = field(default_factory=dict)
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Beat until the process ends."""
        self._thread = threading.Thread(
            target=self._run, args=(default_store(),), daemon=True, name="meshstep-heartbeat"
        )
        self._thread.start()

    def stop(self) -> None:
        """Say that this rank ends well, so that nobody waits for its beats."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(2)

    def _run(self, store: Any) -> None:
        try:
            while not self._ended.wait(min(1.0, self.timeout / 8)):
                if (silent := self._look(store)) is not None:
                    self._report(silent)
            store.set(self._key(self.rank), b"ended")
        except RuntimeError:  # the store is gone, and with it the rank or the launcher that held it
            return

    def _look(self, store: Any) -> int | None:
        """Beat; the first rank whose beats have stopped for too long."""
        self._beats += 1
        store.set(self._key(self.rank), f"{self._beats} {os.getpid()} {socket.gethostname()}")
        now = time.monotonic()
        for rank in range(self.size):
            if rank == self.rank or not store.check([self._key(rank)]):
                continue
            beat = store.get(self._key(rank))
            before, since = self._seen.get(rank, (b"", now))
            if beat != before:
                self._seen[rank] = (beat, now)
            elif beat != b"ended" and now - since > self.timeout:
                return rank
        return None

    def _key(self, rank: int) -> str:
        return f"meshstep/beat/{rank}"

    def _report(self, silent: int) -> None:
        checkpoint = last_checkpoint()
        hint = f"go on from {checkpoint}" if checkpoint else "save checkpoints: meshstep.checkpoint.Rotating"
        lines = [
            f"meshstep: rank {silent} has not answered for {self.timeout:.0f} s: it is stopped or gone",
            f"  at   rank {self.rank}, which ends, as it would wait for ever",
            f"  try  {hint}",
        ]
        print("\n".join(lines), file=sys.stderr, flush=True)
        _end(self._seen[silent][0])
        os._exit(EXIT_CODE)


def _end(beat: bytes) -> None:
    """End a silent process of this machine: a launcher would wait for one that is stopped."""
    _, pid, host = beat.decode().split()
    if host == socket.gethostname():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(int(pid), signal.SIGKILL)


_running: dict[str, Heartbeat] = {}


def watch(rank: int, size: int, timeout: float) -> None:
    """Begin to beat, once a process."""
    if size > 1 and "beat" not in _running:
        _running["beat"] = Heartbeat(rank, size, timeout)
        _running["beat"].start()
        atexit.register(_running["beat"].stop)
