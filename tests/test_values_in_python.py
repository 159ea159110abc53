"""What needs the value of a tensor is refused in our words, at the user's line; what only looks so works."""

from __future__ import annotations

import inspect

import pytest
import torch
from models import Mlp, built, labels, rows, train_step
from torch import nn

import meshstep as ms

MESH = ms.Mesh(dp=2)


def squares(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def split_at(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return torch.tensor_split(x, places, 1)[0].sum()


def distribution(x: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Normal(x, 1.0).log_prob(x).sum()


def line_of(function: object) -> str:
    lines, first = inspect.getsourcelines(function)  # type: ignore[arg-type]
    return f"test_values_in_python.py:{first + len(lines) - 1}"


def refused(function, *args):
    with pytest.raises(ms.CaptureError) as caught:
        ms.compile(mesh=MESH)(function).lower(*args)
    return caught.value


def test_a_kernel_that_reads_a_tensor():
    error = refused(split_at, torch.randn(4, 6), torch.tensor([2, 4]))
    assert error.what == "a tensor's value is needed in Python (.item(), float(), bool(), `if` on a tensor)"
    assert error.at == line_of(split_at)


def test_the_checks_of_a_distribution():
    error = refused(distribution, torch.randn(4, 6))
    assert (error.what, error.hint) == (
        "a distribution checks its arguments, which takes their values",
        "validate_args=False",
    )
    assert error.at == line_of(distribution)


def test_another_error_of_the_step_stays_what_it_is():
    def wrong(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match=r"^mine$"):
        ms.compile(mesh=MESH)(wrong).lower(torch.randn(4, 6))


def test_a_distribution_that_does_not_check():
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Normal(x, 1.0, validate_args=False).log_prob(x + 1).sum()

    x = torch.randn(4, 6, dtype=torch.float64)
    assert ms.simulate(step, mesh=MESH)(x).item() == pytest.approx(step(x).item(), abs=1e-12)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forward_derivatives():
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(lambda t: t.sin() * t.sum(1, keepdim=True), (x,), (torch.ones_like(x) * 0.3,))[1].sum()

    x = torch.randn(4, 6, dtype=torch.float64)
    assert ms.simulate(step, mesh=MESH)(x).item() == pytest.approx(step(x).item(), abs=1e-12)


# ---- guards: what was compiled in, and what makes a program anew


def misses(step):
    return step.cache_info().misses


def test_a_hook_that_is_added_later_counts():
    model = nn.Linear(4, 2).double()

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(model(x).sum(), [model.weight])[0]

    simulated, x = ms.simulate(step, mesh=MESH), torch.randn(4, 4, dtype=torch.float64)
    first = simulated(model, x)
    model.weight.register_hook(lambda grad: grad * 3)
    torch.testing.assert_close(simulated(model, x), first * 3)
    assert misses(simulated) == 2


def test_a_parameter_that_is_tied_or_dropped_later_counts():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    model, x = Two().double(), torch.randn(4, 4, dtype=torch.float64)
    step = ms.simulate(lambda model, x: model(x).sum(), mesh=MESH)
    step(model, x)
    model.b.weight = model.a.weight
    assert step(model, x).item() == pytest.approx(model(x).sum().item())
    model.b.bias = None
    assert step(model, x).item() == pytest.approx(model(x).sum().item())
    assert misses(step) == 3


def test_autocast_and_the_default_dtype_count():
    model, x = nn.Linear(4, 4), torch.randn(4, 4)
    step = ms.simulate(lambda model, x: model(x) * torch.ones(4), mesh=MESH)
    assert step(model, x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(step(model, x), model(x) * torch.ones(4))
    torch.set_default_dtype(torch.float64)
    try:
        assert step(model, x).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert misses(step) == 3


def test_a_learning_rate_that_becomes_zero_is_followed():
    model, x = nn.Linear(4, 4).double(), torch.randn(4, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    simulated = ms.simulate(squares, mesh=MESH)
    simulated(model, optimizer, x)
    optimizer.param_groups[0]["lr"] = 0.0
    before = model.weight.detach().clone()
    simulated(model, optimizer, x)
    assert torch.equal(model.weight, before)


def test_one_tensor_as_two_arguments():
    step = ms.simulate(lambda a, b: (a * b).sum(), mesh=MESH)
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    assert step(x, x).item() == pytest.approx((x * x).sum().item())
    assert step(x, y).item() == pytest.approx((x * y).sum().item())


def test_a_partial_argument_is_refused():
    from torch.distributed.tensor import Partial

    step = ms.compile(mesh=MESH, inputs={"x": Partial()})(lambda x: x.sum())
    with pytest.raises(ms.LayoutError) as caught:
        step.lower(torch.ones(4))
    assert str(caught.value) == (
        "a partial argument\n  at   argument x\n  try  Shard(dim) or Replicate(): reduce it first"
    )


def test_a_buffer_of_truth_values_is_verified_too():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("mask", torch.tensor([True, False, True, True]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.mask

    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = ms.verify(squares, lambda i: ((model, optimizer, torch.ones(4, 4) * (i + 1)), {}), mesh=MESH, steps=2)
    assert found.ok and found.values["buffer"] == 1


def test_a_call_like_the_last_one_is_not_looked_at_closely(monkeypatch) -> None:
    """What is seen then must hold all the same: the other tests of this file change one thing after such a call."""
    from meshstep.runtime.signature import Guards

    model = built(Mlp)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    step = ms.simulate(train_step, mesh=ms.Mesh(dp=2))
    for i in range(3):
        step(model, optimizer, rows(i), labels(i))
    monkeypatch.setattr(Guards, "_bound", lambda *_: pytest.fail("looked at closely"))
    for i in range(3):
        step(model, optimizer, rows(i), labels(i))
    monkeypatch.undo()
    parameter, before = model.fc1.bias, step.cache_info().misses
    model.fc1._parameters["bias"] = None
    del optimizer.state[parameter]
    group = optimizer.param_groups[0]
    group["params"] = [p for p in group["params"] if p is not parameter]
    del parameter
    assert step(model, optimizer, rows(), labels()).isfinite()
    assert step.cache_info().misses == before + 1
