"""Bad inputs over the whole public face: a typed error in three parts, with its exact text, and nothing changed.

The table is `CASES`; the texts are in `golden/errors/bad_inputs.txt` (`UPDATE_GOLDEN=1` writes those that differ).
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Mlp, built, labels, rows, train_step
from support import GOLDEN
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Replicate, Shard

import meshstep as ms
from meshstep.cli import main

P = ms.plans
MESH, TWO = ms.Mesh(dp=2), ms.Mesh(dp=2, tp=2)
TEXTS = GOLDEN / "errors" / "bad_inputs.txt"
aten = torch.ops.aten


@dataclass
class World:
    """What a case is given: state that has been trained for a step, a batch, and a directory of its own."""

    directory: Path
    model: Any = field(default_factory=lambda: built(Mlp))
    x: Tensor = field(default_factory=rows)
    y: Tensor = field(default_factory=labels)

    def __post_init__(self) -> None:
        self.small = built(Mlp, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        train_step(self.model, self.optimizer, self.x, self.y)

    @property
    def args(self) -> tuple[Any, ...]:
        return self.model, self.optimizer, self.x, self.y

    def simulate(self, step: Callable[..., Any] = train_step, *, mesh: Any = MESH, **options: Any) -> Any:
        """A simulated call of a step."""
        return ms.simulate(step, mesh=mesh, **options)(*self.args)

    def verify(self, **options: Any) -> Any:
        return ms.verify(train_step, lambda i: (self.args, {}), **{"mesh": MESH, **options})

    def file(self, text: str, name: str = "plan.json") -> Path:
        (self.directory / name).write_text(text)
        return self.directory / name

    def saved(self, name: str = "a") -> Path:
        ms.checkpoint.save(self.directory / name, {"model": self.model, "optimizer": self.optimizer})
        return self.directory / name

    def load(self, path: Path, **more: Any) -> Any:
        return ms.checkpoint.load(path, {"model": self.model, "optimizer": self.optimizer, **more})

    def manifest(self, change: Callable[[Any], Any]) -> Path:
        """A checkpoint whose manifest is another one."""
        path = self.saved() / "meshstep.json"
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
        return path.parent

    def asked(self, *arguments: str) -> None:
        """A command line; what it prints is raised, so that one table has it all."""
        self.file(SCRIPT, "train.py")
        said = io.StringIO()
        with contextlib.redirect_stderr(said), torch.random.fork_rng([]):  # the script draws its model
            code = main([a.replace("DIR", str(self.directory)) for a in arguments])
        assert code == 2, f"exit code {code}"
        what, at, hint = re.fullmatch(r"(.*)\n  at   (.*)\n  try  (.*)\n", said.getvalue()).groups()  # type: ignore[union-attr]
        raise ms.MeshstepError(what, at=at, hint=hint)

    def asked_of_step(
        self, *more: str, step: str = "train_step", args: str = "example_args", mesh: str = "dp=2"
    ) -> None:
        """`meshstep plan` of the script, or what `more` begins with."""
        command, *rest = more if more[:1] == ("verify",) else ("plan", *more)
        self.asked(command, f"DIR/train.py:{step}", "--args", f"DIR/train.py:{args}", "--mesh", mesh, *rest)

    def everything(self) -> list[Any]:
        """All that must not change."""
        model, optimizer = self.model, self.optimizer
        return [
            *((name, id(t), t.detach().clone()) for name, t in model.state_dict(keep_vars=True).items()),
            *((name, None if p.grad is None else p.grad.clone()) for name, p in model.named_parameters()),
            *((type(m), m.training, sorted(vars(m)), len(m._forward_hooks)) for m in model.modules()),
            copy.deepcopy(optimizer.state_dict()), len(optimizer.state), list(vars(optimizer)),
            self.x.clone(), self.y.clone(), torch.get_rng_state(), torch.is_grad_enabled(),
        ]  # fmt: skip


SCRIPT = """
import torch
import torch.nn.functional as F

