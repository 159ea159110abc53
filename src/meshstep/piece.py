"""A few calls of a program as a file of their own, which says whether a fault is still there.

`meshstep.verify` writes such files; they run by `python FILE` and end with exit code 1 while the fault is there.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from ._torch import OpOverload
from .ir.infer import infer
from .ir.printer import value_text
from .ir.program import Program, Result, Slot, SlotKind, append, call, is_part, part, producer
from .ir.types import TensorType
from .layout import Layout, blocks, placement_text
from .mesh import Mesh
from .partition import partition_traced
from .passes import pipeline
from .passes.pipeline import Pass
from .plan.calls import Calls
from .plan.decision import Decision
from .plan.files import placement
from .rules import Rule
from .rules.validator import split
from .runtime.lockstep import Difference, all_values, first_partitioned, first_rewritten, own_mesh

Said = Mapping[str, str]  # placements by axis, as text
Inputs = Sequence[Sequence[Tensor]]  # of each rank, one tensor a slot


class Piece:
    """Writes a small program, one value after another.

    Args:
        axes: The axes along which it is partitioned already.
        mesh: Axis names and sizes.
    """

    def __init__(self, axes: Sequence[str] = (), **mesh: int) -> None:
        """Nothing is written yet."""
        self._mesh, self._axes, self._graph, self._slots = Mesh(**mesh), tuple(axes), fx.Graph(), list[Slot]()
        self._returned: tuple[fx.Node, ...] = ()

    def input(self, name: str, dtype: torch.dtype, shape: Sequence[int], **layout: str) -> fx.Node:
        """An input; its shape is one rank's."""
        node = append(self._graph, "placeholder", name, (), name=name)
        node.meta.update(type=TensorType(dtype, tuple(shape)), layout=_layout(layout), source="")
        self._slots.append(Slot(SlotKind.ARGUMENT, name))
        return node

    def call(self, op: Any, *args: Any, lies: Any = None, **kwargs: Any) -> fx.Node:
        """A call; `lies` is the layout, a list of one for each output where there are several."""
        type_ = infer(op, args, kwargs)
        said = tuple(map(_layout, lies)) if isinstance(lies, list) else _layout(lies or {})
        if isinstance(type_, tuple) and not isinstance(said, tuple):
            said = (said,) * len(type_)
        return call(self._graph, op, args, kwargs, type=type_, layout=said)

    def part(self, node: fx.Node, index: int) -> fx.Node:
        """One output of several."""
        return part(self._graph, node, index)

    def output(self, *nodes: fx.Node) -> None:
        """What is compared."""
        self._returned = nodes

    def program(self) -> Program:
        """The program as it stands."""
        if not any(node.op == "output" for node in self._graph.nodes):
            append(self._graph, "output", "output", (self._returned,))
        results = tuple(Result(str(i)) for i in range(len(self._returned)))
        return Program("piece", self._mesh, self._graph, tuple(self._slots), results, self._axes)

    def check_rule(self, given: Sequence[str], inputs: Sequence[str], outputs: Sequence[str | None], file: Any) -> int:
        """Partition the one call by a rule and compare; the exit code.

        Args:
            given: How the inputs lie along the next axis.
            inputs: The rule's placements of the call's tensors.
            outputs: The rule's placements of what it returns.
            file: Where the inputs' values are.
        """
        program, values = self.program(), _loaded(file)
        wanted = Rule(tuple(map(_placement, inputs)), tuple(None if p is None else _placement(p) for p in outputs))
        rule = _current(program, wanted)
        if rule is None:
            print("the rule is no longer there")
            return 0
        return _told(rule_difference(program, [_placement(p) for p in given], rule, values))

    def check_pass(self, pass_: Pass, file: Any) -> int:
        """Apply a pass and compare; the exit code.

        Args:
            pass_: The pass.
            file: Where the inputs' values are.
        """
        return _told(pass_difference(self.program(), pass_, _loaded(file)))


