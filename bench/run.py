"""Times peers on workloads, side by side. See README.md.

Each peer has processes of its own (one a rank), all alive together. They take turns of a few steps, so that
what else the machine does falls on all alike, and none sees another's memory, caches or settings.
"""

import os

# Before torch is imported, which reads them.
os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

import argparse
import json
import multiprocessing
import socket
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch._inductor.compile_fx  # imported once, here, so that no peer's first call pays for it

from . import peers, worker, workloads
from .report import ratios, table, verdict

Result = dict[str, object]


class PeerError(RuntimeError):
    """A peer raised, died or did not answer in time."""


class Peer:
    """The processes of one peer, and what they have shown so far."""

    def __init__(self, name: str, workload: str, cache: str, args: argparse.Namespace):
        self.world = 1 if peers.runs_alone(name) else args.ranks
        self.step_s, self.round_s, self.sent, self.first, self.last = [], [], [], [], []
        context = multiprocessing.get_context("fork")
        self.pipes, theirs = zip(*(context.Pipe() for _ in range(self.world)))
        environment = self.environment(name, cache, args.dtype)
        self.processes = [
            context.Process(target=worker.main, args=(pipe, name, workload, rank, environment), daemon=True)
            for rank, pipe in enumerate(theirs)
        ]
        for process in self.processes:
            process.start()
        for pipe in theirs:
            pipe.close()  # so that a death ends the wait for an answer

    def environment(self, name: str, cache: str, dtype: str) -> dict[str, str]:
        """What torchrun sets, and a compile cache of its own."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self.world))
        own = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/{name}", "BENCH_DTYPE": dtype}
        return sizes | own | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    def receive(self, timeout: float) -> list[dict]:
        """One answer of each rank; PeerError at the first that is an error, or at none in `timeout` s."""
        deadline, answers = time.monotonic() + timeout, {}
        while waiting := [pipe for pipe in self.pipes if pipe not in answers]:
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise PeerError(f"no answer in {timeout:.0f} s")
            for pipe in ready:
                try:
                    answers[pipe] = pipe.recv()
                except EOFError:
                    raise PeerError("died") from None
                if "error" in answers[pipe]:
                    raise PeerError(answers[pipe]["error"])
        return [answers[pipe] for pipe in self.pipes]

    def turn(self, n: int, timeout: float) -> None:
        """n recorded steps after one that only warms the caches; a step's time is its mean over the ranks."""
        for pipe in self.pipes:
            pipe.send(n + 1)
        self.last = self.receive(timeout)
        seconds = [statistics.fmean(ranks) for ranks in zip(*(answer["seconds"][1:] for answer in self.last))]
        self.step_s += seconds
        self.round_s.append(statistics.median(seconds))
        self.sent.append(self.last[0]["sent"])

    def result(self) -> Result:
        p25, p50, p75 = statistics.quantiles((1e3 * s for s in self.step_s), n=4)
        return {
            "median_ms": p50,
            "min_ms": 1e3 * min(self.step_s),
            "p25_ms": p25,
            "p75_ms": p75,
            "steps": len(self.step_s),
            "rounds_ms": [1e3 * s for s in self.round_s],
            "first_s": max(answer["warm_up_s"][0] for answer in self.first),
            "warm_up_s": max(sum(answer["warm_up_s"]) for answer in self.first),
            "sent_mib": statistics.median(self.sent) / 2**20 if self.world > 1 else None,
            "first_peak_mib": max(answer["first_peak_mib"] for answer in self.first),
            "peak_mib": max(answer["peak_mib"] for answer in self.last),
            "loss": self.first[0]["loss"],
        }

    def close(self) -> None:
        for process in self.processes:
            process.kill()


def measure(workload: str, cache: str, args: argparse.Namespace) -> dict[str, Result]:
    """Build the peers one after another, then let them take turns for `args.seconds`."""
    results: dict[str, Result] = {}
    live: dict[str, Peer] = {}
    built_by = time.monotonic() + args.limit - args.seconds

    def drop(name: str, error: PeerError) -> None:
        live.pop(name).close()
        reason = str(error).strip()
        results[name] = {"skipped": "failed: " + reason.splitlines()[-1], "detail": reason}

    for name in args.peers:
        left = built_by - time.monotonic()
        skipped = peers.reason_to_skip(name, workload)
        results[name] = {"skipped": skipped or "out of time (--limit)"}
        if skipped or left < 1:
            continue
        live[name] = Peer(name, workload, cache, args)
        try:
            live[name].first = live[name].receive(left)
        except PeerError as error:
            drop(name, error)
    end, rounds = time.monotonic() + args.seconds, 0
    while live and (time.monotonic() < end or rounds < 3):
        rounds += 1
        for name, peer in list(live.items()):
            try:
                peer.turn(args.turn, timeout=60)
            except PeerError as error:
                drop(name, error)
    for name, peer in live.items():
        results[name] = peer.result()
        peer.close()
    return results


def names(text: str, known: list[str]) -> list[str]:
    """The names in a comma separated list, or all that are known for "all"; ValueError at an unknown one."""
    chosen = known if text == "all" else text.split(",")
    if unknown := sorted(set(chosen) - set(known)):
        raise ValueError(f"unknown {', '.join(unknown)}; known: {', '.join(known)}")
    return chosen


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default=",".join(workloads.DEFAULT), help="comma separated, or all")
    parser.add_argument("--peers", default=",".join(peers.DEFAULT), help="comma separated, or all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="float64: to compare losses")
    parser.add_argument("--seconds", type=float, default=45, help="of taking turns, a workload")
    parser.add_argument("--turn", type=int, default=5, help="recorded steps of a peer before the next one")
    parser.add_argument(
        "--limit", type=float, default=400, help="seconds a workload; peers not built by then are skipped"
    )
    parser.add_argument("--out", type=Path, default=Path("bench/out/latest.json"), help="where the JSON goes")
    args = parser.parse_args()
    try:
        args.workloads = names(args.workloads, list(workloads.WORKLOADS))
        args.peers = names(args.peers, list(peers.PEERS))
    except ValueError as error:
        parser.error(str(error))
    return args


def main() -> int:
    args = arguments()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Result]] = {}
    report = {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "load_before": os.getloadavg(),
        "settings": {key: str(value) for key, value in vars(args).items()},
        "workloads": found,
    }
    for workload in args.workloads:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as cache:
            found[workload] = measure(workload, cache, args)
        print(table(workload, found[workload]))
        note = workloads.WORKLOADS[workload].note
        print(f"{note}; {time.monotonic() - began:.0f} s in all\n", flush=True)
        args.out.write_text(json.dumps(report, indent=1))
    print(ratios(found))
    print(verdict(found))
    failed = [f"{w}: {name}" for w in found for name, result in found[w].items() if "detail" in result]
    for line in failed:
        print(f"failed: {line} (details in {args.out})", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
