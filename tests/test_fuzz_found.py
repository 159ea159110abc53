"""What random programs have found, each as small as it gets."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from models import built, rows, sgd
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import meshstep as ms


class Scaled(nn.Module):
    """Two parameters of one shape whose gradients are equal, and one whose gradient is the same number everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.ones(6)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.a + self.b).sum(1).mean() + self.c.sum()


def keeping_step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss: Tensor = model(x)
    loss.backward()
    optimizer.step()
    return loss


def test_equal_gradients_that_outlive_the_step_have_memory_of_their_own():
    """A change of one, between steps, changed the other: they were one tensor."""
    for step in (ms.simulate(keeping_step, mesh=ms.Mesh(dp=2)), ms.compile(keeping_step, backend="eager")):  # type: ignore[call-overload]
        model = built(Scaled)
        optimizer = sgd(model)
        for i in range(2):
            step(model, optimizer, rows(i))
            model.a.grad.mul_(2)
            model.c.grad[0] = 5.0
            assert torch.equal(model.a.grad, torch.full((6,), 2.0, dtype=torch.float64))
            assert torch.equal(model.b.grad, torch.ones(6, dtype=torch.float64))
            assert model.c.grad.tolist() == [5.0, 1, 1, 1, 1, 1]


def test_a_group_norm_of_what_was_gathered_along_another_dim():
    """Its kernel wants its input in order of memory; the copy that torch makes for it was one of shards."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.weight = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            kept = (x[..., None] * self.scale)[:, :, 0:3]
            return F.group_norm(kept, 2, self.weight).square().mean() + self.weight.sum()

    plan = ms.plans.tensor_parallel({"scale": Shard(1), "weight": Shard(0)})
    model = built(Normed)
    args = (model, sgd(model))
    found = ms.verify(keeping_step, lambda i: ((*args, rows(i)), {}), mesh=ms.Mesh(tp=3), plan=plan, steps=2)
    assert found.ok, found
