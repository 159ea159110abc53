"""Which random numbers of a step are the same ones.

Recorded ops draw nothing, so the state of the generator would stand still while the step is traced. Here it moves at
every draw, and what is drawn is remembered by the state before it. Code that puts an earlier state back (the
recomputation of `torch.utils.checkpoint`, `torch.random.fork_rng`) then gets the numbers that it had.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import fx

from .._torch import OpOverload, skip_dispatch_modes
from ..errors import CaptureError

aten = torch.ops.aten


def draws(op: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an op takes numbers from a generator."""
    if not isinstance(op, OpOverload) or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    named = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
    return named.get("dropout_p", -1.0) != 0.0  # attention without dropout


class Draws:
    """The draws of one trace, by the state of the generator that they started from."""

    def __init__(self) -> None:
        """Start from the generator's present state."""
        self._made: dict[bytes, fx.Node] = {}
        self._known = {_state()}

    def earlier(self, op: Any, args: tuple, kwargs: dict) -> fx.Node | None:
        """The draw that already gave these numbers; None if they are new.

        Raises:
            CaptureError: The numbers come from a seed or a generator of the step's own.
        """
        if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
            raise CaptureError(
                "random numbers are drawn from a generator of the step's own",
                hint="the default generator: call torch.manual_seed before the step",
            )
        state = _state()
        if state not in self._known:
            raise CaptureError(
                "random numbers are drawn after the generator was seeded in the step",
                hint="call torch.manual_seed before the step",
            )
        made = self._made.get(state)
        if made is not None and not _same(made, op, args, kwargs):
            raise CaptureError(
                "the state of the generator is put back, and other numbers are drawn from it",
                hint="draw the same numbers again, or draw once and keep them",
            )
        if made is not None:
            self._advance()
        return made

    def add(self, node: fx.Node) -> None:
        """Remember a new draw."""
        self._made[_state()] = node
        self._advance()

    def _advance(self) -> None:
        with skip_dispatch_modes():
            torch.rand(())
        self._known.add(_state())


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Generators are as before afterwards, whatever happened.

    Raises:
        CaptureError: Numbers were drawn that no program can draw again: those of `random` or of NumPy.
    """
    with skip_dispatch_modes():
        before, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
        if random.getstate() != python or _numpy_differs(numpy):
            raise CaptureError(
                "the step draws a random number of Python or NumPy: it would be the same one in every call",
                hint="draw it before the step and pass it, or draw it by torch",
            )
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        with skip_dispatch_modes():
            torch.set_rng_state(before)


def _numpy_differs(before: Any) -> bool:
    now: Any = np.random.get_state(legacy=False)
    return now["state"]["pos"] != before["state"]["pos"] or (now["state"]["key"] != before["state"]["key"]).any()


def _state() -> bytes:
    with skip_dispatch_modes():
        return torch.get_rng_state().numpy().tobytes()


def _same(made: fx.Node, op: Any, args: tuple, kwargs: dict) -> bool:
    """Whether a call would compute what `made` has computed: the same op of equal values."""
    return made.target is op and _equal(made.args, args) and _equal(dict(made.kwargs), kwargs)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, fx.Node) and isinstance(b, fx.Node):
        return a is b or (a.op == b.op == "call_function" and _same(a, b.target, b.args, dict(b.kwargs)))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)
