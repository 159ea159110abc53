"""Where DTensor and meshstep differ, and who is right, by execution: `python tests/dtensor_differences.py [op ...]`.

For every sample of the table, and for many placements of its inputs on 2 ranks, DTensor's sharding propagation says
which placements the outputs get without moving anything. The same is asked of meshstep's rules. Where the answers
differ, the op is run on the shards, and what they recombine to is compared with the whole.

DTensor's propagation has no public entry that takes placements and moves nothing, so private ones are used, here only.
"""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rules_samples import Call, call, samples
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, TupleStrategy
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshstep.ir.collectives import COLLECTIVES
from meshstep.ir.updates import BY_OP
from meshstep.layout import placement_text
from meshstep.rules import TABLE, Rule, rules_for
from meshstep.rules.factories import UNINITIALIZED
from meshstep.rules.rule import divides, spelled
from meshstep.rules.small import mapped
from meshstep.rules.validator import Trial, split

aten = torch.ops.aten
R, P = Replicate(), Partial("sum")
RANKS = 2
_MOST = 40  # placements tried on one sample
Outputs = tuple[Placement | None, ...]


@dataclass(frozen=True)
class Claim:
    """What DTensor says of one call and placements of its inputs.

    Args:
        outputs: The placements of the outputs; None if it moves inputs first, or has no strategy.
        schema: The call as it would make it on one rank, with specs in place of tensors.
        why: What it does instead.
    """

    outputs: Outputs | None
    schema: OpSchema | None = None
    why: str = ""


@dataclass(frozen=True)
class Difference:
    """One call on which the two differ.

    Args:
        op: The op.
        shapes: Shapes of its tensors.
        inputs: Their placements.
        theirs: What DTensor says of the outputs; "" if it moves the inputs first.
        ours: What meshstep says; "" likewise.
        verdict: Who is right.
        fault: What execution showed of the wrong one.
    """

    op: str
    shapes: str
    inputs: str
    theirs: str
    ours: str
    verdict: str
    fault: str = ""


# ---- DTensor's answer


def mesh_of_ranks() -> DeviceMesh:
    """A mesh of ranks that are not there."""
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    return init_device_mesh("cpu", (RANKS,))


def claim(trial: Trial, inputs: Sequence[Placement], mesh: DeviceMesh) -> Claim:
    """What DTensor's propagation makes of these placements."""
    given = iter(inputs)

    def spec(tensor: Tensor) -> DTensorSpec:
        meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
        return DTensorSpec(mesh, (next(given),), tensor_meta=meta)

    op = trial.call.op
    args, kwargs = spelled(op, mapped(trial.arguments, Tensor, spec))
    propagator = DTensor._op_dispatcher.sharding_propagator
    schema = OpSchema(op, tuple(args), kwargs, schema_info=propagator.op_to_schema_info.get(op))
    try:
        found = propagator.propagate_op_sharding_non_cached(schema)
    except NotImplementedError:
        return Claim(None, why="no strategy")
    except Exception as error:
        return Claim(None, why=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:80])
    used = found.redistribute_schema if found.needs_redistribute and found.redistribute_schema else schema
    if _placements(used.args_schema, used.kwargs_schema) != list(inputs):
        return Claim(None, why="moves the inputs")
    specs = found.output_spec if isinstance(found.output_spec, (tuple, list)) else (found.output_spec,)
    outputs = tuple(s.placements[0] if isinstance(s, DTensorSpec) else None for s in specs)
    return Claim(outputs, used)


def _placements(args: Any, kwargs: Mapping[str, Any]) -> list[Placement]:
    found: list[DTensorSpec] = []
    _with_specs([args, *kwargs.values()], found.append)
    return [spec.placements[0] for spec in found]


def _with_specs(value: Any, change: Callable[[DTensorSpec], Any]) -> Any:
    """Nested arguments with something in place of each spec."""
    if isinstance(value, TupleStrategy):
        value = value.children
    if isinstance(value, (list, tuple)):
        return [_with_specs(v, change) for v in value]
    return change(value) if isinstance(value, DTensorSpec) else value


# ---- who is right


def fault_of(trial: Trial, inputs: Sequence[Placement], claimed: Claim) -> str | None:
    """What is wrong with DTensor's claim, the op run on shards as DTensor runs it."""
    assert claimed.outputs is not None and claimed.schema is not None
    if len(claimed.outputs) != len(trial.whole):
        return f"{len(claimed.outputs)} outputs"
    parts = [split(t, p, RANKS) for t, p in zip(_tensors(trial), inputs, strict=True)]
    try:
        ranks = [_run(claimed.schema, [p[rank] for p in parts]) for rank in range(RANKS)]
    except Exception as error:
        return f"fails on a shard: {str(error).splitlines()[0]}"[:80]
    if trial.call.op in UNINITIALIZED:
        return None
    for i, (whole, placement) in enumerate(zip(trial.whole, claimed.outputs, strict=True)):
        if isinstance(whole, Tensor) and placement is not None:
            wrong = _wrong([r[i] for r in ranks], whole, placement)
            if wrong:
                return f"output {i} {wrong}"
    return None


