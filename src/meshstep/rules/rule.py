"""What a sharding rule is: for one call of an op and ONE mesh axis, placements in and placements out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import fx
from torch.distributed.tensor.placement_types import Placement

from .._torch import OpOverload
from ..ir.collectives import COLLECTIVES
from ..ir.infer import infer
from ..ir.program import call as append_call
from ..ir.program import name_of
from ..ir.program import part as append_part
from ..ir.types import TensorType
from ..layout import REPLICATE, blocks, shard_dim, strided


@dataclass(frozen=True, slots=True)
class OpCall:
    """One call of an op, with a TensorType in place of each tensor.

    Args:
        op: The op, always a functional one.
        arguments: Every argument by its name in the schema, in schema order, defaults filled in.
        outputs: Types of the outputs, None where the op returns none; one for an op that returns a tensor.
    """

    op: OpOverload
    arguments: Mapping[str, Any]
    outputs: tuple[TensorType | None, ...]

    @classmethod
    def of(cls, op: OpOverload, args: tuple, kwargs: Mapping[str, Any], outputs: Any) -> OpCall:
        """Bind positional and keyword arguments (nodes or types) to the schema of `op`."""
        arguments = {}
        for i, argument in enumerate(op._schema.arguments):
            default = argument.default_value if argument.has_default_value() else None
            value = args[i] if i < len(args) else kwargs.get(argument.name, default)
            arguments[argument.name] = _types(value)
        return cls(op, arguments, outputs if isinstance(outputs, tuple) else (outputs,))

    def __getitem__(self, name: str) -> Any:
        """The argument of this name."""
        return self.arguments[name]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arguments that `tensors` belong to, one for each."""
        found: list[str] = []
        for name, value in self.arguments.items():
            found.extend(name for v in (value if isinstance(value, (list, tuple)) else (value,)) if _is_type(v))
        return tuple(found)

    @property
    def tensors(self) -> tuple[TensorType, ...]:
        """The tensor arguments in schema order; those of a list one after another; a missing one is left out."""
        found: list[TensorType] = []
        for value in self.arguments.values():
            found.extend(v for v in (value if isinstance(value, (list, tuple)) else (value,)) if _is_type(v))
        return tuple(found)

    def placed(self, placement: Placement) -> tuple[Placement | None, ...]:
        """One placement for all outputs; None where the op returns none."""
        return tuple(placed(type_, placement) for type_ in self.outputs)


