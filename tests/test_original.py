"""What the tests of torch's old `_spmd` saw, written anew: against the plain step on the global batch, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Mlp, built, check_exact, labels, rows, sgd, train_step
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import meshstep as ms
from meshstep.passes import Bucket, CommonSubexpressions, DeadCode, LaunchEarly, Pipeline

MESHES = [ms.Mesh(dp=2), ms.Mesh(a=2, b=2), ms.Mesh(a=2, b=2, c=2)]


def plan_for(mesh: ms.Mesh) -> ms.Plan:
    plan = ms.plans.data_parallel(mesh.axes[0])
    for axis in mesh.axes[1:]:
        plan = plan + ms.plans.data_parallel(axis)
    return plan


class Flow(nn.Module):
    """A function with two linears, as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.fc1, self.fc2 = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.first, self.second = nn.LayerNorm(6), nn.Embedding(4, 6), nn.Embedding(4, 6)
        self.register_buffer("buffer", torch.ones(6))

    def forward(self, x: Any) -> Tensor:
        return self.function(self, x)


def _baked_list(m: Flow, x: Any) -> Tensor:
    return m.fc1(x).view(list(x.shape)).reshape([x.size(0), 2, 3]).flatten(1)


def _baked_dict(m: Flow, x: Any) -> Tensor:
    sizes = {"size": (x.shape[0], x.shape[1])}
    return m.fc1(x) * torch.ones(**sizes, dtype=x.dtype)


def _parallel(m: Flow, x: Tensor) -> Tensor:
    return m.fc2(torch.relu(m.fc1(x))) + torch.tanh(m.fc1(m.fc2(x)))


def _embeddings(m: Flow, x: Tensor) -> Tensor:
    ids = (x[:, :3] > 0).long()
    return (m.first(ids) + m.second(1 - ids)).mean(1)


def _buffer_requires_grad(m: Flow, x: Tensor) -> Tensor:
    m.buffer.requires_grad_(True)
    return m.fc1(x) * m.buffer


def _arithmetic(m: Flow, x: Tensor) -> Tensor:
    y = m.fc1(x)
    scale = y.numel() // y.shape[0] + y.stride(0) - y.size(1) + y.dim()
    return y * scale / (x.shape[0] * x.shape[1]) + torch.arange(x.shape[1], dtype=x.dtype)


FLOWS: dict[str, Callable[..., Any]] = {
    "cat": lambda m, x: torch.cat([m.fc1(x), m.fc2(x)], 1),
    "cat of 100": lambda m, x: torch.cat([m.fc1(x)] * 100, 1),
    "LayerNorm": lambda m, x: m.norm(m.fc1(x)),
    "shapes in a list": _baked_list,
    "shapes in a dict": _baked_dict,
    "one after another": lambda m, x: m.fc2(torch.relu(m.fc1(x))),
    "parallel branches": _parallel,
    "expand to the rows": lambda m, x: m.fc1(x) + m.buffer.unsqueeze(0).expand(x.shape[0], -1),
    "log_softmax": lambda m, x: F.log_softmax(m.fc1(x), -1),
    "two embeddings": _embeddings,
    "full": lambda m, x: m.fc1(x) * torch.full((x.shape[0], 1), 2.0, dtype=x.dtype),
    "numel, stride, shape": _arithmetic,
    "stack": lambda m, x: torch.stack([m.fc1(x), m.fc2(x)], 1).flatten(1),
    "slice": lambda m, x: m.fc1(x)[:, 1:5:2],
    "rows sliced": lambda m, x: m.fc1(x)[1:-1],
    "a buffer that wants a gradient": _buffer_requires_grad,
}


