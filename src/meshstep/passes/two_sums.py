"""Variance and mean by two sums, which torch's CPU kernels compute several times faster than both at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..ir.infer import infer
from ..ir.program import Program, call, prune
from ..ir.types import TensorType

aten = torch.ops.aten
_MEAN_OP = aten.var_mean.correction


@dataclass(frozen=True, slots=True)
class TwoSums:
    """Write `var_mean` of real numbers as sums, where it is computed on a CPU op by op. Exact up to rounding.

    Measured, torch 2.13, one core, f32[16, 16, 32, 32] over all dims but channels: 1,300 us at once, 210 us by sums.
    """

    def __call__(self, program: Program) -> Program:
        """The program without `var_mean` on CPU."""
        if not any(map(_is_slow, program.graph.nodes)):
            return program
        found, _ = program.copy()
        for node in list(found.graph.nodes):
            if _is_slow(node):
                _replace(found.graph, node)
        prune(found.graph)
        return found


def _is_slow(node: fx.Node) -> bool:
    if node.target is not _MEAN_OP:
        return False
    given: Any = node.args[0]
    type_: TensorType = given.meta["type"]
    return type_.device == "cpu" and not type_.dtype.is_complex and type_.dtype.itemsize >= 4


def _replace(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_before(node):
        both = _Sums(graph, node).run()
    for user in list(node.users):
        user.replace_all_uses_with(both[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)


class _Sums:
    def __init__(self, graph: fx.Graph, node: fx.Node) -> None:
        self.graph, self.node = graph, node

    def run(self) -> tuple[fx.Node, fx.Node]:
        """Variance and mean."""
        x: Any = self.node.args[0]
        shape, keep = x.meta["type"].shape, bool(self.node.kwargs.get("keepdim", False))
        given: Any = self.node.args[1] if len(self.node.args) > 1 else self.node.kwargs.get("dim")
        dims = _dims(given, len(shape))
        count = math.prod(shape[d] for d in dims)
        correction: Any = self.node.kwargs.get("correction")
        mean = self.emit(aten.div.Tensor, self.emit(aten.sum.dim_IntList, x, dims, True), count)
        away = self.emit(aten.sub.Tensor, x, mean)
        squares = self.emit(aten.sum.dim_IntList, self.emit(aten.mul.Tensor, away, away), dims, keep)
        variance = self.emit(aten.div.Tensor, squares, max(0, count - (1 if correction is None else correction)))
        return self.last(variance, 0), self.last(mean if keep else self.emit(aten.squeeze.dims, mean, dims), 1)

    def emit(self, op: Any, *args: Any) -> fx.Node:
        new = call(self.graph, op, args, type=infer(op, args, {}), source=self.node.meta["source"])
        new.meta.update({key: self.node.meta[key] for key in ("module", "backward") if key in self.node.meta})
        return new

    def last(self, value: fx.Node, index: int) -> fx.Node:
        """A value that takes the place of an output."""
        value.meta["layout"] = self.node.meta["layout"][index]
        return value


def _dims(given: Sequence[int] | None, ndim: int) -> list[int]:
    return [d % ndim for d in given] if given else list(range(ndim))
