"""Which line of the user's code is running."""

from __future__ import annotations

import contextlib
import os
import sys
from functools import lru_cache

import torch

_NOT_THE_USERS = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (torch.__file__, os.path.join(os.path.dirname(__file__), os.pardir, "__init__.py"))
)


def user_line() -> str:
    """`file.py:line` of the innermost running frame that is not of torch, meshstep or the interpreter; "" if none."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if _is_users(code.co_filename):
            return f"{os.path.basename(code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def is_user_frame(filename: str) -> bool:
    """Whether code of this file is the user's."""
    return _is_users(filename)


@lru_cache(maxsize=4096)
def _is_users(filename: str) -> bool:
    if filename.startswith("<") or filename == contextlib.__file__:
        return False
    return not os.path.abspath(filename).startswith(_NOT_THE_USERS)
