"""No rule is believed: the op is run whole and in shards, and what the shards give must be what the whole gives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from .. import layout
from .._torch import OpOverload
from ..ir import collectives
from ..ir.collectives import COLLECTIVES
from ..ir.types import TensorType
from ..layout import local_shape, placement_text
from .factories import UNINITIALIZED
from .lookup import localize, rules_for
from .rule import Local, OpCall, Rule

Outputs = tuple[Any, ...]

_AXIS = "validated"
_REDUCTIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}
_NOT_FINITE = (0.0, 0.0, 0.0)
_TOLERANCE = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-4, torch.complex64: 1e-4}


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that is wrong.

    Args:
        op: The op.
        rule: The rule.
        size: On how many ranks it is wrong.
        what: What was found.
    """

    op: OpOverload
    rule: Rule
    size: int
    what: str

    def __str__(self) -> str:
        """`aten.sum.default over 2 ranks: S(0) -> R: output 0 is off by 3.1`."""
        before = ", ".join(map(placement_text, self.rule.inputs))
        after = ", ".join(placement_text(p) if p else "none" for p in self.rule.outputs)
        return f"{self.op} over {self.size} ranks: {before} -> {after}: {self.what}"


def validate(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    size: int = 2,
    blocks: frozenset[int] = frozenset(),
    rules: Iterable[Rule] | None = None,
    run: Callable[..., Any] | None = None,
) -> list[Finding]:
    """Run every rule of one call against the op itself.

    Args:
        op: The op. For a collective of the IR, its tensor is given as a list: one for each rank of the collective's
            own axis.
        args: Real arguments, tensors best in float64, different in every shard.
        kwargs: Likewise.
        size: Number of ranks that the rules shard over.
        blocks: The numbers of blocks that dims may be sharded in, besides plain shards.
        rules: The rules to run; those of the catalogue if not given.
        run: What to run in place of the op, where it cannot be run on this machine.

    Returns:
        What is wrong; empty if nothing is.
    """
    trial = Trial.of(op, args, kwargs or {}, size, run)
    chosen = rules_for(trial.call, size, blocks) if rules is None else rules
    faults = ((rule, trial.fault(rule)) for rule in chosen)
    return [Finding(op, rule, size, what) for rule, what in faults if what]


@dataclass(frozen=True, slots=True)
class Trial:
    """One call of an op, with real tensors.

    Args:
        call: The call in types.
        arguments: Its arguments by name.
        whole: What the op gives.
        size: Number of ranks.
        run: Computes the op from its arguments by name.
    """

    call: OpCall
    arguments: Mapping[str, Any]
    whole: Outputs
    size: int
    run: Callable[..., Any]

    @classmethod
    def of(
        cls,
        op: OpOverload,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        size: int,
        run: Callable[..., Any] | None = None,
    ) -> Trial:
        """Run the op whole."""
        arguments = bind(op, args, kwargs)
        run = run or (functools.partial(_communicate, op) if op in COLLECTIVES else op)
        whole = _flat(run(**arguments))
        first = {name: v[0] if _is_lanes(op, v) else v for name, v in arguments.items()}
        types = _replaced(first, map(TensorType.of, _tensors(first)))
        outputs = tuple(TensorType.of(o) if isinstance(o, Tensor) else None for o in whole)
        shown = outputs[:1] if op in COLLECTIVES else outputs
        return cls(OpCall.of(op, (), types, shown), arguments, whole, size, run)

    def fault(self, rule: Rule) -> str | None:
        """What is wrong with a rule; None if nothing is."""
        lanes = len(self.whole) if self.call.op in COLLECTIVES else 1
        inputs, outputs = rule.inputs * lanes, rule.outputs * lanes
        try:
            parts = self._run(rule, self._local_arguments(rule, inputs))
        except (RuntimeError, IndexError, ValueError) as error:
            return f"the op fails on a shard: {error}"
        exact = not any(isinstance(p, Partial) for p in inputs)
        found = (self._compare(i, [p[i] for p in parts], p_, exact) for i, p_ in enumerate(outputs))
        return next((what for what in found if what), None)

    def _local_arguments(self, rule: Rule, placements: Sequence[Placement]) -> list[dict[str, Any]]:
        """Each rank's arguments."""
        parts = [split(t, p, self.size) for t, p in zip(_tensors(self.arguments), placements, strict=True)]
        changed = {} if rule.local else localize(self.call, rule, self.size)
        ranks = zip(*parts) if parts else [()] * self.size
        return [_replaced(self.arguments, own) | changed for own in ranks]

    def _run(self, rule: Rule, arguments: list[dict[str, Any]]) -> list[Outputs]:
        """Each rank's outputs."""
        if rule.local is None:
            return [_flat(self.run(**own)) for own in arguments]
        return _interpret(rule.local, self.call, arguments)

    def _compare(self, i: int, parts: list[Any], placement: Placement | None, exact: bool) -> str | None:
        whole = self.whole[i]
        if not isinstance(whole, Tensor) or placement is None:
            agree = not isinstance(whole, Tensor) and placement is None
            return None if agree else f"output {i} is {whole}, placed {placement}"
        expected = local_shape(whole.shape, placement, _AXIS, self.size)
        shapes = {tuple(p.shape) for p in parts}
        if shapes != {expected}:
            return f"output {i} has local shapes {sorted(shapes)}, and not {expected}"
        if {p.dtype for p in parts} != {whole.dtype}:
            return f"output {i} has another dtype than {whole.dtype}"
        values = () if self.call.op in UNINITIALIZED else combinations(parts, placement)
        return next((f"output {i} {what}" for v in values if (what := _difference(v, whole, exact))), None)