def train_step(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

def example_args():
    model = torch.nn.Linear(6, 4)
    return model, torch.optim.SGD(model.parameters()), torch.randn(8, 6), torch.randint(4, (8,))

def three():
    return 3

number = 3
"""


def asks_item(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    loss = train_step(model, optimizer, x, y)
    return loss.item()


def branches(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    if model(x).sum() > 0:
        return train_step(model, optimizer, x, y)
    return x


def wrong_shape(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Any:
    return train_step(model, optimizer, x[:, :3], y)


@dataclass(frozen=True)
class Nothing:
    def __call__(self, program: Any) -> Any:
        return None


class Same(ms.Override):
    def replacement(self, module: nn.Module) -> Any:
        return 3


@ms.contract()
def hooked(module: nn.Module) -> None:
    """Does nothing."""


@ms.contract()
def renaming(module: nn.Module) -> None:
    module.new = nn.Module()


@ms.contract(incompatible_with=["hooked"])
def shy(module: nn.Module) -> None:
    """Does nothing."""


def applied(function: Any, *before: Any) -> Any:
    module = nn.Module()
    for other in before:
        other(module)
    return function(module)


def ruled(rules: Any) -> Any:
    """A step with an op whose rules are these."""
    op = torch.library.custom_op("bad_inputs::twice", mutates_args=())(_twice)
    op.register_fake(lambda x: torch.empty_like(x))
    ms.rule(torch.ops.bad_inputs.twice.default)(rules)
    return ms.simulate(lambda x: torch.ops.bad_inputs.twice(x), mesh=MESH)(rows())


def _twice(x: Tensor) -> Tensor:
    return x + x.sum()


CASES: dict[str, Callable[[World], Any]] = {
    # ---- meshes, layouts, schemas
    "Mesh without axes": lambda w: ms.Mesh(),
    "Mesh of a number": lambda w: ms.Mesh(2),  # type: ignore[call-arg]
    "Mesh of size 0": lambda w: ms.Mesh(dp=0),
    "Mesh of size 2.0": lambda w: ms.Mesh(dp=2.0),  # type: ignore[arg-type]
    "Mesh of size True": lambda w: ms.Mesh(dp=True),
    "Mesh, axis that it lacks": lambda w: MESH["tp"],
    "Mesh, rank that it lacks": lambda w: MESH.coordinate(2),
    "Mesh, group along an axis that it lacks": lambda w: MESH.group(0, "tp"),
    "Mesh.from_device_mesh of a Mesh": lambda w: ms.Mesh.from_device_mesh(MESH),  # type: ignore[arg-type]
    "Layout of text": lambda w: ms.Layout((("dp", "S(0)"),)),  # type: ignore[arg-type]
    "Layout of a placement": lambda w: ms.Layout(Shard(0)),  # type: ignore[arg-type]
    "Layout with an axis twice": lambda w: ms.Layout((("dp", Shard(0)), ("dp", Shard(1)))),
    "Layout, dim that does not divide": lambda w: ms.Layout((("dp", Shard(0)),)).local_shape((5, 4), MESH),
    "Layout, dim that is not there": lambda w: ms.Layout((("dp", Shard(2)),)).local_shape((6, 4), MESH),
    "Layout, dim from the end": lambda w: ms.Layout((("dp", Shard(-1)),)).local_shape((6, 4), MESH),
    "Layout, axis that the mesh lacks": lambda w: ms.Layout((("tp", Shard(0)),)).local_shape((6, 4), MESH),
    "Schema of too few placements": lambda w: ms.Schema(TWO, [Shard(0)]),
    "Schema of text": lambda w: ms.Schema(MESH, ["S(0)"]),  # type: ignore[list-item]
    "Schema of no mesh": lambda w: ms.Schema({"dp": 2}, [Shard(0)]),
    # ---- options
    "compile of a number": lambda w: ms.compile(3),  # type: ignore[call-overload]
    "compile of a compiled step": lambda w: ms.compile(ms.compile(train_step)),
    "compile, unknown option": lambda w: ms.compile(meshes=MESH),  # type: ignore[call-overload]
    "compile, mesh of a dict": lambda w: ms.compile(mesh={"dp": 2})(train_step),  # type: ignore[call-overload]
    "compile, plan of text": lambda w: ms.compile(plan="fsdp")(train_step),  # type: ignore[call-overload]
    "compile, backend that is not there": lambda w: ms.compile(backend="fast")(train_step),
    "compile, backend of a number": lambda w: ms.compile(backend=3)(train_step),  # type: ignore[call-overload]
    "compile, outputs": lambda w: ms.compile(outputs="whole")(train_step),
    "compile, outputs of a list": lambda w: ms.compile(outputs=["full"])(train_step),  # type: ignore[call-overload]
    "compile, passes of a list": lambda w: ms.compile(passes=["dead_code"])(train_step),  # type: ignore[call-overload]
    "compile, unknown pass": lambda w: ms.compile(passes="dead_code | fuse")(train_step),
    "compile, unknown option of a pass": lambda w: ms.compile(passes="bucket(size=3)")(train_step),
    "compile, wrong value of an option of a pass": lambda w: w.simulate(passes="bucket(bucket_bytes='big')"),
    "compile, a pass without its option": lambda w: ms.compile(passes="recompute")(train_step),
    "compile, code for a pass": lambda w: ms.compile(passes="__import__('os').system('true')")(train_step),
    "compile, inputs of a list": lambda w: ms.compile(inputs=["x"])(train_step),  # type: ignore[call-overload]
    "compile, inputs of text": lambda w: ms.compile(inputs={"x": "S(0)"})(train_step),  # type: ignore[call-overload]
    "compile, mesh of more ranks": lambda w: ms.compile(mesh=MESH, backend="eager")(train_step)(*w.args),
    "compile, module_override of a class": lambda w: ms.compile(module_override={nn.Linear: Same})(train_step),  # type: ignore[call-overload]
    "compile, module_override for a number": lambda w: ms.compile(module_override={3: Same()})(train_step),  # type: ignore[call-overload]
    "compile, gm_transformation of text": lambda w: ms.compile(gm_transformation="x")(train_step),  # type: ignore[call-overload]
    "Pipeline of a number": lambda w: ms.Pipeline(3),  # type: ignore[arg-type]
    "Pipeline of texts": lambda w: ms.Pipeline(("dead_code",)),  # type: ignore[arg-type]
    "a pass that returns nothing": lambda w: w.simulate(passes=ms.Pipeline((Nothing(),))),  # type: ignore[arg-type]
    "a gm_transformation that returns nothing": lambda w: w.simulate(gm_transformation=lambda gm: None),
    "an override for modules that are not there": lambda w: w.simulate(module_override={nn.Conv2d: Same()}),
    "a pattern for modules that are not there": lambda w: w.simulate(module_override={"conv*": Same()}),
    "an override that gives a number": lambda w: w.simulate(module_override={nn.Linear: Same()}),
    "dynamic of no dim": lambda w: ms.dynamic(),
    "dynamic of a dim from the end": lambda w: ms.dynamic(-1),
    # ---- calls
    "simulate of nothing": lambda w: ms.simulate(None, mesh=MESH),  # type: ignore[arg-type]
    "simulate without a mesh": lambda w: w.simulate(mesh=None),
    "simulate, an argument too few": lambda w: ms.simulate(train_step, mesh=MESH)(*w.args[:3]),
    "simulate, an argument too many": lambda w: ms.simulate(train_step, mesh=MESH)(*w.args, 3),
    "simulate, an argument that it lacks": lambda w: ms.simulate(train_step, mesh=MESH)(*w.args[:3], labels=w.y),
    "simulate, inputs that is no argument": lambda w: w.simulate(inputs={"xs": Shard(0)}),
    "simulate, inputs with a dim that is not there": lambda w: w.simulate(inputs={"x": Shard(2)}),
    "simulate, inputs with an axis that is not there": lambda w: w.simulate(
        inputs={"x": ms.Layout((("tp", Shard(0)),))}
    ),
    "simulate, inputs that is partial": lambda w: w.simulate(inputs={"x": Partial()}),
    "simulate, dynamic dim that is not there": lambda w: w.simulate(inputs={"x": ms.dynamic(2)}),
    "simulate, a value that Python needs": lambda w: w.simulate(asks_item),
    "simulate, a branch on a value": lambda w: w.simulate(branches),
    "lower, stage": lambda w: ms.compile(mesh=MESH)(train_step).lower(*w.args).as_text("machine"),
    "state of a step that was not called": lambda w: ms.compile(train_step).objects(),
    # ---- verify
    "verify, no steps": lambda w: w.verify(steps=0),
    "verify, steps of text": lambda w: w.verify(steps="3"),
    "verify, backend": lambda w: w.verify(backend="inductor"),
    "verify, dtype of integers": lambda w: w.verify(dtype=torch.int64),
    "verify, dtype of text": lambda w: w.verify(dtype="float64"),
    "verify, arguments instead of a function": lambda w: ms.verify(train_step, w.args, mesh=MESH),  # type: ignore[arg-type]
    "verify, arguments without keywords": lambda w: ms.verify(train_step, lambda i: w.args, mesh=MESH),  # type: ignore[arg-type,return-value]
    "verify, arguments of another structure": lambda w: ms.verify(
        train_step, lambda i: (w.args[: 4 - i], {}), mesh=MESH
    ),
    "step.verify, no steps": lambda w: ms.simulate(train_step, mesh=MESH).verify(*w.args, steps=0),
    # ---- plans
    "zero, stage 4": lambda w: P.zero(4),
    "zero, stage of text": lambda w: P.zero("1"),  # type: ignore[arg-type]
    "zero, stage True": lambda w: P.zero(True),
    "zero, axis of a number": lambda w: P.zero(1, 0),  # type: ignore[arg-type]
    "zero, bytes below 0": lambda w: P.zero(1, min_bytes=-1),
    "zero, parameters of a list": lambda w: P.zero(1, parameters=["fc1"]),  # type: ignore[arg-type]
    "zero, parameters with text": lambda w: P.zero(1, parameters={"fc1": "whole"}),  # type: ignore[dict-item]
    "zero, parameters that are not there": lambda w: w.simulate(plan=P.zero(1, parameters={"fc3*": 0})),
    "zero, a dim that is not there": lambda w: w.simulate(plan=P.zero(3, parameters={"fc1.weight": Shard(2)})),
    "zero, a dim that does not divide": lambda w: w.simulate(
        mesh=ms.Mesh(dp=3), plan=P.fsdp(parameters={"fc1.*": Shard(0)})
    ),
    "tensor_parallel of a list": lambda w: P.tensor_parallel(["fc1"]),  # type: ignore[arg-type]
    "tensor_parallel, style": lambda w: P.tensor_parallel({"fc1": "columns"}),
    "tensor_parallel, style of a list": lambda w: P.tensor_parallel({"fc1": ["colwise"]}),  # type: ignore[dict-item]
    "tensor_parallel, modules that are not there": lambda w: w.simulate(
        plan=P.tensor_parallel({"fc3": "colwise"}, "dp")
    ),
    "tensor_parallel, a dim that is not there": lambda w: w.simulate(
        plan=P.tensor_parallel({"fc1.bias": Shard(1)}, "dp")
    ),
    "tensor_parallel, a dim that does not divide": lambda w: w.simulate(
        mesh=ms.Mesh(dp=3), plan=P.tensor_parallel({"fc1": "colwise"}, "dp")
    ),
    "tensor_parallel, partial parameters": lambda w: w.simulate(plan=P.tensor_parallel({"fc1.bias": Partial()}, "dp")),
    "tensor_parallel, sequence of text": lambda w: P.tensor_parallel({}, sequence_dim="1"),  # type: ignore[arg-type]
    "context_parallel, dim below 0": lambda w: P.context_parallel(sequence_dim=-1),
    "expert_parallel of a number": lambda w: P.expert_parallel(3),  # type: ignore[arg-type]
    "two plans for an axis": lambda w: P.zero(1) + P.fsdp(),
    "a plan and text": lambda w: P.zero(1) + "fsdp",  # type: ignore[operator]
    "a plan for an axis that the mesh lacks": lambda w: w.simulate(plan=P.fsdp("tp")),
    "an axis without a plan": lambda w: w.simulate(mesh=TWO),
    "an axis that a plan lacks": lambda w: P.fsdp()["tp"],
    "diff of a plan and text": lambda w: P.fsdp().diff("fsdp"),  # type: ignore[arg-type]
    "a plan saved to no directory": lambda w: P.fsdp().save(w.directory / "lost" / "plan.json"),
    "a plan saved over a directory": lambda w: P.fsdp().save(w.directory),
    "a plan that is not there": lambda w: P.load(w.directory / "plan.json"),
    "a plan that is a directory": lambda w: P.load(w.directory),
    "a plan of bytes": lambda w: P.load(w.file("\x00\x01")),
    "a plan without axes": lambda w: P.load(w.file('{"meshstep plan": 1}')),
    "a plan of number for axes": lambda w: P.load(w.file('{"meshstep plan": 1, "axes": 3}')),
    "a plan of deep lists": lambda w: P.load(w.file("[" * 100_000)),
    # ---- rules
    "rule of text": lambda w: ms.rule("aten.mm"),  # type: ignore[arg-type]
    "rule of a packet": lambda w: ms.rule(aten.mm),  # type: ignore[arg-type]
    "rule that is a number": lambda w: ms.rule(aten.cosh.default)(3),  # type: ignore[type-var]
    "rule that returns nothing": lambda w: ruled(lambda call: None),
    "rule that returns text": lambda w: ruled(lambda call: ["S(0)"]),
    "rule that raises": lambda w: ruled(lambda call: call["lost"]),
    "rule of too many inputs": lambda w: ruled(lambda call: [ms.rules.Rule((Shard(0), Shard(0)), (Shard(0),))]),
    "rule of a dim that is not there": lambda w: ruled(lambda call: [ms.rules.Rule((Shard(4),), (Shard(4),))]),
    "rule that is wrong": lambda w: ruled(lambda call: [ms.rules.Rule((Shard(0),), (Shard(0),))]),
    "factor without outputs": lambda w: ms.rules.factor("mk,kn"),
    "factor of a number": lambda w: ms.rules.factor(3),  # type: ignore[arg-type]
    # ---- the original's surface
    "SPMD of a function": lambda w: ms.SPMD(train_step, ms.Schema(ms.Mesh(dp=1), [Replicate()])),  # type: ignore[arg-type]
    "SPMD without schema": lambda w: ms.SPMD(w.model, {}),
    "SPMD, schema of a placement": lambda w: ms.SPMD(w.model, Replicate()),  # type: ignore[arg-type]
    "SPMD, schemas of two meshes": lambda w: ms.SPMD(
        w.model, ms.Schema(ms.Mesh(dp=1), [Replicate()]), [ms.Schema(ms.Mesh(tp=1), [Replicate()])]
    ),
    "SPMD, parameters that are not there": lambda w: ms.SPMD(
        w.model, {"fc3*": ms.Schema(ms.Mesh(dp=1), [Replicate()])}
    ),
    "SPMD, mesh of more ranks": lambda w: ms.SPMD(w.model, ms.Schema(MESH, [Replicate()])),
    "SPMD, an argument too many": lambda w: ms.SPMD(w.model, ms.Schema(ms.Mesh(dp=1), [Replicate()]))(w.x, w.x),
    "DistributedGraph of nothing": lambda w: ms.DistributedGraph(None),  # type: ignore[arg-type]
    "distribute of a module": lambda w: ms.distribute(w.model, ms.Schema(ms.Mesh(dp=1), [Replicate()]), [], w.x),  # type: ignore[arg-type]
    "aot_function of a number": lambda w: ms.aot_function(3, lambda gm, _: gm),  # type: ignore[arg-type]
    "aot_function, other arguments": lambda w: ms.aot_function(
        torch.sin, lambda gm, _: gm, pre_compile_fn=lambda leaves: []
    )(w.x),
    "contract without parentheses": lambda w: ms.contract(_twice),  # type: ignore[arg-type]
    "contract of a number": lambda w: hooked(3),
    "contract of no module": lambda w: hooked([]),
    "contract applied twice": lambda w: applied(hooked, hooked),
    "contract with one that forbids it": lambda w: applied(shy, hooked),
    "contract that is broken": lambda w: applied(renaming),
    "state of a contract on a number": lambda w: hooked.state(3),  # type: ignore[arg-type]
    "registry of a number": lambda w: ms.get_registry(3),  # type: ignore[arg-type]
    "Opaque of a number": lambda w: ms.Opaque(3),  # type: ignore[arg-type]
    "materialize of a number": lambda w: ms.materialize(3),  # type: ignore[arg-type]
    "materialize of parameters without first values": lambda w: ms.materialize(
        nn.ParameterList([torch.empty(2, device="meta")])
    ),
    # ---- checkpoints
    "save of a number": lambda w: ms.checkpoint.save(w.directory / "a", 3),
    "save by numbers": lambda w: ms.checkpoint.save(w.directory / "a", {3: w.model}),
    "save of what cannot be read again": lambda w: ms.checkpoint.save(w.directory / "a", {"f": lambda: None}),
    "save below a file": lambda w: ms.checkpoint.save(w.file("", "a") / "b", {"model": w.model}),
    "save, keep nothing": lambda w: ms.checkpoint.save(w.directory / "a", {"model": w.model}, keep=0),
    "save of two as safetensors": lambda w: ms.checkpoint.save(w.directory / "a.safetensors", {"model": w.model}),
    "load of a number": lambda w: ms.checkpoint.load(w.saved(), 3),
    "load of what is not there": lambda w: w.load(w.saved().parent / "b"),
    "load of a directory of something else": lambda w: w.load(w.directory),
    "load of a file": lambda w: w.load(w.file("", "a")),
    "load, manifest of something else": lambda w: w.load(w.manifest(lambda found: [found])),
    "load, manifest without files": lambda w: w.load(w.manifest(lambda found: {"version": 1})),
    "load, manifest of a later version": lambda w: w.load(w.manifest(lambda found: found | {"version": 9})),
    "load, manifest that leads outside": lambda w: w.load(
        w.manifest(lambda found: found | {"files": found["files"] | {"../../etc/passwd": "0"}})
    ),
    "load, a file that is cut": lambda w: (os.truncate(w.saved() / "__0_0.distcp", 100), w.load(w.directory / "a")),
    "load, a file that is gone": lambda w: (os.unlink(w.saved() / "python.pt"), w.load(w.directory / "a")),
    "load into another model": lambda w: ms.checkpoint.load(
        w.saved(), {"model": nn.Sequential(w.model), "optimizer": w.optimizer}
    ),
    "load into other sizes": lambda w: ms.checkpoint.load(w.saved(), {"model": w.small, "optimizer": w.optimizer}),
    "load without the optimizer": lambda w: ms.checkpoint.load(w.saved(), {"model": w.model}),
    "load of more than is there": lambda w: w.load(w.saved(), ema=w.model),
    "load of a safetensors that is not there": lambda w: ms.checkpoint.load(w.directory / "a.safetensors", w.model),
    "load of a damaged safetensors": lambda w: ms.checkpoint.load(w.file("{}", "a.safetensors"), w.model),
    # ---- the command line
    "plan of no file": lambda w: w.asked("plan", "DIR/lost.py:f", "--args", "DIR/train.py:three", "--mesh", "dp=2"),
    "plan of no function": lambda w: w.asked("plan", "DIR/train.py", "--args", "DIR/train.py:three", "--mesh", "dp=2"),
    "plan of a number": lambda w: w.asked_of_step(step="number"),
    "plan, arguments of a number": lambda w: w.asked_of_step(args="three"),
    "plan, mesh": lambda w: w.asked_of_step(mesh="2x4"),
    "plan, axis twice": lambda w: w.asked_of_step(mesh="dp=2,dp=4"),
    "plan, plan": lambda w: w.asked_of_step("--plan", "best"),
    "plan saved to no directory": lambda w: w.asked_of_step("--save", "DIR/lost/plan.json"),
    "verify by the command line, no steps": lambda w: w.asked_of_step("verify", "--steps", "0"),
    "diff of no files": lambda w: w.asked("diff", "DIR/a.json", "DIR/b.json"),
    "run of no file": lambda w: w.asked("run", "-n", "2", "DIR/lost.py"),
    "run on no ranks": lambda w: w.asked("run", "-n", "0", "DIR/train.py"),
}


def _same(a: Any, b: Any) -> bool:
    """Whether nests of values are equal to the bit."""
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def _text(error: BaseException, world: World) -> str:
    """What a golden file has: without what differs from run to run."""
    text = f"{type(error).__name__}: {error}".replace(str(world.directory), "DIR")
    return re.sub(r"(test_bad_inputs\.py):\d+", r"\1:LINE", text)


def _golden() -> dict[str, str]:
    blocks = TEXTS.read_text().split("## ")[1:] if TEXTS.exists() else []
    return {block.partition("\n")[0]: block.partition("\n")[2].rstrip("\n") for block in blocks}


def _check_text(name: str, text: str) -> None:
    known = _golden()
    if os.environ.get("UPDATE_GOLDEN") and known.get(name) != text:
        known[name] = text
        TEXTS.write_text("".join(f"## {case}\n{known[case]}\n\n" for case in CASES if case in known))
    assert known.get(name) == text, f"{TEXTS} has another text; see it, then UPDATE_GOLDEN=1"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_a_bad_input_is_refused_in_three_parts_and_changes_nothing(name: str, world: World) -> None:
    before = world.everything()
    with pytest.raises(ms.MeshstepError) as caught:
        CASES[name](world)
    assert _same(world.everything(), before)
    assert caught.value.what and caught.value.at and caught.value.hint, caught.value
    _check_text(name, _text(caught.value, world))


def test_the_table_is_large_and_the_texts_are_of_it() -> None:
    assert len(CASES) >= 60
    assert list(_golden()) == list(CASES)


def test_what_the_users_own_python_raises_comes_through_as_it_is_and_changes_nothing(world: World) -> None:
    before = world.everything()
    with pytest.raises(RuntimeError, match="reduction dim"):
        world.simulate(wrong_shape)
    assert _same(world.everything(), before)
