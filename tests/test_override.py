"""Modules replaced while a step is traced, edits of the expanded graph, modules that run as one op."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import Gpt, Mlp, built, check_exact, labels, rows, sgd, train_step
from torch import Tensor, fx, nn
from torch.distributed.tensor import Replicate, Shard

import meshstep as ms

MESH = ms.Mesh(dp=2)

torch.library.define("meshstep_test::stand_in", "(Tensor x) -> Tensor")
torch.library.define("meshstep_test::stand_in_backward", "(Tensor g, Tensor x) -> Tensor")
for name in ("stand_in", "stand_in_backward"):
    torch.library.impl(f"meshstep_test::{name}", "CompositeExplicitAutograd", lambda *t: torch.zeros_like(t[0]))
stand_in, stand_in_backward = (
    torch.ops.meshstep_test.stand_in.default,
    torch.ops.meshstep_test.stand_in_backward.default,
)


@pytest.fixture(autouse=True, scope="module")
def rows_alone() -> None:
    ms.rule(stand_in, validate=False)(ms.rules.factor("...->..."))
    ms.rule(stand_in_backward, validate=False)(ms.rules.factor("...,...->..."))


class StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return stand_in(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return stand_in_backward(g, *ctx.saved_tensors)


class Cube(nn.Module):
    """What the users' module computes; in the graph it is one op, put there by the override."""

    def forward(self, x: Tensor) -> Tensor:
        return x**3


class CallsStandIn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return StandIn.apply(x)


class CubeByHand(ms.Override):
    def __init__(self) -> None:
        self.replaced: list[nn.Module] = []
        self.seen: list[dict[str, str]] = []
        self.ops: list[Any] = []

    def replacement(self, module: nn.Module) -> nn.Module:
        self.replaced.append(module)
        return CallsStandIn()

    def transform(self, gm: fx.GraphModule, schema_map: Any) -> fx.GraphModule:
        self.seen.append({n.name: str(schema_map[n.name]) for n in gm.graph.nodes if n.target is stand_in})
        self.ops = [n.target for n in gm.graph.nodes if n.target in (stand_in, stand_in_backward)]
        for node in list(gm.graph.nodes):
            if node.target is stand_in:
                with gm.graph.inserting_before(node):
                    square = gm.graph.call_function(torch.mul, (node.args[0], node.args[0]))
                    new = gm.graph.call_method("mul", (square, node.args[0]))
                node.replace_all_uses_with(new)
            elif node.target is stand_in_backward:
                with gm.graph.inserting_before(node):
                    square = gm.graph.call_function(torch.ops.aten.square.default, (node.args[1],))
                    new = gm.graph.call_function(lambda g, s: 3 * g * s, (node.args[0], square))
                node.replace_all_uses_with(new)
        gm.graph.lint()
        return gm


