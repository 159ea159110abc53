"""Every optimizer of torch.optim against itself in plain eager mode: two param groups, 8 steps, float64."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Mlp, built, check_exact, labels, rows, train_step
from torch import Tensor, nn
from torch.optim import lr_scheduler

import meshstep as ms
from meshstep.capture.widened import widened

O = torch.optim  # noqa: E741
MakeOptimizer = Callable[[Iterable[nn.Parameter]], O.Optimizer]

OPTIMIZERS: dict[str, tuple[type[O.Optimizer], dict[str, Any]]] = {
    "Adadelta": (O.Adadelta, {"lr": 0.5}),
    "Adagrad": (O.Adagrad, {}),
    "Adagrad from a start value": (O.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.01}),
    "Adam": (O.Adam, {}),
    "Adam amsgrad maximize": (O.Adam, {"amsgrad": True, "maximize": True}),
    "Adam by foreach": (O.Adam, {"foreach": True}),
    "Adam with a tensor lr": (O.Adam, {"lr": torch.tensor(0.01, dtype=torch.float64)}),
    "AdamW": (O.AdamW, {"weight_decay": 0.3}),
    "AdamW amsgrad": (O.AdamW, {"amsgrad": True, "betas": (0.8, 0.95), "eps": 1e-4}),
    "Adamax": (O.Adamax, {}),
    "ASGD": (O.ASGD, {"t0": 3, "lambd": 0.01}),
    "NAdam": (O.NAdam, {}),
    "NAdam decoupled": (O.NAdam, {"decoupled_weight_decay": True, "maximize": True}),
    "RAdam over the switch at step 5": (O.RAdam, {}),
    "RAdam decoupled": (O.RAdam, {"decoupled_weight_decay": True}),
    "RMSprop": (O.RMSprop, {}),
    "RMSprop centered momentum": (O.RMSprop, {"centered": True, "momentum": 0.9}),
    "Rprop": (O.Rprop, {}),
    "SGD": (O.SGD, {}),
    "SGD momentum dampening": (O.SGD, {"momentum": 0.9, "dampening": 0.3}),
    "SGD nesterov": (O.SGD, {"momentum": 0.9, "nesterov": True}),
    "SGD maximize": (O.SGD, {"momentum": 0.5, "maximize": True}),
    "SGD fused": (O.SGD, {"momentum": 0.5, "fused": True}),
}


def two_groups(model: nn.Module, kind: type[O.Optimizer], options: dict[str, Any]) -> O.Optimizer:
    """Weights and biases apart, with different lr and weight decay."""
    options = {"lr": 0.01} | options
    weights, biases = ([p for p in model.parameters() if (p.ndim > 1) is wide] for wide in (True, False))
    decay = {"weight_decay": 0.2} if "weight_decay" in kind(biases).defaults else {}
    return kind([{"params": weights, "lr": 0.03, **decay}, {"params": biases}], **options)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_equals_its_plain_loop(name: str) -> None:
    model = built(Mlp)
    optimizer = two_groups(model, *OPTIMIZERS[name])
    check_exact(train_step, lambda i: (model, optimizer, rows(i), labels(i)), steps=8, within=1e-9)


def test_muon_orthogonalizes_in_bfloat16_and_is_compared_without_its_rounding() -> None:
    model = built(nn.Linear, 6, 4, bias=False)
    optimizer = O.Muon(model.parameters(), lr=0.02)
    check_exact(train_step, lambda i: (model, optimizer, rows(i), labels(i)), steps=8, within=1e-9)


def test_muon_in_one_precision_is_not_the_muon_that_trains() -> None:
    """The negative control: what is compared is widened, what runs is not."""
    model, other = built(nn.Linear, 6, 4, bias=False), built(nn.Linear, 6, 4, bias=False)
    for trained, step in ((model, train_step), (other, ms.simulate(train_step, mesh=ms.Mesh(dp=1)))):
        step(trained, O.Muon(trained.parameters(), lr=0.02), rows(0), labels(0))
    torch.testing.assert_close(model.weight, other.weight, rtol=1e-12, atol=0)
    wide = built(nn.Linear, 6, 4, bias=False)
    widened(train_step, torch.float64)(wide, O.Muon(wide.parameters(), lr=0.02), rows(0), labels(0))
    assert (wide.weight - model.weight).abs().max() > 1e-6


@pytest.mark.parametrize("name", ["AdamW", "SGD momentum dampening", "NAdam", "RMSprop", "Adamax"])
def test_float32_parameters_stay_close(name: str) -> None:
    model = built(Mlp).float()
    optimizer = two_groups(model, *OPTIMIZERS[name])
    result = ms.verify(
        train_step,
        lambda i: ((model, optimizer, rows(i).float(), labels(i)), {}),
        mesh=ms.Mesh(dp=2),
        steps=8,
        dtype=None,
    )
    assert result.ok and result.max_error < 1e-5, str(result)


def test_a_users_own_optimizer_may_use_its_lr_like_a_number() -> None:
    class Signs(O.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr, "momentum": 0.8})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in filter(lambda p: p.grad is not None, group["params"]):
                    buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                    buffer.mul_(group["momentum"]).add_(p.grad, alpha=1 - group["momentum"])
                    p.add_(buffer.sign(), alpha=-group["lr"])
                    p.addcmul_(buffer, buffer, value=-group["lr"])
                    p.addcdiv_(buffer, buffer.abs() + 1, value=-2 * group["lr"])
                    p.sub_(p, alpha=0.01 * group["lr"])

    model = built(Mlp)
    optimizer = Signs(model.parameters(), 0.01)
    check_exact(train_step, lambda i: (model, optimizer, rows(i), labels(i)))


def test_state_loaded_before_the_first_compiled_call_is_used() -> None:
    model = built(Mlp)
    optimizer = O.AdamW(model.parameters(), 0.01)
    for i in range(3):
        train_step(model, optimizer, rows(i), labels(i))
    fresh = built(Mlp, seed=4)
    fresh.load_state_dict(model.state_dict())
    loaded = O.AdamW(fresh.parameters(), 0.5)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    check_exact(train_step, lambda i: (fresh, loaded, rows(i + 3), labels(i + 3)), within=1e-12)
    step = ms.simulate(train_step, mesh=ms.Mesh(dp=2))
    for i in range(3):
        step(fresh, loaded, rows(i), labels(i))
    assert step.cache_info().misses == 1  # there is no cold step


def test_a_parameter_without_gradient_gets_no_state_and_keeps_its_value() -> None:
    def step(model: Mlp, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(F.linear(torch.tanh(x), model.fc2.weight[:, :6], model.fc2.bias), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = built(Mlp)
    optimizer = two_groups(model, O.AdamW, {})
    result = check_exact(step, lambda i: (model, optimizer, rows(i), labels(i)))
    assert result.values["optimizer state"] == 6


# ---- schedules


def check_schedule(
    make_optimizer: MakeOptimizer, make_schedule: Callable[[O.Optimizer], Any], misses: int = 2, within: float = 1e-9
) -> None:
    """20 steps of both, the schedule after each; parameters must agree, and no step may compile again."""
    plain = built(Mlp)
    model = copy.deepcopy(plain)
    simulated = ms.simulate(train_step, mesh=ms.Mesh(dp=2))
    for trained, step in ((plain, train_step), (model, simulated)):
        optimizer = make_optimizer(trained.parameters())
        schedule = make_schedule(optimizer)
        for i in range(20):
            step(trained, optimizer, rows(i), labels(i))
            schedule.step()
    for ours, theirs in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=0, atol=within)
    assert simulated.cache_info().misses == misses, simulated.cache_info().reasons


SCHEDULES: dict[str, Callable[[O.Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 5, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda i: 1 / (1 + i)),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=5), lr_scheduler.ExponentialLR(o, 0.9)], [5]
    ),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=21),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("kind", [O.AdamW, O.SGD])
def test_parameters_follow_a_schedule_without_a_recompile(kind: type[O.Optimizer], name: str) -> None:
    options = {"momentum": 0.9} if kind is O.SGD else {}
    check_schedule(lambda p: kind(p, lr=0.02, **options), SCHEDULES[name])  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: O.Adam(p, 0.01, amsgrad=True, weight_decay=0.1),
        lambda p: O.Adamax(p, 0.01),
        lambda p: O.NAdam(p, 0.01),
        lambda p: O.RAdam(p, 0.01),
        lambda p: O.RMSprop(p, 0.01, momentum=0.9),
        lambda p: O.SGD(p, 0.01, momentum=0.9, nesterov=True),
    ],
)
def test_a_momentum_that_cycles_is_a_live_number(make: MakeOptimizer) -> None:
    check_schedule(make, SCHEDULES["one cycle"])


def test_a_hyper_parameter_that_is_not_live_compiles_again_and_is_right() -> None:
    class Decay:
        def __init__(self, optimizer: O.Optimizer) -> None:
            self.group, self.count = optimizer.param_groups[0], 0

        def step(self) -> None:
            self.count += 1
            self.group["weight_decay"] = 0.1 * (self.count // 10)

    check_schedule(lambda p: O.AdamW(p, 0.02, weight_decay=0.0), Decay, misses=3)


@pytest.mark.parametrize("made", ["before the first call", "after it"])
def test_a_schedule_does_not_warn_of_a_wrong_order(made: str) -> None:
    model = built(Mlp)
    optimizer = O.SGD(model.parameters(), 0.1)
    step = ms.simulate(train_step, mesh=ms.Mesh(dp=2))
    if made == "after it":
        step(model, optimizer, rows(), labels())
    schedule = lr_scheduler.StepLR(optimizer, 1)
    step(model, optimizer, rows(), labels())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step()
