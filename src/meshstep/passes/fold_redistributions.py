"""Changes of placement that undo each other, or that would send less at another place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..ir.collectives import all_gather, all_reduce, axis_of, axis_slice, reduce_scatter
from ..ir.infer import infer
from ..ir.program import Program, call, prune
from ..ir.types import TensorType
from ..layout import Layout

aten = torch.ops.aten
_KEEPS_ROWS = frozenset({aten.slice.Tensor, aten.select.int})
_ABOUT_A_COLLECTIVE = ("why", "causes", "regather", "count")


@dataclass(frozen=True, slots=True)
class FoldRedistributions:
    """Fold a gather of a slice, a slice of a gather, a slice of a sum, a gather of a scattered sum; move others.

    A value is cast to a narrower dtype before it is gathered, and to a wider one after it; rows are picked from a
    partial sum before it is reduced; two reduced values that are added are reduced once. Exact, but for the last one,
    which adds in another order.
    """

    def __call__(self, program: Program) -> Program:
        """The program with fewer, or smaller, collectives."""
        found = program
        while (place := _foldable(found)) is not None:
            found, copies = (found, None) if found is not program else program.copy()
            node, fold = (copies[place[0]], place[1]) if copies else place
            fold(_Fold(found.graph, node))
            prune(found.graph)
        return found


Fold = Callable[["_Fold"], None]


def _foldable(program: Program) -> tuple[fx.Node, Fold] | None:
    returned = set(program.output_node.all_input_nodes)
    for node in program.graph.nodes:
        for matches, fold in _FOLDS.get(node.target, ()):
            if matches(node) and not _is_shared(node, fold, returned):
                return node, fold
    return None


def _is_shared(node: fx.Node, fold: Fold, returned: set[fx.Node]) -> bool:
    """Whether the collective that a fold takes away is needed by others, so that it would be sent twice."""
    if fold is _undone:
        return False
    taken = [n for n in node.all_input_nodes if n.target in (all_reduce, all_gather, reduce_scatter)]
    return any(n in returned or any(user is not node for user in n.users) for n in taken)


class _Fold:
    """Edits the graph around one node."""

    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node = graph, node

    def emit(self, op: Any, args: tuple, kwargs: Any = None, *, like: fx.Node, layout: Layout) -> fx.Node:
        """A new call before the node, with what is known of a collective of `like`."""
        with self.graph.inserting_before(self.node):
            type_: Any = infer(op, args, kwargs or {})
            new = call(self.graph, op, args, kwargs, type=type_, layout=layout, source=like.meta.get("source", ""))
        new.meta.update({key: like.meta[key] for key in ("module", "backward", "recomputed") if key in like.meta})
        return new

    def collective(self, op: Any, args: tuple, *, like: fx.Node) -> fx.Node:
        """A collective in the place of the node's value, with what is known of another one."""
        new = self.emit(op, args, like=like, layout=self.node.meta["layout"])
        new.meta.update({key: like.meta[key] for key in _ABOUT_A_COLLECTIVE if key in like.meta})
        return new

    def replace(self, value: fx.Node) -> None:
        self.node.replace_all_uses_with(value)


def _input(node: fx.Node) -> Any:
    return node.args[0]


def _type(node: fx.Node) -> TensorType:
    return node.meta["type"]


def _on(layout: Layout, axis: str, like: Layout) -> Layout:
    """A layout with the placement along `axis` of another one."""
    return replace(layout, placements=tuple((a, like[a] if a == axis else p) for a, p in layout.placements))


# ---- a value that comes back to where it was


def _same_place(node: fx.Node, other: Any) -> bool:
    """Whether a node's input is a call of `other` along the same dim and axis."""
    before = _input(node)
    return before.target is other and before.args[1:] == node.args[1:]


def _undone(fold: _Fold) -> None:
    fold.replace(_input(_input(fold.node)))


def _slices_a_sum(node: fx.Node) -> bool:
    before = _input(node)
    return before.target is all_reduce and axis_of(all_reduce, before.args) == axis_of(axis_slice, node.args)


def _scattered(fold: _Fold) -> None:
    """Nobody needs the other ranks' shards of the sum."""
    total = _input(fold.node)
    value, op, axis = total.args
    _, dim, _, size = fold.node.args
    fold.replace(fold.collective(reduce_scatter, (value, dim, op, axis, size), like=total))


