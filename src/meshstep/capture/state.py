"""The modules and optimizers among a step's arguments, and all the state that hangs on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import CaptureError
from ..ir.program import Slot, SlotKind
from .places import (
    ArgumentPlace,
    BufferPlace,
    GradientPlace,
    GroupPlace,
    HyperparameterPlace,
    OptimizerStatePlace,
    ParameterPlace,
    Place,
)

LIVE = ("lr",)  # what a scheduler changes; read anew at every call
DIFFERENT_KERNELS = {
    "foreach": False,
    "fused": False,
    "capturable": True,
}  # which kernel computes it is ours to say
FUSED = frozenset({torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad})


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """One tensor of the state."""

    slot: Slot
    place: Place
    tensor: Tensor


@dataclass(slots=True, eq=False)
class State:
    """What was found among the arguments.

    Args:
        modules: Modules by path, each once.
        optimizers: Optimizers by path, each once.
        held: Every tensor of state, each once: parameters, buffers, gradients, optimizer state.
    """

    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    optimizers: list[tuple[str, Optimizer]] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)

    def parameters(self) -> Iterator[Held]:
        """The parameters."""
        return (held for held in self.held if held.slot.kind is SlotKind.PARAMETER)

    def submodules(self) -> list[nn.Module]:
        """All modules below the modules, each once."""
        found: dict[int, nn.Module] = {}
        for _, module in self.modules:
            found |= {id(m): m for m in module.modules()}
        return list(found.values())


def collect(leaves: Sequence[Any], paths: Sequence[str]) -> State:
    """Find the state.

    Args:
        leaves: The leaves of the arguments.
        paths: Their paths.
    """
    state, seen = State(), set[int]()
    for leaf, path in zip(leaves, paths, strict=True):
        if id(leaf) in seen:
            continue
        if isinstance(leaf, nn.Module):
            state.modules.append((path, leaf))
            seen.add(id(leaf))
        elif isinstance(leaf, Optimizer):
            state.optimizers.append((path, leaf))
            seen.add(id(leaf))
    _collect_modules(state)
    _collect_arguments(state, leaves, paths)
    _collect_groups(state)
    _collect_gradients(state)
    _collect_optimizer_state(state)
    return state


def _collect_modules(state: State) -> None:
    seen = set[int]()
    for path, module in state.modules:
        prefix = f"{path}." if len(state.modules) > 1 else ""
        for name, owner in module.named_modules():
            below = f"{prefix}{name}." if name else prefix
            for key, tensor in owner._parameters.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    slot = Slot(SlotKind.PARAMETER, below + key)
                    state.held.append(Held(slot, ParameterPlace(owner, key), tensor))
            for key, buffer in owner._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    state.held.append(Held(Slot(SlotKind.BUFFER, below + key), BufferPlace(owner, key), buffer))


def _collect_arguments(state: State, leaves: Sequence[Any], paths: Sequence[str]) -> None:
    """Parameters that are passed by themselves."""
    known = {id(held.tensor) for held in state.held}
    for index, (leaf, path) in enumerate(zip(leaves, paths, strict=True)):
        if isinstance(leaf, nn.Parameter) and id(leaf) not in known:
            known.add(id(leaf))
            state.held.append(Held(Slot(SlotKind.PARAMETER, path), ArgumentPlace(index), leaf))


def _collect_groups(state: State) -> None:
    known = {id(held.tensor) for held in state.held}
    for path, optimizer in state.optimizers:
        for g, group in enumerate(optimizer.param_groups):
            for i, tensor in enumerate(group["params"]):
                if id(tensor) not in known:
                    known.add(id(tensor))
                    slot = Slot(SlotKind.PARAMETER, f"{path}.param_groups[{g}][{i}]")
                    state.held.append(Held(slot, GroupPlace(optimizer, g, i), tensor))


def _collect_gradients(state: State) -> None:
    for held in list(state.parameters()):
        if held.tensor.grad is not None:
            slot = Slot(SlotKind.GRADIENT, held.slot.name)
            state.held.append(Held(slot, GradientPlace(held.place), held.tensor.grad))


def _collect_optimizer_state(state: State) -> None:
    by_id = {id(held.tensor): held for held in state.parameters()}
    for path, optimizer in state.optimizers:
        for tensor, entries in optimizer.state.items():
            owner = by_id[id(tensor)]
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    place = OptimizerStatePlace(optimizer, owner.place, key)
                    state.held.append(Held(state_slot(state, path, owner, key), place, value))
                elif isinstance(value, (list, dict, tuple)):
                    raise CaptureError(
                        f"the optimizer keeps a {type(value).__name__} of tensors",
                        at=f"{type(optimizer).__name__} state {key!r} of {owner.slot.name}",
                        hint="an optimizer whose state are tensors of one parameter each; step LBFGS outside",
                    )


def state_slot(state: State, path: str, owner: Held, key: str) -> Slot:
    """The slot of an optimizer's state: `fc1.weight.exp_avg`, with the optimizer's path if there are several."""
    prefix = f"{path}." if len(state.optimizers) > 1 else ""
    return Slot(SlotKind.OPTIMIZER_STATE, f"{prefix}{owner.slot.name}.{key}")


def python_values(state: State) -> dict[tuple[int, str], Any]:
    """Optimizer state that is no tensor, by the optimizer's `id` and the slot's name."""
    by_id = {id(held.tensor): held for held in state.parameters()}
    return {
        (id(optimizer), state_slot(state, path, by_id[id(tensor)], key).name): value
        for path, optimizer in state.optimizers
        for tensor, entries in optimizer.state.items()
        for key, value in entries.items()
        if not isinstance(value, Tensor)
    }


def hyperparameters(state: State) -> list[tuple[Slot, HyperparameterPlace]]:
    """The live numbers of every param group."""
    found = []
    for path, optimizer in state.optimizers:
        for index, group in enumerate(optimizer.param_groups):
            device = group["params"][0].device if group["params"] else torch.device("cpu")
            for key in LIVE:
                if key in group:
                    place = HyperparameterPlace(optimizer, index, key, device)
                    found.append((Slot(SlotKind.HYPERPARAMETER, f"{path}.{key}[{index}]"), place))
    return found


def frozen_hyperparameters(optimizer: Optimizer) -> tuple:
    """What of the param groups is compiled in: all but the live numbers, the parameters and the choice of kernel."""
    skipped = {"params", *LIVE, *DIFFERENT_KERNELS, "initial_lr"}
    return tuple(
        tuple((key, _hashable(value)) for key, value in group.items() if key not in skipped)
        for group in optimizer.param_groups
    )


def _hashable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return ("tensor", id(value))
    return tuple(value) if isinstance(value, list) else value
