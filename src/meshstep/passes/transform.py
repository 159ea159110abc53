"""The user's edits of a local program: as a `GraphModule`, out and back in again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from .._torch import FakeTensorMode, OpOverload
from ..errors import PassError
from ..ir.infer import infer
from ..ir.program import Program, append, name_of, part
from ..ir.types import TensorType
from ..layout import Layout


@dataclass(frozen=True, slots=True)
class Transform:
    """A function of the user's that edits the graph of a local program.

    It gets the graph as a `GraphModule`, whose `forward` takes one tensor a slot and returns a tuple of all results.
    Inputs and results must stay what they are. New nodes may call aten ops or anything of torch that computes with
    tensors (`torch.add`, methods, modules): that is traced into ops. Ops that write into their arguments are refused.

    Args:
        edit: Takes the graph module, and how the value of each node lies by its name; returns it or another one.
        name: What it is, for errors.
    """

    edit: Callable[[fx.GraphModule, Mapping[str, Layout]], Any]
    name: str

    def __call__(self, program: Program) -> Program:
        """The edited program; the types of all that is new are worked out."""
        private, _ = program.copy()
        module = fx.GraphModule({}, private.graph, class_name=program.name)
        known = {node: (node.target, node.args, dict(node.kwargs)) for node in module.graph.nodes}
        layouts = {n.name: n.meta["layout"] for n in module.graph.nodes if isinstance(n.meta.get("layout"), Layout)}
        found = self.edit(module, layouts)
        if not isinstance(found, fx.GraphModule):
            raise PassError(
                f"the transformation returned {type(found).__name__}", at=self.name, hint="return the GraphModule"
            )
        return _Reading(program, found, known, self.name).run()

    def __repr__(self) -> str:
        """For messages."""
        return self.name


class _Reading:
    """Makes a program of an edited graph."""

    def __init__(
        self, program: Program, module: fx.GraphModule, known: dict[fx.Node, tuple[Any, Any, Any]], name: str
    ) -> None:
        self.program, self.module, self.known, self.name = program, module, known, name
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}

    def run(self) -> Program:
        inputs = [node for node in self.module.graph.nodes if node.op == "placeholder"]
        if len(inputs) != len(self.program.slots):
            raise self._error(f"the graph has {len(inputs)} inputs instead of {len(self.program.slots)}")
        for node, held in zip(inputs, self.program.placeholders, strict=True):
            self.new[node] = append(self.graph, "placeholder", held.target, (), None, held.name)
            self.new[node].meta.update(held.meta)
        for node in self.module.graph.nodes:
            if node.op not in ("placeholder", "output"):
                self._read(node)
        return replace(self.program, graph=self._with_results())

    def _with_results(self) -> fx.Graph:
        found: Any = self.module.graph.output_node().args[0]
        results = [self.new[node] for node in (found if isinstance(found, (tuple, list)) else (found,))]
        if len(results) != len(self.program.results):
            raise self._error(f"the graph returns {len(results)} values instead of {len(self.program.results)}")
        for node, (result, before) in zip(results, self.program.outputs, strict=True):
            if node.meta["type"] != before.meta["type"]:
                raise self._error(f"{result} was {before.meta['type']} and is {node.meta['type']}")
            if node.op != "placeholder":
                node.meta["layout"] = before.meta["layout"]  # that is part of what it is
        self.graph.output(tuple(results))
        return self.graph

    def _read(self, node: fx.Node) -> None:
        if self._is_as_it_was(node):
            args, kwargs = self._arguments(node)
            self.new[node] = append(self.graph, node.op, node.target, args, kwargs, node.name)
            self.new[node].meta.update(node.meta)
        elif node.op == "call_function" and node.target is operator.getitem and self._is_tuple(node.args[0]):
            self.new[node] = part(self.graph, *self._arguments(node)[0])
        elif node.op == "call_function" and isinstance(node.target, OpOverload):
            self._call(node, node.target, *self._arguments(node))
        else:
            self._trace(node)

    def _is_as_it_was(self, node: fx.Node) -> bool:
        return self.known.get(node) == (node.target, node.args, dict(node.kwargs)) and all(
            self.new[near].meta["type"] == near.meta["type"] for near in node.all_input_nodes
        )

    def _is_tuple(self, node: Any) -> bool:
        return isinstance(node, fx.Node) and isinstance(self.new[node].meta["type"], tuple)

    def _arguments(self, node: fx.Node) -> Any:
        return fx.node.map_arg((node.args, dict(node.kwargs)), self.new.__getitem__)

    def _call(self, node: fx.Node, op: Any, args: tuple, kwargs: dict[str, Any]) -> fx.Node:
        if op._schema.is_mutable:
            raise self._error(
                f"{node.name} calls {op}, which writes into its arguments", "the op without the underscore"
            )
        try:
            type_ = infer(op, args, kwargs)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:  # what ops say of arguments that do not fit
            first = str(error).strip().split("\n")[0]
            raise self._error(f"{node.name} calls {op}, which says: {first}", "arguments that it takes") from error
        new = append(self.graph, "call_function", op, args, kwargs, name_of(op))
        layout = self._layout(new, type_)
        layouts: Any = (layout,) * len(type_) if isinstance(type_, tuple) else layout
        if node in self.known and isinstance(node.meta["layout"], tuple) is isinstance(type_, tuple):
            layouts = node.meta["layout"]
        source = node.meta.get("source") or next(
            (n.meta["source"] for n in new.all_input_nodes if n.meta["source"]), ""
        )
        new.meta.update(type=type_, layout=layouts, source=source, module="", backward=False)
        self.new[node] = new
        return new

    def _layout(self, node: fx.Node, type_: Any) -> Layout:
        """That of the first argument of the same shape: the user answers for what an edit means."""
        for near in node.all_input_nodes:
            given = near.meta["type"]
            if isinstance(given, TensorType) and isinstance(type_, TensorType) and given.shape == type_.shape:
                return near.meta["layout"]
        layout = Layout()
        for axis in self.program.axes:
            layout = layout.extended(axis, Layout()[axis])
        return layout

    def _trace(self, node: fx.Node) -> None:
        """A call of anything else, as ops."""
        args, kwargs = self._arguments(node)
        tensors: list[fx.Node] = []

        def numbered(value: fx.Node) -> Any:
            tensors.append(value)
            return _Place(len(tensors) - 1)

        args, kwargs = fx.node.map_arg((args, kwargs), numbered)

        def run(*values: Any) -> Any:
            own_args, own_kwargs = _filled((args, kwargs), values)
            target: Any = node.target
            match node.op:
                case "call_method":
                    return getattr(own_args[0], target)(*own_args[1:], **own_kwargs)
                case "call_module":
                    return self.module.get_submodule(target)(*own_args, **own_kwargs)
                case "call_function":
                    return target(*own_args, **own_kwargs)
            raise self._error(f"{node.name} is a {node.op}", "call functions of tensors that the graph has")

        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            types = [value.meta["type"] for value in tensors]
            fakes = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in types]
            inner = make_fx(run, tracing_mode="real")(*fakes).graph
        inside: dict[fx.Node, fx.Node] = {}
        given = iter(tensors)
        for step in inner.nodes:
            if step.op == "placeholder":
                inside[step] = next(given)
            elif step.op == "output":
                if not isinstance(step.args[0], fx.Node):
                    raise self._error(f"{node.name} returns no single tensor", "one aten op for each value")
                self.new[node] = inside[step.args[0]]
            elif step.op == "call_function" and isinstance(step.target, OpOverload):
                own: Any = fx.node.map_arg((step.args, dict(step.kwargs)), inside.__getitem__)
                inside[step] = self._call(step, step.target, *own)
            elif step.target is operator.getitem:
                inside[step] = part(self.graph, inside[step.args[0]], step.args[1])
            else:
                raise self._error(
                    f"{node.name} uses a tensor that is no value of the graph", "compute it of its inputs"
                )

    def _error(self, what: str, hint: str | None = None) -> PassError:
        return PassError(what, at=self.name, hint=hint or "inputs and results stay as they are")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor goes."""

    index: int


def _filled(value: Any, tensors: tuple) -> Any:
    match value:
        case _Place():
            return tensors[value.index]
        case tuple() | list():
            return type(value)(_filled(v, tensors) for v in value)
        case dict():
            return {key: _filled(v, tensors) for key, v in value.items()}
    return value
