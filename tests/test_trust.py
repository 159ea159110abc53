"""A fault that is planted is found and located: a wrong rule, a wrong pass."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import trust_jobs
from support import Build, check_text
from torch import Tensor, nn

import meshstep as ms
from meshstep import partition
from meshstep.cli import main
from meshstep.ir import collectives
from meshstep.ir.printer import exact_text, program_text
from meshstep.ir.program import Program, collective_order
from meshstep.ir.verifier import verify_program
from meshstep.layout import shard
from meshstep.passes import EAGER, Pipeline, lower
from meshstep.passes.lower import AxisGroup
from meshstep.rules import unregister
from meshstep.runtime.checksums import checksum

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


SCRIPT = """
def step(x):
    return x.cumsum(0)

def example_args():
    return (torch.arange(8.0),)
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


def test_a_wrong_redistribution_is_not_blamed_on_the_rule(monkeypatch, capsys):
    def step(w: Tensor, x: Tensor) -> Tensor:
        return (x @ w).softmax(0)

    right = partition.redistribution

    def wrong(have, want, axis, size):
        op, rest = right(have, want, axis, size)
        return (op, ("max", axis)) if op is collectives.all_reduce else (op, rest)

    monkeypatch.setattr(partition, "redistribution", wrong)
    args = torch.randn(6, 4, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)
    inputs = {"w": shard(0), "x": shard(1)}
    compiled = ms.compile(mesh=ms.Mesh(dp=2), inputs=inputs)(step)
    found = compiled.verify(*args, steps=1)
    assert found.culprit is not None and found.culprit.file is not None
    assert found.culprit.made_by == "the redistribution of its inputs from P(sum) to R along 'dp'"
    assert exit_code(found.culprit.file) == 1
    monkeypatch.undo()
    assert exit_code(found.culprit.file) == 0
    assert capsys.readouterr().out.endswith("equal\n")


def test_the_command_line_tells_the_culprit(tmp_path: Path, capsys):
    script = tmp_path / "train.py"
    script.write_text(WRONG_RULE + SCRIPT)
    try:
        given = ["--args", f"{script}:example_args", "--mesh", "dp=2", "--steps", "1"]
        assert main(["verify", f"{script}:step", *given, "--json"]) == 1
    finally:
        unregister(aten.cumsum.default)
    culprit = json.loads(capsys.readouterr().out)["culprit"]
    assert culprit["made_by"] == "the rule S(0) -> S(0) of aten.cumsum along 'dp' (train.py:7)"
    assert culprit["source"] == "train.py:12" and Path(culprit["file"]).is_file()


def test_a_step_that_is_not_what_was_captured_has_no_culprit_in_the_program():
    drifting = iter(range(100))

    def step(model, optimizer, x, y):
        return train_step(model, optimizer, x + next(drifting), y)

    found = ms.verify(step, make_args, mesh=ms.Mesh(dp=2), steps=2)
    assert found.culprit is None
    check_text(shown(found), "trust/no_culprit.txt")


# ---- state that several ranks hold


def without_numbers(text: str) -> str:
    """Values and how many of their bits differ depend on the machine's rounding in the step after the flip."""
    return re.sub(r"-?\d+\.\d+(e[+-]\d+)?", "X", re.sub(r"\d+ bits of", "N bits of", text)) + "\n"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (70, 131), (0,)])
def test_a_checksum_sees_every_bit(dtype, shape):
    generator = torch.Generator().manual_seed(1)
    tensor = (torch.randn(shape, generator=generator) * 50).to(dtype)
    before = checksum(tensor)
    assert checksum(tensor.clone()) == before
    if tensor.numel() == 0:
        return
    memory = tensor.view(-1).view(torch.uint8)
    for place in torch.randint(len(memory), (40,), generator=generator).tolist():
        for bit in (0, 3, 7):
            memory[place] ^= 1 << bit
            assert checksum(tensor) != before
            memory[place] ^= 1 << bit


def test_a_checksum_sees_an_exchange_and_ignores_how_memory_lies():
    tensor = torch.randn(130, 140)
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor)
    assert checksum(tensor.flip(0)) != checksum(tensor)
    assert checksum(tensor[1:][:, 1:]) == checksum(tensor[1:, 1:].clone())
    line = torch.randn(9)
    assert checksum(line[1:]) == checksum(line[1:].clone()) != checksum(line[:-1])