def _run(schema: OpSchema, own: list[Tensor]) -> tuple:
    """One rank's outputs: the op and the arguments are those that DTensor would use, sizes made local and all."""
    tensors = iter(own)
    args = _with_specs(schema.args_schema, lambda _: next(tensors))
    kwargs = {name: _with_specs(value, lambda _: next(tensors)) for name, value in schema.kwargs_schema.items()}
    found = schema.op(*args, **kwargs)
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def _wrong(parts: list[Tensor], whole: Tensor, placement: Placement) -> str | None:
    match placement:
        case Shard():
            if not 0 <= placement.dim < whole.ndim:
                return f"has no dim {placement.dim}"
            values = [torch.cat(parts, placement.dim)]
        case Partial(reduce_op="sum"):
            values = [sum(parts[1:], parts[0])]
        case Partial(reduce_op="avg"):
            values = [sum(parts[1:], parts[0]) / len(parts)]
        case Partial(reduce_op="max"):
            values = [torch.stack(parts).amax(0)]
        case Partial(reduce_op="min"):
            values = [torch.stack(parts).amin(0)]
        case Partial(reduce_op="product"):
            values = [torch.stack(parts).prod(0)]
        case Replicate():
            values = parts
        case _:
            raise AssertionError(placement)
    for value in values:
        if value.shape != whole.shape:
            return f"has shape {list(value.shape)}, not {list(whole.shape)}"
        within = {torch.float32: 1e-4, torch.complex64: 1e-4}.get(whole.dtype, 1e-9)
        close = torch.allclose(value.to(whole.dtype), whole, rtol=within, atol=within, equal_nan=True)
        if not close:
            return f"is off by {(value - whole).abs().nan_to_num().max().item():.3g}" if _adds(whole) else "differs"
    return None