@dataclass(frozen=True, slots=True)
class Rule:
    """Given inputs placed like this, the op on the local parts gives outputs placed like that.

    Args:
        inputs: One placement for each of `OpCall.tensors`.
        outputs: One placement for each output; None where the op returns none.
        local: Writes the local computation where it is more than the same op on smaller tensors.
        anywhere: Whether the local form holds for shards of any elements along a dim, not of neighbours only.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement | None, ...]
    local: Callable[[Local], tuple[fx.Node, ...]] | None = field(default=None, compare=False)
    anywhere: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Entry:
    """What the table knows of one op.

    Args:
        rules: All rules that a call has, without regard to divisibility; `replicate` need not be among them.
        localize: For a chosen rule and the number of ranks, the non-tensor arguments that change, by name
            (a `size` that names the output's shape, say). Not asked where the rule has a local form.
        permutes: Whether a shard may be of any elements along its dim, in any order. A rule without a local form runs
            the same op on each shard, so that it may, unless the op takes neighbours together (groups of channels).
        blocks: Further rules for dims that are sharded in blocks (`layout.strided`), for the numbers of blocks and of
            ranks.
    """

    rules: Callable[[OpCall], Iterable[Rule]]
    localize: Callable[[OpCall, Rule, int], Mapping[str, Any]] | None = None
    permutes: bool = True
    blocks: Callable[[OpCall, frozenset[int], int], Iterable[Rule]] | None = None


Table = dict[OpOverload, Entry]


@dataclass(frozen=True, slots=True)
class Local:
    """What a local form works with.

    Args:
        graph: Where it appends its nodes, by `emit`.
        call: The call in the view of the axis's whole, with types.
        arguments: The call's arguments by name, with local nodes in place of tensors.
        axis: Name of the mesh axis.
        size: Number of ranks along it.
        source: The user's line that the emitted nodes belong to.
    """

    graph: fx.Graph
    call: OpCall
    arguments: Mapping[str, Any]
    axis: str
    size: int
    source: str = ""

    def __getitem__(self, name: str) -> Any:
        """The argument of this name: a node where it is a tensor, the default where it is not given."""
        value = self.arguments.get(name)
        return self.call[name] if value is None else value

    def again(self, /, **changed: Any) -> fx.Node:
        """Append the same op on this rank's arguments, some of them changed."""
        arguments = {name: self[name] for name in self.call.arguments}
        args, kwargs = spelled(self.call.op, arguments | changed)
        return self.emit(self.call.op, *args, **kwargs)

    def parts(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Append the outputs of a call with several."""
        return tuple(append_part(self.graph, node, i) for i in range(len(node.meta["type"])))

    def emit(self, op: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
        """Append a call with inferred type."""
        node = append_call(self.graph, op, args, kwargs, type=infer(op, args, kwargs), source=self.source)
        if op in COLLECTIVES:
            node.meta["why"] = f"{name_of(self.call.op)} is computed in shards"
        return node


@cache
def tensor_names(op: OpOverload) -> tuple[str, ...]:
    """The names of all arguments of an op that are tensors or lists of them, optional ones too."""
    return tuple(a.name for a in op._schema.arguments if "Tensor" in str(a.type))


def spelled(op: OpOverload, arguments: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Arguments by name as positional and keyword ones, without those at the end that are as by default."""
    schema = op._schema.arguments
    args = [(a, arguments[a.name]) for a in schema if not a.kwarg_only]
    while args and _is_default(*args[-1]):
        args.pop()
    named = [(a, arguments[a.name]) for a in schema if a.kwarg_only]
    return tuple(v for _, v in args), {a.name: v for a, v in named if not _is_default(a, v)}


def _is_default(argument: Any, value: Any) -> bool:
    return argument.has_default_value() and not isinstance(value, fx.Node) and value == argument.default_value


def placed(type_: TensorType | None, placement: Placement) -> Placement | None:
    """The placement of an output; None if the op does not return it."""
    return None if type_ is None else placement


def replicate(call: OpCall) -> Rule:
    """The rule that every op has: all inputs whole, all outputs whole."""
    return Rule((REPLICATE,) * len(call.tensors), call.placed(REPLICATE))


def even_rules(
    call: OpCall, entry: Entry | None, found: Iterable[Rule], size: int, counts: frozenset[int]
) -> tuple[Rule, ...]:
    """`replicate` first, then the rules whose shards are even, each once.

    Args:
        call: The call.
        entry: What is known of its op.
        found: The rules that it has.
        size: Number of ranks.
        counts: The numbers of blocks that dims may be sharded in.
    """
    rules = list(found)
    if counts and entry is not None:
        more = [_in_blocks(rule, count) for count in sorted(counts) for rule in rules if _permutes(entry, rule)]
        rules += [*more, *(entry.blocks(call, counts, size) if entry.blocks else ())]
    return tuple(dict.fromkeys([replicate(call), *(rule for rule in rules if divides(call, rule, size))]))


def _permutes(entry: Entry, rule: Rule) -> bool:
    sharded = any(p is not None and shard_dim(p) is not None for p in (*rule.inputs, *rule.outputs))
    return entry.permutes and sharded and (rule.local is None or rule.anywhere)


def _in_blocks(rule: Rule, count: int) -> Rule:
    """The rule for shards of each of `count` blocks instead of shards of the dim."""

    def changed(placement: Placement | None) -> Placement | None:
        dim = None if placement is None else shard_dim(placement)
        return placement if dim is None else strided(dim, count)

    inputs = tuple(changed(placement) or REPLICATE for placement in rule.inputs)
    return Rule(inputs, tuple(map(changed, rule.outputs)), rule.local, rule.anywhere)


def divides(call: OpCall, rule: Rule, size: int) -> bool:
    """Whether every shard that a rule speaks of is even, and every sharded dim is there."""
    pairs = [*zip(call.tensors, rule.inputs, strict=True), *zip(call.outputs, rule.outputs, strict=True)]
    return all(type_ is None or _fits(type_, placement, size) for type_, placement in pairs)


def _fits(type_: TensorType, placement: Placement | None, size: int) -> bool:
    dim = shard_dim(placement) if placement is not None else None
    if placement is None or dim is None:
        return True
    return dim < type_.ndim and type_.shape[dim] > 0 and type_.shape[dim] % (size * blocks(placement)) == 0


def _is_type(value: Any) -> bool:
    return isinstance(value, TensorType)


def _types(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return value.meta["type"]
    return [_types(v) for v in value] if isinstance(value, (list, tuple)) else value
