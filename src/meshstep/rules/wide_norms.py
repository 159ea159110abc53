"""Layer norm over a dim that is sharded: its mean and its variance are sums over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import fx

from ..layout import REPLICATE, shard
from .rule import Local, OpCall, Rule, placed
from .softmax import cast, over_all, wide

aten = torch.ops.aten


def layer_norm(call: OpCall) -> Iterator[Rule]:
    """Any normalised dim, with the weights that go with it."""
    for dim, inputs in _normalized(call, "input"):
        yield Rule(inputs, (shard(dim), REPLICATE, REPLICATE), _layer_norm)


def layer_norm_backward(call: OpCall) -> Iterator[Rule]:
    """Likewise; each rank has the gradients of its own weights."""
    count = len(call["normalized_shape"])
    for dim, inputs in _normalized(call, "grad_out", "input"):
        own = shard(dim - (call["input"].ndim - count))
        grads = (placed(o, shard(dim) if i == 0 else own) for i, o in enumerate(call.outputs))
        if all(call.outputs):
            yield Rule(inputs, tuple(grads), _layer_norm_backward)


def _normalized(call: OpCall, *wide_names: str) -> Iterator[tuple[int, tuple]]:
    ndim, count = call["input"].ndim, len(call["normalized_shape"])
    for dim in range(ndim - count, ndim):
        own = {"weight": shard(dim - (ndim - count)), "bias": shard(dim - (ndim - count))}
        own |= dict.fromkeys(wide_names, shard(dim))
        yield dim, tuple(own.get(name, REPLICATE) for name in call.names)


def _dims(local: Local) -> list[int]:
    ndim = local.call["input"].ndim
    return list(range(ndim - len(local["normalized_shape"]), ndim))


def _mean(local: Local, x: fx.Node) -> fx.Node:
    """The mean over the normalised dims of the whole."""
    total = over_all(local, local.emit(aten.sum.dim_IntList, x, _dims(local), True))
    return local.emit(aten.div.Tensor, total, prod(local["normalized_shape"]))


def _layer_norm(local: Local) -> tuple[fx.Node, ...]:
    x = wide(local, local["input"])
    mean = _mean(local, x)
    away = local.emit(aten.sub.Tensor, x, mean)
    variance = _mean(local, local.emit(aten.mul.Tensor, away, away))
    rstd = local.emit(aten.rsqrt.default, local.emit(aten.add.Tensor, variance, local["eps"]))
    y = local.emit(aten.mul.Tensor, away, rstd)
    if local.call["weight"] is not None:
        y = local.emit(aten.mul.Tensor, y, local["weight"])
    if local.call["bias"] is not None:
        y = local.emit(aten.add.Tensor, y, local["bias"])
    kinds = [o.dtype for o in local.call.outputs if o]
    y, mean, rstd = (cast(local, value, dtype) for value, dtype in zip((y, mean, rstd), kinds, strict=True))
    return y, mean, rstd


def _layer_norm_backward(local: Local) -> tuple[fx.Node, ...]:
    grad, x = wide(local, local["grad_out"]), wide(local, local["input"])
    rstd = local["rstd"]
    y = local.emit(aten.mul.Tensor, local.emit(aten.sub.Tensor, x, local["mean"]), rstd)
    scaled = grad if local.call["weight"] is None else local.emit(aten.mul.Tensor, grad, local["weight"])
    product = local.emit(aten.mul.Tensor, grad, y)
    found = (_of_input(local, scaled, y, rstd), _of_weight(local, product), _of_weight(local, grad))
    kinds = [o.dtype for o in local.call.outputs if o]
    return tuple(cast(local, value, dtype) for value, dtype in zip(found, kinds, strict=True))


def _of_input(local: Local, scaled: fx.Node, y: fx.Node, rstd: fx.Node) -> fx.Node:
    """Source: Ba, Kiros & Hinton 2016, "Layer Normalization", differentiated."""
    along = local.emit(aten.mul.Tensor, y, _mean(local, local.emit(aten.mul.Tensor, scaled, y)))
    rest = local.emit(aten.sub.Tensor, local.emit(aten.sub.Tensor, scaled, _mean(local, scaled)), along)
    return local.emit(aten.mul.Tensor, rest, rstd)


def _of_weight(local: Local, value: fx.Node) -> fx.Node:
    batch = list(range(_dims(local)[0]))
    return local.emit(aten.sum.dim_IntList, value, batch) if batch else value
