"""The cases of the field's reports that plans of sharded state can get wrong, under each of these plans."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshstep as ms

P, Mesh = ms.plans, ms.Mesh
TP = P.tensor_parallel({"embed": "rowwise", "up": "colwise", "down": "rowwise", "head": "colwise"})
SP = P.tensor_parallel({"up": "colwise", "down": "rowwise", "norm": "sequence"})
PLANS = {
    "zero1": (P.zero(1), Mesh(dp=2)),
    "zero2": (P.zero(2), Mesh(dp=2)),
    "fsdp": (P.fsdp(), Mesh(dp=4)),
    "hsdp": (P.data_parallel("replicate") + P.fsdp("shard"), Mesh(replicate=2, shard=2)),
    "tp": (TP, Mesh(tp=2)),
    "sp": (SP, Mesh(tp=2)),
    "fsdp x tp": (P.fsdp() + TP, Mesh(dp=2, tp=2)),
    "dp x sp": (P.data_parallel() + SP, Mesh(dp=2, tp=2)),
}
every_plan = pytest.mark.parametrize("name", PLANS)


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(32, 8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 32, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


def made(tied: bool = False, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model(tied).double()
    return model, torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **options})


def batch(i: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(i)
    x, y = (torch.randint(32, (8, 4), generator=generator) for _ in range(2))
    y[0, :3] = -100
    return x, y


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def train_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = loss_of(model, x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def verified(name: str, step: Any, objects: tuple[Any, ...], steps: int = 3) -> ms.Verification:
    plan, mesh = PLANS[name]
    return ms.verify(step, lambda i: ((*objects, *batch(i)), {}), mesh=mesh, plan=plan, steps=steps)


def lowered(name: str, step: Any, objects: tuple[Any, ...]) -> ms.Lowered:
    plan, mesh = PLANS[name]
    simulated = ms.simulate(step, mesh=mesh, plan=plan)
    simulated(*objects, *batch(0))
    return simulated.lower(*objects, *batch(0))


@every_plan
def test_case_5_halves_of_a_first_parameter_differ_and_are_those_of_one_device(name):
    from meshstep.materialize import shard_of

    plan, mesh = PLANS[name]
    plan = lowered(name, train_step, made()).plan  # with the placement of every parameter
    torch.manual_seed(5)
    with torch.device("meta"):
        module = Model()
    whole = {}
    torch.manual_seed(5)
    reference = shard_of(module, Mesh(dp=1), P.data_parallel(), 0)
    parts = []
    for rank in range(mesh.size):
        torch.manual_seed(5)
        parts.append(shard_of(module, mesh, plan, rank))
    for key, value in reference.items():
        cut = [part[key] for part in parts]
        whole[key] = sum(c.numel() for c in cut)
        if cut[0].shape != value.shape:
            assert any(not torch.equal(cut[0], c) for c in cut[1:]) or value.unique().numel() == 1, key
        known = {v.item() for v in value.flatten()}
        assert all({v.item() for v in c.flatten()} <= known for c in cut), key


@every_plan
def test_case_7_the_norm_counts_each_element_once(name):
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss_of(model, x, y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    found = verified(name, step, made())
    assert found.ok, found


def test_case_8_a_dim_that_does_not_divide():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.into, self.out = nn.Embedding(32, 6), nn.Linear(6, 5), nn.Linear(5, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.into(self.embed(x)))

    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters())
    make = lambda i: ((model, optimizer, *batch(i)), {})  # noqa: E731
    for plan, mesh in ((P.fsdp(), Mesh(dp=4)), (P.zero(1), Mesh(dp=4)), (P.fsdp() + TP_OUT, Mesh(dp=2, tp=2))):
        found = ms.verify(train_step, make, mesh=mesh, plan=plan, steps=2)
        assert found.ok, found
    with pytest.raises(ms.PlanError, match="5 input features do not divide over 2 ranks"):
        ms.verify(train_step, make, mesh=Mesh(tp=2), plan=P.tensor_parallel({"out": "rowwise"}))


TP_OUT = P.tensor_parallel({"out": "colwise", "embed": "colwise"})


@every_plan
def test_case_9_a_tied_parameter_is_one(name):
    objects = made(tied=True)
    found = verified(name, train_step, objects)
    assert found.ok, found
    names = [slot.name for slot in lowered(name, train_step, copy.deepcopy(objects)).local_program.slots]
    assert "head.weight" not in names


@every_plan
def test_case_17_gradients_of_micro_batches_are_reduced_once(name):
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        valid, total = (y != -100).sum(), x.new_zeros((), dtype=torch.float64)
        for rows, targets in zip(x.unflatten(0, (4, 2)).unbind(1), y.unflatten(0, (4, 2)).unbind(1), strict=True):
            loss = F.cross_entropy(model(rows).flatten(0, 1), targets.flatten(), reduction="sum") / valid
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    found = verified(name, step, made(), 2)
    assert found.ok, found
    model, optimizer = made()
    communication = lowered(name, step, (model, optimizer)).communication
    weight = 16 * 8 * 8
    reduced = [c for c in communication if c.kind in ("reduce_scatter", "all_reduce") and "dp" in c.axis]
    assert sum(c.bytes >= weight for c in reduced) <= 2, reduced


@every_plan
def test_case_18_state_that_was_loaded_before_the_first_call(name):
    first, trained = made()
    for i in range(2):
        train_step(first, trained, *batch(10 + i))
    model = copy.deepcopy(first)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.load_state_dict(trained.state_dict())
    found = verified(name, train_step, (model, optimizer))
    assert found.ok, found
