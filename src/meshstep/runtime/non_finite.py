"""The first value of a step that is not a number, or infinite, while what it is made of is not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..errors import RankMismatchError
from ..ir.printer import program_lines
from ..ir.program import Program, producer
from ..layout import Layout
from ..rules.factories import UNINITIALIZED
from .interpret import run_here
from .lockstep import ancestors
from .places import global_index
from .simulate import run_ranks
from .world import exchange, world

WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class NonFinite:
    """Where a number goes bad.

    Args:
        value: The line of the program that computes it, or the input that had it from the start.
        source: The user's line, "" if unknown.
        number: "nan", "inf" or "-inf".
        rank: The first rank that has it.
        index: Of its first such element in the whole value; in the rank's part where a whole value is a sum of parts.
        count: How many such elements the rank has.
        reached: The results that are not finite for it: outputs, parameters, optimizer state.
    """

    value: str
    source: str
    number: str
    rank: int
    index: tuple[int, ...]
    count: int
    reached: tuple[str, ...]

    def __str__(self) -> str:
        """Three lines: what, where, what it reaches."""
        shown, more = ", ".join(self.reached[:SHOWN]), len(self.reached) - SHOWN
        rest = f" and {more} more" if more > 0 else ""
        return (
            f"{self.number} at {list(self.index)} on rank {self.rank}, {self.count} in all there\n"
            f"  at   {self.value}\n  reaches {shown}{rest}"
        )


SHOWN = 4
Found = tuple[int, int, str, tuple[int, ...], int]  # order of the node, rank, number, index in the part, how many


def find_on_all(program: Program, inputs: Sequence[Sequence[Tensor]]) -> NonFinite | None:
    """Play all ranks in this process.

    Args:
        program: The local program, best before any pass.
        inputs: For each rank, one tensor a slot.
    """
    values: dict[fx.Node, list[Any]] = {node: [own[i] for own in inputs] for i, node in enumerate(program.placeholders)}
    run_ranks(program, inputs, values.__setitem__)
    bad = _bad_results(program, lambda node: values[node])

    def on(rank: int) -> Found | None:
        return _first(program, lambda node: values[node][rank], rank, bad)

    found = [first for first in map(on, range(program.mesh.size)) if first is not None]
    return _told(program, min(found), bad) if found else None


def find_here(program: Program, inputs: Sequence[Tensor], topic: str) -> NonFinite | None:
    """As one of the processes of a run: all of them call it, and all get the same answer.

    Args:
        program: The local program, best before any pass.
        inputs: This rank's tensor of each slot.
        topic: The same on all ranks, never used before.

    Raises:
        RankMismatchError: A rank does not come along.
    """
    values = run_here(program, inputs)
    ours = _bad_results(program, lambda node: [values[node]])
    bad = sorted({i for said in _heard(f"{topic}/results", ours) for i in said})
    first = _first(program, values.__getitem__, world().rank, bad)
    found = [tuple(said) for said in _heard(f"{topic}/first", first) if said is not None]
    if not found:
        return None
    order, rank, number, index, count = min(found)
    return _told(program, (order, rank, number, tuple(index), count), bad)


def _heard(topic: str, message: Any) -> list[Any]:
    said = exchange(topic, json.dumps(message), WAIT_S)
    absent = [str(rank) for rank, text in enumerate(said) if text is None]
    if absent:
        raise RankMismatchError(
            f"ranks {', '.join(absent)} did not come along when this rank looked for numbers that are not finite",
            at="find_non_finite",
            hint="call it on all ranks",
        )
    return [json.loads(text or "null") for text in said]


def _bad_results(program: Program, values: Callable[[fx.Node], Sequence[Any]]) -> list[int]:
    return [i for i, (_, node) in enumerate(program.outputs) if any(not _finite(v) for v in values(node))]


def _first(program: Program, value: Callable[[fx.Node], Any], rank: int, bad: Sequence[int]) -> Found | None:
    """The first value on one rank, of those that reach a bad result.

    What a collective brings from another rank is born there, at a value before it, and the first of all ranks counts.
    """
    outputs: Any = program.output_node.args[0]
    wanted = ancestors(outputs[i] for i in bad)
    for order, node in enumerate(program.graph.nodes):
        if node not in wanted or node.target in UNINITIALIZED or isinstance(value(node), (tuple, list)):
            continue
        born = _born(node, value)
        if born is not None:
            number, index = born
            return order, rank, number, index, int((~torch.isfinite(value(node))).sum())
    return None


def _born(node: fx.Node, value: Callable[[fx.Node], Any]) -> tuple[str, tuple[int, ...]] | None:
    """Whether a value has what none of those has that it is made of: the number and its index.

    Something that is not a number is born of what has none, something infinite of what is finite: masks have infinite
    elements on purpose. What is said to be infinite in the program itself is meant to be.
    """
    found = value(node)
    if not isinstance(found, Tensor) or _finite(found):
        return None
    made_of = [value(n) for n in producer(node)[0].all_input_nodes] if node.op == "call_function" else []
    given = [v for v in made_of if isinstance(v, Tensor) and v.is_floating_point()]
    nan = torch.isnan(found)
    if nan.any() and not any(torch.isnan(v).any() for v in given):
        return "nan", _where(nan)
    infinite = torch.isinf(found)
    if infinite.any() and all(map(_finite, given)) and not _says_infinite(node):
        index = _where(infinite)
        return str(float(found[index].real)), index
    return None


def _finite(value: Any) -> bool:
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return True
    return bool(torch.isfinite(value).all())


def _says_infinite(node: fx.Node) -> bool:
    return any(isinstance(a, float) and not math.isfinite(a) for a in (*node.args, *node.kwargs.values()))


def _where(mask: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in mask.nonzero()[0])


def _told(program: Program, found: Found, bad: Sequence[int]) -> NonFinite:
    order, rank, number, index, count = found
    node = next(n for i, n in enumerate(program.graph.nodes) if i == order)
    made = producer(node)[0]
    line = next(text for of, text in program_lines(program) if of is made)
    layout: Layout = node.meta["layout"]
    place = global_index(index, node.meta["type"].shape, layout, program.mesh, rank)
    results = list(program.results)
    names = tuple(str(results[i]) for i in bad)
    return NonFinite(" ".join(line.split()), node.meta.get("source", ""), number, rank, place, count, names)
