"""`python -m meshstep.rules.report`: how much of PyTorch has rules, of what kind, and what discovery has found so far.

What the validator says needs samples of real tensors, which are with the tests: a caller gives them to `coverage`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import Partial

from .._torch import OpOverload
from ..layout import REPLICATE, shard_dim
from .pointwise import LINEAR
from .rule import Rule
from .sources import entry_of, rules_for
from .store import Store
from .table import TABLE
from .validator import Trial, validate

Samples = Mapping[Any, Sequence[tuple[tuple, Mapping[str, Any]]]]


@dataclass(slots=True)
class Coverage:
    """What the rules cover.

    Args:
        table: Number of ops that the table has.
        localized: How many of them change an argument on each rank.
        linear: Elementwise ops through which a sum over the ranks passes.
        tagged: Ops of PyTorch that are elementwise by its tag, and need no line.
        samples: Calls that were run; 0 if none were given.
        sampled: Ops of the table among these.
        kinds: Rules on these calls, by kind.
        placements: Rules run against their op, over all calls and numbers of ranks.
        findings: Wrong ones.
        cached: Pattern and number of rules of what discovery has kept.
    """

    table: int
    localized: int
    linear: int
    tagged: int
    samples: int = 0
    sampled: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    placements: int = 0
    findings: list[str] = field(default_factory=list)
    cached: list[tuple[str, int]] = field(default_factory=list)

    def __str__(self) -> str:
        """Some lines."""
        lines = [
            f"table        {self.table} ops, {self.localized} with arguments that differ from rank to rank",
            f"pointwise    {self.tagged} further ops by PyTorch's tag; {self.linear} let a sum over the ranks pass",
        ]
        if self.samples:
            kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items()))
            lines += [
                f"samples      {self.samples} calls of {self.sampled} ops",
                f"rules        {sum(self.kinds.values())} on these calls: {kinds}",
                f"validator    {self.placements} placements run, {len(self.findings)} wrong",
                *(f"  {finding}" for finding in self.findings),
            ]
        lines.append(f"discovered   {sum(n for _, n in self.cached)} rules of {len(self.cached)} patterns in the cache")
        lines += [f"  {count:3}  {pattern.split(' of ')[0]}" for pattern, count in self.cached]
        return "\n".join(lines)


def coverage(
    samples: Samples | None = None,
    sizes: Sequence[int] = (2,),
    run: Mapping[Any, Callable[..., Any]] | None = None,
    store: Store | None = None,
) -> Coverage:
    """Count what there is, and run the rules on some calls.

    Args:
        samples: Real calls by op.
        sizes: Numbers of ranks that they are run on.
        run: What to run in place of an op that this machine has no kernel for.
        store: Where discovery keeps its findings; None is where it does by default.
    """
    found = Coverage(
        table=len(TABLE),
        localized=sum(entry.localize is not None for entry in TABLE.values()),
        linear=len(LINEAR),
        tagged=sum(op not in TABLE for op in tagged_elementwise()),
        cached=sorted((store or Store()).contents()),
    )
    for op, calls in (samples or {}).items():
        if entry_of(op) is not None and calls:
            _run(found, op, calls, sizes, (run or {}).get(op))
    return found


def tagged_elementwise() -> list[OpOverload]:
    """The functional ops that PyTorch tags as elementwise and that are not random."""
    found = []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        overloads = (getattr(packet, o) for o in packet.overloads()) if hasattr(packet, "overloads") else ()
        found += [op for op in overloads if _is_elementwise(op)]
    return found


def _is_elementwise(op: OpOverload) -> bool:
    seeded = torch.Tag.nondeterministic_seeded in op.tags
    return torch.Tag.pointwise in op.tags and not seeded and not op._schema.is_mutable


def _run(found: Coverage, op: OpOverload, calls: Sequence[Any], sizes: Sequence[int], run: Any) -> None:
    found.sampled += op in TABLE
    for args, kwargs in calls:
        call = Trial.of(op, args, kwargs, 2, run).call
        found.samples += 1
        for size in sizes:
            rules = rules_for(call, size)
            found.placements += len(rules)
            found.findings += map(str, validate(op, args, kwargs, size=size, rules=rules, run=run))
            if size == sizes[0]:
                found.kinds.update(kind(rule) for rule in rules)


def kind(rule: Rule) -> str:
    """What a rule does, in a word."""
    if rule.local is not None:
        return "with a local form"
    if any(isinstance(p, Partial) for p in rule.inputs):
        return "that pass a sum"
    if all(p == REPLICATE for p in rule.inputs) and all(p is None or p == REPLICATE for p in rule.outputs):
        return "that replicate"
    if any(isinstance(p, Partial) for p in rule.outputs):
        return "that leave a sum"
    if any(p is not None and shard_dim(p) is not None for p in rule.outputs):
        return "that shard"
    return "that gather nothing"


if __name__ == "__main__":
    print(coverage())
