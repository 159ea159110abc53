"""Other orders for the nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

Rank = tuple[int, ...]


def ordered(graph: fx.Graph, rank: Callable[[fx.Node, int, Rank], Rank]) -> list[fx.Node]:
    """The nodes of a graph: the inputs, the calls sorted, each after what it uses, and the output.

    Args:
        graph: The graph; its nodes may stand in any order.
        rank: From a call, its place so far and the greatest rank among its inputs (`(-1,)` if it has none) to the
            rank that it wants; it gets at least that of its inputs. Calls of equal rank keep their order.
    """
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    sound = _after_inputs(nodes)
    ranks: dict[fx.Node, Rank] = {}
    for node in sound:
        inputs = max((ranks[n] for n in node.all_input_nodes), default=(-1,))
        ranks[node] = max(inputs, rank(node, place[node], inputs)) if node.op == "call_function" else (-1,)
    calls = sorted((node for node in sound if node.op == "call_function"), key=ranks.__getitem__)
    return [*graph.find_nodes(op="placeholder"), *calls, graph.output_node()]


def reorder(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    """Put the nodes of a graph into an order."""
    for node in order[:-1]:
        order[-1].prepend(node)


def _after_inputs(nodes: Sequence[fx.Node]) -> list[fx.Node]:
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
