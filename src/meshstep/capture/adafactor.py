"""`torch.optim.Adafactor` as a tensor program: torch's own takes norms and step counts into Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def adafactor(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    row_vars: Sequence[Tensor | None],
    col_vars: Sequence[Tensor | None],
    variances: Sequence[Tensor | None],
    state_steps: Sequence[Tensor],
    *,
    d: float,
    lr: float | Tensor,
    beta2_decay: float,
    weight_decay: float,
    eps1: float | None,
    eps2: float,
    maximize: bool,
    **choices: Any,
) -> None:
    """One update of each parameter, in place.

    Source: Shazeer and Stern, Adafactor (arXiv 1804.04235), with the options of `torch.optim.Adafactor`, whose
    functional form takes the same arguments; scalars are 0-d float64 tensors here, Python floats there.
    """
    for i, param in enumerate(params):
        grad, step = -grads[i] if maximize else grads[i], state_steps[i]
        smallest = torch.finfo(param.dtype).eps if eps1 is None else eps1
        step.add_(1)
        count = step.double()
        weight = count**beta2_decay
        rate = torch.minimum(torch.as_tensor(lr, dtype=torch.float64), count**-0.5)
        scale = _rms(param).clamp(min=eps2) * rate
        if weight_decay != 0:
            param.mul_((1 - lr * weight_decay).to(param.dtype) if isinstance(lr, Tensor) else 1 - lr * weight_decay)
        row, column, variance = row_vars[i], col_vars[i], variances[i]
        if row is not None and column is not None:
            square = grad.square()
            row.lerp_(square.mean(-1, keepdim=True), weight.to(row.dtype))
            column.lerp_(square.mean(-2, keepdim=True), weight.to(column.dtype))
            estimate = row @ column / row.mean(-2, keepdim=True).clamp(min=smallest)
        else:
            assert variance is not None
            variance.lerp_(grad.square(), weight.to(variance.dtype))
            estimate = variance
        update = grad * estimate.clamp(min=smallest * smallest).rsqrt()
        clipped = (_rms(update) / d).clamp(min=1.0)
        param.sub_(update * (scale / clipped).to(param.dtype))


def _rms(tensor: Tensor) -> Tensor:
    """The root mean square, 0-d float64."""
    return tensor.norm(2).double() / tensor.numel() ** 0.5
