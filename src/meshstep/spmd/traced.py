"""The forward of a module, and its backward, as captured programs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import without_hooks
from ..capture.capture import Captured, capture
from ..capture.places import ConstantPlace
from ..capture.tree import Spec, flatten, paths, unflatten
from ..ir.program import SlotKind
from ..mesh import Mesh
from ..runtime.seed import Seed


class Traced:
    """A function of tensors, or a module, captured alone and with its backward.

    The leaves of a call are the module (None for a function), the arguments, and the gradients of outputs.

    Args:
        function: What is called.
        module: The module that it is, if it is one.
        spec: The structure of its arguments.
        seed: Of its random numbers.
        mesh: The mesh that the programs are for.

    Attributes:
        outputs: The tensors that it returns, fakes.
        inputs: The leaves among the arguments that may get a gradient.
    """

    def __init__(
        self, function: Callable[..., Any], module: nn.Module | None, spec: Spec, seed: Seed, mesh: Mesh
    ) -> None:
        self.function, self.module, self.spec, self.seed, self.mesh = function, module, spec, seed, mesh
        self.outputs: list[Tensor] = []
        self.inputs: list[int] = []

    def forward(self, leaves: Sequence[Any], names: Sequence[str], shapes: Sequence[Any]) -> Captured:
        """The forward alone."""

        def run(given: list[Any]) -> Any:
            returned = self._call(given)
            self.outputs = _tensors(returned)
            self.inputs = [i for i, leaf in enumerate(given) if isinstance(leaf, Tensor) and leaf.requires_grad]
            return returned

        return self._capture(run, leaves, names, shapes)

    def joint(self, leaves: Sequence[Any], names: Sequence[str], shapes: Sequence[Any]) -> Captured:
        """Forward and backward: the last leaves are the gradients of outputs."""

        def run(given: list[Any]) -> Any:
            returned = self._call(given)
            wanted = [t for t in _tensors(returned) if t.requires_grad]
            parameters = [p for p in self._parameters() if p.requires_grad]
            sources = [*parameters, *(given[i] for i in self.inputs)]
            made = torch.autograd.grad(wanted, sources, given[len(given) - len(wanted) :], allow_unused=True)
            for parameter, gradient in zip(parameters, made, strict=False):
                parameter.grad = gradient
            return returned, list(made[len(parameters) :])

        found = self._capture(run, leaves, names, shapes)
        given_later = {f"{SlotKind.ARGUMENT.value} {name}" for name in names[1 + self.spec_size() :]}
        places = [
            ConstantPlace(torch.empty(0)) if str(slot) in given_later else place
            for slot, place in zip(found.program.slots, found.places, strict=True)
        ]
        return replace(found, places=tuple(places))

    def gradients(self, captured: Captured) -> list[int]:
        """The results of the joint program that are gradients."""
        return [
            i
            for i, result in enumerate(captured.program.results)
            if (result.slot is None and i >= len(self.outputs))
            or (result.slot is not None and result.slot.kind is SlotKind.GRADIENT)
        ]

    def spec_size(self) -> int:
        """Number of leaves of the arguments."""
        return len(paths(self.spec))

    def _call(self, given: Sequence[Any]) -> Any:
        args, kwargs = unflatten(list(given[1 : 1 + self.spec_size()]), self.spec)
        return self.function(*args, **kwargs)

    def _parameters(self) -> list[nn.Parameter]:
        """As they are now: fakes while the module is traced."""
        return [] if self.module is None else list(self.module.parameters())

    def _capture(self, run: Any, leaves: Sequence[Any], names: Sequence[str], shapes: Sequence[Any]) -> Captured:
        with without_hooks(self._parameters()), _without_gradients(self._parameters()):
            return capture(self.function, run, leaves, names, shapes, self.mesh, self.seed.now)


def _tensors(returned: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(returned)[0] if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def _without_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """The backward of one call makes gradients; to add them up is autograd's affair."""
    held = [(parameter, parameter.grad) for parameter in parameters]
    try:
        for parameter, _ in held:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in held:
            parameter.grad = gradient
