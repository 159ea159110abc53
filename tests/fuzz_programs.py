"""Programs, plans, meshes and passes drawn by chance; `python tests/fuzz_programs.py` draws many (`make fuzz`).

    python tests/fuzz_programs.py --programs 2000 --triples 500 --seed 3

Each failure is printed as the value that makes it again, and made smaller where leaving parts out still fails; give it
to `check` or `check_triple`.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import random
import secrets
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import models
import torch
from fuzz_noise import moved_by_rounding
from fuzz_ops import MOST, OPS, Draw, loss
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import meshstep as ms
from meshstep.capture.widened import widened
from meshstep.passes import KNOWN
from meshstep.verification import MakeArgs, compare

P = ms.plans
WITHIN = 1e-9  # relative to the largest value of a kind
OF_ROUNDING = 10  # a difference of so many times what rounding alone makes is not a plan's fault
ILL_CONDITIONED = 0.01  # at most this share of the programs may be such that nothing can be told
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "dampening": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.3, maximize=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, eps=1e-3, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, eps=1e-3, weight_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01, eps=1e-3),
    "radam": lambda p: torch.optim.RAdam(p, 0.01, eps=1e-3),
    "adamax": lambda p: torch.optim.Adamax(p, 0.01, eps=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01, eps=1e-3),
    "adadelta": lambda p: torch.optim.Adadelta(p, 0.1, eps=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, eps=1e-3, momentum=0.5, centered=True),
    "asgd": lambda p: torch.optim.ASGD(p, 0.1),
}


@dataclass(frozen=True)
class Program:
    """A step: ops by name, each with the seed of what it chooses.

    Args:
        shape: Of the batch, rows first.
        ops: Name and seed of each op.
        optimizer: One of `OPTIMIZERS`.
        loss: Seed of the loss.
        clip: Greatest norm of the gradients; None does not clip.
        keeps_gradients: Whether gradients outlive the step, and add up.
        returns: Whether the last value is returned too.
    """

    shape: tuple[int, ...]
    ops: tuple[tuple[str, int], ...]
    optimizer: str = "sgd"
    loss: int = 0
    clip: float | None = None
    keeps_gradients: bool = False
    returns: bool = False


@dataclass(frozen=True)
class Where:
    """Where a program runs.

    Args:
        mesh: Sizes of the axes, by name, outermost first.
        plans: Of each axis: a name and a seed of its choices.
        passes: The pipeline's text; None is the default one.
        batch: How the batch lies along each axis; None leaves that to the plans.
    """

    mesh: tuple[tuple[str, int], ...]
    plans: tuple[tuple[str, int], ...]
    passes: str | None = None
    batch: tuple[str, ...] | None = None


class Net(nn.Module):
    """The module of a program; its parameters are made when it is."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program, self.made = program, nn.ParameterDict()
        with torch.no_grad():
            self.run(*batch(program, 0), make=True)

    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.run(x, ids, y, make=False)

    def run(self, x: Tensor, ids: Tensor, y: Tensor, *, make: bool) -> tuple[Tensor, Tensor]:
        values, draws = [x], 0

        def parameter(shape: Sequence[int]) -> Tensor:
            nonlocal draws
            draws += 1
            if make:
                self.made[f"p{draws}"] = nn.Parameter(
                    _numbers(draws, list(shape)) / max(math.prod(shape[1:]), 1) ** 0.5
                )
            return self.made[f"p{draws}"]

        def buffer(shape: Sequence[int]) -> Tensor:
            nonlocal draws
            draws += 1
            if make:
                self.register_buffer(f"b{draws}", _numbers(draws, list(shape)).abs() + 0.5)
            return self.get_buffer(f"b{draws}")

        values.append(x * parameter(x.shape[-1:]) + parameter(x.shape[1:]))
        for name, chosen in self.program.ops:
            found = OPS[name](Draw(random.Random(chosen), values, ids, parameter, buffer))
            if found is not None and found.numel() <= MOST and found.ndim <= 5:
                values.append(found)
        return loss(Draw(random.Random(self.program.loss), values, ids, parameter, buffer), y), values[-1]


def _numbers(chosen: int, shape: Sequence[int]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(chosen), dtype=torch.float64)


