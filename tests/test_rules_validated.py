"""No rule is believed: every rule of every op runs on real shards here. A rule that no sample reaches fails, too."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from rules_samples import Call, samples, tagged_elementwise
from rules_stand_ins import STAND_INS, stand_in_samples
from torch import Tensor

from meshstep.ir.collectives import COLLECTIVES
from meshstep.ir.infer import infer
from meshstep.ir.types import TensorType
from meshstep.rules import TABLE, Rule, entry_of, rules_for, validate
from meshstep.rules.validator import Trial

SIZES = (2, 3, 4)


@functools.cache
def all_samples() -> dict[Any, list[Call]]:
    return samples() | stand_in_samples()


OPS = sorted({*TABLE, *tagged_elementwise()}, key=str)


def trials(op: Any, size: int) -> list[Trial]:
    return [Trial.of(op, args, kwargs, size, STAND_INS.get(op)) for args, kwargs in all_samples()[op]]


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
    run: set[Rule] = set()
    named: set[Rule] = set()
    for size in SIZES:
        for trial in trials(op, size):
            run.update(rules_for(trial.call, size))
            named.update(entry_of(op).rules(trial.call))
    assert run, "no sample"
    assert named <= run, "\n".join(str(rule) for rule in named - run)


@pytest.mark.parametrize("op", [op for op in OPS if op not in STAND_INS and op not in COLLECTIVES], ids=str)
def test_fake_outputs_have_the_types_of_real_ones(op: Any) -> None:
    """A rule reads the types of a call as capture infers them."""
    for args, kwargs in all_samples()[op]:
        real = Trial.of(op, args, kwargs, 2).call.outputs
        fake = infer(op, _types(args), {name: _types(v) for name, v in kwargs.items()})
        assert (fake if isinstance(fake, tuple) else (fake,)) == real


def _types(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_types, value))
    return TensorType.of(value) if isinstance(value, Tensor) else value
