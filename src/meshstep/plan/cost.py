"""Rough times, good enough to choose between placements: all in microseconds.

The figures are those of one CPU core with loopback between processes; those of devices are in `hardware.py`. A named
plan pins what it promises, so that it does not hang on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from ..ir.collectives import COLLECTIVES, SENDS_NOTHING, all_reduce
from ..ir.types import TensorType
from ..layout import REPLICATE, blocks, shard_dim

aten = torch.ops.aten
_MATMULS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a rank can do.

    Args:
        latency: Of one collective, in us.
        link: Bytes per us between two ranks.
        memory: Bytes per us to and from memory.
        flops: Floating-point operations per us.
    """

    latency: float = 100.0
    link: float = 1_000.0
    memory: float = 8_000.0
    flops: float = 30_000.0

    def message_bytes(self, size: int) -> int:
        """What a link carries in ten times the latency of a collective of `size` ranks, by a tree."""
        return int(10 * self.latency * max(1.0, math.log2(size)) * self.link)

    def redistribution(
        self, type_: TensorType, source: Placement, target: Placement, size: int, stride: int = 1
    ) -> float | None:
        """Time of changing the placement of a value of (whole) `type_` over `size` ranks; None if that cannot be.

        Ranks of any `stride` are equally far here; `hardware.Hardware` knows of nodes.

        Source: cost of ring collectives, Thakur, Rabenseifner & Gropp 2005.
        """
        if source == target:
            return 0.0
        if isinstance(target, Partial):
            return None
        if source == REPLICATE:
            return 1.0 + type_.nbytes / size / self.memory
        share = type_.nbytes * (size - 1) / size
        if blocks(source) != blocks(target) and shard_dim(source) is not None and shard_dim(target) is not None:
            return self.latency + share / self.link + 1.0 + type_.nbytes / size / self.memory  # gathered, then sliced
        if isinstance(source, Partial):
            return self.latency + (2 if target == REPLICATE else 1) * share / self.link
        return self.latency + (share if target == REPLICATE else share / size) / self.link

    def computation(
        self, op: object, inputs: Sequence[TensorType], outputs: Sequence[TensorType | None], shrink: int
    ) -> float:
        """Time of one op on 1/`shrink` of its work; of a collective along another axis too."""
        if op in COLLECTIVES and op not in SENDS_NOTHING:
            sent = max(t.nbytes for t in (*inputs, *outputs) if t is not None) / shrink
            return self.latency + (2 if op is all_reduce else 1) * sent / self.link
        moved = sum(t.nbytes for t in (*inputs, *outputs) if t is not None)
        work = 2 * outputs[0].numel * inputs[-1].shape[-2] if op in _MATMULS and outputs[0] else 0
        return max(moved / self.memory, work / self.flops) / shrink


_ACCELERATOR = Hardware(latency=10.0, link=100_000.0, memory=2_000_000.0, flops=200_000_000.0)


def usual(device_type: str) -> Hardware:
    """What is assumed of a device if nothing is said: of a CPU a core with loopback, else an accelerator of today."""
    return Hardware() if device_type == "cpu" else _ACCELERATOR


def shrinks(placements: Sequence[Placement | None], size: int) -> int:
    """Into how many parts the work of a rule is split."""
    return size if any(p is not None and shard_dim(p) is not None for p in placements) else 1
