"""Random programs, plans, arguments and damage; `make fuzz` draws many more, and other ones every time."""

from __future__ import annotations

import collections
import logging
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz_programs import (
    Net,
    Program,
    Triple,
    Where,
    check,
    check_triple,
    drawn_program,
    fault,
    moved,
    parts,
    small_cases,
    small_triples,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from models import Mlp, built, labels, rows, train_step
from torch import Tensor, nn

import meshstep as ms
from meshstep.verification import compare

PROGRAMS, TRIPLES, TREES, CUTS = 200, 50, 25, 60


def some(count: int) -> Callable[[Any], Any]:
    """So many cases, the same ones every time; each is of one number, so that there is nothing to shrink."""
    return settings(
        max_examples=count, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate],
    )  # fmt: skip


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """A batch that does not divide is logged; here most do not."""
    caplog.set_level(logging.ERROR, "meshstep")


@some(PROGRAMS)
@given(small_cases)
def test_a_random_program_under_random_plans_and_passes_equals_plain_torch(case: Any) -> None:
    program, where = case
    assert fault(lambda: check(program, where, 1 + program.loss % 2)) is None, case


@some(TRIPLES)
@given(small_triples)
def test_a_model_under_random_plans_equals_plain_torch(triple: Triple) -> None:
    assert fault(lambda: check_triple(triple)) is None, triple


# Found by `make fuzz`: a norm of what is zero but for rounding; a comparison of a number with what it equals.
CANCELLING = Program(
    (4, 2, 8), (("normed", 47961), ("indexed", 14069), ("reduced", 59985)), "adam", 55377, returns=True
)  # fmt: skip
JUMPING = Program(
    (5, 6),
    (("kinked", 63687), ("normed", 49600), ("view", 4743), ("piece", 37504), ("kinked", 52447), ("indexed", 48591)),
    "rmsprop", 52641, 1.0, returns=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("program", "where"),
    [
        (CANCELLING, Where((("a", 4), ("b", 2)), (("zero3", 4486), ("sequence", 40910)))),
        (JUMPING, Where((("b", 4),), (("placements", 43991),))),
    ],
    ids=["cancelling", "jumping"],
)
def test_a_program_that_rounding_decides_is_told_from_a_wrong_plan(program: Program, where: Where) -> None:
    found = fault(lambda: check(program, where), lambda: moved(program))
    assert found is not None and found.of_rounding, found


@pytest.mark.parametrize("chosen", range(8))
def test_a_wrong_number_is_never_taken_for_rounding(chosen: int) -> None:
    program = drawn_program(random.Random(chosen))
    step, make_args = parts(program)

    def off(model: Net, *rest: Any) -> Any:
        returned = step(model, *rest)
        with torch.no_grad():
            next(model.parameters()).mul_(1 + 1e-8)
        return returned

    found = fault(lambda: compare(step, off, make_args, 1, torch.float64), lambda: moved(program, 1))
    assert found is not None and not found.of_rounding, found


# ---- arguments


Pair = collections.namedtuple("Pair", "left right")


@dataclass
class Record:
    first: Any
    second: Any


def drawn_tree(chance: random.Random, tensors: list[Tensor], depth: int = 3) -> Any:
    """Containers of tensors (some of them twice, some without elements or dims), Python values and None."""
    kind = chance.randrange(10) if depth else chance.randrange(5)
    below = [drawn_tree(chance, tensors, depth - 1) for _ in range(chance.randint(0, 3))] if kind >= 5 else []
    match kind:
        case 0 | 1:
            return chance.choice(tensors)
        case 2 | 3:
            tensors.append(drawn_tensor(chance))
            return tensors[-1]
        case 4:
            return chance.choice((None, 3, 0.5, True, "text", (), {}, []))
        case 5:
            return below
        case 6:
            return tuple(below)
        case 7:
            return {f"key{i}": value for i, value in enumerate(below)}
        case 8:
            return Pair(below, chance.choice((1, None)))
    return Record(below, chance.choice(tensors))


def drawn_tensor(chance: random.Random) -> Tensor:
    shape = chance.choice(((8, 3), (8,), (), (0, 3), (8, 0), (7, 2), (1,), (4, 2, 3)))
    dtype = chance.choice((torch.float64, torch.float64, torch.int64, torch.bool))
    numbers = torch.tensor([chance.gauss(0, 2) for _ in range(torch.Size(shape).numel())], dtype=torch.float64)
    return numbers.reshape(shape).to(dtype)


def changed(tree: Any, by: Tensor) -> Any:
    """The same tree of other tensors."""
    match tree:
        case Tensor():
            return tree * by.sum() if tree.is_floating_point() else tree
        case dict():
            return {key: changed(value, by) for key, value in tree.items()}
        case Record():
            return Record(changed(tree.first, by), changed(tree.second, by))
        case tuple() if hasattr(tree, "_fields"):
            return type(tree)(*(changed(value, by) for value in tree))
        case list() | tuple():
            return type(tree)(changed(value, by) for value in tree)
    return tree


