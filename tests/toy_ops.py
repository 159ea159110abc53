"""Custom ops that no table knows, for the tests of discovery and of the user's rules."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MADE: dict[str, Any] = {}
CALLS: list[str] = []


def op(fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as `toy::<its name>`; `fake` gives empty outputs."""

    def register(function: Callable[..., Any]) -> Any:
        made = torch.library.custom_op(f"toy::{function.__name__}", function, mutates_args=())
        made.register_fake(fake)
        overload = getattr(torch.ops.toy, function.__name__).default
        MADE[function.__name__] = made
        return overload

    return register


def like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def scalar(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(())


# ---- a gate, with its gradient


@op(like)
def gate(x: Tensor, weight: Tensor, scale: float) -> Tensor:
    return torch.tanh(x) * weight * scale


@op(lambda grad, x, weight, scale: (torch.empty_like(x), torch.empty_like(weight)))
def gate_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    t = torch.tanh(x)
    return grad * weight * scale * (1 - t * t), (grad * t * scale).flatten(0, -2).sum(0)


def _keep(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.scale = inputs[2]


MADE["gate"].register_autograd(
    lambda ctx, grad: (*gate_backward(grad.contiguous(), *ctx.saved_tensors, ctx.scale), None), setup_context=_keep
)


# ---- ops with one thing that is hard each


@op(like)
def last_softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


@op(scalar)
def batch_mean(x: Tensor) -> Tensor:
    return x.mean()


@op(scalar)
def total(x: Tensor) -> Tensor:
    return x.sum()


@op(like)
def clip(x: Tensor, limit: float) -> Tensor:
    """Scaled down where its norm is above a limit: on small tensors it looks like the identity."""
    return x * (limit / x.norm()).clamp(max=1.0)


@op(like)
def same_rows(x: Tensor, rows: int) -> Tensor:
    """Takes the number of its rows, and insists on it."""
    assert x.shape[0] == rows, f"{x.shape[0]} rows, and not {rows}"
    return 2 * x


@op(lambda x, shape: (torch.empty_like(x.reshape(shape)), torch.empty_like(x.reshape(shape))))
def reshaped(x: Tensor, shape: list[int]) -> tuple[Tensor, Tensor]:
    return x.reshape(shape).clone(), -x.reshape(shape)


@op(lambda x, k: x.new_empty(*x.shape[:-1], k))
def largest(x: Tensor, k: int) -> Tensor:
    return x.topk(k)[0]


@op(like)
def by_heads(x: Tensor, heads: int) -> Tensor:
    """A softmax within each head."""
    return x.unflatten(-1, (heads, -1)).softmax(-1).flatten(-2)


@op(lambda x, groups: x.new_empty(x.shape[0], groups))
def group_sums(x: Tensor, groups: int) -> Tensor:
    return x.unflatten(1, (groups, -1)).sum(-1)


@op(lambda table, rows: table.new_empty(*rows.shape, table.shape[1]))
def lookup(table: Tensor, rows: Tensor) -> Tensor:
    return table[rows]


@op(like)
def by_place(x: Tensor, start: Tensor) -> Tensor:
    """x[B*T, D] and start[B, T] of the same rows."""
    return x * start.reshape(-1, 1)


@op(lambda x: x.new_empty((), dtype=torch.bool))
def any_above(x: Tensor) -> Tensor:
    return (x > 0).any()


@op(lambda x: x.new_empty((), dtype=torch.int64))
def best(x: Tensor) -> Tensor:
    return x.flatten().argmax()


@op(like)
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand(x.shape, dtype=x.dtype)


@op(like)
def counting(x: Tensor) -> Tensor:
    """Another result at every call."""
    CALLS.append("counting")
    return x + len(CALLS)


@op(like)
def constant(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


@op(like)
def slow(x: Tensor) -> Tensor:
    time.sleep(0.02)
    return x + 1


@op(like)
def fails(x: Tensor) -> Tensor:
    raise NotImplementedError("no kernel for this machine")


@op(like)
def blocks(x: Tensor) -> Tensor:
    """Normalised in blocks of 32 rows: no small tensor shows it."""
    return torch.cat([part / (1 + part.abs().max()) for part in x.split(32)])


@op(like)
def single(x: Tensor) -> Tensor:
    """In single precision within, exact to 1e-7."""
    return (x.float() * 2).to(x.dtype)


@op(like)
def only_float(x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        raise TypeError("float32 only")
    return x.cos()


@op(lambda x: [torch.empty_like(t) for t in reversed(x)])
def swapped(x: list[Tensor]) -> list[Tensor]:
    return [t * 1 for t in reversed(x)]


@op(lambda grad, x: (torch.empty_like(x), x.new_empty(x.shape[-1])))
def norm_backward(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return grad - grad.mean(-1, keepdim=True) * x, (grad * x).flatten(0, -2).sum(0)


@op(like)
def changes_its_mind(x: Tensor) -> Tensor:
    """Row by row, but for many rows."""
    return x * 2 if x.shape[0] <= 32 else x - x.mean(0)


@op(lambda x: x.new_empty(x.shape[1:]))
def first_row(x: Tensor) -> Tensor:
    """The first rank has it, the others have something else of the same shape."""
    return x[0].clone()


@op(like)
def every_third(x: Tensor) -> Tensor:
    """A pattern that two shards of six rows hide."""
    return x * (torch.arange(x.shape[0]) % 3 + 1).unsqueeze(1)
