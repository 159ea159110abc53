"""Rewrites a program for one mesh axis: from the axis's whole to one rank's part.

Sharded values get their local shape, and where the placement that a producer gives differs from the one that a
consumer's rule wants, a collective is inserted. For a mesh of several axes the same function is applied once per axis,
inner axis first: the second application sees an ordinary program with smaller shapes and some collectives in it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from .errors import RuleError
from .ir import collectives
from .ir.cause import Cause, Party
from .ir.infer import infer
from .ir.printer import op_text, value_text
from .ir.program import Program, Result, call, copy_node, is_part, part, producer
from .ir.types import TensorType
from .layout import REPLICATE, Layout, blocks, local_shape, placement_text, shard, shard_dim
from .plan.calls import Calls
from .plan.decision import Decision
from .rules import Local, Rule, localize

aten = torch.ops.aten


def partition(program: Program, decision: Decision) -> Program:
    """One rank's program along one axis.

    Args:
        program: A program not yet partitioned along `decision.axis`; not changed.
        decision: The placements.

    Returns:
        A new program whose `axes` has one more axis.

    Raises:
        RuleError: A rule's local form gives other types than its placements say.
    """
    return partition_traced(program, decision)[0]


def partition_traced(program: Program, decision: Decision) -> tuple[Program, Mapping[tuple[fx.Node, int], fx.Node]]:
    """As `partition`, with the node that holds one rank's part of each value, by its producer and output index.

    Args:
        program: As for `partition`.
        decision: Likewise.
    """
    made = _Partition(program, decision)
    return made.run(), made.local


class _Partition:
    """The walk over one program."""

    def __init__(self, program: Program, decision: Decision) -> None:
        self.program, self.decision = program, decision
        self.axis, self.size = decision.axis, program.mesh[decision.axis]
        self.calls = Calls(program, self.size)
        self.graph = fx.Graph()
        self.slots = {node: slot for slot, node in program.inputs}
        self.local: dict[tuple[fx.Node, int], fx.Node] = {}  # by producer and index of its output
        self.placed: dict[tuple[fx.Node, int], Placement] = {}
        self.moved: dict[tuple[fx.Node, int, Placement], fx.Node] = {}
        self.made: dict[fx.Node, fx.Node] = {}  # calls with several outputs, whose parts are made where they were

    def run(self) -> Program:
        inputs = iter(self.decision.inputs)
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self._input(node, next(inputs))
            elif is_part(node):
                self._part(node)
            elif node.op == "call_function":
                self._call(node, self.decision.rules[node])
        outputs = [
            self._as(node, placement, result)
            for (result, node), placement in zip(self.program.outputs, self.decision.outputs, strict=True)
        ]
        self.graph.output(tuple(outputs))
        return replace(self.program, graph=self.graph, axes=(*self.program.axes, self.axis))

    def _input(self, node: fx.Node, placement: Placement) -> None:
        new = copy_node(self.graph, node, {})
        new.meta.update(
            type=self._local_type(node.meta["type"], placement),
            layout=self._layout(node.meta["layout"], placement),
        )
        self.local[node, 0], self.placed[node, 0] = new, placement

    def _call(self, node: fx.Node, rule: Rule) -> None:
        given = iter(rule.inputs)
        named = list(enumerate(_names(node.target)))
        values = {name: node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in named}
        arguments = {name: self._localized(value, given, node) for name, value in values.items()}
        for index, placement in enumerate(rule.outputs):
            if placement is not None:
                self.placed[node, index] = placement
        if rule.local is not None:
            self._local_form(node, rule, arguments)
        else:
            self._same_op(node, rule, arguments)

    def _localized(self, value: Any, given: Any, user: fx.Node) -> Any:
        if isinstance(value, fx.Node):
            return self._as(value, next(given), user)
        return [self._localized(v, given, user) for v in value] if isinstance(value, (list, tuple)) else value

    def _same_op(self, node: fx.Node, rule: Rule, arguments: dict[str, Any]) -> None:
        changed = {} if _is_whole(rule) else localize(self.calls.call(node), rule, self.size)
        arguments |= changed
        names = _names(node.target)
        args = tuple(arguments[name] for name in names[: len(node.args)])
        kwargs = {name: arguments[name] for name in names[len(node.args) :] if name in node.kwargs or name in changed}
        types, layouts = node.meta["type"], node.meta["layout"]
        if isinstance(types, tuple):
            type_: Any = tuple(self._local_type(t, p) for t, p in zip(types, rule.outputs, strict=True))
            layout: Any = tuple(self._layout(t, p) for t, p in zip(layouts, rule.outputs, strict=True))
        else:
            type_, layout = self._local_type(types, rule.outputs[0]), self._layout(layouts, rule.outputs[0])
        new = call(self.graph, node.target, args, kwargs, type=type_, layout=layout, name=node.name)
        new.meta.update(node.meta | {"type": type_, "layout": layout})
        if isinstance(types, tuple):
            self.made[node] = new
        else:
            self.local[node, 0] = new

    def _local_form(self, node: fx.Node, rule: Rule, arguments: dict[str, Any]) -> None:
        assert rule.local is not None
        form = Local(self.graph, self.calls.call(node), arguments, self.axis, self.size, node.meta["source"])
        types, layouts = node.meta["type"], node.meta["layout"]
        several, before = isinstance(types, tuple), len(self.graph.nodes)
        outputs = rule.local(form)
        for new in itertools.islice(reversed(self.graph.nodes), len(self.graph.nodes) - before):
            new.meta.update(module=node.meta.get("module", ""), backward=node.meta.get("backward", False))
        for index, new in enumerate(outputs):
            placement = rule.outputs[index]
            want = self._local_type(types[index] if several else types, placement)
            if new.meta["type"] != want:
                raise RuleError(
                    f"the local form of {node.target} gives {new.meta['type']}, its rule says {want}",
                    at=f"{node.meta['source'] or '%' + node.name}, along axis {self.axis!r}",
                    hint="a local form gives each output in the placement that its rule says",
                )
            new.meta["layout"] = self._layout(layouts[index] if several else layouts, placement)
            if is_part(new):
                made, place = producer(new)
                made.meta["layout"] = tuple(
                    new.meta["layout"] if i == place else layout for i, layout in enumerate(made.meta["layout"])
                )
            self.local[node, index] = new

    def _part(self, node: fx.Node) -> None:
        made, index = producer(node)
        if made in self.made and (made, index) not in self.local:
            self.local[made, index] = part(self.graph, self.made[made], index)

    def _as(self, node: fx.Node, placement: Placement, user: fx.Node | Result) -> fx.Node:
        """The local value of a node, in the placement that a consumer wants."""
        value = producer(node)
        have = self.placed[value]
        if have == placement:
            return self.local[value]
        key = (*value, placement)
        if key not in self.moved:
            cause = Cause(self.axis, value_text(node), value[1], self._maker(value[0], have), _user(user, placement))
            self.moved[key] = self._redistribute(node, have, placement, cause, user)
        return self.moved[key]

    def _maker(self, made: fx.Node, have: Placement) -> Party:
        what = str(self.slots[made]) if made in self.slots else op_text(made.target)
        return Party(made.name, what, have, made.meta.get("source", ""), made.meta.get("module", ""))

    def _redistribute(
        self, node: fx.Node, have: Placement, want: Placement, cause: Cause, user: fx.Node | Result
    ) -> fx.Node:
        in_blocks = next((p for p in (have, want) if blocks(p) > 1), None)
        if in_blocks is None:
            sent = self._send(node, self.local[producer(node)], have, want, cause)
            type_, layout = self._local_type(node.meta["type"], want), self._layout(node.meta["layout"], want)
            sent.meta.update(type=type_, layout=layout)
            return sent
        if shard_dim(have) is not None and shard_dim(want) is not None:
            have, value = REPLICATE, self._as(node, REPLICATE, user)
        else:
            value = self.local[producer(node)]
        return self._send_blocks(node, value, have, want, cause)

    def _send_blocks(self, node: fx.Node, value: fx.Node, have: Placement, want: Placement, cause: Cause) -> fx.Node:
        """The blocks of the dim are made a dim of their own, and what follows it is what is split."""
        source, target = shard_dim(have), shard_dim(want)
        dim, count = (source, blocks(have)) if source is not None else (target, blocks(want))
        assert dim is not None
        shape = value.meta["type"].shape
        apart = self._reshape(value, (*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :]), node)
        before, after = (p if shard_dim(p) is None else shard(dim + 1) for p in (have, want))
        sent = self._send(node, apart, before, after, cause)
        sent.meta["type"] = infer(sent.target, sent.args, sent.kwargs)
        whole = self._reshape(sent, self._local_type(node.meta["type"], want).shape, node)
        whole.meta["layout"] = self._layout(node.meta["layout"], want)
        return whole

    def _reshape(self, value: fx.Node, shape: tuple[int, ...], node: fx.Node) -> fx.Node:
        """A value of no tensor of the user's: its layout says nothing."""
        type_ = value.meta["type"].with_shape(shape)
        new = call(self.graph, aten.reshape.default, (value, list(shape)), type=type_, source=node.meta["source"])
        new.meta.update(module=node.meta.get("module", ""), backward=node.meta.get("backward", False))
        return new

    def _send(self, node: fx.Node, value: fx.Node, have: Placement, want: Placement, cause: Cause) -> fx.Node:
        op, arguments = redistribution(have, want, self.axis, self.size)
        new = call(self.graph, op, (value, *arguments), type=value.meta["type"], source=node.meta["source"])
        new.meta.update(module=node.meta.get("module", ""), backward=node.meta.get("backward", False))
        new.meta.update(causes=(cause,), why=str(cause))
        if op is collectives.all_gather and producer(node) in self.decision.regather:
            new.meta["regather"] = True
        return new

    def _local_type(self, type_: TensorType | None, placement: Placement | None) -> Any:
        if type_ is None or placement is None:
            return type_
        return type_.with_shape(local_shape(type_.shape, placement, self.axis, self.size))

    def _layout(self, layout: Layout | None, placement: Placement | None) -> Any:
        return layout.extended(self.axis, placement) if layout is not None and placement is not None else layout