@pytest.mark.parametrize("kind", ["parameter", "optimizer state", "tensor parallel"])
def test_a_flipped_bit_is_found_with_rank_state_and_element(pools, kind):
    found = pools(4).run(trust_jobs.flipped_bit, 3 if kind == "tensor parallel" else 2, kind)
    assert len({text for _, text in found}) == 1 and {step for step, _ in found} == {3}
    check_text(without_numbers(found[0][1]), f"trust/flip_{kind.replace(' ', '_')}.txt")


def test_of_two_copies_none_is_said_to_be_right(pools):
    found = pools(2).run(trust_jobs.flipped_bit, 1, "parameter")
    assert {step for step, _ in found} == {3}
    check_text(without_numbers(found[0][1]), "trust/flip_of_two.txt")


def test_healthy_state_is_not_complained_about(pools):
    assert pools(2).run(trust_jobs.flipped_bit, 9, "parameter") == [(-1, "nothing was said")] * 2


@pytest.mark.parametrize("given", [0, -1, True, "often"])
def test_a_check_every_that_is_no_number_is_refused(given):
    with pytest.raises(ms.InputError, match="check_every is "):
        ms.compile(check_every=given)(train_step)


# ---- the same program on all ranks


def test_another_of_the_known_programs_is_noticed_at_the_next_check(pools):
    found = pools(2).run(trust_jobs.other_cached_program)
    assert len({text for _, text in found}) == 1 and {step for step, _ in found} == {3}
    assert found[0][1].splitlines()[0] == "rank 1 has run other programs of the step than rank 0"


