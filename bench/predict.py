"""What the cost model predicts of a step, against what two gloo ranks of this machine measure."""

import argparse
import gc
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from .run import names
from .workloads import WORKLOADS, Workload

DEFAULT = ["gpt_small", "gpt_narrow", "wide_mlp", "convnet_sync", "big_embedding", "llama_tiny"]
RANKS = 2
APART = 1.15  # plans whose measured times differ by more must be predicted in the same order


class Row(NamedTuple):
    """One plan: predicted and measured ms of a step and bytes at most, what lies there between steps included."""

    plan: str
    ms: tuple[float, float]
    peak: tuple[int, int]


def plans(work: Workload) -> dict[str, tuple]:
    """Each with its mesh."""
    import meshstep as ms

    dp, tp = ms.Mesh(dp=RANKS), ms.Mesh(tp=RANKS)
    found = {"data_parallel": (ms.plans.data_parallel(), dp), "zero1": (ms.plans.zero(1), dp)}
    found["fsdp"] = (ms.plans.fsdp(), dp)
    return found | ({"tensor_parallel": (ms.plans.tensor_parallel(work.tp_plan), tp)} if work.tp_plan else {})


def allocated(run: Callable[[], object]) -> int:
    """The most bytes that torch's allocator has handed out at once, above what there was."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return max(held, default=0)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """The step of every workload; clipping is left out."""
    loss = model(x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def rows(work: Workload, hardware: object, seconds: float) -> list[Row]:
    """Predict and measure every plan; their steps take turns."""
    import meshstep as ms

    runs, predicted, peaks, times = {}, {}, {}, {}
    for name, (plan, mesh) in plans(work).items():
        model = work.build()
        optimizer = work.optimizer(model.parameters())
        x, y = work.batch(0)
        if name != "tensor_parallel":
            x, y = (t.chunk(RANKS)[dist.get_rank()].clone() for t in (x, y))
        step = ms.compile(mesh=mesh, plan=plan, backend="eager")(train_step)
        for _ in range(3):
            step(model, optimizer, x, y)
        lowered = step.lower(model, optimizer, x, y)
        runs[name] = lambda step=step, args=(model, optimizer, x, y): step(*args)
        memory = lowered.memory
        predicted[name] = (lowered.cost(hardware) / 1e3, memory.peak)
        made = statistics.median(allocated(runs[name]) for _ in range(3))
        peaks[name] = memory.state + memory.arguments + int(made)
        times[name] = []
    turns = torch.tensor(0)
    end = time.monotonic() + seconds
    while not turns:
        for name, run in runs.items():
            dist.barrier()
            run()
            for _ in range(3):
                began = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - began)
        turns.fill_(time.monotonic() > end)
        dist.all_reduce(turns)
    return [
        Row(name, (predicted[name][0], 1e3 * statistics.median(times[name])), (predicted[name][1], peaks[name]))
        for name in runs
    ]


def serve(rank: int, file: str, chosen: list[str], seconds: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS)
    import meshstep as ms

    hardware = ms.hardware.measure()
    if rank == 0:
        print(hardware, flush=True)
    for name in chosen:
        found = rows(WORKLOADS[name], hardware, seconds)
        if rank == 0:
            pipe.send((name, found))
    os._exit(0)


def disorder(found: list[Row]) -> list[str]:
    """The pairs of plans that are measured apart and predicted the other way round."""
    return [
        f"{a.plan} < {b.plan}"
        for a, b in itertools.permutations(found, 2)
        if b.ms[1] > APART * a.ms[1] and b.ms[0] <= a.ms[0]
    ]


def line(workload: str, row: Row) -> str:
    time_ratio, peak_ratio = row.ms[0] / row.ms[1], row.peak[0] / row.peak[1]
    mib = [b / 2**20 for b in row.peak]
    return (
        f"{workload:14} {row.plan:16} {row.ms[0]:9.2f} {row.ms[1]:9.2f} {time_ratio:6.2f}"
        f" {mib[0]:9.2f} {mib[1]:9.2f} {peak_ratio:6.3f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.predict", description=__doc__)
    parser.add_argument("--workloads", default=",".join(DEFAULT), help="comma separated, or all")
    parser.add_argument("--seconds", type=float, default=15, help="of taking turns, a workload")
    args = parser.parse_args()
    chosen = names(args.workloads, list(WORKLOADS))
    receive, send = mp.get_context("spawn").Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(serve, (f"{folder}/store", chosen, args.seconds, send), RANKS, join=False)
        print(f"{'workload':14} {'plan':16} {'ms pred.':>9} {'measured':>9} {'ratio':>6} {'MiB pred.':>9} ", end="")
        print(f"{'measured':>9} {'ratio':>6}", flush=True)
        wrong = []
        for _ in chosen:
            while not receive.poll(1):
                context.join(timeout=0)  # raises what a rank has raised
            name, found = receive.recv()
            print(*(line(name, row) for row in found), sep="\n", flush=True)
            wrong += [f"{name}: {pair}" for pair in disorder(found)]
    print("measured more than 15 % apart and predicted the other way round:", "; ".join(wrong) or "none")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
