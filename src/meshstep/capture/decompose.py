"""Ops that are recorded as simpler ones, because as they are they cannot be sharded exactly.

A mean over the valid tokens of a sharded batch is a sum, a count and a division; batch statistics are sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import decompositions

aten = torch.ops.aten


def var_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Variance and mean by two sums. Source: `torch.var_mean`, divisor max(0, N - correction)."""
    dims = list(range(x.ndim)) if not dim else [d % x.ndim for d in dim]
    count = 1
    for d in dims:
        count *= x.shape[d]
    mean = x.sum(dims, keepdim=True) / count
    divisor = max(0.0, count - (1 if correction is None else correction))
    variance = (x - mean).square().sum(dims, keepdim=keepdim) / divisor
    return variance, mean if keepdim else mean.reshape(variance.shape)


def var(x: Tensor, dim: Sequence[int] | None = None, **kwargs: Any) -> Tensor:
    """The first of `var_mean`."""
    return var_mean(x, dim, **kwargs)[0]


_BY_TORCH = (
    aten.nll_loss_forward,
    aten.nll_loss_backward,
    aten.nll_loss2d_forward,
    aten.nll_loss2d_backward,
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten.native_batch_norm_backward,
    aten.cudnn_batch_norm,
    aten.cudnn_batch_norm_backward,
    aten.native_dropout,
    aten.native_dropout_backward,
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.soft_margin_loss,
    aten.soft_margin_loss_backward,
)
DECOMPOSITIONS: dict[Any, Callable] = {
    **decompositions(_BY_TORCH),
    aten.var_mean.correction: var_mean,
    aten.var.correction: var,
}
