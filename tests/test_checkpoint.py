"""Checkpoints: from any layout to any other, whole or not at all, and clear words when they do not fit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import checkpoint_jobs as jobs
import pytest
import torch
from torch import nn

import meshstep as ms
from gpt import GPT

LAYOUTS = list(jobs.LAYOUTS)


def run_on(pools, layout, job, *args, **options):
    """A job under a layout: on as many real ranks as it has, or here."""
    plan, mesh = jobs.LAYOUTS[layout]
    return [job(*args, **options)] if plan is None else pools(mesh.size).run(job, *args, **options)


@pytest.fixture(scope="module")
def saved(pools, tmp_path_factory):
    """A checkpoint after three steps, by each layout."""
    root = tmp_path_factory.mktemp("checkpoints")
    want = jobs.uninterrupted()
    paths = {}
    for number, layout in enumerate(LAYOUTS):
        paths[layout] = root / f"from-{number}"
        for losses in run_on(pools, layout, jobs.save_under, layout, paths[layout]):
            assert losses == pytest.approx(want, abs=1e-12)
    return paths, want


@pytest.mark.parametrize("to", LAYOUTS)
def test_every_layout_goes_on_from_every_other(pools, saved, to):
    paths, want = saved
    for found in run_on(pools, to, jobs.go_on_under, to, paths):
        for name, losses in found.items():
            assert losses == pytest.approx(want[3:], abs=1e-12), f"from {name}"


@pytest.mark.parametrize("layout", ["plain", "fsdp", "fsdp x tp"])
def test_state_in_shards_is_read_where_it_lies(pools, saved, layout):
    paths, want = saved
    for losses in run_on(pools, layout, jobs.load_between_calls, layout, paths["hsdp"]):
        assert losses == pytest.approx(want[3:], abs=1e-12)


@pytest.mark.parametrize("layout", ["plain", "fsdp"])
def test_training_goes_on_while_it_is_written(pools, tmp_path, layout):
    want = jobs.uninterrupted()
    for losses in run_on(pools, layout, jobs.in_the_background, layout, tmp_path / "a"):
        assert losses == pytest.approx(want[3:], abs=1e-12)


def test_dropout_goes_on_as_it_would_have(pools, tmp_path):
    for want, found in pools(2).run(jobs.dropout, tmp_path / "a", ms.plans.fsdp()):
        assert found == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize("layout", ["plain", "fsdp x tp"])
def test_plain_pytorch_reads_the_exported_file(pools, tmp_path, layout):
    file = tmp_path / "model.safetensors"
    state, *_ = run_on(pools, layout, jobs.export, file, layout)
    script = f"""
import sys, torch
sys.path.insert(0, {str(Path(__file__).parents[1] / "examples")!r})
from safetensors.torch import load_file
from gpt import GPT
model = GPT(width=16, layers=1, heads=2, context=8, vocab=64).double()
model.load_state_dict(load_file({str(file)!r}))
torch.save(model.state_dict(), {str(tmp_path / "plain.pt")!r})
assert "meshstep" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    for name, value in torch.load(tmp_path / "plain.pt").items():
        assert torch.equal(value, state[name]), name


@pytest.mark.parametrize("stage", ["writing", "manifest", "moving"])
def test_a_save_that_is_killed_loses_nothing(tmp_path, stage):
    path = tmp_path / "a"
    script = f"import checkpoint_jobs; checkpoint_jobs.kill_in({stage!r}, {str(path)!r})"
    ended = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parent, env=_with_examples(), check=False)
    assert ended.returncode == -9
    run = jobs.Run("plain", seed=99)
    run.load(path)
    assert run.done == 2
    assert run.train(3) == pytest.approx(jobs.Run("plain").train(5)[2:], abs=1e-12)
    run.save(path)  # and the next one takes its place, and leaves nothing behind
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    again = jobs.Run("plain", seed=98)
    again.load(path)
    assert again.done == 5


def _with_examples() -> dict[str, str]:
    import os

    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[1] / "examples")}


