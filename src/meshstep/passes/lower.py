"""From a local program to a graph that torch runs: collectives of `c10d`, and the state updated in place.

In the graph that comes out, in this order: the computation; `copy_` of new state into the inputs that hold it; the
optimizer's in-place kernels on lists. Its inputs are the program's slots, its outputs the results that are no existing
state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..ir import collectives
from ..ir.program import Program, Slot, SlotKind, is_part, producer
from ..ir.updates import BY_OP

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """The process group of one axis, seen from one rank.

    Args:
        name: Name of the group, as `c10d` knows it.
        size: Number of ranks along the axis.
        index: This rank's place along the axis.
    """

    name: str
    size: int
    index: int


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
        self.graph.set_codegen(fx.graph.CodeGen())
        self.new: dict[fx.Node, fx.Node] = {}
        self.waiting: dict[fx.Node, Callable[[], fx.Node]] = {}
        self.updates, self.counters = _in_place_updates(program), _counters(program)

    def run(self) -> fx.GraphModule:
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self.new[node] = self.graph.placeholder(node.name)
            elif node.op == "call_function" and node not in self.updates and node not in self.counters:
                self._lower(node)
        self._write_state()
        self._advance_counters()
        self._run_updates()
        outputs = list(self.program.output_node.args[0])  # type: ignore[arg-type]
        self.graph.output(tuple(self._value(outputs[i]) for i in kept_results(self.program)))
        module = fx.GraphModule({}, self.graph, class_name=self.program.name)
        module.graph.eliminate_dead_code()
        module.recompile()
        return module

    def _value(self, node: fx.Node) -> fx.Node:
        """The lowered value; a running collective is waited for at its first use."""
        if node in self.waiting:
            self.new[node] = self.waiting.pop(node)()
        return self.new[node]

    def _lower(self, node: fx.Node) -> None:
        if is_part(node) and node.args[0] in self.updates:
            return
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._value)
        if node.target in _COLLECTIVES:
            _COLLECTIVES[node.target](self, node, *args)
            return
        target = aten.reshape.default if node.target in _VIEWS else node.target
        self.new[node] = self._call(target, *args, **kwargs)
        self.new[node].meta.update(source=node.meta.get("source", ""))

    def _call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(op, args, kwargs)

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
        flat = self._dim_to_parts(x, local, dim, size)
        running = self._call(c10d.reduce_scatter_tensor.default, flat, op, size, self.groups[axis].name)
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
        order = [dim, *(d for d in range(len(piece) + 1) if d != dim)]
        moved = self._call(aten.permute.default, split, order)
        return self._call(aten.reshape.default, moved, [size * piece[0], *piece[1:]])

    def _parts_to_dim(self, x: fx.Node, piece: Sequence[int], dim: int, size: int) -> fx.Node:
        """The parts of dim 0, each of shape `piece`, joined along `dim`."""
        if dim == 0:
            return x
        split = self._call(aten.reshape.default, x, [size, *piece])
        order = [*range(1, dim + 1), 0, *range(dim + 1, len(piece) + 1)]
        moved = self._call(aten.permute.default, split, order)
        return self._call(aten.reshape.default, moved, [size * n if d == dim else n for d, n in enumerate(piece)])

    # State

    def _write_state(self) -> None:
        """New state into the inputs that hold it; what would be overwritten before it is read is copied first."""
        writes = [
            (self._holder(result.slot), self._value(node))
            for result, node in self.program.outputs
            if result.slot in set(self.program.slots) and not self._is_in_place(node)
        ]
        holders = {holder for holder, _ in writes}
        safe = [(h, self._call(aten.clone.default, v) if _storage(v) in holders - {v} else v) for h, v in writes]
        for holder, value in safe:
            self._call(aten.copy_.default, holder, value)

    def _holder(self, slot: Slot | None) -> fx.Node:
        return self.new[self.program.placeholders[self.program.slots.index(slot)]]  # type: ignore[arg-type]

    def _is_in_place(self, node: fx.Node) -> bool:
        return producer(node)[0] in self.updates or node in self.counters

    def _advance_counters(self) -> None:
        by_step: dict[Any, list[fx.Node]] = {}
        for node, held in self.counters.items():
            by_step.setdefault(node.args[1], []).append(self.new[held])
            self.new[node] = self.new[held]
        for step, held in by_step.items():
            self._call(aten._foreach_add_.Scalar, held, step)

    def _run_updates(self) -> None:
        """Updates of one kind and equal options in one kernel call."""
        together: dict[Any, list[fx.Node]] = {}
        for node in self.updates:
            update = BY_OP[node.target]
            key = (node.target, node.args[len(update.lists) :], tuple(sorted(node.kwargs.items())))
            given = tuple(a is None for a in node.args[: len(update.lists)])
            kind = node.meta["type"][0]
            together.setdefault((*key, given, kind.dtype, kind.device), []).append(node)
        for nodes in together.values():
            update = BY_OP[nodes[0].target]
            lists = [
                [self._value(node.args[i]) for node in nodes if node.args[i] is not None]  # type: ignore[arg-type]
                for i in range(len(update.lists))
            ]
            options = fx.node.map_arg(dict(nodes[0].kwargs), self._value)
            rest = fx.node.map_arg(nodes[0].args[len(update.lists) :], self._value)
            names = [a.name for a in update.kernel._schema.arguments][len(update.lists) :]
            self._call(update.kernel, *lists, **dict(zip(names, rest, strict=False)), **options)


_VIEWS = frozenset({aten.view.default, aten._unsafe_view.default})
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
    if op in (aten.reshape.default, aten.contiguous.default) or not isinstance(op, torch._ops.OpOverload):
        return True
    return any(r.alias_info is not None for r in op._schema.returns)


def _shape(node: Any) -> tuple[int, ...]:
    return node.meta["type"].shape


def _in_place_updates(program: Program) -> dict[fx.Node, None]:
    """Optimizer updates that can write straight into the state that they read.

    Every tensor that one writes is the input of a slot, what it makes is exactly the slot's new value, and nobody else
    reads that value.
    """
    slot_of = dict(zip(program.placeholders, program.slots, strict=True))
    slots_for: dict[tuple[fx.Node, int], list[Slot | None]] = {}
    for result, node in program.outputs:
        slots_for.setdefault(producer(node), []).append(result.slot)
    return {
        node: None for node in program.calls if node.target in BY_OP and _is_in_place_update(node, slot_of, slots_for)
    }


def _is_in_place_update(
    node: fx.Node, slot_of: Mapping[fx.Node, Slot], slots_for: Mapping[tuple[fx.Node, int], list[Slot | None]]
) -> bool:
    update = BY_OP[node.target]
    if any(user.op != "output" for item in node.users for user in item.users):
        return False
    for index, name in enumerate(update.written):
        written = node.args[update.lists.index(name)]
        if written is not None and slots_for.get((node, index)) != [slot_of.get(written)]:  # type: ignore[call-overload]
            return False
    return True


def _counters(program: Program) -> dict[fx.Node, fx.Node]:
    """`step + 1` of 0-d optimizer state, written back to it: the node, and the input that holds the state."""
    slot_of = dict(zip(program.placeholders, program.slots, strict=True))
    updates = _in_place_updates(program)
    found = {}
    for result, node in program.outputs:
        if result.slot is None or result.slot.kind is not SlotKind.OPTIMIZER_STATE:
            continue
        held = node.args[0] if node.target in (aten.add.Tensor, aten.add.Scalar) and len(node.args) == 2 else None
        if not isinstance(held, fx.Node) or slot_of.get(held) != result.slot or len(held.users) > 1:
            continue
        if node.meta["type"].ndim == 0 and isinstance(node.args[1], (int, float)) and not node.kwargs:
            if all(user in updates or user.op == "output" for user in node.users):
                found[node] = held
    return found
