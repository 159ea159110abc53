"""The program: a functional FX graph whose inputs and outputs are typed slots and whose values have types and layouts.

Every node of the graph carries in `node.meta`:

    "type"     TensorType, or a tuple of them for an op with several outputs (its parts are `getitem` nodes);
               the shape is one rank's
    "layout"   Layout over the axes partitioned so far, or a tuple of them
    "source"   `file.py:line` of the user's code that made it, "" if unknown
    "module"   path of the user's module in whose `forward` it was made, "" if in none; a backward op has that of its
               forward op
    "backward" whether it was made during a backward
    "recomputed" whether it is computed again for a backward instead of being held
    "regather" for an all_gather: what it gathers is kept in shards and may be gathered again instead of being held
    "why"      for a collective: which value and consumer disagreed
    "causes"   for a collective: likewise, a `Cause` for each value that rides in it
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import OpOverload
from ..layout import Layout
from ..mesh import Mesh
from .collectives import COLLECTIVES, SENDS_NOTHING, axis_of, bytes_sent
from .types import TensorType, bytes_text, dtype_text


class SlotKind(Enum):
    """What an input of a program is."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer state"
    HYPERPARAMETER = "hyper-parameter"
    ARGUMENT = "argument"
    CONSTANT = "constant"
    SEED = "seed"


STATE_KINDS = frozenset({SlotKind.PARAMETER, SlotKind.BUFFER, SlotKind.GRADIENT, SlotKind.OPTIMIZER_STATE})


@dataclass(frozen=True, slots=True)
class Slot:
    """An input of a program, or the state that an output replaces.

    Args:
        kind: What it is.
        name: Fully-qualified name (`fc1.weight`, `fc1.weight.exp_avg`), or the path of an argument (`batch.ids`).
    """

    kind: SlotKind
    name: str

    def __str__(self) -> str:
        """`parameter fc1.weight`."""
        return f"{self.kind.value} {self.name}"


@dataclass(frozen=True, slots=True)
class Result:
    """An output of a program: the new value of a state slot, or something that the user's function returned.

    Args:
        name: Path in the returned structure (`loss`, `[0]`), or the name of the slot.
        slot: The state that it replaces; `None` for a user output.
    """

    name: str
    slot: Slot | None = None

    def __str__(self) -> str:
        """`output loss` or `parameter fc1.weight`."""
        return str(self.slot) if self.slot else f"output {self.name}"


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """One functional program.

    Args:
        name: Name of the user's function.
        mesh: The mesh it is for.
        graph: Placeholders (one a slot), `call_function` nodes, one output node with a tuple (one value a result).
        slots: What the placeholders are, in order.
        results: What the outputs are, in order.
        axes: Mesh axes partitioned so far, in the order in which that was done; `()` for a global program.
        constants: Tensors of the CONSTANT slots.
    """

    name: str
    mesh: Mesh
    graph: fx.Graph
    slots: tuple[Slot, ...]
    results: tuple[Result, ...]
    axes: tuple[str, ...] = ()
    constants: Mapping[Slot, Tensor] = field(default_factory=dict)

    @property
    def placeholders(self) -> tuple[fx.Node, ...]:
        """The input nodes, one a slot."""
        return tuple(self.graph.find_nodes(op="placeholder"))

    @property
    def inputs(self) -> Iterator[tuple[Slot, fx.Node]]:
        """Slots with their nodes, in order."""
        return zip(self.slots, self.placeholders, strict=True)

    @property
    def output_node(self) -> fx.Node:
        """The node that returns."""
        return self.graph.output_node()

    @property
    def outputs(self) -> Iterator[tuple[Result, fx.Node]]:
        """Results with the nodes that they return, in order."""
        return zip(self.results, self.output_node.args[0], strict=True)  # type: ignore[arg-type]

    @property
    def calls(self) -> tuple[fx.Node, ...]:
        """The nodes that compute something, in order; `getitem` is not one."""
        return tuple(
            node for node in self.graph.nodes if node.op == "call_function" and node.target is not operator.getitem
        )

    def copy(
        self, order: Iterable[fx.Node] | None = None, merged: Mapping[fx.Node, fx.Node] | None = None
    ) -> tuple[Program, dict[fx.Node, fx.Node]]:
        """A private copy of the graph in a new program, and the map from old nodes to new ones.

        Args:
            order: The nodes in the order that they get; `None` is the order that they have.
            merged: Nodes that are left out, each with an earlier one that takes its place.
        """
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.graph.nodes if order is None else order:
            if merged and node in merged:
                copies[node] = copies[merged[node]]
            else:
                copies[node] = copy_node(graph, node, copies)
        return replace(self, graph=graph), copies


def append(
    graph: fx.Graph, op: str, target: Any, args: tuple, kwargs: Mapping[str, Any] | None = None, name: str | None = None
) -> fx.Node:
    """Append a node: `Graph.create_node` without its search for symbolic sizes, which takes a third of its time."""
    node = graph.create_node(op, target, name=name)
    node.args = args
    if kwargs:
        node.kwargs = dict(kwargs)
    return node


