"""Does the compiled program compute what the plain step computes?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .blame import Culprit
from .capture.randomness import CountedRandom, Draws
from .capture.source import definition_line
from .capture.state import collect
from .capture.tree import flatten, paths, unflatten
from .errors import InputError, VerifyError
from .runtime.seed import Seed

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative to the largest element
SMALL = 1e-9  # a scale is at least this: the noise of what should be zero is no error
_HINT = "dtype=torch.float64, if rounding may have added up; else the capture of the Python is at fault: report it"
MakeArgs = Callable[[int], tuple[tuple, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Verification:
    """What a comparison found.

    Args:
        steps: Steps compared.
        values: Tensors compared in each step, by what they are.
        max_error: Greatest difference, relative to the largest element among the values of that kind.
        tolerance: What is allowed.
        first_divergence: The first result that differs by more; None if there is none.
        culprit: The first value of the program behind it that differs, and what made it so; None if none of them does:
            then what was captured of the Python is at fault, or rounding has added up.
    """

    steps: int
    values: Mapping[str, int]
    max_error: float
    tolerance: float
    first_divergence: str | None
    culprit: Culprit | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing differs by more than the tolerance."""
        return self.first_divergence is None

    def __str__(self) -> str:
        """One line; below it, where there is a difference, the first value that differs and what made it."""
        counted = ", ".join(f"{count} {kind}{'' if count == 1 else 's'}" for kind, count in self.values.items())
        found = "equal" if self.ok else f"DIFFERENT at {self.first_divergence}"
        text = f"{found}: max error {self.max_error:.1e} over {self.steps} steps ({counted} a step)"
        return text if self.ok else f"{text}{self._blamed()}"

    def check(self) -> None:
        """See that nothing differs.

        Raises:
            VerifyError: Something does.
        """
        if self.ok:
            return
        blamed, culprit = self._blamed().removeprefix("\n  at   ").partition("\n  try  "), self.culprit
        hint = f"python {culprit.file}" if culprit and culprit.file else blamed[2] or None
        raise VerifyError(f"DIFFERENT at {self.first_divergence}", at=blamed[0], hint=hint)

    def _blamed(self) -> str:
        if self.culprit is not None:
            return str(self.culprit)
        return "\n  at   the program computes the same on one device and on all ranks, stage by stage\n  try  " + _HINT