def _adds(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _tensors(trial: Trial) -> list[Tensor]:
    found: list[Tensor] = []
    mapped(trial.arguments, Tensor, found.append)
    return found


# ---- what is asked


def placements_to_try(trial: Trial) -> Iterator[tuple[Placement, ...]]:
    """Those of our rules; each dim of each tensor with the dims of equal size of the others; sums."""
    tensors = _tensors(trial)
    seen: dict[tuple[Placement, ...], None] = dict.fromkeys(r.inputs for r in rules_for(trial.call, RANKS)[1:])
    sizes = dict.fromkeys(s for t in tensors for s in t.shape if s % RANKS == 0 and s)
    for size in sizes:
        options = [[*(Shard(d) for d, s in enumerate(t.shape) if s == size), R] for t in tensors]
        seen |= dict.fromkeys(itertools.islice(itertools.product(*options), 24))
    floats = [i for i, t in enumerate(tensors) if _adds(t)]
    for which in ([i] for i in floats):
        seen[tuple(P if i in which else R for i in range(len(tensors)))] = None
    seen[tuple(P if i in floats else R for i in range(len(tensors)))] = None
    yield from itertools.islice((s for s in seen if any(p != R for p in s)), _MOST)


def compared(op: Any, args: tuple, kwargs: Mapping[str, Any], mesh: DeviceMesh) -> Iterator[Difference]:
    """Every placement of one sample's inputs on which at least one of the two has an answer."""
    try:
        trial = Trial.of(op, args, kwargs, RANKS)
    except (RuntimeError, ValueError, TypeError):  # a sample with a stand-in, for another machine
        return
    ours = {rule.inputs: rule for rule in rules_for(trial.call, RANKS)}
    for inputs in placements_to_try(trial):
        theirs, rule = claim(trial, inputs, mesh), ours.get(inputs)
        if theirs.outputs is None and rule is None:
            continue
        yield _judged(trial, inputs, theirs, rule)


def _judged(trial: Trial, inputs: tuple[Placement, ...], theirs: Claim, ours: Rule | None) -> Difference:
    texts = ", ".join(map(_text, inputs)), _side(theirs.outputs), _side(ours.outputs if ours else None)
    shapes = ", ".join(str(list(t.shape)) for t in _tensors(trial))

    def difference(verdict: str, fault: str = "") -> Difference:
        return Difference(str(trial.call.op), shapes, *texts, verdict, fault)

    if ours is not None and not divides(trial.call, ours, RANKS):
        ours = None
    ours_wrong = _fault_of_ours(trial, ours) if ours else None
    if ours_wrong:
        return difference("MESHSTEP WRONG", ours_wrong)
    if theirs.outputs is None:
        return difference(f"only meshstep: DTensor {_kind(theirs.why)}")
    if any(not _is_plain(p) for p in theirs.outputs):
        return difference("only DTensor: strided shards, not judged")
    theirs_wrong = fault_of(trial, inputs, theirs)
    if theirs_wrong:
        return difference("DTensor wrong", theirs_wrong)
    if ours is None:
        return difference("only DTensor: right")
    same = len(theirs.outputs) == len(ours.outputs) and all(
        a is None or b is None or a == b for a, b in zip(theirs.outputs, ours.outputs)
    )
    return difference("agree" if same else "both right")


def _fault_of_ours(trial: Trial, rule: Rule) -> str | None:
    try:
        return trial.fault(rule)
    except Exception as error:  # of a local form, say
        return f"raises {error!r}"[:80]


def _kind(why: str) -> str:
    return why if why in ("no strategy", "moves the inputs") else "raises"


def _side(outputs: Outputs | None) -> str:
    return "" if outputs is None else ", ".join("none" if p is None else _text(p) for p in outputs)


def _text(placement: Placement) -> str:
    return placement_text(placement) if _is_plain(placement) else type(placement).__name__


def _is_plain(placement: Placement | None) -> bool:
    return placement is None or type(placement) in (Shard, Partial, Replicate)


# ---- losses as averages, on uneven shards


def uneven_losses(mesh: DeviceMesh) -> Iterator[Difference]:
    """DTensor gives a mean over a sharded batch as Partial(avg), also where the shards are uneven."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(5, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    calls: list[tuple[Any, tuple]] = [
        (aten.mse_loss.default, (x, y)),
        (aten.mean.default, (x,)),
        (aten.mean.dim, (x, [0])),
        (aten.smooth_l1_loss.default, (x, y)),
        (aten.huber_loss.default, (x, y)),
        (aten.soft_margin_loss.default, (x, y.sign())),
    ]
    for op, args in calls:
        trial = Trial.of(op, args, {}, RANKS)
        inputs = (Shard(0),) * len(_tensors(trial))
        theirs = claim(trial, inputs, mesh)
        shapes = ", ".join(str(list(t.shape)) for t in _tensors(trial))
        start = (str(op), shapes, ", ".join(map(_text, inputs)), _side(theirs.outputs), "")
        if theirs.outputs is None:
            yield Difference(*start, f"uneven: DTensor {_kind(theirs.why)}, meshstep replicates")
            continue
        wrong = fault_of(trial, inputs, theirs)
        yield Difference(
            *start, "DTensor wrong" if wrong else "uneven: DTensor right", f"uneven: {wrong}" if wrong else ""
        )


# ---- the whole


def own_samples() -> dict[Any, list[Call]]:
    """Calls that the table's samples do not have: losses."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(12, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    return {aten.mse_loss.default: [call(x, y)], aten.smooth_l1_loss.default: [call(x, y)]}


def differences(ops: Sequence[Any] | None = None) -> list[Difference]:
    """All comparisons, agreements too.

    Args:
        ops: The ops; None is all of the table.
    """
    mesh, known = mesh_of_ranks(), samples()
    for op, calls in own_samples().items():
        known.setdefault(op, calls)
    chosen = [op for op in (*TABLE, *own_samples()) if op not in COLLECTIVES and op not in BY_OP]
    found: list[Difference] = []
    for op in dict.fromkeys(chosen if ops is None else ops):
        for args, kwargs in known.get(op, ()):
            found += compared(op, args, kwargs, mesh)
    return [*found, *uneven_losses(mesh)]


def table(found: Sequence[Difference]) -> str:
    """Counts, then one line for each op and kind of difference: the first that was seen."""
    counts = Counter(d.verdict for d in found)
    lines = [f"{len(found)} placements of inputs of {len({d.op for d in found})} ops on {RANKS} ranks"]
    lines += [f"{count:6}  {verdict}" for verdict, count in sorted(counts.items(), key=lambda c: -c[1])]
    shown: dict[tuple, Difference] = {}
    for d in found:
        if d.verdict not in ("agree",) and not d.verdict.startswith("only meshstep"):
            shown.setdefault((d.verdict, d.op, d.inputs if d.verdict == "DTensor wrong" else ""), d)
    for verdict in sorted({key[0] for key in shown}):
        lines.append(f"\n{verdict}")
        for d in (d for key, d in shown.items() if key[0] == verdict):
            ours = f", meshstep {d.ours}" if d.ours else ", meshstep moves them"
            lines.append(f"  {d.op} of {d.shapes}: {d.inputs} -> {d.theirs}{ours}{'; ' + d.fault if d.fault else ''}")
    return "\n".join(lines)


def main() -> None:
    """Print the table; with `--json`, all comparisons."""
    warnings.simplefilter("ignore")
    names = [a for a in sys.argv[1:] if not a.startswith("--")]
    chosen = [op for op in (*TABLE, *own_samples()) if str(op) in names] if names else None
    found = differences(chosen)
    print(json.dumps([vars(d) for d in found], indent=1) if "--json" in sys.argv else table(found))


if __name__ == "__main__":
    main()
