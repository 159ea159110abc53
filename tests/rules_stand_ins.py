"""The mathematics of ops that have no CPU kernel, with their arguments and outputs, and samples of them.

What the op computes from saved tensors is computed from them here too, so that a rule which misplaces those is found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from rules_samples import Call, Draw, call
from torch import Tensor
from torch._decomp import decomposition_table

aten = torch.ops.aten

SEED, EMPTY = torch.zeros(2, dtype=torch.int64), torch.zeros(0, dtype=torch.float64)


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    scores = query @ _for_each_head(key, query).mT * _scale(query, scale)
    if bias is not None:
        scores = scores + bias
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).tril().logical_not(), -torch.inf)
    return scores


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else scale


def _for_each_head(key: Tensor, query: Tensor) -> Tensor:
    """Grouped-query attention: each head of keys serves as many consecutive heads of queries."""
    return key.repeat_interleave(query.shape[1] // key.shape[1], 1)


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Any, is_causal: bool, scale: Any) -> tuple[Tensor, Tensor]:
    """Output f64[B, H, S, E] and the logarithm of the normaliser, f64[B, H, S]."""
    scores = _scores(query, key, bias, is_causal, scale)
    return scores.softmax(-1) @ _for_each_head(value, query), scores.logsumexp(-1)


def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, bias. Source: Dao et al. 2022, "FlashAttention", algorithm 4."""
    p = (_scores(query, key, bias, is_causal, scale) - lse[..., None]).exp()
    grad_p = grad @ _for_each_head(value, query).mT
    grad_s = p * (grad_p - (grad * out).sum(-1, keepdim=True))
    grad_k = grad_s.mT @ query * _scale(query, scale)
    return (
        grad_s @ _for_each_head(key, query) * _scale(query, scale),
        grad_k.unflatten(1, (key.shape[1], -1)).sum(2),
        (p.mT @ grad).unflatten(1, (key.shape[1], -1)).sum(2),
        None if bias is None else grad_s.sum_to_size(bias.shape),
    )


def flash(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: Any, **_: Any) -> tuple:
    out, lse = attend(query, key, value, None, is_causal, scale)
    return out, lse, None, None, 5, 7, SEED, SEED[0], EMPTY


def efficient(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Any, is_causal: bool, scale: Any, **_: Any
) -> tuple:
    return *attend(query, key, value, attn_bias, is_causal, scale), SEED[0], SEED[1]


def cudnn(query: Tensor, key: Tensor, value: Tensor, attn_bias: Any, is_causal: bool, scale: Any, **_: Any) -> tuple:
    out, lse = attend(query, key, value, attn_bias, is_causal, scale)
    return out, lse[..., None], None, None, 5, 7, SEED[0], SEED[1], None


def fused_backward(outputs: int, **given: Any) -> tuple:
    """Any of the three: they differ in names, in the shape of `logsumexp`, and in the gradient of the mask."""
    lse = given["logsumexp"]
    return attend_backward(
        given["grad_out_"] if "grad_out_" in given else given["grad_out"],
        given["query"],
        given["key"],
        given["value"],
        given["out"],
        lse[..., 0] if lse.ndim == 4 else lse,
        given.get("attn_bias"),
        given["is_causal"],
        given["scale"],
    )[:outputs]


def _in_dtype(op: Any) -> Callable[..., Tensor]:
    return lambda out_dtype, **given: op(**given).to(out_dtype)


STAND_INS: dict[Any, Callable[..., Any]] = {
    aten.mm.dtype: _in_dtype(aten.mm.default),
    aten.bmm.dtype: _in_dtype(aten.bmm.default),
    aten.addmm.dtype: _in_dtype(aten.addmm.default),
    aten._fused_rms_norm_backward.default: decomposition_table[aten._fused_rms_norm_backward.default],
    aten._scaled_dot_product_flash_attention.default: flash,
    aten._scaled_dot_product_flash_attention_backward.default: functools.partial(fused_backward, 3),
    aten._scaled_dot_product_efficient_attention.default: efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: functools.partial(fused_backward, 4),
    aten._scaled_dot_product_cudnn_attention.default: cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: functools.partial(fused_backward, 3),
}


def stand_in_samples() -> dict[Any, list[Call]]:
    """Calls of the ops of `STAND_INS`."""
    d = Draw(1)
    a, b = d(12, 24), d(24, 4)
    q, k, v = d(12, 24, 5, 4), d(12, 24, 7, 4), d(12, 24, 7, 3)
    grouped, single = (d(12, 12, 7, 4), d(12, 12, 7, 3)), (d(12, 1, 7, 4), d(12, 1, 7, 3))
    masks = (None, d(12, 24, 5, 7), d(1, 24, 5, 7), d(12, 1, 5, 7))
    plain = [(q, k, v), (q, *grouped), (q, *single)]
    return {
        aten.mm.dtype: [call(a, b, torch.float32)],
        aten.bmm.dtype: [call(d(12, 4, 24), d(12, 24, 12), torch.float32)],
        aten.addmm.dtype: [call(d(4), a, b, torch.float32), call(d(12, 4), a, b, torch.float32, beta=2)],
        aten._fused_rms_norm_backward.default: _rms_norm_backward(d),
        aten._scaled_dot_product_flash_attention.default: [call(*p, 0.0, c) for p in plain for c in (False, True)],
        aten._scaled_dot_product_flash_attention_backward.default: [_flash_backward(d, *p) for p in plain],
        aten._scaled_dot_product_efficient_attention.default: [call(q, k, v, m, True) for m in masks],
        aten._scaled_dot_product_efficient_attention_backward.default: [
            _efficient_backward(d, q, k, v, m) for m in masks
        ],
        aten._scaled_dot_product_cudnn_attention.default: [call(q, k, v, m, True, scale=0.3) for m in masks],
        aten._scaled_dot_product_cudnn_attention_backward.default: [_cudnn_backward(d, q, k, v, m) for m in masks],
    }  # fmt: skip


def _rms_norm_backward(d: Draw) -> list[Call]:
    x, w, wide = d(12, 3, 24, 4), d(4), d(24, 4)
    rstd, rstd_wide = (aten._fused_rms_norm(x, shape, None, 1e-6)[1] for shape in ([4], [24, 4]))
    return [
        call(d(*x.shape), x, [4], rstd, w, [True, True]),
        call(d(*x.shape), x, [24, 4], rstd_wide, wide, [True, True]),
        call(d(*x.shape), x, [4], rstd, None, [True, False]),
    ]


def _flash_backward(d: Draw, q: Tensor, k: Tensor, v: Tensor) -> Call:
    out, lse = attend(q, k, v, None, False, None)
    return call(d(*out.shape), q, k, v, out, lse, None, None, 5, 7, 0.0, False, SEED, SEED[0])


def _efficient_backward(d: Draw, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Call:
    out, lse = attend(q, k, v, bias, False, None)
    return call(d(*out.shape), q, k, v, bias, out, lse, SEED[0], SEED[1], 0.0, [True, True, True, bias is not None])


def _cudnn_backward(d: Draw, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Call:
    out, lse = attend(q, k, v, bias, False, None)
    return call(d(*out.shape), q, k, v, out, lse[..., None], SEED[0], SEED[1], bias, None, None, 5, 7, 0.0, False)
