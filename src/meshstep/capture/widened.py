"""A step in one precision throughout: what it casts to a narrower dtype stays wide.

Models compute parts of a step in float32 whatever the dtype of their parameters (norms, rotary angles, the scan of a
state space), and Muon orthogonalizes in bfloat16. A comparison in float64 would see their rounding, which differs with
the order of a sum, and not whether the program is right. Both sides of a comparison run as if written in the wide
dtype. Numbers alone (an optimizer's count of steps) keep the dtype that they are made in: kernels demand it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .._torch import TorchDispatchMode
from .grad_scaler import KERNELS

aten = torch.ops.aten

_BITS = frozenset({aten.view.dtype})  # reads the same bits in another way: no rounding
_COMPLEX = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
_COMPLEX_OF = {real: pair for pair, real in _COMPLEX.items()}


def widened(function: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """`function`, in which casts to a floating-point dtype narrower than `dtype` are casts to `dtype`.

    Args:
        function: The step.
        dtype: A floating-point dtype.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _Widened(dtype):
            return function(*args, **kwargs)

    return run


class _Widened(TorchDispatchMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _BITS:
            return func(*args, **kwargs)
        if func in KERNELS:  # they want float32 numbers
            return KERNELS[func](*args, **kwargs)
        if _makes_a_number(func, args):
            return func(*args, **kwargs)
        return func(*map(self._wide, args), **{key: self._wide(value) for key, value in kwargs.items()})

    def _wide(self, value: Any) -> Any:
        if not isinstance(value, torch.dtype):
            return value
        if value in _COMPLEX:
            wide = _COMPLEX_OF.get(self._dtype, value)
            return wide if wide.itemsize > value.itemsize else value
        return self._dtype if value.is_floating_point and value.itemsize < self._dtype.itemsize else value


def _makes_a_number(func: Any, args: tuple) -> bool:
    """Whether an op makes a 0-d tensor that is nothing to learn: `torch.full((), 1.0)`, a copy of a learning rate."""
    if not args or torch.is_grad_enabled():
        return False
    if isinstance(args[0], torch.Tensor):
        return func is aten._to_copy.default and args[0].ndim == 0
    return isinstance(args[0], (list, tuple)) and not args[0] and func._schema.arguments[0].name == "size"
