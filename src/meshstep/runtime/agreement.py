"""Ranks that would not do the same are told so, before any collective could hang."""

from __future__ import annotations

import difflib
import hashlib
import json
import platform
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import InputError, RankMismatchError
from ..ir.printer import exact_text, program_text
from ..ir.program import STATE_KINDS, Program, Slot, SlotKind
from ..ir.types import TensorType
from ..layout import REPLICATE, Layout
from ..mesh import Mesh
from .cache import FIRST_CALL
from .world import exchange, world

FIRST_CALL_S, LATER_CALL_S = 300.0, 8.0  # ranks start apart; later all are in the same step


def agree_on_call(topic: str, names: Sequence[str], leaves: Sequence[Any], reason: str) -> None:
    """See that all ranks pass tensors of the same types.

    Args:
        topic: Of this step and compilation, the same on all ranks.
        names: Paths of the arguments.
        leaves: The arguments.
        reason: Why this rank compiles.

    Raises:
        InputError: A rank passes other rows or another dtype.
        RankMismatchError: A rank does not compile now.
    """
    ours = {n: str(TensorType.of(leaf)) for n, leaf in zip(names, leaves, strict=True) if isinstance(leaf, Tensor)}
    first = reason == FIRST_CALL
    said = exchange(f"{topic}/call", json.dumps(ours), FIRST_CALL_S if first else LATER_CALL_S)
    absent = [rank for rank, message in enumerate(said) if message is None]
    if absent:
        raise RankMismatchError(
            f"{_ranks(absent)} did not come along when this rank compiled the step again",
            at=f"{topic.split('/')[0]}: {reason}",
            hint="pass equally many rows, equal dtypes and equal Python values on all ranks in every step",
        )
    heard = [json.loads(message or "{}") for message in said]
    for name in ours:
        passed = [types.get(name, "nothing") for types in heard]
        if len(set(passed)) > 1:
            text = ", ".join(f"rank {rank}: {type_}" for rank, type_ in enumerate(passed))
            raise InputError(
                "ranks pass tensors of different types",
                at=f"argument {name}  ({text})",
                hint="equally many rows and the same dtype on every rank: drop or pad the last rows of the data set",
            )


def agree_on_state(topic: str, slots: Sequence[Slot], inputs: Sequence[Tensor]) -> None:
    """See that all ranks start from the same values where state is whole, though it may become a shard.

    Compares two sums over each tensor: a difference is found, which element it is is not said.

    Args:
        topic: Of this step and compilation, the same on all ranks.
        slots: The inputs of the program.
        inputs: Their tensors on this rank.

    Raises:
        RankMismatchError: They do not; names the first such tensor.
    """
    compared = (*STATE_KINDS, SlotKind.HYPERPARAMETER, SlotKind.CONSTANT)
    whole = [
        (str(slot), tensor)
        for slot, tensor in zip(slots, inputs, strict=True)
        if slot.kind in compared and not isinstance(tensor, DTensor)
    ]
    if not whole or world().size == 1:
        return
    with torch.no_grad():
        sums = torch.stack([_sums(tensor) for _, tensor in whole]).tolist()
    ours = {name: [value.hex() for value in pair] for (name, _), pair in zip(whole, sums, strict=True)}
    heard = [json.loads(said or "{}") for said in exchange(f"{topic}/state", json.dumps(ours), FIRST_CALL_S)]
    for name in ours:
        other = next((rank for rank, values in enumerate(heard) if values.get(name) != heard[0].get(name)), None)
        if other is not None:
            raise RankMismatchError(
                f"ranks 0 and {other} start from different values",
                at=f"{topic.split('/')[0]}: {name}",
                hint="torch.manual_seed with one seed on all ranks before the model is made, or load one checkpoint",
            )


