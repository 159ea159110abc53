"""Calls with other sizes: exact for each, and one program for all where the step does nothing else with them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import rank_jobs
import torch
import torch.nn.functional as F
from models import ConvNet, Gpt, Mlp, built, labels, rows, sgd
from support import Build
from torch import Tensor, nn

import meshstep as ms
from meshstep.passes.family import NoFamilyError, TooFewError, family

SIZES = (8, 8, 4, 12, 16, 6, 8, 4)
DYNAMIC = {"x": ms.dynamic(0), "y": ms.dynamic(0)}


def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, flag: bool = False) -> Tensor:
    loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
    if flag:
        loss = loss * 2
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def batch(kind: str, i: int, count: int) -> tuple[Tensor, Tensor]:
    if kind == "gpt":
        return labels(i, 5, classes=16, count=count), labels(i + 9, 5, classes=16, count=count)
    shape = (2, 6, 6) if kind == "convnet" else (6,)
    return rows(i, *shape, count=count), labels(i, count=count)


def model_of(kind: str) -> nn.Module:
    return {"mlp": lambda: built(Mlp), "convnet": lambda: built(ConvNet), "gpt": lambda: built(Gpt, tied=True)}[kind]()


def check(
    kind: str, sizes: Sequence[int], function: Any = step, adam: bool = False, **options: Any
) -> tuple[ms.CacheInfo, list[str]]:
    """Plain and compiled steps with batches of these sizes; both must agree after every one."""
    plain, mesh = model_of(kind), options.pop("mesh", ms.Mesh(dp=2))
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) if adam else sgd(m) for m in (plain, model)]
    compiled = ms.simulate(function, mesh=mesh, **options)
    for i, count in enumerate(sizes):
        losses = [
            run(m, o, *batch(kind, i, count)) for run, m, o in zip((function, compiled), (plain, model), optimizers)
        ]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=1e-12)
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q, p, rtol=0, atol=1e-9)
    return compiled.cache_info(), list(compiled.cache_info().reasons)


@pytest.mark.parametrize("kind", ["mlp", "convnet", "gpt"])
def test_after_the_second_size_there_is_one_program_for_all(kind: str) -> None:
    info, reasons = check(kind, SIZES)
    assert info.misses == 2 and info.resized == 3 and info.hits == 3, info
    assert reasons[1].startswith("argument x was ")
    info, _ = check(kind, SIZES, adam=True)
    assert info.misses == 3 and info.resized == 3, info  # the first program makes the optimizer's state


@pytest.mark.parametrize("kind", ["mlp", "convnet", "gpt"])
def test_a_dim_that_is_said_to_be_dynamic_has_one_program(kind: str) -> None:
    info, reasons = check(kind, SIZES, inputs=DYNAMIC)
    assert info.misses == 1 and info.resized == 4 and reasons == ["first call"], info


def test_plans_that_shard_state_and_layers() -> None:
    styles = {
        "blocks.*.qkv": "colwise",
        "blocks.*.proj": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
    }
    plan = ms.plans.fsdp() + ms.plans.tensor_parallel(styles, axis="tp")
    info, _ = check("gpt", SIZES, mesh=ms.Mesh(dp=2, tp=2), plan=plan, inputs=DYNAMIC)
    assert info.misses == 1, info


def test_a_batch_that_does_not_divide_and_a_single_row_have_programs_of_their_own() -> None:
    info, _ = check("mlp", (8, 5, 4, 1, 2, 6), inputs=DYNAMIC)
    assert info.misses == 3 and info.resized == 3, info  # for 8, 5 and 1 rows


def test_python_that_looks_at_the_size_is_right_for_every_size() -> None:
    def looks(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return step(model, optimizer, x * 2 if x.shape[0] > 10 else x, y)

    info, _ = check("mlp", (8, 4, 6, 12, 16, 2), looks)
    assert info.misses == 5 and info.resized == 1, info
    info, _ = check("mlp", (8, 4, 12), looks, inputs=DYNAMIC)
    assert info.misses == 3, info  # 8, 16 and 24 rows do not do the same


def test_a_number_that_changes_at_a_size_is_seen() -> None:
    """The graph is the same for all sizes: only a number in it is another one."""

    def looks(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return step(model, optimizer, x * (2.0 if x.shape[0] > 10 else 3.0), y)

    info, _ = check("mlp", (8, 2, 4, 12), looks)
    assert info.misses == 3 and info.resized == 1, info


def test_numbers_that_follow_no_formula_are_compiled_in_for_each_size() -> None:
    def odd(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return step(model, optimizer, x * x.shape[0] ** 0.5, y)

    info, _ = check("mlp", (8, 4, 6, 12), odd)
    assert info.misses == 4 and info.resized == 0, info


def test_a_constant_that_depends_on_the_size_is_seen() -> None:
    def constant(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return step(model, optimizer, x * torch.tensor([float(i) for i in range(x.shape[0])]).double()[:, None], y)

    info, _ = check("mlp", (8, 4, 6), constant)
    assert info.misses == 3, info


def test_sizes_that_a_step_refuses_are_not_its_fault() -> None:
    def only(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        assert x.shape[0] in (4, 8)
        return step(model, optimizer, x, y)

    info, _ = check("mlp", (8, 4, 8), only)
    assert info.misses == 2, info


def test_the_log_of_five_sizes_eval_mode_and_a_flag() -> None:
    model = built(ConvNet)
    optimizer = sgd(model)
    compiled = ms.simulate(step, mesh=ms.Mesh(dp=2), inputs=DYNAMIC)
    for mode in (True, False):
        model.train(mode)
        for flag in (False, True):
            for i, count in enumerate((8, 4, 12, 16, 6)):
                compiled(model, optimizer, *batch("convnet", i, count), flag=flag)
    info = compiled.cache_info()
    assert info.misses == 4 and info.resized == 16, info
    assert info.reasons == (
        "first call",
        "argument flag was False, is True",
        "Conv2d is in eval mode" if "Conv2d" in info.reasons[2] else info.reasons[2],
        "ConvNet is in eval mode",
    )
    assert all("mode" in reason or "flag" in reason for reason in info.reasons[1:])


def test_two_dims_that_keep_their_ratio() -> None:
    def square(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        return (mask @ model(x)).square().mean()

    model = built(Mlp)
    compiled = ms.simulate(square, mesh=ms.Mesh(dp=2), inputs={"mask": ms.dynamic(0, 1), "x": ms.dynamic(0)})
    for i, n in enumerate((4, 6, 10)):
        x, mask = rows(i, count=n), rows(i + 5, n, count=n)
        torch.testing.assert_close(compiled(model, x, mask), square(model, x, mask))
    assert compiled.cache_info().misses == 1
    with pytest.raises(ms.InputError, match="dim 2 of a 2-d tensor is said to be dynamic"):
        ms.simulate(square, mesh=ms.Mesh(dp=2), inputs={"x": ms.dynamic(2)})(model, x, mask)
    for dims in ((), (-1,), (True,), (1.0,)):
        with pytest.raises(ms.InputError, match="dims, counted from 0"):
            ms.dynamic(*dims)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_real_ranks_agree_on_programs_of_other_sizes(pools, backend):
    sizes = (4, 2, 6, 8, 4) if backend == "eager" else (4, 2, 6)
    for found in pools(2).run(rank_jobs.other_sizes, backend, sizes, timeout=300):
        assert found["difference"] < 1e-10
        assert found["misses"] == 2 and found["resized"] == len(sizes) - 2, found  # the first one makes state


# ---- formulas


def sized(n: int, number: float) -> ms.Lowered:
    build = Build(dp=2)
    x = build.input("x", n, 3)
    return build.program(build(torch.ops.aten.mul.Scalar, x, number))  # type: ignore[return-value]


def test_formulas_of_means_and_of_corrected_variances() -> None:
    def programs(of: Any, sizes: Sequence[int]) -> Any:
        return family([sized(n, of(n)) for n in sizes], sizes)  # type: ignore[misc]

    for of in (lambda n: 1 / (3 * n), lambda n: 7.0):
        found = programs(of, (4, 6, 10))
        found.check(sized(14, of(14)), 14)
    corrected = lambda n: 36 * n / (36 * n - 1)  # noqa: E731
    with pytest.raises(TooFewError):
        programs(corrected, (4, 6, 10))
    found = programs(corrected, (4, 6, 10, 14))
    found.check(sized(30, corrected(30)), 30)
    with pytest.raises(NoFamilyError, match="where"):
        found.check(sized(30, corrected(31)), 30)
    with pytest.raises(NoFamilyError, match="follows no formula"):
        programs(lambda n: n**0.5, (4, 6, 10, 14))
