"""A fault that is planted is found and located: a wrong rule, a wrong pass."""

from __future__ import annotations

import importlib
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support import check_text
from torch import Tensor, nn

import meshstep as ms
from meshstep.passes import EAGER
from meshstep.rules import unregister

aten = torch.ops.aten
WRONG_RULE = """
import torch
from torch.distributed.tensor import Replicate, Shard
import meshstep
from meshstep.rules import Rule

@meshstep.rule(torch.ops.aten.cumsum.default, validate=False)
def cumsum_rules(call):
    yield Rule((Shard(0),), (Shard(0),))
"""


WRONG_PASS = """
from dataclasses import dataclass
from meshstep.ir import collectives

@dataclass(frozen=True)
class Largest:
    op: str = "min"

    def __call__(self, program):
        new, copies = program.copy()
        found = [n for n in new.graph.nodes if n.target is collectives.all_reduce and n.args[1] == self.op]
        if not found:
            return program
        found[-1].args = (found[-1].args[0], "max", found[-1].args[2])
        return new
"""


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    hidden = model[0](x)
    loss = F.cross_entropy(model[1](hidden.cumsum(0)), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def make_args(i: int) -> tuple:
    generator = torch.Generator().manual_seed(i)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    x, y = torch.randn(8, 8, generator=generator), torch.randint(4, (8,), generator=generator)
    return (model, torch.optim.AdamW(model.parameters(), lr=1e-2), x, y), {}


def exit_code(file: str) -> int:
    """Of a file that is run in this process."""
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(file)
    return int(str(caught.value.code))


def shown(found: ms.Verification) -> str:
    """Without the number of the folder and the error, which are others every time."""
    text = re.sub(r"\S*/meshstep-fault-\w+", "FOLDER", str(found))
    text = re.sub(r"(test_\w+\.py):\d+", r"\1:LINE", text)
    return re.sub(r"\d\.\de[+-]\d\d", "N", text) + "\n"


def test_a_wrong_rule_is_named_with_the_value_and_a_file_that_shows_it(tmp_path: Path, capsys):
    rules = tmp_path / "wrong_rules.py"
    rules.write_text(WRONG_RULE)
    runpy.run_path(str(rules))
    try:
        found = ms.verify(train_step, make_args, mesh=ms.Mesh(dp=2), steps=2)
    finally:
        unregister(aten.cumsum.default)
    assert not found.ok and found.culprit is not None and found.culprit.file is not None
    assert found.culprit.source.startswith("test_trust.py:")
    check_text(shown(found), "trust/wrong_rule.txt")
    with pytest.raises(ms.VerifyError) as caught:
        found.check()
    assert (caught.value.at, caught.value.hint) == (
        f"{found.culprit.value}\n       off by {found.culprit.error:.1e}, made by {found.culprit.made_by}",
        f"python {found.culprit.file}",
    )
    done = subprocess.run([sys.executable, found.culprit.file], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "") and done.stdout.startswith("DIFFERENT: %cumsum is off by ")
    rules.write_text(WRONG_RULE.replace("Shard(0)", "Replicate()"))  # repaired
    try:
        assert exit_code(found.culprit.file) == 0
    finally:
        unregister(aten.cumsum.default)
    assert capsys.readouterr().out == "the rule is no longer there\n"


def test_a_wrong_pass_is_named_with_the_value_and_a_file_that_shows_it(tmp_path: Path, monkeypatch, capsys):
    file = tmp_path / "wrong_pass.py"
    file.write_text(WRONG_PASS)
    monkeypatch.syspath_prepend(str(tmp_path))
    wrong = importlib.import_module("wrong_pass").Largest("sum")
    args, _ = make_args(0)
    passes = replace(EAGER, passes=(*EAGER.passes[:2], wrong, *EAGER.passes[2:]))
    step = ms.compile(mesh=ms.Mesh(dp=2), passes=passes)(train_step)
    found = step.verify(args[0].double(), args[1], args[2].double(), args[3], steps=2)
    assert not found.ok and found.culprit is not None and found.culprit.file is not None
    check_text(shown(found), "trust/wrong_pass.txt")
    assert exit_code(found.culprit.file) == 1
    assert capsys.readouterr().out.startswith("DIFFERENT: %all_reduce is off by ")
    assert Path(found.culprit.file).read_text().count("piece.call(") == 1, "the smallest piece"
    file.write_text(WRONG_PASS.replace('"max"', '"sum"'))  # repaired
    sys.modules.pop("meshstep_piece_wrong_pass")
    assert exit_code(found.culprit.file) == 0


def test_a_wrong_rule_of_the_second_axis_is_named(tmp_path: Path):
    rules = tmp_path / "wrong_rules.py"
    rules.write_text(WRONG_RULE)
    runpy.run_path(str(rules))
    try:
        plan = ms.plans.data_parallel("dp") + ms.plans.tensor_parallel({"0": "colwise", "1": "rowwise"}, "tp")
        found = ms.verify(train_step, make_args, mesh=ms.Mesh(tp=2, dp=2), plan=plan, steps=1)
    finally:
        unregister(aten.cumsum.default)
    assert found.culprit is not None
    assert found.culprit.made_by == "the rule S(0) -> S(0) of aten.cumsum along 'dp' (wrong_rules.py:7)"
    assert found.culprit.value.startswith("%cumsum : f64[8, 16] R@tp = ")


def test_a_step_that_is_not_what_was_captured_has_no_culprit_in_the_program():
    drifting = iter(range(100))

    def step(model, optimizer, x, y):
        return train_step(model, optimizer, x + next(drifting), y)

    found = ms.verify(step, make_args, mesh=ms.Mesh(dp=2), steps=2)
    assert found.culprit is None
    check_text(shown(found), "trust/no_culprit.txt")
