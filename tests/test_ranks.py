"""Real gloo processes: every rank has rows of its own, the reference is the plain step on the global batch."""

from __future__ import annotations

import pytest
import rank_jobs


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["adamw", "sgd", "convnet"])
def test_twenty_steps_equal_the_plain_run(pools, size, kind):
    for found in pools(size).run(rank_jobs.train_against_plain, "eager", 20, kind):
        assert found["loss"] < 1e-10
        assert found["state"] < 1e-10


def test_inductor_equals_the_plain_run(pools):
    for found in pools(2).run(rank_jobs.train_against_plain, "inductor", 6, timeout=300):
        assert found["loss"] < 1e-10
        assert found["state"] < 1e-10


def test_a_schedule_needs_no_recompile(pools):
    for found in pools(2).run(rank_jobs.train_against_plain, "eager", 10):
        assert found["misses"] == 2  # without and with optimizer state
        assert found["hits"] == 8


def test_as_many_collectives_run_as_lower_says(pools):
    for found in pools(2).run(rank_jobs.sent_for_real):
        assert found["counted"] == found["said"] == 2


def test_other_rows_are_refused_on_every_rank(pools):
    first, second = pools(2).run(rank_jobs.other_rows)
    assert first == second
    assert first.splitlines()[0] == "ranks pass tensors of different types"
    assert "argument x  (rank 0: f32[4, 4], rank 1: f32[3, 4])" in first
    assert "drop or pad" in first


def test_another_dtype_is_refused_on_every_rank(pools):
    first, second = pools(2).run(rank_jobs.other_dtype)
    assert first == second
    assert "argument x  (rank 0: f32[4], rank 1: f64[4])" in first


def test_another_program_is_refused_with_its_first_line(pools):
    first, second = pools(2).run(rank_jobs.other_flag)
    assert first == second
    assert first.splitlines()[0] == "ranks 0 and 1 would run different programs"
    assert "mul" in first


def test_other_first_weights_are_refused(pools):
    first, second = pools(2).run(rank_jobs.other_weights)
    assert first == second
    assert first.splitlines()[0] == "ranks 0 and 1 start from different values"
    assert "parameter weight" in first
    assert "torch.manual_seed" in first


def test_a_mesh_of_other_size_is_refused(pools):
    for text in pools(2).run(rank_jobs.too_large_mesh):
        assert text.splitlines()[0] == "the mesh has 64 ranks, and 2 processes run"
        assert "torchrun --nproc-per-node 64" in text


def test_ranks_go_on_after_a_refused_call(pools):
    pool = pools(2)
    pool.run(rank_jobs.other_rows)
    assert pool.run(rank_jobs.still_works) == [6.0, 6.0]
