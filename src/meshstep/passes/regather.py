"""Gathers a stored parameter again for the backward, so that it need not be held since the forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import fx

from ..ir import collectives
from ..ir.program import Program, append, is_part, prune

aten = torch.ops.aten

# What is computed from a gathered value alone and costs no more than moving it: computed again from the new one.
CHEAP = frozenset(
    {
        aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.t.default, aten.transpose.int,
        aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default,
        aten.slice.Tensor, aten.select.int, aten.clone.default, aten._to_copy.default, aten.alias.default,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Regather:
    """Give every pass over a model its own gather of a stored parameter. Exact; sends more, holds less.

    The calls of a program fall into phases: a forward, the backward after it, the next forward of an accumulation loop,
    and so on. Of those that use a gathered value, or what is cheaply made of it, the first phase keeps the gather, each
    other one gets a gather of its own. Only gathers that the plan has marked are looked at.
    """

    def __call__(self, program: Program) -> Program:
        """The program with more gathers."""
        phases, found = _phases(program), []
        for node in _marked(program):
            chain, users = _uses(node)
            found += [(node, chain, i, run) for i, run in enumerate(_by_phase(users, phases)) if i]
        if not found:
            return program
        new, copies = program.copy()
        for node, chain, number, run in found:
            again = _Again(new.graph, {copies[n] for n in chain}, copies[node], number)
            again.rewire([copies[user] for user in run])
        prune(new.graph)
        return new


def _marked(program: Program) -> list[fx.Node]:
    return [n for n in program.graph.nodes if n.target is collectives.all_gather and n.meta.get("regather")]


def _uses(gather: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """The gather with what is cheaply made of it alone, and the calls that use any of that, in program order."""
    chain, users = {gather: None}, dict[fx.Node, None]()
    for node in _users(gather):
        if node in chain:
            continue
        if node.target in CHEAP and all(n in chain for n in node.all_input_nodes):
            chain[node] = None
        else:
            users[node] = None
    return list(chain), list(users)


def _users(gather: fx.Node) -> list[fx.Node]:
    """What uses a gathered value, directly or through cheap calls, in program order."""
    found, stack = set[fx.Node](), [gather]
    while stack:
        node = stack.pop()
        for user in node.users:
            if user not in found:
                found.add(user)
                if user.target in CHEAP:
                    stack.append(user)
    return sorted(found)


def _phases(program: Program) -> dict[fx.Node, int]:
    """The number of the phase of each call; a collective stands where its value is wanted, and begins none."""
    phases: dict[fx.Node, int] = {}
    phase, backward = 0, False
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target not in collectives.COLLECTIVES and not is_part(node):
            phase += bool(node.meta.get("backward")) is not backward
            backward = bool(node.meta.get("backward"))
        phases[node] = phase
    return phases


def _by_phase(users: Sequence[fx.Node], phases: Mapping[fx.Node, int]) -> list[list[fx.Node]]:
    return [list(run) for _, run in groupby(users, key=phases.__getitem__)]


class _Again:
    """One more gather, with the cheap calls that its users need."""

    def __init__(self, graph: fx.Graph, chain: set[fx.Node], gather: fx.Node, number: int) -> None:
        self.graph, self.chain, self.gather, self.number = graph, chain, gather, number
        self.made: dict[fx.Node, fx.Node] = {}

    def rewire(self, users: Sequence[fx.Node]) -> None:
        with self.graph.inserting_before(users[0]):
            for user in users:
                for used in [n for n in user.all_input_nodes if n in self.chain]:
                    user.replace_input_with(used, self._copy(used, users[0]))

    def _copy(self, node: fx.Node, before: fx.Node) -> fx.Node:
        if node not in self.made:
            args, kwargs = fx.node.map_arg(
                (node.args, node.kwargs), lambda n: self._copy(n, before) if n in self.chain else n
            )
            new = append(self.graph, "call_function", node.target, args, kwargs, node.name)
            new.meta.update(node.meta, backward=bool(before.meta.get("backward")))
            if node is self.gather:
                new.meta["again"] = node.meta.get("again", 0) + self.number
            self.made[node] = new
        return self.made[node]
