"""What a data-parallel step sends, exactly: kinds, counts and bytes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshstep as ms
from gpt import GPT
from meshstep.passes import Bucket, CommonSubexpressions, DeadCode, Pipeline


def gpt_step(clip: bool = True):
    def train_step(model, optimizer, x, y):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train_step


def gpt_arguments(rows: int = 4):
    model = GPT(width=32, layers=2, heads=4, context=16, vocab=64)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randint(64, (rows, 16))
    return model, optimizer, x, x.roll(1, 1)


def sent(step, *args):
    return [(c.kind, c.axis, c.dtype, c.bytes, c.count) for c in step.lower(*args).communication]


def ring(numel: int, ranks: int, itemsize: int = 4) -> int:
    """Bytes that each rank sends in an all_reduce: 2 (N - 1) / N of the size."""
    return 2 * (numel * itemsize * (ranks - 1) // ranks)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_and_loss_take_one_all_reduce_and_the_count_of_tokens_another(ranks, clip):
    args = gpt_arguments()
    parameters = list(args[0].parameters())
    step = ms.compile(mesh=ms.Mesh(dp=ranks))(gpt_step(clip))
    everything = sum(p.numel() for p in parameters) + 1  # the loss rides along; the norm is of what is whole by then
    assert sent(step, *args) == [
        ("all_reduce", "dp", torch.float32, ring(1, ranks), 1),
        ("all_reduce", "dp", torch.float32, ring(everything, ranks), len(parameters) + 1),
    ]


def test_a_full_bucket_makes_room_for_the_next():
    args = gpt_arguments()
    passes = Pipeline((CommonSubexpressions(), DeadCode(), Bucket(bucket_bytes=32 * 1024)))
    found = sent(ms.compile(mesh=ms.Mesh(dp=2), passes=passes)(gpt_step()), *args)
    numels = [p.numel() for p in args[0].parameters()]
    assert len(found) > 3
    assert sum(c[-1] for c in found) == len(numels) + 2
    assert sum(c[3] for c in found) == 2 * 2 * (sum(numels) + 2)
    assert all(size <= 32 * 1024 for _, _, _, size, count in found if count > 1)


def test_a_mean_without_a_count_of_tokens_takes_one_all_reduce_in_all():
    def train_step(model, optimizer, x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = nn.Linear(8, 4)
    step = ms.compile(mesh=ms.Mesh(dp=2))(train_step)
    found = sent(step, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 8), torch.randn(4, 4))
    assert found == [("all_reduce", "dp", torch.float32, ring(8 * 4 + 4 + 1, 2), 3)]


def test_a_tied_parameter_is_reduced_once():
    def train_step(model, optimizer, x, y):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model, _, x, y = gpt_arguments()
    model.head.weight = model.tokens.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = sent(ms.compile(mesh=ms.Mesh(dp=2))(train_step), model, optimizer, x, y)
    numel = sum(p.numel() for p in model.parameters())  # each once
    assert found == [("all_reduce", "dp", torch.float32, ring(numel + 1, 2), len(list(model.parameters())) + 1)]


def test_accumulated_micro_batches_are_reduced_once():
    def train_step(model, optimizer, x, y):
        total = 0.0
        for rows, targets in zip(x, y, strict=True):
            loss = F.mse_loss(model(rows), targets) / len(x)
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    model = nn.Linear(8, 4)
    inputs = {"x": ms.Layout((("dp", torch.distributed.tensor.Shard(1)),))}
    inputs["y"] = inputs["x"]
    step = ms.compile(mesh=ms.Mesh(dp=2), inputs=inputs)(train_step)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = sent(step, model, optimizer, torch.randn(4, 2, 8), torch.randn(4, 2, 4))
    assert found == [("all_reduce", "dp", torch.float32, ring(8 * 4 + 4 + 1, 2), 3)]


def test_batch_statistics_are_summed_over_the_ranks():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten())

    def forward(model, x):
        return model(x).sum()

    found = sent(ms.compile(mesh=ms.Mesh(dp=2))(forward), model, torch.randn(2, 3, 8, 8))
    assert [(kind, size) for kind, _, _, size, _ in found] == [
        ("all_gather", 4 * 2 * 4),  # each rank's means and sums of squares, f32[1, 4] both
        ("all_reduce", ring(1, 2)),  # the output
    ]


def test_rows_stay_where_they_are():
    model = nn.Linear(8, 4)
    lowered = ms.compile(mesh=ms.Mesh(dp=2))(lambda model, x: model(x)).lower(model, torch.randn(2, 8))
    assert lowered.communication == ()
    assert "S(0)@dp" in lowered.as_text().splitlines()[-2]
