"""A run that goes on where it was: after a fault, on fewer ranks, or when it was asked to stop.

meshstep run -n 2:4 --restarts 2 examples/resume.py --folder runs/resume
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshstep as ms


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def batch(i: int, rows: int = 12) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
    return x, x.sin().cumsum(1)


def main(arguments: list[str] | None = None, before_step: Callable[[int], None] = lambda _: None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="runs/resume")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=60.0)
    given = parser.parse_args(arguments)

    world = ms.init(timeout=given.timeout)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = ms.compile(mesh=ms.Mesh(dp=world.size), plan=ms.plans.fsdp(), backend="eager")(train_step)

    saver = ms.checkpoint.Rotating(given.folder, every=given.every)
    state = {"model": model, "optimizer": optimizer}
    with saver.stoppable():
        for i in range(saver.resume(state), given.steps):
            before_step(i)
            x, y = (t.chunk(world.size)[world.rank] for t in batch(i))
            loss = step(model, optimizer, x, y)
            if world.rank == 0:
                print(f"step {i} of {world.size} ranks: {loss.item():.15f}", flush=True)
            if saver.after(i + 1, state):
                break


if __name__ == "__main__":
    main()
