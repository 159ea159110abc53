"""Real processes with a gloo group, started once and shared by all tests that need them.

`pool.run(job, *args)` calls a module-level function on every rank and returns what each returned. A rank that raises
gives `RankFailure` with every traceback; one that hangs ends the pool, and the next test gets a new one.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any


class RankFailure(Exception):
    """What went wrong on each rank: a traceback, or "hung"."""

    def __init__(self, texts: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}:\n{text}" for rank, text in texts.items()))
        self.texts = texts


class Pool:
    """`size` processes that form one world."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        ours, theirs = zip(*(context.Pipe() for _ in range(size)), strict=True)
        self.pipes: Sequence[Connection] = ours
        self.processes = [
            context.Process(target=_serve, args=(pipe, rank, size, port), daemon=True)
            for rank, pipe in enumerate(theirs)
        ]
        for process in self.processes:
            process.start()
        for pipe in theirs:
            pipe.close()
        self.alive = True

    def run(self, job: Callable[..., Any], *args: Any, timeout: float = 120.0, **options: Any) -> list[Any]:
        """Call `job(*args, **options)` on every rank."""
        for pipe in self.pipes:
            pipe.send((functools.partial(job, **options), args))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < len(self.pipes):
            open_pipes = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            ready = wait(open_pipes, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                with contextlib.suppress(EOFError):
                    answers[self.pipes.index(pipe)] = pipe.recv()
                    continue
                answers[self.pipes.index(pipe)] = (False, "died")
        failures = {rank: answer[1] for rank, answer in answers.items() if not answer[0]}
        failures |= {rank: "hung" for rank in range(len(self.pipes)) if rank not in answers}
        if failures:
            self.close()
            raise RankFailure(dict(sorted(failures.items())))
        return [answers[rank][1] for rank in range(len(self.pipes))]

    def close(self) -> None:
        """End all processes."""
        self.alive = False
        for process in self.processes:
            process.kill()


def _serve(pipe: Connection, rank: int, size: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    import torch

    import meshstep

    torch.set_num_threads(1)
    meshstep.init()
    while True:
        try:
            job, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = (True, job(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
