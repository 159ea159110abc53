"""The ops that random programs are made of: each takes its operands and options by chance from what fits.

A function gets a `Draw` and returns a new value, or None where nothing that there is fits. What it chooses depends on
its seed and on shapes only, so that a program computes the same every time it runs, and when it is traced.

Numbers stay small and away from the edges of what is not smooth (`apart`): where rounding decides which way a step
goes, two right programs differ.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MOST = 2000  # elements of a value


@dataclass
class Draw:
    """What an op chooses from.

    Args:
        chance: Chooses.
        values: Floating-point values so far; the first is the batch.
        ids: Integers from 0 to 5, with a row for each of the batch.
        parameter: Gives a parameter of a shape.
        buffer: Gives a buffer of a shape.
    """

    chance: random.Random
    values: Sequence[Tensor]
    ids: Tensor
    parameter: Callable[[Sequence[int]], Tensor]
    buffer: Callable[[Sequence[int]], Tensor]

    def value(self, least: int = 0, most: int = 9) -> Tensor | None:
        """One of so many dims; a late one rather than an early one."""
        fitting = [v for v in self.values if least <= v.ndim <= most and v.numel()]
        return fitting[-1 - min(self.below(3), self.below(3)) % len(fitting)] if fitting else None

    def below(self, count: int) -> int:
        return self.chance.randrange(count)

    def one(self, *choices: Any) -> Any:
        return choices[self.below(len(choices))]

    def dim(self, x: Tensor) -> int:
        return self.below(x.ndim)

    def dims(self, x: Tensor) -> list[int]:
        return sorted(self.chance.sample(range(x.ndim), 1 + self.below(x.ndim)))

    def like(self, x: Tensor) -> Tensor:
        """A value that broadcasts against x, or a parameter that does."""
        fitting = [v for v in self.values if _broadcasts(v.shape, x.shape)]
        if fitting and self.below(2):
            return fitting[-1 - self.below(len(fitting))]
        shape = list(x.shape)[self.below(x.ndim + 1) :]
        return self.parameter([n if self.below(4) else 1 for n in shape])


def _broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    return len(a) <= len(b) and all(n in (1, m) for n, m in zip(reversed(a), reversed(b), strict=False))


def apart(x: Tensor) -> Tensor:
    """x and a pattern: no two elements are equal, and none is zero, but by chance."""
    return x + (torch.arange(x.numel(), dtype=x.dtype) * 1.7 + 0.5).sin().reshape(x.shape) * 0.37


Op = Callable[[Draw], Tensor | None]
SMOOTH: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.tanh, torch.sigmoid, F.gelu, F.silu, F.softplus, torch.sin, torch.cos, torch.erf, F.mish, F.logsigmoid,
    torch.atan, torch.neg, lambda x: x.tanh().exp(), lambda x: (x * x).log1p(), lambda x: (x * x + 0.5).sqrt(),
    lambda x: (x * x + 1).reciprocal(), lambda x: (x * x + 0.5).rsqrt(), lambda x: x.tanh() ** 3, lambda x: x.sinc(),
    lambda x: 1.5 - x, lambda x: x.square().tanh(), torch.asinh, lambda x: x.to(torch.float64).tanh().expm1(),
)  # fmt: skip
KINKED: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.relu, torch.abs, F.leaky_relu, F.elu, F.hardtanh, F.hardswish, F.relu6, F.hardsigmoid, F.selu,
    lambda x: x.clamp(-0.5, 0.7), lambda x: x * (x > 0.1), lambda x: x.where(x > 0, x * 0.2),
    lambda x: F.softshrink(x, 0.1),
    lambda x: x.masked_fill(x < -0.3, 0.25), lambda x: x * x.sign(), lambda x: x - x.detach().floor(), F.celu,
)  # fmt: skip


def one_to_one(d: Draw) -> Tensor | None:
    x = d.value()
    return None if x is None else d.one(*SMOOTH)(x)


def kinked(d: Draw) -> Tensor | None:
    x = d.value()
    return None if x is None else d.one(*KINKED)(apart(x))


def two_to_one(d: Draw) -> Tensor | None:
    x = d.value()
    if x is None:
        return None
    y = d.like(x)
    return d.one(
        lambda: x + y, lambda: x - y, lambda: x.tanh() * y, lambda: x / (1 + y * y), lambda: torch.lerp(x, y, 0.3),
        lambda: torch.atan2(x, 1 + y * y), lambda: torch.maximum(apart(x), y), lambda: torch.minimum(apart(x), y),
        lambda: torch.where(apart(x) > y, x, y), lambda: torch.addcmul(x, x.tanh(), y, value=0.5),
        lambda: torch.addcdiv(x, y, x * x + 1), lambda: torch.hypot(x, y + 2), lambda: torch.add(x, y, alpha=0.3),
        lambda: torch.logaddexp(x, y), lambda: y - x.detach(), lambda: torch.ldexp(x, y.detach() * 0),
    )()  # fmt: skip


# ---- views


def view(d: Draw) -> Tensor | None:
    x = d.value(2)
    if x is None:
        return None
    a, b = sorted(d.chance.sample(range(x.ndim), 2))
    return d.one(
        lambda: x.transpose(a, b), lambda: x.permute(d.chance.sample(range(x.ndim), x.ndim)), lambda: x.movedim(a, b),
        lambda: x.flatten(a, b), lambda: x.unsqueeze(a), lambda: x.unsqueeze(a).expand(*x.shape[:a], 2, *x.shape[a:]),
        lambda: x.flip(a), lambda: x.roll(1, b), lambda: x.mT, lambda: x.reshape(-1), lambda: x.tril(),
        lambda: x.triu(1),
        lambda: x.diagonal(0, a, b), lambda: x.squeeze(), lambda: x.reshape(x.shape[0], -1), lambda: x.contiguous(),
        lambda: x.rot90(1, (a, b)), lambda: x.transpose(a, b).reshape(x.shape), lambda: x.swapaxes(a, b) * 1.0,
    )()  # fmt: skip


def piece(d: Draw) -> Tensor | None:
    x = d.value(1)
    if x is None:
        return None
    dim = d.dim(x)
    n = x.shape[dim]
    start = d.below(n)
    divisor = d.one(*[k for k in range(1, n + 1) if n % k == 0])
    return d.one(
        lambda: x.narrow(dim, start, n - start), lambda: x.select(dim, start), lambda: x.chunk(2, dim)[-1],
        lambda: x.unflatten(dim, (divisor, -1)), lambda: x.unflatten(dim, (-1, divisor)),
        lambda: x.split((start, n - start), dim)[1], lambda: x.unbind(dim)[start], lambda: x.unfold(dim, min(2, n), 1),
        lambda: x[(slice(None),) * dim + (slice(start, None, 2),)], lambda: x[..., None, :],
        lambda: torch.tensor_split(x, 3, dim)[0],
    )()  # fmt: skip


def joined(d: Draw) -> Tensor | None:
    x = d.value(1)
    if x is None:
        return None
    dim = d.dim(x)
    others = [
        v
        for v in d.values
        if v.ndim == x.ndim and (*v.shape[:dim], *v.shape[dim + 1 :]) == (*x.shape[:dim], *x.shape[dim + 1 :])
    ]
    y, same = others[-1 - d.below(len(others))], [v for v in d.values if v.shape == x.shape]
    return d.one(
        lambda: torch.cat([x, y], dim), lambda: torch.cat([y, x, x.tanh()], dim),
        lambda: torch.stack([x, same[0]], dim),
        lambda: F.pad(x, (1, 2)), lambda: F.pad(x, (0, 1), value=0.5), lambda: x.repeat_interleave(2, dim),
        lambda: x.repeat(*(2 if i == dim else 1 for i in range(x.ndim))), lambda: torch.cat([x[:1], x], 0),
        lambda: torch.cat([x, d.parameter(x.shape)], dim), lambda: torch.stack([x, x.sin()], -1).flatten(-2),
    )()  # fmt: skip


# ---- sums, products, norms


def reduced(d: Draw) -> Tensor | None:
    x = d.value(1)
    if x is None:
        return None
    dims, dim, keep = d.dims(x), d.dim(x), bool(d.below(2))
    count = math.prod(x.shape[i] for i in dims)
    return d.one(
        lambda: x.sum(dims, keep) / count**0.5, lambda: x.mean(dims, keep), lambda: x.logsumexp(dims, keep),
        lambda: apart(x).amax(dims, keep), lambda: apart(x).amin(dims, keep), lambda: apart(x).max(dim, keep).values,
        lambda: apart(x).var(dims, keepdim=keep, correction=0), lambda: (apart(x).var(dim, correction=0) + 0.1).sqrt(),
        lambda: apart(x).norm(2, dims, keep), lambda: (x.tanh() + 1.1).prod(dim, keep).tanh(),
        lambda: x.sum() / x.numel(),
        lambda: apart(x).abs().mean(dims, keep), lambda: x.square().mean(dims, keep),
        lambda: apart(x).norm(1, dim) / count,
        lambda: apart(x).median(dim).values, lambda: apart(x).std(dims, correction=0, keepdim=keep),
        lambda: torch.linalg.vector_norm(apart(x), 3, dims, keep),
        lambda: (apart(x) > 0).sum(dim).to(x.dtype) * 0.1 + x.mean(),
    )()  # fmt: skip


def scanned(d: Draw) -> Tensor | None:
    x = d.value(1)
    if x is None:
        return None
    dim = d.dim(x)
    return d.one(
        lambda: x.cumsum(dim) / x.shape[dim], lambda: (x.tanh() * 0.5 + 1).cumprod(dim).tanh(),
        lambda: x.logcumsumexp(dim),
        lambda: apart(x).cummax(dim).values, lambda: x.diff(dim=dim), lambda: apart(x).sort(dim).values,
        lambda: torch.sort(apart(x), dim=dim, descending=True, stable=True).values,
        lambda: apart(x).topk(1 + d.below(x.shape[dim]), dim).values,
    )()  # fmt: skip


def normed(d: Draw) -> Tensor | None:
    x = d.value(2)
    if x is None:
        return None
    width, channels, dim = x.shape[-1], x.shape[1], d.dim(x)
    groups = d.one(*[k for k in range(1, channels + 1) if channels % k == 0])
    p, buffer, several = d.parameter, d.buffer, x.numel() > channels * len(x)  # a norm of one element is noise
    return d.one(
        lambda: F.layer_norm(x, (width,), p((width,)), p((width,)), 0.01),
        lambda: F.layer_norm(x, x.shape[1:], eps=0.01),
        lambda: F.rms_norm(x, (width,), p((width,)), 0.01), lambda: F.normalize(apart(x), dim=dim, eps=0.01),
        lambda: F.batch_norm(x, None, None, p((channels,)), p((channels,)), True, eps=0.01) if several else x,
        lambda: F.batch_norm(x, buffer((channels,)), buffer((channels,)), training=True, eps=0.01) if several else x,
        lambda: F.group_norm(x, groups, p((channels,)), p((channels,)), 0.01) if several else x,
        lambda: F.instance_norm(x, eps=0.01) if x.ndim == 3 and width > 1 else x,
        lambda: (x - x.mean(0)) / (x.var(0, correction=0) + 0.1).sqrt(),
        lambda: x * (x.square().mean(-1, True) + 0.1).rsqrt(),
    )()  # fmt: skip


def softmaxed(d: Draw) -> Tensor | None:
    x = d.value(1)
    if x is None:
        return None
    dim = d.dim(x)
    return d.one(
        lambda: x.softmax(dim), lambda: x.log_softmax(dim) * 0.3, lambda: F.softmin(x, dim),
        lambda: (x * 2).softmax(dim) * x,
        lambda: F.glu(x, dim) if x.shape[dim] % 2 == 0 else x, lambda: (x - x.logsumexp(dim, True)).exp(),
    )()  # fmt: skip


# ---- products of matrices, windows


def multiplied(d: Draw) -> Tensor | None:
    x = d.value(2)
    if x is None:
        return None
    rows, width, to = x.shape[-2], x.shape[-1], d.one(1, 3, 4, 6, 8)
    p = d.parameter
    head = x.flatten(0, -3) if x.ndim > 2 else x.unsqueeze(0)
    return d.one(
        lambda: F.linear(x, p((to, width)), p((to,))), lambda: F.linear(x, p((to, width))), lambda: x @ p((width, to)),
        lambda: p((to, rows)) @ x, lambda: (x @ x.mT).tanh() if x.ndim < 4 else None, lambda: (x.mT @ x).tanh(),
        lambda: torch.einsum("...a,ab->...b", x, p((width, to))),
        lambda: torch.baddbmm(head, head, p((len(head), width, width))),
        lambda: torch.addmm(p((to,)), x, p((width, to))) if x.ndim == 2 else None, lambda: x @ p((width,)),
        lambda: torch.bmm(head, p((len(head), width, to))), lambda: torch.einsum("...ab,cb->...ca", x, p((to, width))),
        lambda: F.linear(F.gelu(F.linear(x, p((to, width)), p((to,)))), p((width, to))),
        lambda: F.bilinear(x, x, p((to, width, width))).tanh(), lambda: torch.outer(x.reshape(-1)[:7], p((to,))),
    )()  # fmt: skip


def attended(d: Draw) -> Tensor | None:
    x = d.value(3, 4)
    if x is None:
        return None
    width = x.shape[-1]
    heads = d.one(*[k for k in (1, 2, 4) if width % k == 0])
    fused = F.linear(x, d.parameter((3 * width, width)))
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(-3, -2) for t in fused.chunk(3, -1))
    found = F.scaled_dot_product_attention(q, k, v, is_causal=bool(d.below(2)))
    return found.transpose(-3, -2).flatten(-2)


def windowed(d: Draw) -> Tensor | None:
    x = d.value(3, 4)
    if x is None or min(x.shape[2:]) < 2:
        return None
    channels, spatial = x.shape[1], x.ndim - 2
    to, groups = d.one(2, 4, 6), d.one(1, *[k for k in (2, 3) if channels % k == 0])
    conv, conv_transpose = (F.conv1d, F.conv_transpose1d) if spatial == 1 else (F.conv2d, F.conv_transpose2d)
    pool, largest = (F.avg_pool1d, F.max_pool1d) if spatial == 1 else (F.avg_pool2d, F.max_pool2d)
    p, window = d.parameter, (2,) * spatial
    return d.one(
        lambda: conv(x, p((to, channels, *window)), p((to,))),
        lambda: conv(x, p((to, channels, *(3,) * spatial)), padding=1),
        lambda: conv(x, p((6 * groups, channels // groups, *window)), groups=groups), lambda: pool(x, 2),
        lambda: conv(x, p((to, channels, *window)), stride=2), lambda: largest(apart(x), 2),
        lambda: conv_transpose(x, p((channels, to, *window)), p((to,)), stride=2),
        lambda: F.interpolate(x, scale_factor=2),
        lambda: F.conv1d(x.flatten(2), p((to, channels, 1))), lambda: pool(x, 2, 1),
    )()  # fmt: skip


# ---- indices


def indexed(d: Draw) -> Tensor | None:
    x, ids = d.value(1), d.ids
    if x is None:
        return None
    dim, width = d.dim(x), d.one(3, 4, 8)
    n = x.shape[dim]
    some = torch.arange(d.one(2, 3, 5)) * 7 % n
    along = (torch.arange(x.numel()) * 5 % n).reshape(x.shape)
    high = apart(x).argmax(dim)
    return d.one(
        lambda: F.embedding(ids, d.parameter((6, width))),
        lambda: F.embedding(ids, d.parameter((8, width)), padding_idx=1),
        lambda: x.index_select(dim, some), lambda: x.gather(dim, along),
        lambda: torch.zeros_like(x).scatter_add(dim, along, x),
        lambda: torch.zeros_like(x).index_add(dim, torch.arange(n) * 3 % n, x),
        lambda: F.one_hot(high, n).to(x.dtype) * x.mean(),
        lambda: x[ids[0] % x.shape[0]], lambda: d.parameter((6, width))[ids],
        lambda: torch.take_along_dim(x, along, dim),
        lambda: x.scatter(dim, along[tuple(slice(1) for _ in x.shape)], 0.5),
        lambda: F.one_hot(ids, 6).to(x.dtype) @ d.parameter((6, width)),
        lambda: x.gather(dim, high.unsqueeze(dim)),
        lambda: x.index_put((torch.arange(x.shape[0]) % 2,), x[:1]) if x.shape[0] > 1 else None,
        lambda: F.embedding(ids % 6, d.parameter((6, width))).mean(1),
    )()  # fmt: skip


# ---- what is changed in place


def in_place(d: Draw) -> Tensor | None:
    x = d.value(1)
    if x is None:
        return None
    new, half, dim = x.clone(), (x.shape[-1] + 1) // 2, d.dim(x)
    d.one(
        lambda: new.add_(x, alpha=0.5), lambda: new.mul_(0.7), lambda: new[0].mul_(0.3), lambda: new[..., :half].sin_(),
        lambda: new.select(dim, 0).copy_(x.select(dim, -1)), lambda: new.masked_fill_(apart(x) > 0.2, 0.1),
        lambda: new.narrow(dim, 0, 1).zero_(), lambda: new.view(-1)[: half].add_(1), lambda: new.mul_(x.tanh()),
        lambda: new.index_fill_(dim, torch.tensor([0]), 0.2), lambda: new.flatten()[0:1].mul_(2),
        lambda: new.sub_(x.mean()),
        lambda: new.index_add_(dim, torch.zeros(1, dtype=torch.int64), x.narrow(dim, 0, 1)),
        lambda: new.transpose(0, -1).mul_(1.1),
    )()  # fmt: skip
    return new


def counted(d: Draw) -> Tensor | None:
    """A running value: a buffer that the step reads and changes."""
    x = d.value(1)
    if x is None:
        return None
    running = d.buffer(x.shape[1:])
    with torch.no_grad():
        d.one(
            lambda: running.lerp_(x.mean(0), 0.3), lambda: running.add_(x[0] * 0.1), lambda: running.copy_(x.amax(0))
        )()
    return x + running.clone()


def dropped(d: Draw) -> Tensor | None:
    x = d.value(1)
    if x is None:
        return None
    return d.one(
        lambda: F.dropout(x, 0.3),
        lambda: x + torch.randn_like(x) * 0.1,
        lambda: x * torch.rand(x.shape[-1], dtype=x.dtype),
    )()


OPS: dict[str, Op] = {
    op.__name__: op
    for op in (
        one_to_one, kinked, two_to_one, view, piece, joined, reduced, scanned, normed, softmaxed, multiplied, attended,
        windowed, indexed, in_place, counted, dropped,
    )
}  # fmt: skip


# ---- what is left at the end


def loss(d: Draw, y: Tensor) -> Tensor:
    """A number out of the last value and some of the others.

    Args:
        d: Chooses.
        y: i64[B] from 0 to 3.
    """
    x = next((v for v in reversed(d.values) if v.numel()), d.values[0])
    flat = x.reshape(-1)
    rows = len(y)
    classes = (
        x.reshape(rows, -1)
        if x.numel() % rows == 0 and x.numel() >= 4 * rows
        else d.values[0].reshape(rows, -1) @ d.parameter((d.values[0][0].numel(), 4))
    )
    target = y.to(x.dtype)[: 1 + d.below(rows)].mean()
    reduction = d.one("mean", "sum")
    main = d.one(
        lambda: F.cross_entropy(classes, y, reduction=reduction),
        lambda: F.cross_entropy(classes, y, label_smoothing=0.1),
        lambda: F.cross_entropy(classes, y, ignore_index=1, reduction="sum"),
        lambda: F.nll_loss(classes.log_softmax(1), y),
        lambda: F.mse_loss(x.tanh(), x.detach().sin()),
        lambda: F.smooth_l1_loss(apart(x), x.detach() * 0, reduction=reduction),
        lambda: F.binary_cross_entropy_with_logits(flat, (flat.detach().sin() + 1) / 2),
        lambda: F.huber_loss(apart(x).mean(), target),
        lambda: F.kl_div(classes.log_softmax(1), classes.detach().softmax(1), reduction="batchmean") + x.mean(),
        lambda: F.cross_entropy(classes, y, weight=torch.linspace(0.5, 1.5, classes.shape[1], dtype=x.dtype)),
        lambda: x.square().mean(), lambda: (x.tanh() * x).sum() / rows, lambda: F.l1_loss(apart(x), x.detach() * 0.5),
        lambda: F.multi_margin_loss(apart(classes), y),
        lambda: F.soft_margin_loss(classes[:, 0], (y > 1).to(x.dtype) * 2 - 1),
    )()  # fmt: skip
    return main + sum((v.tanh().mean() for v in d.values[1:] if v.numel()), start=torch.zeros((), dtype=x.dtype)) * 0.1
