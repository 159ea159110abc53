"""One program of a forward and its backward, cut in two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..ir.program import Program, Result, Slot, SlotKind, append, call, copy_node, is_part
from ..layout import Layout
from .regather import CHEAP

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Split:
    """A forward and a backward.

    Args:
        forward: Its last results are what the backward needs besides inputs.
        backward: Its slots are some of the whole program's, then what the forward has saved.
        forward_results: Which results of the whole program the forward has, in order.
        backward_results: Which ones the backward has, in order.
        saved: How many values the forward saves.
    """

    forward: Program
    backward: Program
    forward_results: tuple[int, ...]
    backward_results: tuple[int, ...]
    saved: int


def split(program: Program, backward_results: Sequence[int]) -> Split:
    """Cut a program.

    The forward computes what its results need and nothing else. What the backward needs of that is saved, but for views
    of inputs and parameters gathered from their shards: those are made anew.

    Args:
        program: A functional program, before any pass that mixes the two.
        backward_results: The results that belong to the backward.
    """
    return _Splitting(program, backward_results).run()


class _Splitting:
    def __init__(self, program: Program, backward_results: Sequence[int]) -> None:
        self.program = program
        self.late = tuple(sorted(backward_results))
        self.early = tuple(i for i in range(len(program.results)) if i not in set(self.late))
        self.outputs = [node for _, node in program.outputs]
        self.order = [node for node in program.graph.nodes if node.op == "call_function"]
        existing = set(program.slots)
        written = {program.results[i].slot for i in self.early} & existing
        self.written = {node for slot, node in program.inputs if slot in written}

    def run(self) -> Split:
        early = self._needed(self.outputs[i] for i in self.early)
        late = self._needed(self.outputs[i] for i in self.late) - early
        early |= {n for n in late if is_part(n) and n.args[0] in early}  # a part of what is computed is computed
        late -= early
        border = dict.fromkeys(
            near
            for user in [*(n for n in self.order if n in late), None]
            for near in (user.all_input_nodes if user is not None else [self.outputs[i] for i in self.late])
            if near not in late
        )
        again, saved = dict[fx.Node, None](), list[fx.Node]()
        for value in border:
            if self._is_free(value):
                again |= dict.fromkeys(self._needed([value]))
            else:
                saved.append(value)
        forward = self._program(early, self.early, saved=saved)
        backward = self._program(late | set(again), self.late, given=saved)
        return Split(forward, backward, self.early, self.late, len(saved))

    def _needed(self, values: Iterable[fx.Node]) -> set[fx.Node]:
        """The calls that values are computed by."""
        found, waiting = set[fx.Node](), list(values)
        while waiting:
            node = waiting.pop()
            if node.op == "call_function" and node not in found:
                found.add(node)
                waiting += node.all_input_nodes
        return found

    def _is_free(self, node: fx.Node) -> bool:
        """Whether the backward has it without the forward: an input that stays, a view of one, a parameter's shards."""
        if node.op == "placeholder":
            return node not in self.written
        return (node.target in CHEAP or bool(node.meta.get("regather"))) and all(
            map(self._is_free, node.all_input_nodes)
        )

    def _program(
        self,
        calls: set[fx.Node],
        results: Sequence[int],
        given: Sequence[fx.Node] = (),
        saved: Sequence[fx.Node] = (),
    ) -> Program:
        """A program of some of the calls.

        Args:
            calls: Which ones.
            results: The results that it has.
            given: Values that it gets instead of computing them.
            saved: Values that it returns besides.
        """
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        used = {near for n in calls for near in n.all_input_nodes} | {self.outputs[i] for i in results} | {*saved}
        held = {self.program.results[i].slot for i in results}
        slots: list[Slot] = []
        for slot, node in self.program.inputs:
            if (node in used or slot in held) and node not in given:
                copies[node] = copy_node(graph, node, {})
                slots.append(slot)
        for i, node in enumerate(given):
            copies[node] = append(graph, "placeholder", f"saved_{i}", (), None, f"saved_{i}")
            copies[node].meta.update(node.meta, layout=Layout())
            slots.append(Slot(SlotKind.ARGUMENT, f"saved {i}"))
        for node in self.order:
            if node in calls:
                copies[node] = copy_node(graph, node, copies)
        found: list[Any] = [copies[self.outputs[i]] for i in results]
        for node in saved:  # its layout is nobody's concern: this rank saves it for itself
            new = call(graph, aten.alias.default, (copies[node],), type=node.meta["type"], source=node.meta["source"])
            found.append(new)
        graph.output(tuple(found))
        named = [*(self.program.results[i] for i in results), *(Result(f"saved {i}") for i in range(len(saved)))]
        constants = {slot: tensor for slot, tensor in self.program.constants.items() if slot in set(slots)}
        return replace(self.program, graph=graph, slots=tuple(slots), results=tuple(named), constants=constants)
