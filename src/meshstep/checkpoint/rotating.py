"""A folder of checkpoints: the newest good one is found again, and a request to stop ends a run with one more."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..runtime.faults import note_checkpoint
from ..runtime.world import agreed_number, exchange, world
from . import files
from .api import WAIT_S, fresh_name, load, my_files, save

log = logging.getLogger("meshstep")
PREFIX = "step-"


class Rotating:
    """Keeps the last few checkpoints of a run, one directory a checkpoint, named by the number of steps done.

    A directory is there as a whole or not at all; the one before is removed when a new one is whole. All ranks make
    the same calls.

        saver = ms.checkpoint.Rotating("runs/gpt", every=100)
        with saver.stoppable():
            for i in range(saver.resume(state), 1000):
                loss = train_step(model, optimizer, *batch(i))
                if saver.after(i + 1, state):
                    break

    Args:
        folder: Where they are.
        every: Number of steps between two of them.
        keep: How many are kept.

    Raises:
        CheckpointError: `every` or `keep` is no number of at least one.
    """

    def __init__(self, folder: str | os.PathLike[str], *, every: int, keep: int = 3) -> None:
        """Nothing is read or written yet."""
        for name, value in (("every", every), ("keep", keep)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise CheckpointError(f"{name}={value!r}", at=f"Rotating({name}=...)", hint="a number, at least 1")
        self.folder, self.every, self.keep = Path(folder), every, keep
        self._asked = False

    def path(self, done: int) -> Path:
        """Where the checkpoint after so many steps is."""
        return self.folder / f"{PREFIX}{done:09d}"

    def resume(self, step_or_dict: Any) -> int:
        """Load the newest checkpoint that is not damaged.

        Args:
            step_or_dict: As for `checkpoint.load`.

        Returns:
            The number of steps that were done when it was saved; 0 if there is none.

        Raises:
            CheckpointError: It does not fit the objects, or there are only damaged ones.
        """
        damaged = []
        for done in self._saved():
            fault = self._fault(done)
            if fault is None:
                load(self.path(done), step_or_dict, check=False)
                note_checkpoint(self.path(done))
                return done
            damaged.append(fault)
            log.warning("%s is passed over: %s", self.path(done), fault)
        if damaged:
            raise CheckpointError(
                f"{len(damaged)} damaged checkpoint{'s' if len(damaged) > 1 else ''} and no good one",
                at=f"{self.folder}: {damaged[0]}",
                hint="another folder, to begin anew",
            )
        return 0

    def after(self, done: int, step_or_dict: Any) -> bool:
        """Save if it is time, or if the run is asked to stop; call it after every step.

        Args:
            done: Number of steps done.
            step_or_dict: As for `checkpoint.save`.

        Returns:
            Whether to stop; then it was saved.

        Raises:
            CheckpointError: It cannot be written; the ones before are as they were.
        """
        stop = self._stops(done)
        if stop or done % self.every == 0:
            save(self.path(done), step_or_dict, keep=self.keep)
            note_checkpoint(self.path(done))
        return stop

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Take SIGTERM as a request to save and stop, in here; the handler that was there is put back."""
        if threading.current_thread() is not threading.main_thread():
            raise CheckpointError("stoppable() in a thread", at=str(self.folder), hint="call it in the main thread")
        before = signal.signal(signal.SIGTERM, self._ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _ask(self, *_: Any) -> None:
        self._asked = True

    def _stops(self, done: int) -> bool:
        """Whether any rank was asked to stop; all ranks learn it after the same step.

        A rank says so before it takes part in the next step: no other one can end that step without it, so that all
        see it when they have.
        """
        if world().size == 1:
            return self._asked
        return agreed_number(f"stop/{self.folder}", done + 1 if self._asked else None) == done

    def _saved(self) -> list[int]:
        """Numbers of steps of the checkpoints in the folder, the newest first, as rank 0 sees it."""
        found: list[int] = []
        if world().rank == 0 and self.folder.is_dir():
            names = [p.name.removeprefix(PREFIX) for p in self.folder.glob(f"{PREFIX}*") if p.is_dir()]
            found = sorted((int(name) for name in names if name.isdecimal()), reverse=True)
        heard = exchange(f"rotating/{fresh_name()}", json.dumps(found), WAIT_S)
        return list(json.loads(heard[0] or "[]"))

    def _fault(self, done: int) -> str | None:
        """What is wrong with a checkpoint, on any rank; each looks at some of its files."""
        try:
            fault = files.check(self.path(done), my_files(files.read_manifest(files.find(self.path(done)))["files"]))
        except CheckpointError as error:
            fault = error.at or error.what
        heard = exchange(f"rotating/{fresh_name()}", json.dumps(fault), WAIT_S)
        faults = [json.loads(text) if text else "a rank gives no answer" for text in heard]
        return next((found for found in faults if found is not None), None)
