"""What the checks of a call cost: steps with all of them and without any, one after the other, on two ranks.

    python -m bench.checks [--workload gpt_small] [--steps 200] [--runs 3] [--backend eager]

Without: arguments are bound, the tensors of modules and optimizers taken, and the program run, as if nothing could ever
change. With: the call as users make it, which also sees that types, Python values, modes and state are those that the
program was compiled for. Compared are medians, and what a call spends outside of the program by itself, which other
work on the machine disturbs less. `check_every` adds one comparison of all replicated state every so many calls.
"""

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import meshstep as ms
from meshstep.arguments import bind_call
from meshstep.runtime.execute import LocalExecutor

from .workloads import WORKLOADS

WARM_UP = 8


def rank(index: int, port: int, given: argparse.Namespace) -> None:
    """One process."""
    os.environ |= {"RANK": str(index), "WORLD_SIZE": "2", "LOCAL_RANK": str(index), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    ms.init()
    work = WORKLOADS[given.workload]
    model = work.build()
    optimizer = work.optimizer(model.parameters())

    @ms.compile(backend=given.backend, check_every=10**9)
    def step(model, optimizer, x, y):
        loss = model(x, y)
        loss.backward()
        if work.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x, y = (t.chunk(2)[index].clone() for t in work.batch(0))
    seen: dict[str, Any] = {}
    called = LocalExecutor.__call__

    def noted(self: LocalExecutor, leaves: list, inputs: list) -> object:
        seen["call"], began = (self, leaves, inputs), time.perf_counter()
        found = called(self, leaves, inputs)
        seen["inside"] = time.perf_counter() - began
        return found

    LocalExecutor.__call__ = noted  # type: ignore[method-assign]
    for _ in range(WARM_UP):
        step(model, optimizer, x, y)
    executor, _, inputs = seen["call"]
    bound = step._cache._entries[-1].guards._quick
    outside: tuple[list[float], list[float]] = ([], [])

    def unchecked() -> None:
        began = time.perf_counter()
        call = bind_call(step._signature, (model, optimizer, x, y), {})
        executor(call.leaves, bound.tensors(bound.take(), call.leaves))
        outside[0].append(time.perf_counter() - began - seen["inside"])

    def checked() -> None:
        began = time.perf_counter()
        step(model, optimizer, x, y)
        outside[1].append(time.perf_counter() - began - seen["inside"])

    for run in range(given.runs):
        times = _interleaved(given.steps, unchecked, checked)
        off, on = map(statistics.median, outside)
        for found in outside:
            found.clear()
        if index == 0:
            share = 100 * (on - off) / statistics.median(times[0])
            print(
                f"run {run + 1}, {given.steps} steps each: {_told(*times)}; outside of the program {off * 1e3:.3f} and "
                f"{on * 1e3:.3f} ms a call: {share:+.2f} %", flush=True,
            )  # fmt: skip
    on = statistics.median(times[1])
    checks = _seconds(lambda i: executor.replicas.check(f"bench/{i}", inputs), 10)
    size = sum(t.nbytes for t in inputs) / 2**20
    if index == 0:
        print(
            f"one comparison of {size:.1f} MiB of state: {checks * 1e3:.2f} ms; every 1000 calls "
            f"{100 * checks / 1000 / on:.4f} % of a step", flush=True,
        )  # fmt: skip
    dist.barrier()


def _interleaved(steps: int, one: Callable[[], object], other: Callable[[], object]) -> tuple[list[float], list[float]]:
    """Seconds of both; which of the two comes first alternates, and ranks start together."""
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(steps):
        for which in (i % 2, 1 - i % 2):
            dist.barrier()
            began = time.perf_counter()
            (one, other)[which]()
            times[which].append(time.perf_counter() - began)
    return times


def _told(off: list[float], on: list[float]) -> str:
    """Medians, and the quarter of the steps that others on the machine disturbed least."""
    a, b = statistics.median(off), statistics.median(on)
    quick, quick_on = statistics.quantiles(off, n=4)[0], statistics.quantiles(on, n=4)[0]
    return (
        f"median without checks {a * 1e3:.3f} ms, with {b * 1e3:.3f} ms ({100 * (b / a - 1):+.2f} %); "
        f"lower quartile {quick * 1e3:.3f} and {quick_on * 1e3:.3f} ms ({100 * (quick_on / quick - 1):+.2f} %)"
    )


def _seconds(call: Callable[[int], object], times: int) -> float:
    found = []
    for i in range(times):
        began = time.perf_counter()
        call(i)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def main() -> None:
    """Start two ranks."""
    parser = argparse.ArgumentParser(description="What the checks of a call cost.")
    parser.add_argument("--workload", default="gpt_small", choices=sorted(WORKLOADS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--backend", default="eager")
    given = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(rank, (port, given), nprocs=2)


if __name__ == "__main__":
    main()
