"""Runs that go on: checkpoints that rotate, requests to stop, ranks that die, hang or raise."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import check_equal
from torch import Tensor, nn

import meshstep as ms
import resume
from meshstep.launch import _Heard, _report

Rotating = ms.checkpoint.Rotating
HERE = Path(__file__).parent


def state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2).double()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def weights(objects: dict[str, Any]) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in objects["model"].state_dict().items()}


def filled(folder: Path, numbers: tuple[int, ...] = (2, 4, 6), keep: int = 3) -> tuple[Any, dict[int, dict]]:
    saver, written = Rotating(folder, every=2, keep=keep), {}
    for done in numbers:
        objects = state(done)
        assert not saver.after(done, objects)
        written[done] = weights(objects)
    return saver, written


# ---- checkpoints


def test_checkpoints_rotate_and_the_newest_is_loaded(tmp_path: Path) -> None:
    saver, written = filled(tmp_path, (2, 3, 4, 6, 8))
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-00000000{n}" for n in (4, 6, 8)]
    found = state(99)
    assert saver.resume(found) == 8
    check_equal(weights(found), written[8])


def test_a_folder_that_is_not_there_is_a_beginning(tmp_path: Path) -> None:
    found = state(99)
    before = weights(found)
    assert Rotating(tmp_path / "none", every=1).resume(found) == 0
    check_equal(weights(found), before)


@pytest.mark.parametrize("damage", ["cut", "altered", "missing", "manifest"])
def test_a_damaged_checkpoint_is_passed_over_with_a_line(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    saver, written = filled(tmp_path)
    newest = saver.path(6)
    file = next(newest.glob("__0_*"))
    match damage:
        case "cut":
            file.write_bytes(file.read_bytes()[:-10])
        case "altered":
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
        case "missing":
            file.unlink()
        case "manifest":
            (newest / "meshstep.json").write_text("{")
    found = state(99)
    with caplog.at_level(logging.WARNING, "meshstep"):
        assert saver.resume(found) == 4
    check_equal(weights(found), written[4])
    (line,) = [record.getMessage() for record in caplog.records if record.name == "meshstep"]
    assert line.startswith(f"{newest} is passed over: {newest}")


def test_only_damaged_checkpoints_are_an_error(tmp_path: Path) -> None:
    saver, _ = filled(tmp_path, (2,))
    next(saver.path(2).glob("__0_*")).unlink()
    found = state(99)
    before = weights(found)
    with pytest.raises(ms.CheckpointError, match="1 damaged checkpoint and no good one"):
        saver.resume(found)
    check_equal(weights(found), before)


def test_a_checkpoint_of_another_model_is_no_damage(tmp_path: Path) -> None:
    saver, _ = filled(tmp_path)
    other = nn.Linear(4, 2).double()
    with pytest.raises(ms.CheckpointError, match=r"\[2, 3\] in the checkpoint"):
        saver.resume({"model": other, "optimizer": torch.optim.SGD(other.parameters(), lr=0.1)})


def test_a_file_that_cannot_be_written_leaves_the_ones_before(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk."""
    saver, written = filled(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))
    try:
        with pytest.raises(ms.CheckpointError) as error:
            saver.after(8, state(8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert "the checkpoint could not be written" in str(error.value)
    found = state(99)
    assert saver.resume(found) == 6
    check_equal(weights(found), written[6])


@pytest.mark.parametrize("options", [{"every": 0}, {"every": 2.5}, {"every": 1, "keep": 0}, {"every": True}], ids=str)
def test_wrong_numbers_are_refused(tmp_path: Path, options: Any) -> None:
    with pytest.raises(ms.CheckpointError, match="a number, at least 1"):
        Rotating(tmp_path, **options)


@pytest.mark.parametrize("timeout", [0, -1, 1])
def test_a_timeout_that_is_none_is_refused(timeout: float) -> None:
    with pytest.raises(ms.InputError, match="more than 1"):
        ms.init(timeout=timeout)


# ---- a request to stop


def test_a_request_to_stop_saves_and_the_handler_is_put_back(tmp_path: Path) -> None:
    saver, before = Rotating(tmp_path, every=100), signal.getsignal(signal.SIGTERM)
    with saver.stoppable():
        assert not saver.after(1, state(1))
        os.kill(os.getpid(), signal.SIGTERM)
        assert saver.after(2, state(2))
    assert signal.getsignal(signal.SIGTERM) is before
    assert saver.resume(state(99)) == 2


# ---- ranks that die


def plain_losses(steps: int) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return [f"{resume.train_step(model, optimizer, *resume.batch(i)).item():.10f}" for i in range(steps)]


def script_with(fault: str) -> list[str]:
    return [str(HERE / "faulty_run.py"), fault] if fault else [resume.__file__]


def run(
    tmp_path: Path, ranks: str, *options: str, fault: str = "", restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meshstep", "run", "-n", ranks, "--restarts", str(restarts)]
    script = [*script_with(fault), "--folder", str(tmp_path / "run"), "--timeout", "4", *options]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [*command, *script], capture_output=True, text=True, env=environment, timeout=120, check=False
    )


def losses(output: str) -> dict[int, str]:
    """The last loss that was printed of each step."""
    lines = [line.split() for line in output.splitlines() if line.startswith("step ")]
    return {int(words[1]): f"{float(words[-1]):.10f}" for words in lines}


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("kill", "rank 1 was ended by SIGKILL: out of memory?"),
        ("stop", "rank 1 has not answered for 4 s: it is stopped or gone"),
        ("raise", "ValueError: a fault that was asked for"),
    ],
)
def test_a_run_goes_on_from_the_last_checkpoint_with_fewer_ranks(tmp_path: Path, kind: str, told: str) -> None:
    done = run(tmp_path, "1:2", "--steps", "10", fault=f"1:7:{kind}", restarts=1)
    assert done.returncode == 0, done.stderr
    assert told in done.stderr and f"go on from {tmp_path / 'run' / 'step-000000005'}" in done.stderr
    assert "starts again with 1 ranks" in done.stderr
    assert "Connection" not in done.stderr, "what the other ranks saw of it is no news"
    found = losses(done.stdout)
    assert [found[i] for i in range(10)] == plain_losses(10)
    assert done.stdout.count("step 5 of") == 2 and done.stdout.count("step 4 of") == 1, "at most back to the checkpoint"


