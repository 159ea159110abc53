"""Runs one op on a small call, whole and in shards, to see which placements recombine to the right answer."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from .._torch import OpOverload, skip_dispatch_modes
from ..layout import PARTIAL, REPLICATE, shard, shard_dim
from .small import DISCRETE, Draw, Place, Small, draw, leaves, mapped

Outputs = tuple[Any, ...]
Sample = tuple[Mapping[str, Any], Outputs]

SIZES = (2, 3)
LEAST_SAMPLES = 3
_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}


class UnfitError(Exception):
    """The op cannot be tried on this call; the message says why."""


class NeverError(UnfitError):
    """The op cannot be tried on any call."""


class OutOfTimeError(Exception):
    """The time for an op is over."""


@dataclass(slots=True)
class Clock:
    """What an experiment may cost.

    The time of this thread counts, so that a busy machine finds the same rules as an idle one: ranks must agree. The
    first run does not count: it imports what it needs.

    Args:
        seconds: Time that it may take, and thrice that by the clock on the wall; a run under way is not broken off.
        runs: How often the op was run.
    """

    seconds: float
    runs: int = 0
    start: float = field(default_factory=time.perf_counter)
    first: tuple[float, float] | None = None

    def spent(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start

    def run(self, op: OpOverload, arguments: Mapping[str, Any]) -> Outputs:
        """Run the op once.

        Raises:
            OutOfTimeError: The time is over.
        """
        if self.first and time.thread_time() - self.first[0] > self.seconds:
            raise OutOfTimeError
        if self.first and time.perf_counter() - self.first[1] > 3 * self.seconds:
            raise OutOfTimeError
        self.runs += 1
        output = op(**arguments)
        self.first = self.first or (time.thread_time(), time.perf_counter())
        return tuple(output) if isinstance(output, (tuple, list)) else (output,)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Run on real tensors, whatever mode is active, and leave the random numbers of the process as they are."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        with skip_dispatch_modes(), torch.no_grad():
            yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


class Experiment:
    """One op on one small call, with several draws of random tensors.

    Args:
        op: The op.
        small: The call.
        clock: Counts what it costs.
        draws: How the tensors are drawn.

    Raises:
        UnfitError: The op does not run on it, or nothing can be concluded from its outputs.
        NeverError: The op is random, changes its inputs, or keeps something between calls.
    """

    def __init__(self, op: OpOverload, small: Small, clock: Clock, draws: Sequence[Draw]) -> None:
        """Run the op whole on all draws."""
        self.op, self.small, self.clock = op, small, clock
        self.samples: list[Sample] = []
        self._add(draws)
        if len(self.samples) < min(LEAST_SAMPLES, len(draws)):
            raise UnfitError(self._failure or "its outputs are not finite")
        if len(draws) > LEAST_SAMPLES:
            if any(_is_discrete(o) for o in self.samples[0][1]):
                self._add(DISCRETE)
            self._check_informative()
        self.types = small.tensors

    def holds(
        self, inputs: Sequence[Placement], places: Sequence[Place] = (), sizes: Iterable[int] = SIZES
    ) -> tuple[Placement | None, ...] | None:
        """The placements of the outputs that these placements of the inputs give; None if they give none.

        Args:
            inputs: One for each tensor.
            places: The numbers among the arguments that each rank has its share of.
            sizes: Numbers of ranks to try.
        """
        possible: list[set[Placement | None]] | None = None
        for size, (index, sample) in itertools.product(sizes, enumerate(self.samples)):
            try:
                found = self._possible(sample, inputs, places, size, index)
            except OutOfTimeError:
                raise
            except Exception:  # whatever a kernel raises on a shard
                return None
            possible = found if possible is None else [a & b for a, b in zip(possible, found, strict=True)]
            if not all(possible):
                return None
        assert possible is not None
        return tuple(_one(placements) for placements in possible)

    # ---- whole

    _failure = ""

    def _add(self, draws: Sequence[Draw]) -> None:
        first = len(self.samples)
        for seed, how in enumerate(draws, start=1000 * first):
            arguments = draw(self.small, how, seed)
            before = [t.clone() for t in leaves(arguments, Tensor)] if not self.samples else []
            states = _random_states() if not self.samples else None
            try:
                whole = self.clock.run(self.op, arguments)
            except OutOfTimeError:
                raise
            except Exception as error:  # whatever a kernel raises
                self._failure = f"it fails on small tensors: {first_line(error)}"
                continue
            if states is not None:
                self._check_pure(arguments, whole, before, states)
            if all(_is_sound(o) for o in whole):
                self.samples.append((arguments, whole))

    def _check_pure(
        self, arguments: Mapping[str, Any], whole: Outputs, before: Sequence[Tensor], states: tuple
    ) -> None:
        if states != _random_states():
            raise NeverError("it draws random numbers")
        if not all(torch.equal(a, b) for a, b in zip(leaves(arguments, Tensor), before, strict=True) if a.numel()):
            raise NeverError("it changes its inputs")
        if any(not isinstance(o, Tensor) and o is not None for o in whole):
            raise NeverError("it returns what is no tensor")
        again = self.clock.run(self.op, arguments)
        if not all(a is None or torch.equal(_bits(a), _bits(b)) for a, b in zip(whole, again, strict=True)):
            raise NeverError("two runs differ")

    def _check_informative(self) -> None:
        """An output that is the same for all inputs proves nothing."""
        for outputs in zip(*(whole for _, whole in self.samples), strict=True):
            if isinstance(outputs[0], Tensor) and outputs[0].numel():
                if all(torch.equal(outputs[0], o) for o in outputs[1:]):
                    raise UnfitError("an output is the same for all inputs")
                if outputs[0].dtype not in _TOLERANCE and not _is_discrete(outputs[0]):
                    raise UnfitError(f"an output in {outputs[0].dtype} is too coarse to compare")

    # ---- in parts

    def _possible(
        self, sample: Sample, inputs: Sequence[Placement], places: Sequence[Place], size: int, seed: int
    ) -> list[set[Placement | None]]:
        arguments, whole = sample
        generator = torch.Generator().manual_seed(seed)
        parts = [_split(t, p, size, generator) for t, p in zip(leaves(arguments, Tensor), inputs, strict=True)]
        ranks = []
        for rank in range(size):
            own = [p[rank] for p in parts]
            ranks.append(self.clock.run(self.op, share(_replaced(arguments, own), places, size)))
        summed = any(isinstance(p, Partial) for p in inputs)
        return [_explanations(w, [r[i] for r in ranks], size, summed) for i, w in enumerate(whole)]


def _replaced(arguments: Mapping[str, Any], tensors: Iterable[Tensor]) -> dict[str, Any]:
    new = iter(tensors)
    return mapped(arguments, Tensor, lambda _: next(new))


def first_line(error: Exception) -> str:
    """The first line of what an error says; its kind if it says nothing."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def share(arguments: Mapping[str, Any], places: Sequence[Place], size: int) -> dict[str, Any]:
    """The arguments with some numbers divided by the number of ranks."""
    found = dict(arguments)
    for name, index in places:
        if index is None:
            found[name] = found[name] // size
        else:
            found[name] = [v // size if i == index else v for i, v in enumerate(found[name])]
    return found


def _split(whole: Tensor, placement: Placement, size: int, generator: torch.Generator) -> list[Tensor]:
    dim = shard_dim(placement)
    if dim is not None:
        assert whole.shape[dim] % size == 0, f"a dim of {whole.shape[dim]} over {size} ranks"
        return [part.contiguous() for part in whole.chunk(size, dim)]
    if placement == REPLICATE:
        return [whole] * size
    scale = 3 * (whole.abs().max().item() if whole.numel() else 1.0)
    noise = [torch.randn(whole.shape, dtype=torch.float64, generator=generator) * scale for _ in range(size - 1)]
    others = [n.to(whole.dtype).to(whole.device) for n in noise]
    return [whole - sum(others), *others]


def _explanations(whole: Any, parts: Sequence[Any], size: int, summed: bool) -> set[Placement | None]:
    """The placements by which the parts stand for the whole."""
    if whole is None:
        return {None} if all(p is None for p in parts) else set()
    shape = tuple(whole.shape)
    if len({tuple(p.shape) for p in parts}) > 1 or any(p.dtype != whole.dtype for p in parts):
        return set()
    local, scale = tuple(parts[0].shape), _scale([whole, *parts] if summed or not _is_discrete(whole) else [whole])
    found: set[Placement | None] = set()
    if local == shape:
        if all(_same(p, whole, scale) for p in parts):
            found.add(REPLICATE)
        if whole.numel() and whole.dtype.is_signed and _same(sum(parts[1:], parts[0]), whole, scale):
            found.add(PARTIAL)
        return found
    for dim, (part, length) in enumerate(zip(local, shape)) if len(local) == len(shape) else ():
        if part * size == length and local == (*shape[:dim], part, *shape[dim + 1 :]):
            found |= {shard(dim)} if _same(torch.cat(list(parts), dim), whole, scale) else set()
    return found


def _one(possible: set[Placement | None]) -> Placement | None:
    return REPLICATE if REPLICATE in possible else next(iter(possible))


def _same(value: Tensor, whole: Tensor, scale: float) -> bool:
    tolerance = _TOLERANCE.get(whole.dtype)
    if tolerance is None:
        return torch.equal(value, whole)
    return whole.numel() == 0 or (value - whole).abs().max().item() <= tolerance * scale  # not a number: false


def _scale(tensors: Iterable[Tensor]) -> float:
    return max((t.abs().max().item() for t in tensors if t.numel() and not _is_discrete(t)), default=0.0)


def _is_discrete(value: Any) -> bool:
    return isinstance(value, Tensor) and not (value.dtype.is_floating_point or value.dtype.is_complex)


def _is_sound(value: Any) -> bool:
    return not isinstance(value, Tensor) or (value.layout == torch.strided and bool(torch.isfinite(value).all()))


def _bits(value: Tensor) -> Tensor:
    return value.nan_to_num() if value.dtype.is_floating_point else value


def _random_states() -> tuple:
    state: Any = np.random.get_state()
    kind, keys, *rest = state
    return bytes(torch.get_rng_state().tolist()), random.getstate(), (kind, bytes(keys), *rest)
