"""Is a program what a program must be?"""

from __future__ import annotations

from torch import fx

from ..errors import PassError
from ..mesh import Mesh
from .collectives import COLLECTIVES, axis_of
from .infer import infer
from .printer import program_text
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
            raise PassError(
                fault,
                at="\n".join([by or f"program {program.name}", *_lines(program, node)]),
                hint="the pass that made this node is wrong" if by else None,
            )
    counts = (len(program.placeholders), len(program.output_node.args[0]))  # type: ignore[arg-type]
    if counts != (len(program.slots), len(program.results)):
        raise PassError(
            f"{counts[0]} inputs and {counts[1]} outputs for {len(program.slots)} slots and "
            f"{len(program.results)} results",
            at=by or f"program {program.name}",
        )


def _fault(node: fx.Node, seen: set[fx.Node], mesh: Mesh, types: bool) -> str | None:
    for argument in node.all_input_nodes:
        if argument not in seen:
            return f"%{node.name} uses %{argument.name} before it is computed"
    if node.op == "output":
        return None
    if "type" not in node.meta or "layout" not in node.meta:
        return f"%{node.name} has no type or no layout"
    if node.op == "placeholder":
        return None
    if node.target in COLLECTIVES and axis_of(node.target, node.args) not in mesh:
        return f"%{node.name} is over axis {axis_of(node.target, node.args)!r}, which {mesh} lacks"
    return _type_fault(node) if types else None


def _type_fault(node: fx.Node) -> str | None:
    if is_part(node):
        call, index = producer(node)
        want = call.meta["type"][index]
    else:
        want = infer(node.target, node.args, node.kwargs)
    return None if node.meta["type"] == want else f"%{node.name} is said to be {node.meta['type']} and is {want}"


def _lines(program: Program, node: fx.Node) -> list[str]:
    try:
        lines = program_text(program).splitlines()
    except (KeyError, StopIteration):  # too broken to print whole: the node alone
        return [f"  %{node.name} = {node.target}"]
    number = next((i for i, line in enumerate(lines) if line.split(":")[0].strip() == f"%{node.name}"), 0)
    return [f"  {line}" for line in lines[max(0, number - AROUND) : number + AROUND + 1]]
