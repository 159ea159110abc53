"""What the tests of trust run on every rank."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import meshstep as ms


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def model_and_optimizer(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 96), nn.GELU(), nn.Linear(96, 4)).to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def rows(i: int, place: int, count: int = 4, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The rows of step i for one place along the axis of the batch."""
    generator = torch.Generator().manual_seed(10 * i + place)
    return torch.randn(count, 8, generator=generator, dtype=dtype), torch.randint(4, (count,), generator=generator)


def flip(tensor: Any, index: tuple[int, ...], bit: int) -> None:
    """Turn one bit of one element of this rank's part."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    with torch.no_grad():
        words = local.detach().view(torch.int32)
        words[index] ^= 1 << bit


def flipped_bit(who: int, kind: str) -> tuple[int, str]:
    """Train; before the fourth step one bit of one rank's state turns. The step that says so, and what it says."""
    model, optimizer = model_and_optimizer()
    mesh, plan, place = None, None, dist.get_rank()
    if kind == "tensor parallel":
        mesh, place = ms.Mesh(dp=2, tp=2), dist.get_rank() // 2
        plan = ms.plans.data_parallel("dp") + ms.plans.tensor_parallel({"0": "colwise", "2": "rowwise"}, "tp")
    step = ms.compile(backend="eager", mesh=mesh, plan=plan, check_every=2)(train_step)
    for i in range(8):
        if i == 3 and dist.get_rank() == who:
            if kind == "optimizer state":
                flip(optimizer.state[model[0].weight]["exp_avg_sq"], (17, 3), 3)
            else:
                flip(model[0].weight, (17, 3), 22)
        try:
            step(model, optimizer, *rows(i, place))
        except ms.VerifyError as error:
            return i, str(error)
    return -1, "nothing was said"


def other_cached_program() -> tuple[int, str]:
    """In the fourth call rank 1 passes a flag of which both ranks have a program: nothing is compiled."""
    model, optimizer = model_and_optimizer()

    def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, twice: bool) -> Tensor:
        return train_step(model, optimizer, x * 2 if twice else x, y)

    step = ms.compile(backend="eager", check_every=2)(scaled)
    for i, flag in enumerate([False, False, True, bool(dist.get_rank()), False, False, False]):
        try:
            step(model, optimizer, *rows(i, dist.get_rank()), flag)
        except ms.RankMismatchError as error:
            return i, str(error)
    return -1, "nothing was said"


def bad_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    hidden = model(x)
    loss = F.cross_entropy(hidden, y) + torch.log(hidden.square()).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def where_it_goes_bad(kind: str) -> tuple[str, bool]:
    """Rank 1 has a row that makes a value infinite or not a number; and whether nothing was changed."""
    model, optimizer = model_and_optimizer(torch.float64)
    step = ms.compile(backend="eager")(bad_step)
    x, y = rows(0, dist.get_rank(), dtype=torch.float64)
    step(model, optimizer, x, y)
    if dist.get_rank() == 1:
        x[2, 5] = {"argument": float("nan"), "overflow": 1e308, "none": 1.0}[kind]
    before = [p.detach().clone() for p in model.parameters()]
    found = step.find_non_finite(model, optimizer, x, y)
    same = all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    return str(found), same


def unlike_surroundings() -> None:
    """A script of its own: other numbers of threads and seeds of hashes are right, other rows are refused in time."""
    ms.init()
    rank = dist.get_rank()
    torch.set_num_threads(1 + rank)
    model, optimizer = model_and_optimizer(torch.float64)
    plain, its = model_and_optimizer(torch.float64)
    step = ms.compile(backend="eager")(train_step)
    worst = 0.0
    for i in range(4):
        x, y = (
            torch.cat(parts) for parts in zip(*(rows(i, place, dtype=torch.float64) for place in (0, 1)), strict=True)
        )
        want = train_step(plain, its, x, y)
        found = step(model, optimizer, *rows(i, rank, dtype=torch.float64))
        worst = max(worst, abs(found.item() - want.item()))
    print("right" if worst < 1e-12 else f"off by {worst}", torch.get_num_threads(), hash("a"), flush=True)
    began = time.monotonic()
    try:
        step(model, optimizer, *rows(9, rank, 4 - rank, torch.float64))
    except ms.RankMismatchError as error:
        print(f"{time.monotonic() - began:.1f}\n{error}", flush=True)
        raise SystemExit(3) from None


if __name__ == "__main__":
    unlike_surroundings()
