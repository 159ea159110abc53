"""The one text form of a program: the same bytes on every rank, for reports, errors and golden tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ..layout import Layout
from ..mesh import Mesh
from .collectives import COLLECTIVES, SENDS_NOTHING, axis_of, bytes_sent
from .program import Program, Slot, is_part
from .types import TensorType, bytes_text, dtype_text

WIDEST = (24, 28, 24)  # of the columns for name, type and layout
SHOWN_ARGUMENTS = 4  # longer lists of values (a bucket of 100 gradients) are cut


def program_text(program: Program) -> str:
    """The whole program, one line a value."""
    slots = dict(zip(program.placeholders, program.slots, strict=True))
    rows = [_row(node, program.mesh, slots) for node in program.graph.nodes if node.op != "output"]
    widths = [min(max((len(row[column]) for row in rows), default=0), widest) for column, widest in enumerate(WIDEST)]
    lines = [f"program {program.name}  {program.mesh}"]
    for name, type_, layout, value, comment in rows:
        left = f"  {name:<{widths[0]}} : {type_:<{widths[1]}}  {layout:<{widths[2]}}  = {value}"
        lines.append(f"{left:<120}  # {comment}".rstrip() if comment else left.rstrip())
    lines += [f"  return {result} = %{node.name}" for result, node in program.outputs]
    return "\n".join(lines) + "\n"


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
    if isinstance(op, torch._ops.OpOverload):
        return str(op).removesuffix(".default")
    return getattr(op, "__name__", str(op))


def argument_text(value: Any) -> str:
    """An argument of a call."""
    match value:
        case fx.Node():
            return f"%{value.name}"
        case list() | tuple():
            shown = [argument_text(v) for v in value[:SHOWN_ARGUMENTS]]
            more = [f"... {len(value) - SHOWN_ARGUMENTS} more"] if len(value) > SHOWN_ARGUMENTS else []
            return f"[{', '.join(shown + more)}]"
        case str():
            return value
        case torch.dtype():
            return dtype_text(value)
    return str(value)


def _row(node: fx.Node, mesh: Mesh, slots: Mapping[fx.Node, Slot]) -> tuple[str, str, str, str, str]:
    types, layouts = node.meta["type"], node.meta["layout"]
    if isinstance(types, tuple):
        shown = [type_text(t, layout, mesh) if t else "-" for t, layout in zip(types, layouts, strict=True)]
        type_, layout = f"({', '.join(shown)})", ""
    else:
        type_, layout = type_text(types, layouts, mesh), str(layouts)
    value = str(slots[node]) if node in slots else _call_text(node)
    return f"%{node.name}", type_, layout, value, _comment(node, mesh)


def _call_text(node: fx.Node) -> str:
    if is_part(node):
        return f"%{node.args[0].name}[{node.args[1]}]"  # type: ignore[union-attr]
    args = node.args
    if node.target in COLLECTIVES and isinstance(args[-1], int):
        args = args[:-1]  # the size of the axis: the header says it
    shown = [argument_text(arg) for arg in args]
    shown += [f"{key}={argument_text(arg)}" for key, arg in sorted(node.kwargs.items())]
    return f"{op_text(node.target)}({', '.join(shown)})"


def _comment(node: fx.Node, mesh: Mesh) -> str:
    parts = [node.meta.get("source", "")]
    if node.target in COLLECTIVES and node.target not in SENDS_NOTHING:
        size = mesh[axis_of(node.target, node.args)]
        parts.append(bytes_text(bytes_sent(node.target, node.args[0].meta["type"].nbytes, size)))  # type: ignore[union-attr]
    return "  ".join(filter(None, parts))
