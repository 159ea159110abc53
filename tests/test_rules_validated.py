"""No rule is believed: every rule of every op runs on real shards here. A rule that no sample reaches fails, too."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from rules_samples import Call, samples, tagged_elementwise
from rules_stand_ins import STAND_INS, stand_in_samples
from support import check_text
from torch import Tensor

from meshstep.ir.collectives import COLLECTIVES
from meshstep.ir.infer import infer
from meshstep.ir.types import TensorType
from meshstep.rules import TABLE, OpCall, Rule, entry_of, rules_for, validate
from meshstep.rules.rule import divides
from meshstep.rules.validator import Trial

SIZES = (2, 3, 4)


@functools.cache
def all_samples() -> dict[Any, list[Call]]:
    return samples() | stand_in_samples()


OPS = sorted({*TABLE, *tagged_elementwise()}, key=str)


@functools.cache
def calls_of(op: Any) -> list[OpCall]:
    return [Trial.of(op, args, kwargs, 2, STAND_INS.get(op)).call for args, kwargs in all_samples()[op]]


@pytest.mark.parametrize("op", OPS, ids=str)
def test_shards_give_what_the_whole_gives(op: Any) -> None:
    findings = [
        finding
        for args, kwargs in all_samples()[op]
        for size in SIZES
        for finding in validate(op, args, kwargs, size=size, run=STAND_INS.get(op))
    ]
    assert not findings, "\n".join(map(str, findings))


@pytest.mark.parametrize("op", OPS, ids=str)
def test_every_rule_is_reached_by_a_sample(op: Any) -> None:
    calls = calls_of(op)
    run = {rule for call in calls for size in SIZES for rule in rules_for(call, size)}
    named = {rule for call in calls for rule in entry_of(op).rules(call) if _can_be(call, rule)}
    assert run, "no sample"
    assert named <= run, "\n".join(str(rule) for rule in named - run)


def test_no_rule_is_lost() -> None:
    """How many rules each op of the table has over all samples on 2 ranks, `replicate` among them."""
    counts = {op: len({rule for call in calls_of(op) for rule in rules_for(call, 2)}) for op in OPS if op in TABLE}
    text = "".join(f"{count:3}  {op}\n" for op, count in counts.items())
    check_text(text, "rule_counts.txt")


def _can_be(call: OpCall, rule: Rule) -> bool:
    """Whether a rule could be chosen on any number of ranks: not if it splits a dim of size 1."""
    return any(divides(call, rule, size) for size in range(2, 25))


aten = torch.ops.aten
STRICTER_FAKES = {aten.__lshift__.Scalar, aten.__rshift__.Scalar}  # they refuse bool, the kernels do not
WITH_FAKES = [op for op in OPS if op not in {*STAND_INS, *COLLECTIVES, *STRICTER_FAKES}]


@pytest.mark.parametrize("op", WITH_FAKES, ids=str)
def test_fake_outputs_have_the_types_of_real_ones(op: Any) -> None:
    """A rule reads the types of a call as capture infers them. A fake may return what a mask has left out."""
    for call, (args, kwargs) in zip(calls_of(op), all_samples()[op], strict=True):
        fake = infer(op, _types(args), {name: _types(v) for name, v in kwargs.items()})
        shown = fake if isinstance(fake, tuple) else (fake,)
        assert tuple(r and f for r, f in zip(call.outputs, shown, strict=True)) == call.outputs


def _types(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_types, value))
    return TensorType.of(value) if isinstance(value, Tensor) else value
