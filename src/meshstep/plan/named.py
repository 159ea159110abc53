"""The named plans: `meshstep.plans`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.placement_types import Placement

from ..errors import PlanError
from ..layout import shard
from .plan import Auto, AxisPlan, Choice, Plan, load

Parameters = Mapping[str, int | Placement]
Styles = Mapping[str, "str | Placement | ParallelStyle | Mapping[str, Placement]"]
STYLES = ("colwise", "rowwise", "sequence")


def data_parallel(axis: str = "dp") -> Plan:
    """State replicated, the batch split over `axis`; what depends on the batch is computed where its rows are.

    Args:
        axis: Name of the mesh axis.
    """
    return Plan((AxisPlan(axis, "data_parallel", batch_dim=0),))


def zero(stage: int, axis: str = "dp", *, parameters: Parameters | None = None, min_bytes: int = 0) -> Plan:
    """Data parallel, and each rank keeps only its share of some of the state.

    A tensor is sharded on its first dim that divides evenly; one that has none stays whole, and the plan of a lowered
    step lists it.

    Args:
        stage: 1 shards the optimizer's state, 2 gradients that outlive the step too, 3 parameters too.
        axis: Name of the mesh axis.
        parameters: Other choices by name: a pattern (as of `fnmatch`: `*` is any text) of parameters or modules, and
            the stage for them (0 keeps all of their state whole), or the placement of their state. The first pattern
            that fits counts.
        min_bytes: Parameters with fewer bytes stay whole, and their state with them.

    Raises:
        PlanError: There is no such stage.

    Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
    """
    if stage not in (1, 2, 3) or isinstance(stage, bool):
        raise PlanError(f"no ZeRO stage {stage!r}", at="plans.zero(stage)", hint="1, 2 or 3")
    return _sharded(f"zero{stage}", axis, stage, stage == 3, parameters, min_bytes)


def fsdp(
    axis: str = "dp",
    reshard_after_forward: bool = True,
    *,
    parameters: Parameters | None = None,
    min_bytes: int = 0,
) -> Plan:
    """Parameters, gradients and optimizer state sharded: `zero(3)`.

    Args:
        axis: Name of the mesh axis.
        reshard_after_forward: Whether a parameter is gathered again for the backward, instead of being held whole.
        parameters: As for `zero`.
        min_bytes: As for `zero`.

    Raises:
        PlanError: A choice that there is not.
    """
    return _sharded("fsdp", axis, 3, reshard_after_forward, parameters, min_bytes)


def _sharded(kind: str, axis: str, stage: int, regather: bool, parameters: Parameters | None, min_bytes: int) -> Plan:
    patterns = tuple(_named(parameters or {}, f"plans.{kind}(parameters=...)").items())
    for pattern, choice in patterns:
        is_stage = isinstance(choice, int) and not isinstance(choice, bool) and 0 <= choice <= 3
        if not is_stage and not isinstance(choice, Placement):
            raise PlanError(
                f"no choice {choice!r} for parameters",
                at=f"plans.{kind}(parameters={{{pattern!r}: ...}})",
                hint="a stage from 0 to 3, Replicate() or Shard(dim)",
            )
    return Plan(
        (AxisPlan(axis, kind, batch_dim=0, stage=stage, patterns=patterns, min_bytes=min_bytes, regather=regather),)
    )


def tensor_parallel(styles: Styles, axis: str = "tp", *, sequence_dim: int = 1) -> Plan:
    """Parameters sharded and computed with as they lie: each rank has all rows along `axis` and a part of each layer.

    Args:
        styles: What is done with modules or parameters, by a pattern of their names (as of `fnmatch`: `*` is any
            text); the first that fits counts.

            "colwise": A weight is split along its output features, a bias with it; an embedding along its columns.
                A fused projection, whose output is split into equal parts, has each part split.
            "rowwise": A weight is split along its input features, a bias is whole; an embedding along its rows.
            "sequence": The module (a norm, dropout) is computed in shards of the sequence.
            A placement, or one for each of a module's parameters by name: as it says.
            torch's `ColwiseParallel`, `RowwiseParallel` and `SequenceParallel` mean the same; the layouts of inputs
                and outputs that they name are chosen by cost here, without a change of any number.
        axis: Name of the mesh axis.
        sequence_dim: Which dim of activations is the sequence.

    Raises:
        PlanError: There is no such style.

    Source: Shoeybi et al. 2019, "Megatron-LM"; Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
    Transformer Models" (sequence).
    """
    patterns: list[tuple[str, Choice]] = []
    for pattern, style in _named(styles, "plans.tensor_parallel(styles)").items():
        patterns += _patterns(pattern, style)
        if isinstance(style, SequenceParallel):
            sequence_dim = style.sequence_sharding[0].dim
    return Plan(
        (AxisPlan(axis, "tensor_parallel", patterns=tuple(patterns), in_place=True, sequence_dim=sequence_dim),)
    )


def _named(given: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping) or not all(isinstance(pattern, str) for pattern in given):
        raise PlanError(
            f"a {type(given).__name__} instead of choices by name",
            at=where,
            hint="a dict of patterns of names, as in {'blocks.*.qkv': ...}",
        )
    return given


def _patterns(pattern: str, style: Any) -> Iterator[tuple[str, Choice]]:
    if isinstance(style, Mapping):
        for name, placement in style.items():
            yield from _patterns(f"{pattern}.{name}", placement)
        return
    for kind, name in ((ColwiseParallel, "colwise"), (RowwiseParallel, "rowwise"), (SequenceParallel, "sequence")):
        if isinstance(style, kind):
            style = name
    if style not in STYLES and not isinstance(style, Placement):
        raise PlanError(
            f"no style {style!r}",
            at=f"plans.tensor_parallel({{{pattern!r}: ...}})",
            hint=f"{', '.join(map(repr, STYLES))}, a placement, or placements by the names of parameters",
        )
    yield pattern, style


def context_parallel(axis: str = "cp", *, sequence_dim: int = 1) -> Plan:
    """State replicated, sequences split over `axis`: every rank has its part of each, and attends to the keys of all.

    Args:
        axis: Name of the mesh axis.
        sequence_dim: The dim of the arguments that is split; one with fewer dims is whole on every rank.
    """
    return Plan((AxisPlan(axis, "context_parallel", batch_dim=sequence_dim),))


def expert_parallel(experts: str | tuple[str, ...], axis: str = "ep", *, splits_batch: bool = True) -> Plan:
    """Each rank keeps and computes some of the experts; tokens travel to their experts and back by all_to_all.

    Args:
        experts: Patterns (as of `fnmatch`) of the parameters or modules that hold all experts, stacked along dim 0.
        axis: Name of the mesh axis.
        splits_batch: Whether every rank along the axis has rows of its own, as is usual; else all have the same.

    Source: Lepikhin et al. 2020, "GShard".
    """
    given: Any = experts
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise PlanError(
            f"experts are {given!r}", at="plans.expert_parallel(experts)", hint="a pattern of names, or a tuple of them"
        )
    patterns = tuple((name, shard(0)) for name in names)
    batch_dim = 0 if splits_batch else None
    return Plan((AxisPlan(axis, "expert_parallel", batch_dim=batch_dim, patterns=patterns, in_place=True),))


def auto(memory: int | None = None, device: str | None = None) -> Plan:
    """The fastest plan that fits, found when the step is first lowered or called, for every axis without a plan.

    What is found is an ordinary plan: `step.lower(...).plan`, which can be saved, and loaded without a search; and
    `.search` says what was compared. A step that is called keeps the plan that its first call found; its ranks pass
    rows of their own along all these axes.

    Args:
        memory: Bytes that a rank may hold at most; None is no bound.
        device: Name of the device in the hardware table; None is a CPU core with loopback.

    Raises:
        PlanError: The bound is no number of bytes.
    """
    if memory is not None and (isinstance(memory, bool) or not isinstance(memory, int) or memory <= 0):
        raise PlanError(f"no number of bytes: {memory!r}", at="plans.auto(memory)", hint="80 * 2**30 for 80 GiB")
    return Plan((), Auto(memory, device))


__all__ = ["auto", "context_parallel", "data_parallel", "expert_parallel", "fsdp", "load", "tensor_parallel", "zero"]
