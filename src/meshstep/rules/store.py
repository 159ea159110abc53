"""Discovered rules on disk: one JSON file for each op, argument pattern and version of PyTorch.

A file that is damaged, not ours, or not a plain file of this user's is passed over with a line in the log: it costs a
search, never a wrong rule.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor.placement_types import Placement

from ..layout import PARTIAL, REPLICATE, placement_text, shard
from .small import Place

log = logging.getLogger(__name__)

Entry = tuple[tuple[Placement, ...], tuple[Placement | None, ...], tuple[Place, ...]]

FORMAT = 1
MOST_FILES = 4096
_MOST_BYTES = 2**20


class Store:
    """Results of discovery in a directory.

    Args:
        directory: Where; None is `$MESHSTEP_CACHE_DIR`, else the user's cache directory, looked up at each use.
    """

    def __init__(self, directory: Path | None = None) -> None:
        """Nothing is read or made yet."""
        self._given = directory

    @property
    def directory(self) -> Path | None:
        """Where the files are; None if the user has no such place."""
        base = self._given or cache_directory()
        return base and base / "rules"

    def read(self, pattern: str) -> list[Entry] | None:
        """The rules of a pattern; None if there is no file of it that can be used."""
        path = self._path(pattern)
        if path is None or not _is_own_directory(path.parent):
            return None
        try:
            content = json.loads(_own_bytes(path))
            return _entries(content, pattern)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            log.warning("%s is passed over: %s", path, error)
            return None

    def write(self, pattern: str, entries: Sequence[Entry]) -> None:
        """Keep the rules of a pattern; what hinders it is logged."""
        path = self._path(pattern)
        if path is None:
            return
        content = {
            "format": FORMAT,
            "torch": torch.__version__,
            "pattern": pattern,
            "rules": [
                {"inputs": [*map(_text, i)], "outputs": [*map(_text, o)], "shared": [*map(list, places)]}
                for i, o, places in entries
            ],
        }
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_own_directory(path.parent) and len(os.listdir(path.parent)) < MOST_FILES:
                _write(path, json.dumps(content, indent=1))
        except OSError as error:
            log.warning("%s is not written: %s", path, error)

    def contents(self) -> Iterator[tuple[str, int]]:
        """Pattern and number of rules of each file that can be used, for this version of PyTorch."""
        directory = self.directory
        if directory is None or not _is_own_directory(directory):
            return
        for path in sorted(directory.glob("*.json")):
            try:
                content = json.loads(_own_bytes(path))
                yield content["pattern"], len(_entries(content, content["pattern"]))
            except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                log.warning("%s is passed over: %s", path, error)

    def _path(self, pattern: str) -> Path | None:
        name = hashlib.sha256(f"{FORMAT} {torch.__version__} {pattern}".encode()).hexdigest()[:32]
        return self.directory and self.directory / f"{name}.json"


def cache_directory() -> Path | None:
    """`$MESHSTEP_CACHE_DIR`, else `meshstep` in the platform's directory of caches; None if there is no home."""
    given = os.environ.get("MESHSTEP_CACHE_DIR")
    if given:
        return Path(given)
    try:
        if sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no home
        return None
    return base / "meshstep"


def _is_own_directory(path: Path) -> bool:
    """Whether nobody else can put files there; logged if somebody can."""
    try:
        found = path.lstat()
    except OSError:
        return False
    safe = stat.S_ISDIR(found.st_mode) and _is_own(found)
    if not safe:
        log.warning("%s is not used: it is not a directory that only this user can write to", path)
    return safe


def _own_bytes(path: Path) -> bytes:
    file = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(file, "rb") as stream:
        found = os.fstat(stream.fileno())
        if not stat.S_ISREG(found.st_mode) or not _is_own(found) or found.st_size > _MOST_BYTES:
            raise ValueError("not a plain file that only this user can write to")
        return stream.read(_MOST_BYTES)


def _is_own(found: os.stat_result) -> bool:
    if not hasattr(os, "geteuid"):
        return True
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _write(path: Path, text: str) -> None:
    file, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(file, "w") as stream:
            stream.write(text)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


# ---- text


def _entries(content: Any, pattern: str) -> list[Entry]:
    """The rules of a file.

    Raises:
        ValueError: It is of something else. So do the others that a foreign file makes: TypeError, KeyError.
    """
    if not isinstance(content, dict):
        raise ValueError("it holds no rules")
    if (content["format"], content["torch"], content["pattern"]) != (FORMAT, torch.__version__, pattern):
        raise ValueError("it is of another op, pattern or version")
    return [_entry(rule) for rule in content["rules"]]


def _entry(rule: Any) -> Entry:
    inputs = tuple(_placement(text) for text in rule["inputs"])
    if None in inputs:
        raise ValueError("an input without placement")
    shared = tuple((str(name), None if index is None else int(index)) for name, index in rule["shared"])
    return inputs, tuple(_placement(text) for text in rule["outputs"]), shared  # type: ignore[return-value]


def _text(placement: Placement | None) -> str | None:
    return placement_text(placement) if placement else None


def _placement(text: str | None) -> Placement | None:
    if text is None or text in ("R", "P(sum)"):
        return {None: None, "R": REPLICATE, "P(sum)": PARTIAL}[text]
    found = re.fullmatch(r"S\((\d{1,2})\)", text)
    if not found:
        raise ValueError(f"no placement {text[:20]!r}")
    return shard(int(found[1]))
