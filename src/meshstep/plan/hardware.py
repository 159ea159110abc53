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
from .cost import Hardware

LATENCY = 20.0  # us, of a collective within a node: assumed
GB, GIB = 10**9, 2**30


@dataclass(frozen=True, slots=True)
class Device:
    """What a rank runs on.

    Args:
        name: Its name in the table.
        title: Its name for people.
        hardware: Its times.
        memory: Bytes that it holds; None if that is not said.
        source: Where the figures are from.
    """

    name: str
    title: str
    hardware: Hardware
    memory: int | None
    source: str


def _gpu(name: str, title: str, tflops: float, memory: float, bandwidth: float, link: float, source: str) -> Device:
    """A device from its data sheet: Tflop/s of dense bf16, GB, TB/s of memory, GB/s of links in one direction."""
    hardware = Hardware(latency=LATENCY, link=link * 1e3, memory=bandwidth * 1e6, flops=tflops * 1e6)
    return Device(name, title, hardware, int(memory * GB), f"peaks of {source}; {LATENCY:g} us a collective assumed")


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            Device("cpu", "a CPU core with loopback", Hardware(), None, "rough figures of one core and loopback"),
            _gpu("a100", "A100 SXM 80GB", 312, 80, 2.039, 300, "NVIDIA's A100 data sheet"),
            _gpu("h100", "H100 SXM", 989, 80, 3.35, 450, "NVIDIA's H100 data sheet"),
            _gpu("h200", "H200 SXM", 989, 141, 4.8, 450, "NVIDIA's H200 data sheet"),
            _gpu("b200", "B200", 2250, 180, 7.7, 900, "NVIDIA's DGX B200 data sheet"),
            _gpu("mi300x", "MI300X", 1307, 192, 5.3, 448, "AMD's MI300X data sheet"),
        )
    }
)


def device(name: str) -> Device:
    """A device of the table.

    Raises:
        InputError: It is not there; says the nearest name.
    """
    found = DEVICES.get(name.lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), DEVICES, 1, 0.3)
        hint = repr(near[0]) if near else f"one of {', '.join(DEVICES)}"
        raise InputError(f"no device {name!r} in the hardware table", at="device", hint=hint)
    return found
