"""A program beside what was made of it, value by value: which is the first that differs?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ..ir.program import Program, producer
from ..mesh import Mesh
from ..rules.factories import UNINITIALIZED
from ..rules.validator import combinations
from .simulate import run_ranks, scatter

Values = Mapping[fx.Node, Sequence[Any]]  # of each node, its value on each rank
Images = Mapping[tuple[fx.Node, int], fx.Node]
TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
MORE = 10.0  # times what its inputs differ by: a value that only hands on their rounding is not the first
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

    Args:
        before: A program.
        after: What it is partitioned along one more axis.
        images: The nodes of `after` that are parts of the values of `before`.
        old: All values of `before`.
        new: All values of `after`.
    """
    axis = next(axis for axis in after.axes if axis not in before.axes)
    children = _children(own_mesh(before), own_mesh(after))

    def stands_for(image: fx.Node, rank: int) -> list[Tensor]:
        return combinations([new[image][child] for child in children[rank]], image.meta["layout"][axis])

    pairs = {
        node: image
        for node in before.graph.nodes
        if node.op == "call_function" and (image := images.get(producer(node))) is not None and image in new
    }
    return _first(before, after, pairs, old, stands_for)


def first_rewritten(before: Program, after: Program, old: Values, new: Values) -> Difference | None:
    """The first value of a local program that a pass has changed; values are known by their names.

    Args:
        before: A local program.
        after: What a pass made of it.
        old: All values of `before`.
        new: All values of `after`.
    """
    now_of = {node.name: node for node in after.graph.nodes}
    pairs = {
        node: now
        for node in before.graph.nodes
        if node.op == "call_function" and (now := now_of.get(node.name)) is not None and now.target == node.target
    }
    return _first(before, after, pairs, old, lambda now, rank: [new[now][rank]])


StandsFor = Callable[[fx.Node, int], Sequence[Tensor]]  # the values that a node stands for on one rank of before


def _first(
    before: Program, after: Program, pairs: Mapping[fx.Node, fx.Node], old: Values, stands_for: StandsFor
) -> Difference | None:
    """The first value that differs by more than rounding and by more than what it is made of.

    Only those are looked at on which a result depends that differs.
    """
    apart: dict[fx.Node, _Apart] = {}
    ends = [
        (node, found)
        for (_, node), (_, now) in zip(before.outputs, after.outputs, strict=True)
        if (found := _compare(node, now, old, stands_for)).differs
    ]
    wanted = ancestors(node for node, _ in ends)
    for node in before.graph.nodes:
        if node not in wanted or node not in pairs or node.target in UNINITIALIZED:
            continue
        if isinstance(old[node][0], (tuple, list)):
            continue  # its parts are nodes
        found = apart[node] = _compare(node, pairs[node], old, stands_for)
        made_of = max((apart[n].error for n in _made_of(node) if n in apart), default=0.0)
        if found.differs and found.error > MORE * made_of:
            return Difference(node, found.error / found.scale, found.rank)
    for node, found in ends:
        if node not in apart or found.error > MORE * apart[node].error:
            return Difference(node, found.error / found.scale, found.rank, moved=True)
    return None


@dataclass(frozen=True, slots=True)
class _Apart:
    """How far apart values are: the greatest difference, the largest element, on which rank, and what rounding is."""

    error: float = 0.0
    scale: float = 1.0
    rank: int = 0
    rounding: float = 0.0

    @property
    def differs(self) -> bool:
        """Whether by more than rounding."""
        return self.error > self.rounding * self.scale


def _compare(node: fx.Node, now: fx.Node, old: Values, stands_for: StandsFor) -> _Apart:
    """The rank where a value differs most."""
    worst = _Apart()
    for rank, want in enumerate(old[node]):
        scale = _scale([want, *(old[n][rank] for n in _made_of(node))])
        try:
            error = max(_apart(found, want) for found in stands_for(now, rank))
        except RuntimeError:  # parts that do not go together
            error = float("inf")
        found = _Apart(error, scale, rank, tolerance(want))
        worst = max(worst, found, key=lambda a: a.error / a.scale)
    return worst


def _made_of(node: fx.Node) -> list[fx.Node]:
    return producer(node)[0].all_input_nodes


def _children(old: Mesh, new: Mesh) -> list[list[int]]:
    """For each rank, those along the new axis that hold the parts of what it held."""
    place_of = [new.coordinate(rank) for rank in range(new.size)]
    return [
        [r for r, at in enumerate(place_of) if all(at.get(a, 0) == i for a, i in old.coordinate(rank).items())]
        for rank in range(old.size)
    ]


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


def _scale(values: Iterable[Any]) -> float:
    """The largest finite element: what is nothing but for rounding is measured by what it was made of."""
    largest = SMALL
    for value in values:
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()) and value.numel():
            largest = max(largest, value.abs().nan_to_num(0.0, 0.0, 0.0).max().item())
    return largest


def _apart(found: Tensor, want: Tensor) -> float:
    if found.shape != want.shape or found.dtype != want.dtype:
        return float("inf")
    if not (want.is_floating_point() or want.is_complex()):
        return 0.0 if torch.equal(found, want) else float("inf")
    both = torch.isfinite(want)
    if not torch.equal(torch.isfinite(found), both):
        return float("inf")
    if not torch.equal(found[~both].nan_to_num(1.0), want[~both].nan_to_num(1.0)):
        return float("inf")
    return float((found - want)[both].abs().max().item()) if both.any() else 0.0
