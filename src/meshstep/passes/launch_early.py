"""Orders a program so that collectives start as soon as they can, and their results are waited for late."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from ..ir import collectives
from ..ir.program import Program, is_random
from .order import ordered

_JOINS = frozenset({torch.ops.aten.reshape.default, torch.ops.aten.cat.default})


@dataclass(frozen=True, slots=True)
class LaunchEarly:
    """Move each collective behind the last value that it needs. Exact: only the order changes.

    Gathers of stored parameters are launched where the one before them is first needed, so that few are held at once.

    Args:
        prefetch: Whether a gather of a stored parameter is launched while the one before it is in use.
        cheap: If a collective needs at most this many calls in all (a count of valid tokens), they go first too.
    """

    cheap: int = 8
    prefetch: bool = True

    def __call__(self, program: Program) -> Program:
        """The program in another order."""
        early, ahead = self._early(program), _ahead(program) if self.prefetch else {}

        def rank(node: fx.Node, place: int, inputs: tuple[int, ...]) -> tuple[int, ...]:
            return inputs if node in early else ahead.get(node, (place,))

        order = ordered(program.graph, rank)
        return program if order == list(program.graph.nodes) else program.copy(order)[0]

    def _early(self, program: Program) -> set[fx.Node]:
        early: set[fx.Node] = set()
        for node in program.graph.nodes:
            if _is_prefetched(node):
                continue
            if node.target in collectives.COLLECTIVES and node.target not in collectives.SENDS_NOTHING:
                early |= {node, *self._cheap_inputs(node), *_flattening(node)}
        return early

    def _cheap_inputs(self, node: fx.Node) -> Iterable[fx.Node]:
        """All that the collective needs, if that is little; random numbers are drawn in the order of the program."""
        found: dict[fx.Node, None] = {}
        stack = [node]
        while stack:
            for near in stack.pop().all_input_nodes:
                if near.op == "call_function" and near not in found:
                    found[near] = None
                    stack.append(near)
            if len(found) > self.cheap or any(map(is_random, found)):
                return ()
        return found


def _is_prefetched(node: fx.Node) -> bool:
    return node.target is collectives.all_gather and bool(node.meta.get("regather"))


def _ahead(program: Program) -> dict[fx.Node, tuple[int, ...]]:
    """Gathers of stored parameters, with what they join: each just before the first use of the one before it.

    The first one of a backward waits until it is needed: by then the forward has let go of its own.
    """
    place = {node: i for i, node in enumerate(program.graph.nodes)}
    gathers = [node for node in program.graph.nodes if _is_prefetched(node)]
    needed = [min((place[user] for user in node.users), default=place[node]) for node in gathers]
    found: dict[fx.Node, tuple[int, ...]] = {}
    for index, node in enumerate(gathers):
        same = index and _phase(gathers[index - 1]) == _phase(node)
        before = needed[index - 1] - 1 if same else place[node]
        for member in (node, *_flattening(node)):
            found[member] = (min(before, place[member]),)
    return found


def _phase(gather: fx.Node) -> object:
    return gather.meta.get("again")


def _flattening(node: fx.Node) -> set[fx.Node]:
    """The calls that join the values of a bucket."""
    found, stack = set[fx.Node](), [node]
    while stack:
        for near in stack.pop().all_input_nodes:
            if near.target in _JOINS and near not in found and len(near.users) == 1:
                found.add(near)
                stack.append(near)
    return found
