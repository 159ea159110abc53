"""One process of one peer: builds it, then runs steps when `run.py` asks for them."""

import ctypes
import gc
import os
import time
import traceback
from itertools import cycle, pairwise
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from .peers import PEERS, takes_global_batch
from .workloads import BATCHES, WORKLOADS

WARM_UP = 6  # the last of them sees the parameters after 5 updates: its loss is the one compared


def status_mib(key: str) -> float:
    """`VmRSS:`, or `VmHWM:` (its peak), of this process in MiB."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024


def reset_peak() -> None:
    """Give freed memory back to the system and let `VmHWM` start again from the present RSS."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def loopback_bytes() -> int:
    """Bytes that all processes of this machine have sent over loopback, TCP/IP headers included."""
    with open("/proc/net/dev") as lines:
        return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


def serve(pipe: Connection, name: str, workload: str) -> None:
    """Warm up and report, then answer each number n with the times of n steps, until None comes."""
    dist.init_process_group("gloo")
    rank, world, work = dist.get_rank(), dist.get_world_size(), WORKLOADS[workload]
    batches = [work.batch(i) for i in range(BATCHES)]
    if not takes_global_batch(name):
        batches = [tuple(t.chunk(world)[rank].clone() for t in batch) for batch in batches]
    turns = cycle(batches)
    reset_peak()
    start_mib = status_mib("VmRSS:")
    step = PEERS[name](work)

    def run(n: int) -> tuple[list[float], torch.Tensor]:
        dist.barrier()
        marks = [time.perf_counter()]
        for _ in range(n):
            loss = step(*next(turns))
            marks.append(time.perf_counter())
        return [after - before for before, after in pairwise(marks)], loss.detach().clone()

    seconds, loss = run(WARM_UP)
    dist.all_reduce(loss)
    first_peak = status_mib("VmHWM:") - start_mib
    pipe.send({"warm_up_s": seconds, "loss": loss.item() / world, "first_peak_mib": first_peak})
    reset_peak()
    while (n := pipe.recv()) is not None:
        dist.barrier()
        before = loopback_bytes()
        seconds, _ = run(n)
        dist.barrier()
        sent = (loopback_bytes() - before) / n / world
        pipe.send({"seconds": seconds, "sent": sent, "peak_mib": status_mib("VmHWM:") - start_mib})


def main(pipe: Connection, name: str, workload: str, rank: int, environment: dict[str, str]) -> None:
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, environment["BENCH_DTYPE"]))
    try:
        serve(pipe, name, workload)
    except BaseException:  # the border of the process: run.py decides what a failed peer means
        pipe.send({"error": traceback.format_exc()})
    os._exit(0)  # no tear-down of the process group: a peer may have failed on one rank only
