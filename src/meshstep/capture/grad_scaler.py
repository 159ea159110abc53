"""`torch.amp.GradScaler` in a captured step: the scale is state, and a step is skipped by selection.

Outside, the scaler looks at whether gradients are finite and then steps or does not. A program is one for both cases:
the optimizer steps, and where a gradient was not finite everything keeps the value that it had. Whether one was is
decided over all ranks, because `found_inf` is computed from gradients that are whole values of the program.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

from .attributes import restored

aten = torch.ops.aten


def unscale(gradients: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiply gradients in place, and set `found_inf` to 1 if one has an element that is not finite."""
    for gradient in gradients:
        bad = torch.isfinite(gradient).logical_not().any()
        found_inf.copy_(torch.where(bad, torch.ones_like(found_inf), found_inf))
        gradient.mul_(inv_scale.to(gradient.dtype))


def update_scale(
    scale: Tensor, growth_tracker: Tensor, found_inf: Tensor, growth: float, backoff: float, interval: int
) -> Tensor:
    """The scale after one step, in place: less after a skipped one, more after `interval` others in a row."""
    skipped, done = found_inf > 0, growth_tracker + 1
    grows = (done == interval) & skipped.logical_not()
    larger = scale * growth
    larger = torch.where(torch.isfinite(larger), larger, scale)
    scale.copy_(torch.where(skipped, scale * backoff, torch.where(grows, larger, scale)))
    growth_tracker.copy_(torch.where(skipped | grows, torch.zeros_like(done), done))
    return scale


KERNELS: dict[Any, Callable[..., Any]] = {
    aten._amp_foreach_non_finite_check_and_unscale_.default: unscale,
    aten._amp_update_scale_.default: update_scale,
}


@contextlib.contextmanager
def swapped_scaler(scaler: GradScaler, fakes: Mapping[int, Tensor]) -> Iterator[None]:
    """The scaler holds fakes and steps by selection inside, and is as before outside."""
    with restored(scaler):
        for name, value in scaler.__dict__.items():
            if isinstance(value, Tensor):
                scaler.__dict__[name] = fakes[id(value)]
        scaler.__dict__["_maybe_opt_step"] = _step_where_finite
        yield


def _step_where_finite(optimizer: Any, of_scaler: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
    skipped = sum(of_scaler["found_inf_per_device"].values()) > 0
    before = [(tensor, tensor.detach().clone()) for tensor in _tensors(optimizer)]
    known = {id(tensor) for tensor, _ in before}
    optimizer.step(*args, **kwargs)
    with torch.no_grad():
        for tensor, old in before:
            tensor.copy_(torch.where(skipped, old, tensor))
        for tensor in _tensors(optimizer):
            if id(tensor) not in known:  # made by this step: most optimizers start from zeros
                tensor.copy_(torch.where(skipped, torch.zeros_like(tensor), tensor))


def _tensors(optimizer: Any) -> list[Tensor]:
    """Parameters that have a gradient, and the optimizer's state."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return [*parameters, *(t for held in optimizer.state.values() for t in held.values() if isinstance(t, Tensor))]
