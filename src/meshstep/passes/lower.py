"""From a local program to a graph that torch runs: collectives of `c10d`, and the state updated in place.

In the graph that comes out, in this order: the computation; `copy_` of new state into the inputs that hold it; the
optimizer's counters and in-place kernels on lists. Its inputs are the program's slots, its outputs the results that
are no existing state. What is read or returned after the memory that it shares is overwritten is copied before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._torch import OpOverload
from ..ir import collectives
from ..ir.program import Program, append, name_of
from ..ir.updates import BY_OP, Update, laid_out_like
from .state import in_place

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """The process group of one axis, seen from one rank.

    Args:
        name: Name of the group, as `c10d` knows it.
        size: Number of ranks along the axis.
        index: This rank's place along the axis.
        scatters: Whether a reduce_scatter by it sends no more than an all_to_all; if not, as with gloo, the parts are
            exchanged and added here.
    """

    name: str
    size: int
    index: int
    scatters: bool = True


def lower(program: Program, groups: Mapping[str, AxisGroup]) -> fx.GraphModule:
    """The graph module of a local program.

    Args:
        program: A program partitioned along every axis of its mesh.
        groups: The process group of each axis.

    Returns:
        A module whose forward takes one tensor a slot and returns a tuple: one for each of `kept_results(program)`.
    """
    return _Lowering(program, groups).run()


def kept_results(program: Program) -> tuple[int, ...]:
    """Indices of the results that the lowered graph returns: user outputs and state that did not exist before."""
    existing = set(program.slots)
    return tuple(i for i, result in enumerate(program.results) if result.slot not in existing)


class _Lowering:
    def __init__(self, program: Program, groups: Mapping[str, AxisGroup]) -> None:
        self.program, self.groups = program, groups
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.waiting: dict[fx.Node, Callable[[], fx.Node]] = {}
        self.in_place = in_place(program)
        self.overwritten: set[fx.Node] = set()

    def run(self) -> fx.GraphModule:
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self.new[node] = self.graph.placeholder(node.name)
            elif node.op == "call_function" and node not in self.in_place:
                self._lower(node)
        for node in list(self.waiting):  # what is being sent must not be overwritten
            self._value(node)
        self._finish()
        self.graph.eliminate_dead_code()
        return fx.GraphModule({}, self.graph, class_name=self.program.name)

    def _finish(self) -> None:
        """State, then what is returned."""
        writes = self._writes()
        copied = {holder for holder, _ in writes}
        self.overwritten = copied | {self.new[node] for node in self.in_place.overwritten()}
        kept, outputs = kept_results(self.program), list(self.program.outputs)
        returned = [self._apart(self.new[outputs[i][1]], self.overwritten) for i in kept]
        safe = [(holder, self._apart(value, copied)) for holder, value in writes]
        kernels = self._kernels()
        for holder, value in safe:
            self._call(aten.copy_.default, holder, value)
        self._advance_counters()
        for kernel, args, kwargs in kernels:
            self._call(kernel, *args, **kwargs)
        self.graph.output(tuple(returned))

    def _value(self, node: fx.Node) -> fx.Node:
        """The lowered value; a running collective is waited for at its first use."""
        if node in self.waiting:
            self.new[node] = self.waiting.pop(node)()
        return self.new[node]

    def _lower(self, node: fx.Node) -> None:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._value)
        if node.target in _COLLECTIVES:
            _COLLECTIVES[node.target](self, node, *args)
            return
        if node.target in IN_ORDER:
            args = fx.node.map_arg(args, self._contiguous)
        target = aten.reshape.default if node.target in _VIEWS else node.target
        self.new[node] = self._call(target, *args, **kwargs)
        self.new[node].meta.update(source=node.meta.get("source", ""))

    def _call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return append(self.graph, "call_function", op, args, kwargs, name_of(op))

    # Collectives: `start` now, `wait` at the first use.

    def all_reduce(self, node: fx.Node, x: fx.Node, op: str, axis: str) -> None:
        """Any dims: elementwise."""
        running = self._call(c10d.all_reduce.default, x, op, self.groups[axis].name)
        self.waiting[node] = lambda: self._wait(running)

    def all_gather(self, node: fx.Node, x: fx.Node, dim: int, axis: str, size: int) -> None:
        """Along dim 0 as c10d does it; another dim is brought to its place afterwards."""
        local = _shape(node.args[0])
        running = self._call(c10d.all_gather_into_tensor.default, self._contiguous(x), size, self.groups[axis].name)
        self.waiting[node] = lambda: self._parts_to_dim(self._wait(running), local, dim, size)

    def reduce_scatter(self, node: fx.Node, x: fx.Node, dim: int, op: str, axis: str, size: int) -> None:
        """The shards are brought to dim 0 first."""
        local = _shape(node)
        flat, group = self._dim_to_parts(x, local, dim, size), self.groups[axis]
        if op == "sum" and not group.scatters:
            counts = [local[0]] * size
            exchanged = self._call(c10d.all_to_all_single.default, flat, counts, counts, group.name)
            self.waiting[node] = lambda: self._sum_of_parts(self._wait(exchanged), local, size)
            return
        running = self._call(c10d.reduce_scatter_tensor.default, flat, op, size, group.name)
        self.waiting[node] = lambda: self._call(aten.reshape.default, self._wait(running), list(local))

    def all_to_all(self, node: fx.Node, x: fx.Node, split: int, concat: int, axis: str, size: int) -> None:
        """Shards of `split` are brought to dim 0, exchanged, and joined along `concat`."""
        local = list(_shape(node.args[0]))
        piece = [n // size if d == split else n for d, n in enumerate(local)]
        flat = self._dim_to_parts(x, piece, split, size)
        counts = [piece[0]] * size
        running = self._call(c10d.all_to_all_single.default, flat, counts, counts, self.groups[axis].name)
        self.waiting[node] = lambda: self._parts_to_dim(self._wait(running), piece, concat, size)

    def axis_slice(self, node: fx.Node, x: fx.Node, dim: int, axis: str, size: int) -> None:
        """This rank's rows, no communication."""
        length = _shape(node)[dim]
        start = self.groups[axis].index * length
        self.new[node] = self._call(aten.slice.Tensor, x, dim, start, start + length)

    def axis_index(self, node: fx.Node, axis: str, device: torch.device) -> None:
        """A constant of this rank."""
        self.new[node] = self._call(aten.full.default, [], self.groups[axis].index, dtype=torch.int64, device=device)

    def _wait(self, running: fx.Node) -> fx.Node:
        return self._call(c10d.wait_tensor.default, running)

    def _contiguous(self, x: fx.Node) -> fx.Node:
        return self._call(aten.contiguous.default, x)

    def _dim_to_parts(self, x: fx.Node, piece: Sequence[int], dim: int, size: int) -> fx.Node:
        """`[.., size * n, ..]` to contiguous `[size * piece[0], ...]`: the parts of `dim` one after another."""
        if dim == 0:
            return self._contiguous(x)
        split = self._call(aten.reshape.default, x, [*piece[:dim], size, *piece[dim:]])
        moved = self._call(aten.permute.default, split, collectives.parts_first(dim, len(piece) + 1))
        return self._call(aten.reshape.default, moved, [size * piece[0], *piece[1:]])

    def _parts_to_dim(self, x: fx.Node, piece: Sequence[int], dim: int, size: int) -> fx.Node:
        """The parts of dim 0, each of shape `piece`, joined along `dim`."""
        if dim == 0:
            return x
        split = self._call(aten.reshape.default, x, [size, *piece])
        moved = self._call(aten.permute.default, split, collectives.parts_back(dim, len(piece) + 1))
        return self._call(aten.reshape.default, moved, [size * n if d == dim else n for d, n in enumerate(piece)])

    def _sum_of_parts(self, x: fx.Node, piece: Sequence[int], size: int) -> fx.Node:
        """What every rank has sent, added in the order of the ranks."""
        return self._call(aten.sum.dim_IntList, self._call(aten.reshape.default, x, [size, *piece]), [0])

    # State

    def _writes(self) -> list[tuple[fx.Node, fx.Node]]:
        """The inputs that get a new value by a copy, each with it."""
        holders = {slot: self.new[node] for slot, node in self.program.inputs}
        return [
            (holders[result.slot], self.new[node])
            for result, node in self.program.outputs
            if result.slot in holders and node not in self.in_place
        ]

    def _apart(self, value: fx.Node, overwritten: set[fx.Node]) -> fx.Node:
        """A value in memory of its own, if it lies in what is overwritten."""
        return self._call(aten.clone.default, value) if _storage(value) in overwritten else value

    def _advance_counters(self) -> None:
        """All counters at once; on a CPU by a tensor, as a number would be made into one for each of them."""
        by_step: dict[Any, list[fx.Node]] = {}
        for node, held in self.in_place.counters.items():
            kind = node.meta["type"]
            by_tensor = kind.device == "cpu" and kind.dtype.is_floating_point
            by_step.setdefault((node.args[1], by_tensor), []).append(self.new[held])
        for (step, by_tensor), held_ones in by_step.items():
            if by_tensor:
                one = self._call(aten.scalar_tensor.default, 1.0, dtype=torch.float32)
                self._call(aten._foreach_add_.Tensor, held_ones, one, alpha=step)
            else:
                self._call(aten._foreach_add_.Scalar, held_ones, step)

    def _kernels(self) -> list[tuple[Any, list[Any], dict[str, Any]]]:
        """The kernel calls of the in-place updates: those of one kind and equal options together."""
        together: dict[Any, list[fx.Node]] = {}
        for node in self.in_place.updates:
            lists = len(BY_OP[node.target].lists)
            given = tuple(a is None for a in node.args[:lists])
            kind = node.meta["type"][0]
            key = (node.target, node.args[lists:], tuple(sorted(node.kwargs.items())), given, kind.dtype, kind.device)
            together.setdefault(key, []).append(node)
        return [self._kernel(BY_OP[nodes[0].target], nodes) for nodes in together.values()]

    def _kernel(self, update: Update, nodes: Sequence[fx.Node]) -> tuple[Any, list[Any], dict[str, Any]]:
        lists: list[Any] = [
            [self._argument(node.args[i], written=name in update.written) for node in nodes if node.args[i] is not None]
            for i, name in enumerate(update.lists)
        ]
        params = lists[update.lists.index("param")]
        for i, name in enumerate(update.lists):
            if name not in update.written and len(lists[i]) == len(params) and _shape(nodes[0].args[i]):
                lists[i] = self._call(laid_out_like, lists[i], params)
        names = [argument.name for argument in update.kernel._schema.arguments][len(update.lists) :]
        options = dict(zip(names, nodes[0].args[len(update.lists) :])) | nodes[0].kwargs
        return update.kernel, lists, fx.node.map_arg(options, self._argument)

    def _argument(self, node: Any, *, written: bool = False) -> fx.Node:
        """What a kernel gets: a counter as it is when advanced, all else that it only reads as it was."""
        if node in self.in_place.counters:
            return self.new[self.in_place.counters[node]]
        return self.new[node] if written else self._apart(self.new[node], self.overwritten)


_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})
# Kernels that refuse any other order in memory: the clone that torch makes before them may be one of shards.
IN_ORDER = frozenset({aten.native_group_norm.default, aten.native_group_norm_backward.default})
_COLLECTIVES: dict[Any, Callable[..., None]] = {
    collectives.all_reduce: _Lowering.all_reduce,
    collectives.all_gather: _Lowering.all_gather,
    collectives.reduce_scatter: _Lowering.reduce_scatter,
    collectives.all_to_all: _Lowering.all_to_all,
    collectives.axis_slice: _Lowering.axis_slice,
    collectives.axis_index: _Lowering.axis_index,
}


def _storage(node: fx.Node) -> fx.Node:
    """The node whose memory a node of the lowered graph may share."""
    while node.op == "call_function" and node.args and _may_alias(node.target):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _may_alias(op: Any) -> bool:
    if op in (aten.reshape.default, aten.contiguous.default) or not isinstance(op, OpOverload):
        return True
    return any(r.alias_info is not None for r in op._schema.returns)


def _shape(node: Any) -> tuple[int, ...]:
    return node.meta["type"].shape
