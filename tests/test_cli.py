"""The command line: what it prints, and its exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import check_text

import meshstep as ms
from meshstep.cli import main

STEP = """
import torch
import torch.nn.functional as F


def train_step(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def wrong_step(model, optimizer, x, y):
    return train_step(model, optimizer, x + 0 * torch.rand(()).numpy(), y)


def example_args(i=0):
    torch.manual_seed(i)
    model = torch.nn.Linear(6, 4)
    return model, torch.optim.AdamW(model.parameters()), torch.randn(8, 6), torch.randint(4, (8,))


def with_kwargs():
    model, optimizer, x, y = example_args()
    return (model, optimizer), {"x": x, "y": y}


def plan():
    import meshstep as ms

    return ms.plans.fsdp()


number = 3


def returns_number():
    return 3
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.py").write_text(STEP)
    return str(tmp_path / "train.py")


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("command", ["", "run", "plan", "verify", "diff", "doctor"])
def test_help(command: str, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"] if command else ["--help"])
    assert caught.value.code == 0
    check_text(capsys.readouterr().out, f"cli/{command or 'meshstep'}.txt")


def test_plan_says_what_a_rank_holds_and_sends(script: str, tmp_path: Path, capsys) -> None:
    asked_for = ["plan", f"{script}:train_step", "--args", f"{script}:example_args", "--mesh", "dp=4"]
    code, out, err = asked(capsys, *asked_for, "--plan", "fsdp", "--save", str(tmp_path / "plan.json"))
    assert (code, err) == (0, "")
    assert out.startswith("train_step on 4 ranks: ") and "Which parallelism?\n  fsdp on dp=4, 4 ranks\n" in out
    assert dict(ms.plans.load(tmp_path / "plan.json").axes[0].state)["parameter weight"].dim == 0
    code, out, _ = asked(capsys, *asked_for, "--plan", str(tmp_path / "plan.json"), "--json")
    facts = json.loads(out)
    assert code == 0 and (facts["ranks"], facts["mesh"][0]["kind"]) == (4, "fsdp")
    assert facts["memory"]["parts"]["parameters"] == 4 * 7 and facts["memory"]["fits"] is None
    assert {row["axis"] for row in facts["collectives"]} == {"dp"} and facts["whole"] == [] and "calls" not in facts
    _, out, _ = asked(capsys, *asked_for[:-1], "dp=1", "--args", f"{script}:with_kwargs")
    assert "nothing is sent" in out


def test_plan_writes_a_page_and_a_trace_and_fails_if_it_does_not_fit(script: str, tmp_path: Path, capsys) -> None:
    page, trace = tmp_path / "a.html", tmp_path / "trace.json"
    asked_for = ["plan", f"{script}:train_step", "--args", f"{script}:example_args", "--mesh", "dp=4"]
    asked_for += ["--plan", f"{script}:plan", "--html", str(page), "--trace", str(trace)]
    code, out, _ = asked(capsys, *asked_for, "--memory", "1KiB")
    assert code == 0 and "Yes: " in out and "fsdp on dp=4" in out
    assert "fsdp on dp=4" in page.read_text() and json.loads(trace.read_text())["traceEvents"]
    code, out, _ = asked(capsys, *asked_for, "--device", "h100")
    assert code == 0 and out.startswith("train_step on 4 ranks: H100 SXM") and "of 74.5 GiB a rank" in out
    code, out, _ = asked(capsys, *asked_for, "--memory", "0.1 kB")
    assert code == 1 and "of 100 B a rank" in out and "No: " in out


def test_plan_finds_itself_within_the_memory_that_is_given(script: str, tmp_path: Path, capsys) -> None:
    asked_for = ["plan", f"{script}:train_step", "--args", f"{script}:example_args", "--mesh", "dp=2"]
    code, out, _ = asked(capsys, *asked_for, "--plan", "auto", "--device", "h100", "--save", str(tmp_path / "p.json"))
    assert code == 0 and out
    assert [axis.axis for axis in ms.plans.load(tmp_path / "p.json")] == ["dp"]
    code, out, err = asked(capsys, *asked_for, "--plan", "auto", "--memory", "100")
    assert (code, out) == (2, "") and "no plan fits 100 B a rank: " in err


def test_verify_proves_and_its_exit_code_says_so(script: str, capsys, monkeypatch) -> None:
    asked_for = ["verify", f"{script}:train_step", "--args", f"{script}:example_args", "--mesh", "dp=2", "--steps", "2"]
    code, out, _ = asked(capsys, *asked_for)
    assert code == 0 and re.match(r"equal: max error .* over 2 steps", out)
    code, out, _ = asked(capsys, *asked_for, "--json", "--plan", "zero2")
    assert code == 0 and json.loads(out)["ok"] is True
    wrong = ms.Verification(2, {"output": 1}, 0.5, 1e-9, "step 1, output value (by 5.0e-01)")
    monkeypatch.setattr("meshstep.cli.verify", lambda *_, **__: wrong)
    code, out, _ = asked(capsys, *asked_for)
    assert code == 1 and "DIFFERENT at step 1, output value" in out


def test_diff_prints_a_line_for_each_difference(tmp_path: Path, capsys) -> None:
    a, b = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    ms.plans.zero(1).save(a)
    ms.plans.zero(2).save(b)
    assert asked(capsys, "diff", a, a) == (0, "the same\n", "")
    assert asked(capsys, "diff", a, b) == (1, "dp: kind: zero1 -> zero2\ndp: stage: 1 -> 2\n", "")
    code, out, _ = asked(capsys, "diff", a, b, "--json")
    assert code == 1 and json.loads(out) == ["dp: kind: zero1 -> zero2", "dp: stage: 1 -> 2"]


def test_doctor_says_what_there_is(capsys) -> None:
    code, out, _ = asked(capsys, "doctor", "--json")
    facts = json.loads(out)
    assert code == 0 and facts["gloo"] is True and facts["torch"].startswith("2.13")
    assert asked(capsys, "doctor")[1].startswith("python  ")


ASKED = ["plan", "SCRIPT:train_step", "--args", "SCRIPT:example_args", "--mesh", "dp=2"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["plan", "nothing.py:step", "--args", "x.py:f", "--mesh", "dp=2"], "no file 'nothing.py'"),
        (["plan", "SCRIPT", "--args", "SCRIPT:example_args", "--mesh", "dp=2"], "no function named in"),
        (["plan", "SCRIPT:lost", "--args", "SCRIPT:example_args", "--mesh", "dp=2"], "has no function 'lost'"),
        (["plan", "SCRIPT:number", "--args", "SCRIPT:example_args", "--mesh", "dp=2"], "has no function 'number'"),
        (["plan", "SCRIPT:train_step", "--args", "SCRIPT:returns_number", "--mesh", "dp=2"], "--args gave a int"),
        (["plan", "SCRIPT:train_step", "--args", "SCRIPT:example_args", "--mesh", "dp"], "'dp' is no axis"),
        (["plan", "SCRIPT:train_step", "--args", "SCRIPT:example_args", "--mesh", "dp=0"], "axis 'dp' has size 0"),
        ([*ASKED, "--plan", "best"], "no plan 'best'"),
        ([*ASKED, "--plan", "a.json"], "no plan can be read"),
        ([*ASKED, "--plan", "SCRIPT:returns_number"], "gave a int"),
        ([*ASKED, "--memory", "much"], "'much' is no size"),
        ([*ASKED, "--device", "h10"], "no device 'h10' in the hardware table\n  at   device\n  try  'h100'"),
        (["plan", "SCRIPT:wrong_step", "--args", "SCRIPT:example_args", "--mesh", "dp=2"], "value is needed in Python"),
        (["diff", "a.json", "b.json"], "no plan can be read"),
        (["run", "-n", "2", "nothing.py"], "no file nothing.py"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_said_in_one_line_with_a_hint(arguments, text, script: str, capsys) -> None:
    code, out, err = asked(capsys, *(a.replace("SCRIPT", script) for a in arguments))
    assert (code, out) == (2, "")
    assert err.startswith(f"meshstep {arguments[0]}: ") and text in err and "\n  try  " in err


def test_run_starts_ranks_and_says_which_failed(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("import meshstep as ms\nprint('hello from', ms.init())\n")
    (tmp_path / "bad.py").write_text("import os\nassert os.environ['RANK'] == '0', 'rank 1 is bad'\n")

    def run(name: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "meshstep", "run", "-n", "2", str(tmp_path / name), "--flag"]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    good = run("good.py")
    assert good.returncode == 0 and "rank 0 of 2 on cpu" in good.stdout and "rank 1 of 2 on cpu" in good.stdout
    bad = run("bad.py")
    assert bad.returncode == 1 and "rank 1 is bad" in bad.stderr
    assert "meshstep run: rank 1 failed (exit code 1)" in bad.stderr
