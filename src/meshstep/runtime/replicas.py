"""State that several ranks hold is the same on all of them, to the bit; else: which rank, and which element."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import RankMismatchError, VerifyError
from ..ir.program import Program, Slot, SlotKind
from ..layout import Layout, shard_dim
from ..mesh import Mesh
from .checksums import BLOCK, block_sums, checksum, words_of
from .places import global_index
from .world import exchange, world

COMPARED = (SlotKind.PARAMETER, SlotKind.BUFFER, SlotKind.OPTIMIZER_STATE)
WAIT_S = 300.0  # ranks are at the end of one step


class Replicas:
    """Compares the state of one program over the ranks that hold it, through the store: no collective.

    Args:
        program: Its local program, which says how state lies.
    """

    def __init__(self, program: Program) -> None:
        """Note which state several ranks hold."""
        self._mesh, self._name = program.mesh, program.name
        self._held: list[tuple[int, Slot, Layout]] = [
            (index, slot, node.meta["layout"])
            for index, (slot, node) in enumerate(program.inputs)
            if slot.kind in COMPARED and _is_shared(node.meta["layout"], program.mesh)
        ]

    def check(self, topic: str, inputs: Sequence[Any], history: int = 0) -> None:
        """Compare; every rank calls it at the same place.

        Args:
            topic: The same on all ranks, never used before.
            inputs: The tensor of each slot on this rank.
            history: A number made of which programs this rank has run.

        Raises:
            VerifyError: Copies differ; names the rank, the state and the element.
            RankMismatchError: A rank does not come along, or has run other programs.
        """
        if world().size == 1:
            return
        self._same_history(f"{topic}/history", history)
        if not self._held:
            return
        with torch.no_grad():
            sums = torch.stack([checksum(_local(inputs[i])).cpu() for i, _, _ in self._held]).tolist()
        said = [f"{sum_ & 2**64 - 1:016x}" for sum_ in sums]
        digests = {key: hashlib.sha256("".join(said[n] for n in of).encode()).hexdigest() for key, of in self._kinds()}
        heard = _heard(f"{topic}/digests", digests, self._name)
        if all(not _strangers(heard, key, self._mesh, key) for key in digests):
            return
        heard = _heard(f"{topic}/sums", said, self._name)
        wrong = [n for n, (_, _, layout) in enumerate(self._held) if _strangers(heard, n, self._mesh, _key(layout))]
        index, slot, layout = self._held[wrong[0]]
        self._locate(topic, slot, layout, _local(inputs[index]), len(wrong))

    def _same_history(self, topic: str, history: int) -> None:
        heard = _heard(topic, [history], self._name)
        strange = _strangers(heard, 0, self._mesh, "")
        if strange:
            rank, others = strange[0]
            raise RankMismatchError(
                f"rank {rank} has run other programs of the step than rank {others[0]}",
                at=self._name,
                hint="the same Python values in every call on all ranks; go on from before the last check",
            )

    def _kinds(self) -> list[tuple[str, list[int]]]:
        """State that the same ranks hold together: by the axes that split it."""
        found: dict[str, list[int]] = {}
        for n, (_, _, layout) in enumerate(self._held):
            found.setdefault(_key(layout), []).append(n)
        return list(found.items())

    def _locate(self, topic: str, slot: Slot, layout: Layout, tensor: Tensor, count: int) -> None:
        key = _key(layout)
        words = words_of(tensor)
        blocks = _heard(f"{topic}/blocks", block_sums(words).tolist(), self._name)
        block = next(b for b in range(len(blocks[0])) if _strangers(blocks, b, self._mesh, key))
        part = words[block * BLOCK : (block + 1) * BLOCK].tolist()
        heard = _heard(f"{topic}/words", part, self._name)
        word = next(w for w in range(len(part)) if _strangers(heard, w, self._mesh, key))
        rank, others = _strangers(heard, word, self._mesh, key)[0]
        ours, theirs = (torch.tensor(heard[r][word], dtype=torch.int64) for r in (rank, others[0]))
        bytes_ = ours.view(1).view(torch.uint8) != theirs.view(1).view(torch.uint8)
        within = int(bytes_.nonzero()[0]) // tensor.itemsize
        flat = (block * BLOCK + word) * (8 // tensor.itemsize) + within
        element = torch.unravel_index(torch.tensor(flat), tensor.shape) if tensor.ndim else ()
        place = global_index(tuple(map(int, element)), tensor.shape, layout, self._mesh, rank)
        found, held = (w.view(1).view(tensor.dtype)[within].item() for w in (ours, theirs))
        one = len(others) == 1
        names = ", ".join(map(str, others))
        more = f" (and {count - 1} other tensor{'s' if count > 2 else ''})" if count > 1 else ""
        raise VerifyError(
            f"rank {rank} holds another value of what rank{'' if one else 's'} {names} hold{'s' if one else ''}, too",
            at=f"{self._name}: {slot}{list(place) if place else ''}: {found!r} on rank {rank}, {held!r} on "
            f"rank{'' if one else 's'} {names}; {_bits(ours, theirs, tensor.itemsize, within)}{more}",
            hint="go on from the last checkpoint; "
            + ("with two copies nothing says which one is right" if one else f"look at the memory of rank {rank}"),
        )


def _bits(ours: Tensor, theirs: Tensor, itemsize: int, within: int) -> str:
    """`1 bit, number 22, of 32 differs`."""
    differing = (int(ours) ^ int(theirs)) & 2**64 - 1
    element = differing >> (8 * itemsize * within) & 2 ** (8 * itemsize) - 1
    numbers = [bit for bit in range(8 * itemsize) if element >> bit & 1]
    if len(numbers) == 1:
        return f"bit {numbers[0]} of {8 * itemsize} differs"
    return f"{len(numbers)} bits of {8 * itemsize} differ"


def _strangers(heard: Sequence[Any], key: Any, mesh: Mesh, axes: str) -> list[tuple[int, list[int]]]:
    """The ranks whose value is not that of most of the ranks that hold the same, each with those.

    Args:
        heard: What each rank said.
        key: What of it is compared.
        mesh: The mesh.
        axes: The axes that split the state, as `_key` has them: ranks at one place along them hold the same.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.size):
        at = mesh.coordinate(rank)
        groups.setdefault(tuple(at[axis] for axis in axes.split()), []).append(rank)
    found: list[tuple[int, list[int]]] = []
    for ranks in groups.values():
        (most, _), *_ = Counter(heard[rank][key] for rank in ranks).most_common()
        agreeing = [rank for rank in ranks if heard[rank][key] == most]
        found += [(rank, agreeing) for rank in ranks if heard[rank][key] != most]
    return found


def _heard(topic: str, message: Any, name: str) -> list[Any]:
    said = exchange(topic, json.dumps(message), WAIT_S)
    absent = [rank for rank, text in enumerate(said) if text is None]
    if absent:
        raise RankMismatchError(
            f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))} did not come along when ranks "
            "compared their state",
            at=name,
            hint="the same check_every=, and equally many calls, on all ranks",
        )
    return [json.loads(text or "null") for text in said]


def _is_shared(layout: Layout, mesh: Mesh) -> bool:
    return any(shard_dim(layout[axis]) is None and mesh[axis] > 1 for axis in mesh)


def _key(layout: Layout) -> str:
    """The axes that split a value, in words."""
    return " ".join(axis for axis, placement in layout.placements if shard_dim(placement) is not None)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
