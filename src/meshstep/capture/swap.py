"""Puts fake tensors in the place of a step's state while it is traced, and everything back afterwards."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._torch import FakeTensorMode, adafactor_by, tensor_hooks
from ..errors import CaptureError
from ..ir.program import Slot, SlotKind
from .adafactor import adafactor
from .attributes import restored
from .grad_scaler import swapped_scaler
from .places import HyperparameterPlace
from .source import user_line
from .state import DIFFERENT_KERNELS, FUSED, Held, State, cycled_momentum


def fake_like(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake tensor with the metadata of a real one, a parameter if that is one."""
    with mode, torch.no_grad():
        fake = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device, requires_grad=False
        )
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        else:
            fake.requires_grad_(tensor.requires_grad)
    before, after = tensor_hooks(tensor)
    for hook in before:
        fake.register_hook(hook)
    for hook in after:
        fake.register_post_accumulate_grad_hook(hook)
    return fake


@contextlib.contextmanager
def swapped(
    state: State,
    fakes: Mapping[int, Tensor],
    live: list[tuple[Slot, HyperparameterPlace, Tensor]],
) -> Iterator[None]:
    """Modules and optimizers hold fakes inside, and are exactly as before outside, whatever happened.

    Args:
        state: What was found.
        fakes: The fake for the `id` of each real tensor of the state.
        live: The fake numbers that take the place of live hyper-parameters.
    """
    with contextlib.ExitStack() as stack:
        for module in state.submodules():
            stack.enter_context(_module(module, fakes))
        _gradients(state.held, fakes)
        for _, optimizer in state.optimizers:
            numbers = [(place, fake) for _, place, fake in live if place.optimizer is optimizer]
            stack.enter_context(_optimizer(optimizer, fakes, numbers))
        for _, scaler in state.scalers:
            stack.enter_context(swapped_scaler(scaler, fakes))
        if any(isinstance(optimizer, torch.optim.Adafactor) for _, optimizer in state.optimizers):
            stack.enter_context(adafactor_by(adafactor))
        yield


@contextlib.contextmanager
def standing_in(modules: Sequence[nn.Module], replaced: Mapping[int, nn.Module]) -> Iterator[None]:
    """Some modules are replaced in those that hold them, which are as before afterwards.

    Args:
        modules: All modules.
        replaced: What takes the place of a module, by its `id`.
    """
    tables = [(m._modules, dict(m._modules)) for m in modules if any(id(c) in replaced for c in m._modules.values())]
    try:
        for table, before in tables:
            table.update({name: replaced.get(id(child), child) for name, child in before.items()})
        yield
    finally:
        for table, before in tables:
            table.clear()
            table.update(before)


@contextlib.contextmanager
def _module(module: nn.Module, fakes: Mapping[int, Tensor]) -> Iterator[None]:
    tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module._modules)
    saved = [dict(table) for table in tables]
    with restored(module):
        for held in (*tables[:2], module.__dict__):
            for name, value in held.items():
                if isinstance(value, Tensor):
                    held[name] = fakes[id(value)]
        try:
            yield
        finally:
            for table, before in zip(tables, saved, strict=True):
                table.clear()
                table.update(before)


@contextlib.contextmanager
def _optimizer(
    optimizer: Optimizer, fakes: Mapping[int, Tensor], numbers: Sequence[tuple[HyperparameterPlace, Tensor]]
) -> Iterator[None]:
    entries = optimizer.state
    with restored(optimizer):
        optimizer.param_groups = [
            _group(optimizer, group, fakes, [(place, fake) for place, fake in numbers if place.group == index])
            for index, group in enumerate(optimizer.param_groups)
        ]
        optimizer.state = defaultdict(dict)
        for tensor, found in entries.items():
            optimizer.state[fakes[id(tensor)]] = {
                key: fakes[id(value)] if isinstance(value, Tensor) else value for key, value in found.items()
            }
        yield


class _Group(dict):
    """A param group while the step is traced: what the step writes into it would be lost."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise CaptureError(
            f"the step changes {key!r} of the optimizer",
            at=user_line() or None,
            hint="change it (or call scheduler.step()) after the compiled step: a new lr needs no recompile",
        )


def _group(
    optimizer: Optimizer,
    group: dict[str, Any],
    fakes: Mapping[int, Tensor],
    numbers: Sequence[tuple[HyperparameterPlace, Tensor]],
) -> dict[str, Any]:
    chosen = {key: value for key, value in _kernels(optimizer, group).items() if key in group}
    live: dict[str, Any] = {}
    for place, fake in numbers:
        values = group[place.key]
        live[place.key] = fake if place.index is None else (*values[: place.index], fake, *values[place.index + 1 :])
    return _Group({**group, **chosen, **live, "params": [fakes[id(t)] for t in group["params"]]})


def _kernels(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, bool]:
    """Fused where torch has such a kernel, for it takes Python numbers; else one tensor at a time."""
    can_be_fused = (
        type(optimizer) in FUSED
        and cycled_momentum(optimizer, group) is None
        and not group.get("differentiable")
        and all(t.is_floating_point() and not t.is_meta for t in group["params"])
    )
    return DIFFERENT_KERNELS | ({"fused": True, "capturable": False} if can_be_fused else {})


def _gradients(held: list[Held], fakes: Mapping[int, Tensor]) -> None:
    gradients = {h.slot.name: fakes[id(h.tensor)] for h in held if h.slot.kind is SlotKind.GRADIENT}
    for h in held:
        if h.slot.kind is SlotKind.PARAMETER and h.slot.name in gradients:
            fakes[id(h.tensor)].grad = gradients[h.slot.name]
