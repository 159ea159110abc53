"""Ops that make a tensor from nothing but its type, brought to one form each: `full`, `empty`, `rand`, `randn`.

What only needs the shape of a tensor (`zeros_like(x)`) then no longer depends on the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Made = tuple[Any, tuple, dict[str, Any]]


def _options(like: Tensor) -> dict[str, Any]:
    return {"dtype": like.dtype, "device": torch.device(like.device.type)}


def _full(value: Callable[[tuple], Any]) -> Callable[[Tensor, tuple, dict], Made]:
    return lambda like, args, kwargs: (aten.full.default, (list(like.shape), value(args)), _options(like))


def _plain(op: Any) -> Callable[[Tensor, tuple, dict], Made]:
    return lambda like, args, kwargs: (op, (list(like.shape),), _options(like))


_zero, _one = _full(lambda args: 0), _full(lambda args: 1)
_empty, _rand, _randn = (
    _plain(aten.empty.memory_format),
    _plain(aten.rand.default),
    _plain(aten.randn.default),
)
_second, _third = _full(lambda args: args[1]), _full(lambda args: args[2])

FACTORIES: dict[Any, Callable[[Tensor, tuple, dict], Made]] = {
    aten.zeros.default: _zero,
    aten.zeros_like.default: _zero,
    aten.new_zeros.default: _zero,
    aten.zero_.default: _zero,
    aten.ones.default: _one,
    aten.ones_like.default: _one,
    aten.new_ones.default: _one,
    aten.full.default: _second,
    aten.full_like.default: _second,
    aten.fill_.Scalar: _second,
    aten.new_full.default: _third,
    aten.scalar_tensor.default: _full(lambda args: args[0]),
    aten.empty.memory_format: _empty,
    aten.empty_like.default: _empty,
    aten.new_empty.default: _empty,
    aten.empty_strided.default: _empty,
    aten.new_empty_strided.default: _empty,
    aten.rand_like.default: _rand,
    aten.randn_like.default: _randn,
}
