"""`SPMD`, `distribute`, `DistributedGraph`: forward and backward programs under a plain loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import spmd_jobs as jobs
import torch
import torch.nn.functional as F
import zoo
from models import Gpt, Mlp, built, rows
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import meshstep as ms

R, S0 = Replicate(), Shard(0)
Mesh = ms.Mesh
ALONE = ms.Schema(Mesh(dp=1), [R])


@pytest.mark.parametrize("kind", ["mlp", "gpt", "convnet"])
@pytest.mark.parametrize("placement", [R, S0], ids=str)
def test_a_plain_loop_equals_one_process(pools, placement, kind):
    for found in pools(2).run(jobs.train, Mesh(dp=2), [placement], kind=kind):
        assert found["start"] == 0.0
        assert max(found[key] for key in ("loss", "state", "evaluation", "hooks")) < 1e-12
        assert found["calls of hooks"] == 12
        assert found["misses"] == 2, found  # with gradients, and without
        assert bool(found["sharded"]) is (placement is S0)


@pytest.mark.parametrize(
    ("mesh", "placements", "inputs"),
    [
        (Mesh(dp=2, tp=2), [R, S0], None),
        (Mesh(dp=2, tp=2), [S0, S0], None),
        (Mesh(dp=2, tp=2), [S0, S0], [S0, R]),
        (Mesh(dp=2, tp=2), [R, Shard(1)], [S0, R]),
        (Mesh(dp=4), [S0], None),
    ],
)
def test_any_schema_on_four_ranks(pools, mesh, placements, inputs):
    for found in pools(4).run(jobs.train, mesh, placements, inputs, timeout=300):
        assert max(found[key] for key in ("start", "loss", "state", "evaluation", "hooks")) < 1e-12, found
        assert found["sharded"] > 0


def test_inductor_runs_the_programs(pools):
    for found in pools(2).run(jobs.train, Mesh(dp=2), [S0], kind="gpt", backend="inductor", timeout=300):
        assert max(found[key] for key in ("loss", "state", "evaluation")) < 1e-12


def test_gradients_land_as_the_parameters_lie(pools):
    for found in pools(2).run(jobs.gradients, Mesh(dp=2), [R]):
        assert found["argument"] < 1e-13 and found["parameters"] < 1e-13 and found["alike"]
        assert found["sent"] == {"all_reduce": 1} or found["sent"] == {"all_reduce_": 1}
    for found in pools(2).run(jobs.gradients, Mesh(dp=2), [S0]):
        assert found["argument"] < 1e-13 and found["parameters"] < 1e-13 and found["alike"]
        assert set(found["sent"]) == {
            "all_gather_into_tensor",
            "all_to_all_single",
        }  # gloo: parts are exchanged and added


def test_megatrons_split_by_patterns_of_names(pools):
    for found in pools(2).run(jobs.tensor_parallel, Mesh(tp=2)):
        assert found["parameters"] < 1e-13
        assert sum(found["sent"].values()) == 1 and "all_reduce" in next(iter(found["sent"]))  # of one forward
        assert set(found["placements"]) == {"fc1.weight", "fc1.bias", "fc2.weight"}


def test_all_ranks_start_from_rank_0_by_one_call(pools):
    first, second = pools(2).run(jobs.synchronised)
    assert first["state"] == second["state"]
    assert first["sent"] == {"broadcast_": 1}


def test_distribute_makes_the_graphs_before_the_first_call(pools):
    for found in pools(2).run(jobs.by_distribute, Mesh(dp=2)):
        assert found["counts"] == [(1, 1), (1, 1)]
        assert found["mean of means"] < 1e-14 and found["output"] < 1e-14
        assert "all_reduce" in found["code"]


def test_ranks_with_unlike_arguments_are_told_so(pools):
    for text in pools(2).run(jobs.differs):
        assert text.startswith("ranks pass tensors of different types\n  at   argument")


# ---- one process


def test_outputs_of_any_structure_and_what_has_no_gradient() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.unused = nn.Linear(6, 4), nn.Linear(2, 2)
            self.frozen = nn.Linear(6, 4).requires_grad_(False)

        def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
            y = self.fc(x) * scale
            return {"y": y, "best": y.argmax(1), "parts": [self.frozen(x), "text", None, y.sum(1)]}

    plain = built(Model)
    model = copy.deepcopy(plain)
    spmd = ms.SPMD(model, ALONE)
    found, want = spmd(rows(), scale=2.0), plain(rows(), scale=2.0)
    assert found["parts"][1:3] == ["text", None] and torch.equal(found["best"], want["best"])
    assert not found["best"].requires_grad and not found["parts"][0].requires_grad and found["y"].requires_grad
    for out in (found, want):
        (out["y"].sum() + 3 * out["parts"][3].square().sum()).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) is (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)


def test_only_some_outputs_are_used() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 2), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    model = built(Two)
    spmd = ms.SPMD(model, ALONE)
    spmd(rows())[0].sum().backward()
    assert model.a.weight.grad.abs().sum() > 0 and model.b.weight.grad.abs().sum() == 0


def test_buffers_modes_and_checkpoints_follow() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.5)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return self.drop(torch.utils.checkpoint.checkpoint(self.norm, x, use_reentrant=False))

    model = built(Model)
    spmd = ms.SPMD(model, ALONE)
    for i in range(3):
        spmd(rows(i)).sum().backward()
    assert model.seen == 3 and model.norm.num_batches_tracked == 6  # a recomputed norm counts again, as in torch
    spmd.eval()
    plain = copy.deepcopy(model)
    torch.testing.assert_close(spmd(rows()), plain(rows()))
    assert model.seen == 4 and model.norm.num_batches_tracked == 6
    reloaded = ms.SPMD(built(Model), ALONE)
    reloaded.load_state_dict(spmd.state_dict())
    assert set(spmd.state_dict()) == {f"module.{name}" for name in model.state_dict()}


def test_the_backward_sees_buffers_as_its_forward_did() -> None:
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)
            self.register_buffer("scale", torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x) * self.scale
            self.scale = self.scale * 2
            return y

    plain = built(Doubling)
    model = copy.deepcopy(plain)
    spmd = ms.SPMD(model, ALONE)
    for i in range(3):
        for m in (plain, spmd):
            m(rows(i)).sum().backward()
    torch.testing.assert_close(model.fc.weight.grad, plain.fc.weight.grad)
    torch.testing.assert_close(model.scale, plain.scale)


def test_dropout_of_the_backward_is_that_of_its_forward() -> None:
    spmd = ms.SPMD(nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 6)), ALONE).double()
    x, other = rows().requires_grad_(), rows().requires_grad_()
    first, second = spmd(x), spmd(other)  # a later forward must not change the first one's mask
    second.sum().backward()
    first.sum().backward()
    kept = x.grad != 0  # type: ignore[operator]
    weight, bias = spmd.module[1].weight, spmd.module[1].bias  # type: ignore[index]
    torch.testing.assert_close(first, F.linear(2 * x * kept, weight, bias))
    assert not torch.equal(kept, other.grad != 0)


def test_the_module_is_left_as_it_was_by_a_failed_call() -> None:
    class Fails(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(x.sum())

    model = built(Fails)
    hook = model.fc1.weight.register_hook(lambda g: g)
    model.fc1.weight.grad = torch.ones_like(model.fc1.weight)
    spmd = ms.SPMD(model, ALONE)
    with pytest.raises(ms.CaptureError):
        spmd(rows())
    assert model.fc1.weight.grad is not None and len(model.fc1.weight._backward_hooks) == 1
    hook.remove()
    with pytest.raises(ms.InputError, match="missing a required argument: 'x'"):
        spmd()


def test_a_second_backward_is_refused_as_in_torch() -> None:
    spmd = ms.SPMD(built(Gpt), ALONE)
    loss = spmd(torch.zeros(2, 5, dtype=torch.int64)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: ms.SPMD(3, ALONE), ms.InputError, "a int instead of a module\n  at   SPMD"),  # type: ignore[arg-type]
        (lambda: ms.SPMD(Mlp(), [R]), ms.InputError, "instead of a Schema"),  # type: ignore[arg-type]
        (lambda: ms.SPMD(Mlp(), {}), ms.InputError, "no schema instead of a Schema"),
        (lambda: ms.SPMD(Mlp(), ALONE, [ms.Schema(Mesh(tp=1), [R])]), ms.InputError, "different meshes"),
        (lambda: ms.SPMD(Mlp(), {"fc9.*": ALONE}), ms.PlanError, r"a schema is for 'fc9\.\*'"),
        (lambda: ms.SPMD(Mlp(), ms.Schema(Mesh(dp=2), [R])), ms.InputError, "the mesh has 2 ranks, and 1 process runs"),
        (lambda: ms.SPMD(Mlp(), ALONE, backend="xla"), ms.InputError, "no backend 'xla'"),
        (lambda: ms.Schema(Mesh(dp=2), [R, R]), ms.LayoutError, "2 placements for 1 axes"),
        (lambda: ms.Schema(Mesh(dp=2), [0]), ms.LayoutError, "0 is no placement"),  # type: ignore[list-item]
    ],
)
def test_wrong_use_is_refused(make: Any, kind: Any, text: str) -> None:
    with pytest.raises(kind, match=text):
        make()


class Untrained:
    """In the place of an optimizer, for the gradients."""

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "mixtral", "resnet", "whisper"])
def test_models_of_transformers_have_the_gradients_of_the_plain_module(name: str) -> None:
    entry = zoo.ZOO[name]
    torch.manual_seed(0)
    plain = entry.build(0.0).double().train()
    model = copy.deepcopy(plain)
    spmd = ms.SPMD(model, ALONE)
    generator = torch.Generator().manual_seed(1)
    x, y = (t.double() if t.is_floating_point() else t for t in (entry.x(generator), entry.y(generator)))
    losses = [entry.step(m, Untrained(), x, y) for m in (plain, spmd)]  # type: ignore[arg-type]
    torch.testing.assert_close(losses[1], losses[0])
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert (p.grad is None) is (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=1e-12 * max(1.0, float(p.grad.abs().max())))


# ---- aot_function


def keep(found: list[torch.fx.GraphModule]) -> Any:
    def compiler(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(gm)
        assert len(inputs) == len(gm.graph.find_nodes(op="placeholder"))
        return gm.forward

    return compiler


def function(x: Tensor, options: dict[str, Tensor], power: int = 2) -> tuple[Tensor, dict[str, Tensor]]:
    y = torch.tanh(x @ options["w"]) ** power
    return y.sum(), {"y": y, "best": y.argmax(1)}


def test_forward_and_backward_of_a_function_go_to_their_compilers() -> None:
    forwards: list[torch.fx.GraphModule] = []
    backwards: list[torch.fx.GraphModule] = []
    compiled = ms.aot_function(function, keep(forwards), keep(backwards))
    w = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    found = []
    for run in (function, compiled, compiled):
        loss, more = run(rows(), {"w": w}, power=3)
        (loss + more["y"].square().sum()).backward()
        found.append((loss.detach(), more["best"], w.grad))
        w.grad = None
    for ours, plain in zip(found[1] + found[2], found[0] + found[0], strict=True):
        torch.testing.assert_close(ours, plain)
    assert len(forwards) == len(backwards) == 1
    assert {n.op for n in forwards[0].graph.nodes} == {"placeholder", "call_function", "output"}
    compiled(rows(count=4), {"w": w}, power=3)
    compiled(rows(), {"w": w}, power=2)
    assert len(forwards) == 3 and len(backwards) == 1  # a backward is compiled when it first runs


def test_a_function_without_gradients_has_no_backward() -> None:
    forwards: list[torch.fx.GraphModule] = []
    compiled = ms.aot_function(function, keep(forwards))
    with torch.no_grad():
        loss, _ = compiled(rows(), {"w": torch.ones(6, 4, dtype=torch.float64, requires_grad=True)})
    assert len(forwards) == 1 and not loss.requires_grad


def test_tracing_may_see_logical_shapes() -> None:
    seen: list[torch.fx.GraphModule] = []

    def sharded(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        """What a compiler that partitions does: here the two halves of the rows, one after another."""
        seen.append(gm)
        return lambda x: tuple(torch.stack([gm(torch.cat([x, x]))[0] / 2]).unbind())

    def mean_size(x: Tensor) -> Tensor:
        return x.sum() * x.shape[0]

    compiled = ms.aot_function(mean_size, sharded, pre_compile_fn=lambda flat: [flat[0].new_empty(16, 6)])
    with torch.no_grad():
        torch.testing.assert_close(compiled(rows()), rows().sum() * 16)  # 16 rows are what it was traced with
    assert "16" in seen[0].code
    bad = ms.aot_function(mean_size, sharded, pre_compile_fn=lambda flat: [])
    with pytest.raises(ms.InputError, match="pre_compile_fn returned 0 values for 1 arguments"):
        bad(rows())


def test_dropout_in_a_function_has_one_mask() -> None:
    compiled = ms.aot_function(lambda x: F.dropout(x, 0.5), keep([]))
    x = rows().requires_grad_()
    out = compiled(x)
    out.sum().backward()
    torch.testing.assert_close(out, x * x.grad)
    assert not torch.equal(compiled(x), out)


def test_a_gradient_of_what_is_no_argument_is_refused() -> None:
    w = torch.ones(6, 4, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ms.CaptureError, match="wants a gradient and is no argument"):
        ms.aot_function(lambda x: x @ w, keep([]))(rows())
    with torch.no_grad():
        torch.testing.assert_close(ms.aot_function(lambda x: x @ w, keep([]))(rows()), rows() @ w)
    with pytest.raises(ms.CaptureError, match="pass it, or the module that it belongs to"):
        ms.simulate(lambda x: (x @ w).sum().backward(), mesh=Mesh(dp=2))(rows())
    assert w.grad is None