def batch(program: Program, i: int) -> tuple[Tensor, Tensor, Tensor]:
    """x f64[shape], ids i64[B, 4] from 0 to 5, y i64[B] from 0 to 3, of step i."""
    generator, rows = torch.Generator().manual_seed(1000 + i), program.shape[0]
    x = torch.randn(program.shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(6, (rows, 4), generator=generator), torch.randint(4, (rows,), generator=generator)


def step_of(program: Program) -> Callable[..., Any]:
    """The train step."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, ids: Tensor, y: Tensor) -> Any:
        if program.keeps_gradients is False:
            optimizer.zero_grad()
        found, value = model(x, ids, y)
        found.backward()
        if program.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), program.clip)
        optimizer.step()
        return (found, {"last": value.detach()}) if program.returns else found

    return step


def parts(program: Program) -> tuple[Callable[..., Any], MakeArgs]:
    """The step in float64, and its arguments."""
    model = Net(program)
    optimizer = OPTIMIZERS[program.optimizer](model.parameters())
    return widened(step_of(program), torch.float64), lambda i: ((model, optimizer, *batch(program, i)), {})


def check(program: Program, where: Where, steps: int = 2) -> ms.Verification:
    """A program against plain torch."""
    step, make_args = parts(program)
    mesh = ms.Mesh(**dict(where.mesh))
    shapes = {name: p.shape for name, p in make_args(0)[0][0].named_parameters()}
    plan, inputs = plan_of(where, shapes), _inputs(where, program.shape, mesh)
    compiled = ms.simulate(step, mesh=mesh, plan=plan, passes=where.passes, inputs=inputs)
    return compare(step, compiled, make_args, steps, torch.float64)


def moved(program: Program, steps: int = 2) -> float:
    """How far rounding alone moves a program."""
    return moved_by_rounding(*parts(program), steps)


# ---- plans


PLANS = ("data_parallel", "zero1", "zero2", "zero3", "fsdp", "placements", "sequence", "whole")


def plan_of(where: Where, shapes: dict[str, torch.Size]) -> ms.Plan:
    """The plan: what is drawn for each axis, from what fits the parameters."""
    taken: dict[tuple[str, int], int] = {}
    made = None
    for (axis, size), (name, chosen) in zip(where.mesh, where.plans, strict=True):
        plan = _axis_plan(name, axis, size, random.Random(chosen), shapes, taken)
        made = plan if made is None else made + plan
    assert made is not None
    return made


def _axis_plan(
    name: str,
    axis: str,
    size: int,
    chance: random.Random,
    shapes: dict[str, torch.Size],
    taken: dict[tuple[str, int], int],
) -> ms.Plan:
    placements = {}
    for parameter, shape in shapes.items():
        dims = [d for d, n in enumerate(shape) if n % (size * taken.get((parameter, d), 1)) == 0]
        if dims and chance.randrange(2):
            dim = chance.choice(dims)
            taken[parameter, dim] = size * taken.get((parameter, dim), 1)
            placements[parameter] = Shard(dim)
    match name:
        case "data_parallel":
            return P.data_parallel(axis)
        case "zero1" | "zero2" | "zero3":
            some = {parameter: chance.randrange(4) for parameter in placements if chance.randrange(2)}
            return P.zero(int(name[-1]), axis, parameters=some, min_bytes=chance.choice((0, 0, 100)))
        case "fsdp":
            return P.fsdp(axis, bool(chance.randrange(2)), parameters=placements if chance.randrange(2) else None)
        case "placements":
            return P.tensor_parallel(placements, axis)
        case "sequence":
            return P.context_parallel(axis, sequence_dim=1)
    return P.tensor_parallel({parameter: Replicate() for parameter in placements}, axis)


def _inputs(where: Where, shape: Sequence[int], mesh: ms.Mesh) -> dict[str, ms.Layout] | None:
    if where.batch is None:
        return None
    left, found = list(shape), ms.Layout()
    for axis, wish in zip(mesh, where.batch, strict=True):
        dim = int(wish) if wish.isdigit() else len(shape)
        if dim < len(left) and left[dim] % mesh[axis] == 0:
            left[dim] //= mesh[axis]
            found = found.extended(axis, Shard(dim))
        else:
            found = found.extended(axis, Replicate())
    return {"x": found}


# ---- what is drawn


def drawn_program(chance: random.Random, most: int = 8) -> Program:
    """Any program, of at most so many ops."""
    dims = [chance.choice((1, 2, 3, 4, 5, 6, 8)) for _ in range(chance.randint(1, 3))]
    ops = [(chance.choice(list(OPS)), chance.randrange(2**16)) for _ in range(chance.randint(2, most))]
    return Program(
        (chance.choice((4, 5, 6, 7, 8, 12)), *dims), tuple(ops), chance.choice(list(OPTIMIZERS)),
        chance.randrange(2**16), chance.choice((None, None, 1.0)), chance.random() < 0.5, chance.random() < 0.5,
    )  # fmt: skip


def drawn_pipeline(chance: random.Random) -> str | None:
    """The text of some passes in some order; None half of the time, for the default ones."""
    if chance.random() < 0.5:
        return None
    options = {"bucket": ("", "(bucket_bytes=64)", "(shard_bytes=0)"), "launch_early": ("", "(prefetch=False)")}
    options["recompute"] = ("(memory=16000)", "(memory=100000)")
    names = chance.choices(sorted(KNOWN), k=chance.randint(0, 6))
    return " | ".join(name + chance.choice(options.get(name, ("",))) for name in names)


def drawn_sizes(chance: random.Random, most: int) -> list[int]:
    """Of 1 to 3 axes, of at most so many ranks together."""
    sizes = [chance.choice((2, 2, 3, 4)) for _ in range(chance.randint(1, 3))]
    return sizes if math.prod(sizes) <= most else drawn_sizes(chance, most)


def drawn_where(chance: random.Random, most: int = 12) -> Where:
    """Any mesh, with plans and passes; few have more than so many ranks."""
    sizes = drawn_sizes(chance, 64 if most > 4 and chance.random() < 0.02 else most)
    plans = tuple((chance.choice(PLANS), chance.randrange(2**16)) for _ in sizes)
    lies = tuple(chance.choice("01R") for _ in sizes) if chance.random() < 0.3 else None
    return Where(tuple(zip("abc", sizes, strict=False)), plans, drawn_pipeline(chance), lies)


@dataclass(frozen=True)
class Triple:
    """A model of `tests/parallel.py` with the plan and mesh."""

    model: str
    where: Where
    styled: int
    steps: int = 2


MODELS = ("mlp", "gpt_small", "convnet", "gan", "vae", "dlrm")
SMALL = ("mlp", "gpt_small", "convnet", "vae")  # those that take well under a second


def drawn_triple(chance: random.Random, models: Sequence[str] = MODELS) -> Triple:
    """A model under any plan on any mesh; its own tensor-parallel styles may be along one axis."""
    sizes = drawn_sizes(chance, 8)
    plans = tuple((chance.choice(PLANS), chance.randrange(2**16)) for _ in sizes)
    where = Where(tuple(zip("abc", sizes, strict=False)), plans, drawn_pipeline(chance))
    return Triple(chance.choice(models), where, chance.randint(-1, len(sizes) - 1))


def check_triple(triple: Triple) -> ms.Verification:
    """A model against plain torch."""
    step, make_args, styles = _model(triple.model)
    (model, *_), _ = make_args(0)
    mesh = ms.Mesh(**dict(triple.where.mesh))
    shapes = {name: p.shape for name, p in model.named_parameters()}
    plan = plan_of(triple.where, shapes)
    if triple.styled >= 0 and styles is not None:
        axis, size = triple.where.mesh[triple.styled]
        styled = P.tensor_parallel(styles.over(size), axis)
        plans = [styled if p.axis == axis else ms.Plan((p,)) for p in plan]
        plan = reduce(ms.Plan.__add__, plans)
    wide = widened(step, torch.float64)
    compiled = ms.simulate(wide, mesh=mesh, plan=plan, passes=triple.where.passes)
    return compare(wide, compiled, make_args, triple.steps, torch.float64)


def moved_triple(triple: Triple) -> float:
    """How far rounding alone moves the model."""
    step, make_args, _ = _model(triple.model)
    return moved_by_rounding(widened(step, torch.float64), make_args, triple.steps)


def _model(name: str) -> tuple[Callable[..., Any], Callable[[int], Any], Any]:
    """Step, arguments and styles of a model."""
    if name not in OWN:
        import parallel

        return parallel.MODELS[name].step, parallel.arguments(name), parallel.SPLITS.get(name)
    build, shape, y = OWN[name]
    model = models.built(build)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    step = models.train_step if name != "gpt_small" else _tokens_step
    return step, lambda i: ((model, optimizer, shape(i), y(i)), {}), None


def _tokens_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    return models.train_step(lambda t: model(t).flatten(0, 1), optimizer, x, y.flatten())  # type: ignore[arg-type]


OWN: dict[str, Any] = {
    "mlp": (models.Mlp, models.rows, models.labels),
    "convnet": (models.ConvNet, lambda i: models.rows(i, 2, 6, 6), models.labels),
    "gpt_small": (
        models.Gpt, lambda i: models.labels(i, 5, classes=16), lambda i: models.labels(i + 50, 5, classes=16),
    ),
}  # fmt: skip

# One number decides all: what hypothesis would change of an example, to come near it, would only repeat it.
cases = st.randoms(use_true_random=True).map(lambda chance: (drawn_program(chance), drawn_where(chance)))
small_cases = st.randoms(use_true_random=True).map(lambda chance: (drawn_program(chance, 3), drawn_where(chance, 4)))
triples = st.randoms(use_true_random=True).map(drawn_triple)
small_triples = st.randoms(use_true_random=True).map(lambda chance: drawn_triple(chance, SMALL))


# ---- many of them


@dataclass(frozen=True)
class Fault:
    """What is wrong with a case.

    Args:
        text: What was found.
        of_rounding: Whether plain torch differs from itself as much, if its results are rounded otherwise.
    """

    text: str
    of_rounding: bool = False


def fault(run: Callable[[], ms.Verification], moved: Callable[[], float] | None = None) -> Fault | None:
    """What is wrong; None if nothing is. Shards that cannot be, or a memory that is too small, are rightly refused.

    Args:
        run: Does the case.
        moved: Tells how far rounding alone moves the same; None holds every difference against the plan.
    """
    try:
        found = run()
    except ms.PlanError as error:
        refused = "divide" in str(error) or "if activations are computed again" in str(error)
        return None if refused else Fault(f"PlanError: {error}")
    except Exception as error:  # whatever it is, it is a finding
        return Fault(f"{type(error).__name__}: {error}")
    if found.ok and found.max_error <= WITHIN:
        return None
    return Fault(str(found), moved is not None and found.max_error <= OF_ROUNDING * moved())


def smaller(program: Program, where: Where) -> tuple[Program, Where]:
    """Without what can be left out, one part after another, and still the same kind of fault."""

    def kind_of(program: Program, where: Where) -> str | None:
        found = fault(lambda: check(program, where), lambda: moved(program))
        return None if found is None or found.of_rounding else found.text[:20]

    kind = kind_of(program, where)
    left = list(_parts(program, where))
    while left:
        tried = left.pop(0)
        if kind_of(*tried) == kind:
            program, where = tried
            left = list(_parts(program, where))
    return program, where


def _parts(program: Program, where: Where) -> Iterator[tuple[Program, Where]]:
    for i in range(len(program.ops)):
        yield replace(program, ops=program.ops[:i] + program.ops[i + 1 :]), where
    for i in range(len(where.mesh) if len(where.mesh) > 1 else 0):
        kept = replace(where, mesh=where.mesh[:i] + where.mesh[i + 1 :], plans=where.plans[:i] + where.plans[i + 1 :])
        yield program, replace(kept, batch=None)
    plain = Program(program.shape, program.ops, loss=program.loss)
    if program != plain:
        yield plain, where
    if where.passes or where.batch:
        yield program, replace(where, passes=where.passes and "", batch=None)


def survey(
    name: str,
    cases: st.SearchStrategy[Any],
    run: Callable[[Any], ms.Verification],
    moved: Callable[[Any], float],
    count: int,
    start: int,
) -> int:
    """Run so many cases and print what is wrong; how many are, with those that cannot be told if they are too many."""
    wrong, unclear, began, done = [], [], time.perf_counter(), itertools.count(1)
    print(f"{name}: {count} of seed {start}", flush=True)

    @seed(start)
    @settings(
        max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate], verbosity=Verbosity.quiet,
    )  # fmt: skip
    @given(cases)
    def each(case: Any) -> None:
        found = fault(lambda: run(case), lambda: moved(case))
        if found is not None:
            told = "plain torch differs from itself as much, by rounding: " if found.of_rounding else ""
            print(f"\n{name}: {told}{found.text}\n  {case}", flush=True)
            (unclear if found.of_rounding else wrong).append(case)
        number = next(done)
        if number % 50 == 0:
            print(f"{name}: {number} run in {time.perf_counter() - began:.0f} s", flush=True)

    each()
    print(
        f"{name}: {count} run in {time.perf_counter() - began:.0f} s, seed {start}: {len(wrong)} wrong, "
        f"{len(unclear)} ill-conditioned",
        flush=True,
    )
    for case in wrong[:10] if name == "programs" else []:
        print("\nsmaller:", *smaller(*case), sep="\n  ", flush=True)
    return len(wrong) + (len(unclear) if len(unclear) > ILL_CONDITIONED * count else 0)


def main() -> int:
    parser = argparse.ArgumentParser(description="Random programs and plans against plain torch, in float64.")
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--triples", type=int, default=500)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**32), help="to do the same again")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("meshstep").setLevel("ERROR")
    wrong = 0
    if given.programs:
        wrong += survey("programs", cases, lambda c: check(*c), lambda c: moved(c[0]), given.programs, given.seed)
    if given.triples:
        wrong += survey("triples", triples, check_triple, moved_triple, given.triples, given.seed)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