def test_other_threads_and_hash_seeds_are_right_and_other_rows_are_refused_in_time():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(2):
        given = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        given |= {"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "PYTHONHASHSEED": str(rank + 1)}
        ranks.append(
            subprocess.Popen(
                [sys.executable, trust_jobs.__file__], env=os.environ | given, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    (out, _), (other, _) = (rank.communicate(timeout=100) for rank in ranks)
    assert [text.split()[:2] for text in (out, other)] == [["right", "1"], ["right", "2"]]
    assert out.split()[2] != other.split()[2], "the seeds of hashes were the same"
    refused = other.splitlines()[1:]
    assert float(refused[0]) < 10 and refused[1].startswith("rank 0 did not come along"), other
    assert ranks[1].returncode == 3 and ranks[0].returncode != 0, "no rank waits for ever"


def test_a_bucket_of_another_order_is_another_program():
    def bucket(*order: int) -> Program:
        build = Build(dp=2)
        values = [build.input(f"x{i}", 4) for i in range(6)]
        return build.program(build(aten.cat.default, [values[i] for i in order]))

    one, other = bucket(0, 1, 2, 3, 4, 5), bucket(0, 1, 2, 3, 5, 4)
    assert program_text(one) == program_text(other), "the text for people cuts long lists"
    assert exact_text(one) == exact_text(bucket(0, 1, 2, 3, 4, 5))
    assert exact_text(one) != exact_text(other)


@pytest.mark.parametrize("count", range(len(EAGER.passes) + 1))
def test_after_every_pass_all_ranks_call_the_collectives_in_the_order_of_the_program(count):
    args, _ = make_args(0)
    mesh = ms.Mesh(dp=2, tp=2)
    plan = ms.plans.fsdp("dp") + ms.plans.tensor_parallel({"0": "colwise", "1": "rowwise"}, "tp")
    passes = Pipeline(EAGER.passes[:count])
    local = ms.compile(mesh=mesh, plan=plan, passes=passes)(train_step).lower(*args).local_program
    order = [line.split("(")[0] for line in collective_order(local)]
    assert len(order) > 4
    for rank in range(mesh.size):
        at = mesh.coordinate(rank)
        module = lower(local, {axis: AxisGroup(axis, mesh[axis], at[axis]) for axis in mesh})
        called = [str(node.target) for node in module.graph.nodes if "c10d" in str(node.target)]
        assert [LOWERED[target] for target in called if "wait" not in target] == order


LOWERED = {
    "_c10d_functional.all_reduce.default": "all_reduce",
    "_c10d_functional.all_gather_into_tensor.default": "all_gather",
    "_c10d_functional.reduce_scatter_tensor.default": "reduce_scatter",
    "_c10d_functional.all_to_all_single.default": "all_to_all",
}


def test_a_collective_over_other_ranks_than_the_axis_has_is_refused():
    build = Build(dp=2)
    x = build.input("x", 4, dp=shard(0))
    program = build.program(build.all_gather(x))
    (gather,) = program.calls
    gather.args = (*gather.args[:-1], 4)
    with pytest.raises(ms.PassError, match="%all_gather is said to be over 4 ranks, and axis 'dp' has 2"):
        verify_program(program)


# ---- numbers that go bad


def bad_arguments(zero_row: int | None = None) -> tuple:
    (model, optimizer, x, y), _ = make_args(0)
    with torch.no_grad():
        for linear in model:
            linear.bias.zero_()
    if zero_row is not None:
        x[zero_row] = 0
    return model, optimizer, x, y


def test_the_first_value_that_is_not_finite_is_named_with_rank_and_global_index():
    step = ms.simulate(trust_jobs.bad_step, mesh=ms.Mesh(dp=4))
    assert step.find_non_finite(*bad_arguments()) is None
    args = bad_arguments(zero_row=5)
    before = args[0][0].weight.detach().clone()
    found = step.find_non_finite(*args)
    assert found is not None
    assert (found.number, found.rank, found.index, found.count) == ("-inf", 2, (5, 0), 4)
    assert found.value.startswith("%log : f32[8/4, 4] S(0)@dp = aten.log(")
    assert found.source.startswith("trust_jobs.py:") and found.reached[0] == "output 0"
    assert torch.equal(args[0][0].weight, before)
    check_text(without_lines(str(found)), "trust/non_finite.txt")


def without_lines(text: str) -> str:
    return re.sub(r"(test_\w+\.py|\w+_jobs\.py):\d+", r"\1:LINE", text) + "\n"


def test_a_mask_of_infinities_is_meant_and_a_row_that_is_all_masked_is_not():
    def masked(scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(mask, float("-inf")).softmax(-1).sum()

    step, mask = ms.simulate(masked, mesh=ms.Mesh(dp=2)), torch.zeros(4, 3, dtype=torch.bool)
    mask[:, 1] = True
    assert step.find_non_finite(torch.randn(4, 3), mask) is None
    mask[3] = True
    found = step.find_non_finite(torch.randn(4, 3), mask)
    assert found is not None and (found.number, found.rank, found.index) == ("nan", 1, (3, 0))
    assert "softmax" in found.value


def test_looking_for_bad_numbers_does_not_change_the_random_numbers_of_later_steps():
    def noisy(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)

    def run(looks: bool) -> list[Tensor]:
        torch.manual_seed(3)
        step, found = ms.simulate(noisy, mesh=ms.Mesh(dp=2)), []
        for _ in range(3):
            if looks:
                assert step.find_non_finite(torch.ones(64)) is None
            found.append(step(torch.ones(64)))
        return found

    for looked, not_looked in zip(run(True), run(False), strict=True):
        assert torch.equal(looked, not_looked)


def test_what_a_collective_makes_infinite_is_found():
    def narrow(x: Tensor) -> Tensor:
        return x.sum()

    found = ms.simulate(narrow, mesh=ms.Mesh(dp=2)).find_non_finite(torch.full((4,), 1e38))
    assert found is not None and found.number == "inf" and "all_reduce" in found.value


@pytest.mark.parametrize("kind", ["argument", "overflow"])
def test_real_ranks_agree_on_what_went_bad_and_change_nothing(pools, kind):
    found = pools(2).run(trust_jobs.where_it_goes_bad, kind)
    assert found[0] == found[1] and found[0][1] is True
    check_text(without_lines(found[0][0]), f"trust/non_finite_{kind}.txt")


def test_real_ranks_agree_that_all_is_finite(pools):
    assert pools(2).run(trust_jobs.where_it_goes_bad, "none") == [("None", True)] * 2


def test_the_code_of_the_page_runs_from_top_to_bottom(capsys):
    text = (Path(__file__).parent.parent / "docs" / "trust.md").read_text()
    code = "\n\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    exec(compile(code, "trust.md", "exec"), {"__name__": "docs"})
    out = capsys.readouterr().out
    assert out.startswith("equal: max error ") and "(1 output, 2 parameters, 6 optimizer states a step)" in out
    assert "-inf at [2] on rank 1, 2 in all there\n  at   %log : f32[4/2] S(0)@dp = aten.log(%sqrt)" in out
