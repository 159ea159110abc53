"""Devices by name: what a rank can do and hold.

The figures are the makers' peaks, of dense bf16 products, of memory, and of one direction of the links within a node;
no program reaches them, and the latency of a collective is assumed. Predictions made of them are for comparing plans.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..errors import InputError
from . import cost

LATENCY = 20.0  # us, of a collective within a node: assumed


@dataclass(frozen=True, slots=True)
class Hardware(cost.Hardware):
    """What a rank can do and hold.

    Args:
        name: Its name in the table.
        title: Its name for people.
        source: Where the figures are from.
        capacity: Bytes that a rank holds; None if that is not said.
    """

    name: str = ""
    title: str = ""
    source: str = ""
    capacity: int | None = None


def _gpu(name: str, title: str, tflops: float, gigabytes: int, memory: float, link: float) -> Hardware:
    """A GPU by Tflop/s of dense bf16, GB, TB/s of memory, GB/s of links one way, all of its data sheet."""
    return Hardware(
        latency=LATENCY,
        link=link * 1e3,
        memory=memory * 1e6,
        flops=tflops * 1e6,
        name=name,
        title=title,
        source=f"the peaks of {title}'s data sheet, and {LATENCY:g} us a collective assumed",
        capacity=gigabytes * 10**9,
    )


_ENTRIES = (
    Hardware(name="cpu", title="a CPU core with loopback", source="rough figures of one core and loopback"),
    _gpu("a100", "A100 SXM 80GB", 312, 80, 2.039, 300),
    _gpu("h100", "H100 SXM", 989, 80, 3.35, 450),
    _gpu("h200", "H200 SXM", 989, 141, 4.8, 450),
    _gpu("b200", "B200", 2250, 180, 8.0, 900),
    _gpu("mi300x", "MI300X", 1307, 192, 5.3, 448),
)
table: Mapping[str, Hardware] = MappingProxyType({entry.name: entry for entry in _ENTRIES})


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
