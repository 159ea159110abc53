"""A checkpoint on disk: a directory that is there as a whole or not at all, and says what must be in it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

MANIFEST = "meshstep.json"
PYTHON = "python.pt"
METADATA = ".metadata"
VERSION = 1
_CHUNK = 2**22


def temporary(path: Path) -> Path:
    """Where a checkpoint is written before it is whole; what an interrupted save has left there, the next removes."""
    return path.with_name(f".{path.name}.saving")


def previous(path: Path) -> Path:
    """Where the one before lies while the new one takes its place."""
    return path.with_name(f".{path.name}.before")


def find(path: Path) -> Path:
    """The directory to read: a save that was interrupted while it put the new one in place has left the one before.

    Raises:
        CheckpointError: There is none.
    """
    for found in (path, previous(path)):
        if (found / MANIFEST).is_file():
            return found
    near = sorted(p.name for p in path.parent.glob("*") if (p / MANIFEST).is_file()) if path.parent.is_dir() else []
    raise CheckpointError(
        "no checkpoint" if not path.exists() else "no checkpoint of meshstep",
        at=str(path),
        hint=f"there {'is' if len(near) == 1 else 'are'} {', '.join(near[:5])}" if near else "the path given to save",
    )


def put_in_place(path: Path) -> None:
    """Let what was written take the place of what is there."""
    if (path / MANIFEST).is_file():
        shutil.rmtree(previous(path), ignore_errors=True)
        os.replace(path, previous(path))
    elif path.exists():
        shutil.rmtree(path)
    os.replace(temporary(path), path)
    shutil.rmtree(previous(path), ignore_errors=True)
    _sync(path.parent)


def write_manifest(directory: Path, content: Mapping[str, Any]) -> None:
    """Write what a checkpoint says of itself, when all else is on the disk."""
    with open(directory / MANIFEST, "w") as file:
        json.dump({"version": VERSION, **content}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(directory)


def read_manifest(directory: Path) -> dict[str, Any]:
    """What a checkpoint says of itself.

    Raises:
        CheckpointError: It is damaged, or of a later version.
    """
    try:
        content: dict[str, Any] = json.loads((directory / MANIFEST).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            "a damaged checkpoint", at=f"{directory / MANIFEST}: {error}", hint="another checkpoint"
        ) from None
    if not isinstance(content, dict) or "version" not in content:
        raise CheckpointError(
            "a damaged checkpoint", at=f"{directory / MANIFEST}: it is no manifest", hint="another checkpoint"
        )
    if content["version"] != VERSION:
        raise CheckpointError(
            f"a checkpoint of version {content['version']!r}, and this meshstep reads {VERSION}",
            at=str(directory),
            hint="the meshstep that wrote it",
        )
    listed = content.get("files")
    if not isinstance(listed, dict) or not {PYTHON, METADATA} <= listed.keys() or not all(map(_is_name, listed)):
        raise CheckpointError(
            "a damaged checkpoint", at=f"{directory / MANIFEST}: it does not list its files", hint="another checkpoint"
        )
    return content


def _is_name(name: str) -> bool:
    """Whether it is a file in the directory itself: a manifest leads nowhere else."""
    return Path(name).name == name and name not in ("", ".", "..")


def digests(directory: Path, names: Sequence[str]) -> dict[str, str]:
    """The SHA-256 of files, each written to the disk first."""
    found = {}
    for name in names:
        with open(directory / name, "rb") as file:
            os.fsync(file.fileno())
            found[name] = _digest(file)
    return found


def check(directory: Path, expected: Mapping[str, str]) -> str | None:
    """What is wrong with files; None if nothing is."""
    for name, digest in expected.items():
        file = directory / name
        if not file.is_file():
            return f"{file} is missing"
        with open(file, "rb") as content:
            if _digest(content) != digest:
                return f"{file} is not what was written"
    return None


def prune(path: Path, keep: int) -> None:
    """Remove all but the newest checkpoints next to `path`, by the time of their manifests."""
    found = [p for p in path.parent.iterdir() if not p.name.startswith(".") and (p / MANIFEST).is_file()]
    for old in sorted(found, key=lambda p: (p / MANIFEST).stat().st_mtime_ns)[:-keep]:
        shutil.rmtree(old)


def _digest(file: Any) -> str:
    found = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        found.update(chunk)
    return found.hexdigest()


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
