"""A plan as a file: JSON that people read and compare, and that executes nothing."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from ..errors import PlanError
from ..layout import REPLICATE, placement_text, shard, strided

VERSION = 1
_HINT = "a file that plan.save wrote"
_SHARD = re.compile(r"S\((\d+)(?: in (\d+))?\)")
_KINDS: dict[str, Any] = {
    "axis": str, "kind": str, "stage": int, "in_place": bool, "min_bytes": int, "regather": bool, "sequence_dim": int,
    "batch_dim": (int, type(None)),
}  # fmt: skip


def write(path: str | os.PathLike[str], axes: Sequence[Mapping[str, Any]]) -> None:
    """Write a file, complete or not at all.

    Args:
        path: The file; replaced if it is there.
        axes: What is to be written of each axis.

    Raises:
        PlanError: It cannot be written; then what was there is as it was.
    """
    target = Path(path)
    text = json.dumps({"meshstep plan": VERSION, "axes": axes}, indent=1) + "\n"
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".new-") as beside:
            whole = Path(beside) / target.name
            whole.write_text(text, encoding="utf-8")
            os.replace(whole, target)
    except OSError as error:
        hint = "a file in a directory that is there and can be written to"
        raise PlanError(f"no plan can be written: {error.strerror}", at=str(path), hint=hint) from error


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """What `write` has written.

    Raises:
        PlanError: There is no such file, or it is no plan of this form.
    """
    try:
        found: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"no plan can be read: {error.strerror}", at=str(path), hint=_HINT) from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"no plan can be read: {error}", at=str(path), hint=_HINT) from error
    version = found.get("meshstep plan") if isinstance(found, dict) else None
    if version != VERSION:
        raise PlanError(
            f"a plan of form {version!r}", at=str(path), hint=f"{_HINT}; this meshstep reads form {VERSION}"
        )
    axes = found.get("axes")
    if not isinstance(axes, list) or not axes:
        raise PlanError("the file is no plan: it has no axes", at=str(path), hint=_HINT)
    return axes


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """What is wrong with the contents, as an error about the file.

    Raises:
        PlanError: Something is.
    """
    try:
        yield
    except KeyError as error:
        raise PlanError(f"the file is no plan: {error} is missing", at=str(path), hint=_HINT) from error
    except PlanError as error:
        raise PlanError(f"the file is no plan: {error.what}", at=str(path), hint=_HINT) from error
    except (TypeError, AttributeError, ValueError) as error:
        raise PlanError(f"the file is no plan: {error}", at=str(path), hint=_HINT) from error


def scalars(found: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The plain values of an axis, checked.

    Args:
        found: What the file has of the axis.
        known: All that may be there.

    Raises:
        ValueError: There is something else, or of another type.
    """
    strange = [key for key in found if key not in known]
    if strange:
        near = difflib.get_close_matches(strange[0], sorted(known), 1)
        raise ValueError(f"axis {found.get('axis')!r} has {strange[0]!r}" + (f": {near[0]!r}?" if near else ""))
    for key, kind in _KINDS.items():
        if not isinstance(found[key], kind) or (isinstance(found[key], bool) and kind is not bool):
            raise ValueError(f"axis {found['axis']!r}: {key} is {found[key]!r}")
    return {key: found[key] for key in _KINDS}


def written(choice: Any) -> Any:
    """A choice for parameters in a file."""
    return placement_text(choice) if isinstance(choice, Placement) else choice


def choice(text: Any) -> Any:
    """A choice from a file: a style, a stage, or a placement."""
    if isinstance(text, str) and (text == "R" or "(" in text):
        return placement(text, "a pattern")
    if not isinstance(text, (str, int)) or isinstance(text, bool):
        raise ValueError(f"{text!r} is no choice")
    return text


def placement(text: Any, name: str) -> Placement:
    """A placement from a file."""
    if text == "R":
        return REPLICATE
    found = _SHARD.fullmatch(str(text))
    if found:
        return shard(int(found[1])) if found[2] is None else strided(int(found[1]), int(found[2]))
    if str(text) == "P(sum)":
        return Partial("sum")
    raise ValueError(f"{name} lies as {text!r}: R, S(dim) or S(dim in blocks)")


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    """What differs between two axes, a line each."""
    for key in ours:
        a, b = ours[key], theirs[key]
        if isinstance(a, dict):
            for name in dict.fromkeys((*a, *b)):
                if a.get(name) != b.get(name):
                    yield f"{name}: {a.get(name, 'unsaid')} -> {b.get(name, 'unsaid')}"
        elif a != b:
            yield f"{key}: {a} -> {b}"