class WithCubes(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.fc = nn.ModuleList(nn.Linear(6, 6) for _ in range(count))
        self.cubes = nn.ModuleList(Cube() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for fc, cube in zip(self.fc, self.cubes, strict=True):
            x = cube(torch.tanh(fc(x)))
        return x


def run(step: Any, model: nn.Module, count: int = 4, **options: Any) -> list[Tensor]:
    """Parameters after some steps, and the losses."""
    optimizer = sgd(model)
    losses = [step(model, optimizer, rows(i), labels(i, classes=4)) for i in range(count)]
    return [*(p.detach().clone() for p in model.parameters()), *losses]


def check_override(make: Callable[[], nn.Module], override: Any, misses: int = 2) -> ms.SimulatedStep:
    model = make()
    before = [(name, id(m), type(m)) for name, m in model.named_modules()]
    step = ms.simulate(train_step, mesh=MESH, module_override=override)
    for ours, theirs in zip(run(train_step, make()), run(step, model), strict=True):
        torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-12)
    assert [(name, id(m), type(m)) for name, m in model.named_modules()] == before
    assert step.cache_info().misses == misses - 1, step.cache_info().reasons
    return step


@pytest.mark.parametrize("count", [1, 2])
def test_modules_of_a_type_are_replaced_and_their_ops_put_in(count: int) -> None:
    override = CubeByHand()
    check_override(lambda: built(WithCubes, count), {Cube: override})
    assert len(override.replaced) == count and all(type(m) is Cube for m in override.replaced)
    assert [list(found.values()) for found in override.seen] == [["S(0)@dp"] * count]
    assert override.ops == [stand_in] * count + [stand_in_backward] * count  # in the order of forward and backward


def test_modules_are_named_by_a_pattern() -> None:
    override = CubeByHand()
    check_override(lambda: built(WithCubes, 3), {"cubes.[02]": override})
    assert len(override.replaced) == 2


def test_the_later_form_sees_names_and_may_leave_a_module_alone() -> None:
    seen = []

    class Named(CubeByHand):
        def replacement(self, fqn: str, module: nn.Module) -> nn.Module:  # type: ignore[override]
            seen.append(fqn)
            return CallsStandIn() if fqn == "cubes.1" else module

    check_override(lambda: built(WithCubes, 2), [Named()])
    assert seen == ["", "fc", "fc.0", "fc.1", "cubes", "cubes.0", "cubes.1"]


def test_a_function_may_replace_without_a_transform_and_use_the_parameters() -> None:
    class ByHand(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.__dict__["linear"] = linear

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.linear.weight.T + self.linear.bias

    check_override(lambda: built(Mlp), {nn.Linear: ByHand})


def test_the_step_is_called_with_the_module_itself() -> None:
    override = CubeByHand()
    step = ms.simulate(lambda cube, x: cube(x), mesh=MESH, module_override={Cube: override})
    torch.testing.assert_close(step(Cube(), rows()), rows() ** 3)


def test_the_module_is_whole_after_an_error() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("inside")

    model = built(Mlp)
    before = dict(model._modules)
    step = ms.simulate(train_step, mesh=MESH, module_override={nn.Linear: lambda m: Fails()})
    with pytest.raises(KeyError, match="inside"):
        step(model, sgd(model), rows(), labels())
    assert dict(model._modules) == before


def test_overrides_on_the_compiled_step_are_looked_at_too() -> None:
    model, override = built(WithCubes, 1), CubeByHand()
    lowered = ms.compile(mesh=ms.Mesh(dp=8), module_override={Cube: override})(train_step).lower(
        model, sgd(model), rows(), labels()
    )
    assert stand_in not in {n.target for n in lowered.local_program.calls}
    assert "stand_in" in lowered.as_text("global") and "stand_in" not in lowered.as_text("torch")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({Cube: CubeByHand}, "instead of an Override"),
        ({3: CubeByHand()}, "module_override names 3"),
        (CubeByHand(), "instead of an Override"),
        ({nn.LSTM: CubeByHand()}, "no module is a LSTM"),
        ({"blocks.*": CubeByHand()}, r"no module is named 'blocks\.\*'"),
        ({nn.Linear: lambda m: 3}, "the replacement is a int and no module"),
    ],
    ids=["a class", "a number", "no mapping", "no such type", "no such name", "no module"],
)
def test_what_is_no_override_is_refused(given: Any, text: str) -> None:
    model = built(Mlp)
    with pytest.raises(ms.InputError, match=text):
        ms.simulate(train_step, mesh=MESH, module_override=given)(model, sgd(model), rows(), labels())


# ---- gm_transformation