def bind(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name, defaults filled in."""
    schema = op._schema.arguments
    given = {a.name: v for a, v in zip(schema, args)} | dict(kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def _tensors(arguments: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors among some arguments, those of lists too."""
    for value in arguments.values():
        yield from (v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, Tensor))


def _replaced(arguments: Mapping[str, Any], tensors: Iterable[Any]) -> dict[str, Any]:
    """The same arguments with others in place of the tensors."""
    new = iter(tensors)

    def replaced(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [replaced(v) for v in value]
        return next(new) if isinstance(value, Tensor) else value

    return {name: replaced(value) for name, value in arguments.items()}


# ---- placements of real tensors


def split(whole: Tensor, placement: Placement, size: int) -> list[Tensor]:
    """A part for each rank, which together are `whole`."""
    if isinstance(placement, Partial):
        assert placement.reduce_op == "sum", placement
        others = _noise(whole, size - 1)
        return [*others, whole - sum(others)]
    return [part.contiguous() for part in layout.split(whole, placement, size)]


def _noise(like: Tensor, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(like.numel())
    draws = (torch.randn(like.shape, dtype=torch.float64, generator=generator) for _ in range(count))
    return [(draw * 9).to(like.dtype) for draw in draws]


def combinations(parts: list[Tensor], placement: Placement) -> list[Tensor]:
    """The whole values that the parts stand for: one, or one for each rank where each should hold it."""
    if isinstance(placement, Partial):
        return [reduce(parts, placement.reduce_op)]
    return parts if layout.shard_dim(placement) is None else [layout.join(parts, placement)]


def reduce(parts: Sequence[Tensor], op: str) -> Tensor:
    """Sum, largest or smallest element over the ranks."""
    return functools.reduce(_REDUCTIONS[op], parts)


def _difference(value: Tensor, whole: Tensor, exact: bool) -> str | None:
    """What is wrong with a value. If not `exact`, infinite may be not a number: so it is with a sum of parts."""
    if not (whole.dtype.is_floating_point or whole.dtype.is_complex):
        return None if torch.equal(value, whole) else f"differs in {(value != whole).sum()} elements"
    if not exact:
        value, whole = value.nan_to_num(*_NOT_FINITE), whole.nan_to_num(*_NOT_FINITE)
    scale = whole.abs().nan_to_num(0.0, 0.0, 0.0).max().item() if whole.numel() else 0.0
    tolerance = _TOLERANCE.get(whole.dtype, 2e-2)
    if torch.allclose(value, whole, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
        return None
    return f"is off by {(value - whole).abs().nan_to_num().max().item():.3g}"


# ---- running


def _flat(output: Any) -> Outputs:
    return tuple(output) if isinstance(output, (tuple, list)) else (output,)


def _is_lanes(op: OpOverload, value: Any) -> bool:
    return op in COLLECTIVES and isinstance(value, list)


def _communicate(op: OpOverload, /, x: Sequence[Tensor] = (), **rest: Any) -> list[Tensor]:
    return over_ranks(op, x, list(rest.values()))


def over_ranks(op: OpOverload, parts: Sequence[Tensor], rest: Sequence[Any], size: int | None = None) -> list[Tensor]:
    """A collective of the IR over the list of all ranks' tensors.

    Args:
        op: The collective.
        parts: Its tensor, for each rank.
        rest: Its other arguments.
        size: Number of ranks, where `parts` does not say it.
    """
    count = size or len(parts)
    match op:
        case collectives.all_reduce:
            return [reduce(parts, rest[0])] * count
        case collectives.all_gather:
            return [torch.cat(list(parts), rest[0])] * count
        case collectives.reduce_scatter:
            return list(reduce(parts, rest[1]).chunk(count, rest[0]))
        case collectives.all_to_all:
            pieces = [part.chunk(count, rest[0]) for part in parts]
            return [torch.cat([p[rank] for p in pieces], rest[1]) for rank in range(count)]
        case collectives.axis_slice:
            return [part.chunk(count, rest[0])[rank] for rank, part in enumerate(parts)]
    assert op is collectives.axis_index, op
    return [torch.tensor(rank) for rank in range(count)]


def _interpret(form: Callable[[Local], tuple[fx.Node, ...]], call: OpCall, ranks: list[dict]) -> list[Outputs]:
    """Let a local form write its graph, and run that on all ranks, node by node."""
    graph = fx.Graph()
    values: dict[fx.Node, list[Any]] = {}

    for tensors in zip(*map(_tensors, ranks)):
        node = graph.placeholder(f"x{len(values)}")
        node.meta["type"] = TensorType.of(tensors[0])
        values[node] = list(tensors)
    inputs = _replaced(ranks[0], list(values))
    outputs = form(Local(graph, call, inputs, _AXIS, len(ranks)))
    for node in graph.nodes:
        if node.op == "call_function":
            values[node] = _step(node, values, len(ranks))
    return [tuple(values[node][rank] for node in outputs) for rank in range(len(ranks))]


def _step(node: fx.Node, values: Mapping[fx.Node, list[Any]], size: int) -> list[Any]:
    if node.target in COLLECTIVES:
        tensors = [a for a in node.args if isinstance(a, fx.Node)]
        rest = [a for a in node.args if not isinstance(a, fx.Node)]
        return over_ranks(node.target, values[tensors[0]] if tensors else [], rest, size)
    op: Any = node.target
    own = ({n: v[rank] for n, v in values.items()} for rank in range(size))
    return [op(*fx.map_arg(node.args, e.get), **fx.map_arg(node.kwargs, e.get)) for e in own]
