"""Sends many small values in few collectives: on most links the number of messages costs more than their bytes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..ir import collectives
from ..ir.program import Program, call, is_part, part, producer
from ..ir.types import TensorType
from ..layout import Layout
from ..mesh import Mesh
from ..plan.cost import usual
from .order import ordered, reorder

aten = torch.ops.aten


@dataclass(slots=True)
class _Bucket:
    nodes: list[fx.Node] = field(default_factory=list)
    bytes: int = 0

    def add(self, node: fx.Node) -> None:
        self.nodes.append(node)
        self.bytes += _size(node)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Join collectives of equal kind, axis and dtype that do not depend on each other. Exact.

    Args:
        bucket_bytes: A bucket is full when so much of whole values is in it; one larger value has a bucket of its own.
            None is what a link carries in ten times the latency of a collective: a tenth of the time is lost to it.
        shard_bytes: Likewise for gathers of stored parameters, which hold all of a bucket from the first use of one,
            and for scatters of gradients, which hold all of one until the last is there. None is as `bucket_bytes`.
    """

    bucket_bytes: int | None = None
    shard_bytes: int | None = None

    def __call__(self, program: Program) -> Program:
        """The program with one collective a bucket."""
        kinds = dict.fromkeys(_kind(node) for node in program.graph.nodes if node.target in _FORMS)
        found = program
        for kind in kinds:  # one after another: of two kinds at once, each might have to wait for the other
            while buckets := self._buckets(found, kind):  # joining may bring what was apart into reach: rarely
                if found is program:
                    found, copies = program.copy()
                    buckets = [[copies[node] for node in bucket] for bucket in buckets]
                _join(found.graph, buckets)
        return found

    def _buckets(self, program: Program, kind: Hashable) -> list[list[fx.Node]]:
        """The collectives to join, at least two a bucket: a bucket takes what follows until it is full."""
        buckets: dict[Hashable, list[_Bucket]] = {}
        depths = _depths(program, kind)
        for node in program.graph.nodes:
            if node.target not in _FORMS or _kind(node) != kind:
                continue
            found, full = buckets.setdefault(depths[node], []), self._full(node, program.mesh)
            if not found or found[-1].bytes + _size(node) > full:
                found.append(_Bucket())
            found[-1].add(node)
        return [bucket.nodes for found in buckets.values() for bucket in found if len(bucket.nodes) > 1]

    def _full(self, node: fx.Node, mesh: Mesh) -> int:
        """The size of a bucket that a collective goes into."""
        in_shards = node.meta.get("regather") or node.target is collectives.reduce_scatter
        given = self.shard_bytes if in_shards and self.shard_bytes is not None else self.bucket_bytes
        if given is not None:
            return given
        return usual(node.meta["type"].device).message_bytes(mesh[collectives.axis_of(node.target, node.args)])


def _kind(node: fx.Node) -> tuple[Hashable, ...]:
    """What the members of a bucket have in common; the dim is each one's own."""
    type_: TensorType = node.meta["type"]
    rest = node.args[1:] if node.target is collectives.all_reduce else _without_dim(node)
    pass_ = (bool(node.meta.get("backward")), node.meta.get("again")) if node.meta.get("regather") else None
    return node.target, rest, type_.dtype, type_.device, pass_


def _without_dim(node: fx.Node) -> tuple[Any, ...]:
    return node.args[2:]


def _size(node: fx.Node) -> int:
    """Bytes of the whole value."""
    sent: Any = node.args[0]
    return max(node.meta["type"].nbytes, sent.meta["type"].nbytes)


def _depths(program: Program, kind: Hashable) -> dict[fx.Node, int]:
    """How many collectives of a kind lie on the way to each value: two of equal depth cannot depend on each other.

    Those that no other one waits for count as the deepest: nothing is held up by what rides along with the last.
    """
    depths: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        below = max((depths[n] for n in node.all_input_nodes), default=0)
        depths[node] = below + (node.target in _FORMS and _kind(node) == kind)
    deepest, awaited = max(depths.values(), default=0), set[fx.Node]()
    for node in reversed(program.graph.nodes):
        is_one = node.target in _FORMS and _kind(node) == kind
        if is_one and node not in awaited:
            depths[node] = deepest
        if is_one or node in awaited:
            awaited.update(node.all_input_nodes)
    return depths


def _join(graph: fx.Graph, buckets: Sequence[Sequence[fx.Node]]) -> None:
    for bucket in buckets:
        _Join(graph, bucket).run()
    reorder(graph, ordered(graph, lambda node, place, inputs: (place,)))


