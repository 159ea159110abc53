"""The plans of one axis that people write by hand, for a search to compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..ir.program import Program, SlotKind
from .named import data_parallel, fsdp, zero
from .plan import AxisPlan


def by_hand(program: Program, axis: str) -> tuple[AxisPlan, ...]:
    """The named plans of an axis that differ for this program, the simplest first.

    Args:
        program: Partitioned along no axis.
        axis: Name of the mesh axis.
    """
    return tuple(_by_hand(program, axis))


def _by_hand(program: Program, axis: str) -> Iterator[AxisPlan]:
    kinds = {r.slot.kind for r in program.results if r.slot is not None}
    yield data_parallel(axis)[axis]
    if SlotKind.OPTIMIZER_STATE in kinds:
        yield zero(1, axis)[axis]
    if SlotKind.GRADIENT in kinds:
        yield zero(2, axis)[axis]
    yield fsdp(axis, reshard_after_forward=False)[axis]
    yield fsdp(axis)[axis]


def with_sequence(program: Program, plan: AxisPlan, shared: Mapping[str, str]) -> AxisPlan | None:
    """A tensor-parallel plan with its norms in shards of the sequence; None if there is nothing to shard so.

    Args:
        program: Partitioned along no axis.
        plan: Parameters sharded, the batch whole.
        shared: The pattern of each parameter.
    """
    named = {pattern for pattern, _ in plan.patterns}
    norms = [module for module in _norms(program, shared) if f"{module}.weight" not in named]
    if plan.batch_dim is not None or not plan.in_place or not norms:
        return None
    return replace(plan, patterns=(*plan.patterns, *((module, "sequence") for module in norms)))


def _norms(program: Program, shared: Mapping[str, str]) -> tuple[str, ...]:
    """Patterns of the modules with parameters of one dim and none of more."""
    dims: dict[str, int] = {}
    for slot, node in program.inputs:
        if slot.kind is SlotKind.PARAMETER:
            module = slot.name.rpartition(".")[0]
            dims[module] = max(dims.get(module, 0), node.meta["type"].ndim)
    patterns = {name.rpartition(".")[0]: pattern.rpartition(".")[0] for name, pattern in shared.items()}
    used = {node.meta.get("module", "") for node in program.calls}
    return tuple(dict.fromkeys(patterns[m] for m, n in dims.items() if n == 1 and m in used))
