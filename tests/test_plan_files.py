"""Plans as files: they come back as they were, differ by lines, and say what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Gpt, Mlp, built, labels, rows, sgd, train_step
from torch.distributed.tensor import Replicate, Shard

import meshstep as ms
from meshstep.layout import strided
from meshstep.plan.plan import AxisPlan

P = ms.plans
STYLES = {"blocks.*.qkv": "colwise", "blocks.*.proj": "rowwise", "*.up": Shard(0), "*norm?": "sequence"}
PLANS = {
    "data_parallel": P.data_parallel(),
    "zero": P.zero(2, parameters={"head*": 0, "tokens": Replicate()}, min_bytes=100),
    "fsdp x tp": P.fsdp(reshard_after_forward=False) + P.tensor_parallel(STYLES, axis="tp", sequence_dim=2),
    "context": P.context_parallel("cp") + P.expert_parallel(("a.*", "b"), "ep", splits_batch=False),
    "blocks": ms.Plan((AxisPlan("x", "named", None, state=(("parameter w", strided(0, 3)),), whole=("parameter b",)),)),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    PLANS[name].save(tmp_path / "plan.json")
    assert P.load(tmp_path / "plan.json") == PLANS[name]
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_a_decided_plan_places_state_as_it_was_decided(tmp_path: Path) -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        return train_step(lambda t: model(t).flatten(0, 1), optimizer, x, x.flatten())  # type: ignore[arg-type]

    model = built(Gpt)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    x, mesh = labels(0, 5, classes=16), ms.Mesh(dp=2, tp=2)
    plan = P.fsdp() + P.tensor_parallel({"*.qkv": "colwise", "*.proj": "rowwise"}, axis="tp")
    step_of = ms.simulate(step, mesh=mesh, plan=plan)
    step_of(model, optimizer, x)
    decided = step_of.lower(model, optimizer, x).plan
    decided.save(tmp_path / "plan.json")
    loaded = P.load(tmp_path / "plan.json")
    assert dict(loaded["tp"].state)["parameter blocks.0.qkv.weight"] == strided(0, 3)
    assert decided.diff(loaded) == () and loaded.diff(plan) != ()
    again = ms.simulate(step, mesh=mesh, plan=loaded)
    assert str(again.lower(model, optimizer, x)) == str(step_of.lower(model, optimizer, x))
    assert ms.verify(step, lambda i: ((model, optimizer, labels(i, 5, classes=16)), {}), mesh=mesh, plan=loaded).ok


def test_what_differs_is_a_line_each() -> None:
    assert P.zero(1).diff(P.zero(1)) == ()
    assert P.zero(1).diff(P.zero(3, min_bytes=8)) == (
        "dp: kind: zero1 -> zero3",
        "dp: stage: 1 -> 3",
        "dp: min_bytes: 0 -> 8",
        "dp: regather: False -> True",
    )
    styles = P.tensor_parallel({"a": "colwise", "b": "rowwise"})
    assert styles.diff(P.tensor_parallel({"a": "rowwise", "c": Shard(1)})) == (
        "tp: a: colwise -> rowwise",
        "tp: b: rowwise -> unsaid",
        "tp: c: unsaid -> S(1)",
    )
    assert P.fsdp().diff(P.fsdp("x")) == ("dp: not in the other plan", "x: only in the other plan")


def test_a_plan_that_no_longer_fits_the_model_says_where(tmp_path: Path) -> None:
    model = built(Mlp)
    args = (model, sgd(model), rows(), labels())
    plan = ms.compile(mesh=ms.Mesh(dp=2), plan=P.fsdp())(train_step).lower(*args).plan
    plan.save(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(text.replace("fc1.weight", "fc1.wide"))
    with pytest.raises(ms.PlanError) as caught:
        ms.simulate(train_step, mesh=ms.Mesh(dp=2), plan=P.load(tmp_path / "plan.json"))(*args)
    assert str(caught.value) == (
        "the plan places parameter fc1.wide, which the program lacks\n"
        "  at   fsdp on axis 'dp', and 0 more\n"
        "  try  'parameter fc1.weight'"
    )
    (tmp_path / "plan.json").write_text(
        text.replace('"parameter fc1.weight": "S(0)"', '"parameter fc1.weight": "S(3)"')
    )
    with pytest.raises(ms.PlanError, match=r"S\(3\) of a tensor of shape \[8, 6\] over 2 ranks"):
        ms.simulate(train_step, mesh=ms.Mesh(dp=2), plan=P.load(tmp_path / "plan.json"))(*args)


def _changed(change: Any) -> str:
    found = json.loads(json.dumps({"meshstep plan": 1, "axes": [P.fsdp().axes[0].data()]}))
    return json.dumps(change(found) or found)


BAD = {
    "": "no plan can be read: Expecting value",
    "[]": "a plan of form None",
    '{"meshstep plan": 2}': "a plan of form 2",
    _changed(lambda d: d["axes"][0].update(stag=3)): "the file is no plan: axis 'dp' has 'stag': 'stage'?",
    _changed(lambda d: d["axes"][0].pop("stage") and None): "the file is no plan: 'stage' is missing",
    _changed(lambda d: d["axes"][0].update(stage="three")): "the file is no plan: axis 'dp': stage is 'three'",
    _changed(lambda d: d["axes"][0].update(stage=True)): "the file is no plan: axis 'dp': stage is True",
    _changed(lambda d: d["axes"][0].update(patterns={"a": []})): r"the file is no plan: \[\] is no choice",
    _changed(lambda d: d["axes"][0].update(state={"w": "S(-1)"})): r"the file is no plan: w lies as 'S\(-1\)'",
    _changed(lambda d: d["axes"][0].update(state={"w": "__import__('os')"})): "the file is no plan: w lies as",
    _changed(lambda d: d.update(axes=[3])): "the file is no plan: ",
}


@pytest.mark.parametrize("text", BAD)
def test_a_file_that_is_no_plan_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ms.PlanError, match=BAD[text]) as caught:
        P.load(tmp_path / "plan.json")
    assert "plan.json" in str(caught.value) and "a file that plan.save wrote" in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ms.PlanError, match="no plan can be read"):
        P.load(tmp_path / "nothing.json")