class _Join:
    """One collective for a bucket, where the last member is sent; users of the others may stand before it.

    Stored parameters are gathered where the first of them is needed. A bucket is no tensor of the user's, so its layout
    says nothing.
    """

    def __init__(self, graph: fx.Graph, bucket: Sequence[fx.Node]) -> None:
        self.graph, self.bucket, self.first = graph, bucket, bucket[0]
        self.type: TensorType = bucket[0].meta["type"]

    def run(self) -> None:
        early = self.first.meta.get("regather")
        with self.graph.inserting_before(self.bucket[0] if early else self.bucket[-1]):
            for node, value in zip(self.bucket, _FORMS[self.first.target](self), strict=True):
                node.replace_all_uses_with(value)
        for node in self.bucket:
            self.graph.erase_node(node)

    def emit(self, op: Any, args: tuple, type: Any, layout: Any = None) -> fx.Node:
        new = call(self.graph, op, args, type=type, layout=layout, source=self.first.meta["source"])
        new.meta.update({key: self.first.meta[key] for key in ("module", "backward") if key in self.first.meta})
        return new

    def shaped(self, value: fx.Node, shape: Sequence[int], layout: Layout | None = None) -> fx.Node:
        """A value in another shape, if it has another."""
        if value.meta["type"].shape == tuple(shape):
            return value
        return self.emit(aten.reshape.default, (value, list(shape)), self.type.with_shape(tuple(shape)), layout)

    def moved(self, value: fx.Node, order: Sequence[int]) -> fx.Node:
        """A value with its dims in another order."""
        if list(order) == sorted(order):
            return value
        shape = value.meta["type"].shape
        type_ = self.type.with_shape(tuple(shape[d] for d in order))
        return self.emit(aten.permute.default, (value, list(order)), type_)

    def send(self, op: Any, values: Sequence[fx.Node], dim: int, args: tuple) -> fx.Node:
        """The values joined along `dim`, and sent."""
        shape = list(values[0].meta["type"].shape)
        shape[dim] = sum(value.meta["type"].shape[dim] for value in values)
        joined = self.emit(aten.cat.default, (list(values), dim), self.type.with_shape(tuple(shape)))
        sent = self.emit(op, (joined, *args), joined.meta["type"])
        count = sum(node.meta.get("count", 1) for node in self.bucket)
        causes = tuple(cause for node in self.bucket for cause in node.meta.get("causes", ()))
        sent.meta.update(count=count, causes=causes, why=f"{self.first.meta['why']}; and {count - 1} more")
        for key in ("regather", "again"):
            if key in self.first.meta:
                sent.meta[key] = self.first.meta[key]
        return sent

    def parts(self, value: fx.Node, sizes: Sequence[int], dim: int) -> list[fx.Node]:
        """A value split along `dim`."""
        shape = value.meta["type"].shape
        types = tuple(self.type.with_shape((*shape[:dim], size, *shape[dim + 1 :])) for size in sizes)
        split = self.emit(aten.split_with_sizes.default, (value, list(sizes), dim), types)
        return [part(self.graph, split, index) for index in range(len(sizes))]

    def all_reduced(self) -> list[fx.Node]:
        """Flattened, reduced, split."""
        sizes = [node.meta["type"].numel for node in self.bucket]
        flat = [self.shaped(node.args[0], (size,)) for node, size in zip(self.bucket, sizes, strict=True)]  # type: ignore[arg-type]
        sent = self.send(collectives.all_reduce, flat, 0, self.first.args[1:])
        values = self.parts(sent, sizes, 0)
        return [self.as_it_was(node, value) for node, value in zip(self.bucket, values, strict=True)]

    def as_it_was(self, node: fx.Node, value: fx.Node) -> fx.Node:
        """A value in the shape and layout of the one that it replaces."""
        new = self.shaped(value, node.meta["type"].shape, node.meta["layout"])
        if new is value:  # of that shape already: then it is the user's tensor itself
            new.meta["layout"] = node.meta["layout"]
            if is_part(new):
                whole, index = producer(new)
                layouts = whole.meta["layout"]
                whole.meta["layout"] = (*layouts[:index], node.meta["layout"], *layouts[index + 1 :])
        return new

    def all_gathered(self) -> list[fx.Node]:
        """Flattened and gathered: a row from each rank, whose columns are split among the values."""
        axis, size = _without_dim(self.first)
        local = [node.args[0].meta["type"] for node in self.bucket]  # type: ignore[union-attr]
        flat = [self.shaped(node.args[0], (t.numel,)) for node, t in zip(self.bucket, local, strict=True)]  # type: ignore[arg-type]
        sent = self.send(collectives.all_gather, flat, 0, (0, axis, size))
        total = sent.meta["type"].numel
        sent.meta["type"] = self.type.with_shape((total * size,))
        rows = self.shaped(sent, (size, total))
        values = self.parts(rows, [t.numel for t in local], 1)
        found = []
        for node, value, type_ in zip(self.bucket, values, local, strict=True):
            # a stored parameter is put together where it is needed: till then the bucket has it
            late = self.graph.inserting_before(node) if self.first.meta.get("regather") else contextlib.nullcontext()
            with late:
                found.append(self.gathered(node, value, type_, size))
        return found

    def gathered(self, node: fx.Node, rows: fx.Node, local: TensorType, size: int) -> fx.Node:
        """The parts of all ranks, one after another along the dim that was gathered."""
        dim: Any = node.args[1]
        apart = self.shaped(rows, (size, *local.shape))
        return self.as_it_was(node, self.moved(apart, collectives.parts_back(dim, local.ndim + 1)))

    def scattered(self) -> list[fx.Node]:
        """The parts for each rank in a row of its own; rows are joined, and each rank gets its own, reduced."""
        op, axis, size = _without_dim(self.first)
        rows = [self.row_for_each(node, size) for node in self.bucket]
        sent = self.send(collectives.reduce_scatter, rows, 1, (0, op, axis, size))
        sent.meta["type"] = self.type.with_shape((1, sent.meta["type"].shape[1]))
        sizes = [node.meta["type"].numel for node in self.bucket]
        values = self.parts(sent, sizes, 1)
        return [self.as_it_was(node, value) for node, value in zip(self.bucket, values, strict=True)]

    def row_for_each(self, node: fx.Node, size: int) -> fx.Node:
        """`[.., size * n, ..]` as `[size, all else]`."""
        value: Any = node.args[0]
        dim: Any = node.args[1]
        shape = value.meta["type"].shape
        apart = self.shaped(value, (*shape[:dim], size, shape[dim] // size, *shape[dim + 1 :]))
        return self.shaped(
            self.moved(apart, collectives.parts_first(dim, len(shape) + 1)), (size, math.prod(shape) // size)
        )


_FORMS: dict[Any, Any] = {
    collectives.all_reduce: _Join.all_reduced,
    collectives.all_gather: _Join.all_gathered,
    collectives.reduce_scatter: _Join.scattered,
}
