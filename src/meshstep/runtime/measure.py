"""Measures what this machine can do, in well under a minute."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import InputError
from ..plan.hardware import Hardware

SMALL, LARGE = 2**8, 2**22  # elements of f32 that are reduced: latency, bandwidth
_DTYPES = {"cpu": (torch.float64, torch.bfloat16), "cuda": (torch.float64, torch.bfloat16, torch.float16)}


def measure(name: str = "this", *, device: str = "cpu", ranks: int = 2) -> Hardware:
    """What a rank on this machine can do, with the number of threads that torch has now.

    If process groups exist, the collective is measured over all ranks, which then must all call this; if not, over
    `ranks` processes that are started for it, by loopback, on a CPU; a GPU then keeps the latency and the bandwidth of
    memory as its link.

    Args:
        name: The name of what comes back; `hardware.register` puts it into the table.
        device: "cpu" or "cuda".
        ranks: Processes to start.

    Raises:
        InputError: There is no such device.
    """
    if device not in _DTYPES or (device == "cuda" and not torch.cuda.is_available()):
        raise InputError(f"no device {device!r} to measure", at="hardware.measure(device=...)", hint='"cpu"')
    memory, single = _memory(device), _products(torch.float32, device)
    latency, link = _link(device, ranks, memory)
    return Hardware(
        latency=latency,
        link=link,
        memory=memory,
        flops=single,
        name=name,
        title=f"this machine ({device})",
        source="a measurement of this machine",
        by_dtype=tuple((dtype, _products(dtype, device)) for dtype in _DTYPES[device]),
        capacity=_capacity(device),
        launch=_launch(device),
    )


def _time_us(run: Callable[[], object], device: str, times: int) -> float:
    """Of one run, in us: the lower quartile, as what else the machine does only adds; the first two are left out."""
    found = []
    for _ in range(times + 2):
        began = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.quantiles(found[2:], n=4)[0] * 1e6


def _products(dtype: torch.dtype, device: str) -> float:
    size = 512 if device == "cpu" else 8192
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / _time_us(lambda: a @ b, device, 9)


def _memory(device: str) -> float:
    """By a sum of two tensors that no cache holds: three are moved."""
    size = 2**23 if device == "cpu" else 2**28
    a, b, out = (torch.ones(size, device=device) for _ in range(3))
    return 3 * a.nbytes / _time_us(lambda: torch.add(a, b, out=out), device, 9)


def _launch(device: str) -> float:
    a = torch.ones(8, device=device)

    def run() -> None:
        for _ in range(100):
            torch.add(a, a)

    return _time_us(run, device, 9) / 100


def _capacity(device: str) -> int:
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _link(device: str, ranks: int, memory: float) -> tuple[float, float]:
    """Latency of a collective, and bytes per us."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        return _collective(device)
    if device == "cuda":
        return 8.4, memory
    return _by_processes(ranks)


def _collective(device: str) -> tuple[float, float]:
    """By all_reduces of the default group, the same on all ranks."""
    found = []
    for size, times in ((SMALL, 200), (LARGE, 15)):
        x = torch.zeros(size, device=device)
        found.append(_time_us(lambda x=x: dist.all_reduce(x), device, times))  # type: ignore[misc]
    agreed = torch.tensor(found, dtype=torch.float64, device=device)
    dist.all_reduce(agreed)
    size = dist.get_world_size()
    small, large = (agreed / size).tolist()
    sent = 2 * (LARGE - SMALL) * 4 * (size - 1) / size
    return small, sent / max(large - small, 1e-3)


def _by_processes(ranks: int) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", f"import sys, {__name__} as m; m.one_of(*sys.argv[1:])"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        started = [
            subprocess.Popen([*command, str(r), str(ranks), f"{folder}/store"], env=environment, stdout=subprocess.PIPE)
            for r in range(ranks)
        ]
        outputs = [process.communicate()[0] for process in started]
    for process in started:
        if process.returncode:
            raise InputError(f"a rank that measured the link ended with {process.returncode}", at="hardware.measure()")
    latency, link = json.loads(outputs[0])
    return latency, link


def one_of(rank: str, size: str, file: str) -> None:
    """What one of the started processes does; prints what it found."""
    limit = timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=int(rank), world_size=int(size), timeout=limit)
    print(json.dumps(_collective("cpu")))
    dist.destroy_process_group()
