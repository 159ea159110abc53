"""The modules and optimizers among a step's arguments, and all the state that hangs on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..errors import CaptureError
from ..ir.program import Slot, SlotKind
from . import attributes
from .places import (
    ArgumentPlace,
    AttributePlace,
    BufferPlace,
    GradientPlace,
    GroupPlace,
    HyperparameterPlace,
    OptimizerStatePlace,
    ParameterPlace,
    Place,
)

LIVE = ("lr",)  # what any scheduler changes; read anew at every call
CYCLED = frozenset(  # their momentum may be a tensor
    {
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.SGD,
    }
)
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
        names: What precedes the names of a module's or optimizer's attributes, by the `id` of it: `blocks.0.`.
        modules: Modules by path, each once.
        optimizers: Optimizers by path, each once.
        scalers: Gradient scalers by path, each once.
        schedulers: Learning-rate schedulers, each once.
        held: Every tensor of state, each once: parameters, buffers, gradients, optimizer state.
    """

    names: dict[int, str] = field(default_factory=dict)
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    optimizers: list[tuple[str, Optimizer]] = field(default_factory=list)
    scalers: list[tuple[str, GradScaler]] = field(default_factory=list)
    schedulers: list[LRScheduler] = field(default_factory=list)
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

    def owners(self) -> list[Any]:
        """All modules, optimizers and scalers, each once."""
        return [*self.submodules(), *(owner for _, owner in (*self.optimizers, *self.scalers))]

    def name(self, owner: Any, attribute: str) -> str:
        """The name of an attribute of a module or optimizer."""
        return self.names.get(id(owner), "") + attribute


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
            state.names[id(leaf)] = f"{path}."
            seen.add(id(leaf))
        elif isinstance(leaf, GradScaler):
            state.scalers.append((path, leaf))
            state.names[id(leaf)] = f"{path}."
            seen.add(id(leaf))
        elif isinstance(leaf, LRScheduler):
            state.schedulers.append(leaf)
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
            state.names[id(owner)] = below
            for key, tensor in owner._parameters.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    slot = Slot(SlotKind.PARAMETER, below + key)
                    state.held.append(Held(slot, ParameterPlace(owner, key), tensor))
            for key, buffer in owner._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    state.held.append(Held(Slot(SlotKind.BUFFER, below + key), BufferPlace(owner, key), buffer))
    # after all others: an attribute may be a second name of a parameter
    for owner in (*state.submodules(), *(scaler for _, scaler in state.scalers)):
        for key, tensor in attributes.tensors(owner):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                slot = Slot(SlotKind.BUFFER, state.name(owner, key))
                state.held.append(Held(slot, AttributePlace(owner, key), tensor))


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


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage may have an element in common."""
    (a_from, a_to), (b_from, b_to) = _extent(a), _extent(b)
    return max(a_from, b_from) < min(a_to, b_to)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """First byte and the byte after the last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + (int(last) + 1) * tensor.itemsize if tensor.numel() else start


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
        for group, options in enumerate(optimizer.param_groups):
            device = options["params"][0].device if options["params"] else torch.device("cpu")
            for key, index in _live(optimizer, options):
                place = HyperparameterPlace(optimizer, group, key, index, device)
                name = f"{path}.{key}[{group}]" + ("" if index is None else f"[{index}]")
                found.append((Slot(SlotKind.HYPERPARAMETER, name), place))
    return found


def _live(optimizer: Optimizer, group: Mapping[str, Any]) -> list[tuple[str, int | None]]:
    """Keys of the live numbers, each with its place if it is in a tuple."""
    found: list[tuple[str, int | None]] = [(key, None) for key in LIVE if key in group]
    return [*found, cycled] if (cycled := cycled_momentum(optimizer, group)) else found


def cycled_momentum(optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[str, int | None] | None:
    """The momentum, if a scheduler changes it at every step: `OneCycleLR` and `CyclicLR` note its range."""
    if "max_momentum" not in group or type(optimizer) not in CYCLED:
        return None
    return ("betas", 0) if "betas" in group else ("momentum", None)


def frozen_hyperparameters(optimizer: Optimizer) -> tuple:
    """What of the param groups is compiled in: all but the live numbers, the parameters and the choice of kernel."""
    return tuple(_frozen(optimizer, group) for group in optimizer.param_groups)


def _frozen(optimizer: Optimizer, group: Mapping[str, Any]) -> tuple:
    skipped = {"params", *LIVE, *DIFFERENT_KERNELS, "initial_lr"}
    cycled = cycled_momentum(optimizer, group)
    if cycled is None:
        return tuple((key, _hashable(value)) for key, value in group.items() if key not in skipped)
    key, index = cycled
    values = dict(group) | {key: group[key] != 0 if index is None else group[key][1:]}
    return tuple((key, _hashable(value)) for key, value in values.items() if key not in skipped)


def _hashable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return ("tensor", id(value))
    return tuple(value) if isinstance(value, list) else value
