"""Convolution, pooling, resizing, padding: batch and channels, never pixels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from ..layout import PARTIAL, REPLICATE, shard, shard_dim
from .factors import Linear, all_but_last, factor, follow, partials, sharded, together
from .rule import Entry, Local, OpCall, Rule, Table, placed
from .views import output_size

aten = torch.ops.aten


def convolution(call: OpCall) -> Iterator[Rule]:
    """Batch `n`, output channels `o`, and input channels `c`, over which the output is a sum."""
    n, c, o = ("n", "c", "o") if call["groups"] == 1 else ("n", "C", "O")
    for rule in sharded(call, f"{n}{c}X,{_weight(call, c, o)}X,{o}->{n}{o}X".replace("X", _pixels(call))):
        summed = call["bias"] is not None and rule.outputs == (PARTIAL,)
        yield Rule(rule.inputs, rule.outputs, _with_share_of_bias if summed else None)
    if _depthwise(call):
        yield Rule((shard(1), *(shard(0) for _ in call.tensors[1:])), (shard(1),))
    yield from partials(call, (together("input", "bias"), together("weight", "bias")))


def _with_share_of_bias(local: Local) -> tuple[fx.Node, ...]:
    return (local.again(bias=local.emit(aten.div.Tensor, local["bias"], local.size)),)


def convolution_backward(call: OpCall) -> Iterator[Rule]:
    """As the forward; the gradient of the bias has nothing to do with the input's channels."""
    o = "o" if call["groups"] == 1 else "O"
    weight = _weight(call, "C", o)
    spec = f"n{o}X,nCX,{weight}X->nCX,{weight}X,{o}".replace("X", _pixels(call))
    yield from sharded(call, spec)
    grads = zip(call.outputs, (shard(1), shard(_weight(call, "c", "o").index("c")), REPLICATE))
    if call["groups"] == 1:
        yield Rule(_channels_of_input(call), tuple(placed(o, place) for o, place in grads))
    if _depthwise(call):
        after = (placed(o, shard(1 if i == 0 else 0)) for i, o in enumerate(call.outputs))
        yield Rule((shard(1), shard(1), shard(0)), tuple(after))
    yield from partials(call, "first")


def _weight(call: OpCall, c: str, o: str) -> str:
    return c + o if call["transposed"] else o + c


def _pixels(call: OpCall) -> str:
    return "X" * (call["input"].ndim - 2)


def _depthwise(call: OpCall) -> bool:
    """Whether every group has one input channel, so that a shard of channels is a shard of groups."""
    return call["groups"] > 1 and call["groups"] == call["input"].shape[1]


def _channels_of_input(call: OpCall) -> tuple:
    return (REPLICATE, shard(1), shard(_weight(call, "c", "o").index("c")))


