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

    Args:
        cheap: If a collective needs at most this many calls in all (a count of valid tokens), they go first too.
    """

    cheap: int = 8

    def __call__(self, program: Program) -> Program:
        """The program in another order."""
        early = self._early(program)
        order = ordered(program.graph, lambda node, place, inputs: inputs if node in early else (place,))
        return program if order == list(program.graph.nodes) else program.copy(order)[0]

    def _early(self, program: Program) -> set[fx.Node]:
        early: set[fx.Node] = set()
        for node in program.graph.nodes:
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


def _flattening(node: fx.Node) -> set[fx.Node]:
    """The calls that join the values of a bucket."""
    found, stack = set[fx.Node](), [node]
    while stack:
        for near in stack.pop().all_input_nodes:
            if near.target in _JOINS and near not in found and len(near.users) == 1:
                found.add(near)
                stack.append(near)
    return found
