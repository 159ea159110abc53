"""Ops that are recorded as simpler ones, because as they are they cannot be sharded exactly.

A mean over the valid tokens of a sharded batch is a sum, a count and a division; batch statistics are sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import decompositions
from ..errors import CaptureError

aten = torch.ops.aten


# ---- statistics


def var_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Variance and mean by two sums. Source: `torch.var_mean`, divisor max(0, N - correction)."""
    dims = list(range(x.ndim)) if not dim else [d % x.ndim for d in dim]
    count = 1
    for d in dims:
        count *= x.shape[d]
    mean = x.sum(dims, keepdim=True) / count
    divisor = max(0.0, count - (1 if correction is None else correction))
    away = x - mean
    squares = (away * away.conj()).real if x.is_complex() else away.square()
    variance = squares.sum(dims, keepdim=keepdim) / divisor
    return variance, mean if keepdim else mean.reshape(variance.shape)


def var(x: Tensor, dim: Sequence[int] | None = None, **kwargs: Any) -> Tensor:
    """The first of `var_mean`."""
    return var_mean(x, dim, **kwargs)[0]


def std_mean(x: Tensor, dim: Sequence[int] | None = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """As `var_mean`."""
    variance, mean = var_mean(x, dim, **kwargs)
    return variance.sqrt(), mean


def std(x: Tensor, dim: Sequence[int] | None = None, **kwargs: Any) -> Tensor:
    """The root of `var`."""
    return var(x, dim, **kwargs).sqrt()


def dist(x: Tensor, y: Tensor, p: float = 2) -> Tensor:
    """Norm of the difference."""
    return torch.linalg.vector_norm(x - y, p)


def cov(
    x: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """Covariance of the rows. Source: `torch.cov`. The signs of the weights are not checked: that takes their values."""
    rows = x.reshape(1, -1) if x.ndim < 2 else x
    count = rows.shape[1]
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    if weights is None:
        away, divisor = rows - rows.mean(1, keepdim=True), max(count - correction, 0)
        return (away @ (away.mH / divisor)).squeeze()
    total = weights.sum()
    mean = (rows * weights).sum(1, keepdim=True) / total
    excess = (weights * aweights).sum() / total if aweights is not None else 1
    divisor_ = (total - correction * excess).clamp(min=0)
    away = rows - mean
    return (away @ ((away * weights).mH / divisor_)).squeeze()


# ---- what comes as one op, but is an einsum


def trilinear(
    a: Tensor, b: Tensor, c: Tensor, expand1: list[int], expand2: list[int], expand3: list[int], sumdim: list[int],
    unroll_dim: int = 1,
) -> Tensor:  # fmt: skip
    """Product of three tensors, each without some of the dims, summed over others."""
    ndim = a.ndim + len(expand1)
    terms = [[d for d in range(ndim) if d not in gone] for gone in (expand1, expand2, expand3)]
    return torch.einsum(a, terms[0], b, terms[1], c, terms[2], [d for d in range(ndim) if d not in sumdim])


# ---- indices


def combinations(x: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    """Rows of `r` elements of a vector; which they are depends on its length only."""
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    chosen = list(choose(range(x.shape[0]), r))
    index = torch.tensor(chosen, dtype=torch.int64, device=x.device).reshape(-1)
    return x[index].reshape(len(chosen), r)


def embedding_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, scale_grad_by_freq: bool = False, mode: int = 0,
    sparse: bool = False, per_sample_weights: Tensor | None = None, include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Sums (mode 0), means (1) or largest elements (2) of the rows of each bag; then what the backward needs."""
    bags = offsets.shape[0] - include_last_offset
    bag_of = _bags(indices, offsets[:bags])
    valid = torch.ones_like(indices, dtype=torch.bool) if padding_idx < 0 else indices != padding_idx
    sizes = torch.zeros(bags, dtype=indices.dtype, device=weight.device).index_add(0, bag_of, valid.to(indices.dtype))
    rows = weight[indices]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if mode == 2:
        return *_largest(rows, indices, bag_of, valid, sizes), bag_of, sizes
    summed = weight.new_zeros(bags, weight.shape[1]).index_add(0, bag_of, rows * valid.unsqueeze(-1))
    if mode == 1:
        summed = summed / sizes.clamp(min=1).unsqueeze(-1)
    return summed, bag_of, sizes, sizes


def _bags(indices: Tensor, offsets: Tensor) -> Tensor:
    places = torch.arange(indices.shape[0], dtype=offsets.dtype, device=indices.device)
    return torch.searchsorted(offsets, places, right=True) - 1
