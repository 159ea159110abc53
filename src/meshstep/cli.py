"""The command `meshstep`: look at a step, prove it, compare plans, start ranks."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .api import simulate, verify
from .errors import InputError, MeshstepError
from .launch import run
from .lowered import Lowered
from .mesh import Mesh
from .passes import DEFAULT
from .plan import named
from .plan.hardware import get as device
from .plan.hardware import table as devices
from .plan.plan import Plan, load
from .progress import Progress
from .report.page import page
from .report.summary import summary
from .report.text import report_text
from .report.trace import trace
from .runtime.world import has_backends

FAILED, MISUSED = 1, 2  # exit codes: what was asked is not so; it could not be asked
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([KMGTkmgt])(i?))?[bB]?")
PLANS: dict[str, Callable[[str], Plan]] = {
    "data_parallel": named.data_parallel,
    "zero1": lambda axis: named.zero(1, axis),
    "zero2": lambda axis: named.zero(2, axis),
    "zero3": lambda axis: named.zero(3, axis),
    "fsdp": named.fsdp,
    "context_parallel": named.context_parallel,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code: 0 if all is well, 1 if what was asked is not so, 2 if it could not be asked."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        return int(given.run(given))
    except MeshstepError as error:
        print(f"meshstep {given.command}: {error}", file=sys.stderr)
        return MISUSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="meshstep", description="One train step, any mesh of devices.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        return made

    started = command("run", _run, "run a script on several ranks of this machine, by torchrun")
    started.add_argument(
        "-n", "--ranks", required=True, help="number of processes; 2:4 starts 4, and one less after a failure"
    )
    started.add_argument("--restarts", type=int, default=0, help="how often to start again after a failure (0)")
    started.add_argument("script", help="a Python file")
    started.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script gets")

    plan = command("plan", _plan, "which parallelism, what it costs, and whether it fits; nothing is run")
    _add_step(plan)
    plan.add_argument("--device", metavar="NAME", help=f"what the times are for: {', '.join(devices)} (cpu)")
    plan.add_argument(
        "--memory", metavar="SIZE", help="what a rank may hold: 80GiB, 24GB; that of the device if left out"
    )
    plan.add_argument("--html", metavar="FILE", help="write a page to look at")
    plan.add_argument("--trace", metavar="FILE", help="write the predicted step for Perfetto or chrome://tracing")
    plan.add_argument("--save", metavar="FILE", help="write the plan with the placement of all state")

    check = command("verify", _verify, "prove in float64 that a mesh computes what one device computes")
    _add_step(check)
    check.add_argument("--steps", type=int, default=5, help="number of steps (5)")

    diff = command("diff", _diff, "what two plan files decide otherwise")
    diff.add_argument("ours", metavar="A.json")
    diff.add_argument("theirs", metavar="B.json")
    doctor = command("doctor", _doctor, "what this machine has, and what is missing")
    for made in (plan, check, diff, doctor):
        made.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("step", help="the plain step: train.py:train_step")
    parser.add_argument(
        "--args",
        required=True,
        metavar="FILE:FUNCTION",
        help="gives (args, kwargs), or args, of a call with the global batch; of step i if it takes i",
    )
    parser.add_argument("--mesh", required=True, help="axes and numbers of ranks: dp=8,tp=4")
    parser.add_argument(
        "--plan",
        default="data_parallel",
        help=f"a file, FILE.py:FUNCTION, or NAME:AXIS joined by +, of {', '.join(PLANS)}; AXIS is the first one of the "
        "mesh if left out; auto finds the plans of all axes without one",
    )


# ---- commands


def _run(given: argparse.Namespace) -> int:
    if not Path(given.script).is_file():
        raise InputError(f"no file {given.script}", at="meshstep run", hint="meshstep run -n 2 train.py")
    least, _, most = str(given.ranks).rpartition(":")
    try:
        ranks, fewest = int(most), int(least or most)
    except ValueError:
        ranks = fewest = 0
    if not 1 <= fewest <= ranks or given.restarts < 0:
        raise InputError(
            f"{given.ranks} ranks, {given.restarts} restarts",
            at="meshstep run -n ... --restarts ...",
            hint="at least 1: meshstep run -n 2 train.py, or 2:4 for at least 2 after restarts",
        )
    return FAILED if run(given.script, given.arguments, ranks, least=fewest, restarts=given.restarts) else 0


def _plan(given: argparse.Namespace) -> int:
    limit = None if given.memory is None else _bytes(given.memory)
    with Progress(sys.stderr) as progress:
        progress("capturing and planning")
        lowered = _lowered(given)
        progress("reporting")
        facts = lowered.facts(device=given.device, memory=limit)
        if given.html:
            Path(given.html).write_text(page(facts), encoding="utf-8")
        if given.trace:
            Path(given.trace).write_text(json.dumps(trace(facts)), encoding="utf-8")
        if given.save:
            lowered.plan.save(given.save)
    print(json.dumps(summary(facts), indent=1) if given.json else report_text(facts).rstrip())
    return 0 if facts.memory.fits is not False else FAILED


def _verify(given: argparse.Namespace) -> int:
    step, make, mesh = _object(given.step), _arguments(given.args), _mesh(given.mesh)
    found = verify(
        step,
        make,
        mesh=mesh,
        plan=_named(given.plan, mesh),
        steps=given.steps,
    )
    if given.json:
        facts: dict[str, Any] = {
            "ok": found.ok,
            "max_error": found.max_error,
            "first_divergence": found.first_divergence,
        }
        if found.culprit is not None:
            facts |= {"culprit": asdict(found.culprit)}
        print(json.dumps(facts | {"steps": found.steps, "values": dict(found.values)}, indent=1))
    else:
        print(found)
    return 0 if found.ok else FAILED


def _diff(given: argparse.Namespace) -> int:
    lines = load(given.ours).diff(load(given.theirs))
    print(json.dumps(lines, indent=1) if given.json else "\n".join(lines) or "the same")
    return FAILED if lines else 0


def _doctor(given: argparse.Namespace) -> int:
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "c++", "clang++")), None)
    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "gpus": torch.cuda.device_count(),
        **has_backends(),
        "compiler for inductor": compiler or "none: use backend='eager' on CPU",
    }
    good = bool(facts["gloo"] or facts["nccl"])
    print(
        json.dumps(facts, indent=1) if given.json else "\n".join(f"{key:<22} {value}" for key, value in facts.items())
    )
    return 0 if good else FAILED


# ---- what is looked at


def _lowered(given: argparse.Namespace) -> Lowered:
    function, make, mesh = _object(given.step), _arguments(given.args), _mesh(given.mesh)
    memory = _bytes(given.memory) if given.memory else device(given.device).capacity if given.device else None
    plan = _named(given.plan, mesh, memory, given.device)
    step = simulate(function, mesh=mesh, plan=plan, passes=DEFAULT)  # those of `compile` as it is
    args, kwargs = make(0)
    return step.lower(*args, **kwargs)


# ---- what the words of the command line mean


def _object(text: str) -> Any:
    """`train.py:train_step`."""
    path, _, name = text.partition(":")
    file = Path(path)
    if not name or not file.is_file():
        raise InputError(
            f"no file {path!r}" if name else f"no function named in {text!r}", at=text, hint="FILE.py:FUNCTION"
        )
    known = f"meshstep_cli_{file.resolve().stem}_{abs(hash(file.resolve()))}"
    module = sys.modules.get(known)
    if module is None:
        spec = importlib.util.spec_from_file_location(known, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[known] = module
        sys.path.insert(0, str(file.resolve().parent))  # as Python does for a script
        spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        raise InputError(f"{path} has no function {name!r}", at=text, hint="a function at the top of the file")
    return getattr(found, "__wrapped__", found)  # of a compiled step, the plain one


def _arguments(text: str) -> Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]:
    """Gives the arguments of step i."""
    make = _object(text)
    takes_step = bool(inspect.signature(make).parameters)
    return lambda i: _call(make(i) if takes_step else make())


def _call(found: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], tuple) and isinstance(found[1], dict):
        return found
    if isinstance(found, (tuple, list)):
        return tuple(found), {}
    raise InputError(
        f"--args gave a {type(found).__name__}", at="--args", hint="return (model, optimizer, x, y), or (args, kwargs)"
    )


def _mesh(text: str) -> Mesh:
    sizes = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if not axis.strip().isidentifier() or not size.strip().isdigit():
            raise InputError(f"{part!r} is no axis", at=f"--mesh {text}", hint="--mesh dp=8,tp=4")
        if axis.strip() in sizes:
            raise InputError(f"axis {axis.strip()!r} is there twice", at=f"--mesh {text}", hint="--mesh dp=8,tp=4")
        sizes[axis.strip()] = int(size)
    return Mesh(**sizes)


def _bytes(text: str) -> int:
    """`80GiB`, `24GB` or `1024`."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise InputError(f"{text!r} is no size", at="--memory", hint="--memory 80GiB, 24GB, or a number of bytes")
    number, prefix, binary = found.groups()
    power = "KMGT".index(prefix.upper()) + 1 if prefix else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


def _named(text: str, mesh: Mesh, memory: int | None = None, on: str | None = None) -> Plan:
    if text.partition(":")[0].endswith(".py"):
        made = _object(text)()
        if not isinstance(made, Plan):
            raise InputError(f"{text} gave a {type(made).__name__}", at="--plan", hint="a function that returns a plan")
        return made
    if text.endswith(".json") or Path(text).is_file():
        return load(text)
    found: Plan | None = None
    for part in text.split("+"):
        name, _, axis = part.strip().partition(":")
        if name == "auto":
            found = named.auto(memory, on) if found is None else found + named.auto(memory, on)
            continue
        if name not in PLANS:
            raise InputError(f"no plan {name!r}", at=f"--plan {text}", hint=f"a file, auto, or {', '.join(PLANS)}")
        made = PLANS[name](axis or mesh.axes[0])
        found = made if found is None else found + made
    assert found is not None
    return found
