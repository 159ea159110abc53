"""One program for many sizes of a batch: what in it depends on the size, as formulas.

Programs of the same step for a few sizes are the same graph with other numbers in it: shapes, divisors, offsets. Each
number is a formula of the size, found from some sizes and checked on others. Where graphs differ in more than numbers,
or a number follows no formula, they are no family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx

from ..ir.program import Program, append
from ..ir.types import TensorType

CLOSE = 1e-14  # floats that a program computes from a size are rounded


class NoFamilyError(Exception):
    """Programs differ in more than sizes; says where."""


class TooFewError(NoFamilyError):
    """One more program would say more of a number."""


@dataclass(frozen=True, slots=True)
class Formula:
    """A number as a function of the size n.

    A whole number is `slope * n + start`. Another one is `(slope * n + start) / (n + below)`: of a mean, or of the
    correction of a variance.
    """

    slope: Fraction
    start: Fraction
    below: Fraction | None = None

    def at(self, size: int) -> int | float:
        """The number for a size.

        Raises:
            NoFamilyError: It is to be a whole number and is none.
        """
        found = self.slope * size + self.start
        if self.below is not None:
            return float(found / (size + self.below))
        if found.denominator != 1:
            raise NoFamilyError(f"{self} is no whole number for size {size}")
        return int(found)

    def __str__(self) -> str:
        """`3 * n + 1`."""
        above = f"{self.slope} * n + {self.start}"
        return above if self.below is None else f"({above}) / (n + {self.below})"


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """A program for any size.

    Args:
        base: The program of one size.
        formulas: The numbers that depend on the size, in the order in which they stand in the program.
    """

    base: Program
    formulas: Mapping[int, Formula]

    def at(self, size: int) -> Program:
        """The program for a size.

        Raises:
            NoFamilyError: A number would not be whole.
        """
        count = iter(range(10**9))

        def number(value: int | float) -> int | float:
            formula = self.formulas.get(next(count))
            return value if formula is None else formula.at(size)

        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.base.graph.nodes:
            args, kwargs, types = (_mapped(part, copies.__getitem__, number) for part in _parts(node))
            copies[node] = append(graph, node.op, node.target, args, kwargs, node.name)
            copies[node].meta.update(node.meta)
            if types is not None:
                copies[node].meta["type"] = types
        return replace(self.base, graph=graph)

    def check(self, program: Program, size: int) -> None:
        """See that a program is the one for a size.

        Raises:
            NoFamilyError: It is not.
        """
        _check_constants(self.base, program)
        for (path, ours), (_, theirs) in _pairs(self.at(size), program):
            if not _same(ours, theirs):
                raise NoFamilyError(f"{path}: {theirs} for size {size}, where {ours} was expected")


def family(programs: Sequence[Program], sizes: Sequence[int]) -> Family:
    """The family of programs of one step for different sizes.

    Args:
        programs: At least three: the formulas come from the first two, and must hold for all.
        sizes: The size that each is for, all different.

    Raises:
        NoFamilyError: They are none.
    """
    first, second, *others = programs
    formulas: dict[int, Formula] = {}
    for other in (second, *others):
        _check_constants(first, other)
    streams = [list(_leaves(program)) for program in programs]
    if len({len(stream) for stream in streams}) > 1:
        raise NoFamilyError("the graphs are of different lengths")
    number = 0
    for (path, value), *rest in zip(*streams, strict=True):
        values = [value, *(v for _, v in rest)]
        if any(p != path for p, _ in rest):
            raise NoFamilyError(f"{path} is {rest[0][0]} for another size")
        if not _is_number(value):
            if any(v != value for v in values):
                raise NoFamilyError(f"{path} is {value} for size {sizes[0]} and {values[1]} for {sizes[1]}")
            continue
        if not all(map(_is_number, values)):
            raise NoFamilyError(f"{path} is no number for every size")
        if any(not _same(v, value) for v in values):
            formulas[number] = _formula(path, values, sizes)
        number += 1
    return Family(first, formulas)


def _formula(path: str, values: Sequence[Any], sizes: Sequence[int]) -> Formula:
    """The formula of a number that is not the same for all sizes."""
    (a, b), (m, n) = values[:2], sizes[:2]
    if all(isinstance(v, int) for v in values):
        slope = Fraction(b - a, n - m)
        candidates = [Formula(slope, a - slope * m)]
    else:
        candidates = list(_quotients([float(v) for v in values], sizes))
    for found in candidates:
        if all(_fits(found, value, size) for value, size in zip(values, sizes, strict=True)):
            return found
    kind = NoFamilyError if all(isinstance(v, int) for v in values) or len(values) > _MOST else TooFewError
    raise kind(f"{path} follows no formula: {list(values)} for sizes {list(sizes)}")


_MOST = 3  # with more values there is no quotient that more of them would show
_DENOMINATOR = 10**9


def _quotients(values: Sequence[float], sizes: Sequence[int]) -> Iterator[Formula]:
    """`c / n` through the first value, and `(p n + q) / (n + r)` through the first three of at least four."""
    exact = [Fraction(value).limit_denominator(_DENOMINATOR) for value in values]
    yield Formula(Fraction(0), exact[0] * sizes[0], Fraction(0))
    if len(values) > _MOST:
        (u, v, w), (k, m, n) = exact[:3], sizes[:3]
        first, second = u * k - v * m, v * m - w * n  # of the linear equations p size + q - value r = value size
        determinant = (m - n) * (u - v) - (k - m) * (v - w)
        if determinant:
            r = ((k - m) * second - (m - n) * first) / determinant
            p = ((u - v) * second - (v - w) * first) / determinant
            yield Formula(p, u * (k + r) - p * k, r)


def _fits(formula: Formula, value: Any, size: int) -> bool:
    try:
        found = formula.at(size)
    except (NoFamilyError, ZeroDivisionError):
        return False
    return _same(found, value) if isinstance(value, float) else found == value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=CLOSE) or a == b or (math.isnan(a) and math.isnan(b))
    return type(a) is type(b) and bool(a == b)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_constants(ours: Program, theirs: Program) -> None:
    if (ours.slots, ours.results, ours.axes) != (theirs.slots, theirs.results, theirs.axes):
        raise NoFamilyError("they have other inputs or results")
    for slot, tensor in ours.constants.items():
        other = theirs.constants[slot]
        if tensor is not other and not (_alike(tensor, other) and torch.equal(tensor, other)):
            raise NoFamilyError(f"{slot} has other values")


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def _pairs(ours: Program, theirs: Program) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    a, b = list(_leaves(ours)), list(_leaves(theirs))
    if len(a) != len(b):
        raise NoFamilyError("the graphs are of different lengths")
    return zip(a, b, strict=True)


# ---- what stands in a program, one after another


def _parts(node: fx.Node) -> tuple[Any, Any, Any]:
    return node.args, dict(node.kwargs), node.meta.get("type")


def _leaves(program: Program) -> Iterator[tuple[str, Any]]:
    """Everything in a program, each with where it stands: nodes by their place, numbers, and the rest."""
    place = {node: i for i, node in enumerate(program.graph.nodes)}
    for node in program.graph.nodes:
        yield node.name, (node.op, str(node.target), str(node.meta.get("layout")))
        for part in _parts(node):
            found: list[Any] = []
            _mapped(part, lambda n: found.append(("node", place[n])), found.append, found.append)  # noqa: B023
            yield from ((node.name, leaf) for leaf in found)


def _mapped(
    value: Any,
    node: Callable[[fx.Node], Any],
    number: Callable[[Any], Any],
    other: Callable[[Any], Any] | None = None,
) -> Any:
    """A tree with its nodes and numbers replaced, in a fixed order."""
    match value:
        case fx.Node():
            return node(value)
        case TensorType():
            if other is not None:
                other((value.dtype, value.device, len(value.shape)))
            return replace(value, shape=tuple(number(n) for n in value.shape))
        case tuple() | list():
            if other is not None:
                other((type(value) is tuple, len(value)))
            return type(value)(_mapped(v, node, number, other) for v in value)
        case dict():
            if other is not None:
                other(tuple(value))
            return {key: _mapped(v, node, number, other) for key, v in value.items()}
    if _is_number(value):
        return number(value)
    if other is not None:
        other(value)
    return value
