"""Puts every op of PyTorch's own OpInfo database through capture, partition and simulation, forward and backward.

    python tests/op_sweep.py --json out.json

For each op that has a float64 backward on a CPU, some of OpInfo's samples become little steps: the op, a
random-weighted sum of its outputs as the loss, the gradients of all float inputs. Each runs plainly on one device, and
on 2 or 4 virtual ranks with the inputs placed at random; outputs and gradients must agree. Random ops are compared with
the same step on 1 rank.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils._pytree import tree_flatten, tree_unflatten

import meshstep as ms
from meshstep.api import Options, SimulatedStep
from meshstep.errors import InputError, MeshstepError
from meshstep.ir.collectives import all_gather, all_to_all
from meshstep.ir.program import Program
from meshstep.layout import REPLICATE, Layout, shard
from meshstep.passes import Pipeline

WITHIN = 1e-9
LARGEST = 20_000  # elements of a sample's tensor: larger ones only take time
LOOKED_AT = 60  # samples of an op that are looked at, to choose from

# Ops whose samples have sizes that go together, written out: they crash with others.
_OWN_SIZES = ("_segment_reduce",)

# Ops that are refused, each for a reason that no rule can take away.
_SHAPE = "the shape of the result depends on values"
_SPARSE = "a sparse tensor"
_VALUE = "Python needs the value of a tensor"
_CHECKS = "PyTorch's own Python checks the values of a tensor"
BY_DESIGN: dict[str, str] = {
    "as_strided partial_views": "reads memory beyond its tensor",
    "combinations": _SHAPE + " (masked_select)",
    "corrcoef": _CHECKS,
    "cov": _CHECKS + " (the weights)",
    "index_fill": "the gradient of a value that is a tensor takes the distinct indices: " + _SHAPE,
    "index_put": "the gradient of values put by a mask: " + _SHAPE,
    "linalg.lstsq": "the shape of the residuals depends on the rank of the matrix",
    "linalg.lstsq grad_oriented": "the shape of the residuals depends on the rank of the matrix",
    "masked_select": _SHAPE,
    "narrow": _VALUE + ": a start that is a tensor",
    "nn.functional.ctc_loss": "the shape of what it saves depends on the lengths",
    "nn.functional.gaussian_nll_loss": _CHECKS + " (the variance)",
    "repeat_interleave": _SHAPE,
    "sparse.mm reduce": _SPARSE,
    "sparse.sampled_addmm": _SPARSE,
    "tensor_split": _VALUE + ": places that are a tensor",
    "to_sparse": _SPARSE,
}


@dataclass(slots=True)
class Outcome:
    """What became of one op.

    Args:
        name: The op, with OpInfo's name of the variant.
        status: "exact", "by design", "wrong", "refused" (a typed error that is not listed), or "crash".
        runs: How many (sample, placements) were compared.
        kept: In how many of the samples with a batch dim the batch stayed sharded.
        batches: How many samples had a batch dim that divides.
        refused: How many samples raised a typed error.
        what: The first fault, or the reason.
        gathered: The calls that needed the batch whole.
        seconds: How long it took.
    """

    name: str
    status: str = "exact"
    runs: int = 0
    kept: int = 0
    batches: int = 0
    refused: int = 0
    what: str = ""
    gathered: list[str] = field(default_factory=list)
    seconds: float = 0.0


# ---- OpInfo


@contextlib.contextmanager
def even_sizes() -> Iterator[None]:
    """OpInfo's samples are made of the sizes 3, 5, 10 and 20: let them be even, so that they can be sharded."""
    sizes = {"S": 8, "M": 12, "XS": 4}
    found = [m for n, m in sys.modules.items() if n.startswith("torch.testing._internal") and hasattr(m, "S")]
    before = [(m, {name: getattr(m, name) for name in sizes if hasattr(m, name)}) for m in found]
    try:
        for module, old in before:
            for name in old:
                setattr(module, name, sizes[name])
        yield
    finally:
        for module, old in before:
            for name, value in old.items():
                setattr(module, name, value)


