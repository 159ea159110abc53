"""Elementwise ops: those that PyTorch tags so, and some that it forgot; where linear, a sum over the ranks passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from .._torch import OpOverload
from ..layout import REPLICATE, shard
from .factors import Linear, partials, together
from .rule import Entry, OpCall, Rule, placed

aten = torch.ops.aten

UNTAGGED = (
    aten._conj.default,
    aten._prelu_kernel.default,
    aten._prelu_kernel_backward.default,
    aten._to_copy.default,
    aten.complex.default,
    aten.copy.default,
    aten.elu_backward.default,
    aten.fill.Scalar,
    aten.fill.Tensor,
    aten.floor_divide.default,
    aten.hardshrink_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardswish.default,
    aten.hardswish_backward.default,
    aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default,
    aten.lift_fresh_copy.default,
    aten.log_sigmoid_backward.default,
    aten.log_sigmoid_forward.default,
    aten.masked_fill.Tensor,
    aten.mish_backward.default,
    aten.polar.default,
    aten.rsub.Tensor,
    aten.softplus_backward.default,
    aten.softshrink_backward.default,
    aten.where.Scalar,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
)

LINEAR: Mapping[OpOverload, Linear] = {
    aten._conj.default: "all",
    aten._to_copy.default: "all",
    aten.add.Tensor: "all",
    aten.addcdiv.default: (together("self", "tensor1"),),
    aten.addcmul.default: (together("self", "tensor1"), together("self", "tensor2")),
    aten.clone.default: "all",
    aten.complex.default: "all",
    aten.copy.default: (together("src"),),
    aten.conj_physical.default: "all",
    aten.div.Scalar: "all",
    aten.div.Tensor: "first",
    aten.fill.Tensor: (together("value"),),
    aten.lerp.Scalar: "all",
    aten.lerp.Tensor: (together("self", "end"),),
    aten.lift_fresh_copy.default: "all",
    aten.mul.Scalar: "all",
    aten.mul.Tensor: "each",
    aten.native_dropout_backward.default: "first",
    aten.neg.default: "all",
    aten.positive.default: "all",
    aten.rsub.Tensor: "all",
    aten.sub.Tensor: "all",
    aten.where.self: (together("self", "other"),),
    # Backward ops of activations are linear in the incoming gradient.
    aten._prelu_kernel_backward.default: "first",
    aten.elu_backward.default: "first",
    aten.gelu_backward.default: "first",
    aten.hardshrink_backward.default: "first",
    aten.hardsigmoid_backward.default: "first",
    aten.hardswish_backward.default: "first",
    aten.hardtanh_backward.default: "first",
    aten.leaky_relu_backward.default: "first",
    aten.log_sigmoid_backward.default: "first",
    aten.logit_backward.default: "first",
    aten.mish_backward.default: "first",
    aten.sigmoid_backward.default: "first",
    aten.silu_backward.default: "first",
    aten.softplus_backward.default: "first",
    aten.softshrink_backward.default: "first",
    aten.tanh_backward.default: "first",
    aten.threshold_backward.default: "first",
}

# Linear where the number that goes with the tensor is zero: names of the tensor and of the number.
_LINEAR_AT_ZERO = {
    aten.add.Scalar: ("self", "other"),
    aten.add.Tensor: ("self", "other"),
    aten.masked_fill.Scalar: ("self", "value"),
    aten.sub.Scalar: ("self", "other"),
    aten.sub.Tensor: ("self", "other"),
    aten.where.ScalarOther: ("self", "other"),
    aten.where.ScalarSelf: ("other", "self"),
}


def pointwise(call: OpCall) -> Iterator[Rule]:
    """Each dim of the output, with the inputs that have it; then the linear ones."""
    shape = next((o.shape for o in call.outputs if o), ())
    yield from (split(call, dim, shape) for dim in range(len(shape)))
    yield from partials(call, _linear(call))


def split(call: OpCall, dim: int, shape: tuple[int, ...]) -> Rule:
    """One dim of the broadcast `shape`, on every input and output that has it."""
    from_right = len(shape) - dim
    inputs = (
        shard(t.ndim - from_right) if t.ndim >= from_right and t.shape[t.ndim - from_right] == shape[dim] else REPLICATE
        for t in call.tensors
    )
    outputs = (placed(o, shard(dim) if o and o.shape == shape else REPLICATE) for o in call.outputs)
    return Rule(tuple(inputs), tuple(outputs))


def _linear(call: OpCall) -> Linear:
    name, number = _LINEAR_AT_ZERO.get(call.op, ("", ""))
    if number and call[number] == 0:
        return (together(name),)
    return LINEAR.get(call.op, ())


POINTWISE = Entry(pointwise)
TABLE = dict.fromkeys(UNTAGGED, POINTWISE)
