"""Runs one local program on all ranks of a mesh in this process, each collective computed over the list of tensors.

The oracle: no process group, no lowering, no backend; every rank computes its own values from its own data.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Partial

from ..errors import VerifyError
from ..ir import collectives
from ..ir.collectives import COLLECTIVES, axis_of
from ..ir.program import Program
from ..layout import Layout, join, own_part, shard_dim
from ..mesh import Mesh
from ..passes.lower import IN_ORDER

_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


Watch = Callable[[fx.Node, list[Any]], Any]  # is shown a node and its value on each rank


def run_ranks(program: Program, inputs: Sequence[Sequence[Tensor]], watch: Watch | None = None) -> list[list[Tensor]]:
    """Execute a program.

    Args:
        program: A program partitioned along every axis of its mesh.
        inputs: For each rank, one tensor a slot.
        watch: Is shown every value when it is computed.

    Returns:
        For each rank, one tensor a result.
    """
    ranks = range(program.mesh.size)
    values: dict[fx.Node, list[Any]] = {}
    last = _last_uses(program)
    with torch.no_grad(), without_autocast():
        for position, node in enumerate(program.placeholders):
            values[node] = [inputs[rank][position] for rank in ranks]
        for node in program.graph.nodes:
            if node.op == "call_function":
                values[node] = _call(node, values, program.mesh)
                if watch is not None:
                    watch(node, values[node])
                for done in last.get(node, ()):
                    del values[done]
    outputs: Any = program.output_node.args[0]
    return [[values[node][rank] for node in outputs] for rank in ranks]


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """A program has the casts that autocast made while it was captured: none are made again while it runs."""
    if not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda"):
        return contextlib.nullcontext()
    return _autocast_off()


@contextlib.contextmanager
def _autocast_off() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def scatter(value: Tensor, layout: Layout, mesh: Mesh) -> list[Tensor]:
    """Each rank's part of a whole tensor."""
    places = map(mesh.coordinate, range(mesh.size))
    return [
        own_part(value, ((p, mesh[axis], place[axis]) for axis, p in layout.placements)).contiguous()
        if any(shard_dim(p) is not None for _, p in layout.placements)
        else value
        for place in places
    ]


def gather(parts: Sequence[Tensor], layout: Layout, mesh: Mesh, name: str = "value") -> Tensor:
    """The whole tensor from each rank's part.

    Raises:
        VerifyError: A value that is replicated differs between ranks.
    """
    whole = list(parts)
    for axis, placement in reversed(layout.placements):
        assert not isinstance(placement, Partial), "a partial value never leaves a program"
        groups = [mesh.group(rank, axis) for rank in range(mesh.size)]
        if shard_dim(placement) is not None:
            whole = [join([whole[r] for r in group], placement) for group in groups]
            continue
        for rank, group in enumerate(groups):
            if not _same(whole[rank], whole[group[0]]):
                raise VerifyError(f"ranks {group[0]} and {rank} hold different replicas", at=f"{name}, axis {axis!r}")
    return whole[0]


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)


def _last_uses(program: Program) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that nobody needs after it."""
    last: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        for used in (node, *node.all_input_nodes):
            last[used] = node
    found: dict[fx.Node, list[fx.Node]] = {}
    for used, user in last.items():
        found.setdefault(user, []).append(used)
    return found


def _call(node: fx.Node, values: dict[fx.Node, list[Any]], mesh: Mesh) -> list[Any]:
    ranks = range(mesh.size)
    if node.target in COLLECTIVES:
        return _collective(node, values, mesh)
    target: Any = node.target
    if target is operator.getitem or torch.Tag.nondeterministic_seeded not in target.tags:
        return [run_node(node, values, rank) for rank in ranks]
    others = []
    for rank in ranks[1:]:
        with torch.random.fork_rng():  # all ranks draw the same numbers: they share a seed
            others.append(run_node(node, values, rank))
    return [run_node(node, values, 0), *others]


def run_node(node: fx.Node, values: Mapping[fx.Node, Sequence[Any]], rank: int) -> Any:
    """What a call that is no collective gives on one rank."""
    arguments: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n][rank])
    args, kwargs = arguments
    if node.target in _STRICT_VIEWS:
        return args[0].reshape(args[1])
    if node.target in IN_ORDER:
        args = tuple(a.contiguous() if isinstance(a, Tensor) else a for a in args)
    return node.target(*args, **kwargs)  # type: ignore[operator]


_STRICT_VIEWS = frozenset({torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default})


def _collective(node: fx.Node, values: dict[fx.Node, list[Any]], mesh: Mesh) -> list[Any]:
    axis = axis_of(node.target, node.args)
    if node.target is collectives.axis_index:
        device = node.args[1]
        return [torch.tensor(mesh.coordinate(rank)[axis], device=device) for rank in range(mesh.size)]  # type: ignore[arg-type]
    parts = values[node.args[0]]  # type: ignore[index]
    return [
        run_collective(node.target, [parts[r] for r in mesh.group(rank, axis)], mesh.coordinate(rank)[axis], node.args)
        for rank in range(mesh.size)
    ]


def run_collective(op: Any, parts: Sequence[Tensor], index: int, args: Sequence[Any]) -> Tensor:
    """What one rank gets.

    Args:
        op: The collective.
        parts: The tensors of all ranks along the axis, in order.
        index: The rank's place among them.
        args: The call's arguments.
    """
    size = len(parts)
    if op is collectives.all_reduce:
        return reduce(_REDUCTIONS[args[1]], parts)
    if op is collectives.all_gather:
        return torch.cat(list(parts), args[1])
    if op is collectives.reduce_scatter:
        return reduce(_REDUCTIONS[args[2]], parts).chunk(size, args[1])[index].contiguous()
    if op is collectives.all_to_all:
        return torch.cat([part.chunk(size, args[1])[index] for part in parts], args[2])
    assert op is collectives.axis_slice
    return parts[index].chunk(size, args[1])[index].contiguous()
