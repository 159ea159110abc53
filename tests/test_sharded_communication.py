"""What plans send: kinds, counts and bytes, against the known minimum."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parallel import SPLITS, lowered
from rank_jobs import batch, train_step
from sharded_jobs import Tied, small_gpt
from torch import Tensor, nn

import meshstep as ms
from meshstep.ir import collectives
from meshstep.ir.program import Program
from meshstep.passes import Bucket, CommonSubexpressions, LaunchEarly, Pipeline, Regather

P, Mesh = ms.plans, ms.Mesh
RANKS = 4
BUCKET = 2**20  # of the eager pipeline, which simulate takes
BIG = 10_000  # bytes: what is smaller is a norm, a loss, a count


def sent(plan: ms.Plan, mesh: ms.Mesh, model: nn.Module | None = None, step: Any = train_step) -> tuple[Any, ...]:
    """All that a step sends once it has optimizer state."""
    model = model or small_gpt()
    args = (model, torch.optim.AdamW(model.parameters()), *batch(0))
    simulated = ms.simulate(step, mesh=mesh, plan=plan)
    simulated(*args)
    return simulated.lower(*args).communication


def size_of(model: nn.Module, *without: str) -> int:
    """Bytes of the parameters, but for those whose names end so."""
    return sum(p.numel() * 4 for name, p in model.named_parameters() if not (without and name.endswith(without)))


def needed_by_backward(model: nn.Module) -> int:
    """Bytes of what a backward reads: no tables, and no biases but those that the norm's backward takes along."""
    norms = sum(p.numel() * 4 for name, p in model.named_parameters() if "norm" in name and name.endswith("bias"))
    return size_of(model, "bias", "tokens.weight", "positions") + norms


def split(found: tuple[Any, ...]) -> dict[str, int]:
    """Bytes by kind; all_reduces of a few numbers apart."""
    sums: Counter[str] = Counter()
    for c in found:
        sums[c.kind if c.bytes > BIG or c.kind != "all_reduce" else "small"] += c.bytes
    return dict(sums)


def test_data_parallel_sends_two_shares_of_the_parameters():
    share = size_of(small_gpt()) * (RANKS - 1) // RANKS
    found = split(sent(P.data_parallel(), Mesh(dp=RANKS)))
    assert set(found) == {"all_reduce", "small"}
    assert 2 * share <= found["all_reduce"] < 2 * share * 1.01


