"""What "colwise" and "rowwise" mean for a parameter: found from how the program uses it, whatever module it is of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from ..errors import PlanError
from ..ir.program import Program, is_part, producer
from ..layout import REPLICATE, shard, shard_dim, strided
from ..rules import Rule
from ..rules.views import view_dims
from .calls import Calls

aten = torch.ops.aten
_VIEWS = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
_SPLITS = frozenset(
    {aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor, aten.chunk.default, aten.unbind.int}
)
Value = tuple[fx.Node, int]


@dataclass(slots=True)
class _Use:
    """What becomes of a dim of a parameter in the forward.

    Args:
        blocks: Equal parts that the dim is cut into, each of which is used by itself.
        heads: Views that split what becomes of the dim: the node, and the sizes of the parts, leading ones first.
    """

    blocks: int
    heads: list[tuple[fx.Node, tuple[int, ...]]]


class Styles:
    """Finds the dims of parameters by their role.

    Args:
        program: A program that is partitioned along no axis.
    """

    def __init__(self, program: Program) -> None:
        """Look nothing up yet."""
        self._calls = Calls(program, 1)  # of one rank: every dim divides

    def placement(self, node: fx.Node, style: str, name: str, axis: str, size: int) -> Placement:
        """The placement that a style gives a parameter.

        Args:
            node: The parameter's placeholder.
            style: "colwise" or "rowwise".
            name: Its name, for errors.
            axis: Name of the mesh axis.
            size: Number of ranks along it.

        Raises:
            PlanError: The features, or the heads that they are split into, do not divide; or no matrix product, lookup
                or convolution uses the parameter.
        """
        shape = node.meta["type"].shape
        if style == "rowwise" and len(shape) < 2:
            return REPLICATE
        dim = 0 if len(shape) == 1 else self._dim(node, style)
        if dim is None:
            raise PlanError(
                f"{style!r} for a parameter that no matrix product, lookup or convolution uses",
                at=f"parameter {name} {list(shape)}",
                hint="a placement instead of a style, or leave it out: it stays whole; to materialize, the plan of a "
                "lowered step, which has placements",
            )
        use = self._use(node, dim) if style == "colwise" else _Use(1, [])
        if size > 1:
            _check(shape, dim, use, style, name, axis, size)
        return strided(dim, use.blocks)

    def _dim(self, node: fx.Node, style: str) -> int | None:
        roles = (self._role((node, 0), dim) for dim in range(node.meta["type"].ndim))
        return next((dim for dim, role in enumerate(roles) if role == style), None)

    def _role(self, value: Value, dim: int) -> str | None:
        """What the first call that does more than move elements makes of a dim: one of its output's, or a sum."""
        for user, rule in self._uses(value, dim):
            after = rule.outputs[0]
            if len(rule.inputs) == 1 and after is not None and (moved := shard_dim(after)) is not None:
                found = self._role((user, 0), moved)
            elif isinstance(after, Partial):
                found = "rowwise"
            elif after is not None and shard_dim(after) is not None and self._alone(user, rule, value):
                found = "colwise"
            else:
                found = None
            if found:
                return found
        return None

    def _use(self, node: fx.Node, dim: int) -> _Use:
        """Follow the dim through the forward."""
        found, seen = _Use(1, []), set[tuple[Value, int]]()
        stack: list[tuple[Value, int]] = [((node, 0), dim)]
        while stack:
            value, dim = stack.pop()
            if (value, dim) in seen:
                continue
            seen.add((value, dim))
            for user in _users(value):
                if user.target in _SPLITS and _along(user, dim):
                    found.blocks = max(found.blocks, _equal_parts(user))
                    stack += [((user, i), dim) for i in range(len(user.meta["type"])) if user.target != aten.unbind.int]
            for user, rule in self._uses(value, dim):
                if user.target in _VIEWS and (sizes := _parts(user, dim)):
                    found.heads.append((user, sizes))
                stack += [
                    ((user, i), moved)
                    for i, after in enumerate(rule.outputs)
                    if after is not None and (moved := shard_dim(after)) is not None
                ]
        return found

    def _uses(self, value: Value, dim: int) -> Iterator[tuple[fx.Node, Rule]]:
        """The calls of the forward that can use a value sharded on a dim, each with the rule that does."""
        for user in _users(value):
            places = [i for i, n in enumerate(self._calls.tensors(user)) if producer(n) == value]
            fitting = [rule for rule in self._calls.rules(user) if all(rule.inputs[i] == shard(dim) for i in places)]
            if places and fitting:
                yield user, min(fitting, key=lambda rule: not self._alone(user, rule, value))

    def _alone(self, user: fx.Node, rule: Rule, value: Value) -> bool:
        """Whether a rule shards a weight, perhaps with its bias, and no input."""
        ndim = max(n.meta["type"].ndim for n in self._calls.tensors(user) if producer(n) == value)
        others = zip(self._calls.tensors(user), rule.inputs, strict=True)
        return all(p == REPLICATE or n.meta["type"].ndim < ndim for n, p in others if producer(n) != value)


def _check(shape: tuple[int, ...], dim: int, use: _Use, style: str, name: str, axis: str, size: int) -> None:
    if shape[dim] % (size * use.blocks):
        what = "output" if style == "colwise" else "input"
        parts = f" (in {use.blocks} parts)" if use.blocks > 1 else ""
        raise PlanError(
            f"{shape[dim]} {what} features{parts} do not divide over {size} ranks",
            at=f"parameter {name} {list(shape)}, axis {axis!r}",
            hint="another size of the axis, or leave the module out of the plan: it stays whole",
        )
    for view, sizes in use.heads:
        heads = sizes[sizes[0] == use.blocks]  # a view may split off the parts first
        if heads % size:
            raise PlanError(
                f"{heads} heads do not divide over {size} ranks",
                at=f"parameter {name} {list(shape)}, axis {axis!r}, split at {view.meta['source'] or '%' + view.name}",
                hint=f"an axis of a size that divides {heads}, or leave the module out of the plan: it stays whole",
            )


def _users(value: Value) -> Iterator[fx.Node]:
    """The calls of the forward that use an output of a call."""
    node, index = value
    for user in node.users:
        if is_part(user):
            if user.args[1] == index:
                yield from (n for n in user.users if n.op == "call_function" and not n.meta.get("backward"))
        elif user.op == "call_function" and not user.meta.get("backward"):
            yield user


def _along(split: fx.Node, dim: int) -> bool:
    args = split.args
    place = 1 if split.target == aten.unbind.int else 2
    along = args[place] if len(args) > place else split.kwargs.get("dim", 0)
    return along % args[0].meta["type"].ndim == dim  # type: ignore[union-attr]


def _equal_parts(split: fx.Node) -> int:
    types = split.meta["type"]
    return len(types) if len(set(types)) == 1 else 1


def _parts(view: fx.Node, dim: int) -> tuple[int, ...]:
    """The sizes that a view splits `dim` into; none if it does not split it."""
    before, after = view.args[0].meta["type"].shape, view.meta["type"].shape  # type: ignore[union-attr]
    to = next((j for i, j in view_dims(before, after) if i == dim), None)
    return () if to is None or after[to] >= before[dim] else after[to:]
