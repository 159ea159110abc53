"""Devices by name: what a rank can do and hold, and what that makes of an op and of a collective, in us.

Figures of the table are peaks of the makers' data sheets, for products without sparsity and one direction of a link:

* A100 SXM 80 GB: NVIDIA's data sheet 1758950 (312 Tflop/s in 16 bits, 156 as TF32, 19.5 in f32 and in f64 by tensor
  cores, 2,039 GB/s, NVLink 600 GB/s both ways); between nodes one HDR port of 200 Gb/s a GPU, as in the DGX A100.
* H100 SXM: NVIDIA's data sheet (989, 494, 67, 67 Tflop/s, 80 GB, 3.35 TB/s, NVLink 900 GB/s both ways); between nodes
  one NDR port of 400 Gb/s a GPU, as in the DGX H100.
* H200 SXM: NVIDIA's data sheet; as the H100, with 141 GB at 4.8 TB/s.
* B200: NVIDIA's HGX B200 at 1,000 W (2,250, 1,100, 80, 40 Tflop/s, 180 GB, 8 TB/s, NVLink 1.8 TB/s both ways); between
  nodes 400 Gb/s a GPU.
* MI300X: AMD's data sheet (1,307, 654, 163, 163 Tflop/s, 192 GB, 5.3 TB/s, seven Infinity Fabric links of 64 GB/s each
  way); between nodes 400 Gb/s a GPU.
* Latencies of GPUs: 8.4 us a collective, 3.4 us a hop over NVLink, 9.6 us over the network: the ring of NCCL's own
  model (`src/graph/tuning.cc`, protocol Simple), taken for RCCL too. A kernel launch of 4 us, and 70 % of the peak of
  products and 80 % of that of memory, are assumed; `measure()` has figures of the machine at hand.
* `cpu`: one core with loopback between processes: the rough figures that named plans are decided by.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from .._torch import OpOverload
from ..errors import InputError
from ..ir.collectives import COLLECTIVES, SENDS_NOTHING, all_gather, all_reduce, all_to_all, reduce_scatter
from ..ir.types import TensorType
from ..layout import REPLICATE, blocks, shard_dim
from . import cost
from .flops import flops_of_types

TERA, GIGA = 1e6, 1e3  # of something a second, in that a us


@dataclass(frozen=True, slots=True)
class Hardware(cost.Hardware):
    """What a rank can do and hold. `latency`, `link`, `memory` and `flops` (in f32) are as `cost.Hardware` has them.

    Args:
        name: Its name in the table.
        title: Its name for people.
        source: Where the figures are from.
        by_dtype: Operations per us of products, where they are not `flops`.
        capacity: Bytes that a rank holds; None if that is not said.
        hop: Of one more step of a ring within a node, in us.
        far_hop: Of one between nodes, in us.
        far_link: Bytes per us that a rank sends to another node.
        node: Ranks that a node has; None if all are in one.
        launch: Of one op, before it computes, in us.
        efficiency: The part of `flops` that products reach.
        memory_efficiency: The part of `memory` that ops reach.
    """

    name: str = ""
    title: str = ""
    source: str = ""
    by_dtype: tuple[tuple[torch.dtype, float], ...] = ()
    capacity: int | None = None
    hop: float = 0.0
    far_hop: float = 0.0
    far_link: float = math.inf
    node: int | None = None
    launch: float = 0.0
    efficiency: float = 1.0
    memory_efficiency: float = 1.0

    def __post_init__(self) -> None:
        """Check the figures.

        Raises:
            InputError: One is no positive number, or a part of more than all.
        """
        for name in ("link", "memory", "flops", "far_link", "efficiency", "memory_efficiency", "node", "capacity"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"{name} of hardware is {value}", at=f"Hardware({name}=...)", hint="more than 0")
        for name in ("latency", "hop", "far_hop", "launch"):
            if not getattr(self, name) >= 0:
                raise InputError(
                    f"{name} of hardware is {getattr(self, name)}", at=f"Hardware({name}=...)", hint="0 us or more"
                )

    def rate(self, dtype: torch.dtype) -> float:
        """Operations per us that a product of this dtype reaches."""
        return self.efficiency * dict(self.by_dtype).get(dtype, self.flops)

    def op(self, operations: float, moved: float, dtype: torch.dtype) -> float:
        """Time of an op, in us: what bounds it, and its launch.

        Args:
            operations: Floating-point operations.
            moved: Bytes to and from memory.
            dtype: Of what is computed.

        Source: the roofline model, Williams, Waterman & Patterson 2009.
        """
        bound = max(operations / self.rate(dtype), moved / (self.memory * self.memory_efficiency))
        return self.launch + bound

    def collective(self, op: object, nbytes: float, size: int, stride: int = 1) -> float:
        """Time of a collective, in us: of a ring, or for an all_reduce of a tree where that is faster.

        Args:
            op: One of the IR's collectives.
            nbytes: Of the input on one rank.
            size: Ranks along the axis.
            stride: How far apart neighbours of the axis are: the product of the sizes of the axes further inside.

        Source: Thakur, Rabenseifner & Gropp 2005; hops inside and between nodes as NCCL's `tuning.cc` counts them.
        Ranks of one node send to another one by as many ports as there are ranks of the group in it.
        """
        if op in SENDS_NOTHING or size == 1:
            return 0.0
        inside = size if self.node is None else max(1, min(size, self.node // stride))
        nodes = -(-size // inside)
        link = self.link if nodes == 1 else min(self.link if inside > 1 else math.inf, self.far_link * inside)
        whole = nbytes * size if op is all_gather else nbytes
        turns = 2 if op is all_reduce else 1
        hops = turns * ((size - nodes) * self.hop + (nodes - 1) * self.far_hop)
        ring = hops + turns * whole * (size - 1) / size / link
        if op is not all_reduce:
            return self.latency + ring
        tree = 2 * ((inside - 1) * self.hop + math.ceil(math.log2(nodes)) * self.far_hop) + 2 * whole / link
        return self.latency + min(ring, tree)

    def redistribution(
        self, type_: TensorType, source: Placement, target: Placement, size: int, stride: int = 1
    ) -> float | None:
        """As `cost.Hardware.redistribution`, with the ring and the distance of this hardware."""
        if source == target:
            return 0.0
        if isinstance(target, Partial):
            return None
        whole, part = type_.nbytes, type_.nbytes / size
        kept = self.op(0, 2 * part, type_.dtype)
        if source == REPLICATE:
            return kept
        if blocks(source) != blocks(target) and shard_dim(source) is not None and shard_dim(target) is not None:
            return self.collective(all_gather, part, size, stride) + kept
        if isinstance(source, Partial):
            return self.collective(all_reduce if target == REPLICATE else reduce_scatter, whole, size, stride)
        return self.collective(all_gather if target == REPLICATE else all_to_all, part, size, stride)

    def computation(
        self, op: object, inputs: Sequence[TensorType], outputs: Sequence[TensorType | None], shrink: int
    ) -> float:
        """Time of an op on 1/`shrink` of its work; of a collective along another axis, by its bytes alone."""
        types = [t for t in (*inputs, *outputs) if t is not None]
        if op in COLLECTIVES and op not in SENDS_NOTHING:
            turns = 2 if op is all_reduce else 1
            return self.latency + turns * max(t.nbytes for t in types) / shrink / self.link
        if is_view(op):
            return 0.0
        work = flops_of_types(op, inputs, outputs)
        return self.op(work / shrink, sum(t.nbytes for t in types) / shrink, computed_in(inputs, outputs))


def is_view(op: Any) -> bool:
    """Whether an op only gives its input another shape."""
    return isinstance(op, OpOverload) and any(
        r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns
    )


def computed_in(inputs: Sequence[TensorType], outputs: Sequence[TensorType | None]) -> torch.dtype:
    """The dtype that an op computes in: that of the first tensor of numbers with a fraction."""
    found = (t.dtype for t in (*inputs, *outputs) if t is not None and t.dtype.is_floating_point)
    return next(found, torch.float32)


def _gpu(
    name: str, title: str, tflops: tuple[float, float, float], gigabytes: int, memory: float, link: float, far: float
) -> Hardware:
    """A GPU by Tflop/s in 16 bits, f32 and f64, GB, TB/s of memory, GB/s of links one way, Gb/s between nodes."""
    half, single, double = (TERA * t for t in tflops)
    return Hardware(
        latency=8.4,
        link=link * GIGA,
        memory=memory * TERA,
        flops=single,
        name=name,
        title=title,
        source=f"the peaks of {title}'s data sheet, and latencies of NCCL's model",
        by_dtype=((torch.bfloat16, half), (torch.float16, half), (torch.float64, double)),
        capacity=gigabytes * 10**9,
        hop=3.4,
        far_hop=9.6,
        far_link=far / 8 * GIGA,
        node=8,
        launch=4.0,
        efficiency=0.7,
        memory_efficiency=0.8,
    )


_ENTRIES = (
    Hardware(name="cpu", title="a CPU core with loopback", source="rough figures of one core and loopback"),
    _gpu("a100", "A100 SXM 80GB", (312, 19.5, 19.5), 80, 2.039, 300, 200),
    _gpu("h100", "H100 SXM", (989, 67, 67), 80, 3.35, 450, 400),
    _gpu("h200", "H200 SXM", (989, 67, 67), 141, 4.8, 450, 400),
    _gpu("b200", "B200", (2250, 80, 40), 180, 8.0, 900, 400),
    _gpu("mi300x", "MI300X", (1307, 163.4, 163.4), 192, 5.3, 448, 400),
)
_table: dict[str, Hardware] = {entry.name: entry for entry in _ENTRIES}
table: Mapping[str, Hardware] = MappingProxyType(_table)


def get(name: str) -> Hardware:
    """A device of the table, whatever the case of its name.

    Raises:
        InputError: It is not there; says the nearest name.
    """
    found = table.get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), table, 1, 0.3)
        hint = repr(near[0]) if near else f"one of {', '.join(table)}"
        raise InputError(f"no device {name!r} in the hardware table", at="device", hint=hint)
    return found


def register(hardware: Hardware) -> Hardware:
    """Add a device to the table of this process, or replace the one of its name.

    Args:
        hardware: Its `name` is what `get`, `plans.auto(device=...)` and `--device` find it by.

    Raises:
        InputError: It has no name, or one that is not in lower case.
    """
    if not hardware.name or hardware.name != hardware.name.lower():
        raise InputError(
            f"a device cannot be registered as {hardware.name!r}",
            at="hardware.register(...)",
            hint='a name in lower case: Hardware(name="my-gpu", ...)',
        )
    _table[hardware.name] = hardware
    return hardware
