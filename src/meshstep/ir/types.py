"""What is known of a value without computing it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorType:
    """Dtype, shape and device type of a tensor. In a partitioned program the shape is one rank's."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str = "cpu"

    @classmethod
    def of(cls, tensor: Tensor) -> TensorType:
        """The type of a tensor, real or fake."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.device.type)

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.dtype.itemsize

    def with_shape(self, shape: tuple[int, ...]) -> TensorType:
        """The same dtype and device with another shape."""
        return replace(self, shape=shape)

    def __str__(self) -> str:
        """`f32[8, 16]`."""
        return f"{dtype_text(self.dtype)}[{', '.join(map(str, self.shape))}]"


@lru_cache
def dtype_text(dtype: torch.dtype) -> str:
    """`f32`, `bf16`, `i64`, `bool`."""
    name = str(dtype).removeprefix("torch.")
    short = {"bfloat": "bf", "float": "f", "int": "i", "uint": "u", "complex": "c"}
    return re.sub(r"^([a-z]+)(?=\d)", lambda found: short.get(found[0], found[0]), name)


def bytes_text(count: int) -> str:
    """`256 B`, `1.5 KiB`, `20 MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.4g} {unit}"
        size /= 1024
    raise AssertionError
