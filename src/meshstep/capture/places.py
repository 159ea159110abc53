"""Where the tensor of a slot lives among the user's own objects, to be read and written at every call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True, slots=True, eq=False)
class ParameterPlace:
    """A parameter of a module."""

    module: nn.Module
    name: str

    def read(self, leaves: list[Any]) -> Tensor | None:
        """The parameter."""
        return self.module._parameters[self.name]


@dataclass(frozen=True, slots=True, eq=False)
class BufferPlace:
    """A buffer of a module."""

    module: nn.Module
    name: str

    def read(self, leaves: list[Any]) -> Tensor | None:
        """The buffer."""
        return self.module._buffers[self.name]


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlace:
    """A parameter that only an optimizer knows."""

    optimizer: Optimizer
    group: int
    index: int

    def read(self, leaves: list[Any]) -> Tensor | None:
        """The parameter."""
        return self.optimizer.param_groups[self.group]["params"][self.index]


@dataclass(frozen=True, slots=True, eq=False)
class ArgumentPlace:
    """A tensor among the arguments of the call."""

    index: int

    def read(self, leaves: list[Any]) -> Tensor | None:
        """The argument."""
        return leaves[self.index]


@dataclass(frozen=True, slots=True, eq=False)
class ConstantPlace:
    """A tensor that the program holds itself."""

    tensor: Tensor

    def read(self, leaves: list[Any]) -> Tensor | None:
        """The tensor."""
        return self.tensor


@dataclass(frozen=True, slots=True, eq=False)
class GradientPlace:
    """The `.grad` of a parameter."""

    owner: Place

    def read(self, leaves: list[Any]) -> Tensor | None:
        """The gradient, None if there is none."""
        tensor = self.owner.read(leaves)
        return None if tensor is None else tensor.grad

    def create(self, leaves: list[Any], value: Tensor | None) -> None:
        """Set or remove the gradient."""
        self.owner.read(leaves).grad = value  # type: ignore[union-attr]


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerStatePlace:
    """One entry of an optimizer's state of one parameter."""

    optimizer: Optimizer
    owner: Place
    key: str

    def read(self, leaves: list[Any]) -> Any:
        """The entry, None if there is none."""
        owner: Any = self.owner.read(leaves)
        return self.optimizer.state[owner].get(self.key)

    def create(self, leaves: list[Any], value: Any) -> None:
        """Set the entry."""
        owner: Any = self.owner.read(leaves)
        self.optimizer.state[owner][self.key] = value


@dataclass(frozen=True, slots=True, eq=False)
class AttributePlace:
    """An attribute of a module or optimizer that is neither parameter nor buffer."""

    owner: Any
    name: str

    def read(self, leaves: list[Any]) -> Any:
        """The attribute, None if there is none."""
        return self.owner.__dict__.get(self.name)

    def create(self, leaves: list[Any], value: Any) -> None:
        """Set the attribute; containers are copied."""
        self.owner.__dict__[self.name] = value if isinstance(value, Tensor) else copy.deepcopy(value)


@dataclass(frozen=True, slots=True, eq=False)
class RequiresGradPlace:
    """Whether a parameter requires grad."""

    owner: Place

    def create(self, leaves: list[Any], value: bool) -> None:
        """Set it."""
        self.owner.read(leaves).requires_grad_(value)  # type: ignore[union-attr]


@dataclass(frozen=True, slots=True, eq=False)
class HyperparameterPlace:
    """A number in an optimizer's param group, read as a 0-d float64 tensor.

    `lr` may be a tensor there too, as torch allows.

    Args:
        optimizer: The optimizer.
        group: Index of the group.
        key: Key of the number, or of the tuple that it is in.
        index: Its place in the tuple; None if it is in none.
        device: Where it is wanted.
    """

    optimizer: Optimizer
    group: int
    key: str
    index: int | None
    device: torch.device

    def value(self) -> Any:
        """The present number."""
        found = self.optimizer.param_groups[self.group][self.key]
        return found if self.index is None else found[self.index]

    def read(self, leaves: list[Any]) -> Tensor:
        """The present number as a tensor."""
        return torch.as_tensor(self.value(), dtype=torch.float64, device=self.device)


@dataclass(frozen=True, slots=True, eq=False)
class SeedPlace:
    """The seed and the number of the call, from the step that the program belongs to."""

    now: Callable[[torch.device], Tensor]
    device: torch.device

    def read(self, leaves: list[Any]) -> Tensor:
        """i64[2]."""
        return self.now(self.device)


Place = (
    ParameterPlace
    | BufferPlace
    | GroupPlace
    | ArgumentPlace
    | ConstantPlace
    | GradientPlace
    | OptimizerStatePlace
    | AttributePlace
    | HyperparameterPlace
    | SeedPlace
)
