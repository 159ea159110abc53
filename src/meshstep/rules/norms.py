"""Normalisation over whole dims; the gradients of weight and bias are sums over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..layout import REPLICATE, shard, shard_dim
from .factors import partials, sharded
from .rule import Entry, OpCall, Rule, Table, placed
from .wide_norms import layer_norm, layer_norm_backward

aten = torch.ops.aten

_NORMALIZED = "ABCDEFGHIJKL"


def _over_last(spec: str, linear: str | tuple = ()) -> Entry:
    """Norms over the last dims: in `spec`, `N` stands for these dims and `1` for as many of size 1."""

    def rules(call: OpCall) -> Iterator[Rule]:
        count = len(call["normalized_shape"])
        whole = spec.replace("N", _NORMALIZED[:count]).replace("1", "1" * count)
        yield from sharded(call, whole)
        yield from partials(call, linear)

    return Entry(rules)


def _and(entry: Entry, more: Callable[[OpCall], Iterator[Rule]]) -> Entry:
    """The rules of an entry and some more."""

    def rules(call: OpCall) -> Iterator[Rule]:
        yield from entry.rules(call)
        yield from more(call)

    return Entry(rules)


def _group_norm(call: OpCall) -> Iterator[Rule]:
    yield from sharded(call, "n...,C,C->n...,nG,nG".replace("...", _inner(call)))
    if call["group"] > 1:
        yield Rule(_channels(call, "input"), (shard(1),) * 3)


def _group_norm_backward(call: OpCall) -> Iterator[Rule]:
    inner = _inner(call)
    yield from sharded(call, f"n{inner},n{inner},nG,nG,C->n{inner},C,C")
    yield from partials(call, "first")
    if call["group"] > 1:
        grads = (placed(o, shard(1 if i == 0 else 0)) for i, o in enumerate(call.outputs))
        yield Rule(_channels(call, "grad_out", "input", "mean", "rstd"), tuple(grads))


def _inner(call: OpCall) -> str:
    return _NORMALIZED[: call.tensors[0].ndim - 1]


def _channels(call: OpCall, *wide: str) -> tuple:
    """Channels sharded: dim 1 of tensors that have a batch, dim 0 of weights and statistics that are not empty."""
    pairs = zip(call.names, call.tensors)
    return tuple(shard(1 if name in wide else 0) if t.numel else REPLICATE for name, t in pairs)


def _local_groups(call: OpCall, rule: Rule, size: int) -> Mapping[str, Any]:
    match shard_dim(rule.inputs[0]):
        case 0:
            return {"N": call["N"] // size}
        case 1:
            return {"C": call["C"] // size, "group": call["group"] // size}
    return {}


# ---- batch norm with statistics that are given


def _batch_norm_eval(call: OpCall) -> Iterator[Rule]:
    """With running statistics every element is on its own; with those of the batch the channels are."""
    training = call.arguments.get("training", False)
    saved = tuple(placed(o, shard(0) if o and o.shape[0] else REPLICATE) for o in call.outputs[1:])
    yield Rule(_channels(call, "input"), (shard(1), *saved))
    if not training:
        for dim in (d for d in range(call.tensors[0].ndim) if d != 1):
            yield Rule(_only_wide(call, dim, "input"), (shard(dim), *call.placed(REPLICATE)[1:]))


def _batch_norm_backward(call: OpCall) -> Iterator[Rule]:
    grads = (placed(call.outputs[0], shard(1)), *call.placed(shard(0))[1:])
    yield Rule(_channels(call, "grad_out", "input"), grads)
    yield from partials(call, "first")


def _only_wide(call: OpCall, dim: int, *wide: str) -> tuple:
    return tuple(shard(dim) if name in wide else REPLICATE for name in call.names)


TABLE: Table = {
    aten.native_layer_norm.default: _and(_over_last("...N,N,N->...N,...1,...1"), layer_norm),
    aten.native_layer_norm_backward.default: _and(
        _over_last("...N,...N,...1,...1,N,N->...N,N,N", "first"), layer_norm_backward
    ),
    aten._fused_rms_norm.default: _over_last("...N,N->...N,...1"),
    aten._fused_rms_norm_backward.default: _over_last("...N,...N,...1,N->...N,N", "first"),
    aten.native_group_norm.default: Entry(_group_norm, _local_groups, permutes=False),
    aten.native_group_norm_backward.default: Entry(_group_norm_backward, _local_groups, permutes=False),
    aten._native_batch_norm_legit_no_training.default: Entry(_batch_norm_eval),
    aten.native_batch_norm.default: Entry(_batch_norm_eval),
    aten.native_batch_norm_backward.default: Entry(_batch_norm_backward),
}