def _local_groups(call: OpCall, rule: Rule, size: int) -> Mapping[str, Any]:
    """Channels sharded on all inputs: each rank has some of the groups, and of the bias if there is one."""
    changed: dict[str, Any] = {}
    weight = dict(zip(call.names, rule.inputs))["weight"]
    outputs_split = shard_dim(weight) == _weight(call, "c", "o").index("o") or call["groups"] > 1
    if call["groups"] > 1 and shard_dim(weight) is not None:
        changed["groups"] = call["groups"] // size
    if call.arguments.get("bias_sizes") and shard_dim(weight) is not None and outputs_split:
        changed["bias_sizes"] = [n // size for n in call["bias_sizes"]]
    return changed


# ---- planes of pixels, each on its own


def _planes(pixels: int, linear: Linear = (), size: str | None = None) -> Entry:
    return Entry(follow(all_but_last(pixels), linear), output_size(size) if size else None)


def _resized(name: str, pixels: int) -> Table:
    forward, backward = getattr(aten, name), getattr(aten, f"{name}_backward")
    return {forward.default: _planes(pixels, "all"), backward.default: _planes(pixels, "all", "input_size")}


def _bordered(name: str, pixels: int) -> Table:
    forward, backward = getattr(aten, name), getattr(aten, f"{name}_backward")
    return {forward.default: _planes(pixels, "all"), backward.default: _planes(pixels, "first")}


def _apart_from_channels(call: OpCall) -> list[int | None]:
    return [None if dim == 1 else dim for dim in range(call.tensors[0].ndim)]


_DRAWN_2D, _DRAWN_3D = "...HW,...X->...IJ,...IJ", "...DHW,...X->...IJK,...IJK"

TABLE: Table = {
    aten.convolution.default: Entry(convolution, _local_groups, permutes=False),
    aten.convolution_backward.default: Entry(convolution_backward, _local_groups, permutes=False),
    aten.max_pool2d_with_indices.default: _planes(2),
    aten.max_pool2d_with_indices_backward.default: _planes(2, "first"),
    aten.avg_pool2d.default: _planes(2, "all"),
    aten.avg_pool2d_backward.default: _planes(2, "first"),
    aten._adaptive_avg_pool2d.default: _planes(2, "all"),
    aten._adaptive_avg_pool2d_backward.default: _planes(2, "first"),
    aten.adaptive_max_pool2d.default: _planes(2),
    aten.adaptive_max_pool2d_backward.default: _planes(2, "first"),
    aten.pixel_shuffle.default: _planes(3, "all"),
    aten.pixel_unshuffle.default: _planes(3, "all"),
    aten.im2col.default: _planes(3, "all"),
    aten.col2im.default: _planes(2, "all"),
    aten.max_pool3d_with_indices.default: _planes(3),
    aten.max_pool3d_with_indices_backward.default: _planes(3, "first"),
    aten.avg_pool3d.default: _planes(3, "all"),
    aten.avg_pool3d_backward.default: _planes(3, "first"),
    aten._adaptive_avg_pool3d.default: _planes(3, "all"),
    aten._adaptive_avg_pool3d_backward.default: _planes(3, "first"),
    aten.adaptive_max_pool3d.default: _planes(3),
    aten.adaptive_max_pool3d_backward.default: _planes(3, "first"),
    aten.max_unpool2d.default: _planes(2, "first"),
    aten.max_unpool3d.default: _planes(3, "first"),
    aten.fractional_max_pool2d.default: Entry(factor(_DRAWN_2D)),
    aten.fractional_max_pool2d_backward.default: _planes(2, "first"),
    aten.fractional_max_pool3d.default: Entry(factor(_DRAWN_3D)),
    aten.fractional_max_pool3d_backward.default: _planes(3, "first"),
    aten.channel_shuffle.default: Entry(follow(_apart_from_channels, "all")),
    aten.native_channel_shuffle.default: Entry(follow(_apart_from_channels, "all")),
    aten.grid_sampler_3d.default: Entry(factor("ncDHW,nXYZK->ncXYZ", "first")),
    aten.grid_sampler_3d_backward.default: Entry(factor("ncXYZ,ncDHW,nXYZK->ncDHW,nXYZK", "first")),
    aten.grid_sampler_2d.default: Entry(factor("ncHW,nXYZ->ncXY", "first")),
    aten.grid_sampler_2d_backward.default: Entry(factor("ncXY,ncHW,nXYZ->ncHW,nXYZ", "first")),
    **_resized("upsample_nearest1d", 1),
    **_resized("upsample_nearest2d", 2),
    **_resized("_upsample_nearest_exact2d", 2),
    **_resized("_upsample_nearest_exact1d", 1),
    **_resized("_upsample_nearest_exact3d", 3),
    **_resized("_upsample_bilinear2d_aa", 2),
    **_resized("_upsample_bicubic2d_aa", 2),
    **_resized("upsample_linear1d", 1),
    **_resized("upsample_bilinear2d", 2),
    **_resized("upsample_bicubic2d", 2),
    **_resized("upsample_nearest3d", 3),
    **_resized("upsample_trilinear3d", 3),
    **_bordered("replication_pad1d", 1),
    **_bordered("replication_pad3d", 3),
    **_bordered("reflection_pad1d", 1),
    **_bordered("reflection_pad2d", 2),
    **_bordered("reflection_pad3d", 3),
    **_bordered("replication_pad2d", 2),
}
