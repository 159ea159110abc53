"""What a step's Python asks of the numbers in its state: `if self.n_averaged == 0`, `if lr != 0`.

The answer is compiled in. A `Question` computes it anew from the state at every call: where it has changed, the
program does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from .._torch import skip_dispatch_modes
from ..ir.program import Slot, SlotKind
from .places import Place

_NUMBERS = frozenset({SlotKind.BUFFER, SlotKind.OPTIMIZER_STATE, SlotKind.HYPERPARAMETER, SlotKind.CONSTANT})


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """A truth value that Python took of numbers of the state.

    Args:
        about: Which numbers, for people: `buffer n_averaged`.
        places: Where they are read.
        compute: Gives the truth of them.
        answer: What it was.
    """

    about: str
    places: tuple[Place, ...]
    compute: Callable[..., Any]
    answer: bool

    def difference(self, leaves: list[Any]) -> str | None:
        """Why the program does not fit; None if the answer is the same."""
        with torch.no_grad():
            now = _truth(self.compute, [place.read(leaves) for place in self.places])
        return None if now is self.answer else f"the answer to a question about {self.about} is now {now}"


def ask(
    node: fx.Node, slot_of: Callable[[fx.Node], Slot], places: Mapping[Slot, Place], values: Mapping[Slot, Tensor]
) -> Question | None:
    """The question whose answer a 0-d bool in the recorded graph is.

    Args:
        node: The bool.
        slot_of: Gives the slot of a placeholder.
        places: Where slots are read at later calls.
        values: What they are now.

    Returns:
        None if the answer depends on anything but numbers of the state.
    """
    chain = _chain(node)
    sources = [n for n in chain if n.op == "placeholder"]
    slots = [slot_of(n) for n in sources]
    if not sources or any(s.kind not in _NUMBERS or n.meta["type"].ndim for s, n in zip(slots, sources, strict=True)):
        return None
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for source in sources:
        copies[source] = graph.placeholder(source.name)
    for member in chain:
        if member.op != "placeholder":
            copies[member] = graph.node_copy(member, copies.__getitem__)
    graph.output(copies[node])
    compute = fx.GraphModule({}, graph).forward
    with skip_dispatch_modes(), torch.no_grad():
        answer = _truth(compute, [values[slot] for slot in slots])
    return Question(", ".join(map(str, slots)), tuple(places[slot] for slot in slots), compute, answer)


def _chain(node: fx.Node) -> list[fx.Node]:
    """The node and all that it is computed from, in order."""
    found, waiting = {node}, [node]
    while waiting:
        for near in waiting.pop().all_input_nodes:
            if near not in found:
                found.add(near)
                waiting.append(near)
    return [n for n in node.graph.nodes if n in found]


def _truth(compute: Callable[..., Any], values: list[Any]) -> bool:
    whole: list[Tensor] = [t.full_tensor() if isinstance(t, DTensor) else t for t in values]
    return bool(compute(*whole))
