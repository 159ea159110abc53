"""What the multi-process tests run on every rank. Each rank gets data of its own."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import meshstep as ms
from gpt import GPT


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def batch(i: int, rows: int = 8, length: int = 16, vocab: int = 64) -> tuple[Tensor, Tensor]:
    """Batch i; targets with a different number of ignored tokens in every row."""
    generator = torch.Generator().manual_seed(100 + i)
    x, y = (torch.randint(vocab, (rows, length), generator=generator) for _ in range(2))
    for row in range(rows):
        y[row, : (row * 2 + i) % length] = -100
    return x, y


def mine(*tensors: Tensor) -> list[Tensor]:
    """This rank's rows."""
    return [t.chunk(dist.get_world_size())[dist.get_rank()].clone() for t in tensors]


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every parameter, buffer and tensor of optimizer state by name."""
    found = dict(model.state_dict())
    for index, entries in optimizer.state_dict()["state"].items():
        found |= {f"state {index} {key}": value for key, value in entries.items() if isinstance(value, Tensor)}
    return found


def worst(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The greatest absolute difference; the names must be the same."""
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


class Convolutional(nn.Module):
    """Tokens, a convolution, and batch statistics: it has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.mix = nn.Sequential(nn.Conv1d(32, 32, 3, padding=1, bias=False), nn.BatchNorm1d(32), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(x).transpose(1, 2)).transpose(1, 2))


def train_against_plain(backend: str, steps: int, kind: str = "adamw") -> dict[str, Any]:
    """Train on all ranks and, on each rank alone, plainly on the global batch; the differences."""
    torch.manual_seed(7)
    model: nn.Module = GPT(width=32, layers=2, heads=4, context=16, vocab=64)
    if kind == "convnet":
        model = Convolutional()
    model.double()
    if kind == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    plain_model, plain_optimizer = copy.deepcopy((model, optimizer))
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, steps) for o in (optimizer, plain_optimizer)]
    step = ms.compile(backend=backend)(train_step)
    losses = []
    for i in range(steps):
        x, y = batch(i)
        want = train_step(plain_model, plain_optimizer, x, y)
        found = step(model, optimizer, *mine(x, y))
        losses.append(abs(want.item() - found.item()))
        for schedule in schedules:
            schedule.step()
    return {
        "loss": max(losses),
        "state": worst(state_of(model, optimizer), state_of(plain_model, plain_optimizer)),
        "misses": step.cache_info().misses,
        "hits": step.cache_info().hits,
    }


def other_rows() -> str:
    """Rank 1 passes a row less than rank 0, in the first call."""
    step = ms.compile(backend="eager")(lambda model, x: model(x).sum())
    model = nn.Linear(4, 2)
    rows = 4 - dist.get_rank()
    try:
        step(model, torch.ones(rows, 4))
    except ms.InputError as error:
        return str(error)
    return "no error"


def other_dtype() -> str:
    """Rank 1 passes float64."""
    step = ms.compile(backend="eager")(lambda x: x.sum())
    try:
        step(torch.ones(4, dtype=torch.float64 if dist.get_rank() else torch.float32))
    except ms.InputError as error:
        return str(error)
    return "no error"


def other_flag() -> str:
    """Rank 1 has another Python flag, so its program is another one."""

    def scaled(x: Tensor, twice: bool) -> Tensor:
        return (x * 2 if twice else x).sum()

    step = ms.compile(backend="eager")(scaled)
    try:
        step(torch.ones(4), bool(dist.get_rank()))
    except ms.RankMismatchError as error:
        return str(error)
    return "no error"


def too_large_mesh() -> str:
    """The mesh has more ranks than there are processes."""
    step = ms.compile(mesh=ms.Mesh(dp=64), backend="eager")(lambda x: x.sum())
    try:
        step(torch.ones(4))
    except ms.InputError as error:
        return str(error)
    return "no error"


def other_weights() -> str:
    """Every rank has made its model from another seed."""
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(4, 2)
    step = ms.compile(backend="eager")(lambda model, x: model(x).sum())
    try:
        step(model, torch.ones(4, 4))
    except ms.RankMismatchError as error:
        return str(error)
    return "no error"


def still_works() -> float:
    """The group is whole after an error."""
    step = ms.compile(backend="eager")(lambda x: x.sum())
    return step(torch.full((2,), float(dist.get_rank() + 1))).item()


def sent_for_real() -> dict[str, Any]:
    """What a step sends: from `lower`, and counted by a profiler of the real collectives."""
    torch.manual_seed(7)
    model = GPT(width=32, layers=2, heads=4, context=16, vocab=64)
    optimizer = torch.optim.AdamW(model.parameters())
    step = ms.compile(backend="eager")(train_step)
    for i in range(2):
        step(model, optimizer, *mine(*batch(i)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(model, optimizer, *mine(*batch(2)))
    counted = sum(e.count for e in profile.key_averages() if e.key.startswith("_c10d_functional::all_reduce"))
    return {"counted": counted, "said": len(step.lower(model, optimizer, *mine(*batch(3))).communication)}


def _dropping(x: Tensor, w: Tensor) -> Tensor:
    return (F.dropout(x, 0.5) @ w + torch.randn(x.shape[0], 1, dtype=x.dtype)).square().mean()


def _dropping_arguments() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(8, 6, generator=generator).double(), torch.randn(6, 2, generator=generator).double()


def dropout_losses(backend: str) -> list[float]:
    """Three losses with dropout; every rank has another seed, that of rank 0 counts."""
    x, w = _dropping_arguments()
    torch.manual_seed(11 + dist.get_rank())
    step = ms.compile(backend=backend, inputs={"w": torch.distributed.tensor.Replicate()})(_dropping)
    return [step(*mine(x), w).item() for _ in range(3)]


def dropout_losses_of_one_rank() -> list[float]:
    """The same in one process, without a group."""
    step = ms.simulate(_dropping, mesh=ms.Mesh(dp=1))
    return [step(*_dropping_arguments()).item() for _ in range(3)]


def materialized() -> dict[str, Any]:
    """A sharded weight, as this rank sees it; every rank has another seed, that of rank 0 counts."""
    torch.manual_seed(20 + dist.get_rank())
    with torch.device("meta"):
        model = nn.Linear(32, 48)
    weight = ms.materialize(model, plan=ms.plans.fsdp()).weight
    return {
        "placements": str(weight.placements),
        "local": list(weight.to_local().shape),
        "whole": weight.full_tensor().sum().item(),
    }


def other_sizes(backend: str, sizes: tuple[int, ...]) -> dict[str, float]:
    """Batches of several sizes, which are said to change: the plain run, and programs."""
    torch.manual_seed(7)
    model = Convolutional().double()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-3) for m in (model, plain)]
    dynamic = {"x": ms.dynamic(0), "y": ms.dynamic(0)}
    step = ms.compile(backend=backend, inputs=dynamic)(train_step)
    for i, rows in enumerate(sizes):
        x, y = batch(i, rows * dist.get_world_size())
        step(model, optimizers[0], *mine(x, y))
        train_step(plain, optimizers[1], x, y)
    info = step.cache_info()
    difference = worst(state_of(model, optimizers[0]), state_of(plain, optimizers[1]))
    return {"difference": difference, "misses": info.misses, "resized": info.resized}
