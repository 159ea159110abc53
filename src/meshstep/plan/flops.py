"""Floating-point operations of a call, by PyTorch's own formulas (`torch.utils.flop_counter`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from .._torch import OpOverload
from ..ir.types import TensorType

aten = torch.ops.aten

# Kernels of the CPU that the registry lacks; their first arguments are those of the ones that it has.
_SAME: Mapping[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


def flops(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> int:
    """Operations of a product, a convolution or an attention; 0 of all else, which memory bounds.

    Args:
        op: The op.
        args: Its arguments, with a TensorType, or a node that carries one, for each tensor.
        kwargs: Likewise.
        output: The type of what it returns, or a tuple of them.
    """
    if not isinstance(op, OpOverload):
        return 0
    packet = op.overloadpacket
    formula = flop_registry.get(_SAME.get(packet, packet))
    if formula is None:
        return 0
    return int(formula(*_shapes(args), **_shapes(dict(kwargs)), out_val=_shapes(output)))


def flops_of_types(op: Any, inputs: Sequence[TensorType], outputs: Sequence[TensorType | None]) -> int:
    """The same from types alone: a convolution is then taken for one that is not transposed."""
    args: tuple[Any, ...] = tuple(inputs)
    match getattr(op, "overloadpacket", None):
        case aten.convolution:
            args = (*inputs[:2], None, None, None, None, False)
        case aten.convolution_backward:
            wanted = [o is not None for o in outputs]
            args = (*inputs[:3], None, None, None, None, False, None, 1, wanted)
    return flops(op, args, {}, outputs[0] if len(outputs) == 1 else tuple(outputs))


def _shapes(value: Any) -> Any:
    match value:
        case fx.Node():
            return _shapes(value.meta["type"])
        case TensorType():
            return torch.Size(value.shape)
        case tuple() | list():
            return type(value)(_shapes(v) for v in value)
        case dict():
            return {k: _shapes(v) for k, v in value.items()}
    return value
