"""Plans that shard state, on real gloo ranks: DTensors on the user's objects, and the numbers of the plain step."""

from __future__ import annotations

import pytest
import sharded_jobs as jobs
import torch
from torch.distributed.tensor import Replicate, Shard

import meshstep as ms

P, Mesh = ms.plans, ms.Mesh
TP = P.tensor_parallel(jobs.STYLES)
BY_TWO = {"zero1": P.zero(1), "zero2": P.zero(2), "zero3": P.zero(3), "fsdp": P.fsdp()}
GRIDS = {
    "dp x tp": (P.data_parallel() + TP, Mesh(dp=2, tp=2)),
    "fsdp x tp": (P.fsdp() + TP, Mesh(dp=2, tp=2)),
    "hsdp": (P.data_parallel("replicate") + P.fsdp("shard"), Mesh(replicate=2, shard=2)),
    "fsdp on both": (P.fsdp("a") + P.fsdp("b"), Mesh(a=2, b=2)),
}


@pytest.mark.parametrize("kind", ["adamw", "sgd", "convnet"])
@pytest.mark.parametrize("plan", BY_TWO)
def test_twenty_steps_equal_the_plain_run(pools, plan, kind):
    for found in pools(2).run(jobs.train_against_plain, BY_TWO[plan], Mesh(dp=2), kind=kind):
        assert found["loss"] < 1e-10
        assert found["state"] < 1e-10
        assert found["sharded"] > 0


@pytest.mark.parametrize("grid", [*GRIDS, "fsdp 4", "tp 2"])
def test_twenty_steps_on_a_grid_equal_the_plain_run(pools, grid):
    others = {"fsdp 4": (P.fsdp(), Mesh(dp=4)), "tp 2": (TP, Mesh(tp=2))}
    plan, mesh = (GRIDS | others)[grid]
    for found in pools(mesh.size).run(jobs.train_against_plain, plan, mesh, timeout=300):
        assert found["loss"] < 1e-10
        assert found["state"] < 1e-10
        assert found["sharded"] > 0


@pytest.mark.parametrize(("plan", "mesh"), [(P.fsdp(), Mesh(dp=2)), (TP, Mesh(tp=2))])
def test_inductor_equals_the_plain_run(pools, plan, mesh):
    for found in pools(2).run(jobs.train_against_plain, plan, mesh, "inductor", 6, timeout=300):
        assert found["loss"] < 1e-10
        assert found["state"] < 1e-10


@pytest.mark.parametrize(("plan", "mesh"), [(P.data_parallel() + TP, Mesh(dp=2, tp=2)), (P.fsdp(), Mesh(dp=4))])
def test_losses_in_float32_are_those_of_one_process(pools, plan, mesh):
    for found in pools(4).run(jobs.train_against_plain, plan, mesh, dtype=torch.float32, timeout=300):
        assert found["loss"] < 1e-6


def test_fsdp_holds_its_share_of_the_state_and_no_more(pools):
    for found in pools(4).run(jobs.train_against_plain, P.fsdp(), Mesh(dp=4), steps=2, dtype=torch.float32):
        assert found["bytes"] <= found["whole bytes"] / 4 * 1.02


def test_what_was_whole_is_gone_after_the_first_call(pools):
    """Nothing of ours may hold it: neither a guard nor a program that is not run again."""
    assert pools(2).run(jobs.whole_parameters_alive, P.fsdp()) == [[0, 0, 0]] * 2


def test_parameters_are_dtensors_of_the_true_layout(pools):
    first, *others = pools(4).run(jobs.layouts, P.fsdp() + TP, Mesh(dp=2, tp=2))
    assert all(other == first for other in others)
    assert first["blocks.0.qkv.weight"] == "(Shard(dim=1), _StridedShard(dim=0, sf=3))"
    assert first["blocks.0.proj.weight"] == "(Shard(dim=0), Shard(dim=1))"
    assert first["blocks.0.norm1.weight"] == "(Shard(dim=0), Replicate())"
    assert first["tokens.weight"] == "(Shard(dim=1), Shard(dim=0))"


