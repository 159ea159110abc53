"""Puts fake tensors in the place of a step's state while it is traced, and everything back afterwards."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._torch import FakeTensorMode
from ..ir.program import Slot, SlotKind
from .places import HyperparameterPlace
from .state import DIFFERENT_KERNELS, FUSED, Held, State


def fake_like(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake tensor with the metadata of a real one, a parameter if that is one."""
    with mode, torch.no_grad():
        fake = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device, requires_grad=False
        )
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad)


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
            numbers = {(p.group, p.key): fake for _, p, fake in live if p.optimizer is optimizer}
            stack.enter_context(_optimizer(optimizer, fakes, numbers))
        yield


@contextlib.contextmanager
def _module(module: nn.Module, fakes: Mapping[int, Tensor]) -> Iterator[None]:
    tables = (module.__dict__, module._parameters, module._buffers, module._modules)
    saved = [dict(table) for table in tables]
    for table in (module._parameters, module._buffers):
        for name, tensor in table.items():
            if tensor is not None:
                table[name] = fakes[id(tensor)]  # type: ignore[assignment]
    try:
        yield
    finally:
        for table, before in zip(tables, saved, strict=True):
            table.clear()
            table.update(before)


@contextlib.contextmanager
def _optimizer(
    optimizer: Optimizer, fakes: Mapping[int, Tensor], numbers: Mapping[tuple[int, str], Tensor]
) -> Iterator[None]:
    groups, entries = optimizer.param_groups, optimizer.state
    optimizer.param_groups = [
        _group(optimizer, group, fakes, {key: fake for (g, key), fake in numbers.items() if g == index})
        for index, group in enumerate(groups)
    ]
    optimizer.state = defaultdict(dict)
    for tensor, found in entries.items():
        optimizer.state[fakes[id(tensor)]] = {
            key: fakes[id(value)] if isinstance(value, Tensor) else value for key, value in found.items()
        }
    try:
        yield
    finally:
        optimizer.param_groups, optimizer.state = groups, entries


def _group(
    optimizer: Optimizer, group: dict[str, Any], fakes: Mapping[int, Tensor], numbers: Mapping[str, Tensor]
) -> dict[str, Any]:
    kernels = dict(DIFFERENT_KERNELS)
    if type(optimizer) in FUSED and all(t.is_floating_point() and not t.is_meta for t in group["params"]):
        kernels |= {"fused": True, "capturable": False}
    chosen = {key: value for key, value in kernels.items() if key in group}
    return {**group, **chosen, **numbers, "params": [fakes[id(t)] for t in group["params"]]}


def _gradients(held: list[Held], fakes: Mapping[int, Tensor]) -> None:
    gradients = {h.slot.name: fakes[id(h.tensor)] for h in held if h.slot.kind is SlotKind.GRADIENT}
    for h in held:
        if h.slot.kind is SlotKind.PARAMETER and h.slot.name in gradients:
            fakes[id(h.tensor)].grad = gradients[h.slot.name]