def test_a_request_to_stop_that_one_rank_gets_stops_all_after_the_same_step(tmp_path: Path) -> None:
    done = run(tmp_path, "2", "--steps", "10", fault="1:3:term")
    assert done.returncode == 0, done.stderr
    last = max(losses(done.stdout))
    assert 3 <= last <= 4
    assert [p.name for p in (tmp_path / "run").iterdir()] == [f"step-{last + 1:09d}"]


def test_a_run_goes_on_with_other_numbers_of_ranks(tmp_path: Path) -> None:
    outputs = "".join(run(tmp_path, ranks, "--steps", steps).stdout for ranks, steps in (("3", "5"), ("2", "10")))
    found = losses(outputs)
    assert [found[i] for i in range(10)] == plain_losses(10)
    assert [f"step {i} of {n}" in outputs for i, n in ((4, 3), (9, 2))] == [True] * 2


def test_the_report_of_a_death_has_the_end_of_its_traceback(tmp_path: Path) -> None:
    heard = _Heard()
    heard.listen(
        iter(  # type: ignore[arg-type]
            [
                "[default0]:a warning\n",
                "[default1]:[rank1]: Traceback (most recent call last):\n",
                "[default1]:[rank1]: ValueError: no\n",
                "[default0]:Traceback (most recent call last):\n",
                "[default0]:RuntimeError: Connection closed by peer\n",
                "Root Cause (first observed failure):\n",
                "  rank      : 1 (local_rank: 1)\n  exitcode  : 1 (pid: 7)\n",
            ]
        )
    )
    (tmp_path / "checkpoint").write_text("runs/a/step-000000005")
    assert _report(heard, tmp_path, 1) == (
        "meshstep run: rank 1 failed (exit code 1)\n"
        "  at   Traceback (most recent call last):\n"
        "  at   ValueError: no\n"
        f"  try  go on from runs/a/step-000000005; all that was written is in {tmp_path}"
    )