def rule_difference(program: Program, given: Sequence[Placement], rule: Rule, inputs: Inputs) -> Difference | None:
    """What differs when a program of one call is partitioned along its next axis; None if nothing does.

    Args:
        program: The program.
        given: How its inputs lie along the axis.
        rule: The rule of the call.
        inputs: On each rank of the program, its tensors.
    """
    axis = next(a for a in program.mesh.axes if a not in program.axes)
    (node,) = program.calls
    outputs = tuple(rule.outputs[producer(n)[1]] for _, n in program.outputs)
    decision = Decision(axis, tuple(given), outputs, {node: rule})  # type: ignore[arg-type]
    after, images = partition_traced(program, decision)
    old, mesh, parents = all_values(program, inputs), own_mesh(after), own_mesh(program)
    rank_of = {tuple(parents.coordinate(r).items()): r for r in range(parents.size)}
    own: list[list[Tensor]] = []
    for rank in range(mesh.size):
        at = mesh.coordinate(rank)
        above = rank_of[tuple((a, at.get(a, 0)) for a in parents.axes)]
        own.append([split(t, p, mesh[axis])[at[axis]] for t, p in zip(inputs[above], given, strict=True)])
    return first_partitioned(program, after, images, old, all_values(after, own))


def pass_difference(program: Program, pass_: Pass, inputs: Inputs) -> Difference | None:
    """What differs when a pass rewrites a local program; None if nothing does."""
    after = pass_(program)
    return first_rewritten(program, after, all_values(program, inputs), all_values(after, inputs))


def _current(program: Program, wanted: Rule) -> Rule | None:
    """The rule of these placements as it is now."""
    axis = next(a for a in program.mesh.axes if a not in program.axes)
    in_play = frozenset(blocks(p) for p in (*wanted.inputs, *wanted.outputs) if p is not None) - {1}
    found = Calls(program, program.mesh[axis], in_play).rules(program.calls[0])
    return next((r for r in found if (r.inputs, r.outputs) == (wanted.inputs, wanted.outputs)), None)


def _told(found: Difference | None) -> int:
    print("equal" if found is None else f"DIFFERENT: {value_text(found.node)} is off by {found.error:.1e}")
    return 0 if found is None else 1


def _placement(text: str) -> Placement:
    if text.startswith("P("):
        return Partial(text[2:-1])
    return placement(text, "a value")


def _layout(said: Said) -> Layout:
    return Layout(tuple((axis, _placement(text)) for axis, text in said.items()))


def _loaded(file: Any) -> Inputs:
    """The values beside a file: tensors only, nothing is executed."""
    found: Inputs = torch.load(Path(file).with_suffix(".pt"), weights_only=True)
    return found


def module(path: str) -> ModuleType:
    """Run a Python file, as an import does: the one where a rule or a pass was written."""
    name = f"meshstep_piece_{Path(path).stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    sys.path.insert(0, str(Path(path).resolve().parent))  # as Python does for a script
    spec.loader.exec_module(made)
    return made


def known_pass(text: str) -> Pass:
    """One of meshstep's passes, by its text form."""
    (found,) = pipeline(text)
    return found


# ---- from a program to a piece


def around(program: Program, node: fx.Node, depth: float) -> tuple[Program, list[fx.Node]]:
    """The calls that a value is made of, up to some calls away, as a program of their own.

    Args:
        program: The program.
        node: The value.
        depth: How many calls.

    Returns:
        It, and the nodes of `program` that became its inputs.
    """
    inside, edge = {producer(node)[0]: 0.0}, [producer(node)[0]]
    while edge:
        current = edge.pop(0)
        for used in current.all_input_nodes:
            made = producer(used)[0]
            if made not in inside and made.op == "call_function" and inside[current] + 1 < depth:
                inside[made] = inside[current] + 1
                edge.append(made)
    graph, new, inputs, slots = fx.Graph(), dict[fx.Node, fx.Node](), list[fx.Node](), list[Slot]()
    nodes = [n for n in program.graph.nodes if producer(n)[0] in inside and n.op == "call_function"]
    for inner in nodes:
        for used in inner.all_input_nodes:
            if used not in new and producer(used)[0] not in inside:
                new[used] = append(graph, "placeholder", used.name, (), name=used.name)
                new[used].meta.update(used.meta)
                inputs.append(used)
                slots.append(Slot(SlotKind.ARGUMENT, new[used].name))
    for inner in nodes:
        args, kwargs = fx.node.map_arg((inner.args, inner.kwargs), new.__getitem__)
        new[inner] = append(graph, "call_function", inner.target, args, kwargs, inner.name)
        new[inner].meta.update(inner.meta)
    ends = [n for n in nodes if producer(n)[0] is producer(node)[0] and not isinstance(n.meta["type"], tuple)]
    append(graph, "output", "output", (tuple(new[n] for n in ends),))
    results = tuple(Result(str(i)) for i in range(len(ends)))
    return replace(program, graph=graph, slots=tuple(slots), results=results, constants={}), inputs


