"""Live numbers where torch wants a Python number: the same computation with the number as a 0-d tensor.

`p.add_(g, alpha=-lr)` takes the value of a tensor `lr` into Python, where it would be compiled in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .source import user_line, value_needed


def _promoted(other: Any, self: Tensor) -> Any:
    """`other` in the dtype of the result, as torch has it before it multiplies."""
    return other.to(torch.result_type(self, other)) if isinstance(other, Tensor) else other


def _add(self: Tensor, other: Any, *, alpha: Tensor) -> Tensor:
    return self + alpha * _promoted(other, self)


def _sub(self: Tensor, other: Any, *, alpha: Tensor) -> Tensor:
    return self - alpha * _promoted(other, self)


def _addcmul(self: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: Tensor) -> Tensor:
    return self + value * _promoted(tensor1, self) * tensor2


def _addcdiv(self: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: Tensor) -> Tensor:
    return self + value * _promoted(tensor1, self) / tensor2


def _lerp(self: Tensor, end: Tensor, weight: Tensor) -> Tensor:
    return torch.lerp(self, end, weight.to(self.dtype) if weight.ndim == 0 else weight)


def _full_like(self: Tensor, fill_value: Tensor, **options: Any) -> Tensor:
    return torch.empty_like(self, **options).copy_(fill_value)


_FORMS: dict[str, Callable[..., Tensor]] = {
    "add": _add,
    "sub": _sub,
    "subtract": _sub,
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "full_like": _full_like,
    "lerp": _lerp,
}


_TO_PYTHON = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__})  # fake tensors refuse them in their own words
_FORMAT = Tensor.__format__


class LiveNumbers(TorchFunctionMode):
    """Rewrites calls that have a 0-d tensor where torch wants a number; refuses to take tensors into Python."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Call `func`, or the same with tensors only."""
        kwargs = kwargs or {}
        if func in _TO_PYTHON or (func is _FORMAT and args[1]):
            raise value_needed(user_line())
        name = getattr(func, "__name__", "")
        form = _FORMS.get(name.removesuffix("_"))
        if form is None or not _has_number(name, args, kwargs):
            return func(*args, **kwargs)
        value = form(*args, **kwargs)
        return args[0].copy_(value) if name.endswith("_") else value


def _has_number(name: str, args: tuple, kwargs: dict) -> bool:
    if name == "full_like":
        return isinstance(args[1] if len(args) > 1 else kwargs.get("fill_value"), Tensor)
    if name.startswith("lerp"):
        weight = args[2] if len(args) > 2 else kwargs.get("weight")
        return isinstance(weight, Tensor) and weight.ndim == 0 and weight.dtype != args[0].dtype
    return isinstance(kwargs.get("alpha", kwargs.get("value")), Tensor)
