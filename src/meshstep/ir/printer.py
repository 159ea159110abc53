"""The one text form of a program: the same bytes on every rank, for reports, errors and golden tests.

One line a value: name, type, layout, what it is, and the user's line. An op with several outputs has one line for
each, `%split[0]`, `%split[1]`; its call stands at the first. Axes stand in the order of the mesh; a dim that several
axes split is split by the inner one first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._torch import OpOverload
from ..layout import Layout, placement_text
from ..mesh import Mesh
from .collectives import COLLECTIVES, SENDS_NOTHING, axis_of, bytes_sent
from .program import Program, Slot, is_part, producer
from .types import TensorType, bytes_text, dtype_text

WIDEST = 44  # of the columns before what a value is; what is longer stands out
SHORT = 28  # names of inputs; where there are longer ones, inputs and calls have columns of their own
COMMENT = 120  # where comments stand, if the line is shorter
SHOWN_ARGUMENTS = 4  # longer lists of values (a bucket of 100 gradients) are cut


def program_text(program: Program) -> str:
    """The whole program."""
    return "\n".join(line for _, line in program_lines(program)) + "\n"


def exact_text(program: Program) -> str:
    """All that a program is, nothing cut off: two programs of one text do the same. For digests, not for people."""
    lines = [str(program.mesh), *map(str, program.slots), *map(str, program.results)]
    for node in program.graph.nodes:
        lies = f"{_all(node.meta.get('type'))} {_all(node.meta.get('layout'))}"
        lines.append(f"{node.name} = {op_text(node.target)}{node.args} {sorted(node.kwargs.items())} : {lies}")
    return "\n".join(lines) + "\n"


def _all(of: Any) -> str:
    return " ".join(map(str, of)) if isinstance(of, tuple) else str(of)


def program_lines(program: Program) -> list[tuple[fx.Node | None, str]]:
    """The lines of a program, each with the call or input that it shows; None for the header."""
    slots = {node: slot for slot, node in program.inputs}
    calls = [node for node in program.graph.nodes if node.op == "call_function" and not is_part(node)]
    lines: list[tuple[fx.Node | None, str]] = [(None, f"program {program.name}  {program.mesh}")]
    together = all(len(node.name) < SHORT for node in slots)
    for nodes in ([*slots, *calls],) if together else ([*slots], calls):
        lines += _table(nodes, program.mesh, slots)
    output = program.output_node
    lines += [(output, f"  return {result} = {value_text(node)}") for result, node in program.outputs]
    return lines


def value_text(node: fx.Node) -> str:
    """`%mm`, or `%split[1]` for one output of several."""
    call, index = producer(node)
    return f"%{call.name}[{index}]" if is_part(node) else f"%{node.name}"


def type_text(type_: TensorType, layout: Layout, mesh: Mesh) -> str:
    """`f32[8/2, 16]`: global sizes, each with the number of shards where it is split."""
    dims = []
    for dim, size in enumerate(type_.shape):
        shards = layout.splits(dim, mesh)
        dims.append(f"{size * shards}/{shards}" if shards > 1 else str(size))
    return f"{dtype_text(type_.dtype)}[{', '.join(dims)}]"


def op_text(op: Any) -> str:
    """`aten.mm`, `aten.add.Scalar`; a collective by its bare name."""
    if op in COLLECTIVES:
        return op._schema.name.split("::")[-1]
    if isinstance(op, OpOverload):
        return str(op).removesuffix(".default")
    return getattr(op, "__name__", str(op))


def argument_text(value: Any) -> str:
    """An argument of a call."""
    match value:
        case fx.Node():
            return value_text(value)
        case list() | tuple():
            shown = [argument_text(v) for v in value[:SHOWN_ARGUMENTS]]
            more = [f"... {len(value) - SHOWN_ARGUMENTS} more"] if len(value) > SHOWN_ARGUMENTS else []
            return f"[{', '.join(shown + more)}]"
        case str():
            return value
        case torch.dtype():
            return dtype_text(value)
    return str(value)


def _table(nodes: Sequence[fx.Node], mesh: Mesh, slots: Mapping[fx.Node, Slot]) -> list[tuple[fx.Node, str]]:
    """The lines of some nodes, in columns."""
    rows = [(node, row) for node in nodes for row in _rows(node, mesh, slots)]
    widths = [min(max(map(len, column)), WIDEST) for column in zip(*(row.columns for _, row in rows))]
    return [(node, _line(row, widths)) for node, row in rows]


@dataclass(frozen=True, slots=True)
class _Row:
    """Name, type and the placement along each axis; what the value is; a comment."""

    columns: tuple[str, ...]
    value: str = ""
    comment: str = ""


def _rows(node: fx.Node, mesh: Mesh, slots: Mapping[fx.Node, Slot]) -> list[_Row]:
    """A row for each output of a node."""
    types, layouts = node.meta["type"], node.meta["layout"]
    value = str(slots[node]) if node in slots else f"{op_text(node.target)}({arguments_text(node)})"
    comment = _comment(node, mesh)
    if not isinstance(types, tuple):
        return [_Row(_columns(f"%{node.name}", types, layouts, mesh), value, comment)]
    outputs = [(i, t, layout) for i, (t, layout) in enumerate(zip(types, layouts, strict=True)) if t is not None]
    rows = [_Row(_columns(f"%{node.name}[{i}]", t, layout, mesh)) for i, t, layout in outputs]
    return [_Row(rows[0].columns, value, comment), *rows[1:]]


def _columns(name: str, type_: TensorType, layout: Layout, mesh: Mesh) -> tuple[str, ...]:
    said = dict(layout.placements)
    placements = (f"{placement_text(said[axis])}@{axis}" if axis in said else "" for axis in mesh)
    return name, type_text(type_, layout, mesh), *placements


def _line(row: _Row, widths: Sequence[int]) -> str:
    name, type_, *placements = (f"{text:<{width}}" for text, width in zip(row.columns, widths, strict=True))
    layout = " ".join(placement for placement in placements if placement)
    left = "  ".join(filter(None, (f"  {name} : {type_}", layout)))
    left = f"{left}  = {row.value}" if row.value else left.rstrip()
    return f"{left:<{COMMENT}}  # {row.comment}" if row.comment else left


def arguments_text(node: fx.Node) -> str:
    """The arguments of a call: `%h, %w2_t, dtype=f32`."""
    args = node.args
    if node.target in COLLECTIVES and isinstance(args[-1], int):
        args = args[:-1]  # the size of the axis: the header says it
    shown = [argument_text(arg) for arg in args]
    shown += [f"{key}={argument_text(arg)}" for key, arg in sorted(node.kwargs.items())]
    return ", ".join(shown)


def _comment(node: fx.Node, mesh: Mesh) -> str:
    parts = [node.meta.get("source", "")]
    if node.target in COLLECTIVES and node.target not in SENDS_NOTHING and axis_of(node.target, node.args) in mesh:
        size = mesh[axis_of(node.target, node.args)]
        parts.append(bytes_text(bytes_sent(node.target, node.args[0].meta["type"].nbytes, size)))  # type: ignore[union-attr]
    return "  ".join(filter(None, parts))