def test_a_transformation_is_called_once_a_program_and_what_it_returns_runs() -> None:
    seen: list[fx.GraphModule] = []

    def double_loss(gm: fx.GraphModule) -> fx.GraphModule:
        seen.append(gm)
        output = gm.graph.output_node()
        with gm.graph.inserting_before(output):
            doubled = gm.graph.call_function(torch.add, (output.args[0][0], output.args[0][0]))  # type: ignore[index]
        output.args = ((doubled, *output.args[0][1:]),)  # type: ignore[index, misc]
        return gm

    model = built(Mlp)
    optimizer = sgd(model)
    step = ms.simulate(train_step, mesh=MESH, gm_transformation=double_loss)
    plain = copy.deepcopy(model)
    for i in range(3):
        loss = step(model, optimizer, rows(i), labels(i))
        torch.testing.assert_close(loss, 2 * train_step(plain, sgd(plain), rows(i), labels(i)))
    assert len(seen) == step.cache_info().misses == 1
    step(model, optimizer, rows(count=4), labels(count=4))
    assert len(seen) == 2


def test_a_transformation_sees_collectives_and_may_return_another_graph() -> None:
    def rebuilt(gm: fx.GraphModule) -> fx.GraphModule:
        assert any(n.target is torch.ops.meshstep.all_reduce.default for n in gm.graph.nodes)
        graph = fx.Graph()
        graph.output(graph.graph_copy(gm.graph, {}, return_output_node=False))
        return fx.GraphModule(gm, graph)

    model = built(Gpt)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        return train_step(lambda t: model(t).flatten(0, 1), optimizer, x, x.flatten())  # type: ignore[arg-type]

    plain = ms.simulate(step, mesh=MESH)
    again = ms.simulate(step, mesh=MESH, gm_transformation=rebuilt)
    x, other = labels(0, 5, classes=16), copy.deepcopy((model, optimizer))
    for _ in range(2):
        torch.testing.assert_close(again(*other, x), plain(model, optimizer, x), rtol=0, atol=0)


def _returns_nothing(gm: fx.GraphModule) -> Any:
    return None


def _loses_a_result(gm: fx.GraphModule) -> Any:
    output = gm.graph.output_node()
    output.args = (output.args[0][1:],)  # type: ignore[index]
    return gm


def _changes_a_type(gm: fx.GraphModule) -> Any:
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        first = gm.graph.call_method("float", (output.args[0][0],))  # type: ignore[index]
    output.args = ((first, *output.args[0][1:]),)  # type: ignore[index, misc]
    return gm


def _writes(gm: fx.GraphModule) -> Any:
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        first = gm.graph.call_function(torch.ops.aten.add_.Tensor, (output.args[0][0], 1))  # type: ignore[index]
    output.args = ((first, *output.args[0][1:]),)  # type: ignore[index, misc]
    return gm


def _adds_an_input(gm: fx.GraphModule) -> Any:
    with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
        gm.graph.placeholder("more")
    return gm


def _cuts_a_bucket(gm: fx.GraphModule) -> Any:
    bucket = [n for n in gm.graph.nodes if n.target is torch.ops.meshstep.all_reduce.default][-1]
    with gm.graph.inserting_before(bucket):
        bucket.args = (
            gm.graph.call_function(torch.ops.aten.narrow.default, (bucket.args[0], 0, 0, 3)),
            *bucket.args[1:],
        )
    return gm


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (_returns_nothing, "the transformation returned NoneType"),
        (_loses_a_result, "the graph returns 4 values instead of 5"),
        (_changes_a_type, r"output 0 was f64\[\] and is f32\[\]"),
        (_writes, "writes into its arguments"),
        (_adds_an_input, "the graph has 8 inputs instead of 7"),
        (_cuts_a_bucket, r"split_with_sizes calls aten.split_with_sizes.default, which says: "),
    ],
)
def test_what_a_transformation_returns_is_verified(edit: Any, text: str) -> None:
    model = built(Mlp)
    before = [p.detach().clone() for p in model.parameters()]
    step = ms.simulate(train_step, mesh=MESH, gm_transformation=edit)
    with pytest.raises(ms.PassError, match=text) as caught:
        step(model, sgd(model), rows(), labels())
    assert f"gm_transformation {edit.__name__}" in str(caught.value)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_names_that_are_no_names_in_python() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleDict({"lambda": nn.Linear(6, 6), "0": nn.Linear(6, 4)})

        def forward(self, x: Tensor) -> Tensor:
            return self.layers["0"](self.layers["lambda"](x))

    model = built(lambda: nn.Sequential(nn.Linear(6, 6), Named()))
    step = ms.simulate(train_step, mesh=MESH, gm_transformation=lambda gm: gm)
    assert step(model, sgd(model), rows(), labels()).isfinite()
    alone = built(lambda: nn.ParameterDict({"lambda": nn.Parameter(torch.ones(6))}))
    step = ms.simulate(lambda m, x: (x * m["lambda"]).sum(), mesh=MESH, gm_transformation=lambda gm: gm)
    torch.testing.assert_close(step(alone, rows()), rows().sum())