def agree_on_arguments(
    topic: str, names: Sequence[str], leaves: Sequence[Any], layouts: Sequence[Layout | None], mesh: Mesh
) -> None:
    """See that ranks that should pass the same values do: those along an axis over which an argument is whole.

    Args:
        topic: Of this step and compilation, the same on all ranks.
        names: Paths of the arguments.
        leaves: The arguments.
        layouts: How each lies; None for what is no tensor.
        mesh: The mesh.

    Raises:
        InputError: They do not; names the argument and the ranks.
    """
    whole = {
        name: (leaf, layout)
        for name, leaf, layout in zip(names, leaves, layouts, strict=True)
        if layout is not None and not isinstance(leaf, (DTensor, torch.nn.Parameter)) and _whole_axes(layout, mesh)
    }
    if not whole or world().size == 1:
        return
    with torch.no_grad():
        ours = {name: [value.hex() for value in _sums(leaf).tolist()] for name, (leaf, _) in whole.items()}
    heard = [json.loads(said or "{}") for said in exchange(f"{topic}/arguments", json.dumps(ours), FIRST_CALL_S)]
    for name, (_, layout) in whole.items():
        for axis in _whole_axes(layout, mesh):
            for rank in range(mesh.size):
                first = mesh.group(rank, axis)[0]
                if heard[rank].get(name) != heard[first].get(name):
                    ranks = f"ranks {first} and {rank}"
                    raise InputError(
                        f"{ranks} pass different values of an argument that is whole over axis {axis!r}",
                        at=f"{topic.split('/')[0]}: argument {name}, {layout}",
                        hint=f"ranks along {axis!r} pass the same rows (let the loader go by the place along the axes "
                        "that split the batch); or inputs={...: Shard(dim)}",
                    )


def _whole_axes(layout: Layout, mesh: Mesh) -> list[str]:
    return [axis for axis, placement in layout.placements if placement == REPLICATE and mesh[axis] > 1]


def _sums(tensor: Tensor) -> Tensor:
    """The sum, and that of the values times their places, which sees a permutation: f64[2] on the CPU."""
    flat = torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor.reshape(-1)
    wide = flat.double()
    places = torch.arange(len(wide), dtype=torch.float64, device=wide.device)
    return torch.stack([wide.sum(), wide @ places]).cpu()


def agree_on_program(topic: str, program: Program, plan: str = "") -> None:
    """See that all ranks run the same program: the same collectives in the same order, as it is one straight line.

    Args:
        topic: Of this step and compilation, the same on all ranks.
        program: The local program after all passes.
        plan: The plan as text.

    Raises:
        RankMismatchError: They would not; names the ranks and the first line that differs.
    """
    head = f"python {platform.python_version()}, torch {torch.__version__}\n{plan}\n"
    exact = head + exact_text(program)
    digests = exchange(f"{topic}/digest", hashlib.sha256(exact.encode()).hexdigest(), FIRST_CALL_S)
    if len(set(digests)) == 1:
        return
    absent = [rank for rank, digest in enumerate(digests) if digest is None]
    if absent:
        raise RankMismatchError(f"{_ranks(absent)} did not compile the step", at=topic.split("/")[0])
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    changed = next(
        filter(None, (_changed(f"{topic}/{form}", text, other) for form, text in _forms(head, program, exact))), []
    )
    raise RankMismatchError(
        f"ranks 0 and {other} would run different programs",
        at="\n       ".join([topic.split("/")[0], *changed]),
        hint="the same Python flags and the same model on all ranks",
    )


def _forms(head: str, program: Program, exact: str) -> Iterator[tuple[str, str]]:
    """The texts in which a difference is looked for: the one for people may cut it off."""
    yield "text", head + program_text(program)
    yield "exact", exact


def _changed(topic: str, text: str, other: int) -> list[str]:
    """The first line that differs between rank 0 and another one: both of its forms."""
    texts = exchange(topic, text, LATER_CALL_S)
    lines = difflib.ndiff((texts[0] or "").splitlines(), (texts[other] or "").splitlines())
    return [line.strip() for line in lines if line[0] in "-+"][:2]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
