"""Faults at random steps of random ranks, many times each: `make faults` prints the table of docs/faults.md.

    python tests/fault_matrix.py --times 10 --only kill stop

Every run is compared with the plain single-device one. A full disk is a small tmpfs, which needs the right to mount.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

import torch
from faulty_run import FAULTS, mark
from torch import nn

import resume

STEPS, EVERY, BOUND_S = 24, 4, 150.0
WITHIN = 1e-9
RANKS = (2, 3, 4)
HERE = Path(__file__).parent


@dataclass(slots=True)
class Run:
    """What one fault led to.

    Args:
        kind: Of the fault.
        ranks: Number of ranks at first.
        rank: That has the fault.
        at: Step before which it is made.
        ended: Seconds from the fault to the end that a user can read; None if there is none in time.
        lost: Steps that had to be made again.
        error: Largest difference of a loss from the plain run.
        told: The report.
        whole: Seconds of the whole run.
    """

    kind: str
    ranks: int
    rank: int
    at: int
    ended: float | None = None
    lost: int = 0
    error: float = float("inf")
    told: str = ""
    whole: float = 0.0

    @property
    def fits(self) -> bool:
        most = 0 if self.kind == "term" else 2 * EVERY if self.kind == "cut" else EVERY
        return self.ended is not None and self.lost <= most and self.error <= WITHIN


@dataclass(slots=True)
class Watched:
    """A started run, and when its first report came."""

    code: int
    out: list[str] = field(default_factory=list)
    err: list[str] = field(default_factory=list)
    reported: float | None = None
    ended: float = 0.0


def plain_losses() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return [resume.train_step(model, optimizer, *resume.batch(i)).item() for i in range(STEPS)]


def start(ranks: str, restarts: int, fault: str, folder: Path) -> Watched:
    command = [sys.executable, "-m", "meshstep", "run", "-n", ranks, "--restarts", str(restarts)]
    command += [str(HERE / "faulty_run.py"), fault, "--folder", str(folder)]
    command += ["--steps", str(STEPS), "--every", str(EVERY)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    watched = Watched(0)

    def errors() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            watched.err.append(line)
            if line.startswith("meshstep run: ") and watched.reported is None:
                watched.reported = time.time()

    def output() -> None:
        assert process.stdout is not None
        watched.out += process.stdout

    readers = [Thread(target=errors), Thread(target=output)]
    for reader in readers:
        reader.start()
    try:
        watched.code = process.wait(BOUND_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        watched.code = process.wait()
        watched.err.append(f"hangs for {BOUND_S:.0f} s\n")
    watched.ended = time.time()
    for reader in readers:
        reader.join()
    return watched


@contextmanager
def disk(kind: str) -> Iterator[Path]:
    """A folder for checkpoints, on a disk of its own that is small where the fault is a full one."""
    with tempfile.TemporaryDirectory(prefix="meshstep-faults-") as root:
        folder = Path(root) / "run"
        folder.mkdir()
        if kind == "disk":
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)], check=True)
        try:
            yield folder
        finally:
            if kind == "disk":
                subprocess.run(["umount", "--lazy", str(folder)], check=True)


def one(kind: str, seed: int, expected: list[float]) -> Run:
    drawn = random.Random(f"{kind} {seed}")
    ranks = drawn.choice(RANKS)
    run = Run(kind, ranks, drawn.randrange(ranks), drawn.randrange(EVERY + 1, STEPS - EVERY))
    began = time.time()
    with disk(kind) as folder:
        again = kind not in ("term", "disk")  # a full disk stays full, and who asks for an end does not want a start
        fault = f"{run.rank}:{run.at}:{kind}"
        first = start(f"{ranks - 1}:{ranks}", int(again), fault, folder)
        watched = [first]
        if not again:
            (folder / "filler").unlink(missing_ok=True)
            watched.append(start(str(max(1, ranks - 1)), 0, fault, folder))
        made = mark(folder).stat().st_mtime if mark(folder).exists() else None
    run.whole = time.time() - began
    lines = [line.split() for one in watched for line in one.out if line.startswith("step ")]
    steps = [int(words[1]) for words in lines]
    losses = {int(words[1]): float(words[-1]) for words in lines}
    run.lost = len(steps) - len(set(steps))
    run.told = next((line for line in first.err if line.startswith(("meshstep run: ", "hangs"))), "").strip()
    ended = first.ended if kind == "term" else first.reported
    codes = [one.code for one in watched]
    well = codes == ([1, 0] if kind == "disk" else [0] * len(codes))
    if well and made is not None and ended is not None:
        run.ended = ended - made
    if set(losses) == set(range(STEPS)):
        run.error = max(abs(losses[i] - expected[i]) for i in range(STEPS))
    if not run.fits:
        print(f"FAILS {run}\n{''.join(first.err[-40:])}", flush=True)
    return run


def row(kind: str, runs: list[Run]) -> str:
    ends = [run.ended for run in runs if run.ended is not None]
    times = f"{statistics.median(ends):.1f} / {max(ends):.1f}" if ends else "-"
    good = sum(run.fits for run in runs)
    error = max(run.error for run in runs)
    return (
        f"| {kind} | {good} of {len(runs)} | {times} | {statistics.median(r.whole for r in runs):.0f} "
        f"| {max(r.lost for r in runs)} | {error:.1e} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if "disk" in given.only and (os.geteuid() != 0 or shutil.which("mount") is None):
        print("disk: not run, as this user may not mount a tmpfs")
        given.only.remove("disk")
    expected = plain_losses()
    print("| fault | as promised | s to the end that is read, median / most | s of the run | steps lost | error |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    failed = False
    for kind in given.only:
        with ThreadPoolExecutor(given.at_once) as pool:
            runs = list(pool.map(lambda i, kind=kind: one(kind, given.seed + i, expected), range(given.times)))
        print(row(kind, runs), flush=True)
        failed |= not all(run.fits for run in runs)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
