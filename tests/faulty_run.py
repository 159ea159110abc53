"""`examples/resume.py` with a fault that is made once: `faulty_run.py RANK:STEP:KIND --folder F ...`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import resume


def cut(folder: Path) -> None:
    """Half of a file of the newest checkpoint is gone, and the rank with it."""
    newest = max(folder.glob("step-*"))
    file = max(newest.glob("__*"), key=lambda f: f.stat().st_size)
    os.truncate(file, file.stat().st_size // 2)
    os.kill(os.getpid(), signal.SIGKILL)


def fill(folder: Path) -> None:
    """No byte is left on the disk that holds the folder."""
    with (folder / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (2**16, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"0" * size)


def allocate(_: Path) -> None:
    torch.empty(2**50)


def fail(_: Path) -> None:
    raise ValueError("a fault that was asked for")


def send(number: int) -> Callable[[Path], None]:
    return lambda _: os.kill(os.getpid(), number)


FAULTS = {
    "kill": send(signal.SIGKILL),
    "stop": send(signal.SIGSTOP),
    "term": send(signal.SIGTERM),
    "raise": fail,
    "memory": allocate,
    "disk": fill,
    "cut": cut,
}


def mark(folder: Path) -> Path:
    """A file that is there since the fault was made."""
    return folder.with_name(f"{folder.name}.fault")


def main() -> None:
    fault, *arguments = sys.argv[1:]
    rank, at, kind = fault.split(":")
    folder = Path(arguments[arguments.index("--folder") + 1])

    def before_step(i: int) -> None:
        if (rank, int(at)) == (os.environ["RANK"], i) and not mark(folder).exists():
            mark(folder).touch()
            FAULTS[kind](folder)

    resume.main(arguments, before_step)


if __name__ == "__main__":
    main()
