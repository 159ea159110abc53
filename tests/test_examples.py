"""The examples run as they say, and so do those in docstrings."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import meshstep
from meshstep.cli import main

EXAMPLES = Path(__file__).parents[1] / "examples"
MODULES = [m.name for m in pkgutil.walk_packages(meshstep.__path__, "meshstep.") if not m.name.endswith("__main__")]


@pytest.mark.parametrize("name", MODULES)
def test_what_docstrings_show_is_so(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def run(*command: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_plan_can_be_looked_at_without_ranks():
    text = run(sys.executable, str(EXAMPLES / "train_sharded.py"), "--mesh", "dp=2,tp=2", "--plan", "fsdp+tp", "--look")
    assert "parameter blocks.0.qkv.weight: S(0 in 3)" in text
    assert re.search(r"a rank: .* parameters, .* activations", text)
    assert "reduce_scatter over dp" in text and "all_reduce over tp" in text


def test_a_large_model_can_be_looked_at_without_its_memory(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MODEL", "tiny")
    script, page = EXAMPLES / "plan_llama.py", tmp_path / "llama.html"
    asked = ["plan", f"{script}:train_step", "--args", f"{script}:example_args", "--plan", f"{script}:plan"]
    assert main([*asked, "--mesh", "dp=8,tp=8", "--device", "h100", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "fsdp on dp=8 + tensor_parallel on tp=8, 64 ranks" in out and "Yes: " in out
    assert "<title>train_step on dp=8, tp=8</title>" in page.read_text()


def test_a_run_goes_on_on_another_mesh(tmp_path):
    def train(*options: str, ranks: int = 1) -> str:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        script = [str(EXAMPLES / "train_sharded.py"), "--checkpoint", str(tmp_path / "a")]
        return run(sys.executable, *launcher, *script, *options)

    train("--mesh", "dp=2", "--plan", "fsdp", "--steps", "5", ranks=2)
    there = train("--mesh", "dp=1,tp=2", "--plan", "data_parallel+tp", "--steps", "10", ranks=2)
    (tmp_path / "a").rename(tmp_path / "b")
    whole = train("--mesh", "dp=1", "--plan", "data_parallel", "--steps", "10")

    def loss(text: str) -> float:
        return float(re.search(r"held-out loss ([\d.]+)", text)[1])  # type: ignore[index]

    assert loss(there) == pytest.approx(loss(whole), abs=2e-3)  # in float32
    assert "step 5:" not in there


@pytest.mark.parametrize(("page", "said"), [("coming-from-spmd.md", "lies S(0)@dp"), ("report.md", " True [")])
def test_the_code_of_a_page_runs_from_top_to_bottom(page, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (EXAMPLES.parent / "docs" / page).read_text()
    code = "\n\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    exec(compile(code, page, "exec"), {"__name__": "docs"})
    assert said in capsys.readouterr().out
