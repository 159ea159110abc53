"""A program with fewer of its repeated layers: what a long program costs follows from two short ones.

Layers are found by structure: modules in a numbered row whose calls, and the updates of whose parameters, are the same
ops on the same types. A layer that is left out gives its place to its neighbours: in the forward to the last one kept
before it, in the backward to the first one kept after it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import fx

from ..ir.program import Program, SlotKind, append, prune

_NUMBERED = re.compile(r"^((?:.*?\.)?)(\d+)(?=\.|$)")
Layer = tuple[str, int]  # the row of modules, and the place in it


@dataclass(frozen=True, slots=True)
class Row:
    """Equal layers, one after another.

    Args:
        prefix: The row: `model.layers.`.
        first: Number of the first of the equal layers.
        count: How many are equal.
    """

    prefix: str
    first: int
    count: int

    def left_out(self, keep: int) -> Iterable[int]:
        """The numbers of those that are left out if `keep` are kept: the first ones, and the last one."""
        return range(self.first + keep - 1, self.first + self.count - 1)


def shared_names(program: Program) -> dict[str, str]:
    """For each parameter the pattern that it shares with its likes in repeated layers; its own name if there are none.

    Repeated layers are modules of modules: of single ones in a row, like the linear maps of a perceptron, each may
    have a part of its own to play.
    """
    alike: dict[str, dict[str, Any]] = {}
    names = {slot.name: node.meta["type"] for slot, node in program.inputs if slot.kind is SlotKind.PARAMETER}
    for name, type_ in names.items():
        alike.setdefault(_pattern(name), {})[name] = type_
    found: dict[str, str] = {}
    for pattern, members in alike.items():
        meant = [name for name in names if fnmatchcase(name, pattern)]
        shared = len(set(members.values())) == 1 and meant == list(members)
        found |= {name: pattern if shared else name for name in members}
    return {name: found[name] for name in names}


def _pattern(name: str) -> str:
    found = _NUMBERED.match(name)
    rest = name[found.end() :] if found else ""
    return f"{found[1]}*{rest}" if found and rest.count(".") > 1 else name


def rows(program: Program, least: int = 5) -> tuple[Row, ...]:
    """The runs of at least `least` equal layers whose parameters share their patterns, in program order."""
    own = {_layer(name) for name, pattern in shared_names(program).items() if name == pattern}
    own_rows = {layer[0] for layer in own if layer}
    return tuple(row for row in _Folding(program).rows(least) if row.prefix not in own_rows)


def fold(program: Program, found: Sequence[Row], keep: int) -> Program:
    """The program with `keep` layers of each row.

    Args:
        program: A program that is partitioned along no axis.
        found: Of `rows`.
        keep: At least 2.
    """
    return _Folding(program).fold(found, keep)


class _Folding:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.layer_of: dict[fx.Node, Layer] = {}
        self.nodes: dict[Layer, list[fx.Node]] = {}
        known = {prefix for node in program.calls if (layer := _layer(node.meta.get("module", "")))
                 for prefix in (layer[0],)}  # fmt: skip
        for slot, node in program.inputs:
            if slot.kind is not SlotKind.ARGUMENT:
                self._put(node, _layer(slot.name, known))
        for node in program.graph.nodes:
            if node.op == "call_function":
                self._put(node, _layer(node.meta.get("module", "")) or self._by_inputs(node))

    def _put(self, node: fx.Node, layer: Layer | None) -> None:
        if layer is not None:
            self.layer_of[node] = layer
            self.nodes.setdefault(layer, []).append(node)

    def _by_inputs(self, node: fx.Node) -> Layer | None:
        """The layer of what no module computes: an update belongs to its parameter."""
        of = {self.layer_of[n]: None for n in node.all_input_nodes if n in self.layer_of}
        return next(iter(of)) if len(of) == 1 else None

    def rows(self, least: int) -> tuple[Row, ...]:
        by_prefix: dict[str, list[int]] = {}
        for prefix, number in self.nodes:
            by_prefix.setdefault(prefix, []).append(number)
        found = []
        for prefix, numbers in by_prefix.items():
            marks = {n: self._mark((prefix, n)) for n in numbers}
            run: list[int] = []
            for n in [*sorted(numbers), -1]:
                if run and (n != run[-1] + 1 or marks[n] != marks[run[-1]]):
                    found += [Row(prefix, run[0], len(run))] if len(run) >= least else []
                    run = []
                run.append(n)
        return tuple(found)

    def _mark(self, layer: Layer) -> tuple[object, ...]:
        place = {node: i for i, node in enumerate(self.nodes[layer])}
        return tuple(
            (
                n.target if n.op == "call_function" else "",
                n.meta["type"],
                tuple(place.get(i, -1) for i in n.all_input_nodes),
            )
            for n in self.nodes[layer]
        )

    def fold(self, found: Sequence[Row], keep: int) -> Program:
        stand_in: dict[fx.Node, fx.Node] = {}
        for row in found:
            before, after = row.first + keep - 2, row.first + row.count - 1
            for number in row.left_out(keep):
                layer = self.nodes[row.prefix, number]
                for i, node in enumerate(layer):
                    other = after if node.meta.get("backward") or self._is_update(node) else before
                    stand_in[node] = self.nodes[row.prefix, other][i]
        return _without(self.program, stand_in)

    def _is_update(self, node: fx.Node) -> bool:
        return node.op == "call_function" and not node.meta.get("module")


def _without(program: Program, stand_in: Mapping[fx.Node, fx.Node]) -> Program:
    """The program without some nodes, others in their places."""
    outputs = [(r, n) for r, n in program.outputs if r.slot is None or n not in stand_in]
    kept = [(slot, node) for slot, node in program.inputs if node not in stand_in]
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in program.graph.nodes:
        if node in stand_in or node.op == "output":
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: copies[stand_in.get(n, n)])
        copies[node] = append(graph, node.op, node.target, args, kwargs, node.name)
        copies[node].meta.update(node.meta)
    graph.output(tuple(copies[stand_in.get(n, n)] for _, n in outputs))
    prune(graph)
    return replace(program, graph=graph, slots=tuple(s for s, _ in kept), results=tuple(r for r, _ in outputs))


def _layer(path: str, known: Iterable[str] | None = None) -> Layer | None:
    found = _NUMBERED.match(path)
    if found is None or (known is not None and found[1] not in known):
        return None
    return found[1], int(found[2])
