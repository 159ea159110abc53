"""Computes, and sends, equal values once."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..ir.program import Program


@dataclass(frozen=True, slots=True)
class CommonSubexpressions:
    """Merge equal calls on equal arguments, collectives too. Random ops are never equal. Exact."""

    def __call__(self, program: Program) -> Program:
        """The program with one call for each value."""
        new, _ = program.copy()
        first: dict[Hashable, fx.Node] = {}
        merged = 0
        for node in new.graph.nodes:
            if node.op != "call_function" or _is_random(node):
                continue
            key = (node.target, _key(node.args), _key(node.kwargs))
            if first.setdefault(key, node) is not node:
                node.replace_all_uses_with(first[key])
                new.graph.erase_node(node)
                merged += 1
        return new if merged else program


def _is_random(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _key(value: Any) -> Hashable:
    if isinstance(value, dict):
        return tuple((k, _key(v)) for k, v in sorted(value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    return value if isinstance(value, fx.Node) else (type(value), repr(value))  # 0.0 and -0.0, 1 and True differ
