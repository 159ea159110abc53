"""Optimizer updates are elementwise: a parameter, its gradient and its state are sharded alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch.distributed.tensor.placement_types import Placement

from ..ir.types import TensorType
from ..ir.updates import BY_OP
from ..layout import REPLICATE, shard
from .rule import Entry, OpCall, Rule, Table


def update(call: OpCall) -> Iterator[Rule]:
    """Any dim of the parameter; the step counter and the hyper-parameters are whole."""
    shape = call["param"].shape

    def alike(types: Iterable[TensorType | None], dim: int) -> tuple[Placement, ...]:
        return tuple(shard(dim) if t and t.shape == shape else REPLICATE for t in types)

    for dim in range(len(shape)):
        yield Rule(alike(call.tensors, dim), alike(call.outputs, dim))


TABLE: Table = {op: Entry(update) for op in BY_OP}
