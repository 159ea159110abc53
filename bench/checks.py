"""What the checks of a call cost: steps with all of them and without any, one after the other, on two ranks.

    python -m bench.checks [--workload gpt_small] [--steps 200] [--runs 3] [--backend eager]

Without: the compiled program on the tensors of the call, as if nothing could ever change. With: the call as users make
it (types of all arguments, state that is still what was compiled for, the seed). Compared are medians; `check_every`
adds one comparison of all replicated state every so many calls, whose time is given by itself.
"""

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import meshstep as ms
from meshstep.arguments import bind_call
from meshstep.runtime.execute import LocalExecutor
from meshstep.runtime.signature import Signature

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
    seen: dict[str, tuple] = {}
    called = LocalExecutor.__call__

    def noted(self: LocalExecutor, leaves: list, inputs: list) -> object:
        seen["last"] = (self, leaves, inputs)
        return called(self, leaves, inputs)

    LocalExecutor.__call__ = noted  # type: ignore[method-assign]
    for _ in range(WARM_UP):
        step(model, optimizer, x, y)
    LocalExecutor.__call__ = called  # type: ignore[method-assign]
    executor, leaves, inputs = seen["last"]
    call = bind_call(step._signature, (model, optimizer, x, y), {})

    def look(_: int) -> None:
        """All that is looked at in a call, without the call."""
        step._seed.begin()
        again = bind_call(step._signature, (model, optimizer, x, y), {})
        step._cache.find(Signature.of(again.spec, again.names, again.leaves), call.leaves)

    for run in range(given.runs):
        off, on, apart = _interleaved(
            given.steps, lambda: executor(leaves, inputs), lambda: step(model, optimizer, x, y)
        )
        alone = _seconds(look, 200)
        if index == 0:
            print(
                f"run {run + 1}, {given.steps} steps each: median without checks {off * 1e3:.3f} ms, with "
                f"{on * 1e3:.3f} ms ({100 * (on / off - 1):+.2f} %), of the pairs' differences {apart * 1e3:+.3f} ms "
                f"({100 * apart / off:+.2f} %); the checks alone {alone * 1e3:.3f} ms ({100 * alone / off:.2f} %)",
                flush=True,
            )
    checks = _seconds(lambda i: executor.replicas.check(f"bench/{i}", inputs), 10)
    size = sum(t.nbytes for t in inputs) / 2**20
    if index == 0:
        print(
            f"one comparison of {size:.1f} MiB of state: {checks * 1e3:.2f} ms; every 1000 calls "
            f"{100 * checks / 1000 / on:.4f} % of a step", flush=True,
        )  # fmt: skip
    dist.barrier()


def _interleaved(steps: int, one: Callable[[], object], other: Callable[[], object]) -> tuple[float, float, float]:
    """Medians of both and of the differences of pairs, in seconds.

    Which of the two comes first alternates, and ranks start together.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(steps):
        for which in (i % 2, 1 - i % 2):
            dist.barrier()
            began = time.perf_counter()
            (one, other)[which]()
            times[which].append(time.perf_counter() - began)
    differences = [b - a for a, b in zip(*times, strict=True)]
    return statistics.median(times[0]), statistics.median(times[1]), statistics.median(differences)


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
