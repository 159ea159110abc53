"""The type of an op's outputs from the types of its inputs, by PyTorch's own fake implementations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import FakeTensorMode
from .types import TensorType


def infer(op: Any, args: tuple, kwargs: Mapping[str, Any]) -> TensorType | tuple[TensorType | None, ...]:
    """Run `op` on fake tensors.

    Args:
        op: The op.
        args: Its arguments, with a TensorType, or a node that carries one, for each tensor.
        kwargs: Likewise.

    Returns:
        The type of the output, or a tuple of them (None where the op returns none).
    """
    with FakeTensorMode() as mode, torch.no_grad():
        return _type_of(op(*_fake(args, mode), **_fake(dict(kwargs), mode)))


def _fake(value: Any, mode: FakeTensorMode) -> Any:
    match value:
        case fx.Node():
            return _fake(value.meta["type"], mode)
        case TensorType():
            return torch.empty(value.shape, dtype=value.dtype, device=value.device)
        case tuple() | list():
            return type(value)(_fake(v, mode) for v in value)
        case dict():
            return {k: _fake(v, mode) for k, v in value.items()}
    return value


def _type_of(output: Any) -> Any:
    if isinstance(output, Tensor):
        return TensorType.of(output)
    return tuple(_type_of(o) for o in output) if isinstance(output, (tuple, list)) else None
