"""What a step holds: what `.memory` says, and what tensors of a real step hold."""

from __future__ import annotations

import memory_jobs
import pytest
import torch
from rank_jobs import batch, train_step
from sharded_jobs import small_gpt

import meshstep as ms

P, Mesh = ms.plans, ms.Mesh


@pytest.mark.parametrize("plan", [P.data_parallel(), P.zero(1), P.fsdp()], ids=["data_parallel", "zero1", "fsdp"])
@pytest.mark.parametrize("kind", ["gpt", "convnet", "perceptron"])
def test_the_peak_is_what_a_real_step_holds(pools, kind, plan):
    for predicted, measured in pools(2).run(memory_jobs.predicted_and_measured, kind, plan, Mesh(dp=2)):
        assert predicted == pytest.approx(measured, rel=0.1)


def test_fsdp_takes_no_more_than_fully_shard(pools):
    for found in pools(2).run(memory_jobs.fsdp_peaks):
        assert found["difference"]
        assert found["ours"] <= found["theirs"], found


def test_memory_is_split_by_what_it_is_for():
    model = small_gpt()
    args = (model, torch.optim.AdamW(model.parameters()), *batch(0))
    found = {}
    for name, plan in {"data_parallel": P.data_parallel(), "fsdp": P.fsdp()}.items():
        step = ms.simulate(train_step, mesh=Mesh(dp=4), plan=plan)
        step(*args)
        found[name] = step.lower(*args).memory
    whole = sum(p.numel() * 4 for p in model.parameters())
    assert found["data_parallel"].parameters == whole
    assert found["data_parallel"].optimizer_state == pytest.approx(2 * whole, rel=0.01)  # and counters
    assert found["fsdp"].parameters == whole / 4
    assert found["fsdp"].state == pytest.approx(3 * whole / 4, rel=0.02)
    assert found["fsdp"].activations > whole  # it is at its most during the backward
    assert found["data_parallel"].temporaries > whole  # and this one when all gradients are in their bucket
    for memory in found.values():
        parts = memory.activations + memory.temporaries + memory.state + memory.arguments
        assert memory.peak == parts
        assert str(memory).endswith(f"most at {memory.at}")
