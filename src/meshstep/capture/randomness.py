"""Which random numbers of a step are the same ones.

Recorded ops draw nothing, so the state of the generator would stand still while the step is traced. Here it moves at
every draw, and what is drawn is remembered by the state before it. Code that puts an earlier state back (the
recomputation of `torch.utils.checkpoint`, `torch.random.fork_rng`) then gets the numbers that it had.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._torch import OpOverload, TorchDispatchMode, skip_dispatch_modes
from ..errors import CaptureError
from .random_ops import in_plain_terms


class Draws:
    """Numbers the random tensors of one run of a step, by the state of the generator that they start from.

    Args:
        name: Of the step: steps of different names get different numbers.
    """

    def __init__(self, name: str) -> None:
        """Start from the generator's present state."""
        self._first = (zlib.crc32(name.encode()) & 0xFFFF) << 16
        self._numbers: dict[bytes, int] = {}
        self._known = {_state()}

    def number(self) -> int:
        """The number of the random tensor that is drawn now; that of the earlier one if its state was put back.

        Raises:
            CaptureError: The generator was seeded in the step.
        """
        state = _state()
        if state not in self._known:
            raise CaptureError(
                "random numbers are drawn after the generator was seeded in the step",
                hint="call torch.manual_seed before the step",
            )
        with skip_dispatch_modes():
            torch.rand(())
        self._known.add(_state())
        return self._first + self._numbers.setdefault(state, len(self._numbers))


Make = Callable[[Any, list[int], int, torch.dtype, torch.device], Tensor]  # of op, shape, number, dtype, device


def random_result(make: Make, draws: Draws, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What a random op gives, as a function of a seed and an element's place.

    Args:
        make: Makes a random tensor of the IR.
        draws: Gives the number.
        func: The op.
        args: Its arguments.
        kwargs: Likewise.

    Raises:
        CaptureError: The numbers come from a seed or a generator of the step's own, or in a way that is not known.
    """
    if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
        raise CaptureError(
            "random numbers are drawn from a generator of the step's own",
            hint="the default generator: call torch.manual_seed before the step",
        )
    found = in_plain_terms(
        lambda op, shape, dtype, device: make(op, list(shape), draws.number(), dtype, device), func, args, kwargs
    )
    if found is NotImplemented:
        raise CaptureError(
            f"{func} draws random numbers in a way that depends on the mesh",
            hint="torch.rand, torch.randn, torch.bernoulli or dropout; attention without its own dropout",
        )
    return found


@cache
def _is_tagged(func: Any) -> bool:
    return isinstance(func, OpOverload) and torch.Tag.nondeterministic_seeded in func.tags


def is_random(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a call takes numbers from a generator."""
    if not _is_tagged(func):
        return False
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":  # attention without dropout draws nothing
            default = argument.default_value
            return bool((args[i] if i < len(args) else kwargs.get("dropout_p", default)) != 0.0)
    return True


class CountedRandom(TorchDispatchMode):
    """Gives a plain run the random numbers that a compiled one gets.

    Args:
        draws: Numbers the random tensors.
        seed: Gives (seed, step) on a device.
    """

    def __init__(self, draws: Draws, seed: Callable[[torch.device], Tensor]) -> None:
        """Use these numbers."""
        super().__init__()
        self._draws, self._seed = draws, seed

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Random ops by number, all others as they are."""
        kwargs = kwargs or {}
        if is_random(func, args, kwargs):
            return random_result(self._make, self._draws, func, args, kwargs)
        return func(*args, **kwargs)

    def _make(self, op: Any, shape: list[int], number: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        made: Tensor = op(self._seed(device), [None] * len(shape), number, shape, shape, dtype)
        return made


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
