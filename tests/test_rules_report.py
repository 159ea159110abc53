"""The report of what the rules cover."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from meshstep.layout import shard
from meshstep.rules import TABLE, Entry, Rule, register, unregister
from meshstep.rules.report import coverage, kind
from meshstep.rules.store import Store

aten = torch.ops.aten
X = torch.randn(4, 6, dtype=torch.float64)
SAMPLES: dict[Any, list] = {aten.mm.default: [((X, X.t().contiguous()), {})], aten.relu.default: [((X,), {})]}


def test_samples_are_run_and_counted(tmp_path: Path) -> None:
    found = coverage(SAMPLES, (2,), store=Store(tmp_path))
    assert (found.samples, found.sampled, found.placements, found.findings) == (2, 1, 9, [])
    assert found.table == len(TABLE)
    assert dict(found.kinds) == {
        "that replicate": 2, "that shard": 4, "that leave a sum": 1, "that pass a sum": 2,
    }  # fmt: skip


def test_wrong_rules_are_named(tmp_path: Path) -> None:
    register(aten.relu.default, Entry(lambda call: [Rule((Shard(0),), (Replicate(),))]))
    try:
        found = coverage(SAMPLES, (2,), store=Store(tmp_path))
    finally:
        unregister(aten.relu.default)
    assert "1 wrong" in str(found) and "aten.relu.default over 2 ranks: S(0) -> R" in str(found)


def test_the_cache_is_listed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write("my.op.default (x=f64[6]@cpu) of my::op(Tensor x) -> Tensor", [((shard(0),), (shard(0),), ())])
    text = str(coverage(store=store))
    assert text.endswith("1 rules of 1 patterns in the cache\n    1  my.op.default (x=f64[6]@cpu)")
    assert "validator" not in text


def test_kinds() -> None:
    assert kind(Rule((Shard(0),), (Shard(0),), lambda local: ())) == "with a local form"
    assert kind(Rule((Shard(0),), (Replicate(),))) == "that gather nothing"
