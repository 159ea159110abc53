"""Ops that are recorded as simpler ones, because as they are they cannot be sharded exactly.

A mean over the valid tokens of a sharded batch is a sum, a count and a division; batch statistics are sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._torch import decompositions
from ..errors import CaptureError
from .grad_scaler import KERNELS

aten = torch.ops.aten


# ---- statistics


def var_mean(x: Tensor, dim: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    """Of complex numbers, by real and imaginary parts. Source: `torch.var_mean`."""
    if not x.is_complex():
        return NotImplemented
    parts = [torch.var_mean(part, dim, correction=correction, keepdim=keepdim) for part in (x.real, x.imag)]
    (variance, mean), (other, imaginary) = parts
    return variance + other, torch.complex(mean, imaginary)


def native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Dropout and its mask; what is kept is decided in float32 or float64, whatever the dtype of `x`."""
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = torch.empty_like(x).bernoulli_(1 - p).bool()
    return x * mask / (1 - p) if p < 1 else x * 0, mask


def var(x: Tensor, dim: list[int] | None = None, **kwargs: Any) -> Tensor:
    """The first of `var_mean`."""
    return torch.var_mean(x, dim, **kwargs)[0]


def std_mean(x: Tensor, dim: list[int] | None = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """As `var_mean`."""
    variance, mean = torch.var_mean(x, dim, **kwargs)
    return variance.sqrt(), mean


def std(x: Tensor, dim: list[int] | None = None, **kwargs: Any) -> Tensor:
    """The root of `var`."""
    return var(x, dim, **kwargs).sqrt()


def dist(x: Tensor, y: Tensor, p: float = 2) -> Tensor:
    """Norm of the difference."""
    return torch.linalg.vector_norm(x - y, p)


# ---- what comes as one op, but is an einsum


def trilinear(
    a: Tensor, b: Tensor, c: Tensor, expand1: list[int], expand2: list[int], expand3: list[int], sumdim: list[int],
    unroll_dim: int = 1,
) -> Tensor:  # fmt: skip
    """Product of three tensors, each without some of the dims, summed over others."""
    ndim = a.ndim + len(expand1)
    terms = [[d for d in range(ndim) if d not in gone] for gone in (expand1, expand2, expand3)]
    return torch.einsum(a, terms[0], b, terms[1], c, terms[2], [d for d in range(ndim) if d not in sumdim])


# ---- elements in a row


def take(x: Tensor, index: Tensor) -> Tensor:
    """Elements of `x` as one row."""
    return aten.index.Tensor(x.reshape(-1), [index])


def put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """`x` as one row of elements, written to at some of them."""
    row = aten.index_put.default(x.reshape(-1), [index.reshape(-1)], source.reshape(-1), accumulate)
    return row.reshape(x.shape)


# ---- random slopes


def rrelu_with_noise(
    x: Tensor, noise: Tensor, lower: float = 0.125, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Tensor:
    """A random slope for each negative element; it is kept for the backward."""
    if not training:
        return torch.where(x <= 0, x * ((lower + upper) / 2), x)
    slope = torch.rand_like(x) * (upper - lower) + lower
    noise.copy_(torch.where(x <= 0, slope, 1))
    return torch.where(x <= 0, x * slope, x)


# ---- bags of embeddings

_SUM, _MEAN, _MAX = 0, 1, 2


def embedding_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, scale_grad_by_freq: bool = False, mode: int = _SUM,
    sparse: bool = False, per_sample_weights: Tensor | None = None, include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:  # fmt: skip
    """Sums or means of the rows of each bag, and what the backward needs; the largest of them stay one op."""
    if mode == _MAX:
        return NotImplemented
    bags = offsets.shape[0] - include_last_offset
    places = torch.arange(indices.shape[0], dtype=offsets.dtype, device=indices.device)
    bag_of = torch.searchsorted(offsets[:bags], places, right=True) - 1
    rows, valid = weight[indices], _valid(indices, padding_idx)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if valid is not None:
        rows = rows.masked_fill(~valid.unsqueeze(-1), 0)
    counted = torch.ones_like(indices) if valid is None else valid.to(indices.dtype)
    sizes = torch.zeros(bags, dtype=indices.dtype, device=indices.device).index_add(0, bag_of, counted)
    summed = weight.new_zeros(bags, weight.shape[1]).index_add(0, bag_of, rows)
    output = summed / sizes.clamp(min=1).unsqueeze(-1) if mode == _MEAN else summed
    return output, bag_of, sizes, sizes


def embedding_bag_dense_backward(
    grad: Tensor, indices: Tensor, offset2bag: Tensor, bag_size: Tensor, maximum_indices: Tensor, num_weights: int,
    scale_grad_by_freq: bool, mode: int, per_sample_weights: Tensor | None, padding_idx: int = -1,
) -> Any:  # fmt: skip
    """Every row of a bag gets the gradient of its bag."""
    if mode == _MAX:
        return NotImplemented
    rows = grad / bag_size.clamp(min=1).unsqueeze(-1) if mode == _MEAN else grad
    rows = rows[offset2bag]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    return aten.embedding_dense_backward(rows, indices, num_weights, padding_idx, scale_grad_by_freq)


def embedding_bag_backward(
    grad: Tensor, indices: Tensor, offsets: Tensor, offset2bag: Tensor, bag_size: Tensor, maximum_indices: Tensor,
    num_weights: int, scale_grad_by_freq: bool, mode: int, sparse: bool, per_sample_weights: Tensor | None,
    padding_idx: int = -1,
) -> Any:  # fmt: skip
    """The dense gradient."""
    if sparse:
        raise _sparse()
    return aten._embedding_bag_dense_backward(
        grad, indices, offset2bag, bag_size, maximum_indices, num_weights, scale_grad_by_freq, mode,
        per_sample_weights, padding_idx,
    )  # fmt: skip


def embedding_bag_weights_backward(
    grad: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, offset2bag: Tensor, mode: int, padding_idx: int = -1
) -> Tensor:
    """How much each row adds to its bag."""
    found = (grad[offset2bag] * weight[indices]).sum(-1)
    valid = _valid(indices, padding_idx)
    return found if valid is None else found.masked_fill(~valid, 0)


def _valid(indices: Tensor, padding_idx: int) -> Tensor | None:
    return None if padding_idx < 0 else indices != padding_idx


# ---- what is refused, or left out


def _sparse(*_: Any, **__: Any) -> CaptureError:
    return CaptureError("a sparse tensor", hint="sparse=False, or a dense tensor with a mask")


def _refuse_sparse(*_: Any, **__: Any) -> Tensor:
    raise _sparse()


def _unchecked(*_: Any, **__: Any) -> None:
    """A check of values that raises: there is nothing to compute."""


def _overloads(*names: str) -> list[Any]:
    packets = [getattr(aten, name) for name in names]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


_SPARSE = _overloads(
    "_to_sparse",
    "_to_sparse_bsc",
    "_to_sparse_bsr",
    "_to_sparse_csc",
    "_to_sparse_csr",
    "_sparse_coo_tensor_unsafe",
    "_sparse_coo_tensor_with_dims",
    "_sparse_coo_tensor_with_dims_and_tensors",
    "_sparse_mm_reduce_impl",
    "sparse_sampled_addmm",
)

_BY_TORCH = (
    aten.nll_loss_forward,
    aten.nll_loss_backward,
    aten.nll_loss2d_forward,
    aten.nll_loss2d_backward,
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._batch_norm_with_update,
    aten._batch_norm_with_update_functional,
    aten._batch_norm_no_update,
    aten.batch_norm_backward,
    aten.native_batch_norm_backward,
    aten.cudnn_batch_norm,
    aten.cudnn_batch_norm_backward,
    aten.native_dropout,
    aten.native_dropout_backward,
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.soft_margin_loss,
    aten.soft_margin_loss_backward,
    aten.rrelu_with_noise_backward,
    aten._unsafe_masked_index,
    aten._unsafe_masked_index_put_accumulate,
    aten.trace,
)
DECOMPOSITIONS: dict[Any, Callable] = {
    **KERNELS,
    **decompositions(_BY_TORCH),
    **dict.fromkeys(_SPARSE, _refuse_sparse),
    aten.var_mean.correction: var_mean,
    aten.var.correction: var,
    aten.native_dropout.default: native_dropout,
    aten.std_mean.correction: std_mean,
    aten.std.correction: std,
    aten.dist.default: dist,
    aten.take.default: take,
    aten.rrelu_with_noise.default: rrelu_with_noise,
    aten.put.default: put,
    aten._trilinear.default: trilinear,
    aten._embedding_bag.default: embedding_bag,
    aten._embedding_bag_forward_only.default: embedding_bag,
    aten._embedding_bag_backward.default: embedding_bag_backward,
    aten._embedding_bag_dense_backward.default: embedding_bag_dense_backward,
    aten._embedding_bag_per_sample_weights_backward.default: embedding_bag_weights_backward,
    aten._linalg_check_errors.default: _unchecked,
}
