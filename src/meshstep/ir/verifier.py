"""Is a program what a program must be?"""

from __future__ import annotations

from torch import fx
from torch.distributed.tensor import Partial

from ..errors import PassError
from ..mesh import Mesh
from .collectives import COLLECTIVES, axis_of
from .infer import infer
from .printer import program_lines, type_text, value_text
from .program import Program, is_part, producer

AROUND = 2  # lines of the program shown before and after a fault


def verify_program(program: Program, *, types: bool = False, by: str = "") -> None:
    """Check slots, results, order, metadata and the axes of collectives.

    Args:
        program: The program.
        types: Also run every op's fake implementation and compare types: slower, for tests and after rewrites.
        by: The pass to blame.

    Raises:
        PassError: It is not; the text shows the lines around the fault.
    """
    seen: set[fx.Node] = set()
    for node in program.graph.nodes:
        fault = _fault(node, seen, program.mesh, types)
        seen.add(node)
        if fault:
            raise _error(fault, program, node, by)
    counts = (len(program.placeholders), len(program.output_node.args[0]))  # type: ignore[arg-type]
    if counts != (len(program.slots), len(program.results)):
        raise PassError(
            f"{counts[0]} inputs and {counts[1]} outputs for {len(program.slots)} slots and "
            f"{len(program.results)} results",
            at=by or f"program {program.name}",
        )
    _verify_results(program, by)


def _verify_results(program: Program, by: str) -> None:
    """New state lies where the old one lies, and nothing leaves the program in parts of a sum."""
    inputs = dict(program.inputs)
    for result, node in program.outputs:
        if any(isinstance(placement, Partial) for _, placement in node.meta["layout"].placements):
            raise _error(f"{result} is returned as {node.meta['layout']}", program, node, by)
        held = inputs.get(result.slot) if result.slot else None
        if held is not None and _place(held, program.mesh) != _place(node, program.mesh):
            fault = f"{result} is {_place(held, program.mesh)}, and its new value is {_place(node, program.mesh)}"
            raise _error(fault, program, node, by)


def _place(node: fx.Node, mesh: Mesh) -> str:
    type_, layout = node.meta["type"], node.meta["layout"]
    return f"{type_text(type_, layout, mesh)} {layout}".rstrip()


def _fault(node: fx.Node, seen: set[fx.Node], mesh: Mesh, types: bool) -> str | None:
    for argument in node.all_input_nodes:
        if argument not in seen:
            return f"{value_text(node)} uses {value_text(argument)} before it is computed"
    if node.op == "output":
        return None
    if "type" not in node.meta or "layout" not in node.meta:
        return f"{value_text(node)} has no type or no layout"
    if node.op == "placeholder":
        return None
    if node.target in COLLECTIVES and axis_of(node.target, node.args) not in mesh:
        return f"{value_text(node)} is over axis {axis_of(node.target, node.args)!r}, which {mesh} lacks"
    size_fault = _size_fault(node, mesh) if node.target in COLLECTIVES else None
    if size_fault:
        return size_fault
    if is_part(node):
        return _part_fault(node)
    return _type_fault(node) if types else None


def _size_fault(node: fx.Node, mesh: Mesh) -> str | None:
    """Ranks would wait for others that there are not."""
    axis, said = axis_of(node.target, node.args), node.args[-1]
    if not isinstance(said, int) or said == mesh[axis]:
        return None
    return f"{value_text(node)} is said to be over {said} ranks, and axis {axis!r} has {mesh[axis]}"


def _part_fault(node: fx.Node) -> str | None:
    call, index = producer(node)
    for known in ("type", "layout"):
        whole = call.meta[known]
        if not isinstance(whole, tuple) or index >= len(whole):
            return f"{value_text(node)} is a part that %{call.name} does not have"
        if node.meta[known] != whole[index]:
            return f"{value_text(node)} is said to be {node.meta[known]} and is {whole[index]}"
    return None


def _type_fault(node: fx.Node) -> str | None:
    said, found = node.meta["type"], infer(node.target, node.args, node.kwargs)
    if said == found:
        return None
    return f"{value_text(node)} is said to be {_types_text(said)} and is {_types_text(found)}"


def _types_text(types: object) -> str:
    return f"({', '.join(map(str, types))})" if isinstance(types, tuple) else str(types)


def _error(fault: str, program: Program, node: fx.Node, by: str) -> PassError:
    return PassError(
        fault,
        at="\n       ".join([by or f"program {program.name}", *_lines(program, node)]),
        hint="the pass that made this node is wrong" if by else None,
    )


def _lines(program: Program, node: fx.Node) -> list[str]:
    """The lines around a node."""
    try:
        lines = program_lines(program)
    except Exception:  # a program may be broken in any way: then the node alone
        return [f"%{node.name} = {node.target}"]
    shown = producer(node)[0]
    number = next((i for i, (of, _) in enumerate(lines) if of is shown), 0)
    return [line for _, line in lines[max(0, number - AROUND) : number + AROUND + 1]]
