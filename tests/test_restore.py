"""After a capture, whatever came of it, everything of the user's is as before; and what the errors say."""

from __future__ import annotations

import contextlib
import inspect
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import ConvNet, Mlp, built, labels, rows, sgd, train_step
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.optim import lr_scheduler

import meshstep as ms
from meshstep.errors import CaptureError, InputError

MESH = ms.Mesh(dp=2)


class Model(ConvNet):
    """With all that a capture could leave behind: attributes, containers, hooks, a frozen part, a part in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2), persistent=False)
        self.note, self.calls, self.outputs, self.cache = torch.ones(3), 0, [], {"a": [1]}
        self.shared = self.head.weight  # a second name
        self.register_forward_hook(lambda module, args, out: module.outputs.append(1))
        self.body[0].weight.requires_grad_(False)
        self.body[4].eval()

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.detach().mean((0, 2, 3))
        self.note = self.note * 2
        self.calls += 1
        self.cache["a"].append(2)
        self.extra = x
        return super().forward(x)


def snapshot(value: Any, seen: dict[int, Any]) -> Any:
    """A value as plain data that compares: which objects, and what is in them."""
    if id(value) in seen:
        return ("again", id(value))
    if isinstance(value, Tensor):
        seen[id(value)] = value
        gradient = None if value.grad is None else snapshot(value.grad, seen)
        values = value.detach().flatten().tolist()
        return (id(value), type(value), value.dtype, value.shape, values, value.requires_grad, value._version, gradient)
    if isinstance(value, (nn.Module, torch.optim.Optimizer)):
        seen[id(value)] = value
        return (id(value), snapshot(value.__dict__, seen))
    if isinstance(value, dict):
        seen[id(value)] = value
        return (id(value), [(id(k) if isinstance(k, Tensor) else k, snapshot(v, seen)) for k, v in value.items()])
    if isinstance(value, (list, tuple, set)):
        return (id(value), [snapshot(v, seen) for v in value])
    return value if isinstance(value, (int, float, str, bool, type(None))) else id(value)


def world() -> list[Any]:
    """What a capture could disturb outside of the step's arguments."""
    return [
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.compiler.is_compiling(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.autograd.is_multithreading_enabled(),
        torch.get_rng_state().tolist(),
        random.getstate(),
        str(np.random.get_state()),
        torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(),
    ]


def everything(*values: Any) -> list[Any]:
    return [snapshot(list(values), {})[1], world()]


def made() -> tuple[Any, ...]:
    """A model and an optimizer in the middle of training, and a batch."""
    model = built(Model)
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in model.parameters() if p.ndim > 1]}, {"params": [model.head.bias], "lr": 0.1}]
    )
    lr_scheduler.StepLR(optimizer, 2)
    train_step(model, optimizer, rows(5, 2, 6, 6), labels(5))
    model.head.weight.grad = torch.ones_like(model.head.weight)
    model.outputs.clear()
    model.__dict__.pop("extra")
    return model, optimizer, rows(0, 2, 6, 6), labels()


def raising(where: str, error: Callable[[], None]) -> Callable[..., Any]:
    """A step in which something goes wrong at some place."""

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        model.eval()
        loss = F.cross_entropy(model(x), y)
        F.dropout(loss)
        if where == "forward":
            error()
        loss.backward()
        if where == "backward":
            error()
        optimizer.step()
        error()
        return loss

    return step


def fail() -> None:
    raise ValueError("mine")


def test_lower_changes_nothing() -> None:
    model, optimizer, x, y = made()
    before = everything(model, optimizer, x, y)
    ms.simulate(train_step_of(model), mesh=MESH).lower(model, optimizer, x, y)
    assert everything(model, optimizer, x, y) == before