def test_two_axes_on_one_dim_lie_as_torch_has_it(pools):
    (first, *_) = pools(4).run(jobs.layouts, P.fsdp("a") + P.fsdp("b"), Mesh(a=2, b=2))
    assert first["head.weight"] == "(Shard(dim=0), Shard(dim=0))"


@pytest.mark.parametrize("plan", [P.zero(1), P.fsdp()])
def test_a_tied_parameter_stays_one(pools, plan):
    for found in pools(2).run(jobs.tied, plan):
        assert found["one"]
        assert found["state"] < 1e-10


@pytest.mark.parametrize("plan", [P.zero(2), P.fsdp()])
def test_gradients_outlive_the_call(pools, plan):
    assert max(pools(2).run(jobs.gradients_that_stay, plan)) < 1e-10


@pytest.mark.parametrize("plan", [P.zero(1), P.fsdp()])
def test_an_evaluation_shares_the_state(pools, plan):
    for found in pools(2).run(jobs.evaluation, plan):
        assert found["loss"] < 1e-10
        assert found["misses"] == (2, 1)


def test_whole_state_that_is_loaded_becomes_shards(pools):
    assert max(pools(2).run(jobs.loaded_state)) < 1e-10


def test_a_first_call_that_fails_changes_nothing(pools):
    assert pools(2).run(jobs.failing_first_call) == ["no backend today"] * 2


def test_state_on_another_mesh_is_refused(pools):
    for text in pools(2).run(jobs.other_mesh):
        assert text.startswith("parameter weight is a DTensor on another mesh\n  at   DeviceMesh(")
        assert text.endswith(
            "and the step is for Mesh(b=2)\n"
            "  try  the same mesh, or meshstep.checkpoint.save and load to move the state"
        )


def test_ranks_of_an_axis_that_does_not_split_the_batch_pass_the_same_rows(pools):
    for text in pools(2).run(jobs.other_rows_along_tp):
        assert text == (
            "ranks 0 and 1 pass different values of an argument that is whole over axis 'tp'\n"
            "  at   train_step: argument x, R@tp\n"
            "  try  ranks along 'tp' pass the same rows (let the loader go by the place along the axes that split the "
            "batch); or inputs={...: Shard(dim)}"
        )


def test_a_parameter_that_no_module_holds_is_refused(pools):
    for text in pools(2).run(jobs.parameter_as_argument):
        assert text == (
            "a plan that shards a parameter which is an argument by itself: no module holds it\n"
            "  at   parameter w: S(0)@dp\n"
            "  try  pass the module that it belongs to as well, or leave it out of the plan"
        )


def test_a_dtensor_argument_says_how_it_lies(pools):
    for found in pools(2).run(jobs.dtensor_argument):
        assert found == {"value": True, "total": True, "placements": ((Shard(0),), (Replicate(),))}


def test_torch_saves_and_loads_the_shards(pools):
    assert max(pools(2).run(jobs.saved_by_torch)) == 0


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("plan", [P.data_parallel(), P.zero(1), P.zero(2), P.fsdp()], ids=lambda p: p.axes[0].kind)
def test_channels_last_and_gradients_that_stay(pools, plan, kind):
    for found in pools(2).run(jobs.memory_formats, plan, kind):
        assert found < 1e-10


@pytest.mark.parametrize("kind", ["adamw", "adafactor", "nadam"])
@pytest.mark.parametrize("plan", [P.data_parallel(), P.zero(2), P.fsdp()], ids=lambda p: p.axes[0].kind)
def test_scalers_schedules_and_averages_on_real_ranks(pools, plan, kind):
    for found in pools(2).run(jobs.scaled_and_scheduled, plan, kind):
        assert found["state"] < 1e-7  # of scales in float32
        assert found["average"] < 1e-7
        assert found["scales"] and found["loaded"], found
        assert len(found["misses"]) <= 3, found
