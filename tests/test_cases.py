"""Cases that other systems get wrong; numbers are those of the list in the project's design notes.

The right value is always the single-device one with the global batch. Each test runs at least five steps in float64,
with other rows on every rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Block, ConvNet, Gpt, Mlp, built, check_exact, labels, rows, sgd, train_step
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

import meshstep as ms
from meshstep.errors import CaptureError

MESHES = [ms.Mesh(dp=2), ms.Mesh(dp=4)]


def loss_and_gradients(loss_of: Callable[..., Tensor]) -> Callable[..., Any]:
    """A step that returns the loss and the gradients besides training."""

    def step(model: nn.Module, optimizer: Any, *batch: Tensor) -> tuple[Tensor, list[Tensor]]:
        loss = loss_of(model, *batch)
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        return loss, gradients

    return step


def check_loss(loss_of: Callable[..., Tensor], batch: Callable[[int], tuple], mesh: ms.Mesh, model: Any = Mlp) -> None:
    model = built(model)
    optimizer = sgd(model)
    check_exact(loss_and_gradients(loss_of), lambda i: (model, optimizer, *batch(i)), mesh=mesh)


# ---- values


def few_valid(i: int) -> tuple[Tensor, Tensor]:
    """Rank 0 of 2 has one valid label, rank 1 has all but one; of 4, some have none."""
    y = labels(i)
    y[:4] = -100
    y[i % 4], y[4 + i % 4] = 2, -100
    return rows(i), y


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["case 1", "case 2: class weights"])
def test_cross_entropy_with_uneven_numbers_of_valid_tokens(mesh: ms.Mesh, weighted: bool) -> None:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        weight = torch.tensor([0.3, 2.0, 0.5, 1.1], dtype=x.dtype) if weighted else None
        return F.cross_entropy(model(x), y, weight=weight, label_smoothing=0.1 if weighted else 0.0)

    check_loss(loss_of, few_valid, mesh)


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss])
@pytest.mark.parametrize("count", [5, 8])
def test_case_3_means_over_an_uneven_global_batch(loss: Callable[..., Tensor], count: int) -> None:
    check_loss(
        lambda model, x, y: loss(model(x), y),
        lambda i: (rows(i, count=count), rows(i + 50, 4, count=count)),
        ms.Mesh(dp=2),
    )


def test_case_7_the_gradient_norm_counts_each_element_once() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        F.cross_entropy(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        after = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        return norm, after

    model = built(Mlp)
    optimizer = sgd(model)
    for mesh in MESHES:
        check_exact(step, lambda i: (model, optimizer, rows(i), labels(i)), mesh=mesh)


def test_case_9_tied_embeddings_reduce_their_gradient_once() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = built(Gpt, tied=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    batch = lambda i: (labels(i, 5, classes=16), labels(i + 50, 5, classes=16))  # noqa: E731
    check_exact(step, lambda i: (model, optimizer, *batch(i)))
    lowered = ms.simulate(step, mesh=ms.Mesh(dp=2)).lower(model, optimizer, *batch(0))
    trained = sum(p.numel() for p in model.parameters()) * 8
    sent = sum(c.bytes for c in lowered.communication if c.kind == "all_reduce")
    assert trained <= sent <= trained + 64  # of 2 ranks in a ring, each sends its size once; and the loss


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_cases_10_and_11_batch_norm_is_of_the_global_batch(mesh: ms.Mesh) -> None:
    model = built(ConvNet)
    optimizer = sgd(model, momentum=0.9)
    check_exact(train_step, lambda i: (model, optimizer, rows(i, 2, 6, 6), labels(i)), mesh=mesh)
    step = ms.simulate(train_step, mesh=mesh)
    for i in range(5):
        step(model, optimizer, rows(i, 2, 6, 6), labels(i))
    assert model.body[1].num_batches_tracked == 5


def test_case_12_a_sharded_dim_indexed_unevenly() -> None:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        return logits[:3].mean() + logits[5].sum() + logits[1::3].square().mean() + F.cross_entropy(logits[-5:], y[-5:])

    for mesh in MESHES:
        check_loss(loss_of, lambda i: (rows(i), labels(i)), mesh)


# ---- optimizers


def test_case_13_parameters_follow_the_schedule_without_a_recompile() -> None:
    plain = built(Mlp)
    model, step = copy.deepcopy(plain), ms.simulate(train_step, mesh=ms.Mesh(dp=2))
    for trained, run in ((plain, train_step), (model, step)):
        optimizer = torch.optim.AdamW(trained.parameters(), 0.05)
        warm_up = lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 5))
        cosine = lr_scheduler.CosineAnnealingLR(optimizer, 20)
        for i in range(20):
            run(trained, optimizer, rows(i), labels(i))
            warm_up.step()
            cosine.step()
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()), rtol=0, atol=1e-10)
    assert (step.cache_info().misses, step.cache_info().hits) == (2, 18)


def test_case_14_two_groups_a_frozen_parameter_and_one_without_gradient() -> None:
    model = built(Mlp)
    model.idle = nn.Linear(2, 2).double()
    model.fc1.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [
            {"params": [model.fc1.weight, model.fc1.bias, model.idle.weight], "weight_decay": 0.5},
            {"params": [*model.fc2.parameters(), model.idle.bias], "lr": 0.2},
        ],
        lr=0.01,
    )
    frozen = [p.clone() for p in (model.fc1.bias, *model.idle.parameters())]
    check_exact(train_step, lambda i: (model, optimizer, rows(i), labels(i)), within=1e-12)
    step = ms.simulate(train_step, mesh=ms.Mesh(dp=2))
    for i in range(3):
        step(model, optimizer, rows(i), labels(i))
    assert all(map(torch.equal, frozen, (model.fc1.bias, *model.idle.parameters())))
    assert len(optimizer.state) == 3


def test_case_15_the_first_step_of_sgd_with_dampening_is_another_one() -> None:
    model = built(Mlp)
    optimizer = sgd(model, momentum=0.9, dampening=0.5, weight_decay=0.1)
    check_exact(train_step, lambda i: (model, optimizer, rows(i), labels(i)))


CASE_16: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.3}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {"t0": 2}),
    (torch.optim.RAdam, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
]


@pytest.mark.parametrize(("kind", "options"), CASE_16)
def test_case_16_optimizers_with_turns(kind: Any, options: dict[str, Any]) -> None:
    model = built(Mlp)
    optimizer = kind(model.parameters(), lr=0.02, **options)
    check_exact(train_step, lambda i: (model, optimizer, rows(i), labels(i)), mesh=ms.Mesh(dp=4), steps=8, within=1e-9)


def accumulating(model: nn.Module, optimizer: Any, *batches: Tensor) -> Tensor:
    total = 0
    for x, y in zip(batches[::2], batches[1::2], strict=True):
        loss = F.cross_entropy(model(x), y) / 4
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


def test_case_17_accumulated_gradients_are_reduced_once() -> None:
    model = built(Mlp)
    optimizer = sgd(model)

    def batches(i: int) -> list[Tensor]:
        return [t for j in range(4) for t in (rows(4 * i + j), labels(4 * i + j))]

    check_exact(accumulating, lambda i: (model, optimizer, *batches(i)))
    lowered = ms.simulate(accumulating, mesh=ms.Mesh(dp=2)).lower(model, optimizer, *batches(0))
    trained = sum(p.numel() for p in model.parameters()) * 8
    assert sum(c.bytes for c in lowered.communication) <= trained + 64


def test_case_18_optimizer_state_from_a_checkpoint() -> None:
    model = built(Mlp)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for i in range(3):
        train_step(model, optimizer, rows(i), labels(i))
    other = built(Mlp, seed=9)
    other.load_state_dict(model.state_dict())
    loaded = torch.optim.Adam(other.parameters(), 0.9)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    check_exact(train_step, lambda i: (other, loaded, rows(i + 3), labels(i + 3)))


# ---- programs


def test_case_19_gan_distillation_and_average_in_one_step() -> None:
    def step(g: Any, d: Any, ema: Any, teacher: Any, og: Any, od: Any, z: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        loss_d = F.binary_cross_entropy_with_logits(d(x), torch.ones(8, 4, dtype=x.dtype))
        loss_d = loss_d + F.binary_cross_entropy_with_logits(d(g(z).detach()), torch.zeros(8, 4, dtype=x.dtype))
        od.zero_grad()
        loss_d.backward()
        nn.utils.clip_grad_norm_(d.parameters(), 0.1)
        od.step()
        with torch.no_grad():
            target = teacher(z).softmax(-1)
        loss_g = -d(g(z)).mean() + F.kl_div(g(z).log_softmax(-1), target, reduction="batchmean")
        og.zero_grad()
        loss_g.backward()
        og.step()
        with torch.no_grad():
            for old, new in zip(ema.parameters(), g.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
        return loss_d, loss_g

    g, ema, d = built(nn.Linear, 3, 6), built(nn.Linear, 3, 6), built(Mlp, seed=1)
    teacher = built(nn.Linear, 3, 6, seed=2).requires_grad_(False)
    og, od = torch.optim.AdamW(g.parameters(), 0.01), torch.optim.RMSprop(d.parameters(), 0.01)
    check_exact(step, lambda i: (g, d, ema, teacher, og, od, rows(i, 3), rows(i)), within=1e-9)


def test_case_21_checkpointed_blocks_equal_the_plain_ones() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList(Block(8, 2, 0.2) for _ in range(2)), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x.mean(1))

    model = built(Model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    check_exact(train_step, lambda i: (model, optimizer, rows(i, 5, 8), labels(i)))


@pytest.mark.parametrize(
    "look",
    [
        lambda loss: loss.item(),
        lambda loss: loss if loss > 1 else loss / 2,
        lambda loss: loss / float(loss),
        lambda loss: print(f"{loss:.3f}"),
    ],
)
def test_case_24_a_look_at_a_value_is_refused_at_the_users_line(look: Callable[[Tensor], Any]) -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        return look(train_step(model, optimizer, x, y))

    model = built(Mlp)
    with pytest.raises(CaptureError) as caught:
        ms.simulate(step, mesh=ms.Mesh(dp=2))(model, sgd(model), rows(), labels())
    assert caught.value.at == f"test_cases.py:{look.__code__.co_firstlineno}"
    assert caught.value.hint == "return the tensor from the step and look at it outside, or use torch.where"


def test_case_25_every_variation_of_a_call_is_right() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, smooth: bool = False) -> Tensor:
        loss = F.cross_entropy(model(x), y, label_smoothing=0.2 if smooth else 0.0)
        if model.training:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss

    class Normed(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x.to(self.fc1.weight.dtype)))

    plain = [(m, torch.optim.AdamW(m.parameters(), 0.02)) for m in (built(Normed), built(Normed, seed=1))]
    simulated = copy.deepcopy(plain)
    compiled = ms.simulate(step, mesh=ms.Mesh(dp=2))

    def both(which: int, *batch: Tensor, training: bool = True, **kwargs: Any) -> None:
        found = []
        for pairs, run in ((plain, step), (simulated, compiled)):
            model, optimizer = pairs[which]
            model.train(training)
            found.append(run(model, optimizer, *batch, **kwargs).detach())
            found.append([t.detach() for t in (*model.parameters(), *model.buffers())])
        torch.testing.assert_close(found[2:], found[:2], rtol=0, atol=1e-10)

    for i in range(2):
        both(0, rows(i), labels(i))
        both(0, rows(i, count=4), labels(i, count=4))
        both(0, rows(i, count=7), labels(i, count=7))
        both(0, rows(i).float(), labels(i))
        both(0, rows(i), labels(i), training=False)
        both(0, rows(i), labels(i), smooth=True)
        both(1, rows(i), labels(i))
    info = compiled.cache_info()
    assert info.misses == info.size == 9  # a cold and a warm one of each model, and five variations
    both(0, rows(9), labels(9))
    assert compiled.cache_info().misses == 9


def test_case_26_after_an_exception_the_next_call_works() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, fail: bool) -> Tensor:
        loss = train_step(model, optimizer, x, y)
        if fail:
            raise KeyError("broken")
        return loss

    plain = built(Mlp)
    model = copy.deepcopy(plain)
    optimizers = torch.optim.AdamW(plain.parameters(), 0.02), torch.optim.AdamW(model.parameters(), 0.02)
    compiled = ms.simulate(step, mesh=ms.Mesh(dp=2))
    for i in range(5):
        with pytest.raises(KeyError, match="broken"):
            compiled(model, optimizers[1], rows(i), labels(i), True)
        want = step(plain, optimizers[0], rows(i), labels(i), False)
        found = compiled(model, optimizers[1], rows(i), labels(i), False)
        torch.testing.assert_close(found, want.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()), rtol=0, atol=1e-12)
