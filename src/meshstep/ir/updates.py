"""PyTorch's fused optimizer kernels as functional ops on one parameter each.

`aten._fused_adamw_` and its like change lists of tensors in place. In the IR each parameter's update is an op of its
own (`meshstep::fused_adamw`), so that it can be placed and partitioned like any elementwise op; lowering puts the
updates back together into the in-place kernel on lists. Outputs are the new values of the arguments in
`Update.written`, in order; an optional tensor that is missing comes out as an empty one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer's update.

    Args:
        kernel: The in-place aten op on lists.
        op: The functional op of the IR on single tensors.
        lists: The kernel's arguments that are lists of tensors, in order.
        optional: Those of them that may be missing.
        written: Those of them that the kernel writes and whose new values the op returns.
    """

    kernel: Any
    op: Any
    lists: tuple[str, ...]
    optional: frozenset[str]
    written: tuple[str, ...]


_OPTIONAL = frozenset({"max_exp_avg_sqs", "momentum_buffer_list"})
_KERNELS = {
    "fused_adam": aten._fused_adam_.tensor_lr,
    "fused_adamw": aten._fused_adamw_.tensor_lr,
    "fused_sgd": aten._fused_sgd_.tensor_lr,
    "fused_adagrad": aten._fused_adagrad_.tensor_lr,
}


def _schema(kernel: Any, written: tuple[str, ...]) -> str:
    parts = []
    for argument in kernel._schema.arguments:
        type_ = str(argument.type).replace("Optional[Tensor]", "Tensor?").replace("List[Tensor]", "Tensor")
        optional = "?" if argument.name in _OPTIONAL else ""
        default = "=None" if type_ == "Tensor?" else ""
        parts.append(f"{type_}{optional} {_argument(argument.name)}{default}")
    return f"({', '.join(parts)}) -> ({', '.join(['Tensor'] * len(written))})"


def _argument(name: str) -> str:
    return "param" if name == "self" else name


def laid_out_like(tensors: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    """Tensors whose elements lie in memory as those of others do: copies of those that lie otherwise.

    The kernels take element i of each tensor's memory together, whatever the strides say.
    """
    return [_laid_out(tensor, other) for tensor, other in zip(tensors, like, strict=True)]


def _laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    if tensor.stride() == like.stride() or tensor.shape != like.shape:
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


def _compute(kernel: Any, lists: tuple[str, ...], written: tuple[str, ...], *args: Any, **kwargs: Any) -> tuple:
    names = [_argument(a.name) for a in kernel._schema.arguments]
    bound = dict(zip(names, args, strict=False)) | kwargs
    for name in written:
        bound[name] = None if bound[name] is None else bound[name].clone()
    for name in lists:
        bound[name] = None if bound[name] is None else _laid_out(bound[name], bound["param"])
    listed = [[] if bound[name] is None else [bound[name]] for name in lists]
    kernel(*listed, **{name: value for name, value in bound.items() if name not in lists})
    return tuple(_or_empty(bound[name], bound["param"]) for name in written)


def _infer(kernel: Any, written: tuple[str, ...], *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    names = [_argument(a.name) for a in kernel._schema.arguments]
    bound = dict(zip(names, args, strict=False)) | kwargs
    return tuple(torch.empty_like(_or_empty(bound[name], bound["param"])) for name in written)


def _or_empty(value: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if value is None else value


def _register() -> dict[Any, Update]:
    found = {}
    for name, kernel in _KERNELS.items():
        arguments = kernel._schema.arguments
        lists = tuple(_argument(a.name) for a in arguments if str(a.type) == "List[Tensor]")
        written = tuple(
            _argument(a.name)
            for a in arguments
            if a.alias_info is not None and a.alias_info.is_write and a.name != "grads"
        )
        torch.library.define(f"meshstep::{name}", _schema(kernel, written))
        torch.library.impl(f"meshstep::{name}", "default", partial(_compute, kernel, lists, written))
        torch.library.register_fake(f"meshstep::{name}", partial(_infer, kernel, written))
        op = getattr(torch.ops.meshstep, name).default
        found[kernel] = Update(kernel, op, lists, _OPTIONAL & set(lists), written)
    return found


UPDATES: Mapping[Any, Update] = _register()
BY_OP: Mapping[Any, Update] = {update.op: update for update in UPDATES.values()}
