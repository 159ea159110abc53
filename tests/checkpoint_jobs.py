"""What the checkpoint tests run: training runs under one layout or another, on one process or on real ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_jobs import batch, train_step
from sharded_jobs import STYLES, my_part, whole
from torch import Tensor, nn

import meshstep as ms
from gpt import GPT

P, Mesh = ms.plans, ms.Mesh
TP = P.tensor_parallel(STYLES)
LAYOUTS: dict[str, tuple[ms.Plan | None, ms.Mesh]] = {
    "plain": (None, Mesh(dp=1)),  # PyTorch alone, in one process
    "data_parallel": (P.data_parallel(), Mesh(dp=2)),
    "zero1": (P.zero(1), Mesh(dp=2)),
    "fsdp": (P.fsdp(), Mesh(dp=4)),
    "hsdp": (P.data_parallel("replicate") + P.fsdp("shard"), Mesh(replicate=2, shard=2)),
    "fsdp x tp": (P.fsdp() + TP, Mesh(dp=2, tp=2)),
}


class Run:
    """A training run that can be saved and gone on with."""

    def __init__(self, layout: str, seed: int = 7) -> None:
        self.plan, self.mesh = LAYOUTS[layout]
        torch.manual_seed(seed)
        self.model = GPT(width=16, layers=1, heads=2, context=8, vocab=64).double()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.step: Any = train_step
        if self.plan is not None:
            self.step = ms.compile(backend="eager", plan=self.plan, mesh=self.mesh)(train_step)
        self.done = 0

    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "done": self.done}

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            parts = batch(self.done, length=8)
            if self.plan is not None:
                parts = my_part(self.mesh, self.plan, *parts)  # type: ignore[assignment]
            losses.append(self.step(self.model, self.optimizer, *parts).item())
            self.schedule.step()
            self.done += 1
        return losses

    def save(self, path: Path, **options: Any) -> Any:
        return ms.checkpoint.save(path, self.objects(), **options)

    def load(self, path: Path) -> None:
        self.done = ms.checkpoint.load(path, self.objects())["done"]


def uninterrupted() -> list[float]:
    return Run("plain").train(6)


def save_under(layout: str, path: Path) -> list[float]:
    """Three steps, a checkpoint, three more."""
    run = Run(layout)
    losses = run.train(3)
    run.save(path)
    return losses + run.train(3)


def go_on_under(layout: str, paths: dict[str, Path]) -> dict[str, list[float]]:
    """Three steps from each checkpoint, from other first values."""
    found = {}
    for name, path in paths.items():
        run = Run(layout, seed=99)
        run.load(path)
        found[name] = run.train(3)
    return found


def load_between_calls(layout: str, path: Path) -> list[float]:
    """A checkpoint read into state that lies in shards already."""
    run = Run(layout, seed=99)
    run.train(2)
    run.load(path)
    return run.train(3)


def in_the_background(layout: str, path: Path) -> list[float]:
    """Training goes on, and changes the tensors, while they are written."""
    run = Run(layout)
    run.train(3)
    handle = run.save(path, asynchronous=True)
    run.train(3)
    handle.wait()
    other = Run(layout, seed=99)
    other.load(path)
    return other.train(3)


def dropout(path: Path, plan: ms.Plan) -> tuple[list[float], list[float]]:
    """Masks go on as they would have."""
    mesh = Mesh(dp=dist.get_world_size())

    def noisy(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        loss = F.dropout(model(x), 0.5).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def made(seed: int) -> tuple[Any, nn.Module, Any]:
        torch.manual_seed(seed)
        model = nn.Linear(8, 8).double()
        return (
            ms.compile(backend="eager", plan=plan)(noisy),
            model,
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        )

    x = my_part(mesh, plan, torch.arange(64.0, dtype=torch.float64).reshape(8, 8) / 64)[0]
    step, model, optimizer = made(1)
    for _ in range(3):
        step(model, optimizer, x)
    ms.checkpoint.save(path, step)
    want = [step(model, optimizer, x).item() for _ in range(3)]
    again, other, other_optimizer = made(2)
    ms.checkpoint.load(path, {"model": other, "optimizer": other_optimizer, "step": again})
    return want, [again(other, other_optimizer, x).item() for _ in range(3)]


def export(path: Path, layout: str) -> dict[str, Tensor]:
    """A file that plain PyTorch reads."""
    run = Run(layout)
    run.train(2)
    ms.checkpoint.save(path, run.model)
    state = whole(dict(run.model.state_dict()))
    other = Run(layout, seed=99)
    other.train(1)
    ms.checkpoint.load(path, other.model)
    again = whole(dict(other.model.state_dict()))
    assert all(torch.equal(again[name], value) for name, value in state.items())
    return state


def failing_rank(path: Path) -> str:
    """Rank 1 cannot write: all ranks are told, and what was there is still good."""
    run = Run("fsdp" if dist.get_world_size() == 4 else "zero1")
    run.train(1)
    run.save(path)
    if dist.get_rank() == 1:
        run.objects = lambda: {"model": run.model, "optimizer": run.optimizer, "done": 1, "bad": Refusing()}  # type: ignore[method-assign]
    try:
        run.save(path)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = "no error"
    other = Run("zero1", seed=99)
    other.load(path)
    assert other.done == 1
    return said


class Refusing:
    """Cannot say what it is."""

    def state_dict(self) -> dict[str, Any]:
        raise OSError("no space left")


def save_until_killed(path: str) -> None:
    """Save again and again; the process is killed in the middle of one."""
    run = Run("plain")
    run.train(1)
    while True:
        run.save(Path(path))
        run.train(1)
        print(run.done, flush=True)


def kill_in(stage: str, path: str) -> None:
    """Die as `kill -9` has it, in the middle of a save."""
    from meshstep.checkpoint import files

    run = Run("plain")
    run.train(2)
    run.save(Path(path))
    run.train(2)
    replace = os.replace

    def die(*args: Any) -> Any:
        if stage == "moving" and args[0] != files.temporary(Path(path)):
            return replace(*args)  # the old one makes room; dead before the new one takes it
        if stage == "manifest":
            (args[0] / files.MANIFEST).write_text('{"version": ')
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    owner, name = {"writing": (files, "digests"), "manifest": (files, "write_manifest"), "moving": (os, "replace")}[
        stage
    ]
    setattr(owner, name, die)
    run.save(Path(path))
