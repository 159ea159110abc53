"""Small calls of the same structure as a given one, with random tensors: what a rule can be tried on.

Dims are made small consistently: equal sizes stay equal, and a number among the arguments that equals a size follows
it. Which relations an op insists on (a product, a ratio, a number of groups) is not known, so several ways are tried.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ir.types import TensorType
from .rule import OpCall

Place = tuple[str, int | None]  # a number among the arguments: name, and index where the argument is a list

UNIT = 6  # divides by 2 and by 3
MOST_ELEMENTS = 2**17  # of a small call
_FEW = 4  # a size that may well mean something by itself: RGB, complex parts
_WIDER = {
    torch.float32: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.complex64: torch.complex128,
}


@dataclass(frozen=True, slots=True)
class Small:
    """A small call.

    Args:
        arguments: By name, with a TensorType in place of each tensor.
        sizes: The small size of each size of the real call.
        tied: The numbers that follow a size, and the small size that each has.
    """

    arguments: Mapping[str, Any]
    sizes: Mapping[int, int]
    tied: tuple[tuple[Place, int], ...]

    @property
    def tensors(self) -> tuple[TensorType, ...]:
        """The tensors, in order."""
        return tuple(leaves(self.arguments, TensorType))

    def widened(self) -> Small:
        """The same with floating-point tensors in double precision."""
        return Small(mapped(self.arguments, TensorType, _widened), self.sizes, self.tied)

    def on(self, device: str) -> Small:
        """The same on another device."""
        moved = mapped(self.arguments, TensorType, lambda t: TensorType(t.dtype, t.shape, device))
        return Small(mapped(moved, torch.device, lambda _: torch.device(device)), self.sizes, self.tied)

    def __str__(self) -> str:
        """All that an experiment on it depends on: the same text, the same rules."""
        shown = (f"{name}={_shown(value)}" for name, value in self.arguments.items())
        tied = "".join(f" {name}{'' if i is None else f'[{i}]'}={size}" for (name, i), size in self.tied)
        return f"({', '.join(shown)}) sizes {sorted(set(self.sizes.values()))}{tied and ' following'}{tied}"

    def leads(self, size: int) -> tuple[int, ...]:
        """The small sizes whose dims may be made of a dim of this one and others after it; itself first."""
        small = set(self.sizes.values())
        products = (s for s in sorted(small) if s > size and s % size == 0 and s // size in small)
        return (size, *products)


def small_calls(call: OpCall) -> Iterator[Small]:
    """Small calls of the structure of `call`, the likeliest first; all dims of a size have its small size."""
    numbers = sorted({n for n in leaves(call.arguments, int) if not isinstance(n, bool) and n > 1})
    inputs = list(dict.fromkeys(s for t in call.tensors for s in t.shape if s > 1))
    named = [s for o in call.outputs if o for s in o.shape if s > 1 and s in numbers]
    seen = set()
    for least in (_FEW, math.inf, 2):  # which numbers follow a size: none below this
        for sizes in _sizes(list(dict.fromkeys((*inputs, *named))), numbers):
            small = _small(call, sizes, least)
            key = (tuple(small.tensors), small.tied, repr(small.arguments))
            if key not in seen and sum(t.numel for t in small.tensors) <= MOST_ELEMENTS:
                seen.add(key)
                yield small


def tried_calls(call: OpCall) -> Iterator[Small]:
    """Small calls, on the CPU first; on each device the likeliest first, each in double precision first."""
    gpus = [t.device for t in call.tensors if t.device == "cuda" and torch.cuda.is_available()]
    for device in dict.fromkeys(["cpu", *gpus]):
        for small in small_calls(call):
            yield from precisions(small.on(device))


def precisions(small: Small) -> Iterator[Small]:
    """A call in double precision; and as it is, where that is not much coarser."""
    yield small.widened()
    if any(t.dtype in (torch.float32, torch.complex64) for t in small.tensors):
        yield small


def real_call(call: OpCall) -> Small:
    """The call itself on the CPU, to be drawn like a small one."""
    return Small(call.arguments, {s: s for t in call.tensors for s in t.shape}, ()).on("cpu")


def _sizes(sizes: Sequence[int], numbers: Sequence[int]) -> Iterator[dict[int, int]]:
    """Ways to make sizes small."""
    if not sizes:
        yield {}
        return
    ascending = sorted(sizes)
    yield from (found for found in (_products(ascending),) if found)
    yield _distinct(ascending)
    divisor = math.gcd(*ascending)
    yield {s: s // divisor * UNIT for s in ascending}
    yield {s: s for s in ascending if s <= _FEW} | _distinct([s for s in ascending if s > _FEW])
    for number in reversed(numbers):
        if number <= 64:
            yield {s: s if s == number else v for s, v in _distinct(ascending, math.lcm(UNIT, number)).items()}
    yield {s: s for s in ascending} | {sizes[0]: UNIT}
    yield {s: s if s <= _FEW else s * UNIT // math.gcd(s, UNIT) for s in ascending}


def _distinct(ascending: Sequence[int], unit: int = UNIT) -> dict[int, int]:
    return {size: unit * (i + 1) for i, size in enumerate(ascending)}


def _products(ascending: Sequence[int]) -> dict[int, int] | None:
    """Sizes that are products of two others stay so; None if there are none, or two would become the same."""
    found: dict[int, int] = {}
    products = 0
    for size in ascending:
        pairs = ((a, b) for a, b in itertools.combinations_with_replacement(found, 2) if a * b == size)
        pair = next(pairs, None)
        products += pair is not None
        found[size] = found[pair[0]] * found[pair[1]] if pair else UNIT * (len(found) - products + 1)
    return found if products and len(set(found.values())) == len(found) else None


def _small(call: OpCall, sizes: Mapping[int, int], least: float) -> Small:
    tied: list[tuple[Place, int]] = []

    def shrunk(value: Any, place: Place) -> Any:
        if isinstance(value, TensorType):
            return value.with_shape(tuple(sizes.get(s, s) for s in value.shape))
        if isinstance(value, bool) or not isinstance(value, int) or value < least or value not in sizes:
            return value
        tied.append((place, sizes[value]))
        return sizes[value]

    arguments = {
        name: [shrunk(v, (name, i)) for i, v in enumerate(value)]
        if isinstance(value, (list, tuple))
        else shrunk(value, (name, None))
        for name, value in call.arguments.items()
    }
    return Small(arguments, sizes, tuple(tied))


def _widened(type_: TensorType) -> TensorType:
    return TensorType(_WIDER.get(type_.dtype, type_.dtype), type_.shape, type_.device)


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    return f"{value}@{value.device}" if isinstance(value, TensorType) else repr(value)


# ---- nests of arguments


def leaves(arguments: Mapping[str, Any], kind: type) -> Iterator[Any]:
    """What is of a kind among some arguments, in lists too."""
    for value in arguments.values():
        yield from (v for v in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(v, kind))


def mapped(arguments: Mapping[str, Any], kind: type, change: Callable[[Any], Any]) -> dict[str, Any]:
    """The same arguments, those of a kind changed, in lists too."""

    def changed(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [changed(v) for v in value]
        return change(value) if isinstance(value, kind) else value

    return {name: changed(value) for name, value in arguments.items()}


# ---- random tensors


@dataclass(frozen=True, slots=True)
class Draw:
    """How random tensors are drawn.

    Args:
        scale: What floating-point numbers are multiplied by: a threshold within an op shows at one scale or another.
        positive: Whether they are all positive.
        lone: Whether all elements are alike but one: a reduction to a bool or an integer shows what it missed.
        high: Integers are below it.
    """

    scale: float = 1.0
    positive: bool = False
    lone: bool = False
    high: int = 2


DRAWS = (
    Draw(),
    Draw(positive=True),
    Draw(scale=30.0),
    Draw(high=UNIT),
    Draw(scale=1e-3, high=UNIT),
    Draw(scale=1e4, positive=True),
    Draw(lone=True),
    Draw(scale=1e6),
)
DISCRETE = (*(Draw() for _ in range(4)), *(Draw(lone=True) for _ in range(6)))  # more, where an output is discrete


def draw(small: Small, how: Draw, seed: int) -> dict[str, Any]:
    """The arguments with random tensors, the same ones for the same seed; integers below `how.high` and every size.

    The negative numbers among the arguments (an index to ignore) are put into integer tensors, too, at `how.high` > 2.
    """
    generator = torch.Generator().manual_seed(seed)
    high = max(2, min([how.high, *(s for t in small.tensors for s in t.shape if s > 1)]))
    special = [n for n in leaves(small.arguments, int) if n < -(2**4)] if how.high > 2 else []

    def tensor(type_: TensorType) -> Tensor:
        made = _tensor(type_, how, generator, high)
        if special and not _is_float(type_.dtype) and type_.dtype.is_signed:
            made = torch.where(torch.rand(type_.shape, generator=generator) < 0.25, special[0], made)
        return made.to(type_.dtype).to(type_.device)

    return mapped(small.arguments, TensorType, tensor)


def _tensor(type_: TensorType, how: Draw, generator: torch.Generator, high: int) -> Tensor:
    if not _is_float(type_.dtype):
        if how.lone:
            rest = int(torch.randint(2, (), generator=generator))
            return _lone(type_.shape, rest, 1 - rest, generator)
        return torch.randint(high, type_.shape, generator=generator)
    if how.lone:
        return _lone(type_.shape, -0.5, 2.0, generator) * (1 + 0.1 * torch.rand(type_.shape, generator=generator))
    if how.positive:
        found = torch.rand(type_.shape, dtype=torch.float64, generator=generator) * 0.8 + 0.1
    else:
        found = torch.randn(type_.shape, dtype=torch.float64, generator=generator)
    if type_.dtype.is_complex:
        found = torch.complex(found, torch.randn(type_.shape, dtype=torch.float64, generator=generator))
    return found * how.scale


def _lone(shape: tuple[int, ...], rest: float, one: float, generator: torch.Generator) -> Tensor:
    made = torch.full(shape, rest)
    if made.numel():
        made.view(-1)[int(torch.randint(made.numel(), (), generator=generator))] = one
    return made


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