def compare(
    plain: Callable[..., Any],
    compiled: Callable[..., Any],
    make_args: MakeArgs,
    steps: int,
    dtype: torch.dtype | None = None,
    locate: Callable[..., Culprit | None] | None = None,
) -> Verification:
    """Run both on equal arguments and compare everything after every step.

    Args:
        plain: The function.
        compiled: The step made of it; takes and returns whole tensors.
        make_args: Arguments of step i, as (args, kwargs). Modules and optimizers of step 0 are kept.
        steps: Number of steps, at least 1.
        dtype: Floating-point tensors are brought to it first; None leaves them.
        locate: Finds the first value that differs in a call, given its arguments.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(f"{steps!r} steps", at="verify(steps=...)", hint="at least 1")
    if not callable(make_args):
        raise InputError(
            f"make_args is a {type(make_args).__name__}", at="verify(make_args=...)", hint="lambda i: (args, kwargs)"
        )
    start = make_args(0)  # once: it may draw its batch at random
    ours, theirs = _Side(start, dtype), _Side(start, dtype)
    seed = Seed(None)
    worst, first, values = 0.0, None, dict[str, int]()
    calls: list[Any] = []  # up to the first that differs
    for i in range(steps):
        later = None if i == 0 else make_args(i)
        if first is None:
            calls.append(later)
        seed.begin()
        seed.now(torch.device("cpu"))  # before the generator's state is looked at: the first one of a seed moves it
        generator = torch.get_rng_state()
        with CountedRandom(Draws(definition_line(plain)), seed.now):
            want = ours.run(plain, later)
        torch.set_rng_state(generator)
        try:
            found = theirs.run(compiled, later)
        except VerifyError as differing:  # replicas that differ have no whole value to compare
            worst, first = float("inf"), first or f"step {i}, {differing.at}: {differing.what}"
            break
        values, scales = _counted(want), _scales(want)
        for name in dict.fromkeys((*want, *found)):
            error = _error(found.get(name), want.get(name), scales.get(name, 1.0))
            worst = max(worst, error)
            if error > _tolerance(dtype, want) and first is None:
                first = f"step {i}, {name} (by {error:.1e})"
    culprit = None
    if first is not None and locate is not None:
        args, kwargs = _again(plain, start, dtype, calls)
        culprit = locate(*args, **kwargs)
    return Verification(steps, values, worst, _tolerance(dtype, want), first, culprit)


def _again(plain: Callable[..., Any], start: Any, dtype: torch.dtype | None, calls: list[Any]) -> tuple[Any, Any]:
    """The arguments of the last of some calls as they were before it, by the plain steps before it."""
    side, seed = _Side(start, dtype), Seed(None)
    for later in calls[:-1]:
        seed.begin()
        with CountedRandom(Draws(definition_line(plain)), seed.now):
            side.run(plain, later)
    found: tuple[Any, Any] = side.arguments(calls[-1])
    return found


class _Side:
    """One of the two runs: modules and optimizers of its own, kept over the steps."""

    def __init__(self, first: Any, dtype: torch.dtype | None) -> None:
        if not (isinstance(first, tuple) and len(first) == 2 and isinstance(first[1], dict)):
            raise InputError(
                f"make_args returned {type(first).__name__}",
                at="verify(make_args=...)",
                hint="return (args, kwargs), as in (model, optimizer, x), {}",
            )
        self.dtype = dtype
        leaves, self.spec = flatten(copy.deepcopy(first))
        self.leaves = [_cast(leaf, dtype) for leaf in leaves]
        self.names = paths(self.spec)

    def run(self, function: Callable[..., Any], later: Any) -> dict[str, Tensor]:
        """One step; every tensor after it, by name."""
        args, kwargs = self.arguments(later)
        returned, spec = flatten(function(*args, **kwargs))
        found = {
            f"output {n or 'value'}": t for n, t in zip(paths(spec), returned, strict=True) if isinstance(t, Tensor)
        }
        found |= {str(held.slot): held.tensor for held in collect(self.leaves, self.names).held}
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    def arguments(self, later: Any) -> Any:
        """(args, kwargs) of the next step."""
        if later is not None:
            new, spec = flatten(later)
            if spec != self.spec:
                raise InputError(
                    "make_args returned another structure",
                    at="verify(make_args=...)",
                    hint="the same in every step",
                )
            self.leaves = [
                old if isinstance(old, (nn.Module, Optimizer, nn.Parameter)) else _cast(copy.deepcopy(leaf), self.dtype)
                for old, leaf in zip(self.leaves, new, strict=True)
            ]
        return unflatten(self.leaves, self.spec)


def _cast(leaf: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return leaf
    if isinstance(leaf, nn.Module):
        return leaf.to(dtype)
    if isinstance(leaf, Optimizer):
        for entries in leaf.state.values():
            for key, value in entries.items():
                if isinstance(value, Tensor) and value.is_floating_point() and value.ndim:
                    entries[key] = value.to(dtype)
        return leaf
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        with torch.no_grad():
            leaf.data = leaf.data.to(dtype)
    return leaf


def _scales(values: Mapping[str, Tensor]) -> dict[str, float]:
    """How large the values of each kind are: outputs each alone, optimizer state and buffers by their last name.

    A parameter without a gradient but for rounding (a bias before a norm) moves by noise of its own size: it is
    measured by the other parameters.
    """
    kinds, greatest = {name: _kind(name) for name in values}, dict[str, float]()
    for name, value in values.items():
        wide = value.double() if value.dtype is torch.bool else value  # it has no absolute value
        finite = wide[torch.isfinite(wide)].abs() if wide.numel() else wide
        largest = finite.max().item() if finite.numel() else 0.0
        greatest[kinds[name]] = max(greatest.get(kinds[name], SMALL), float(largest))
    return {name: greatest[kind] for name, kind in kinds.items()}


def _kind(name: str) -> str:
    first = name.split()[0]
    if first == "output":
        return name
    return first if first in ("parameter", "gradient") else f"{first} {name.rpartition('.')[2]}"


def _error(found: Tensor | None, want: Tensor | None, scale: float) -> float:
    if found is None or want is None or found.shape != want.shape:
        return float("inf")
    if found.numel() == 0:
        return 0.0
    exact = torch.complex128 if found.is_complex() else torch.float64
    a, b = found.to(exact), want.to(found.device, exact)
    both = torch.isfinite(a) & torch.isfinite(b)
    if not torch.equal(torch.nan_to_num(a[~both]), torch.nan_to_num(b[~both].to(a.dtype))):
        return float("inf")
    if not both.any():
        return 0.0
    return (a - b)[both].abs().max().item() / scale


def _tolerance(dtype: torch.dtype | None, values: Mapping[str, Tensor]) -> float:
    used = dtype or max(
        (t.dtype for t in values.values() if t.is_floating_point()),
        key=lambda d: -d.itemsize,
        default=torch.float64,
    )
    return TOLERANCE.get(used, 1e-2)


def _counted(values: Mapping[str, Tensor]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in values:
        kind = "optimizer state" if name.startswith("optimizer state") else name.split()[0]
        counts[kind] = counts.get(kind, 0) + 1
    return counts
