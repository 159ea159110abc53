"""`plans.auto`: the plans that are known to be best are found, and none written by hand is better by the cost model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from models import Gpt, Mlp, built, labels, rows, train_step
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import meshstep as ms
from meshstep.errors import PlanError
from meshstep.plan.plan import AxisPlan


def wide(i: int = 0, width: int = 1024, count: int = 16):
    """Two wide maps, and few rows: moving rows is cheaper than moving gradients."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        arguments = torch.empty(count, width), torch.empty(count, dtype=torch.int64)
    return model, torch.optim.SGD(model.parameters(), momentum=0.9), *arguments


def gpt_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def gpt(i: int = 0):
    model = built(Gpt)
    return model, torch.optim.AdamW(model.parameters()), labels(i, 5, classes=16), labels(i + 9, 5, classes=16)


def mlp(i: int = 0):
    model = built(Mlp)
    return model, torch.optim.AdamW(model.parameters()), rows(i), labels(i)


def lowered(step, arguments, mesh: ms.Mesh, plan: ms.Plan | None = None) -> ms.Lowered:
    return ms.simulate(step, mesh=mesh, plan=plan or ms.plans.auto()).lower(*arguments)


def lies(found: ms.Lowered, axis: str) -> dict[str, object]:
    """Where the parameters are, by name."""
    state = found.plan[axis].state
    return {name.removeprefix("parameter "): p for name, p in state if name.startswith("parameter ")}


# ---- known optima


def test_a_wide_perceptron_is_split_by_columns_and_then_by_rows():
    found = lowered(train_step, wide(), ms.Mesh(tp=2))
    assert found.plan["tp"].in_place and found.plan["tp"].batch_dim is None
    places = lies(found, "tp")
    assert (places["0.weight"], places["2.weight"]) == (Shard(0), Shard(1))
    assert places["0.bias"] == Shard(0) and places["2.bias"] == Replicate()
    assert [record.kind for record in found.communication] == ["all_reduce"]  # once forward; x needs no gradient


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)).mean(1)


def test_attention_is_split_by_heads():
    with torch.device("meta"):
        model = Attention(1024, 8)
        x, y = torch.empty(2, 16, 1024), torch.empty(2, dtype=torch.int64)
    found = lowered(train_step, (model, torch.optim.SGD(model.parameters()), x, y), ms.Mesh(tp=4))
    places = lies(found, "tp")
    assert [places[f"{name}.weight"] for name in "qkvo"] == [Shard(0), Shard(0), Shard(0), Shard(1)]


def test_a_huge_head_is_split_by_its_vocabulary():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 200_000, bias=False))
        x, y = torch.empty(64, 64), torch.empty(64, dtype=torch.int64)
    found = lowered(train_step, (model, torch.optim.SGD(model.parameters()), x, y), ms.Mesh(tp=4))
    assert found.plan["tp"].in_place and lies(found, "tp")["1.weight"] == Shard(0)


def test_a_small_model_with_many_rows_is_data_parallel():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 16))
        x, y = torch.empty(65_536, 256), torch.empty(65_536, dtype=torch.int64)
    found = lowered(train_step, (model, torch.optim.SGD(model.parameters()), x, y), ms.Mesh(dp=4))
    assert found.plan["dp"].batch_dim == 0 and set(lies(found, "dp").values()) == {Replicate()}


def adam(width: int = 512, count: int = 4096):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        arguments = torch.empty(count, width), torch.empty(count, dtype=torch.int64)
    return model, torch.optim.AdamW(model.parameters()), *arguments


def test_state_is_sharded_where_memory_is_short():
    every_row = {"x": Shard(0), "y": Shard(0)}
    step = ms.simulate(train_step, mesh=ms.Mesh(dp=4), plan=ms.plans.data_parallel(), inputs=every_row)
    whole = step.lower(*adam()).memory.peak
    found = lowered(train_step, adam(), ms.Mesh(dp=4), ms.plans.auto(memory=whole - 2**21))
    assert found.memory.peak <= whole - 2**21
    state = [p for name, p in found.plan["dp"].state if name.startswith("optimizer state") and "step" not in name]
    assert any(isinstance(p, Shard) for p in state)


# ---- what is promised


HAND = [ms.plans.data_parallel, lambda a: ms.plans.fsdp(a, reshard_after_forward=False), ms.plans.fsdp]


@pytest.mark.parametrize("arguments", [wide, adam, mlp], ids=["wide", "adam", "mlp"])
def test_no_plan_written_by_hand_is_faster_by_the_cost_model(arguments):
    search = lowered(train_step, arguments(), ms.Mesh(dp=2, tp=2)).search
    assert search is not None
    tried = {found.plan: found.us for found in search.tried}
    by_hand = [a("dp") + b("tp") for a in HAND for b in HAND]
    assert all(search.found.us <= tried[plan] for plan in by_hand)
    assert search.found is search.tried[0] and search.gap <= 1e-3


@pytest.mark.parametrize("case", ["mlp", "gpt"])
def test_what_is_found_computes_the_plain_numbers(case):
    step, make = {"mlp": (train_step, mlp), "gpt": (gpt_step, gpt)}[case]
    mesh = ms.Mesh(dp=2, tp=2) if case == "mlp" else ms.Mesh(dp=2)
    result = ms.verify(step, lambda i: (make(i), {}), mesh=mesh, plan=ms.plans.auto(), steps=3)
    assert result.ok and result.max_error < 1e-12, str(result)


