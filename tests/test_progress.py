"""What is said of what takes long."""

from __future__ import annotations

import io
import time

from meshstep.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_quick_is_not_told_and_neither_is_anything_where_no_one_looks() -> None:
    quick = Terminal()
    with Progress(quick, patience=60) as progress:
        progress("planning")
    unseen = io.StringIO()
    with Progress(unseen, patience=0) as progress:
        progress("planning")
    assert (quick.getvalue(), unseen.getvalue()) == ("", "")


def test_what_takes_long_is_told_and_so_is_what_comes_next() -> None:
    said = Terminal()
    with Progress(said, patience=0.05) as progress:
        progress("planning")
        time.sleep(0.3)
        progress("reporting")
    time.sleep(0.1)
    assert said.getvalue().splitlines() == ["    0 s  planning ...", "    0 s  reporting ..."]