def train_step_of(model: Any) -> Callable[..., Any]:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        model.train()
        loss = F.cross_entropy(F.dropout(model(x), 0.1), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        x.mul_(0)
        return loss

    return step


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_an_exception_of_the_step_comes_through_and_changes_nothing(where: str) -> None:
    model, optimizer, x, y = made()
    before = everything(model, optimizer, x, y)
    step = ms.simulate(raising(where, fail), mesh=MESH)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^mine$"):
            step(model, optimizer, x, y)
        assert everything(model, optimizer, x, y) == before


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_a_capture_error_changes_nothing_and_the_next_step_works(where: str) -> None:
    model, optimizer, x, y = made()
    before = everything(model, optimizer, x, y)
    with pytest.raises(CaptureError):
        ms.simulate(raising(where, lambda: float(model.head.bias.sum()) and None), mesh=MESH)(model, optimizer, x, y)
    assert everything(model, optimizer, x, y) == before
    model = built(Mlp)
    optimizer = sgd(model)
    assert ms.simulate(train_step, mesh=MESH)(model, optimizer, rows(), labels()).isfinite()


def test_a_step_changes_values_and_no_objects() -> None:
    model = built(ConvNet)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    step = ms.simulate(train_step, mesh=MESH)
    batch = rows(0, 2, 6, 6), labels()
    step(model, optimizer, *batch)  # makes the optimizer's state
    before = objects(model, optimizer)
    for _ in range(3):
        step(model, optimizer, *batch)
        assert objects(model, optimizer) == before
    assert all(p.grad is None and p.is_leaf and p.requires_grad for p in model.parameters())


def objects(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Identities of all that a user may hold a reference to."""
    tables = [t for m in model.modules() for t in (m.__dict__, m._parameters, m._buffers, m._modules, m._forward_hooks)]
    found = [id(table) for table in tables] + [(key, id(value)) for table in tables for key, value in table.items()]
    found += [id(optimizer.param_groups), id(optimizer.state), id(optimizer.defaults)]
    found += [
        (id(g), [(k, v if k != "params" else [id(p) for p in v]) for k, v in g.items()]) for g in optimizer.param_groups
    ]
    return found + [(id(p), [(k, id(v)) for k, v in entries.items()]) for p, entries in optimizer.state.items()]


def test_modes_and_grad_mode_of_the_step_do_not_leak() -> None:
    def step(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.random.fork_rng():
            torch.rand(3)
            return model(x)

    model, before = built(Mlp), world()
    with pytest.raises(CaptureError):
        ms.simulate(lambda m, x: step(m, x).sum().item(), mesh=MESH)(model, rows())
    assert world() == before
    ms.simulate(step, mesh=MESH).lower(model, rows())
    assert world() == before


# ---- what errors say


@contextlib.contextmanager
def error_at(kind: type[Exception], text: str) -> Iterator[None]:
    """Expect an error with exactly this text; `LINE` is the line with the comment `# here` of the calling test."""
    caller = next(f for f in inspect.stack() if f.function.startswith("test_"))
    source, first = inspect.getsourcelines(caller.frame.f_code)
    here = [first + i for i, line in enumerate(source) if re.search(r"# here$", line)]
    with pytest.raises(kind) as caught:
        yield
    assert str(caught.value) == text.replace("LINE", f"test_restore.py:{here[0]}" if here else "")


def value_needed(line: str = "LINE") -> str:
    return (
        "a tensor's value is needed in Python (.item(), float(), bool(), `if` on a tensor)\n"
        f"  at   {line}\n"
        "  try  return the tensor from the step and look at it outside, or use torch.where"
    )


def run(step: Callable[..., Any], optimizer: Any = sgd) -> Any:
    model = built(Mlp)
    return ms.simulate(step, mesh=MESH)(model, optimizer(model), rows(), labels())


def test_item_in_the_step_is_refused_at_its_line() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> float:
        loss = F.cross_entropy(model(x), y)
        return loss.item()  # here

    with error_at(CaptureError, value_needed()):
        run(step)


def test_a_branch_on_a_tensor_is_refused_at_its_line() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        if loss > 1:  # here
            loss = loss / 2
        return loss

    with error_at(CaptureError, value_needed()):
        run(step)


def test_float_of_a_tensor_is_refused_at_its_line() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> float:
        return 2 * float(model(x).sum())  # here

    with error_at(CaptureError, value_needed()):
        run(step)


def test_to_list_and_numpy_are_refused() -> None:
    for look in (Tensor.tolist, Tensor.numpy, np.asarray):
        with pytest.raises(CaptureError, match=r"a tensor's value is needed(.|\n)*at   test_restore\.py:\d+"):
            run(lambda model, optimizer, x, y, look=look: look(model(x).detach()))


@pytest.mark.parametrize(
    ("select", "op"),
    [
        (lambda x: x[x[:, 0] > 0], "aten.index.Tensor"),
        (lambda x: x.nonzero(), "aten.nonzero.default"),
        (lambda x: x.masked_select(x > 0), "aten.masked_select.default"),
        (lambda x: x.unique(), "aten._unique2.default"),
    ],
)
def test_a_shape_that_depends_on_values_is_refused_at_its_line(select: Callable[[Tensor], Tensor], op: str) -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return use(x)  # here

    def use(x: Tensor) -> Tensor:
        return select(x)

    with pytest.raises(CaptureError) as caught:
        run(step)
    assert caught.value.what == f"the result of {op} has a shape that depends on values"
    assert caught.value.at is not None and re.fullmatch(r"test_restore\.py:\d+", caught.value.at)
    assert (
        caught.value.hint == "a form with a fixed shape: torch.where or a mask instead of boolean indexing or nonzero"
    )


def test_a_schedule_in_the_step_is_refused_at_its_line() -> None:
    model = built(Mlp)
    optimizer = sgd(model)
    schedule = lr_scheduler.StepLR(optimizer, 1)

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = train_step(model, optimizer, x, y)
        schedule.step()  # here
        return loss

    text = (
        "the step changes a hyper-parameter of the optimizer\n"
        "  at   LINE\n"
        "  try  call scheduler.step() after the compiled step: a new lr needs no recompile"
    )
    with error_at(CaptureError, text):
        ms.simulate(step, mesh=MESH)(model, optimizer, rows(), labels())


def test_writing_a_hyper_parameter_in_the_step_is_refused_at_its_line() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        optimizer.param_groups[0]["weight_decay"] = 0.5  # here
        return train_step(model, optimizer, x, y)

    text = (
        "the step changes 'weight_decay' of the optimizer\n"
        "  at   LINE\n"
        "  try  change it (or call scheduler.step()) after the compiled step: a new lr needs no recompile"
    )
    with error_at(CaptureError, text):
        run(step)


def test_a_step_without_module_and_tensor_is_refused() -> None:
    def step(count: int) -> int:  # here
        return count

    text = (
        "step gets no module and no tensor\n"
        "  at   LINE step, arguments count\n"
        "  try  pass the model, the optimizer and the batch to the step as arguments"
    )
    with error_at(InputError, text):
        ms.simulate(step, mesh=MESH)(3)


def test_lbfgs_is_refused() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:  # here
        return optimizer.step(lambda: F.cross_entropy(model(x), y))

    text = (
        "LBFGS computes the loss as often as its value demands\n"
        "  at   LINE step, argument optimizer\n"
        "  try  compile the computation of loss and gradients, and step LBFGS outside"
    )
    with error_at(CaptureError, text):
        run(step, lambda model: torch.optim.LBFGS(model.parameters()))


class Looking(torch.optim.Optimizer):
    """Takes the norm of a gradient into Python."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad / max(1.0, p.grad.norm().item()))


def test_an_optimizer_that_looks_at_values_is_refused() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    with pytest.raises(CaptureError, match=r"Looking\.step needs the value of a tensor in Python"):
        run(step, lambda model: Looking(model.parameters()))


class Counting(torch.optim.Optimizer):
    """Keeps a Python number that changes at every step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["count"] = self.state[p].get("count", 0) + 1
            p.add_(p.grad, alpha=-0.1 / self.state[p]["count"])


def test_an_optimizer_that_counts_in_python_is_refused_at_the_line_of_its_step() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()  # here
        optimizer.zero_grad()

    model = built(Mlp)
    optimizer = Counting(model.parameters())
    simulated = ms.simulate(step, mesh=MESH)
    simulated(model, optimizer, rows(), labels())
    text = (
        "the optimizer keeps 'count' as a Python value that changes in every step\n"
        "  at   LINE, Counting, fc1.weight.count\n"
        "  try  keep it as a 0-d tensor, as the optimizers of torch.optim do"
    )
    with error_at(CaptureError, text):
        simulated(model, optimizer, rows(), labels())


def test_random_numbers_that_cannot_be_drawn_again_are_refused() -> None:
    def seeded(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        torch.manual_seed(0)
        return F.dropout(model(x))

    def own(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return model(x) + torch.rand(4, generator=torch.Generator().manual_seed(0))

    def python(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return model(x) * random.random()

    def numpy(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        return model(x) * np.random.rand()

    found = []
    before = world()
    for step in (seeded, own, python, numpy):
        with pytest.raises(CaptureError) as caught:
            run(step)
        found.append(caught.value.what)
    torch.set_rng_state(torch.tensor(before[6], dtype=torch.uint8))  # `built` seeds
    assert world() == before
    assert found == [
        "random numbers are drawn after the generator was seeded in the step",
        "random numbers are drawn from a generator of the step's own",
        "the step draws a random number of Python or NumPy: it would be the same one in every call",
        "the step draws a random number of Python or NumPy: it would be the same one in every call",
    ]


# ---- steps that would go wrong silently


def refused(step: Callable[..., Any], model: nn.Module) -> str:
    before = everything(model)
    with pytest.raises(CaptureError) as caught:
        ms.simulate(step, mesh=MESH)(model, sgd(model), rows(), labels())
    assert everything(model) == before
    return caught.value.what


def test_tensors_left_in_a_container_are_refused() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = train_step(model, optimizer, x, y)
        model.losses.append(loss)
        return loss

    model = built(Mlp)
    model.losses = []
    assert refused(step, model) == "the step leaves tensors in the list Mlp.losses"


def test_state_that_shares_memory_is_refused_when_it_is_changed() -> None:
    model = built(Mlp)
    model.other = nn.Linear(8, 4).double()
    model.other.weight.data = model.fc2.weight.data
    what = refused(train_step, model)
    assert what == "parameter fc2.weight and parameter other.weight share memory, and the step changes it"


def test_a_buffer_that_becomes_an_alias_of_a_parameter_is_refused() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        model.copy = model.fc1.weight.detach()
        return train_step(model, optimizer, x, y)

    model = built(Mlp)
    model.register_buffer("copy", torch.zeros(8, 6).double())
    assert refused(step, model) == "buffer copy and parameter fc1.weight share memory after the step"


def test_a_buffer_of_another_type_is_refused() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        model.last = x[:, 0]
        return train_step(model, optimizer, x, y)

    model = built(Mlp)
    model.register_buffer("last", torch.zeros(8))
    assert refused(step, model) == "the step changes the type of buffer last from f32[8] to f64[8]"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda m: setattr(m.fc1, "weight", nn.Parameter(m.fc1.weight * 2)), "the step replaces parameter fc1.weight"),
        (lambda m: setattr(m.fc1, "bias", None), "the step removes parameter fc1.bias"),
        (lambda m: m.register_buffer("n", torch.ones(2)), "the step gives the module a new parameter or buffer 'n'"),
        (lambda m: setattr(m, "fc3", nn.Tanh()), "after the step, Mlp has other modules"),
        (lambda m: m.register_forward_hook(lambda *_: None), "after the step, Mlp has other forward hooks"),
        (lambda m: delattr(m, "flag"), "the step deletes the attribute Mlp.flag"),
    ],
)  # fmt: skip
def test_a_step_that_rebuilds_its_module_is_refused(change: Callable[[Any], Any], what: str) -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        change(model)
        return loss

    model = built(Mlp)
    model.flag = True
    assert refused(step, model) == what


def test_an_argument_that_gets_a_gradient_is_refused() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x.requires_grad_()), y).backward()

    assert refused(step, built(Mlp)) == "an argument gets a gradient that outlives the step"


def test_data_of_unknown_memory_is_refused() -> None:
    def step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = train_step(model, optimizer, x, y)
        model.fc1.weight.data = x.new_empty(0).set_(x.untyped_storage(), 0, (8, 6))
        return loss

    assert "storage" in refused(step, built(Mlp))


# ---- with all that is swapped besides: scalers, schedules, Adafactor, stand-ins, hooks of tensors


class StandIn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3), keepdim=True) * 2


@pytest.mark.parametrize("where", ["", "forward", "backward", "optimizer", "value", "transformation"])
def test_everything_that_is_swapped_is_put_back(where: str) -> None:
    from torch.optim import _adafactor  # what a capture replaces in torch itself

    def step(model: nn.Module, optimizer: Any, schedule: Any, scaler: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        if where == "forward":
            fail()
        scaler.scale(loss).backward()
        if where == "backward":
            fail()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        if where == "optimizer":
            fail()
        if where == "value":
            float(loss)
        return loss

    def edit(gm: Any) -> Any:
        if where == "transformation":
            fail()
        return gm

    model = built(ConvNet)
    for p in model.parameters():
        p.register_hook(lambda g: g * 2)
        p.register_post_accumulate_grad_hook(lambda p: None)
    optimizer = torch.optim.Adafactor(model.parameters())
    schedule = lr_scheduler.StepLR(optimizer, 2)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))  # makes its tensors
    args = (model, optimizer, schedule, scaler, rows(0, 2, 6, 6), labels())
    held = [vars(schedule), vars(scaler), vars(_adafactor), *(vars(p) for p in model.parameters())]
    hooks = [(dict(p._backward_hooks), dict(p._post_accumulate_grad_hooks)) for p in model.parameters()]  # type: ignore[attr-defined]
    before = everything(*args, *held)
    compiled = ms.simulate(
        step, mesh=MESH, module_override={nn.GroupNorm: lambda module: StandIn()}, gm_transformation=edit
    )
    if where == "":
        compiled.lower(*args)
    else:
        with pytest.raises((ValueError, CaptureError)):
            compiled(*args)
    assert everything(*args, *held) == before
    assert [(dict(p._backward_hooks), dict(p._post_accumulate_grad_hooks)) for p in model.parameters()] == hooks  # type: ignore[attr-defined]
    if where == "":
        compiled(*args)
        assert schedule.last_epoch == 1 and type(model.body[4]) is nn.GroupNorm


@pytest.mark.parametrize("where", ["", "forward"])
def test_spmd_leaves_gradients_and_hooks_as_they_were(where: str) -> None:
    class Fails(ConvNet):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if where:
                fail()
            return out

    model = built(Fails)
    for p in model.parameters():
        p.register_hook(lambda g: g)
        p.grad = torch.ones_like(p)
    model.eval()
    spmd, x = ms.SPMD(model, ms.Schema(ms.Mesh(dp=1), [Replicate()])), rows(0, 2, 6, 6)
    before = everything(model, x)
    if where:
        with pytest.raises(ValueError, match="mine"):
            spmd(x)
    else:
        spmd(x)
    assert everything(model, x) == before
