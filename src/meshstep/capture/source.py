"""Which line of the user's code is running."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import FrameType, TracebackType
from typing import Any

import torch

from ..errors import CaptureError

_NOT_THE_USERS = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (torch.__file__, os.path.join(os.path.dirname(__file__), os.pardir, "__init__.py"))
)


def user_line() -> str:
    """`file.py:line` of the innermost running frame that is not of torch, meshstep or the interpreter; "" if none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if _is_users(code.co_filename):
            return f"{os.path.basename(code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def definition_line(function: Callable[..., Any]) -> str:
    """`file.py:line name` of where a function is defined; its name alone if that is unknown."""
    code, name = getattr(inspect.unwrap(function), "__code__", None), name_of(function)
    return name if code is None else f"{os.path.basename(code.co_filename)}:{code.co_firstlineno} {name}"


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function; that of what a `functools.partial` wraps, or of a callable object's class."""
    function = getattr(function, "func", function)
    return getattr(function, "__name__", type(function).__name__)


def value_needed(line: str) -> CaptureError:
    """The error when Python wants to know the value of a tensor at a line."""
    if _checks_a_distribution():
        return CaptureError(
            "a distribution checks its arguments, which takes their values",
            at=line or None,
            hint="validate_args=False",
        )
    optimizer = _running_optimizer()
    if optimizer is not None:
        return CaptureError(
            f"{optimizer}.step needs the value of a tensor in Python",
            at=line or None,
            hint="an optimizer that computes with tensors only (AdamW, SGD), or step this one outside",
        )
    return CaptureError(
        "a tensor's value is needed in Python (.item(), float(), bool(), `if` on a tensor)",
        at=line or None,
        hint="return the tensor from the step and look at it outside, or use torch.where",
    )


@contextlib.contextmanager
def no_data() -> Iterator[None]:
    """What torch says when a kernel reads a tensor of which only the shape is known, in the words of a capture."""
    try:
        yield
    except RuntimeError as error:
        if "its data is not allocated yet" not in str(error):
            raise
        raise value_needed(_raised_at(error.__traceback__)) from error


def _raised_at(traceback: TracebackType | None) -> str:
    """The user's line of the innermost frame."""
    line = ""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if _is_users(code.co_filename):
            line = f"{os.path.basename(code.co_filename)}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return line


def _checks_a_distribution() -> bool:
    frame: FrameType | None = sys._getframe(1)
    folder = os.path.join(os.path.dirname(torch.__file__), "distributions") + os.sep
    while frame is not None:
        if frame.f_code.co_filename.startswith(folder) and frame.f_code.co_name in ("__init__", "_validate_sample"):
            return True
        frame = frame.f_back
    return False


def _running_optimizer() -> str | None:
    """The class of the optimizer whose method is running; None if none is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(owner, torch.optim.Optimizer):
            return type(owner).__name__
        frame = frame.f_back
    return None


@lru_cache(maxsize=4096)
def _is_users(filename: str) -> bool:
    if filename.startswith("<") or filename == contextlib.__file__:
        return False
    return not os.path.abspath(filename).startswith(_NOT_THE_USERS)
