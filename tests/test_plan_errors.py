"""Plans that do not fit: what is said, where, and what to try. And what a plan says of itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parallel import lowered
from rank_jobs import batch, train_step
from sharded_jobs import small_gpt
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

import meshstep as ms

P, Mesh = ms.plans, ms.Mesh


def lower(plan: ms.Plan, mesh: ms.Mesh, model: nn.Module | None = None) -> ms.Lowered:
    model = model or small_gpt()
    args = (model, torch.optim.AdamW(model.parameters()), *batch(0))
    return ms.compile(mesh=mesh, plan=plan)(train_step).lower(*args)


def tp(**styles: Any) -> ms.Plan:
    return P.tensor_parallel(styles)


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "unknown name": (
        lambda: lower(P.tensor_parallel({"blocks.*.qvk": "colwise"}), Mesh(tp=2)),
        "the plan names 'blocks.*.qvk', and nothing has such a name\n"
        "  at   tensor_parallel on axis 'tp'\n"
        "  try  'blocks.0.qkv'",
    ),
    "unknown name of fsdp": (
        lambda: lower(P.fsdp(parameters={"positons": 0}), Mesh(dp=2)),
        "the plan names 'positons', and nothing has such a name\n  at   fsdp on axis 'dp'\n  try  'positions'",
    ),
    "heads do not divide": (
        lambda: lower(P.tensor_parallel({"blocks.*.qkv": "colwise"}), Mesh(tp=8)),
        "4 heads do not divide over 8 ranks\n"
        "  at   parameter blocks.0.qkv.weight [96, 32], axis 'tp', split at gpt.py:20\n"
        "  try  an axis of a size that divides 4, or leave the module out of the plan: it stays whole",
    ),
    "features do not divide": (
        lambda: lower(P.tensor_parallel({"blocks.*.up": "colwise"}), Mesh(tp=3)),
        "128 output features do not divide over 3 ranks\n"
        "  at   parameter blocks.0.up.weight [128, 32], axis 'tp'\n"
        "  try  another size of the axis, or leave the module out of the plan: it stays whole",
    ),
    "input features do not divide": (
        lambda: lower(P.tensor_parallel({"blocks.*.down": "rowwise"}), Mesh(tp=5)),
        "128 input features do not divide over 5 ranks\n"
        "  at   parameter blocks.0.down.weight [32, 128], axis 'tp'\n"
        "  try  another size of the axis, or leave the module out of the plan: it stays whole",
    ),
    "no product": (
        lambda: lower(P.tensor_parallel({"positions": "colwise"}), Mesh(tp=2)),
        "'colwise' for a parameter that no matrix product, lookup or convolution uses\n"
        "  at   parameter positions [16, 32]\n"
        "  try  a placement instead of a style, or leave it out: it stays whole; to materialize, the plan of a lowered "
        "step, which has placements",
    ),
    "placement that cannot be": (
        lambda: lower(P.tensor_parallel({"blocks.*.up.weight": Shard(2)}), Mesh(tp=2)),
        "S(2) of a tensor of shape [128, 32] over 2 ranks\n"
        "  at   parameter blocks.0.up.weight, axis 'tp'\n"
        "  try  a dim that divides evenly, or leave it out of the plan: it stays whole",
    ),
    "unknown style": (
        lambda: tp(head="columnwise"),
        "no style 'columnwise'\n"
        "  at   plans.tensor_parallel({'head': ...})\n"
        "  try  'colwise', 'rowwise', 'sequence', a placement, or placements by the names of parameters",
    ),
    "unknown choice": (
        lambda: P.fsdp(parameters={"head": "no"}),  # type: ignore[dict-item]
        "no choice 'no' for parameters\n"
        "  at   plans.fsdp(parameters={'head': ...})\n"
        "  try  a stage from 0 to 3, Replicate() or Shard(dim)",
    ),
    "two plans on one axis": (
        lambda: P.fsdp() + P.zero(1),
        "two plans for axis 'dp'\n  at   fsdp + zero1\n  try  give one of them another axis of the mesh",
    ),
    "axis that the mesh lacks": (
        lambda: lower(P.data_parallel() + tp(head="colwise"), Mesh(dp=2)),
        "the plan is about axis 'tp', which the mesh lacks\n"
        "  at   tensor_parallel(axis='tp') on Mesh(dp=2)\n"
        "  try  axis='dp', or a mesh with 'tp'",
    ),
    "axis without a plan": (
        lambda: lower(P.fsdp(), Mesh(dp=2, tp=2)),
        "the plan says nothing about axis 'tp' of the mesh\n"
        "  at   fsdp on Mesh(dp=2, tp=2)\n"
        "  try  add a plan for 'tp' (plan_a + plan_b), or take the axis out of the mesh",
    ),
    "no such stage": (lambda: P.zero(4), "no ZeRO stage 4\n  at   plans.zero(stage)\n  try  1, 2 or 3"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_plan_that_does_not_fit_says_so(wrong):
    make, text = WRONG[wrong]
    with pytest.raises(ms.PlanError) as caught:
        make()
    assert str(caught.value) == text


def test_what_is_no_style_of_torch_that_we_know_is_refused():
    with pytest.raises(ms.PlanError, match="no style"):
        tp(head=PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)))


def test_styles_of_torch_mean_the_same():
    ours = {"blocks.*.qkv": "colwise", "blocks.*.proj": "rowwise", "blocks.*.norm?": "sequence"}
    objects = (ColwiseParallel(), RowwiseParallel(), SequenceParallel())
    theirs = dict(zip(ours, objects, strict=True))
    assert P.tensor_parallel(ours) == P.tensor_parallel(theirs)
    given = P.tensor_parallel({"blocks.*.norm?": SequenceParallel(sequence_dim=2)})
    assert given["tp"].sequence_dim == 2


def placements(found: ms.Lowered, axis: str) -> dict[str, Any]:
    return {name: p for name, p in found.plan[axis].state if name.startswith("parameter ")}


def test_the_first_pattern_that_fits_counts():
    plan = P.fsdp(parameters={"blocks.0.*": 0, "*.norm?": 1, "head": Shard(1), "*.bias": Replicate()}, min_bytes=200)
    found = placements(lower(plan, Mesh(dp=2)), "dp")
    assert found["parameter blocks.0.up.weight"] == Replicate()  # by its own block's choice
    assert found["parameter blocks.1.up.weight"] == Shard(0)
    assert found["parameter blocks.1.norm1.weight"] == Replicate()  # stage 1: its optimizer state only
    assert found["parameter head.weight"] == Shard(1)
    assert found["parameter blocks.1.up.bias"] == Replicate()
    assert found["parameter norm.weight"] == Replicate()  # 128 bytes


def test_optimizer_state_goes_its_own_way():
    model = small_gpt()
    args = (model, torch.optim.AdamW(model.parameters()), *batch(0))
    step = ms.simulate(train_step, mesh=Mesh(dp=2), plan=P.zero(1, parameters={"head": 0, "tokens": Shard(1)}))
    step(*args)
    state = dict(step.lower(*args).plan["dp"].state)
    assert state["optimizer state blocks.0.up.weight.exp_avg"] == Shard(0)
    assert state["parameter blocks.0.up.weight"] == Replicate()
    assert state["optimizer state head.weight.exp_avg"] == Replicate()
    assert state["optimizer state tokens.weight.exp_avg"] == Shard(1)
    assert state["optimizer state blocks.0.up.weight.step"] == Replicate()


def test_another_dim_where_the_first_does_not_divide_and_what_has_none_is_listed():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.mix, self.head = nn.Embedding(64, 6), nn.Linear(6, 3), nn.Linear(3, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.mix(self.embed(x)))

    found = lower(P.fsdp(), Mesh(dp=2), Odd())
    lies = placements(found, "dp")
    assert lies["parameter mix.weight"] == Shard(1)
    assert lies["parameter mix.bias"] == Replicate()
    assert "parameter mix.bias" in found.plan["dp"].whole
    assert "  parameter mix.bias: whole, no dim divides" in str(found.plan)


def test_axes_take_different_dims_of_a_parameter():
    plan = P.fsdp() + P.tensor_parallel({"blocks.*.up": "colwise", "blocks.*.down": "rowwise"})
    found = lower(plan, Mesh(dp=2, tp=2))
    assert placements(found, "dp")["parameter blocks.0.up.weight"] == Shard(1)
    assert placements(found, "tp")["parameter blocks.0.up.weight"] == Shard(0)
    assert placements(found, "dp")["parameter blocks.0.down.weight"] == Shard(0)
    assert placements(found, "tp")["parameter blocks.0.down.weight"] == Shard(1)


def test_a_step_that_uses_one_weight_twice_and_a_norm_alone_is_planned():
    """Grouped heads that do not divide stay whole when they are left out of the plan, and queries are split."""
    styles = {"*.q_proj": "colwise", "*.o_proj": "rowwise"}
    kinds = [c.kind for c in lowered("llama", P.tensor_parallel(styles), Mesh(tp=4)).communication]
    assert "all_to_all" not in kinds


def test_a_plan_that_is_decided_can_be_given_again():
    model = small_gpt()
    args = (model, torch.optim.AdamW(model.parameters()), *batch(0))
    mesh = Mesh(dp=2, tp=2)
    plan = P.fsdp() + P.tensor_parallel({"blocks.*.qkv": "colwise", "blocks.*.proj": "rowwise"})
    first = ms.compile(mesh=mesh, plan=plan)(train_step).lower(*args)
    again = ms.compile(mesh=mesh, plan=first.plan)(train_step).lower(*args)
    assert again.as_text() == first.as_text()
    assert again.plan == first.plan


def test_cross_entropy_over_a_split_vocabulary_beside_a_plain_one():
    """A distillation: one log-softmax is of the step's own, the other one is in the loss; both gradients."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head, self.teacher = nn.Embedding(64, 16), nn.Linear(16, 64), nn.Linear(16, 64)

    def step(model: Two, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = model.embed(x)
        logits, wanted = model.head(hidden), model.teacher(hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=0.1)
        loss = loss + F.kl_div(logits.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="batchmean")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    torch.manual_seed(0)
    model = Two()
    optimizer = torch.optim.AdamW(model.parameters())
    for styles in ({"head": "colwise"}, {"head": "colwise", "teacher": "colwise", "embed": "rowwise"}):
        plan = P.tensor_parallel(styles)
        found = ms.verify(step, lambda i: ((model, optimizer, *batch(i)), {}), mesh=Mesh(tp=4), plan=plan, steps=3)
        assert found.ok, found