def test_a_process_killed_at_any_time_leaves_a_good_one(tmp_path):
    path = tmp_path / "a"
    script = f"import checkpoint_jobs; checkpoint_jobs.save_until_killed({str(path)!r})"
    command = [sys.executable, "-c", script]
    folder = Path(__file__).parent
    with subprocess.Popen(command, cwd=folder, env=_with_examples(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(6):
            last = int(process.stdout.readline())
        process.kill()
    run = jobs.Run("plain", seed=99)
    run.load(path)
    assert run.done >= last - 1


def test_a_rank_that_cannot_write_is_told_of_on_all(pools, tmp_path):
    first, second = pools(2).run(jobs.failing_rank, tmp_path / "a")
    assert "no space left" in first and "no space left" in second


def test_only_the_newest_are_kept(tmp_path):
    run = jobs.Run("plain")
    for i in range(4):
        run.train(1)
        run.save(tmp_path / f"step-{i}", keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-2", "step-3"]


@pytest.fixture
def checkpoint(tmp_path):
    run = jobs.Run("plain")
    run.train(1)
    run.save(tmp_path / "a")
    return tmp_path / "a"


def held(objects):
    """Every entry of optimizers by identity, the values of parameters, and the state of the generator."""
    optimizers = [o for o in objects.values() if isinstance(o, torch.optim.Optimizer)]
    entries = [[(id(p), [(k, id(v)) for k, v in e.items()]) for p, e in o.state.items()] for o in optimizers]
    values = [p.sum().item() for m in objects.values() if isinstance(m, nn.Module) for p in m.parameters()]
    return entries, values, torch.get_rng_state().tolist()


def error_of(path, objects):
    before = held(objects)
    with pytest.raises(ms.CheckpointError) as caught:
        ms.checkpoint.load(path, objects)
    assert held(objects) == before  # a checkpoint that does not fit changes nothing
    return str(caught.value).replace(str(path.parent), "DIR")


def test_a_missing_checkpoint_is_named(checkpoint):
    assert error_of(checkpoint.parent / "b", jobs.Run("plain").objects()) == (
        "no checkpoint\n  at   DIR/b\n  try  there is a"
    )


def test_a_damaged_file_is_named(checkpoint):
    file = next(checkpoint.glob("__0_*"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert error_of(checkpoint, jobs.Run("plain").objects()) == (
        f"a damaged checkpoint\n  at   DIR/a/{file.name} is not what was written\n  try  another checkpoint"
    )
    file.unlink()
    assert f"DIR/a/{file.name} is missing" in error_of(checkpoint, jobs.Run("plain").objects())


def test_another_shape_is_named(checkpoint):
    objects = jobs.Run("plain").objects()
    objects["model"] = GPT(width=16, layers=1, heads=2, context=9, vocab=64).double()
    objects["optimizer"] = torch.optim.AdamW(objects["model"].parameters())
    assert error_of(checkpoint, objects) == (
        "model/positions is torch.float64 [8, 16] in the checkpoint, and torch.float64 [9, 16] here\n"
        "  at   model/positions\n  try  the model and optimizer that were saved"
    )


def test_a_name_that_was_not_saved_is_named(checkpoint):
    objects = jobs.Run("plain").objects()
    objects["models"] = objects.pop("model")
    text = error_of(checkpoint, objects)
    assert text.startswith("the checkpoint has no models/positions\n  at   models/positions\n  try  it has model/")


def test_more_than_is_wanted_is_named(checkpoint):
    objects = jobs.Run("plain").objects()
    model = nn.Linear(2, 2).double()
    assert "nothing here takes" in error_of(checkpoint, {"model": GPT(16, 1, 2, 8, 64).double()})
    assert error_of(checkpoint, {**objects, "optimizer": torch.optim.SGD(model.parameters())}).startswith(
        "the checkpoint has optimizer/"
    )


def test_a_python_value_that_was_not_saved_is_named_before_anything_is_read(checkpoint):
    objects = jobs.Run("plain").objects()
    assert error_of(checkpoint, {**objects, "epoch": 3}).startswith("the checkpoint has no epoch")


def test_a_step_that_was_not_called_knows_no_modules(tmp_path):
    step = ms.compile(lambda model, x: model(x).sum())
    with pytest.raises(ms.CheckpointError, match="a step that was not called yet knows no modules"):
        ms.checkpoint.save(tmp_path / "a", step)


def test_what_is_no_set_of_objects_is_refused(tmp_path):
    with pytest.raises(ms.CheckpointError, match="a int instead of objects by name"):
        ms.checkpoint.save(tmp_path / "a", 3)
    with pytest.raises(ms.CheckpointError, match="a dict in a file of safetensors"):
        ms.checkpoint.save(tmp_path / "a.safetensors", {})


def test_the_plan_is_written_along(tmp_path):
    model = nn.Linear(4, 4)
    step = ms.simulate(lambda model, x: model(x).sum(), mesh=ms.Mesh(dp=2), plan=ms.plans.fsdp())
    step(model, torch.ones(4, 4))
    ms.checkpoint.save(tmp_path / "a", step)
    assert '"plan": "fsdp on dp"' in (tmp_path / "a" / "meshstep.json").read_text()


def test_a_tied_parameter_is_saved_and_exported(tmp_path):
    from sharded_jobs import Tied

    torch.manual_seed(0)
    model = Tied()
    ms.checkpoint.save(tmp_path / "a", {"model": model})
    ms.checkpoint.save(tmp_path / "a.safetensors", model)
    for path in (tmp_path / "a", tmp_path / "a.safetensors"):
        torch.manual_seed(1)
        other = Tied()
        ms.checkpoint.load(path, {"model": other} if path.suffix == "" else other)
        assert other.head.weight is other.embed.weight
        assert torch.equal(other.embed.weight, model.embed.weight)