def summed(tree: Any, by: Tensor) -> Any:
    """A number of all tensors, and of Python's numbers."""
    match tree:
        case Tensor():
            return (tree.to(torch.float64) * by.sum()).sin().sum()
        case dict():
            return sum(summed(value, by) for value in tree.values())
        case Record():
            return summed(tree.first, by) + 2 * summed(tree.second, by)
        case list() | tuple():
            return sum(summed(value, by) * (i + 1) for i, value in enumerate(tree))
        case bool() | str() | None:
            return 0.0
    return float(tree)


def tree_step(model: nn.Module, optimizer: Any, x: Tensor, tree: Any, *rest: Any, **named: Any) -> Any:
    weight = next(model.parameters())
    loss = model(x).square().mean() + 0.01 * summed([tree, rest, named], weight)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss.detach(), "tree": changed(tree, weight.detach()), "named": changed(named, weight.detach())}


def _shape_of(tree: Any) -> Any:
    """A tree with what tensors are in place of tensors."""
    match tree:
        case Tensor():
            return tuple(tree.shape), tree.dtype
        case dict():
            return {key: _shape_of(value) for key, value in tree.items()}
        case Record():
            return "Record", _shape_of(tree.first), _shape_of(tree.second)
        case list() | tuple():
            return type(tree), [_shape_of(value) for value in tree]
    return tree


@some(TREES)
@given(st.randoms(use_true_random=True))
def test_arguments_may_be_any_trees(chance: random.Random) -> None:
    tensors = [drawn_tensor(chance)]
    tree, rest, named = (drawn_tree(chance, tensors) for _ in range(3))
    model = built(Mlp)
    args = (model, torch.optim.SGD(model.parameters(), 0.01), rows(), tree, rest)
    mesh, plan = ms.Mesh(dp=chance.choice((2, 4))), chance.choice((ms.plans.data_parallel(), ms.plans.fsdp()))
    found = ms.verify(tree_step, lambda i: (args, {"named": named}), mesh=mesh, plan=plan, steps=2)
    assert found.ok and found.max_error <= 1e-9, found
    returned = ms.simulate(tree_step, mesh=mesh, plan=plan)(*args, named=named)
    assert _shape_of(returned["tree"]) == _shape_of(tree)
    assert _shape_of(returned["named"]) == _shape_of({"named": named})


# ---- damage


def saved(path: Path) -> Path:
    model = built(Mlp, seed=1)
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer, rows(), labels())
    ms.checkpoint.save(path, {"model": model, "optimizer": optimizer, "done": 3})
    return path


def damaged(path: Path, chance: random.Random) -> str:
    """Cut, change, extend, remove or swap a file of a checkpoint."""
    files = sorted(p for p in path.iterdir() if p.is_file())
    file = chance.choice(files)
    content = bytearray(file.read_bytes())
    match chance.randrange(6):
        case 0:
            file.unlink()
        case 1:
            file.write_bytes(content[: chance.randrange(len(content))])
        case 2:
            file.write_bytes(bytes(content) + b"more")
        case 3:
            file.write_bytes(chance.choice(files).read_bytes())
        case 4:
            at = chance.randrange(len(content))
            file.write_bytes(bytes(content[:at]) + bytes(chance.randrange(256) for _ in range(8)) + bytes(content[at:]))
        case _:
            at = chance.randrange(len(content))
            content[at] ^= 1 << chance.randrange(8)
            file.write_bytes(content)
    return file.name


@some(CUTS)
@given(st.randoms(use_true_random=True))
def test_a_damaged_checkpoint_is_refused_or_gives_the_right_numbers(
    tmp_path_factory: pytest.TempPathFactory, chance: random.Random
) -> None:
    whole = saved(tmp_path_factory.mktemp("damage") / "whole")
    broken = Path(shutil.copytree(whole, whole.with_name("broken")))
    name = damaged(broken, chance)
    want, found = built(Mlp), built(Mlp)
    optimizers = [torch.optim.AdamW(model.parameters()) for model in (want, found)]
    before = _state(found, optimizers[1])
    ms.checkpoint.load(whole, {"model": want, "optimizer": optimizers[0], "done": 0})
    random_state = torch.get_rng_state()
    refused, done = None, None
    try:
        done = ms.checkpoint.load(broken, {"model": found, "optimizer": optimizers[1], "done": 0})
    except ms.CheckpointError as error:
        refused = error
    if refused is None:
        assert done == {"done": 3}
        assert _same(_state(found, optimizers[1]), _state(want, optimizers[0])), name
    else:
        assert refused.what and refused.at and refused.hint, refused
        assert _same(_state(found, optimizers[1]), before), name
        assert torch.equal(torch.get_rng_state(), random_state)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    entries = [value for entries in optimizer.state.values() for value in entries.values()]
    return [t.detach().clone() for t in (*model.state_dict().values(), *entries)]


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@some(20)
@given(st.randoms(use_true_random=True))
def test_a_cut_safetensors_file_is_refused(tmp_path_factory: pytest.TempPathFactory, chance: random.Random) -> None:
    file = tmp_path_factory.mktemp("cut") / "model.safetensors"
    ms.checkpoint.save(file, built(Mlp, seed=1))
    content = file.read_bytes()
    file.write_bytes(content[: chance.randrange(len(content))])
    model = built(Mlp)
    before = _state(model, torch.optim.SGD(model.parameters()))
    with pytest.raises(ms.CheckpointError):
        ms.checkpoint.load(file, model)
    assert _same(_state(model, torch.optim.SGD(model.parameters())), before)
