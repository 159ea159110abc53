"""Random ops of PyTorch as functions of a seed and an element's place (`ir/random.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ir import random

aten = torch.ops.aten
Make = Callable[[Any, Sequence[int], torch.dtype, torch.device], Tensor]  # one random tensor of the IR's ops
Handler = Callable[..., Tensor]


def in_plain_terms(make: Make, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The result of a random op, computed from random tensors of the IR; NotImplemented for any other op.

    Args:
        make: Makes one, from the op (`uniform`, `normal`, `integers`), its shape, dtype and device.
        func: The op.
        args: Its arguments.
        kwargs: Likewise.
    """
    if func in _HANDLERS:
        return _HANDLERS[func](make, *args, **kwargs)
    if func in _IN_PLACE:
        return args[0].copy_(_IN_PLACE[func](make, *args, **kwargs))
    return NotImplemented


def _uniform_like(make: Make, x: Tensor) -> Tensor:
    dtype = x.dtype if x.is_floating_point() else torch.float32
    return make(random.uniform, x.shape, dtype, x.device)


def _normal_like(make: Make, x: Tensor) -> Tensor:
    return make(random.normal, x.shape, x.dtype, x.device)


def _factory(like: Callable[[Make, Tensor], Tensor]) -> Handler:
    def handle(make: Make, size: Sequence[int], **options: Any) -> Tensor:
        return like(make, torch.empty(size, dtype=options.get("dtype"), device=options.get("device")))

    return handle


def _pattern(like: Callable[[Make, Tensor], Tensor]) -> Handler:
    def handle(make: Make, x: Tensor, **options: Any) -> Tensor:
        return like(make, torch.empty_like(x, dtype=options.get("dtype"), device=options.get("device")))

    return handle


def _between(make: Make, x: Tensor, low: int, high: int) -> Tensor:
    bits = make(random.integers, x.shape, torch.int64, x.device)
    return (bits % (high - low) + low).to(x.dtype)


def _randint(make: Make, low: int, high: int, size: Sequence[int], **options: Any) -> Tensor:
    like = torch.empty(size, dtype=options.get("dtype") or torch.int64, device=options.get("device"))
    return _between(make, like, low, high)


def _randint_like(make: Make, x: Tensor, low: int, high: int, **options: Any) -> Tensor:
    return _between(make, torch.empty_like(x, dtype=options.get("dtype")), low, high)


def _random_from(make: Make, x: Tensor, low: int, high: int | None = None, **_: Any) -> Tensor:
    most = 2**24 if x.is_floating_point() else torch.iinfo(x.dtype).max
    return _between(make, x, low, most if high is None else high)


def _bernoulli(make: Make, x: Tensor, p: float | Tensor = 0.5, **_: Any) -> Tensor:
    exact = torch.float64 if x.dtype == torch.float64 else torch.float32  # 8 bits would not do for p = 0.001
    return (make(random.uniform, x.shape, exact, x.device) < p).to(x.dtype)


def _uniform(make: Make, x: Tensor, low: float = 0.0, high: float = 1.0, **_: Any) -> Tensor:
    return _uniform_like(make, x) * (high - low) + low


def _normal(make: Make, x: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    return _normal_like(make, x) * std + mean


def _normal_of(make: Make, mean: Tensor | float, std: Tensor | float = 1.0, **_: Any) -> Tensor:
    like = torch.zeros_like(std) + mean if isinstance(std, Tensor) else torch.zeros_like(torch.as_tensor(mean))
    return _normal_like(make, like) * std + mean


def _exponential(make: Make, x: Tensor, rate: float = 1.0, **_: Any) -> Tensor:
    return -(-_uniform_like(make, x)).log1p() / rate


def _cauchy(make: Make, x: Tensor, median: float = 0.0, sigma: float = 1.0, **_: Any) -> Tensor:
    return ((_uniform_like(make, x) - 0.5) * math.pi).tan() * sigma + median


def _log_normal(make: Make, x: Tensor, mean: float = 1.0, std: float = 2.0, **_: Any) -> Tensor:
    return _normal(make, x, mean, std).exp()


def _geometric(make: Make, x: Tensor, p: float, **_: Any) -> Tensor:
    return ((-_uniform_like(make, x)).log1p() / math.log1p(-p)).ceil().clamp(min=1).to(x.dtype)


def _permutation(make: Make, n: int, **options: Any) -> Tensor:
    device = torch.empty(0, device=options.get("device")).device
    return make(random.integers, [n], torch.int64, device).argsort()


_HANDLERS: dict[Any, Handler] = {
    aten.rand.default: _factory(_uniform_like),
    aten.randn.default: _factory(_normal_like),
    aten.rand_like.default: _pattern(_uniform_like),
    aten.randn_like.default: _pattern(_normal_like),
    aten.randint.default: lambda make, high, size, **options: _randint(make, 0, high, size, **options),
    aten.randint.low: _randint,
    aten.randint_like.default: lambda make, x, high, **options: _randint_like(make, x, 0, high, **options),
    aten.randint_like.low_dtype: _randint_like,
    aten.randperm.default: _permutation,
    aten.bernoulli.default: lambda make, x, **_: _bernoulli(make, x, x),
    aten.bernoulli.p: _bernoulli,
    aten.normal.Tensor_float: _normal_of,
    aten.normal.float_Tensor: _normal_of,
    aten.normal.Tensor_Tensor: _normal_of,
    aten.normal_functional.default: _normal,
}
_IN_PLACE: dict[Any, Handler] = {
    aten.random_.default: lambda make, x, **_: _random_from(make, x, 0),
    aten.random_.to: lambda make, x, high, **_: _between(make, x, 0, high),
    getattr(aten.random_, "from"): _random_from,
    aten.uniform_.default: _uniform,
    aten.normal_.default: _normal,
    aten.bernoulli_.float: _bernoulli,
    aten.bernoulli_.Tensor: _bernoulli,
    aten.exponential_.default: _exponential,
    aten.cauchy_.default: _cauchy,
    aten.log_normal_.default: _log_normal,
    aten.geometric_.default: _geometric,
}
