"""Batch norm over groups of rows: what DistributedDataParallel computes, with no communication in the forward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshstep as ms

MESH = ms.Mesh(dp=2)
GROUPS = {nn.BatchNorm2d: ms.LocalBatchNorm(groups=2)}


def conv_net(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    norms = (nn.BatchNorm2d(c, **options) for c in (4, 3))
    first, second = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 3, 3)
    return nn.Sequential(first, next(norms), nn.ReLU(), second, next(norms), nn.Flatten(), nn.LazyLinear(4)).double()


def built(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = conv_net(**options)
    model(torch.zeros(2, 2, 6, 6, dtype=torch.float64))  # makes the lazy layer
    for norm in (model[1], model[4]):
        norm.reset_running_stats()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(i: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(i)
    return torch.randn(rows, 2, 6, 6, generator=draw, dtype=torch.float64), torch.arange(rows) % 4


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def step_of_two_replicas(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """As DistributedDataParallel, with the mean of the replicas' running statistics."""
    replicas = [copy.deepcopy(model) for _ in range(2)]
    losses = [F.cross_entropy(r(a), b) for r, a, b in zip(replicas, x.chunk(2), y.chunk(2), strict=True)]
    for loss in losses:
        loss.backward()
    for mine, *theirs in zip(model.parameters(), *(r.parameters() for r in replicas), strict=True):
        mine.grad = torch.stack([p.grad for p in theirs]).mean(0)  # type: ignore[misc]
    for mine, *theirs in zip(model.buffers(), *(r.buffers() for r in replicas), strict=True):
        mine.copy_(torch.stack(theirs).to(torch.float64).mean(0))
    optimizer.step()
    return torch.stack(losses).mean()


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}], ids=str)
def test_groups_are_replicas_with_rows_of_their_own(options: dict[str, Any]) -> None:
    (ours, our_optimizer), (theirs, their_optimizer) = built(**options), built(**options)
    compiled = ms.simulate(train_step, mesh=MESH, module_override=GROUPS)
    for i in range(5):
        loss = compiled(ours, our_optimizer, *batch(i))
        torch.testing.assert_close(
            loss, step_of_two_replicas(theirs, their_optimizer, *batch(i)), rtol=1e-12, atol=1e-12
        )
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[name], rtol=1e-11, atol=1e-12)


def test_local_statistics_send_nothing_in_the_forward() -> None:
    model, optimizer = built()
    whole = ms.compile(mesh=MESH)(train_step).lower(model, optimizer, *batch(0))
    local = ms.compile(mesh=MESH, module_override=GROUPS)(train_step).lower(model, optimizer, *batch(0))
    # the count of valid labels; then gradients, loss and running statistics in one
    assert [c.count for c in local.communication] == [1, 15], local.communication
    assert len(whole.communication) > 4


def test_an_evaluating_model_uses_the_running_statistics() -> None:
    model, _ = built()
    model.eval()
    model[1].running_mean.uniform_()

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)

    x, _ = batch(0)
    found = ms.simulate(forward, mesh=MESH, module_override=GROUPS)(model, x)
    torch.testing.assert_close(found, model(x), rtol=1e-12, atol=1e-12)


def test_one_program_serves_several_sizes() -> None:
    model, optimizer = built()
    compiled = ms.simulate(train_step, mesh=MESH, module_override=GROUPS)
    for i, rows in enumerate((8, 8, 4, 12, 16)):
        compiled(model, optimizer, *batch(i, rows))
    assert compiled.cache_info().resized >= 1, compiled.cache_info()


@pytest.mark.parametrize(
    ("override", "options", "text"),
    [
        ({nn.Conv2d: ms.LocalBatchNorm(2)}, {}, "LocalBatchNorm in the place of a Conv2d"),
        (GROUPS, {"momentum": None}, "running statistics that are plain averages"),
        ({nn.BatchNorm2d: ms.LocalBatchNorm(3)}, {}, "8 rows in 3 groups"),
    ],
    ids=["kind", "momentum", "rows"],
)
def test_what_cannot_be_normalised_in_groups_is_refused(override: Any, options: dict[str, Any], text: str) -> None:
    model, optimizer = built(**options)
    with pytest.raises(ms.InputError, match=text):
        ms.simulate(train_step, mesh=MESH, module_override=override)(model, optimizer, *batch(0))


def test_no_groups_are_refused() -> None:
    with pytest.raises(ms.InputError, match="0 groups of rows"):
        ms.LocalBatchNorm(0)
