"""The algebra that the table is written in: factors that can be sharded, arguments in which an op is linear."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.distributed.tensor.placement_types import Placement

from ..errors import RuleError
from ..ir.types import TensorType
from ..layout import PARTIAL, REPLICATE, shard
from .rule import OpCall, Rule, placed, tensor_names

Rules = Callable[[OpCall], Iterable[Rule]]
Linear = str | tuple[frozenset[str], ...]
Origins = Callable[[OpCall], Sequence[int | None]]

_MORE = "αβγδεζηθικλμνξοπρστυφχψω"  # the letters that `...` stands for


def factor(spec: str, linear: Linear = ()) -> Rules:
    """Rules of an op whose dims are products of independent factors.

    Args:
        spec: A term for each tensor argument, `->`, a term for each output; `"mk,kn->mn"`. A letter is a factor.
            Sharding it shards every dim that bears it and leaves a sum over the ranks in an output without it.
            A capital letter, and `1`, are never sharded. `...` is any number of further factors. A tensor with
            fewer dims than its term has the last of them; a dim of size 1 against a larger one is broadcast;
            the term of a missing optional tensor is passed over. `=` is a tensor that has nothing to do with the
            factors.
        linear: See `partials`.

    Raises:
        RuleError: The spec is no text of such a form, or there is no such linearity.
    """
    if not isinstance(spec, str) or spec.count("->") != 1:
        raise RuleError(f"{spec!r} is no spec of factors", at="rules.factor(spec)", hint='"mk,kn->mn"')
    if linear not in ("all", "each", "first") and not isinstance(linear, tuple):
        raise RuleError(f"linear in {linear!r}", at="rules.factor(linear=...)", hint='"all", "each", "first", or sets')

    def rules(call: OpCall) -> Iterator[Rule]:
        yield from sharded(call, spec)
        yield from partials(call, linear)

    return rules


def sharded(call: OpCall, spec: str) -> Iterator[Rule]:
    """The rules that shard one factor of `spec` each. See `factor`."""
    inputs, outputs = _bind(call, spec)
    for letter in dict.fromkeys("".join(dims.labels for dims in (*inputs, *outputs))):
        if letter.islower():
            yield from _shard(letter, inputs, outputs)


def partials(call: OpCall, linear: Linear) -> Iterator[Rule]:
    """The rules by which a sum over the ranks passes through an op that is linear.

    Args:
        call: The call.
        linear: In what the op is linear: `"all"` its tensors together, `"each"` of them alone while the others are
            whole, the `"first"` of them alone, or sets of names of arguments, each set together.
    """
    for names in _groups(call, linear):
        inputs = tuple(PARTIAL if name in names else REPLICATE for name in call.names)
        if PARTIAL in inputs and _adds_up(call, names):
            yield Rule(inputs, call.placed(PARTIAL))


def together(*names: str) -> frozenset[str]:
    """Arguments that an op is linear in when taken together."""
    return frozenset(names)


def follow(origins: Origins, linear: Linear = ()) -> Rules:
    """Rules of an op whose output dims each carry on a dim of the inputs.

    Args:
        origins: For each dim of an output, the dim of the inputs that it carries on; None where it may not be sharded.
        linear: See `partials`.
    """

    def rules(call: OpCall) -> Iterator[Rule]:
        for to, dim in enumerate(origins(call)):
            if dim is not None:
                yield alike(call, dim, to)
        yield from partials(call, linear)

    return rules


def alike(call: OpCall, dim: int, to: int | None = None) -> Rule:
    """All inputs sharded on `dim`, all outputs on `to` (the same dim if not given)."""
    return Rule((shard(dim),) * len(call.tensors), call.placed(shard(dim if to is None else to)))


def apart_from(*names: str) -> Origins:
    """Every dim carries on as it is, apart from those that these arguments name."""

    def origins(call: OpCall) -> list[int | None]:
        ndim = call.tensors[0].ndim
        fixed = {d for name in names for d in dims_of(call[name], ndim)}
        return [None if d in fixed else d for d in range(ndim)]

    return origins


def all_but_last(count: int) -> Origins:
    """Every dim carries on as it is, apart from the last `count`."""
    return lambda call: range(call.tensors[0].ndim - count)


def dims_of(value: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """The dims that an argument names, counted from 0; all of them for None and for an empty list."""
    if value is None or value == []:
        return tuple(range(ndim))
    values = [value] if isinstance(value, int) else value
    return tuple(dict.fromkeys(d % max(ndim, 1) for d in values))


@dataclass(frozen=True, slots=True)
class _Dims:
    """A tensor with a label for each dim."""

    type: TensorType | None
    labels: str
    apart: bool = False

    def size(self, letter: str) -> int:
        """Size of the dim that bears a letter; 1 if none does."""
        return self.type.shape[self.labels.index(letter)] if self.type and letter in self.labels else 1


def _bind(call: OpCall, spec: str) -> tuple[list[_Dims], list[_Dims]]:
    left, right = (side.split(",") for side in spec.replace(" ", "").split("->"))
    terms = dict(zip(tensor_names(call.op), left, strict=True))
    pairs = [*zip(call.tensors, (terms[name] for name in call.names), strict=True)]
    more = max((type_.ndim - len(term.replace("...", "")) for type_, term in pairs if "..." in term), default=0)
    inputs = [_label(type_, term, more) for type_, term in pairs]
    return inputs, [_label(type_, term, more) for type_, term in zip(call.outputs, right, strict=True)]


def _label(type_: TensorType | None, term: str, more: int) -> _Dims:
    if term == "=":
        return _Dims(type_, "", apart=True)
    labels = term.replace("...", _MORE[:more])
    missing = len(labels) - (type_.ndim if type_ else 0)
    assert missing >= 0, f"{type_} has more dims than the term {term!r}"
    return _Dims(type_, labels[missing:])


def _shard(letter: str, inputs: list[_Dims], outputs: list[_Dims]) -> Iterator[Rule]:
    if all(dims.size(letter) == 1 for dims in inputs):
        return
    after = tuple(placed(d.type, _place(letter, d, REPLICATE if d.apart else PARTIAL)) for d in outputs)
    yield Rule(tuple(_place(letter, d, REPLICATE) for d in inputs), after)


def _place(letter: str, dims: _Dims, without: Placement) -> Placement:
    return shard(dims.labels.index(letter)) if dims.size(letter) != 1 else without


def _groups(call: OpCall, linear: Linear) -> Iterator[frozenset[str]]:
    names = tensor_names(call.op)
    match linear:
        case "all":
            yield frozenset(names)
        case "each":
            yield from (frozenset({name}) for name in names)
        case "first":
            yield frozenset(names[:1])
        case _:
            assert not isinstance(linear, str), linear
            yield from linear


def _adds_up(call: OpCall, names: frozenset[str]) -> bool:
    """Whether parts may stand for a sum: no number among the arguments, no unsigned or bool, no float made an int."""
    if any(isinstance(call[name], (int, float, complex)) for name in names):
        return False
    parts = [type_.dtype for type_, name in zip(call.tensors, call.names) if name in names]
    sums = [type_.dtype for type_ in call.outputs if type_]
    exact = all(dtype.is_signed for dtype in (*parts, *sums))
    return exact and not (any(map(_rounded, sums)) < any(map(_rounded, parts)))


@lru_cache
def _rounded(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