@cache
def _names(op: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in op._schema.arguments)


def _user(user: fx.Node | Result, want: Placement) -> Party:
    if isinstance(user, Result):
        return Party("", f"new {user}" if user.slot else str(user), want)
    return Party(user.name, op_text(user.target), want, user.meta.get("source", ""), user.meta.get("module", ""))


def _is_whole(rule: Rule) -> bool:
    return all(placement is None or placement == REPLICATE for placement in (*rule.inputs, *rule.outputs))


def redistribution(have: Placement, want: Placement, axis: str, size: int) -> tuple[Any, Sequence[Any]]:
    """The collective that changes a placement, and its arguments after the value."""
    source, target = shard_dim(have), shard_dim(want)
    if isinstance(have, Partial):
        if target is not None:
            return collectives.reduce_scatter, (target, have.reduce_op, axis, size)
        if want == REPLICATE:
            return collectives.all_reduce, (have.reduce_op, axis)
    elif source is not None:
        if target is not None:
            return collectives.all_to_all, (target, source, axis, size)
        if want == REPLICATE:
            return collectives.all_gather, (source, axis, size)
    elif target is not None:
        return collectives.axis_slice, (target, axis, size)
    raise AssertionError(f"no collective makes {placement_text(want)} of {placement_text(have)}")
