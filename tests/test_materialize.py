"""Parameters made shard by shard equal those made whole."""

from __future__ import annotations

import pytest
import rank_jobs
import torch
from torch import nn

import meshstep as ms
from gpt import GPT
from meshstep.materialize import reset_parameters, shard_of


def model() -> nn.Module:
    with torch.device("meta"):
        built = nn.Sequential(
            nn.Embedding(64, 32), nn.LayerNorm(32), nn.Linear(32, 48), nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8),
            nn.GRU(8, 16),
        )  # fmt: skip
        built.append(nn.Linear(32, 64, bias=False))
    built[-1].weight = built[0].weight
    return built


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("plan", [ms.plans.data_parallel(), ms.plans.fsdp()])
def test_shards_make_up_the_whole_of_one_rank(ranks, plan):
    torch.manual_seed(3)
    whole = shard_of(model(), ms.Mesh(dp=1), ms.plans.data_parallel(), 0)
    shards = [shard_of(model(), ms.Mesh(dp=ranks), plan, rank) for rank in range(ranks)]
    for name, value in whole.items():
        parts = [shard[name] for shard in shards]
        dim = next((d for d in range(value.ndim) if parts[0].shape[d] != value.shape[d]), None)
        assert torch.equal(parts[0] if dim is None else torch.cat(parts, dim), value)
        is_buffer = name in ("4.running_mean", "4.running_var", "4.num_batches_tracked")
        assert (dim is None) == (plan == ms.plans.data_parallel() or is_buffer)


def test_values_are_those_that_the_initialiser_means():
    torch.manual_seed(0)
    made = ms.materialize(model())
    assert not any(t.is_meta for t in made.state_dict().values())
    assert made[6].weight is made[0].weight
    assert isinstance(made[2].weight, nn.Parameter)
    bound = 1 / 32**0.5
    assert made[2].weight.abs().max() <= bound
    assert made[2].weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)
    assert made[0].weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)  # the head's, which came last
    assert torch.equal(made[1].weight, torch.ones(32))
    assert torch.equal(made[4].running_var, torch.ones(8))


def test_the_seed_counts():
    torch.manual_seed(0)
    first = ms.materialize(model())
    torch.manual_seed(0)
    second = ms.materialize(model())
    torch.manual_seed(1)
    third = ms.materialize(model())
    assert torch.equal(first[2].weight, second[2].weight)
    assert not torch.equal(first[2].weight, third[2].weight)


def test_a_parameter_that_nobody_sets_is_named_and_the_module_left_alone():
    with torch.device("meta"):
        built = GPT(width=16, layers=1, heads=2, context=8)
    with pytest.raises(ms.InputError) as caught:
        ms.materialize(built)
    assert str(caught.value) == (
        "parameter positions is not initialised\n  at   GPT on the meta device\n"
        "  try  materialize(..., initialize=f) with an f(module) that sets every parameter and buffer"
    )
    assert all(p.is_meta for p in built.parameters())

    def initialize(module: GPT) -> None:
        reset_parameters(module)
        nn.init.normal_(module.positions, std=0.02)

    made = ms.materialize(built, initialize=initialize)
    assert made.positions.std().item() == pytest.approx(0.02, rel=0.3)


def test_real_ranks_hold_shards_of_the_same_whole(pools):
    first, second = pools(2).run(rank_jobs.materialized)
    assert first["placements"] == second["placements"] == "(Shard(dim=0),)"
    assert first["local"] == second["local"] == [24, 32]
    assert first["whole"] == second["whole"]