def step_of_flow(model: Flow, optimizer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = model(x)
    loss = (y * y.detach().cos()).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss, y


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("flow", FLOWS)
def test_flows_on_meshes_of_one_to_three_axes(flow: str, mesh: ms.Mesh) -> None:
    """Every step sees other values than those that it was traced with."""
    model = built(Flow, FLOWS[flow])
    optimizer = sgd(model)
    found = ms.verify(
        step_of_flow, lambda i: ((model, optimizer, rows(i, count=16)), {}), mesh=mesh, plan=plan_for(mesh), steps=3
    )
    assert found.ok and found.max_error < 1e-12, found


def test_nll_of_log_softmax() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.nll_loss(F.log_softmax(model(x), 1), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = built(Mlp)
    optimizer = sgd(model)
    check_exact(step, lambda i: (model, optimizer, rows(i), labels(i)))


def test_a_step_without_optimizer_returns_gradients() -> None:
    def step(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
        model(x).square().sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad()
        return gradients  # type: ignore[return-value]

    model = built(Mlp)
    check_exact(step, lambda i: (model, rows(i)))


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_kernels_on_lists(kind: Any, options: dict[str, Any]) -> None:
    model = built(Mlp)
    optimizer = kind(model.parameters(), lr=0.01, **options)
    check_exact(train_step, lambda i: (model, optimizer, rows(i), labels(i)))


def test_adam_of_one_parameter_takes_one_all_reduce() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model = nn.Linear(6, 6, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    text = ms.compile(mesh=ms.Mesh(dp=2))(step).lower(model, optimizer, rows().float())
    assert [c.kind for c in text.communication] == ["all_reduce"]
    assert text.communication[0].bytes == 36 * 4


@pytest.mark.parametrize("dims", [(0, 0), (1, 1), (1, 0)])
def test_the_batch_may_be_any_dim(dims: tuple[int, int]) -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        out = model(x if dims[0] == 0 else x.transpose(0, 1))
        loss = F.mse_loss(out, y if dims[1] == 0 else y.transpose(0, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = built(Mlp)
    plain = copy.deepcopy(model)
    compiled = ms.simulate(step, mesh=ms.Mesh(dp=2), inputs={"x": Shard(dims[0]), "y": Shard(dims[1])})
    for i in range(3):
        x, y = rows(i), rows(i + 5, 4)
        given = [t if d == 0 else t.t().contiguous() for t, d in zip((x, y), dims, strict=True)]
        torch.testing.assert_close(compiled(model, sgd(model), *given), step(plain, sgd(plain), *given))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-12)
    lowered = ms.compile(mesh=ms.Mesh(dp=2), inputs={"x": Shard(dims[0]), "y": Shard(dims[1])})(step).lower(
        model, sgd(model), *given
    )
    assert all(c.kind == "all_reduce" for c in lowered.communication)  # the rows stay where they are


def test_passes_run_in_the_order_in_which_they_are_given() -> None:
    order = []

    def noted(pass_: Any) -> Any:
        class Noted:
            def __call__(self, program: Any) -> Any:
                order.append(type(pass_).__name__)
                return pass_(program)

        return Noted()

    passes = (DeadCode(), Bucket(), CommonSubexpressions(), LaunchEarly())
    step = ms.simulate(train_step, mesh=ms.Mesh(dp=2), passes=Pipeline(tuple(map(noted, passes))))
    model = built(Mlp)
    step(model, sgd(model), rows(), labels())
    assert order == ["DeadCode", "Bucket", "CommonSubexpressions", "LaunchEarly"]


# ---- steps in steps


def test_a_compiled_step_that_a_step_calls_is_a_part_of_it() -> None:
    inner = ms.simulate(train_step, mesh=ms.Mesh(dp=2))

    def twice(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return inner(model, optimizer, x, y) + inner(model, optimizer, 2 * x, y)

    def plainly(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return train_step(model, optimizer, x, y) + train_step(model, optimizer, 2 * x, y)

    model = built(Mlp)
    plain = copy.deepcopy(model)
    outer = ms.simulate(twice, mesh=ms.Mesh(dp=2))
    for i in range(3):
        torch.testing.assert_close(
            outer(model, sgd(model), rows(i), labels(i)), plainly(plain, sgd(plain), rows(i), labels(i))
        )
    assert inner.cache_info().misses == 0 and outer.cache_info().misses > 0
    torch.testing.assert_close(
        inner(model, sgd(model), rows(), labels()), train_step(plain, sgd(plain), rows(), labels())
    )
