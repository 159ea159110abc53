"""Which value of a step is the first that differs, and which rule or pass made it so?"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, fx
from torch.distributed.tensor.placement_types import Placement

from . import piece
from .ir.printer import op_text, program_lines, value_text
from .ir.program import Program, producer
from .layout import placement_text
from .passes import Pipeline
from .passes.pipeline import Pass, pass_text
from .phases import Partitioned
from .plan.calls import tensor_nodes
from .rules import Rule
from .rules.user import origin
from .runtime.lockstep import Difference, all_values, first_partitioned, first_rewritten, split_inputs

DEPTHS = (1, 2, 4, 8, 16, float("inf"))  # calls around a fault, tried until it shows


@dataclass(frozen=True, slots=True)
class Culprit:
    """The first value that differs from that of one device.

    Args:
        value: The line of the program that computes it.
        source: The user's line, "" if unknown.
        error: By how much, relative.
        made_by: The rule or the pass.
        file: A program that reproduces it; None if none does.
    """

    value: str
    source: str
    error: float
    made_by: str
    file: str | None

    def __str__(self) -> str:
        """Two lines, and the file."""
        again = f"\n  try  python {self.file}" if self.file else ""
        return f"\n  at   {self.value}\n       off by {self.error:.1e}, made by {self.made_by}{again}"


def find_culprit(
    program: Program, partitioned: Iterable[Partitioned], passes: Pipeline, inputs: Sequence[Tensor]
) -> Culprit | None:
    """Run a step stage by stage and compare every stage with the one before it.

    Args:
        program: The global program.
        partitioned: How it is partitioned, axis by axis.
        passes: What runs over the local program.
        inputs: A whole tensor for each slot.

    Returns:
        The first value of the first stage that differs; None if the last stage computes what the first one does.
    """
    old = all_values(program, split_inputs(inputs, program))
    local = program
    for stage in partitioned:
        local, given = stage.after, split_inputs(inputs, stage.after)
        new = all_values(local, given)
        found = first_partitioned(stage.before, local, stage.images, old, new)
        if found is not None:
            return _by_rule(stage, found, old)
        old = new
    for pass_ in passes:
        after = pass_(local)
        if after is local:
            continue
        new = all_values(after, given)
        found = first_rewritten(local, after, old, new)
        if found is not None:
            return _by_pass(local, pass_, found, old)
        local, old = after, new
    return None


# ---- rules


def _by_rule(stage: Partitioned, found: Difference, values: dict[fx.Node, list]) -> Culprit:
    node, axis = producer(found.node)[0], stage.decision.axis
    if node.op != "call_function":
        return _culprit(stage.before, found, f"the partition along {axis!r}", None)
    rule = stage.decision.rules[node]
    small, edge = piece.around(stage.before, node, 1)
    given = piece.lies_along(edge, stage.images, axis)
    inputs = _inputs(edge, values)
    if found.moved or piece.rule_difference(small, given, rule, inputs) is None:
        return _culprit(stage.before, found, f"the redistribution of what is returned along {axis!r}", None)
    made_by = f"the rule {_rule_text(rule)} of {op_text(node.target)} along {axis!r}"
    written = origin(node.target)  # type: ignore[arg-type]
    if piece.rule_difference(small, _as_the_rule_wants(node, edge, rule), rule, inputs) is None:
        moved = f"{_placements(given)} to {_placements(rule.inputs)}"
        made_by, written = f"the redistribution of its inputs from {moved} along {axis!r}", None
    check = f"check_rule({piece.texts(given)}, {piece.texts(rule.inputs)}, {piece.texts(rule.outputs)}, __file__)"
    title = f"{value_text(found.node)}: {made_by} gives other numbers than one device."
    text = piece.source(small, check, title, [written[1]] if written and written[1] else [])
    where = f" ({written[0]})" if written else ""
    return _culprit(stage.before, found, made_by + where, _saved(text, found.node, inputs))


def _as_the_rule_wants(node: fx.Node, edge: Sequence[fx.Node], rule: Rule) -> list[Placement]:
    """How the inputs of a call must lie so that none has to be moved."""
    wanted = dict(zip(reversed(tensor_nodes(node)), reversed(rule.inputs), strict=True))
    return [wanted[used] for used in edge]


def _rule_text(rule: Rule) -> str:
    return f"{_placements(rule.inputs)} -> {_placements(rule.outputs)}"


def _placements(placements: Sequence[Placement | None]) -> str:
    return ", ".join("none" if p is None else placement_text(p) for p in placements) or "nothing"


# ---- passes


def _by_pass(program: Program, pass_: Pass, found: Difference, values: dict[fx.Node, list]) -> Culprit:
    made_by = f"the pass {pass_text(pass_)}"
    title = f"{value_text(found.node)}: {made_by} changes its numbers."
    kind = type(pass_)
    ours = kind.__module__.startswith("meshstep.")
    path = getattr(sys.modules.get(kind.__module__), "__file__", None)
    for depth in DEPTHS:
        small, edge = piece.around(program, found.node, depth)
        inputs = _inputs(edge, values)
        if piece.pass_difference(small, pass_, inputs) is None:
            continue
        made = f"known_pass({pass_text(pass_)!r})" if ours else f"module({path!r}).{pass_!r}"
        text = piece.source(small, f"check_pass({made}, __file__)", title) if ours or path else None
        return _culprit(program, found, made_by, _saved(text, found.node, inputs))
    return _culprit(program, found, made_by, None)


# ---- what is told and saved


def _inputs(edge: Sequence[fx.Node], values: dict[fx.Node, list]) -> list[list[Tensor]]:
    """On each rank, the values of some nodes."""
    ranks = len(next(iter(values.values())))
    return [[values[node][rank].clone() for node in edge] for rank in range(ranks)]


def _culprit(program: Program, found: Difference, made_by: str, file: str | None) -> Culprit:
    made = producer(found.node)[0]
    line = next(text for of, text in program_lines(program) if of is made)
    return Culprit(" ".join(line.split()), made.meta.get("source", ""), found.error, made_by, file)


def _saved(text: str | None, node: fx.Node, inputs: list[list[Tensor]]) -> str | None:
    """Write the program and the values that it needs into a folder of their own."""
    if text is None:
        return None
    folder = Path(tempfile.mkdtemp(prefix="meshstep-fault-"))
    file = folder / f"{node.name}.py"
    file.write_text(text)
    torch.save(inputs, file.with_suffix(".pt"))
    return str(file)
