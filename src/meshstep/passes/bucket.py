"""Sends many small values in few collectives: on most links the number of messages costs more than their bytes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..ir import collectives
from ..ir.program import Program, call, part
from ..ir.types import TensorType
from ..layout import Layout
from .order import ordered, reorder

aten = torch.ops.aten
MIB = 2**20


@dataclass(slots=True)
class _Bucket:
    nodes: list[fx.Node] = field(default_factory=list)
    bytes: int = 0

    def add(self, node: fx.Node) -> None:
        self.nodes.append(node)
        self.bytes += node.meta["type"].nbytes


@dataclass(frozen=True, slots=True)
class BucketAllReduces:
    """Join all_reduces of equal op, axis and dtype that do not depend on each other. Exact.

    Args:
        bucket_bytes: A bucket is full at this size; one larger value has a bucket of its own.
    """

    bucket_bytes: int = 25 * MIB

    def __call__(self, program: Program) -> Program:
        """The program with one all_reduce a bucket."""
        found = program
        while buckets := self._buckets(found):  # joining may bring what was apart into reach: rarely, but then again
            found = _joined(found, buckets)
        return found

    def _buckets(self, program: Program) -> list[list[fx.Node]]:
        """The all_reduces to join, at least two a bucket: a bucket takes what follows until it is full."""
        buckets: dict[Hashable, list[_Bucket]] = {}
        depths = _depths(program)
        for node in program.graph.nodes:
            if node.target is not collectives.all_reduce:
                continue
            type_: TensorType = node.meta["type"]
            found = buckets.setdefault((node.args[1:], type_.dtype, type_.device, depths[node]), [])
            if not found or found[-1].bytes + type_.nbytes > self.bucket_bytes:
                found.append(_Bucket())
            found[-1].add(node)
        return [bucket.nodes for found in buckets.values() for bucket in found if len(bucket.nodes) > 1]


def _depths(program: Program) -> dict[fx.Node, int]:
    """How many all_reduces lie on the way to each value: two of equal depth cannot depend on each other."""
    depths: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        below = max((depths[n] for n in node.all_input_nodes), default=0)
        depths[node] = below + (node.target is collectives.all_reduce)
    return depths


def _joined(program: Program, buckets: Sequence[Sequence[fx.Node]]) -> Program:
    new, copies = program.copy()
    for bucket in buckets:
        _join(new.graph, [copies[node] for node in bucket])
    reorder(new.graph, ordered(new.graph, lambda node, place, inputs: (place,)))
    return new


def _join(graph: fx.Graph, bucket: Sequence[fx.Node]) -> None:
    """One all_reduce of the flattened values, where the last of them is reduced; users of the others may stand before.

    A bucket is no tensor of the user's, so its layout says nothing.
    """
    type_: TensorType = bucket[0].meta["type"]
    source = bucket[0].meta["source"]
    sizes = [node.meta["type"].numel for node in bucket]

    def emit(op: Any, args: tuple, type: Any, layout: Any = None) -> fx.Node:
        return call(graph, op, args, type=type, layout=layout, source=source)

    def shaped(value: fx.Node, shape: tuple[int, ...], layout: Layout | None = None) -> fx.Node:
        if value.meta["type"].shape == shape:
            return value
        return emit(aten.reshape.default, (value, list(shape)), type_.with_shape(shape), layout)

    with graph.inserting_before(bucket[-1]):
        flat = [shaped(node.args[0], (size,)) for node, size in zip(bucket, sizes, strict=True)]  # type: ignore[arg-type]
        joined = emit(aten.cat.default, (flat,), type_.with_shape((sum(sizes),)))
        reduced = emit(collectives.all_reduce, (joined, *bucket[0].args[1:]), joined.meta["type"])
        count = sum(node.meta.get("count", 1) for node in bucket)
        reduced.meta.update(count=count, why=f"{bucket[0].meta['why']}; and {count - 1} more")
        pieces = tuple(type_.with_shape((size,)) for size in sizes)
        layouts = tuple(n.meta["layout"] if n.meta["type"].ndim == 1 else Layout() for n in bucket)
        split = emit(aten.split_with_sizes.default, (reduced, sizes), pieces, layouts)
        for index, node in enumerate(bucket):
            value = shaped(part(graph, split, index), node.meta["type"].shape, node.meta["layout"])
            node.replace_all_uses_with(value)
    for node in bucket:
        graph.erase_node(node)