def copy_node(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node], name: str | None = None) -> fx.Node:
    """Append a copy of a node of another graph, with its name and all that is known of it.

    Args:
        graph: Where it goes.
        node: The node.
        copies: What stands in for each of its inputs.
        name: Another name.
    """
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), copies.__getitem__)
    new = append(graph, node.op, node.target, args, kwargs, name or node.name)
    new.meta.update(node.meta)
    return new


def call(
    graph: fx.Graph,
    op: Any,
    args: tuple,
    kwargs: Mapping[str, Any] | None = None,
    *,
    type: TensorType | tuple[TensorType | None, ...],
    layout: Layout | tuple[Layout | None, ...] | None = None,
    source: str = "",
    name: str | None = None,
) -> fx.Node:
    """Append a call to `graph` with all that a node of a program carries."""
    node = append(graph, "call_function", op, args, kwargs, name or name_of(op))
    empty: Any = (Layout(),) * len(type) if isinstance(type, tuple) else Layout()
    node.meta.update(type=type, layout=empty if layout is None else layout, source=source)
    return node


def part(graph: fx.Graph, node: fx.Node, index: int) -> fx.Node:
    """Append `node[index]`, one output of an op with several."""
    item = append(graph, "call_function", operator.getitem, (node, index), name=f"{node.name}_part")
    item.meta.update(
        type=node.meta["type"][index], layout=node.meta["layout"][index], source=node.meta.get("source", "")
    )
    return item


@cache
def name_of(op: Any) -> str:
    """The short name that a node of this op gets: `mm`, `layer_norm_backward`, `attention`."""
    if not isinstance(op, OpOverload):
        return getattr(op, "__name__", "value").strip("_")
    name = op._schema.name.split("::")[-1].strip("_").removeprefix("native_")
    return re.sub(r"^scaled_dot_product_(\w+_)?attention(_for_cpu)?", "attention", name)


def is_part(node: fx.Node) -> bool:
    """Whether a node only picks one output of another one."""
    return node.target is operator.getitem


def is_random(node: fx.Node) -> bool:
    """Whether a node draws random numbers: two equal ones give different values."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def producer(node: fx.Node) -> tuple[fx.Node, int]:
    """The call that computes a value, and which of its outputs it is."""
    return (node.args[0], node.args[1]) if is_part(node) else (node, 0)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Communication:
    """One collective of a program.

    Args:
        kind: `all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`.
        axis: The mesh axis.
        dtype: What is sent.
        bytes: Sent per rank and step by a ring.
        count: How many values ride in it.
        source: The user's line whose value is sent.
        why: Which producer and consumer disagree.
    """

    kind: str
    axis: str
    dtype: torch.dtype
    bytes: int
    count: int
    source: str
    why: str

    def __str__(self) -> str:
        """`all_reduce over tp of 2 values, 512 KiB, f32  gpt.py:19: %view_75 is P(sum), add_1 needs R`."""
        values = f" of {self.count} values" if self.count > 1 else ""
        where = f"  {self.source}" if self.source else ""
        text = f"{self.kind} over {self.axis}{values}, {bytes_text(self.bytes)}, {dtype_text(self.dtype)}"
        return f"{text}{where}: {self.why}"


def communication(program: Program) -> tuple[Communication, ...]:
    """All that a program sends, in program order."""
    return tuple(
        record(node, program.mesh)
        for node in program.graph.nodes
        if node.target in COLLECTIVES and node.target not in SENDS_NOTHING
    )


def collective_order(program: Program) -> tuple[str, ...]:
    """The collectives that each rank calls, in order: `all_reduce(sum, dp) f32[8, 16]`.

    A program has no branches and no loops, and its text knows of no rank: ranks that run one text call these, in this
    order. What a rank is changes only values (`axis_slice`, `axis_index`), never what is sent.
    """
    return tuple(
        f"{name_of(node.target)}({', '.join(map(str, node.args[1:]))}) {node.args[0].meta['type']}"
        for node in program.graph.nodes
        if node.target in COLLECTIVES and node.target not in SENDS_NOTHING
    )


def record(node: fx.Node, mesh: Mesh) -> Communication:
    """What one collective sends."""
    axis, sent = axis_of(node.target, node.args), node.args[0].meta["type"]  # type: ignore[union-attr]
    return Communication(
        kind=name_of(node.target),
        axis=axis,
        dtype=sent.dtype,
        bytes=bytes_sent(node.target, sent.nbytes, mesh[axis]),
        count=node.meta.get("count", 1),
        source=node.meta["source"],
        why=node.meta.get("why", ""),
    )


def prune(graph: fx.Graph) -> bool:
    """Erase calls whose values nobody uses; whether there were any."""
    before = len(graph.nodes)
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    return len(graph.nodes) < before
