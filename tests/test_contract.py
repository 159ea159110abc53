"""`contract`: what the original's tests saw, and what it only wished for."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from models import Mlp
from torch import nn

import meshstep as ms


class Counted:
    """State with a number."""

    def __init__(self) -> None:
        self.calls = 0


@ms.contract(Counted)
def count_calls(module: nn.Module, by: int = 1) -> nn.Module:
    state = count_calls.state(module)
    assert state is not None and state.calls == 0  # it is there before the function runs

    def hook(*_: Any) -> None:
        state.calls += by

    module.register_forward_pre_hook(hook)
    return module


@ms.contract()
def name_it(module: nn.Module, *, name: str) -> None:
    module.name = name  # type: ignore[assignment]


@ms.contract(incompatible_with=["name_it"])
def number_it(module: nn.Module) -> None:
    module.number = 1  # type: ignore[assignment]


def test_hooks_and_state() -> None:
    model = Mlp()
    assert count_calls.state(model) is None
    assert count_calls(model, by=2) is model
    for _ in range(3):
        model(torch.randn(2, 6))
    state = count_calls.state(model)
    assert state is not None and state.calls == 6
    assert count_calls.state(model.fc1) is None
    assert count_calls.__name__ == "count_calls"


def test_the_registry_keeps_order_and_arguments() -> None:
    model = Mlp()
    assert ms.get_registry(model) is None
    name_it(model, name="a")
    count_calls(model, 3)
    registry = ms.get_registry(model)
    assert registry is not None and list(registry) == ["name_it", "count_calls"]
    assert registry["name_it"].kwargs == {"name": "a"} and registry["count_calls"].args == (3,)
    assert registry["name_it"].function == f"{__name__}.name_it"
    with pytest.raises(TypeError):
        registry["other"] = registry["name_it"]  # type: ignore[index]


def test_several_modules_at_once_share_one_state() -> None:
    @ms.contract(Counted)
    def tie(modules: list[nn.Linear]) -> list[nn.Linear]:
        modules[1].weight = modules[0].weight
        return modules

    modules = [nn.Linear(3, 3), nn.Linear(3, 3)]
    tie(modules)
    assert modules[1].weight is modules[0].weight
    assert tie.state(modules[0]) is tie.state(modules[1]) is not None
    with pytest.raises(ms.InputError, match="tie was applied to this module before"):
        tie([nn.Linear(3, 3), modules[1]])


def test_modules_copy_and_pickle_with_what_was_applied() -> None:
    model = Mlp()
    name_it(model, name="a")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        registry = ms.get_registry(other)
        assert registry is not None and dict(registry["name_it"].kwargs) == {"name": "a"}
        assert name_it.state(other) is not None and name_it.state(other) is not name_it.state(model)
        with pytest.raises(ms.InputError, match="before"):
            name_it(other, name="b")


def test_a_prepared_module_trains() -> None:
    model = Mlp().double()
    count_calls(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(model: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    found = ms.verify(step, lambda i: ((model, optimizer, torch.randn(4, 6).double()), {}), mesh=ms.Mesh(dp=2))
    assert found.ok, found


def _rename(m: Any) -> None:
    m.fc3 = m.fc1
    del m.fc1


def _reorder(m: Any) -> None:
    weight = m.fc1.weight
    del m.fc1.weight
    m.fc1.weight = weight


def _swap_type(m: Any) -> None:
    m.fc1.__class__ = type("Other", (nn.Linear,), {})


def _replace(m: Any) -> None:
    m.fc2 = nn.Bilinear(1, 1, 1)


def _new_forward(m: Any) -> None:
    m.fc2.forward = lambda x: x


BREACHES = {
    "names of parameters": (
        _rename,
        "breach changed the names of parameters\n"
        "  at   Mlp: removed fc1.weight, fc1.bias; added fc3.weight, fc3.bias\n"
        "  try  hooks, or parameters of that name",
    ),
    "order of parameters": (
        _reorder,
        "breach changed the order of parameters\n"
        "  at   Mlp: at place 0: fc1.weight was there, fc1.bias is there now\n"
        "  try  hooks, or parameters of that name",
    ),
    "names of buffers": (
        lambda m: m.fc1.register_buffer("mask", torch.ones(1)),
        "breach changed the names of buffers\n  at   Mlp: added fc1.mask\n  try  hooks, or parameters of that name",
    ),
    "names of modules": (
        lambda m: m.add_module("drop", nn.Dropout()),
        "breach changed the names of modules\n  at   Mlp: added drop\n  try  hooks, or parameters of that name",
    ),
    "types": (
        _swap_type,
        "breach changed the type of a module from Linear to Other\n"
        "  at   Mlp: fc1\n"
        "  try  hooks, or parameters of that name",
    ),
    "types by replacing": (
        lambda m: setattr(m, "fc2", type("Wide", (nn.Linear,), {})(8, 4)),
        "breach changed the type of a module from Linear to Wide\n"
        "  at   Mlp: fc2\n"
        "  try  hooks, or parameters of that name",
    ),
    "forward": (
        _new_forward,
        "breach replaced the forward of a module\n  at   Mlp: fc2\n  try  hooks, or parameters of that name",
    ),
}


@pytest.mark.parametrize("name", BREACHES)
def test_a_breach_says_what_moved_and_leaves_no_mark(name: str) -> None:
    change, text = BREACHES[name]

    @ms.contract()
    def breach(module: nn.Module) -> None:
        change(module)

    model = Mlp()
    with pytest.raises(ms.InputError) as caught:
        breach(model)
    assert str(caught.value) == text
    assert ms.get_registry(model) is None and breach.state(model) is None


def test_what_is_returned_must_be_what_was_given() -> None:
    @ms.contract()
    def wrap(module: nn.Module) -> nn.Module:
        return copy.deepcopy(module)

    @ms.contract()
    def box(module: nn.Module) -> nn.Module:
        return nn.Sequential(module)

    with pytest.raises(ms.InputError, match="wrap returned another module than it was given"):
        wrap(Mlp())
    with pytest.raises(ms.InputError, match="box changed the type of the module to Sequential"):
        box(Mlp())


def test_functions_that_exclude_each_other_in_either_order() -> None:
    first, second = Mlp(), Mlp()
    name_it(first, name="a")
    with pytest.raises(ms.InputError) as caught:
        number_it(first)
    assert str(caught.value) == (
        "number_it cannot be combined with name_it, which was applied to this module\n"
        "  at   number_it(Mlp)\n"
        "  try  one of them, on a fresh module"
    )
    number_it(second)
    with pytest.raises(ms.InputError, match="name_it cannot be combined with number_it"):
        name_it(second, name="b")
    assert list(ms.get_registry(second) or ()) == ["number_it"]


def test_an_error_inside_leaves_no_mark() -> None:
    @ms.contract(Counted)
    def fail(module: nn.Module) -> None:
        raise KeyError("inside")

    model = Mlp()
    name_it(model, name="a")
    with pytest.raises(KeyError, match="inside"):
        fail(model)
    assert list(ms.get_registry(model) or ()) == ["name_it"] and fail.state(model) is None


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (3, "name_it got a int instead of a module"),
        ([], "name_it got no module"),
        ([nn.ReLU(), None], "name_it got a NoneType instead of a module"),
        ([(relu := nn.ReLU()), relu], "name_it got a module twice"),
    ],
)
def test_what_is_no_module_is_refused(given: Any, text: str) -> None:
    with pytest.raises(ms.InputError, match=text):
        name_it(given, name="a")


def test_a_decorator_without_parentheses_is_refused() -> None:
    with pytest.raises(ms.InputError, match="contract got function instead of a class"):
        ms.contract(lambda module: None)  # type: ignore[arg-type]
