"""Puts the nodes of a graph into another order."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx


def sort_nodes(graph: fx.Graph, rank: Callable[[fx.Node, int, tuple], tuple]) -> bool:
    """Sort the calls, each after what it uses; whether anything moved.

    Args:
        graph: The graph, changed in place; its nodes may stand in any order.
        rank: From a node, its place so far and the greatest rank among its inputs (`(-1,)` if it has none) to the
            rank that it wants; it gets at least that of its inputs.
    """
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    ranks: dict[fx.Node, tuple] = {}
    for node in _after_inputs(nodes):
        inputs = max((ranks[n] for n in node.all_input_nodes), default=(-1,))
        ranks[node] = max(inputs, rank(node, place[node], inputs)) if node.op == "call_function" else (-1,)
    depth = {node: i for i, node in enumerate(_after_inputs(nodes))}
    calls = [node for node in nodes if node.op == "call_function"]
    ordered = sorted(calls, key=lambda node: (ranks[node], depth[node]))
    output = next(node for node in nodes if node.op == "output")
    for node in ordered:
        output.prepend(node)
    return ordered != calls


def _after_inputs(nodes: list[fx.Node]) -> list[fx.Node]:
    """The nodes in program order, but each after all that it uses."""
    done: dict[fx.Node, None] = {}
    for root in nodes:
        stack = [root]
        while stack:
            node = stack[-1]
            missing = [n for n in node.all_input_nodes if n not in done]
            if missing:
                stack.extend(reversed(missing))
            else:
                done.setdefault(stack.pop(), None)
    return list(done)
