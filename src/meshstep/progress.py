"""Says what takes long, on a terminal."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import TextIO

PATIENCE = 2.0  # seconds without a word


class Progress:
    """Prints what is being done once it has taken a while; nothing where no one looks.

    >>> import sys
    >>> with Progress(sys.stderr) as progress:
    ...     progress("planning")

    Args:
        stream: Where it is said, if that is a terminal.
        patience: Seconds until the first word.
    """

    def __init__(self, stream: TextIO, patience: float = PATIENCE) -> None:
        """Say nothing yet."""
        self._stream, self._patience, self._doing = stream, patience, ""
        self._began = time.monotonic()
        self._timer: threading.Timer | None = None

    def __call__(self, doing: str) -> None:
        """Note what is done from now on."""
        self._doing = doing
        if time.monotonic() - self._began >= self._patience:
            self._say()

    def __enter__(self) -> Progress:
        """Begin to wait."""
        if self._stream.isatty():
            self._timer = threading.Timer(self._patience, self._say)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Say no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()

    def _say(self) -> None:
        if self._stream.isatty():
            print(f"{time.monotonic() - self._began:5.0f} s  {self._doing} ...", file=self._stream, flush=True)
