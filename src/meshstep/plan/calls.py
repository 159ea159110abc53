"""The calls of a program as the rules see them, each kind of call looked up once."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..ir.program import Program
from ..rules import OpCall, Rule, rules_for


class Calls:
    """Rules of every call of a program for one axis.

    Args:
        program: The program.
        size: Number of ranks along the axis.
        blocks: The numbers of blocks that dims may be sharded in, besides plain shards.
    """

    def __init__(self, program: Program, size: int, blocks: frozenset[int] = frozenset()) -> None:
        """Look nothing up yet."""
        self.program, self.size, self.blocks = program, size, blocks
        self._call_of: dict[fx.Node, OpCall] = {}
        self._rules: dict[Any, tuple[Rule, ...]] = {}
        self._rules_of: dict[fx.Node, tuple[Rule, ...]] = {}
        self._tensors: dict[fx.Node, list[fx.Node]] = {}

    def call(self, node: fx.Node) -> OpCall:
        """The call of a node."""
        if node not in self._call_of:
            self._call_of[node] = OpCall.of(node.target, node.args, node.kwargs, node.meta["type"])  # type: ignore[arg-type]
        return self._call_of[node]

    def rules(self, node: fx.Node) -> tuple[Rule, ...]:
        """The rules of the call of a node; equal calls (repeated layers) are looked up once."""
        if node not in self._rules_of:
            call = self.call(node)
            key = (call.op, tuple(map(_hashable, call.arguments.values())), call.outputs)
            if key not in self._rules:
                self._rules[key] = rules_for(call, self.size, self.blocks)
            self._rules_of[node] = self._rules[key]
        return self._rules_of[node]

    def tensors(self, node: fx.Node) -> list[fx.Node]:
        """The nodes of `OpCall.tensors`, in the same order."""
        if node not in self._tensors:
            self._tensors[node] = tensor_nodes(node)
        return self._tensors[node]


def tensor_nodes(node: fx.Node) -> list[fx.Node]:
    """The nodes among a call's arguments in schema order."""
    found: list[fx.Node] = []
    for i, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        found += [v for v in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(v, fx.Node)]
    return found


def _hashable(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    return (type(value), value)  # 1, 1.0 and True are different arguments
