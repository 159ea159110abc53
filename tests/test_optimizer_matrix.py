"""13 optimizers x their options x the schedules of torch.optim: 8 steps on 2 virtual ranks against plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Mlp, built, check_exact, labels, rows
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, get_swa_avg_fn

import meshstep as ms
from meshstep.capture.widened import widened

O = torch.optim  # noqa: E741
Schedule = Callable[[O.Optimizer], Any]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of schedulers, about what is called when

COMMON: list[dict[str, Any]] = [{"maximize": True}, {"foreach": True}, {"foreach": False}]
CAPTURABLE: list[dict[str, Any]] = [{"capturable": False}]
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "Adadelta": [{"rho": 0.8, "eps": 1e-5}, {"weight_decay": 0.1}, *CAPTURABLE],
    "Adafactor": [
        {"weight_decay": 0.1}, {"beta2_decay": -0.5, "eps": (1e-8, 0.1), "d": 2.0},
        {"lr": torch.tensor(0.02, dtype=torch.float64)},
    ],
    "Adagrad": [
        {"lr_decay": 0.1}, {"initial_accumulator_value": 0.2}, {"weight_decay": 0.1, "eps": 1e-4},
        {"fused": True},
    ],
    "Adam": [
        {"amsgrad": True}, {"weight_decay": 0.1}, {"betas": (0.7, 0.9), "eps": 1e-3}, {"fused": True},
        {"decoupled_weight_decay": True, "weight_decay": 0.2}, {"lr": torch.tensor(0.02, dtype=torch.float64)},
        *CAPTURABLE,
    ],
    "AdamW": [
        {"amsgrad": True}, {"weight_decay": 0.0}, {"betas": (0.7, 0.9), "eps": 1e-3}, {"fused": True},
        {"amsgrad": True, "fused": True, "maximize": True}, *CAPTURABLE,
    ],
    "Adamax": [{"betas": (0.7, 0.9), "eps": 1e-3}, {"weight_decay": 0.1}, *CAPTURABLE],
    "ASGD": [{"lambd": 0.01, "alpha": 0.5, "t0": 3}, {"weight_decay": 0.1}, *CAPTURABLE],
    "Muon": [
        {"nesterov": False}, {"momentum": 0.5, "weight_decay": 0.3}, {"ns_steps": 2},
        {"adjust_lr_fn": "match_rms_adamw"},
    ],
    "NAdam": [{"momentum_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}, *CAPTURABLE],
    "RAdam": [{"betas": (0.7, 0.9)}, {"weight_decay": 0.1, "decoupled_weight_decay": True}, *CAPTURABLE],
    "RMSprop": [{"centered": True}, {"momentum": 0.9}, {"alpha": 0.8, "eps": 1e-4, "weight_decay": 0.1}, *CAPTURABLE],
    "Rprop": [{"etas": (0.4, 1.5)}, {"step_sizes": (1e-4, 0.02)}, *CAPTURABLE],
    "SGD": [
        {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5}, {"momentum": 0.9, "nesterov": True},
        {"weight_decay": 0.1}, {"fused": True, "momentum": 0.5},
    ],
}  # fmt: skip
SCHEDULES: dict[str, Schedule] = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda i: 1 / (1 + i)),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda i: 0.9),
    "StepLR": lambda o: schedules.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [2, 5], 0.3),
    "ConstantLR": lambda o: schedules.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: schedules.LinearLR(o, 0.2, total_iters=5),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, 6, 2.0),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.001, 0.05, 3, cycle_momentum=_has_momentum(o)),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.05, total_steps=12, cycle_momentum=_has_momentum(o)),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=3), schedules.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler(
        [schedules.ConstantLR(o, 0.1, 2), schedules.ExponentialLR(o, 0.9)], o
    ),
    "SWALR": lambda o: SWALR(o, 0.001, 4),
}


def _has_momentum(optimizer: O.Optimizer) -> bool:
    """Whether torch can cycle its momentum."""
    defaults = optimizer.defaults
    return ("betas" in defaults or defaults.get("momentum", 0) > 0) and not isinstance(optimizer, O.Muon)


def make(name: str, options: dict[str, Any]) -> tuple[nn.Module, O.Optimizer]:
    """A model and two param groups with different lr; Muon takes matrices only."""
    model = built(Mlp)
    kind = getattr(O, name)
    named = [p for p in model.parameters() if p.ndim == 2 or name != "Muon"]
    first = {"params": named[:1], "lr": options.get("lr", 0.03)}
    return model, kind([first, {"params": named[1:]}], **{"lr": 0.01} | options)


def scheduled_step(model: nn.Module, optimizer: O.Optimizer, schedule: Any, x: Tensor, y: Tensor) -> Tensor:
    """As people write it: the schedule is stepped in the step."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    if schedule is not None:
        schedule.step()
    return loss


