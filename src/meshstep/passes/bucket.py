"""Sends many small values in few collectives: on most links the number of messages costs more than their bytes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..ir import collectives
from ..ir.program import Program, call, part
from ..ir.types import TensorType
from ..layout import Layout
from .order import sort_nodes

aten = torch.ops.aten
MIB = 2**20


@dataclass(frozen=True, slots=True)
class BucketAllReduces:
    """Join all_reduces of equal op, axis and dtype that do not depend on each other. Exact.

    Args:
        bucket_bytes: A bucket is full at this size; one larger value has a bucket of its own.
    """

    bucket_bytes: int = 25 * MIB

    def __call__(self, program: Program) -> Program:
        """The program with one all_reduce a bucket."""
        buckets = [bucket for bucket in self._buckets(program) if len(bucket) > 1]
        if not buckets:
            return program
        new, copies = program.copy()
        for bucket in buckets:
            _join(new.graph, [copies[node] for node in bucket])
        sort_nodes(new.graph, lambda node, place, inputs: (place,) if place < len(copies) else inputs)
        return new

    def _buckets(self, program: Program) -> list[list[fx.Node]]:
        buckets: dict[Hashable, list[list[fx.Node]]] = {}
        depths = _depths(program)
        for node in program.graph.nodes:
            if node.target is not collectives.all_reduce:
                continue
            type_: TensorType = node.meta["type"]
            key = (node.args[1:], type_.dtype, type_.device, depths[node])
            found = buckets.setdefault(key, [[]])
            if found[-1] and _bytes(found[-1]) + type_.nbytes > self.bucket_bytes:
                found.append([])
            found[-1].append(node)
        return [bucket for found in buckets.values() for bucket in found]


def _bytes(nodes: Sequence[fx.Node]) -> int:
    return sum(node.meta["type"].nbytes for node in nodes)


def _depths(program: Program) -> dict[fx.Node, int]:
    """How many all_reduces lie on the way to each value: two of equal depth cannot depend on each other."""
    depths: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        below = max((depths[n] for n in node.all_input_nodes), default=0)
        depths[node] = below + (node.target is collectives.all_reduce)
    return depths


def _join(graph: fx.Graph, bucket: Sequence[fx.Node]) -> None:
    """One all_reduce of the flattened values in place of one for each."""
    type_: TensorType = bucket[0].meta["type"]
    source = bucket[0].meta["source"]
    sizes = [node.meta["type"].numel for node in bucket]
    layout = Layout()  # a bucket is no tensor of the user's

    def emit(op: object, args: tuple, type: TensorType | tuple[TensorType, ...]) -> fx.Node:
        return call(
            graph,
            op,
            args,
            type=type,
            layout=(layout,) * len(sizes) if isinstance(type, tuple) else layout,
            source=source,
        )

    with graph.inserting_before(next(n for n in graph.nodes if n.op == "output")):
        flat = [
            emit(aten.reshape.default, (node.args[0], [size]), type_.with_shape((size,)))
            for node, size in zip(bucket, sizes, strict=True)
        ]
        joined = emit(aten.cat.default, (flat,), type_.with_shape((sum(sizes),)))
        reduced = emit(collectives.all_reduce, (joined, *bucket[0].args[1:]), joined.meta["type"])
        reduced.meta.update(count=len(bucket), why=f"{bucket[0].meta['why']}; and {len(bucket) - 1} more")
        split = emit(
            aten.split_with_sizes.default,
            (reduced, sizes),
            tuple(type_.with_shape((size,)) for size in sizes),
        )
        for index, node in enumerate(bucket):
            piece = part(graph, split, index)
            shaped = emit(aten.reshape.default, (piece, list(node.meta["type"].shape)), node.meta["type"])
            shaped.meta["layout"] = node.meta["layout"]
            node.replace_all_uses_with(shaped)
            graph.erase_node(node)
