"""The public face: options, calls, the cache, looking without running."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import meshstep as ms
from gpt import GPT, loss_of


def train_step(model, optimizer, x, y):
    """A plain step."""
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def arguments(rows=8, lr=0.1):
    model = nn.Linear(6, 3)
    return model, torch.optim.SGD(model.parameters(), lr=lr), torch.randn(rows, 6), torch.randn(rows, 3)


def test_the_decorator_works_bare_and_with_arguments():
    assert isinstance(ms.compile(train_step), ms.CompiledStep)
    assert isinstance(ms.compile(backend="eager")(train_step), ms.CompiledStep)
    assert ms.compile(train_step).__name__ == "train_step"
    assert ms.compile(train_step).__doc__ == "A plain step."


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_world_of_one_computes_the_plain_step(backend):
    model, optimizer, x, y = arguments()
    plain = nn.Linear(6, 3)
    plain.load_state_dict(model.state_dict())
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    step = ms.compile(backend=backend)(train_step)
    for _ in range(3):
        found, want = step(model, optimizer, x, y), train_step(plain, plain_optimizer, x, y)
        torch.testing.assert_close(found, want.detach())
    torch.testing.assert_close(model.weight, plain.weight)


def test_a_callable_backend_gets_the_graph_and_the_inputs():
    seen = []

    def backend(module, inputs):
        seen.append((module, inputs))
        return module.forward

    model, optimizer, x, y = arguments()
    ms.compile(backend=backend)(train_step)(model, optimizer, x, y)
    ((module, inputs),) = seen
    assert isinstance(module, torch.fx.GraphModule)
    assert any(given is x for given in inputs)


def test_the_cache_finds_equal_calls_and_says_why_others_are_not(caplog):
    caplog.set_level(logging.INFO, "meshstep")
    model, optimizer, x, y = arguments()
    step = ms.simulate(train_step, mesh=ms.Mesh(dp=2))
    step(model, optimizer, x, y)
    step(model, optimizer, x, y)
    step(model, optimizer, x[:4], y[:4])
    model.eval()
    step(model, optimizer, x, y)
    optimizer.param_groups[0]["weight_decay"] = 0.1
    step(model, optimizer, x, y)
    model.weight.requires_grad_(False)
    step(model, optimizer, x, y)
    info = step.cache_info()
    assert (info.hits, info.misses, info.size, info.resized) == (1, 4, 5, 1)
    assert info.reasons == (
        "first call",
        "argument x was f32[8, 6], is f32[4, 6]",
        "SGD has other hyper-parameters",
        "parameter weight no longer requires grad",
    )
    assert "the program of another size fits (Linear is in eval mode)" in caplog.text  # which changes nothing in it
    assert "train_step: compiled program 2 (argument x was f32[8, 6], is f32[4, 6])" in caplog.text


def test_another_model_of_the_same_class_is_trained_itself():
    first, second = arguments(), arguments()
    step = ms.simulate(train_step, mesh=ms.Mesh(dp=2))
    before = second[0].weight.detach().clone()
    step(*first)
    assert torch.equal(second[0].weight, before)
    plain = nn.Linear(6, 3)
    plain.load_state_dict(second[0].state_dict())
    want = train_step(plain, torch.optim.SGD(plain.parameters(), lr=0.1), *second[2:])
    torch.testing.assert_close(step(*second), want.detach())
    torch.testing.assert_close(second[0].weight, plain.weight)


def test_the_cache_is_bounded():
    step = ms.simulate(lambda x: x * 2, mesh=ms.Mesh(dp=2))
    for rows in range(2, 90, 2):
        step(torch.ones(rows))
    assert step.cache_info().size == step.cache_info().maxsize == 32


def test_a_live_learning_rate_needs_no_recompile():
    model, optimizer, x, y = arguments()
    plain = nn.Linear(6, 3)
    plain.load_state_dict(model.state_dict())
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    step = ms.simulate(train_step, mesh=ms.Mesh(dp=2))
    for i in range(6):
        for o in (optimizer, plain_optimizer):
            o.param_groups[0]["lr"] = 0.1 / (i + 1)
        step(model, optimizer, x, y)
        train_step(plain, plain_optimizer, x, y)
    assert step.cache_info().misses == 1
    torch.testing.assert_close(model.weight, plain.weight)


def test_an_uneven_batch_is_exact_and_said(caplog):
    def make_args(i):
        generator = torch.Generator().manual_seed(i)
        return (model, optimizer, torch.randn(5, 6, generator=generator), torch.randn(5, 3, generator=generator)), {}

    model, optimizer, *_ = arguments()
    found = ms.verify(train_step, make_args, mesh=ms.Mesh(dp=2))
    assert found.ok, found
    assert "argument x of shape [5, 6] does not divide over axis 'dp' of mesh(dp=2): computed replicated" in caplog.text


def test_rows_come_back_whole_from_simulate_and_replicated_inputs_stay_whole():
    x, scale = torch.randn(8, 3), torch.randn(2, 3)
    step = ms.simulate(lambda x, scale: (x * scale[0], scale * 2), mesh=ms.Mesh(dp=4), inputs={"scale": Replicate()})
    rows, doubled = step(x, scale)
    torch.testing.assert_close(rows, x * scale[0])
    torch.testing.assert_close(doubled, scale * 2)


@dataclass
class Batch:
    ids: torch.Tensor
    weights: dict


def test_inputs_name_paths_in_nested_arguments():
    def scaled(batch: Batch):
        return {"out": batch.ids * batch.weights["w"].sum()}

    step = ms.compile(mesh=ms.Mesh(dp=2), inputs={"batch.weights": Replicate()})(scaled)
    lowered = step.lower(Batch(torch.ones(3, 2), {"w": torch.ones(5)}))
    text = lowered.as_text("local")
    assert "f32[6/2, 2]" in text
    assert "f32[5]" in text
    assert "argument batch.weights['w']" in text


def test_inputs_may_shard_another_dim():
    step = ms.compile(mesh=ms.Mesh(dp=2), inputs={"x": ms.Layout((("dp", Shard(1)),))})(lambda x: x * 2)
    assert "f32[3, 8/2]" in step.lower(torch.ones(3, 4)).as_text()


def test_lower_needs_no_process_group_and_is_quick_for_a_thousand_ranks():
    def step_of_the_example(model, optimizer, x, y):
        loss = loss_of(model, x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = GPT()
    x = torch.randint(256, (4, 64))
    began = time.process_time()  # not the wall clock: others may be at work
    lowered = ms.compile(mesh=ms.Mesh(dp=1024))(step_of_the_example).lower(
        model, torch.optim.AdamW(model.parameters()), x, x
    )
    assert time.process_time() - began < 5
    assert not torch.distributed.is_initialized()
    assert "i64[4096/1024, 64]" in lowered.as_text()
    assert lowered.fallbacks == ()
    assert sum(c.count for c in lowered.communication) == len(list(model.parameters())) + 2
    assert len(lowered.communication) == 2  # the count of tokens, and 4.06 MiB of gradients with the loss
    few = ms.compile(mesh=ms.Mesh(dp=2))(step_of_the_example)
    sent = few.lower(model, torch.optim.AdamW(model.parameters()), x, x).communication
    assert len(sent) == 6  # messages are cheaper between two: buckets of 1 MB travel while the backward goes on


def test_lower_shows_every_stage_and_changes_nothing():
    model, optimizer, x, y = arguments()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    lowered = ms.compile(mesh=ms.Mesh(dp=2))(train_step).lower(model, optimizer, x, y)
    assert lowered.as_text("global").startswith("program train_step  mesh(dp=2)\n")
    assert "all_reduce" not in lowered.as_text("global")
    assert "all_reduce" in lowered.as_text()
    assert "_c10d_functional.all_reduce" in lowered.as_text("torch")
    assert str(lowered) == lowered.as_text("local")
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert not optimizer.state
    assert dict(lowered.plan["dp"].values)


def test_verify_of_a_step_leaves_the_users_model_alone():
    model, optimizer, x, y = arguments()
    before = model.weight.detach().clone()
    found = ms.compile(mesh=ms.Mesh(dp=2))(train_step).verify(model, optimizer, x, y, steps=3)
    assert found.ok
    assert found.steps == 3
    assert torch.equal(model.weight, before)


def test_verify_names_the_first_value_that_differs():
    drifting = iter(range(100))

    def step(model, optimizer, x, y):
        return train_step(model, optimizer, x + next(drifting), y)

    args = arguments()
    found = ms.verify(step, lambda i: (args, {}), mesh=ms.Mesh(dp=2), steps=2)
    assert not found.ok
    assert found.first_divergence.startswith("step 0, output value (by ")
    assert str(found).startswith("DIFFERENT at step 0, output value")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: ms.compile(backend="fast")(train_step),
            'no backend \'fast\'\n  at   compile(backend=...)\n  try  "eager", "inductor", or a callable',
        ),
        (
            lambda: ms.compile(outputs="all")(train_step),
            "no outputs 'all'\n  at   compile(outputs=...)\n  try  'local', 'full', 'dtensor'",
        ),
        (
            lambda: ms.compile(mash=None)(train_step),
            "got an unexpected keyword argument 'mash'\n  at   compile(...)\n"
            "  try  mesh, plan, inputs, outputs, backend, passes, module_override, gm_transformation, memory, "
            "check_every",
        ),
        (
            lambda: ms.simulate(train_step, mesh=None)(*arguments()),
            "simulate needs a mesh\n  at   simulate(mesh=None)\n  try  mesh=Mesh(dp=2)",
        ),
        (
            lambda: ms.compile(mesh=ms.Mesh(dp=2))(train_step)(*arguments()),
            "the mesh has 2 ranks, and 1 process runs\n  at   Mesh(dp=2), rank 0 of 1 on cpu\n"
            "  try  torchrun --nproc-per-node 2, or meshstep.simulate to run all ranks in one process",
        ),
        (
            lambda: ms.compile(train_step)(*arguments()[:3]),
            "missing a required argument: 'y'\n  at   step(model, optimizer, x, y)\n  try  call it like the function",
        ),
        (
            lambda: ms.simulate(train_step, mesh=ms.Mesh(dp=2), inputs={"xx": Replicate()})(*arguments()),
            "inputs= names 'xx', which is no argument\n  at   arguments model, optimizer, x, y\n  try  'x'",
        ),
        (
            lambda: ms.verify(train_step, lambda i: arguments(), mesh=ms.Mesh(dp=2)),
            "make_args returned tuple\n  at   verify(make_args=...)\n"
            "  try  return (args, kwargs), as in (model, optimizer, x), {}",
        ),
        (
            lambda: ms.compile(train_step).lower(*arguments()).as_text("both"),
            'no stage \'both\'\n  at   as_text(stage=...)\n  try  "global", "local", "torch"',
        ),
    ],
)
def test_wrong_use_is_an_input_error(make, text):
    with pytest.raises(ms.InputError) as caught:
        make()
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: ms.plans.data_parallel() + ms.plans.data_parallel(),
            "two plans for axis 'dp'\n  at   data_parallel + data_parallel\n"
            "  try  give one of them another axis of the mesh",
        ),
        (
            lambda: ms.simulate(train_step, mesh=ms.Mesh(data=2))(*arguments()),
            "the plan is about axis 'dp', which the mesh lacks\n  at   data_parallel(axis='dp') on Mesh(data=2)\n"
            "  try  axis='data', or a mesh with 'dp'",
        ),
        (
            lambda: ms.simulate(train_step, mesh=ms.Mesh(dp=2, tp=2))(*arguments()),
            "the plan says nothing about axis 'tp' of the mesh\n  at   data_parallel on Mesh(dp=2, tp=2)\n"
            "  try  add a plan for 'tp' (plan_a + plan_b), or take the axis out of the mesh",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_a_plan_error(make, text):
    with pytest.raises(ms.PlanError) as caught:
        make()
    assert str(caught.value) == text


def test_a_step_that_raises_leaves_everything_as_it_was_and_works_afterwards():
    def step(model, optimizer, x, y, fail):
        loss = train_step(model, optimizer, x, y)
        if fail:
            raise ValueError("the user's own")
        return loss

    model, optimizer, x, y = arguments()
    before = model.weight.detach().clone()
    compiled = ms.simulate(step, mesh=ms.Mesh(dp=2))
    with pytest.raises(ValueError, match="the user's own"):
        compiled(model, optimizer, x, y, True)
    assert torch.equal(model.weight, before)
    assert isinstance(model.weight, nn.Parameter)
    assert not torch.compiler.is_compiling()
    compiled(model, optimizer, x, y, False)
    assert not torch.equal(model.weight, before)
