"""Activations that are computed again: the budget is obeyed, the numbers are the same."""

from __future__ import annotations

import copy
from typing import Any

import memory_jobs
import pytest
import torch
import torch.nn.functional as F
from models import ConvNet, Gpt
from support import check_equal, draw, run_ranks
from torch import Tensor, nn

import meshstep as ms
from meshstep.ir import collectives
from meshstep.ir.printer import program_text
from meshstep.ir.verifier import verify_program
from meshstep.passes import EAGER, CommonSubexpressions, Pipeline, Recompute, pipeline

P, MESH = ms.plans, ms.Mesh(dp=2)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def gpt_batch(i: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(16, (64, 6), generator=torch.Generator().manual_seed(i))
    return tokens[:, :-1], tokens[:, 1:]


def image_batch(i: int) -> tuple[Tensor, Tensor]:
    return torch.randn(64, 2, 6, 6, generator=torch.Generator().manual_seed(i)).double(), torch.arange(64) % 4


KINDS: dict[str, Any] = {
    "gpt": (lambda: Gpt(dropout=0.3, layers=2), gpt_batch),
    "convnet": (ConvNet, image_batch),
}


def made(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = KINDS[kind][0]().double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def budgets(memory: Any, *shares: float) -> list[int]:
    """What is held in any case, and a share of what the step makes."""
    fixed = memory.state + memory.arguments
    return [fixed + int(share * (memory.peak - fixed)) for share in shares]


def losses(kind: str, plan: ms.Plan, memory: int | None) -> tuple[list[Tensor], dict[str, Any], ms.Lowered]:
    model, optimizer = made(kind)
    torch.manual_seed(1)
    step = ms.simulate(train_step, mesh=MESH, plan=plan, memory=memory)
    found = [step(model, optimizer, *KINDS[kind][1](i)) for i in range(5)]
    return found, model.state_dict(), step.lower(model, optimizer, *KINDS[kind][1](0))


@pytest.mark.parametrize(
    ("kind", "plan", "shares"),
    [
        ("gpt", P.data_parallel(), (0.9, 0.7, 0.5)),
        ("gpt", P.fsdp(), (0.6,)),
        ("convnet", P.data_parallel(), (0.8,)),
    ],
    ids=["gpt", "gpt fsdp", "convnet"],
)
def test_budgets_are_obeyed_and_change_no_number(kind: str, plan: ms.Plan, shares: tuple[float, ...]) -> None:
    want, state, free = losses(kind, plan, None)
    again = []
    for memory in budgets(free.memory, *shares):
        found, its_state, lowered = losses(kind, plan, memory)
        assert lowered.memory.peak <= memory < free.memory.peak
        assert found == want
        check_equal(its_state, state)
        again.append(sum(bool(node.meta.get("recomputed")) for node in lowered.local_program.calls))
    assert again[0] > 0 and again == sorted(again)


def test_a_real_step_holds_no_more_than_the_budget(pools: Any) -> None:
    for predicted, measured, limit, before in pools(2).run(memory_jobs.within_a_budget, 0.7):
        assert predicted <= limit
        assert measured == pytest.approx(predicted, rel=0.1) and measured < 0.8 * before


def lowered(passes: Pipeline, plan: ms.Plan | None = None) -> ms.Lowered:
    model, optimizer = made("gpt")
    step = ms.simulate(train_step, mesh=MESH, plan=plan, passes=passes)
    step(model, optimizer, *gpt_batch(0))
    return step.lower(model, optimizer, *gpt_batch(0))


def test_a_program_is_exact_and_fits_the_second_time() -> None:
    program = lowered(Pipeline(())).local_program
    before = program_text(program)
    (limit,) = budgets(lowered(Pipeline(())).memory, 0.7)
    found = Recompute(limit)(program)
    assert program_text(program) == before
    verify_program(found, types=True)
    assert Recompute(limit)(found) is found
    check_equal(run_ranks(found, draw(program)), run_ranks(program, draw(program)))
    assert CommonSubexpressions()(found).calls and any(
        node.meta.get("recomputed") for node in CommonSubexpressions()(found).calls
    ), "what is computed again must not be merged with what it stands for"


def test_results_of_collectives_are_kept() -> None:
    mesh, plan = (
        ms.Mesh(dp=2, tp=2),
        P.data_parallel()
        + P.tensor_parallel(
            {
                "blocks.*.qkv": "colwise",
                "blocks.*.proj": "rowwise",
                "blocks.*.up": "colwise",
                "blocks.*.down": "rowwise",
            }
        ),
    )
    model, optimizer = made("gpt")
    steps = [ms.simulate(train_step, mesh=mesh, plan=plan, memory=memory) for memory in (None, None)]
    steps[0](model, optimizer, *gpt_batch(0))
    free = steps[0].lower(model, optimizer, *gpt_batch(0))
    tight = ms.simulate(train_step, mesh=mesh, plan=plan, memory=budgets(free.memory, 0.8)[0])
    found = tight.lower(model, optimizer, *gpt_batch(0))
    assert [str(c) for c in found.communication] == [str(c) for c in free.communication]
    assert not any(n.target in collectives.COLLECTIVES for n in found.local_program.calls if n.meta.get("recomputed"))


def test_memory_that_cannot_be_obeyed_is_refused_with_what_can() -> None:
    model, optimizer = made("gpt")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ms.PlanError) as error:
        ms.simulate(train_step, mesh=MESH, memory=20_000)(model, optimizer, *gpt_batch(0))
    assert str(error.value) == (
        "a rank holds 392.9 KiB, and at least 173.6 KiB if activations are computed again\n"
        "  at   a memory of 19.53 KiB\n"
        "  try  more ranks, fsdp, or a smaller batch"
    )
    check_equal(model.state_dict(), before)


@pytest.mark.parametrize("memory", [0, -1, 2.5, "80GiB"])
def test_what_is_no_number_of_bytes_is_refused(memory: Any) -> None:
    with pytest.raises(ms.InputError, match="a memory of"):
        ms.compile(memory=memory)(train_step)


def test_the_text_form() -> None:
    made = Pipeline((Recompute(1000), *EAGER))
    assert str(made).startswith("recompute(memory=1000) | common_subexpressions")
    assert pipeline(str(made)) == made