def source(program: Program, check: str, title: str, modules: Iterable[str] = ()) -> str | None:
    """The text of a file that runs a program's check; None if something in it cannot be written.

    Args:
        program: The program.
        check: The call of `check_rule` or `check_pass`, without `piece.`.
        title: What is the matter.
        modules: Python files to be run first.
    """
    lines = []
    for node in program.graph.nodes:
        if node.op == "placeholder":
            type_, said = node.meta["type"], "".join(f", {a}={p!r}" for a, p in _said(node.meta["layout"]).items())
            lines.append(f"{node.name} = piece.input({node.name!r}, {type_.dtype}, {type_.shape}{said})")
        elif is_part(node):
            made, index = producer(node)
            lines.append(f"{node.name} = piece.part({made.name}, {index})")
        elif node.op == "call_function":
            if not isinstance(node.target, OpOverload):
                return None
            lines.append(f"{node.name} = piece.call({_call(node)})")
    returned: Any = program.output_node.args[0]
    lines.append(f"piece.output({', '.join(n.name for n in returned)})")
    sizes = ", ".join(f"{axis}={program.mesh[axis]}" for axis in program.mesh)
    head = [f'"""{title}\n\nExit code 1 while it is so, 0 when it is not.\n"""\n', "import sys\n", "import torch\n"]
    head += ["from meshstep.piece import Piece, known_pass, module  # noqa: F401\n"]
    head += [f"module({os.path.abspath(path)!r})" for path in modules]
    head.append(f"piece = Piece({list(program.axes)!r}, {sizes})")
    return "\n".join([*head, *lines, f"sys.exit(piece.{check})"]) + "\n"


def _call(node: fx.Node) -> str:
    layouts = node.meta["layout"]
    said: Any = [_said(layout) for layout in layouts] if isinstance(layouts, tuple) else _said(layouts)
    shown = [f"torch.ops.{node.target}", *map(literal, node.args)]
    shown += [f"lies={said!r}"] if (any(said) if isinstance(said, list) else said) else []
    return ", ".join([*shown, *(f"{key}={literal(value)}" for key, value in node.kwargs.items())])


def _said(layout: Layout | None) -> dict[str, str]:
    return {} if layout is None else {axis: placement_text(p) for axis, p in layout.placements}


def literal(value: Any) -> str:
    """A value as Python writes it."""
    match value:
        case fx.Node():
            return value.name
        case list() | tuple():
            inner = ", ".join(map(literal, value))
            return f"[{inner}]"
        case torch.device():
            return f"torch.device({str(value)!r})"
        case float() if not math.isfinite(value):
            return f"float({str(value)!r})"
    return repr(value)


def texts(placements: Iterable[Placement | None]) -> list[str | None]:
    """Placements as a file has them."""
    return [None if p is None else placement_text(p) for p in placements]


def lies_along(nodes: Sequence[fx.Node], placed: Mapping[tuple[fx.Node, int], fx.Node], axis: str) -> list[Placement]:
    """How some values lie along an axis in the program that was made of theirs."""
    return [placed[producer(node)].meta["layout"][axis] for node in nodes]
