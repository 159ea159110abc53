"""Plans that shard state: exact on virtual ranks, and no more is sent than must be."""

from __future__ import annotations

import pytest
import torch
from rank_jobs import Convolutional, batch, train_step

import meshstep as ms
from gpt import GPT

PLANS = {"zero1": ms.plans.zero(1), "zero2": ms.plans.zero(2), "zero3": ms.plans.zero(3), "fsdp": ms.plans.fsdp()}


def arguments(kind=GPT):
    model = GPT(width=32, layers=2, heads=4, context=16, vocab=64) if kind is GPT else kind()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    return lambda i: ((model, optimizer, *batch(i)), {})


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", [GPT, Convolutional])
@pytest.mark.parametrize("plan", PLANS)
def test_sharded_state_gives_the_plain_numbers(plan, kind, ranks):
    found = ms.verify(train_step, arguments(kind), mesh=ms.Mesh(dp=ranks), plan=PLANS[plan])
    assert found.ok, found


def test_two_axes_that_split_the_batch_hold_rows_in_order():
    plan = ms.plans.data_parallel("a") + ms.plans.fsdp("b")
    x = torch.arange(8.0).reshape(8, 1)
    step = ms.simulate(lambda x: x * 2, mesh=ms.Mesh(a=2, b=2), plan=plan)
    assert torch.equal(step(x), x * 2)
    assert "f32[8/4, 1]" in step.lower(x).as_text()
    found = ms.verify(train_step, arguments(), mesh=ms.Mesh(a=2, b=2), plan=plan)
    assert found.ok, found


def test_there_is_no_other_stage():
    with pytest.raises(ms.PlanError) as caught:
        ms.plans.zero(4)
    assert str(caught.value) == "no ZeRO stage 4\n  at   plans.zero(stage)\n  try  1, 2 or 3"