def test_state_of_some_parameters_is_kept_in_shards_and_others_are_computed_in_place():
    mixed = ms.Plan(
        (AxisPlan("dp", "auto", batch_dim=0, stage=3, patterns=(("fc2", Shard(0)),), in_place=True, regather=True),)
    )
    result = ms.verify(train_step, lambda i: (mlp(i), {}), mesh=ms.Mesh(dp=2), plan=mixed, steps=3)
    assert result.ok and result.max_error < 1e-12, str(result)
    kinds = [record.kind for record in lowered(train_step, mlp(), ms.Mesh(dp=2), mixed).communication]
    assert "all_gather" in kinds and "reduce_scatter" in kinds


def test_a_plan_that_is_given_for_an_axis_is_kept():
    given = ms.plans.zero(2, "dp")
    found = lowered(train_step, mlp(), ms.Mesh(dp=2, tp=2), given + ms.plans.auto())
    assert (found.plan["dp"].kind, found.plan["dp"].stage) == ("zero2", 2)
    assert {tried.plan["dp"] for tried in found.search.tried} == {given["dp"]}
    assert len({tried.plan["tp"] for tried in found.search.tried}) > 4


def test_a_found_plan_goes_through_a_file_and_needs_no_search(tmp_path: Path):
    found = lowered(gpt_step, gpt(), ms.Mesh(dp=2))
    found.plan.save(tmp_path / "plan.json")
    again = lowered(gpt_step, gpt(), ms.Mesh(dp=2), ms.plans.load(tmp_path / "plan.json"))
    assert again.search is None and again.as_text() == found.as_text()


def test_a_step_keeps_the_plan_that_it_found():
    step = ms.simulate(train_step, mesh=ms.Mesh(dp=2), plan=ms.plans.auto())
    first = step.lower(*mlp())
    other = step.lower(*mlp()[:2], rows(1, count=64), labels(1, count=64))
    assert first.search is other.search and first.plan["dp"].state == other.plan["dp"].state


def test_ranks_that_are_called_have_rows_of_their_own_whatever_is_found():
    step = ms.compile(mesh=ms.Mesh(tp=2), plan=ms.plans.auto())(train_step)
    found = step.lower(*wide())
    assert {tried.plan["tp"].batch_dim for tried in found.search.tried} == {0}


SCRIPT = """
import meshstep as ms
from models import train_step
from test_auto import lowered, mlp
found = lowered(train_step, mlp(), ms.Mesh(dp=2))
print(found.plan, [str(t) for t in found.search.tried], found.as_text())
"""


def test_ranks_with_other_hash_seeds_find_the_same():
    def output(seed: str) -> str:
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path}
        command = [sys.executable, "-c", SCRIPT]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    first = output("0")
    assert first and first == output("12345")


# ---- layers that repeat


def test_repeated_layers_are_left_out_and_cost_what_the_whole_program_costs():
    def of(layers: int) -> ms.Lowered:
        model = built(Gpt, layers=layers)
        arguments = labels(0, 5, classes=16), labels(9, 5, classes=16)
        plan = ms.plans.fsdp("dp") + ms.plans.auto()
        step = ms.simulate(gpt_step, mesh=ms.Mesh(dp=2, tp=1), plan=plan)
        return step.lower(model, torch.optim.AdamW(model.parameters()), *arguments)

    long = of(8)
    assert long.search.folded == 4  # of six equal ones: the outer two of the eight differ
    assert long.search.found.memory == pytest.approx(long.memory.peak, rel=0.02)


# ---- errors


def message(error: pytest.ExceptionInfo[PlanError]) -> str:
    return str(error.value)


def test_nothing_fits():
    with pytest.raises(PlanError) as caught:
        lowered(train_step, adam(), ms.Mesh(dp=2), ms.plans.auto(memory=2**20))
    lines = message(caught).splitlines()
    assert lines[0].startswith("no plan fits 1 MiB a rank: ") and lines[0].endswith(" are missing")
    assert lines[1].startswith("  at   the smallest of ") and " on dp, " in lines[1]
    assert lines[2] == "  try  more ranks, a smaller batch, or checkpointed activations"


def test_a_plan_that_is_not_found_yet_cannot_be_saved(tmp_path: Path):
    with pytest.raises(PlanError) as caught:
        ms.plans.auto(memory=80 * 2**30, device="h100").save(tmp_path / "plan.json")
    assert message(caught) == (
        "the plan is not found yet: it depends on the step\n"
        "  at   auto on every other axis, within 80 GiB on h100\n"
        "  try  step.lower(...).plan, or meshstep plan --plan auto --save plan.json"
    )
    assert not list(tmp_path.iterdir())


def test_one_search_is_enough():
    with pytest.raises(PlanError) as caught:
        ms.plans.auto() + ms.plans.auto()
    assert message(caught) == (
        "two plans that find themselves\n  at   auto + auto\n  try  one plans.auto() for all axes"
    )


@pytest.mark.parametrize("memory", [0, -1, 1.5, True, "80GiB"])
def test_a_bound_is_a_number_of_bytes(memory):
    with pytest.raises(PlanError) as caught:
        ms.plans.auto(memory=memory)
    assert message(caught) == (
        f"no number of bytes: {memory!r}\n  at   plans.auto(memory)\n  try  80 * 2**30 for 80 GiB"
    )