@pytest.mark.parametrize(
    "plan", [P.zero(1), P.zero(2), P.fsdp(reshard_after_forward=False)], ids=["zero1", "zero2", "fsdp that holds"]
)
def test_sharded_state_sends_as_much_as_data_parallelism(plan):
    share = size_of(small_gpt()) * (RANKS - 1) // RANKS
    communication = sent(plan, Mesh(dp=RANKS))
    found = split(communication)
    assert found["reduce_scatter"] == found["all_gather"] == share
    assert found["small"] < share / 100
    kinds = Counter(c.kind for c in communication)
    assert kinds["reduce_scatter"] == kinds["all_gather"] == -(-size_of(small_gpt()) // BUCKET) == 1


def test_fsdp_gathers_again_what_the_backward_needs():
    model = small_gpt()
    share = size_of(model) * (RANKS - 1) // RANKS
    again = needed_by_backward(model) * (RANKS - 1) // RANKS
    communication = sent(P.fsdp(), Mesh(dp=RANKS))
    found = split(communication)
    assert found["reduce_scatter"] == share
    assert found["all_gather"] == share + again
    assert (share * 2 + again) / share == pytest.approx(3, rel=0.1)  # 3 (N - 1) / N, less tables and biases
    assert Counter(c.kind for c in communication)["all_gather"] == 2


def test_a_tied_parameter_is_reduced_once():
    communication = sent(P.fsdp(), Mesh(dp=RANKS), Tied())
    scattered = [c for c in communication if c.kind == "reduce_scatter"]
    assert [(c.count, c.bytes) for c in scattered] == [(1, 64 * 16 * 4 * 3 // 4)]
    gathered = [c.bytes for c in communication if c.kind == "all_gather"]
    assert gathered == [64 * 16 * 4 // 4 * 3] * 2  # for the forward, and for the head's backward


def accumulating(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float32)
    for rows, targets in zip(x.unflatten(0, (-1, 4)).unbind(1), y.unflatten(0, (-1, 4)).unbind(1), strict=True):
        loss = F.cross_entropy(model(rows).flatten(0, 1), targets.flatten(), reduction="sum") / y.numel()
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


@pytest.mark.parametrize("plan", [P.data_parallel(), P.zero(1), P.fsdp(reshard_after_forward=False), P.fsdp()])
def test_accumulated_gradients_are_reduced_once(plan):
    model = small_gpt()
    share = size_of(model) * (2 - 1) // 2
    found = split(sent(plan, Mesh(dp=2), step=accumulating))
    assert found.get("reduce_scatter", found.get("all_reduce", 0) // 2) == pytest.approx(share, rel=0.01)
    if plan != P.fsdp():  # one gather serves all micro-batches; else each forward and each backward has its own
        assert found.get("all_gather", share) == share
    else:
        again = needed_by_backward(model) // 2
        assert found["all_gather"] == 4 * (share + again)


def test_accumulation_is_exact():
    model = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters())

    def double(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return accumulating(model, optimizer, x, y.clamp(min=0)).double()

    for plan in (P.zero(1), P.fsdp()):
        found = ms.verify(double, lambda i: ((model, optimizer, *batch(i)), {}), mesh=Mesh(dp=2), plan=plan, steps=2)
        assert found.ok, found


@pytest.mark.parametrize("name", ["gpt", "gpt2", "llama"])
def test_tensor_parallelism_reduces_four_times_a_block(name):
    split_ = SPLITS[name]
    styles = {k: v for k, v in split_.tensor.items() if k not in ("tokens", "head")}
    found = lowered(name, P.tensor_parallel(styles), Mesh(tp=2)).communication
    activation = 8 * 12 * 32 * 4  # rows, length, width, bytes
    assert [c.kind for c in found] == ["all_reduce"] * 8  # two blocks
    assert sum(c.bytes for c in found) == pytest.approx(8 * 2 * activation // 2, rel=0.01)


def test_sequence_parallelism_sends_the_same_as_scatters_and_gathers():
    styles = {k: v for k, v in SPLITS["gpt"].tensor.items() if k not in ("tokens", "head")}
    plan = P.tensor_parallel({**styles, **(SPLITS["gpt"].sequence or {})})
    found = lowered("gpt", plan, Mesh(tp=2)).communication
    share = 8 * 12 * 32 * 4 // 2
    activations = [c for c in found if c.kind != "all_reduce" and c.bytes == share]
    kinds = Counter(c.kind for c in activations)
    # 4 of each a block; and a gather after the last norm, whose gradient is whole
    assert kinds == {"all_gather": 9, "reduce_scatter": 8}


def test_replicas_of_shards_reduce_what_each_rank_keeps():
    plan, mesh = P.data_parallel("replicate") + P.fsdp("shard"), Mesh(replicate=2, shard=2)
    found = sent(plan, mesh)
    size = size_of(small_gpt())
    by = {(c.kind, c.axis): 0 for c in found}
    for c in found:
        by[c.kind, c.axis] += c.bytes
    assert by["reduce_scatter", "shard"] == size // 2
    assert by["all_reduce", "replicate"] == pytest.approx(size // 2, rel=0.01)  # 2 (R - 1) / R of half of them


def test_attention_over_a_split_sequence_gathers_keys_and_values():
    found = lowered("gpt", P.context_parallel(), Mesh(cp=2)).communication
    share = 8 * 12 * 32 * 4 // 2
    activations = [c for c in found if c.bytes >= share and c.kind != "all_reduce"]
    kinds = Counter((c.kind, c.bytes * c.count // share) for c in activations)
    assert sum(c.bytes for c in activations if c.kind == "all_gather") == 2 * 2 * share, kinds  # two blocks
    assert sum(c.bytes for c in activations if c.kind == "reduce_scatter") == 2 * 2 * share, kinds


def test_tokens_travel_to_their_experts_and_back():
    split_ = SPLITS["experts"]
    assert split_.experts
    found = lowered("experts", P.expert_parallel(split_.experts), Mesh(ep=2)).communication
    # 4 exchanges a layer; what comes back is gathered once a layer, for the places of a token are not in one shard
    assert Counter(c.kind for c in found) == {"all_to_all": 8, "all_gather": 2, "all_reduce": 2}
    assert not any("_up" in c.why or "_down" in c.why for c in found if c.kind == "all_gather")  # no expert is gathered


def test_what_is_gathered_again_is_not_merged_again():
    model = small_gpt()
    args = (model, torch.optim.AdamW(model.parameters()), *batch(0))
    step = ms.simulate(train_step, mesh=Mesh(dp=2), plan=P.fsdp(), passes=Pipeline((Regather(),)))
    step(*args)
    program = step.lower(*args).local_program
    again = CommonSubexpressions()(program)
    assert gathers(again) == gathers(program) > 0


def gathers(program: Program) -> int:
    return sum(node.target is collectives.all_gather for node in program.graph.nodes)


@pytest.mark.parametrize("prefetch", [False, True])
def test_few_gathered_parameters_wait_for_their_use(prefetch):
    """One bucket at a time is launched ahead of its use, and two with a prefetch, not the whole model at the start."""
    model = small_gpt()
    args = (model, torch.optim.AdamW(model.parameters()), *batch(0))
    passes = Pipeline((Regather(), Bucket(shard_bytes=1), LaunchEarly(prefetch=prefetch)))
    step = ms.simulate(train_step, mesh=Mesh(dp=2), plan=P.fsdp(), passes=passes)
    step(*args)
    waiting, most, seen = set[object](), 0, 0
    for node in step.lower(*args).local_program.graph.nodes:
        waiting -= set(node.all_input_nodes)
        if node.target is collectives.all_gather and node.meta.get("regather"):
            waiting.add(node)
            seen += 1
        most = max(most, len(waiting))
    assert seen > 40
    assert most <= 4 + prefetch  # a fused linear's weight and bias are wanted by one call


def test_state_that_is_computed_with_as_it_lies_is_never_gathered():
    for name in ("gpt", "lstm", "vae"):
        found = lowered(name, P.tensor_parallel(SPLITS[name].tensor), Mesh(tp=2)).communication
        assert not any("exp_avg" in c.why for c in found)
