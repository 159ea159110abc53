"""Runs a local program on this rank, value by value: nothing is compiled, written or thrown away. For looking at it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from ..ir import collectives
from ..ir.collectives import COLLECTIVES, axis_of
from ..ir.program import Program
from .simulate import run_collective, run_node, without_autocast
from .world import device_mesh, world


def run_here(program: Program, inputs: Sequence[Tensor]) -> dict[fx.Node, Any]:
    """Every value of a program on this rank; all ranks call it.

    Args:
        program: A program partitioned along every axis of its mesh.
        inputs: This rank's tensor of each slot.
    """
    values = {node: [tensor] for node, tensor in zip(program.placeholders, inputs, strict=True)}
    with torch.no_grad(), without_autocast():
        for node in program.graph.nodes:
            if node.op == "call_function":
                known = node.target in COLLECTIVES
                values[node] = [_communicate(node, values, program) if known else run_node(node, values, 0)]
    return {node: value for node, (value,) in values.items()}


def _communicate(node: fx.Node, values: Mapping[fx.Node, Sequence[Any]], program: Program) -> Tensor:
    """A collective computed from the parts of all ranks along its axis, as `simulate` does."""
    axis = axis_of(node.target, node.args)
    place = program.mesh.coordinate(world().rank)[axis]
    if node.target is collectives.axis_index:
        return torch.tensor(place, device=node.args[1])  # type: ignore[arg-type]
    own = values[node.args[0]][0].contiguous()  # type: ignore[index]
    if node.target is collectives.axis_slice or program.mesh[axis] == 1:
        parts = [own] * program.mesh[axis]
    else:
        parts = [torch.empty_like(own) for _ in range(program.mesh[axis])]
        dist.all_gather(parts, own, group=device_mesh(program.mesh, own.device.type).get_group(axis))
    return run_collective(node.target, parts, place, node.args)
