"""A program beside what was made of it, value by value: which is the first that differs?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ..ir.program import Program, producer
from ..layout import Layout
from ..mesh import Mesh
from ..rules.factories import UNINITIALIZED
from ..rules.validator import combinations
from .simulate import run_ranks, scatter

Values = Mapping[fx.Node, Sequence[Any]]  # of each node, its value on each rank
Images = Mapping[tuple[fx.Node, int], fx.Node]
TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
SMALL = 1e-30  # of what is compared with nothing


@dataclass(frozen=True, slots=True, eq=False)
class Difference:
    """The first value that differs.

    Args:
        node: It, in the program before; of an op with several outputs, the node of the part.
        error: By how much, relative to the largest element of it and of what it is made of.
        rank: Where, among the ranks of the program before.
        moved: Whether the value itself is right, and what is returned of it is not.
    """

    node: fx.Node
    error: float
    rank: int
    moved: bool = False


def own_mesh(program: Program) -> Mesh:
    """The mesh of the axes that a program is partitioned along: ranks along others would all do the same."""
    sizes = {axis: program.mesh[axis] for axis in program.mesh.axes if axis in program.axes}
    return Mesh(**sizes) if sizes else Mesh(device=1)


def all_values(program: Program, inputs: Sequence[Sequence[Tensor]]) -> dict[fx.Node, list[Any]]:
    """Run a program, on the ranks of `own_mesh`, and keep every value.

    Args:
        program: The program.
        inputs: For each rank, one tensor a slot.
    """
    found: dict[fx.Node, list[Any]] = {}
    for position, node in enumerate(program.placeholders):
        found[node] = [own[position] for own in inputs]
    run_ranks(replace(program, mesh=own_mesh(program)), inputs, found.__setitem__)
    return found


def split_inputs(whole: Sequence[Tensor], program: Program) -> list[list[Tensor]]:
    """Each rank's inputs of a program from whole ones."""
    mesh = own_mesh(program)
    parts = [
        scatter(tensor.detach(), node.meta["layout"], mesh)
        for tensor, node in zip(whole, program.placeholders, strict=True)
    ]
    return [[part[rank] for part in parts] for rank in range(mesh.size)]


def first_partitioned(before: Program, after: Program, images: Images, old: Values, new: Values) -> Difference | None:
    """The first value of a program, in its order, of which the parts along one more axis make another one.

    Only values are looked at on which a result depends that differs.

    Args:
        before: A program.
        after: What it is partitioned along one more axis.
        images: The nodes of `after` that are parts of the values of `before`.
        old: All values of `before`.
        new: All values of `after`.
    """
    match = _Match(before, after)
    ends = [
        (node, now)
        for (_, node), (_, now) in zip(before.outputs, after.outputs, strict=True)
        if match.error(node, now, old, new)[0] > tolerance(old[node][0])
    ]
    if not ends:
        return None
    wanted = ancestors(node for node, _ in ends)
    for node in before.graph.nodes:
        computed = node.op == "call_function" and node in wanted and node.target not in UNINITIALIZED
        image = images.get(producer(node)) if computed else None
        if image is None or image not in new:
            continue
        error, rank = match.error(node, image, old, new)
        if error > tolerance(old[node][0]):
            return Difference(node, error, rank)
    node, now = ends[0]
    return Difference(node, *match.error(node, now, old, new), moved=True)


def first_rewritten(before: Program, after: Program, old: Values, new: Values) -> Difference | None:
    """The first value of a local program that a pass has changed; values are known by their names.

    Args:
        before: A local program.
        after: What a pass made of it.
        old: All values of `before`.
        new: All values of `after`.
    """
    ends = [
        (node, now)
        for (_, node), (_, now) in zip(before.outputs, after.outputs, strict=True)
        if _same_ranks(node, now, old, new)[0] > tolerance(old[node][0])
    ]
    if not ends:
        return None
    now_of = {node.name: node for node in after.graph.nodes}
    wanted, later = ancestors(node for node, _ in ends), ancestors(now for _, now in ends)
    for node in before.graph.nodes:
        now = now_of.get(node.name)
        if node not in wanted or now not in later or now.target != node.target or node.op != "call_function":
            continue
        error, rank = _same_ranks(node, now, old, new)
        if error > tolerance(old[node][0]):
            return Difference(node, error, rank)
    node, now = ends[0]
    return Difference(node, *_same_ranks(node, now, old, new), moved=True)


def ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Some nodes and all that they depend on."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def tolerance(value: Any) -> float:
    """What rounding may be, relative."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    return TOLERANCE.get(value.dtype, 2e-2)


class _Match:
    """Finds the ranks along the new axis that hold the parts of what one rank held before."""

    def __init__(self, before: Program, after: Program) -> None:
        self.axis = next(axis for axis in after.axes if axis not in before.axes)
        old, new = own_mesh(before), own_mesh(after)
        place_of = [new.coordinate(rank) for rank in range(new.size)]
        self.children = [
            [r for r, at in enumerate(place_of) if all(at.get(a, 0) == i for a, i in old.coordinate(rank).items())]
            for rank in range(old.size)
        ]

    def error(self, node: fx.Node, image: fx.Node, old: Values, new: Values) -> tuple[float, int]:
        """The greatest difference over all ranks, and where."""
        if isinstance(old[node][0], (tuple, list)):
            return 0.0, 0  # its parts are nodes
        layout: Layout = image.meta["layout"]
        placement, worst = layout[self.axis], (0.0, 0)
        for rank, children in enumerate(self.children):
            want, parts = old[node][rank], [new[image][child] for child in children]
            scale = _scale([want, *_inputs(node, old, rank), *parts])
            try:
                found = combinations(parts, placement)
            except RuntimeError:  # parts that do not go together
                return float("inf"), rank
            error = max(_apart(value, want, scale) for value in found)
            worst = max(worst, (error, rank), key=lambda w: w[0])
        return worst


def _same_ranks(node: fx.Node, now: fx.Node, old: Values, new: Values) -> tuple[float, int]:
    if isinstance(old[node][0], (tuple, list)):
        return 0.0, 0
    errors = [
        (_apart(b, a, _scale([a, *_inputs(node, old, rank)])), rank)
        for rank, (a, b) in enumerate(zip(old[node], new[now], strict=True))
    ]
    return max(errors, key=lambda e: e[0])


def _inputs(node: fx.Node, values: Values, rank: int) -> Iterator[Any]:
    for used in producer(node)[0].all_input_nodes:
        yield values[used][rank]


def _scale(values: Iterable[Any]) -> float:
    """The largest finite element: what is nothing but for rounding is measured by what it was made of."""
    largest = SMALL
    for value in values:
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()) and value.numel():
            largest = max(largest, value.abs().nan_to_num(0.0, 0.0, 0.0).max().item())
    return largest


def _apart(found: Tensor, want: Tensor, scale: float) -> float:
    if found.shape != want.shape or found.dtype != want.dtype:
        return float("inf")
    if not (want.is_floating_point() or want.is_complex()):
        return 0.0 if torch.equal(found, want) else float("inf")
    both = torch.isfinite(want)
    if not torch.equal(torch.isfinite(found), both):
        return float("inf")
    if not torch.equal(found[~both].nan_to_num(1.0), want[~both].nan_to_num(1.0)):
        return float("inf")
    return float((found - want)[both].abs().max().item()) / scale if both.any() else 0.0
