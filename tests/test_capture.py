"""Whatever Python a step is written in: the captured program computes what the plain step computes.

Every test runs the plain step on one device and the compiled one on 2 virtual ranks, in float64, and compares outputs,
parameters, buffers, gradients and optimizer state after every step.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Block, ConvNet, Gpt, Mlp, built, check_exact, labels, rows, sgd, train_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshstep as ms
from meshstep.errors import CaptureError

Step = Callable[..., Any]
Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Batch:
    pair: Pair
    scale: float
    more: dict


def finish(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def check_step(step: Step, model: Any = Mlp, *, steps: int = 5, within: float = 1e-12, **kwargs: Any) -> None:
    """Compare a step of (model, optimizer, x, y)."""
    model = built(model) if isinstance(model, type) else model
    optimizer = sgd(model)
    check_exact(step, lambda i: (model, optimizer, rows(i), labels(i)), steps=steps, within=within, **kwargs)


# ---- arguments and return values


def test_arguments_and_outputs_may_be_nested() -> None:
    def step(model: Mlp, optimizer: Any, batch: Batch, *, label_smoothing: float = 0.0) -> dict[str, Any]:
        logits = model(batch.pair.x) * batch.scale + batch.more["z"][0]
        loss = finish(optimizer, F.cross_entropy(logits, batch.pair.y, label_smoothing=label_smoothing))
        return {"loss": loss, "more": (logits.detach(), [batch.pair]), "batch": Batch(batch.pair, 1.0, {})}

    model = built(Mlp)
    optimizer = sgd(model)
    check_exact(
        step,
        lambda i: (model, optimizer, Batch(Pair(rows(i), labels(i)), 2.0, {"z": [rows(i + 50, 4)]})),
        label_smoothing=0.1,
    )


def test_python_values_none_and_aliases_come_back_as_in_the_plain_step() -> None:
    def step(model: Mlp, optimizer: Any, x: Tensor, y: Tensor) -> tuple:
        loss = finish(optimizer, F.cross_entropy(model(x), y))
        weight = model.fc1.weight
        return loss, None, 3, "text", weight, weight.T, weight.data[0], x, x[:4], {"empty": []}, Pair(1.5, None)

    check_step(step)
    model = built(Mlp)
    got = ms.simulate(step, mesh=ms.Mesh(dp=2))(model, sgd(model), rows(), labels())
    assert got[1:4] == (None, 3, "text") and got[9:] == ({"empty": []}, Pair(1.5, None))
    assert torch.equal(got[4], model.fc1.weight)  # the value after the update


def test_a_python_flag_chooses_the_program_that_the_plain_step_would_run() -> None:
    def step(model: Mlp, optimizer: Any, x: Tensor, y: Tensor, double: bool) -> Tensor:
        return finish(optimizer, F.cross_entropy(model(x), y) * (2 if double else 1))

    model = built(Mlp)
    optimizer = sgd(model)
    check_exact(step, lambda i: (model, optimizer, rows(i), labels(i), i % 2 == 1))


def test_a_step_may_change_its_arguments_in_place() -> None:
    def step(model: Mlp, optimizer: Any, x: Tensor, y: Tensor, memory: Tensor, scalar: Tensor) -> Tensor:
        memory.mul_(0.5).add_(x)
        scalar += x.mean()
        x[:, 0].clamp_(-1, 1)
        return finish(optimizer, F.cross_entropy(model(x + memory), y)) + scalar

    args = built(Mlp), rows(7), torch.zeros((), dtype=torch.float64)
    ours, theirs = copy.deepcopy(args), copy.deepcopy(args)
    o1, o2 = sgd(ours[0]), sgd(theirs[0])
    simulated = ms.simulate(step, mesh=ms.Mesh(dp=2))
    for i in range(5):
        x1, x2 = rows(i), rows(i)
        loss = step(ours[0], o1, x1, labels(i), *ours[1:])
        torch.testing.assert_close(simulated(theirs[0], o2, x2, labels(i), *theirs[1:]), loss, rtol=0, atol=1e-12)
        torch.testing.assert_close((x2, *theirs[1:]), (x1, *ours[1:]), rtol=0, atol=1e-12)


def test_steps_without_optimizer_may_return_gradients() -> None:
    def step(model: Mlp, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))

    model = built(Mlp)
    check_exact(step, lambda i: (model, rows(i), labels(i)))


def test_parameters_may_be_passed_without_a_module() -> None:
    def step(weight: Tensor, optimizer: Any, x: Tensor) -> Tensor:
        return finish(optimizer, (x @ weight).square().mean())

    weight = nn.Parameter(rows(3, 2, count=6))
    optimizer = torch.optim.Adam([weight], 0.1)
    check_exact(step, lambda i: (weight, optimizer, rows(i)))


# ---- modules and optimizers


def test_a_gan_trains_two_modules_by_two_optimizers() -> None:
    def step(g: nn.Module, d: nn.Module, og: Any, od: Any, z: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        loss_d = F.softplus(-d(x)).mean() + F.softplus(d(g(z).detach())).mean()
        od.zero_grad()
        loss_d.backward()
        od.step()
        og.zero_grad()
        loss_g = F.softplus(-d(g(z))).mean()
        loss_g.backward()  # leaves gradients in the discriminator
        og.step()
        return loss_d, loss_g

    g, d = built(nn.Linear, 3, 6), built(Mlp, seed=1)
    og, od = torch.optim.Adam(g.parameters(), 1e-2), torch.optim.AdamW(d.parameters(), 1e-2, betas=(0.5, 0.9))
    check_exact(step, lambda i: (g, d, og, od, rows(i, 3), rows(i)), steps=6)


def test_a_frozen_teacher_a_student_and_an_average_of_its_weights() -> None:
    def step(student: nn.Module, teacher: nn.Module, ema: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = teacher(x).softmax(-1)
        loss = finish(optimizer, F.kl_div(student(x).log_softmax(-1), target, reduction="batchmean"))
        with torch.no_grad():
            for old, new in zip(ema.parameters(), student.parameters(), strict=True):
                old.lerp_(new, 0.1)
            torch._foreach_mul_(list(ema.parameters()), 0.99)
            torch._foreach_add_(list(ema.parameters()), list(student.parameters()), alpha=0.01)
        return loss

    student, teacher, ema = built(Mlp), built(Mlp, seed=1).requires_grad_(False).eval(), built(Mlp)
    optimizer = sgd(student, momentum=0.9)
    check_exact(step, lambda i: (student, teacher, ema, optimizer, rows(i)))


def language_model_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    return finish(optimizer, F.cross_entropy(model(x).flatten(0, 1), y.flatten()))


@pytest.mark.parametrize("tied", [False, True])
def test_gpt_with_and_without_tied_embeddings(tied: bool) -> None:
    model = built(Gpt, tied=tied)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    check_exact(language_model_step, lambda i: (model, optimizer, *(labels(j, 5, classes=16) for j in (i, i + 50))))


def test_frozen_and_unused_parameters_stay_and_take_no_optimizer_state() -> None:
    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.unused = nn.Linear(6, 6).requires_grad_(False), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.frozen(x))

    model = built(Model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.3)
    result = check_exact(train_step, lambda i: (model, optimizer, rows(i), labels(i)))
    assert result.values == {"output": 1, "parameter": 8, "optimizer state": 12}  # 4 parameters have state


def test_convolution_and_batch_norm_over_the_global_batch() -> None:
    model = built(ConvNet)
    optimizer = sgd(model, momentum=0.9)
    result = check_exact(train_step, lambda i: (model, optimizer, rows(i, 2, 6, 6), labels(i)))
    assert result.values["buffer"] == 3


def test_eval_mode_uses_and_keeps_the_running_statistics() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x)

    model = built(ConvNet)
    model(rows(9, 2, 6, 6))
    model.eval()
    check_exact(step, lambda i: (model, rows(i, 2, 6, 6)))


def test_recurrent_modules_and_parametrizations() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.fc1, self.fc2 = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 5), nn.Linear(5, 4)
            nn.utils.parametrizations.weight_norm(self.fc1)
            nn.utils.parametrizations.spectral_norm(self.fc2)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(self.fc1(self.rnn(x)[0][:, -1]))

    model = built(Model)
    optimizer = sgd(model)
    check_exact(train_step, lambda i: (model, optimizer, rows(i, 3, 6), labels(i)), within=1e-11)


# ---- gradients


def test_gradients_may_outlive_the_step_and_accumulate_over_calls() -> None:
    def step(model: Mlp, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    check_step(step)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_may_be_cleared_before_the_backward(set_to_none: bool) -> None:
    def step(model: Mlp, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    check_step(step)


def test_gradients_accumulate_inside_the_step() -> None:
    def step(model: Mlp, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        total = 0
        for some_x, some_y in zip(x.chunk(4), y.chunk(4), strict=True):
            loss = F.cross_entropy(model(some_x), some_y) / 4
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    check_step(step)


@pytest.mark.parametrize("norm", [2.0, 1.0, float("inf")])
def test_gradients_are_clipped_by_norm_and_value(norm: float) -> None:
    def step(model: Mlp, optimizer: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.05, norm_type=norm)
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
        optimizer.zero_grad()
        return loss, total

    check_step(step)


def test_parameters_may_be_updated_by_hand() -> None:
    def step(model: Mlp, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        with torch.no_grad():
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
                p -= optimizer.param_groups[0]["lr"] * g
                p.add_(g, alpha=-optimizer.param_groups[0]["lr"])
        return loss

    check_step(step)


def test_a_gradient_penalty_differentiates_twice() -> None:
    def step(model: Mlp, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return finish(optimizer, F.cross_entropy(out, y) + (slope.norm(2, dim=1) - 1).square().mean())

    check_step(step)


def test_custom_autograd_functions_keep_their_own_backward() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return ctx.saved_tensors[0] * gradient  # half of the true one, on purpose

    def step(model: Mlp, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return finish(optimizer, F.cross_entropy(Square.apply(model(x)), y))

    check_step(step)


def test_module_and_tensor_hooks_run() -> None:
    def step(model: Mlp, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        handle = model.fc1.weight.register_hook(lambda g: g * 0.5)
        loss = finish(optimizer, F.cross_entropy(model(x.clone().requires_grad_()), y))
        handle.remove()
        return loss

    model = built(Mlp)
    model.fc1.register_forward_hook(lambda module, args, out: out * 1.5)
    model.fc2.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model.fc1.register_full_backward_hook(lambda module, gi, go: tuple(None if g is None else g * 2 for g in gi))
    check_step(step, model)


def test_functional_calls_and_transforms() -> None:
    def step(model: Mlp, optimizer: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        def loss_of(parameters: dict[str, Tensor]) -> Tensor:
            return F.cross_entropy(torch.func.functional_call(model, parameters, (x,)), y)

        finish(optimizer, loss_of({k: v * 1.1 for k, v in model.named_parameters()}))
        return torch.func.grad(loss_of)({k: v.detach() for k, v in model.named_parameters()})

    check_step(step)


def test_autocast_rounds_as_in_the_plain_step() -> None:
    def step(model: Mlp, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        return finish(optimizer, loss)

    model = built(Mlp).float()
    optimizer = sgd(model)
    make = lambda i: ((model, optimizer, rows(i).float(), labels(i)), {})  # noqa: E731
    assert ms.verify(step, make, mesh=ms.Mesh(dp=1), dtype=None).max_error < 1e-6
    assert ms.verify(step, make, mesh=ms.Mesh(dp=2), dtype=None).max_error < 2e-2  # partial sums are bf16


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes_with_the_same_random_numbers(reentrant: bool) -> None:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            hidden = checkpoint(lambda v: F.dropout(torch.tanh(self.fc1(v)), 0.4), x, use_reentrant=reentrant)
            return F.dropout(self.fc2(hidden), 0.2)

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return finish(optimizer, F.cross_entropy(model(x.clone().requires_grad_()), y))

    check_step(step, Model)


# ---- random numbers


def test_dropout_masks_are_those_of_one_device() -> None:
    torch.manual_seed(3)
    model = built(Gpt, dropout=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    check_exact(language_model_step, lambda i: (model, optimizer, *(labels(j, 5, classes=16) for j in (i, i + 50))))


def test_random_ops_draw_what_the_plain_step_draws() -> None:
    def step(model: Mlp, optimizer: Any, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        noise = x + 0.1 * torch.randn_like(x) + torch.rand(6, dtype=x.dtype)
        with torch.random.fork_rng():
            forked = torch.rand(3)
        first = torch.rand(3)  # the same numbers as in the fork
        x = F.dropout(noise.clone().uniform_(-1, 1) + noise, 0.5, inplace=True)
        bits = torch.empty(5).bernoulli_(0.3)
        order = torch.randperm(8)
        return finish(optimizer, F.cross_entropy(model(x[order]), y[order])), forked, first, bits

    check_step(step)


def test_a_recomputed_draw_has_the_number_of_the_first() -> None:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc2(checkpoint(lambda v: F.dropout(self.fc1(v), 0.4), x, use_reentrant=False))

    model = built(Model)
    program = ms.simulate(train_step, mesh=ms.Mesh(dp=1)).lower(model, sgd(model), rows(), labels()).program
    numbers = [node.args[2] for node in program.calls if node.target is torch.ops.meshstep.uniform.default]
    assert len(numbers) == 2
    assert len(set(numbers)) == 1


# ---- state that is not a parameter


def test_buffers_may_be_replaced_and_changed_in_forward() -> None:
    class Model(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))
            self.register_buffer("count", torch.tensor(0))
            self.register_buffer("total", torch.zeros(6), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
            self.count += 1
            self.total.add_(x.detach().sum(0))
            self.total[0] = 0
            return super().forward(x - self.mean + self.total / self.count)

    check_step(train_step, Model)


class Attributes(Mlp):
    """Tensors that are attributes, but no buffers: read, replaced, changed in place, and left behind."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scale = torch.arange(6, dtype=torch.float64) / 6, torch.tensor(2.0, dtype=torch.float64)
        self.run, self.moved = torch.zeros(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.run = 0.9 * self.run + x.detach().mean(0)
        self.moved += x.detach().mean(0)
        self.hidden = torch.tanh(self.fc1(x * self.table * self.scale + self.run + self.moved))
        return self.fc2(self.hidden)


def test_tensors_that_are_plain_attributes_are_state_too() -> None:
    check_step(train_step, Attributes)


def test_a_tensor_that_the_step_leaves_in_an_attribute_is_the_present_one() -> None:
    plain = built(Attributes)
    model = copy.deepcopy(plain)
    simulated, ours, theirs = ms.simulate(train_step, mesh=ms.Mesh(dp=2)), sgd(plain), sgd(model)
    for i, count in enumerate((8, 8, 4, 8)):
        batch = rows(i, count=count), labels(i, count=count)
        train_step(plain, ours, *batch)
        simulated(model, theirs, *batch)
        assert plain.hidden is not None and model.hidden is not None
        torch.testing.assert_close(model.hidden, plain.hidden.detach(), rtol=0, atol=1e-12)


def test_attributes_changed_between_calls_are_seen() -> None:
    model = built(Attributes)
    step = ms.simulate(lambda model, x: model(x), mesh=ms.Mesh(dp=2))
    twin = copy.deepcopy(model)
    for scale in (2.0, 2.0, 5.0):
        for m in (model, twin):
            m.scale = torch.tensor(scale, dtype=torch.float64)
        torch.testing.assert_close(step(model, rows()), twin(rows()).detach(), rtol=0, atol=1e-12)


def test_python_attributes_are_read_and_written_as_in_the_plain_step() -> None:
    class Counting(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.factor, self.seen, self.drop = 0, 1.0, [0], nn.Dropout(0.0)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen[0] += 2
            return self.drop(super().forward(x) * self.calls * self.factor + self.seen[0])

    model = built(Counting)
    check_step(train_step, model)
    twin = copy.deepcopy(model)
    step = ms.simulate(train_step, mesh=ms.Mesh(dp=2))
    optimizers = sgd(model), sgd(twin)
    for i in range(4):
        for m in (model, twin):
            m.factor, m.drop.p = float(i % 2), 1.0 if i == 3 else 0.0
        loss = step(model, optimizers[0], rows(i), labels(i))
        torch.testing.assert_close(loss, train_step(twin, optimizers[1], rows(i), labels(i)).detach())
        assert (model.calls, model.seen) == (twin.calls, twin.seen)


def test_a_mode_that_the_step_sets_stays_set() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        model.train()
        loss = finish(optimizer, F.cross_entropy(model(x), y))
        model.fc1.requires_grad_(False)
        return loss

    model = built(Mlp).eval()
    ms.simulate(step, mesh=ms.Mesh(dp=2))(model, sgd(model), rows(), labels())
    assert model.training and model.fc1.training
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]
    check_step(step, built(Mlp).eval())


def test_replaced_submodules_and_new_hooks_are_seen() -> None:
    model = built(Mlp)
    step = ms.simulate(lambda model, x: model(x), mesh=ms.Mesh(dp=2))
    step(model, rows())
    model.fc2 = built(nn.Linear, 8, 4, seed=5)
    torch.testing.assert_close(step(model, rows()), model(rows()).detach())
    model.fc1.register_forward_hook(lambda module, args, out: out + 1)
    torch.testing.assert_close(step(model, rows()), model(rows()).detach())


def test_constants_made_in_the_step_or_found_outside_of_it() -> None:
    outside = torch.tensor([0.5, 1.0, 2.0, 1.0], dtype=torch.float64)

    def step(model: Mlp, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        weight = torch.tensor([1.0, 2.0, 0.5, 1.5], dtype=x.dtype)
        weight[0] = 3
        loss = F.cross_entropy(model(x), y, weight=weight * outside) * torch.tensor(0.5) + torch.arange(3).sum()
        return finish(optimizer, loss)

    check_step(step)
    model = built(Mlp)
    simulated, twin = ms.simulate(step, mesh=ms.Mesh(dp=2)), copy.deepcopy(model)
    for i in range(2):
        outside.mul_(1 + i)  # changed by its owner between two calls
        loss = simulated(model, sgd(model), rows(i), labels(i))
        torch.testing.assert_close(loss, step(twin, sgd(twin), rows(i), labels(i)).detach())


# ---- `.data` and views


@pytest.mark.parametrize("form", ["assign", "assign of another's", "in place"])
def test_parameters_may_be_changed_through_data(form: str) -> None:
    def step(model: Mlp, optimizer: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        before = model.fc1.weight.data
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for p in model.parameters():
            if form == "assign":
                p.data = p.data - 0.1 * p.grad
            elif form == "in place":
                p.data.add_(p.grad.data, alpha=-0.1)
            else:
                new = (p - 0.1 * p.grad).detach()
                p.data = new
                new.mul_(0.9)  # and so the parameter
            p.grad = None
        return F.cross_entropy(model(x), y), before.clone()

    check_step(step)


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda h: h[2:4].mul_(2),
    "strided slice": lambda h: h[1::3, -3:-1].mul_(2),
    "item": lambda h: h[1, 2].fill_(5),
    "assignment": lambda h: h.__setitem__((slice(None), 1), 0.5),
    "ellipsis": lambda h: h[..., None].squeeze(-1).neg_(),
    "select": lambda h: h.select(1, -1).mul_(3),
    "narrow": lambda h: h.narrow(1, 2, 3).copy_(torch.zeros(8, 3)),
    "t": lambda h: h.t()[0].add_(1),
    "T": lambda h: h.T.add_(torch.arange(8)),
    "mT": lambda h: h.mT[2].mul_(2),
    "transpose": lambda h: h.transpose(0, 1)[3, :].zero_(),
    "swapaxes": lambda h: h.swapaxes(0, 1).tril_(),
    "permute": lambda h: h.permute(1, 0)[2:3].exp_(),
    "movedim": lambda h: h.movedim(0, 1)[0].mul_(2),
    "split": lambda h: h.split(3, 1)[1].mul_(2),
    "split sizes": lambda h: h.split([3, 5], -1)[1].mul_(4),
    "chunk": lambda h: h.chunk(2, 0)[1].sub_(1),
    "unsafe chunk": lambda h: h.unsafe_chunk(2)[0].mul_(2),
    "tensor split": lambda h: h.tensor_split(3, 1)[1].mul_(3),
    "unbind": lambda h: h.unbind(0)[1].add_(4),
    "diagonal": lambda h: h.diagonal(1).fill_(0.1),
    "view": lambda h: h.view(-1)[::3].mul_(0.5),
    "view of a view": lambda h: h.view(2, 4, 8)[1, :, 2].zero_(),
    "flatten": lambda h: h.flatten().__setitem__(5, 7),
    "unflatten": lambda h: h.unflatten(1, (2, 4))[:, 0].add_(1),
    "unsqueeze": lambda h: h.unsqueeze(0).squeeze(0).mul_(1.1),
    "expand": lambda h: h.expand(1, 8, 8).mul_(2),
    "detach": lambda h: h.detach().mul_(2),
    "as_strided": lambda h: h.as_strided((8, 4), (8, 2)).mul_(2),
    "other dtype": lambda h: h.view(torch.int64).bitwise_and_(-1024),
    "complex": lambda h: torch.view_as_complex(h.view(8, 4, 2)).mul_(2j),
    "masked_fill_": lambda h: h.masked_fill_(h > 0.1, 0.3),
    "masked_fill_ of a part": lambda h: h[:, 2:].masked_fill_(h[:, 2:] > 0.1, 0.3),
    "index_put_": lambda h: h.index_put_((torch.tensor([0, 1]), torch.tensor([2, 3])), torch.ones(2, dtype=h.dtype)),
    "index assignment": lambda h: h.__setitem__(torch.tensor([0, 2]), 1.5),
    "index_add_": lambda h: h.index_add_(1, torch.tensor([0, 2]), torch.ones(8, 2, dtype=h.dtype)),
    "index_copy_": lambda h: h.index_copy_(0, torch.tensor([1]), h[:1] * 2),
    "scatter_": lambda h: h.scatter_(1, h.argmax(1, keepdim=True), 0.75),
    "scatter_add_": lambda h: h.scatter_add_(1, torch.zeros(8, 1, dtype=torch.int64), h[:, :1].clone()),
    "masked_scatter_": lambda h: h.masked_scatter_(h > 0, h * 2),
    "put_": lambda h: h.put_(torch.tensor([3]), torch.ones(1, dtype=h.dtype)),
    "out=": lambda h: (torch.mul(h, 2, out=h), torch.addmm(h, h, h, out=h)),
    "out= of a view": lambda h: torch.add(h[0], 1, out=h[1]),
    "transposed in place": lambda h: (h.t_(), h[0].add_(1), h.unsqueeze_(0).squeeze_(0), h.swapdims_(0, 1)[1].mul_(2)),
    "cumsum_": lambda h: h.cumsum_(0),
    "lerp_": lambda h: h.lerp_(h + 1, 0.3),
    "relu in place": lambda h: F.relu(h, inplace=True),
    "two views": lambda h: (h[0].mul_(2), h[:, 0].add_(h[0]), h.t()[1].sub_(h[:, 0])),
    "foreach": lambda h: torch._foreach_mul_([h[0], h[1]], 2.0),
    "copy_ of another dtype": lambda h: h[0].copy_(torch.arange(8)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_in_place_changes_reach_the_tensor_and_all_its_views(name: str) -> None:
    def step(model: Mlp, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            hidden = model.fc1(x).clone()
            view, base = hidden[1:], hidden
            VIEWS[name](hidden)
            return hidden + 1, view + 1, base.sum(0)

    model = built(Mlp)
    check_exact(step, lambda i: (model, rows(i)), steps=1)


def test_in_place_changes_are_differentiated() -> None:
    def step(model: Mlp, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        hidden = model.fc1(x) * 1
        hidden[:, 1] = hidden[:, 2] * 2
        hidden.view(-1)[::3].mul_(0.5)
        hidden.t()[3].mul_(1.5)
        hidden.masked_fill_(hidden > 1.5, 0.3)
        hidden.diagonal().fill_(0.1)
        return finish(optimizer, F.cross_entropy(model.fc2(torch.tanh(hidden)), y))

    check_step(step)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda h: h.unfold(1, 2, 2)[:, :, 0].mul_(2), "an in-place change of a view made by aten.unfold.default"),
        (lambda h: h.resize_(4, 8), "aten.resize_.default changes a tensor's storage"),
        (lambda h: h.set_(h * 2), "aten.set_.source_Tensor changes a tensor's storage"),
    ],
)
def test_changes_that_cannot_be_recorded_are_refused(change: Callable[[Tensor], Any], what: str) -> None:
    def step(model: Mlp, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = model.fc1(x).clone()
            change(hidden)
            return hidden + 1

    with pytest.raises(CaptureError) as caught:
        ms.simulate(step, mesh=ms.Mesh(dp=2)).lower(built(Mlp), rows())
    assert caught.value.what == what
    assert caught.value.at is not None and caught.value.at.startswith("test_capture.py:")


def test_a_block_is_captured_with_the_lines_of_the_users_code() -> None:
    block = built(Block, 8, 2, 0.0)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        model(x).square().mean().backward()
        return x

    program = ms.simulate(step, mesh=ms.Mesh(dp=1)).lower(block, rows(0, 5, 8)).program
    lines = {node.meta["source"].split(":")[0] for node in program.calls}
    assert lines == {"models.py", "test_capture.py"}