def test_a_transformation_that_is_no_function_is_refused() -> None:
    with pytest.raises(ms.InputError, match="gm_transformation is a int"):
        ms.compile(gm_transformation=3)  # type: ignore[call-overload]


# ---- opaque modules


class Numpy(nn.Module):
    """Computes outside of torch in the forward, and asks for values."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))

    def forward(self, x: Tensor, power: int = 1) -> Tensor:
        largest = float(np.abs(x.detach().numpy()).sum(1).max())  # an `if` on values that changes nothing
        scaled = x * self.scale if largest >= 0 else x
        return torch.sin(scaled) ** power


class UsesNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.numpy, self.head = nn.Linear(6, 6), Numpy(), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.numpy(self.fc(x), power=2))


ROWS_ALONE = [((Shard(0),), (Shard(0),))]


@pytest.mark.parametrize("placements", [[], ROWS_ALONE], ids=["whole", "by rows"])
def test_a_module_that_cannot_be_traced_runs_as_one_op(placements: Any) -> None:
    with pytest.raises(ms.CaptureError):
        ms.simulate(train_step, mesh=MESH)(model := built(UsesNumpy), sgd(model), rows(), labels())
    override = {Numpy: ms.Opaque(lambda x, power: x, placements)}
    check_override(lambda: built(UsesNumpy), override)
    text = ms.compile(mesh=MESH, module_override=override)(train_step).lower(
        model := built(UsesNumpy), sgd(model), rows(count=4), labels(count=4)
    )
    gathered = [c for c in text.communication if c.kind == "all_gather"]
    assert bool(gathered) is not bool(placements)


def test_an_opaque_module_of_several_inputs_and_outputs() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            assert float(x.detach().sum()) <= float("inf")
            return x @ w, (x * 2).sum(1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair, self.w = Pair(), nn.Parameter(torch.randn(6, 4))

        def forward(self, x: Tensor) -> Tensor:
            y, s = self.pair(x, self.w)
            return y + s[:, None]

    like = ms.Opaque(
        lambda x, w: (x.new_empty(len(x), 4), x.new_empty(len(x))),
        [((Shard(0), Replicate()), (Shard(0), Shard(0)))],
    )
    check_override(lambda: built(Model), {"pair": like})


def test_placements_that_do_not_fit_an_opaque_module_are_refused() -> None:
    model = built(UsesNumpy)
    override = {Numpy: ms.Opaque(lambda x, power: x, [((Shard(0), Shard(0)), (Shard(0),))])}
    with pytest.raises(ms.RuleError, match="placements of 2 arguments and 1 outputs for a module with 1 and 1"):
        ms.simulate(train_step, mesh=MESH, module_override=override)(model, sgd(model), rows(), labels())


def test_a_verified_opaque_module() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return train_step(model, optimizer, x, y)

    model = built(UsesNumpy)
    compiled = ms.compile(
        mesh=ms.Mesh(dp=4), module_override={Numpy: ms.Opaque(lambda x, power: x, ROWS_ALONE)}, backend="eager"
    )(step)
    found = compiled.verify(model, sgd(model), rows(), labels(), steps=3)
    assert found.ok and found.max_error < 1e-12, found
    check_exact(F.mse_loss, lambda i: (rows(i), rows(i + 1)), steps=1)