@contextlib.contextmanager
def unseeded() -> Iterator[None]:
    """OpInfo seeds random ops each time that they run; a step may not."""
    found = [m for n, m in sys.modules.items() if n.startswith("torch.testing._internal")]
    found = [m for m in found if hasattr(m, "wrapper_set_seed")]
    before = [m.wrapper_set_seed for m in found]
    try:
        for module in found:
            module.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
        yield
    finally:
        for module, old in zip(found, before, strict=True):
            module.wrapper_set_seed = old


def all_ops() -> list[Any]:
    """Every OpInfo whose op has a float64 backward on a CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return [op for op in op_db if op.supports_autograd and torch.float64 in op.supported_backward_dtypes("cpu")]


def name_of(op: Any) -> str:
    return f"{op.name} {op.variant_test_name}".strip()


@dataclass(frozen=True, slots=True)
class Sample:
    """One call of an op.

    Args:
        run: The op.
        leaves: The leaves of its arguments.
        spec: Puts them together.
        tensors: Which leaves are tensors.
    """

    run: Callable[..., Any]
    leaves: list[Any]
    spec: Any
    tensors: tuple[int, ...]

    @classmethod
    def of(cls, run: Callable[..., Any], args: tuple, kwargs: dict) -> Sample:
        leaves, spec = tree_flatten((args, kwargs))
        return cls(run, leaves, spec, tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)))

    def inputs(self) -> list[Tensor]:
        """Fresh tensors."""
        return [self.leaves[i].detach().clone().requires_grad_(self.leaves[i].requires_grad) for i in self.tensors]

    def call(self, tensors: Sequence[Tensor]) -> Any:
        leaves = list(self.leaves)
        for i, tensor in zip(self.tensors, tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.run(*args, **kwargs)

    def batch(self, size: int) -> bool:
        """Whether the first tensor has a dim 0 that divides."""
        return bool(self.tensors) and _divides(self.leaves[self.tensors[0]], 0, size)

    def elements(self) -> int:
        return max((self.leaves[i].numel() for i in self.tensors), default=0)


def samples_of(op: Any, count: int) -> list[Sample]:
    """Some samples of an op, best with a batch dim; different in number of dims where there are such."""
    _seed()
    with contextlib.nullcontext() if op.name in _OWN_SIZES else even_sizes():
        given = list(islice(op.sample_inputs("cpu", torch.float64, requires_grad=True), LOOKED_AT))
    found = [Sample.of(_processed(op.op, s.output_process_fn_grad), (s.input, *s.args), s.kwargs) for s in given]
    found = [s for s in found if s.tensors and s.elements() <= LARGEST]
    return _varied(sorted(found, key=lambda s: not s.batch(2)), count)


def _processed(run: Callable[..., Any], process: Callable[..., Any]) -> Callable[..., Any]:
    """The op, and of its outputs what its gradients are defined for (a phase, a sign may be free)."""
    return lambda *args, **kwargs: process(run(*args, **kwargs))


def _varied(found: list[Sample], count: int) -> list[Sample]:
    """The first, the last and those between them, of the ones that have a batch dim if there are enough."""
    dense = [s for s in found if s.batch(2)]
    pool = dense if len(dense) >= count else found
    step = max((len(pool) - 1) / max(count - 1, 1), 1)
    return [pool[round(i * step)] for i in range(min(count, len(pool)))]


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


# ---- one step


def step_of(sample: Sample) -> Callable[..., Any]:
    """The op, the loss and the gradients."""

    def step(x: list[Tensor], w: list[Tensor]) -> Any:
        outputs = [o for o in tree_flatten(sample.call(x))[0] if isinstance(o, Tensor)]
        weights = iter(w)
        terms = [_weighted(o, next(weights)) for o in outputs if _rounded(o)]
        loss = torch.stack(terms).sum() if terms else None
        wanted = [t for t in x if t.requires_grad]
        if loss is None or not loss.requires_grad or not wanted:
            return [o.detach() for o in outputs], []
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        return [o.detach() for o in outputs], [g for g in gradients if g is not None]

    return step


def _weighted(output: Tensor, weight: Tensor) -> Tensor:
    product = (output.to(weight.dtype) * weight).sum()
    return product.real if product.is_complex() else product


def _rounded(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def weights_for(outputs: Iterable[Any]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(o.shape, dtype=torch.complex128 if o.is_complex() else torch.float64, generator=generator)
        for o in outputs
        if isinstance(o, Tensor) and _rounded(o)
    ]


class Watched(SimulatedStep):
    """Keeps the local program to look at."""

    local: Program

    def _executor(self, captured: Any, local: Program, inputs: Any, call: Any) -> Any:
        self.local = local
        return super()._executor(captured, local, inputs, call)


def simulated(
    sample: Sample, weights: list[Tensor], size: int, placements: Sequence[Placement], passes: Any = None
) -> tuple[Any, Program]:
    """What the step gives on `size` ranks, and its program."""
    mesh = ms.Mesh(dp=size)
    inputs: dict[str, Any] = {f"x[{i}]": Layout((("dp", p),)) for i, p in enumerate(placements)}
    inputs |= {f"w[{i}]": Layout((("dp", REPLICATE),)) for i in range(len(weights))}
    step = Watched(step_of(sample), Options(mesh, None, inputs, "full", "eager", passes))
    _seed()
    return step(sample.inputs(), weights), step.local


def gathered(program: Program) -> list[str]:
    """Why values were gathered for anything but to be returned."""
    moved = [n for n in program.graph.nodes if n.target in (all_gather, all_to_all)]
    return [n.meta.get("why", str(n)) for n in moved if any(user.op != "output" for user in n.users)]


def difference(found: Any, want: Any) -> str | None:
    """What differs; None if nothing does."""
    a, b = tree_flatten(found)[0], tree_flatten(want)[0]
    if len(a) != len(b):
        return f"{len(a)} results, and not {len(b)}"
    return next((f"result {i} {what}" for i, (x, y) in enumerate(zip(a, b)) if (what := _off(x, y))), None)


def _off(x: Tensor, y: Tensor) -> str | None:
    if x.shape != y.shape or x.dtype != y.dtype:
        return f"is {x.dtype}{list(x.shape)}, and not {y.dtype}{list(y.shape)}"
    if not _rounded(y):
        return None if torch.equal(x, y) else "differs"
    x, y = (t.resolve_conj().to(torch.complex128 if t.is_complex() else torch.float64) for t in (x, y))
    if torch.allclose(x, y, rtol=WITHIN, atol=WITHIN * _scale(y), equal_nan=True):
        return None
    return f"is off by {(x - y).abs().nan_to_num(9e99).max().item():.2g} of {_scale(y):.2g}"


def _scale(y: Tensor) -> float:
    finite = y.abs()[torch.isfinite(y.abs())]
    return max(finite.max().item() if finite.numel() else 0.0, 1.0)


# ---- placements


def _divides(tensor: Tensor, dim: int, size: int) -> bool:
    return dim < tensor.ndim and tensor.shape[dim] > 0 and tensor.shape[dim] % size == 0


def by_batch(sample: Sample) -> list[Placement]:
    """The first tensor by its rows, the others whole."""
    return [shard(0) if i == 0 else REPLICATE for i in range(len(sample.tensors))]


def at_random(sample: Sample, size: int, seed: int) -> list[Placement]:
    """Each tensor whole, or on a dim that divides."""
    choose = random.Random(seed)
    tensors = [sample.leaves[i] for i in sample.tensors]
    return [choose.choice([REPLICATE, *(shard(d) for d in range(t.ndim) if _divides(t, d, size))]) for t in tensors]


# ---- the sweep


def sweep(op: Any, count: int = 6) -> Outcome:
    """All runs of one op."""
    outcome, start = Outcome(name_of(op)), time.perf_counter()
    try:
        for number, sample in enumerate(samples_of(op, count)):
            with unseeded(), contextlib.suppress(_Refused):
                _tried(sample, outcome, wide=number == 0)
    except Exception as error:
        outcome.status, outcome.what = "crash", f"{type(error).__name__}: {error}"
    outcome.seconds = time.perf_counter() - start
    return outcome


class _Refused(Exception):
    """A typed error: the other samples may do."""


def _tried(sample: Sample, outcome: Outcome, wide: bool) -> None:
    try:
        _run(sample, outcome, wide)
    except MeshstepError as error:
        outcome.refused += 1
        if outcome.status == "exact":
            outcome.status = "by design" if outcome.name in BY_DESIGN else "refused"
            outcome.what = BY_DESIGN.get(outcome.name) or f"{type(error).__name__}: {error}"
        raise _Refused from error


def _run(sample: Sample, outcome: Outcome, wide: bool) -> None:
    _seed()
    try:
        plain = sample.call(sample.inputs())
    except RuntimeError as error:
        raise InputError("the op fails on contiguous copies of its arguments") from error
    weights = weights_for(tree_flatten(plain)[0])
    _seed()
    want: Any = step_of(sample)(sample.inputs(), weights)
    if sample.batch(2):
        found, program = simulated(sample, weights, 2, by_batch(sample), Pipeline(()))
        if any(n.target in _RANDOM for n in program.graph.nodes):
            want, _ = simulated(sample, weights, 1, by_batch(sample))
        outcome.batches += 1
        why = gathered(program)
        outcome.kept += not why
        outcome.gathered += [w for w in why if w not in outcome.gathered]
        _compare(outcome, found, want, "S(0), R...", 2)
    for size in (2, 4) if wide else (2,):
        placements = at_random(sample, size, len(outcome.name) + outcome.runs)
        found, program = simulated(sample, weights, size, placements)
        if any(n.target in _RANDOM for n in program.graph.nodes):
            want, _ = simulated(sample, weights, 1, placements)
        _compare(outcome, found, want, ", ".join(map(str, placements)), size)


def _random_ops() -> frozenset:
    from meshstep.ir import random as numbers

    return frozenset(numbers.EXPANSIONS)


_RANDOM = _random_ops()


def _compare(outcome: Outcome, found: Any, want: Any, placements: str, size: int) -> None:
    outcome.runs += 1
    what = difference(found, want)
    if what and outcome.status != "wrong":
        outcome.status, outcome.what = "wrong", f"{what} with {placements} on {size} ranks"


def summary(outcomes: Sequence[Outcome]) -> str:
    """All that a reader wants to know."""
    counts = Counter(o.status for o in outcomes)
    with_batch = [o for o in outcomes if o.status == "exact" and o.batches]
    kept = [o for o in with_batch if o.kept]
    always = [o for o in with_batch if o.kept == o.batches]
    lines = [
        f"{len(outcomes)} ops, {sum(o.runs for o in outcomes)} runs, {sum(o.seconds for o in outcomes):.0f} s: "
        + ", ".join(f"{n} {status}" for status, n in counts.most_common()),
        f"batch kept sharded: {len(kept)} of {len(with_batch)} ops ({100 * len(kept) / max(len(with_batch), 1):.1f} %) "
        f"in a sample, {len(always)} ({100 * len(always) / max(len(with_batch), 1):.1f} %) in all",
    ]
    for status in ("wrong", "crash", "refused", "by design"):
        lines += [
            f"  {status}: {o.name}: {o.what.splitlines()[0][:200] if o.what else ''}"
            for o in outcomes
            if o.status == status
        ]
    lines += [f"  gathered: {o.name} {o.kept}/{o.batches}: {o.gathered[0][:160]}" for o in with_batch if not o.kept]
    lines += [
        f"  gathered at times: {o.name} {o.kept}/{o.batches}: {o.gathered[0][:160]}" for o in kept if o.kept < o.batches
    ]
    return "\n".join(lines)


def main() -> int:
    """Sweep, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write one record for each op")
    parser.add_argument("--ops", help="only ops with this in their name")
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--verbose", action="store_true", help="name each op before it runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    outcomes = []
    for op in all_ops():
        if options.ops and options.ops not in name_of(op):
            continue
        if options.verbose:
            print(name_of(op), file=sys.stderr, flush=True)
        outcomes.append(sweep(op, options.samples))
        if options.json:
            with open(options.json, "w") as file:
                json.dump([asdict(o) for o in outcomes], file, indent=1)
    print(summary(outcomes))
    return any(o.status not in ("exact", "by design") for o in outcomes)


if __name__ == "__main__":
    sys.exit(main())
