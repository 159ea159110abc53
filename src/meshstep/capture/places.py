"""Where the tensor of a slot lives among the user's own objects, to be read and written at every call."""

from __future__ import annotations

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
        return self.optimizer.state[self.owner.read(leaves)].get(self.key)

    def create(self, leaves: list[Any], value: Any) -> None:
        """Set the entry."""
        self.optimizer.state[self.owner.read(leaves)][self.key] = value


@dataclass(frozen=True, slots=True, eq=False)
class HyperparameterPlace:
    """A number in an optimizer's param group, read as a 0-d float64 tensor.

    `lr` may be a tensor there too, as torch allows.
    """

    optimizer: Optimizer
    group: int
    key: str
    device: torch.device

    def read(self, leaves: list[Any]) -> Tensor:
        """The present value."""
        value = self.optimizer.param_groups[self.group][self.key]
        return torch.as_tensor(value, dtype=torch.float64, device=self.device)


Place = (
    ParameterPlace
    | BufferPlace
    | GroupPlace
    | ArgumentPlace
    | ConstantPlace
    | GradientPlace
    | OptimizerStatePlace
    | HyperparameterPlace
)
