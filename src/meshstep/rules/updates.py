"""Optimizer updates are elementwise: a parameter, its gradient and its state are sharded alike."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..ir.types import TensorType
from ..ir.updates import BY_OP
from ..layout import REPLICATE, shard
from .rule import Entry, OpCall, Rule


def update(call: OpCall) -> Iterator[Rule]:
    """Any dim of the parameter; the step counter and the hyper-parameters are whole."""
    shape = call["param"].shape

    def place(type_: TensorType | None, dim: int):
        return type_ and (shard(dim) if type_.shape == shape else REPLICATE)

    for dim in range(len(shape)):
        yield Rule(tuple(place(t, dim) for t in call.tensors), tuple(place(o, dim) for o in call.outputs))


TABLE: dict[torch._ops.OpOverload, Entry] = {op: Entry(update) for op in BY_OP}
