"""Which new state of a program can be computed where the old one lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from ..ir.program import Program, Slot, SlotKind, producer
from ..ir.updates import BY_OP

aten = torch.ops.aten
Value = tuple[fx.Node, int]


@dataclass(frozen=True, slots=True, eq=False)
class InPlace:
    """What is computed in place.

    Args:
        updates: Optimizer updates that write straight into the inputs that they read.
        counters: `step + 1` of 0-d optimizer state: the node, and the input that holds the state.
    """

    updates: Mapping[fx.Node, None]
    counters: Mapping[fx.Node, fx.Node]

    def __contains__(self, node: fx.Node) -> bool:
        """Whether a value is computed in place."""
        return producer(node)[0] in self.updates or node in self.counters

    def overwritten(self) -> list[fx.Node]:
        """The inputs that hold what is computed in place."""
        return [held for node in self.updates for held in written(node)] + list(self.counters.values())


def in_place(program: Program) -> InPlace:
    """Find what can be computed in place: each value is the new state of one slot, reads the old one, and no more.

    An update's tensors are inputs of slots, what it makes is exactly their new values, and nobody else reads those. A
    counter's old value is read by nobody else, its new value by such updates only.
    """
    slot_of = {node: slot for slot, node in program.inputs}
    slots_for: dict[Value, list[Slot | None]] = {}
    for result, node in program.outputs:
        slots_for.setdefault(producer(node), []).append(result.slot)
    updates = {n: None for n in program.calls if n.target in BY_OP and _is_update(n, slot_of, slots_for)}
    counters = {
        node: held
        for _, node in program.outputs
        if (held := _held(node, slot_of)) and slots_for[node, 0] == [slot_of[held]] and _feeds_only(node, updates)
    }
    return InPlace(updates, counters)


def written(update: fx.Node) -> list[fx.Node]:
    """The tensors that an update writes; an optional one that is missing is left out."""
    known = BY_OP[update.target]
    places = [known.lists.index(name) for name in known.written]
    return [update.args[i] for i in places if update.args[i] is not None]  # type: ignore[misc]


def _is_update(node: fx.Node, slot_of: Mapping[fx.Node, Slot], slots_for: Mapping[Value, list[Slot | None]]) -> bool:
    update = BY_OP[node.target]
    if any(user.op != "output" for item in node.users for user in item.users):
        return False
    for index, name in enumerate(update.written):
        tensor = node.args[update.lists.index(name)]
        if isinstance(tensor, fx.Node) and slots_for.get((node, index)) != [slot_of.get(tensor)]:
            return False
    return True


def _held(node: fx.Node, slot_of: Mapping[fx.Node, Slot]) -> fx.Node | None:
    """The 0-d optimizer state that a node adds a number to, if it does and nobody else reads that state."""
    if node.target not in (aten.add.Tensor, aten.add.Scalar) or len(node.args) != 2 or node.kwargs:
        return None
    held, step = node.args
    if not isinstance(held, fx.Node) or not isinstance(step, (int, float)) or len(held.users) > 1:
        return None
    is_state = held in slot_of and slot_of[held].kind is SlotKind.OPTIMIZER_STATE
    return held if is_state and node.meta["type"].ndim == 0 else None


def _feeds_only(node: fx.Node, updates: Mapping[fx.Node, None]) -> bool:
    return all(user in updates or user.op == "output" for user in node.users)
