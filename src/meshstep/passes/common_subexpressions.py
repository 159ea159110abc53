"""Computes, and sends, equal values once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..ir.program import Program, is_random


@dataclass(frozen=True, slots=True)
class CommonSubexpressions:
    """Merge equal calls on equal arguments, collectives too. Random ops are never equal. Exact.

    Values of different layout stay apart, even where one rank's parts are equal: zeros `f32[4]` that are whole, and
    zeros `f32[8/2]` that are a shard.
    """

    def __call__(self, program: Program) -> Program:
        """The program with one call for each value."""
        first: dict[Hashable, fx.Node] = {}
        merged: dict[fx.Node, fx.Node] = {}
        for node in program.graph.nodes:
            if node.op != "call_function" or is_random(node):
                continue
            call = (node.target, _key(node.args, merged), _key(node.kwargs, merged))
            again = (node.meta.get("again"), node.meta.get("recomputed"))  # what is made again stays apart
            key = (*call, node.meta["layout"], again)
            if first.setdefault(key, node) is not node:
                merged[node] = first[key]
        return program.copy(merged=merged)[0] if merged else program


def _key(value: Any, merged: Mapping[fx.Node, fx.Node]) -> Hashable:
    if isinstance(value, fx.Node):
        return merged.get(value, value)
    if isinstance(value, dict):
        return tuple((k, _key(v, merged)) for k, v in sorted(value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(_key(v, merged) for v in value)
    return (type(value), repr(value))  # 0.0 and -0.0, 1 and True differ