def _gathers_a_scattered_sum(node: fx.Node) -> bool:
    before = _input(node)
    return before.target is reduce_scatter and (before.args[1], *before.args[3:]) == node.args[1:]


def _reduced(fold: _Fold) -> None:
    scattered = _input(fold.node)
    value, _, op, axis, _ = scattered.args
    fold.replace(fold.collective(all_reduce, (value, op, axis), like=scattered))


# ---- another place for a collective


def _narrows_a_gather(node: fx.Node) -> bool:
    before = _input(node)
    return before.target is all_gather and _type(node).dtype.itemsize < _type(before).dtype.itemsize


def _cast_first(fold: _Fold) -> None:
    gathered = _input(fold.node)
    part = _input(gathered)
    narrow = fold.emit(
        fold.node.target, (part, *fold.node.args[1:]), fold.node.kwargs, like=fold.node, layout=part.meta["layout"]
    )
    fold.replace(fold.collective(all_gather, (narrow, *gathered.args[1:]), like=gathered))


def _gathers_what_was_widened(node: fx.Node) -> bool:
    before = _input(node)
    if before.target is not aten._to_copy.default or len(before.users) > 1:
        return False
    return _type(_input(before)).dtype.itemsize < _type(before).dtype.itemsize


def _cast_last(fold: _Fold) -> None:
    gathered, widened = fold.node, _input(fold.node)
    whole = fold.collective(all_gather, (_input(widened), *gathered.args[1:]), like=gathered)
    wide = fold.emit(
        widened.target, (whole, *widened.args[1:]), widened.kwargs, like=widened, layout=gathered.meta["layout"]
    )
    fold.replace(wide)


def _picks_rows_of_a_sum(node: fx.Node) -> bool:
    before = _input(node)
    return before.target is all_reduce and _type(node).nbytes < _type(before).nbytes


def _picked_first(fold: _Fold) -> None:
    total = _input(fold.node)
    value, op, axis = total.args
    layout = _on(fold.node.meta["layout"], axis, value.meta["layout"])
    picked = fold.emit(fold.node.target, (value, *fold.node.args[1:]), fold.node.kwargs, like=fold.node, layout=layout)
    fold.replace(fold.collective(all_reduce, (picked, op, axis), like=total))


def _adds_two_sums(node: fx.Node) -> bool:
    if len(node.args) != 2 or not all(isinstance(n, fx.Node) and n.target is all_reduce for n in node.args):
        return False
    one, other = node.args
    return (  # of one shape: a value that is spread out is smaller than the sum
        one is not other
        and one.args[1:] == other.args[1:]  # type: ignore[union-attr]
        and one.args[1] == "sum"  # type: ignore[union-attr]
        and _type(one) == _type(other) == _type(node)  # type: ignore[arg-type]
    )


def _added_first(fold: _Fold) -> None:
    one, other = fold.node.args
    value, op, axis = one.args  # type: ignore[union-attr]
    layout = value.meta["layout"]  # type: ignore[union-attr]
    both = fold.emit(
        fold.node.target,
        (value, _input(other)),  # type: ignore[arg-type]
        fold.node.kwargs,
        like=fold.node,
        layout=layout,
    )
    fold.replace(fold.collective(all_reduce, (both, op, axis), like=one))  # type: ignore[arg-type]


_FOLDS: dict[Any, tuple[tuple[Callable[[fx.Node], bool], Fold], ...]] = {
    axis_slice: ((lambda node: _same_place(node, all_gather), _undone), (_slices_a_sum, _scattered)),
    all_gather: (
        (lambda node: _same_place(node, axis_slice), _undone),
        (_gathers_a_scattered_sum, _reduced),
        (_gathers_what_was_widened, _cast_last),
    ),
    aten._to_copy.default: ((_narrows_a_gather, _cast_first),),
    aten.add.Tensor: ((_adds_two_sums, _added_first),),
    aten.sub.Tensor: ((_adds_two_sums, _added_first),),
    **dict.fromkeys(_KEEPS_ROWS, ((_picks_rows_of_a_sum, _picked_first),)),
}