def check(model: nn.Module, optimizer: O.Optimizer, schedule: Any = None) -> None:
    check_exact(scheduled_step, lambda i: (model, optimizer, schedule, rows(i), labels(i)), steps=8, within=1e-9)


def differs(name: str, options: dict[str, Any]) -> bool:
    """Which kernel computes is ours to say: ASGD's on lists rounds its step size in another way than the other one."""
    return name == "ASGD" and options.get("foreach") is True


CASES = [
    (name, options)
    for name, own in OPTIONS.items()
    for options in [{}, *own, *(COMMON if name != "Muon" else [])]
    if not differs(name, options)
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda value: str(value))
def test_every_option(name: str, options: dict[str, Any]) -> None:
    check(*make(name, options))


def test_asgd_on_lists_is_asgd_on_single_tensors() -> None:
    found = []
    for options in ({"foreach": False}, {"foreach": True}):
        model, optimizer = make("ASGD", options)
        step: Any = ms.simulate(scheduled_step, mesh=ms.Mesh(dp=2)) if options["foreach"] else scheduled_step
        for i in range(8):
            step(model, optimizer, None, rows(i), labels(i))
        found.append([p.detach() for p in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_schedule(name: str) -> None:
    """One model on each side goes through all schedules, from the same state: a schedule compiles nothing anew."""
    wide = widened(scheduled_step, torch.float64)
    compiled = ms.simulate(wide, mesh=ms.Mesh(dp=2))
    options = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    sides = [(*make(name, options), wide), (*make(name, options), compiled)]
    for model, optimizer, step in sides:
        step(model, optimizer, None, rows(), labels())  # makes the state
    start = copy.deepcopy([(model.state_dict(), optimizer.state_dict()) for model, optimizer, _ in sides])
    for schedule, of in SCHEDULES.items():
        for (model, optimizer, step), (parameters, state) in zip(sides, copy.deepcopy(start), strict=True):
            for group in optimizer.param_groups:
                for key in ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"):
                    group.pop(key, None)
            model.load_state_dict(parameters)
            optimizer.load_state_dict(state)
            scheduled = of(optimizer)
            for i in range(8):
                step(model, optimizer, None, rows(i), labels(i))
                scheduled.step()
        for p, q in zip(sides[0][0].parameters(), sides[1][0].parameters(), strict=True):
            torch.testing.assert_close(q, p, rtol=0, atol=1e-9, msg=lambda text, of=schedule: f"{of}: {text}")
    assert compiled.cache_info().hits >= 7 * len(SCHEDULES)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_schedule_in_the_step_needs_two_programs(name: str) -> None:
    model, optimizer = make(name, {})
    schedule, step = schedules.CosineAnnealingLR(optimizer, 20), ms.simulate(scheduled_step, mesh=ms.Mesh(dp=2))
    for i in range(5):
        step(model, optimizer, schedule, rows(i), labels(i))
    assert schedule.last_epoch == 5
    assert step.cache_info().misses == 2, step.cache_info().reasons


@pytest.mark.parametrize("name", OPTIONS)
def test_a_schedule_that_waits_for_a_plateau_is_stepped_outside(name: str) -> None:
    found = []
    for compiled in (False, True):
        model, optimizer = make(name, {})
        schedule = schedules.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        step: Any = (
            ms.simulate(scheduled_step, mesh=ms.Mesh(dp=1 if name == "Muon" else 2)) if compiled else scheduled_step
        )
        for i in range(8):
            schedule.step(step(model, optimizer, None, rows(i), labels(i)))
        found.append(([g["lr"] for g in optimizer.param_groups], [p.detach().clone() for p in model.parameters()]))
    assert found[0][0] == found[1][0] and found[0][0][1] < 0.01
    for ours, theirs in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-9)


# ---- where the state lies, over ranks and in memory


PLANS = {"zero1": ms.plans.zero(1), "zero2": ms.plans.zero(2), "fsdp": ms.plans.fsdp()}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_optimizer_on_state_in_shards(name: str, plan: str) -> None:
    """With gradients that outlive the step: they are state too."""
    model, optimizer = make(name, {})
    found = ms.verify(
        scheduled_step,
        lambda i: ((model, optimizer, None, rows(i), labels(i)), {}),
        mesh=ms.Mesh(dp=2),
        plan=PLANS[plan],
        steps=4,
    )
    assert found.ok and found.max_error < 1e-12, found


class Convolutions(nn.Module):
    """No batch statistics: with them some gradients are nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 4, 3))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


def channels_last(name: str) -> tuple[nn.Module, O.Optimizer]:
    model = built(Convolutions).to(memory_format=torch.channels_last)
    return model, getattr(O, name)(model.parameters(), lr=0.01, **({"momentum": 0.9} if name == "SGD" else {}))


@pytest.mark.parametrize("way", ["simulate", "eager", "inductor"])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_kernels_take_memory_as_the_parameter_has_it(name: str, way: str) -> None:
    step: Any = (
        ms.simulate(scheduled_step, mesh=ms.Mesh(dp=2))
        if way == "simulate"
        else ms.compile(backend=way)(scheduled_step)
    )
    (plain, first), (model, second) = channels_last(name), channels_last(name)
    for i in range(4):
        if i == 2:  # state from a checkpoint that knows of no strides
            for state in second.state.values():
                state.update({k: v.contiguous().clone() for k, v in state.items() if isinstance(v, Tensor)})
        x = rows(i, 2, 6, 6).contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(
            step(model, second, None, x, labels(i)), scheduled_step(plain, first, None, x, labels(i))
        )
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=0, atol=1e-12)
        for key, value in first.state[p].items():
            torch.testing.assert_close(second.state[q][key], value, rtol=0, atol=1e-7 if value.ndim == 0 else 1e-12)
            if value.ndim:
                assert second.state[q][key].stride() == value.stride()


# ---- what is not supported, with its reason


def test_lbfgs_is_refused_with_a_reason() -> None:
    model = built(Mlp)
    step = ms.simulate(scheduled_step, mesh=ms.Mesh(dp=2))
    with pytest.raises(ms.CaptureError, match="LBFGS computes the loss as often as its value demands"):
        step(model, O.LBFGS(model.parameters()), None, rows(), labels())


def test_sparse_gradients_are_refused_with_a_reason() -> None:
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Flatten())
    for optimizer in (O.SparseAdam(model.parameters()), O.SGD(model.parameters(), 0.1)):
        step = ms.simulate(scheduled_step, mesh=ms.Mesh(dp=2))
        with pytest.raises(ms.CaptureError, match="sparse"):
            step(model, optimizer, None, labels(0, 2), labels(0, classes=6))


def test_a_plateau_in_the_step_is_refused_with_a_reason() -> None:
    def step(model: nn.Module, optimizer: O.Optimizer, schedule: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        schedule.step(loss)
        return loss

    model, optimizer = make("SGD", {})
    with pytest.raises(ms.CaptureError, match="steps by the value of a tensor"):
        ms.simulate(step, mesh=ms.Mesh(dp=2))(model, optimizer, schedules.ReduceLROnPlateau(optimizer), rows())


def test_an_optimizer_after_its_schedule_is_refused_with_a_reason() -> None:
    def step(model: nn.Module, optimizer: O.Optimizer, schedule: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        schedule.step()
        optimizer.step()
        return loss

    model, optimizer = make("SGD", {})
    schedule = schedules.StepLR(optimizer, 1)
    before = copy.deepcopy(schedule.state_dict())
    with pytest.raises(ms.CaptureError, match="steps after its scheduler"):
        ms.simulate(step, mesh=ms.Mesh(dp=2))(model, optimizer, schedule, rows())
    assert schedule.state_dict() == before and "step" not in schedule.__dict__


def test_a_rate_that_is_read_in_the_step_is_refused_with_a_reason() -> None:
    def step(model: nn.Module, schedule: Any, x: Tensor) -> Any:
        return model(x).mean(), schedule.get_last_lr()[0]

    model, optimizer = make("SGD", {})
    with pytest.raises(ms.CaptureError, match="would be that of the first call"):
        ms.simulate(step, mesh=ms.Mesh(dp=2))(model, schedules.StepLR(optimizer, 1), rows())


# ---- optimizers of others


class Lion(O.Optimizer):
    """Chen et al., Symbolic Discovery of Optimization Algorithms (arXiv 2302.06675)."""

    def __init__(
        self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.1
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["average"] = torch.zeros_like(p)
                average, (first, second) = state["average"], group["betas"]
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(torch.sign(average * first + p.grad * (1 - first)), alpha=-group["lr"])
                average.lerp_(p.grad, 1 - second)


class Factored(O.Optimizer):
    """Second moments by rows and columns, with a warm-up that depends on its own count of steps."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["count"] = torch.zeros((), dtype=p.dtype)
                    state["moments"] = [torch.zeros(n, dtype=p.dtype, device=p.device) for n in ()]
                    for d in range(p.ndim):
                        state[f"moment_{d}"] = p.new_zeros([n if e == d else 1 for e, n in enumerate(p.shape)])
                    del state["moments"]
                state["count"] += 1
                scale = torch.ones_like(p)
                for d in range(p.ndim):
                    others = [e for e in range(p.ndim) if e != d]
                    square = p.grad.square().mean(others, keepdim=True) if others else p.grad.square()
                    state[f"moment_{d}"].mul_(0.9).add_(square, alpha=0.1)
                    scale *= state[f"moment_{d}"]
                warm = torch.clamp(state["count"] / 4, max=1.0)
                p.sub_(group["lr"] * warm * p.grad / (scale ** (0.5 / p.ndim) + 1e-8))


@pytest.mark.parametrize("kind", [Lion, Factored])
def test_an_optimizer_of_others_with_a_schedule(kind: type[O.Optimizer]) -> None:
    model = built(Mlp)
    optimizer = kind([{"params": [model.fc1.weight], "lr": 0.05}, {"params": model.fc2.parameters()}], lr=0.02)  # type: ignore[call-arg]
    check(model, optimizer, SCHEDULES["SequentialLR"](optimizer))


# ---- averages of weights


@pytest.mark.parametrize(
    "options",
    [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True}, {"avg_fn": get_swa_avg_fn()}],
    ids=["swa", "ema with buffers", "by a function"],
)
def test_an_average_of_the_weights_is_kept_in_the_step(options: dict[str, Any]) -> None:
    def step(model: nn.Module, average: AveragedModel, optimizer: O.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        return loss

    model, optimizer = make("AdamW", {})
    average = AveragedModel(model, **options)
    check_exact(step, lambda i: (model, average, optimizer, rows(i), labels(i)), steps=8)
    simulated = ms.simulate(step, mesh=ms.Mesh(dp=2))
    for i in range(4):
        simulated(model, average, optimizer, rows(i), labels(i))
    assert int(average.n_averaged) == 4 and simulated.cache_info().misses == 2


def test_a_number_of_the_state_that_decides_again_compiles_again() -> None:
    class Warm(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 4)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * (0.1 if self.calls < 4 else 1.0)

    model = built(Warm)
    optimizer = O.SGD(model.parameters(), 0.1)
    check_exact(scheduled_step, lambda i: (model, optimizer, None, rows(i), labels(i)), steps=6)
    step = ms.simulate(scheduled_step, mesh=ms.Mesh(dp=2))
    for i in range(6):
        step(model, optimizer, None, rows(i), labels(i))
    reasons = step.cache_info().reasons
    assert reasons[-1] == "the answer to a question about buffer calls is now False" and len(reasons) == 3


# ---- gradient scalers


def scaled_step(
    model: nn.Module, optimizer: O.Optimizer, scaler: GradScaler, x: Tensor, y: Tensor, clip: bool = False
) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    if clip:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss


def with_overflow(i: int) -> Tensor:
    """Rows of step i; in steps 1, 5 and 6 one of the first rank's is infinite, so only that rank sees it."""
    x = rows(i)
    if i in (1, 5, 6):
        x[1, 1] = float("inf")
    return x


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {}), ("AdamW", {"fused": True}), ("SGD", {"momentum": 0.9}), ("SGD", {"fused": True}), ("NAdam", {}),
        ("Adafactor", {}),
    ],
    ids=str,
)  # fmt: skip
def test_steps_that_overflow_are_skipped_on_all_ranks(name: str, options: dict[str, Any], clip: bool) -> None:
    model, optimizer = make(name, options)
    scaler = GradScaler("cpu", growth_interval=2, init_scale=1024.0)
    check_exact(
        scaled_step, lambda i: (model, optimizer, scaler, with_overflow(i), labels(i)), steps=8, within=1e-9, clip=clip
    )


def test_the_scale_follows_the_plain_loop() -> None:
    scales = []
    for compiled in (False, True):
        model, optimizer = make("AdamW", {})
        scaler = GradScaler("cpu", growth_interval=2, init_scale=1024.0)
        step: Any = ms.simulate(scaled_step, mesh=ms.Mesh(dp=2)) if compiled else scaled_step
        scales.append([])
        for i in range(8):
            step(model, optimizer, scaler, with_overflow(i), labels(i))
            scales[-1].append((scaler.get_scale(), scaler.state_dict()["_growth_tracker"]))
    assert scales[0] == scales[1] and len({scale for scale, _ in scales[0]}) == 3
    assert all(torch.isfinite(p).all() for p in model.parameters())
