"""Modules that cannot be traced, run as one op with declared placements."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Placement
from torch.func import functional_call

from .capture.tree import flatten, unflatten
from .errors import InputError, RuleError
from .layout import PARTIAL, REPLICATE, shard_dim
from .override import Override
from .rules.rule import OpCall, Rule
from .rules.user import rule

Placements = Sequence[tuple[Sequence[Placement], Sequence[Placement]]]
Run = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]  # inputs, then parameters, to outputs


class Opaque(Override):
    """Runs a module as one op, as it is: for what cannot be traced, such as a value that Python needs, or NumPy.

    Forward and backward are one op each, run on real tensors; the backward runs the forward again. The op gets the
    module's parameters whole. The module must not draw random numbers and must not change its buffers.

    Args:
        like: Gives a tensor, or a tuple of tensors, of the shapes and dtypes of the outputs, from the arguments of the
            forward: `lambda x: x`. It is called with tensors that have no values.
        placements: Pairs of placements, of the tensors among the arguments and of the outputs, with which the module
            may run on each rank by itself: `[((Shard(0),), (Shard(0),))]` for one that treats every row alone.
            Otherwise every rank computes it whole.
    """

    edits = True  # each trace defines an op of its own

    def __init__(self, like: Callable[..., Tensor | tuple[Tensor, ...]], placements: Placements = ()) -> None:
        """Keep what is declared.

        Raises:
            InputError: `like` is no function.
        """
        if not callable(like):
            raise InputError(
                f"like is a {type(like).__name__}",
                at="Opaque(like)",
                hint="a function of the forward's arguments: lambda x: x",
            )
        self.like, self.placements = like, [(tuple(given), tuple(found)) for given, found in placements]

    def replacement(self, module: nn.Module) -> nn.Module:
        """A module that calls the op."""
        return _OpaqueModule(self, module)


class _OpaqueModule(nn.Module):
    def __init__(self, declared: Opaque, module: nn.Module) -> None:
        super().__init__()
        self._declared = declared
        self.__dict__["_original"] = module  # no submodule: its parameters are state of the step already

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module: nn.Module = self.__dict__["_original"]
        leaves, spec = flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        names = [name for name, _ in module.named_parameters()]
        fixed = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

        def arguments(values: Sequence[Tensor]) -> Any:
            filled = list(fixed)
            for place, value in zip(places, values, strict=False):
                filled[place] = value
            return unflatten(filled, spec)

        def run(values: Sequence[Tensor]) -> tuple[Tensor, ...]:
            given, named = arguments(values)
            parameters = dict(zip(names, values[len(places) :], strict=True))
            return _several(functional_call(module, parameters, given, named))

        def like(values: Sequence[Tensor]) -> tuple[Tensor, ...]:
            given, named = arguments(values)
            return _several(self._declared.like(*given, **named))

        tensors = [leaves[i] for i in places]
        found = self._declared.like(*args, **kwargs)
        op = _Op(type(module).__name__, len(places), len(names), len(_several(found)), run, like)
        made = op.define(self._declared.placements)(*tensors, *(p for _, p in module.named_parameters()))
        return made[0] if isinstance(found, Tensor) else made


class _Op:
    """The ops of one call of a module.

    Args:
        kind: Name of the module's class.
        inputs: Number of tensors among the arguments.
        parameters: Number of parameters.
        outputs: Number of outputs.
        run: Computes the outputs.
        like: Gives tensors like them.
    """

    _made = itertools.count()

    def __init__(self, kind: str, inputs: int, parameters: int, outputs: int, run: Run, like: Run) -> None:
        self.kind, self.name = kind, f"opaque_{kind.lower()}_{next(self._made)}"
        self.inputs, self.parameters, self.outputs, self.run, self.like = inputs, parameters, outputs, run, like

    def define(self, placements: Placements) -> Callable[..., tuple[Tensor, ...]]:
        """Register the ops; what is returned calls the forward, with the backward behind it."""
        for pair in placements:
            self._check(*pair)
        given = [f"Tensor x{i}" for i in range(self.inputs)] + [f"Tensor p{i}" for i in range(self.parameters)]
        gradients = [f"Tensor g{i}" for i in range(self.outputs)]
        forward = self._register("", given, self.outputs, self._forward, lambda *v: _new(self.like(v)))
        backward = self._register(
            "_backward", gradients + given, len(given), self._backward, lambda *v: _new(v[self.outputs :])
        )
        rule(forward, validate=False)(lambda call: self._rules(call, placements))
        rule(backward, validate=False)(lambda call: self._backward_rules(call, placements))
        return _with_gradient(forward, backward)

    def _register(self, suffix: str, given: list[str], count: int, kernel: Any, fake: Any) -> Any:
        name, single = f"meshstep::{self.name}{suffix}", count == 1
        torch.library.define(name, f"({', '.join(given)}) -> ({', '.join(['Tensor'] * count)})")
        torch.library.impl(name, "default", lambda *values: kernel(*values)[0] if single else kernel(*values))
        torch.library.register_fake(name, lambda *values: fake(*values)[0] if single else fake(*values))
        return getattr(torch.ops.meshstep, self.name + suffix).default

    def _forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return tuple(t.clone() for t in self.run(values))

    def _backward(self, *values: Tensor) -> tuple[Tensor, ...]:
        gradients = values[: self.outputs]
        leaves = [v.detach().requires_grad_(v.is_floating_point()) for v in values[self.outputs :]]
        with torch.enable_grad():
            found = self.run(leaves)
        pairs = [(f, g) for f, g in zip(found, gradients, strict=True) if f.requires_grad]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        made = iter(torch.autograd.grad([f for f, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
        found_for = [next(made) if leaf.requires_grad else None for leaf in leaves]
        return tuple(torch.zeros_like(v) if g is None else g.clone() for v, g in zip(leaves, found_for, strict=True))

    def _rules(self, call: OpCall, placements: Placements) -> Iterator[Rule]:
        for given, found in placements:
            yield Rule((*given, *[REPLICATE] * self.parameters), tuple(found))

    def _backward_rules(self, call: OpCall, placements: Placements) -> Iterator[Rule]:
        """Those of the gradients.

        That of an argument lies as the argument does; that of a parameter, or of an argument that all ranks have
        whole, is a sum over parts of a batch.
        """
        for given, found in placements:
            split = any(shard_dim(placement) is not None for placement in given)
            summed = PARTIAL if split else REPLICATE
            gradients = [placement if shard_dim(placement) is not None else summed for placement in given]
            parameters = [REPLICATE] * self.parameters
            yield Rule((*found, *given, *parameters), (*gradients, *[summed] * self.parameters))

    def _check(self, given: Sequence[Placement], found: Sequence[Placement]) -> None:
        if (len(given), len(found)) != (self.inputs, self.outputs):
            raise RuleError(
                f"placements of {len(given)} arguments and {len(found)} outputs for a module with {self.inputs} and "
                f"{self.outputs}",
                at=f"Opaque(placements=...) of {self.kind}",
                hint="one placement for each tensor among the arguments, and for each output",
            )


def _with_gradient(forward: Any, backward: Any) -> Callable[..., tuple[Tensor, ...]]:
    class Call(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *values: Tensor) -> tuple[Tensor, ...]:
            ctx.save_for_backward(*values)
            return _several(forward(*values))

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            values = ctx.saved_tensors
            found = _several(backward(*gradients, *values))
            return tuple(g if v.is_floating_point() else None for v, g in zip(values, found, strict=True))

    def apply(*values: Tensor) -> tuple[Tensor, ...]:
        return _several(Call.apply(*values))

    return apply


def _new(values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(value) for value in values)


def _several(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)
