"""Views and in-place changes as values: every tensor of the trace is a base or a chain of views of one.

A write to a view is a new value of its base (the view's new value scattered into the old base); a read of a view whose
base has changed since computes the view anew. So the recorded graph holds no mutation.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..errors import CaptureError
from ..ir.types import TensorType

aten = torch.ops.aten
Emit = Callable[..., fx.Node]


@dataclass(slots=True, eq=False)
class Base:
    """A storage: counts the writes to it."""

    version: int = 0
    fixed: tuple[str, str] | None = None  # if it may not be written to: what is wrong then, and what to try


@dataclass(slots=True, eq=False)
class Ref:
    """What is known of one tensor of the trace.

    Args:
        base: Its storage.
        node: The node of its value, valid at `version` of the base.
        type: Its type.
        parent: The tensor of which it is a view; `None` for the base itself.
        view: The op of that view with its arguments after the first; `None` for the very same elements.
        index: Which output of a view op with several it is.
    """

    base: Base
    node: fx.Node
    type: TensorType
    parent: Ref | None = None
    view: tuple[Any, tuple, dict] | None = None
    index: int | None = None
    version: int = field(default=0)

    def read(self, emit: Emit) -> fx.Node:
        """The node of the present value."""
        if self.version != self.base.version and self.parent is not None:
            self.node = self._view_of(self.parent.read(emit), emit)
            self.version = self.base.version
        return self.node

    def write(self, value: fx.Node, emit: Emit) -> None:
        """Give the tensor a new value."""
        if self.base.fixed:
            raise CaptureError(self.base.fixed[0], hint=self.base.fixed[1])
        ref, new = self, value
        while ref.parent is not None:
            new = self._into(ref, new, emit)
            ref = ref.parent
        self.base.version += 1
        ref.node, ref.version = new, self.base.version
        self.node, self.version = value, self.base.version

    def _view_of(self, node: fx.Node, emit: Emit) -> fx.Node:
        if self.view is None:
            return node
        op, args, kwargs = self.view
        made = emit(op, (node, *args), kwargs)
        return made if self.index is None else emit(operator.getitem, (made, self.index), {})

    @staticmethod
    def _into(ref: Ref, value: fx.Node, emit: Emit) -> fx.Node:
        """The parent's new value when the view `ref` gets `value`."""
        assert ref.parent is not None
        if ref.view is None:
            return value
        op, args, _ = ref.view
        shape = list(ref.parent.type.shape)
        if op in _RESHAPES:
            return emit(aten.reshape.default, (value, shape), {})
        if op not in _SCATTERS:
            raise CaptureError(f"an in-place change of a view made by {op}", hint="change a copy, or the tensor itself")
        return _SCATTERS[op](emit, ref.parent.read(emit), value, args, ref.index)


_RESHAPES = frozenset(
    {
        aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
        aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten._reshape_alias.default,
        aten.expand.default,
    }
)  # fmt: skip


def _into_transpose(emit: Emit, base: fx.Node, value: fx.Node, args: tuple, index: int | None) -> fx.Node:
    return emit(aten.transpose.int, (value, *args), {})


def _into_t(emit: Emit, base: fx.Node, value: fx.Node, args: tuple, index: int | None) -> fx.Node:
    return emit(aten.t.default, (value,), {})


def _into_permute(emit: Emit, base: fx.Node, value: fx.Node, args: tuple, index: int | None) -> fx.Node:
    dims = [d % len(args[0]) for d in args[0]]
    return emit(aten.permute.default, (value, [dims.index(d) for d in range(len(dims))]), {})


def _into_select(emit: Emit, base: fx.Node, value: fx.Node, args: tuple, index: int | None) -> fx.Node:
    return emit(aten.select_scatter.default, (base, value, *args), {})


def _into_slice(emit: Emit, base: fx.Node, value: fx.Node, args: tuple, index: int | None) -> fx.Node:
    return emit(aten.slice_scatter.default, (base, value, *args), {})


def _into_unbind(emit: Emit, base: fx.Node, value: fx.Node, args: tuple, index: int | None) -> fx.Node:
    return emit(aten.select_scatter.default, (base, value, args[0] if args else 0, index), {})


def _into_split(emit: Emit, base: fx.Node, value: fx.Node, args: tuple, index: int | None) -> fx.Node:
    assert index is not None
    dim = args[1] if len(args) > 1 else 0
    sizes = args[0]
    start = sum(sizes[:index]) if isinstance(sizes, (list, tuple)) else sizes * index
    end = start + value.meta["type"].shape[dim]
    return emit(aten.slice_scatter.default, (base, value, dim, start, end), {})


def _into_diagonal(emit: Emit, base: fx.Node, value: fx.Node, args: tuple, index: int | None) -> fx.Node:
    return emit(aten.diagonal_scatter.default, (base, value, *args), {})


def _into_strided(emit: Emit, base: fx.Node, value: fx.Node, args: tuple, index: int | None) -> fx.Node:
    return emit(aten.as_strided_scatter.default, (base, value, *args), {})


def _into_dtype(emit: Emit, base: fx.Node, value: fx.Node, args: tuple, index: int | None) -> fx.Node:
    return emit(aten.view.dtype, (value, base.meta["type"].dtype), {})


def _into_complex(emit: Emit, base: fx.Node, value: fx.Node, args: tuple, index: int | None) -> fx.Node:
    return emit(aten.view_as_real.default, (value,), {})


def _into_real(emit: Emit, base: fx.Node, value: fx.Node, args: tuple, index: int | None) -> fx.Node:
    return emit(aten.view_as_complex.default, (value,), {})


_SCATTERS: dict[Any, Callable[..., fx.Node]] = {
    aten.t.default: _into_t,
    aten.transpose.int: _into_transpose,
    aten.permute.default: _into_permute,
    aten.select.int: _into_select,
    aten.slice.Tensor: _into_slice,
    aten.unbind.int: _into_unbind,
    aten.split.Tensor: _into_split,
    aten.split_with_sizes.default: _into_split,
    aten.diagonal.default: _into_diagonal,
    aten.as_strided.default: _into_strided,
    aten.view.dtype: _into_dtype,
    aten.view_as_complex.default: _into_complex,
    aten.view_as_real.default: _into_real,
}
