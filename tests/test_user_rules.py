"""Rules that the user writes, and those given to torch: they come first, and a wrong one is refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import toy_ops
from support import check_text
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from meshstep.errors import RuleError
from meshstep.ir.infer import infer
from meshstep.ir.types import TensorType
from meshstep.layout import placement_text
from meshstep.rules import OpCall, Rule, factor, is_known, localize, rules_for, unregister
from meshstep.rules.user import rule

aten = torch.ops.aten
R, P = Replicate(), Partial("sum")


@toy_ops.op(lambda x, w: x.new_empty(x.shape[0], w.shape[1]))
def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


@pytest.fixture(autouse=True)
def _as_before(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MESHSTEP_CACHE_DIR", str(tmp_path))
    yield
    for op in (*(getattr(torch.ops.toy, name).default for name in toy_ops.MADE), aten.mm.default):
        unregister(op)
        DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs.pop(op, None) if op.namespace == "toy" else None


def f32(*shape: int) -> TensorType:
    return TensorType(torch.float32, shape)


def call(op: Any, *args: Any) -> OpCall:
    return OpCall.of(op, args, {}, infer(op, args, {}))


def rules_of(op: Any, *args: Any, size: int = 2) -> list[str]:
    rules = rules_for(call(op, *args), size)[1:]
    return [" -> ".join(", ".join(placement_text(p) for p in side) for side in (r.inputs, r.outputs)) for r in rules]


def check_error(error: RuleError, golden: str) -> None:
    """Its text is the golden one, but for line numbers."""
    check_text(re.sub(r"\.py:\d+", ".py:N", f"{error}\n"), f"errors/{golden}.txt")


# ---- right ones


def test_rule_by_factors() -> None:
    rule(product)(factor("bm,mk->bk"))
    assert is_known(product)
    assert rules_of(product, f32(8, 16), f32(16, 4)) == [
        "S(0), R -> S(0)",
        "S(1), S(0) -> P(sum)",
        "R, S(1) -> S(1)",
    ]


def test_rule_as_a_decorated_function_which_stays_as_it_is() -> None:
    def rows(call: OpCall) -> Iterable[Rule]:
        return [Rule((Shard(0),), (Shard(0),))]

    assert rule(toy_ops.last_softmax)(rows) is rows
    assert rules_of(toy_ops.last_softmax, f32(8, 16)) == ["S(0) -> S(0)"]


def test_the_users_rules_come_before_the_table() -> None:
    rule(aten.mm.default)(factor("bM,Mk->bk"))
    assert rules_of(aten.mm.default, f32(8, 16), f32(16, 4)) == ["S(0), R -> S(0)", "R, S(1) -> S(1)"]


def test_numbers_that_change_are_given_by_localize() -> None:
    rule(toy_ops.same_rows, localize=lambda call, rule, size: {"rows": call["rows"] // size})(factor("aB->aB"))
    calls = call(toy_ops.same_rows, f32(8, 16), 8)
    (_, chosen) = rules_for(calls, 2)
    assert localize(calls, chosen, 2) == {"rows": 4}


def test_a_rule_is_run_once_for_each_kind_of_call() -> None:
    runs = []

    def rows(call: OpCall) -> Iterable[Rule]:
        runs.append(call)
        return [Rule((Shard(0),), (Shard(0),))]

    rule(toy_ops.last_softmax)(rows)
    rules_of(toy_ops.last_softmax, f32(8, 16))
    first = len(runs)
    rules_of(toy_ops.last_softmax, f32(8, 16))
    assert first > 2 and len(runs) == first + 1


def test_sharding_is_believed_on_demand() -> None:
    rule(toy_ops.last_softmax, validate=False)(factor("ab->ab"))
    assert rules_of(toy_ops.last_softmax, f32(8, 16)) == ["S(0) -> S(0)", "S(1) -> S(1)"]
    rule(toy_ops.fails, validate=False)(factor("ab->ab"))
    assert len(rules_of(toy_ops.fails, f32(8, 16))) == 2


def test_a_dim_that_no_small_call_divides_is_tried_on_the_real_one() -> None:
    rule(toy_ops.last_softmax)(factor("aB->aB"))
    assert rules_of(toy_ops.last_softmax, f32(4, 3)) == ["S(0) -> S(0)"]


# ---- wrong ones


def refused(op: Any, rules: Any, *args: Any) -> RuleError:
    rule(op)(rules)
    with pytest.raises(RuleError) as caught:
        rules_for(call(op, *args), 2)
    with pytest.raises(RuleError):  # not only the first time
        rules_for(call(op, *args), 2)
    return caught.value


def test_wrong_rule_is_refused_with_the_right_one() -> None:
    made = [Rule((Shard(0),), (R,))]
    check_error(refused(toy_ops.total, lambda call: made, f32(8, 16)), "rule_wrong")


def test_wrong_rule_that_nothing_can_replace() -> None:
    check_error(refused(toy_ops.last_softmax, factor("ab->ab"), f32(8, 16)), "rule_no_placement")


def test_op_that_cannot_be_run() -> None:
    check_error(refused(toy_ops.fails, factor("ab->ab"), f32(8, 16)), "rule_not_validated")


def test_number_that_is_not_localized() -> None:
    check_error(refused(toy_ops.same_rows, factor("aB->aB"), f32(8, 16), 8), "rule_not_localized")


MALFORMED: dict[str, tuple[Any, str]] = {
    "no_rule": ([Shard(0)], "is a Shard, not a Rule"),
    "count_of_inputs": ([Rule((Shard(0),), (Shard(0),))], "has 1 placements for 2 inputs"),
    "count_of_outputs": ([Rule((Shard(0), R), (Shard(0), R))], "has 2 placements for 1 outputs"),
    "no_dim": ([Rule((Shard(2), R), (Shard(0),))], "places input 0, f32[8, 16], as S(2)"),
    "negative_dim": ([Rule((Shard(0), R), (Shard(-1),))], "places output 0, f32[8, 4], as S(-1)"),
    "no_placement": ([Rule((Shard(0), R), (None,))], "places output 0, f32[8, 4], as None"),
    "average": ([Rule((Shard(1), Shard(0)), (Partial("avg"),))], "places output 0, f32[8, 4], as P(avg)"),
    "partial_input": ([Rule((Partial("max"), R), (R,))], "takes a partial input that is no sum"),
}


@pytest.mark.parametrize(("rules", "what"), MALFORMED.values(), ids=MALFORMED)
def test_rule_that_does_not_fit_the_call(rules: Any, what: str) -> None:
    error = refused(product, lambda call: rules, f32(8, 16), f32(16, 4))
    assert error.what == f"a rule of toy.product.default {what}"


def test_malformed_rule_has_three_parts() -> None:
    error = refused(product, lambda call: [Rule((Shard(0),), (Shard(0),))], f32(8, 16), f32(16, 4))
    check_error(error, "rule_malformed")


def test_function_that_fails() -> None:
    check_error(refused(product, factor("bm->bk"), f32(8, 16), f32(16, 4)), "rule_fails")


@pytest.mark.parametrize(
    "op",
    [torch.ops.toy.product, toy_ops.MADE["gate"], torch.mm, "my::op"],
    ids=["packet", "custom", "function", "text"],
)
def test_only_an_overload_can_have_rules(op: Any) -> None:
    with pytest.raises(RuleError, match="and no op") as caught:
        rule(op)
    assert caught.value.at and caught.value.at.startswith("test_user_rules.py:")


def test_no_overload_has_three_parts() -> None:
    with pytest.raises(RuleError) as caught:
        rule(torch.ops.toy.product)
    check_error(caught.value, "rule_no_op")


# ---- torch's own register_sharding


def test_rules_given_to_torch_are_used() -> None:
    @register_sharding(product)
    def sharding(x: Any, w: Any) -> Any:
        assert (x.ndim, tuple(w.shape)) == (2, (16, 4)) or x.shape[1] == w.shape[0]
        return [([R], [R, R]), ([Shard(-2)], [Shard(-2), R]), ([P], [Shard(1), Shard(0)])]

    assert is_known(product)
    assert rules_of(product, f32(8, 16), f32(16, 4)) == ["S(0), R -> S(0)", "S(1), S(0) -> P(sum)"]


def test_arguments_that_are_no_tensors_have_none() -> None:
    @register_sharding(toy_ops.gate)
    def sharding(x: Any, weight: Any, scale: float) -> Any:
        return [([R], [R, R, None]), ([Shard(0)], [Shard(0), R, None])]

    assert rules_of(toy_ops.gate, f32(8, 16), f32(16), 2.0) == ["S(0), R -> S(0)"]


def test_placements_that_meshstep_has_not_are_passed_over() -> None:
    @register_sharding(toy_ops.batch_mean)
    def sharding(x: Any) -> Any:
        return [([R], [R]), ([Partial("avg")], [Shard(0)])]

    assert rules_of(toy_ops.batch_mean, f32(8, 16)) == []


def test_wrong_rules_given_to_torch_are_refused() -> None:
    @register_sharding(toy_ops.last_softmax)
    def every_dim(x: Any) -> Any:
        return [([Shard(d)], [Shard(d)]) for d in range(x.ndim)]

    with pytest.raises(RuleError) as caught:
        rules_of(toy_ops.last_softmax, f32(8, 16))
    check_error(caught.value, "rule_of_torch_wrong")


def test_meshsteps_rule_comes_before_torchs() -> None:
    @register_sharding(product)
    def sharding(x: Any, w: Any) -> Any:
        return [([Shard(0)], [Shard(0), R])]

    rule(product)(factor("Bm,mK->BK"))
    assert rules_of(product, f32(8, 16), f32(16, 4)) == ["S(1), S(0) -> P(sum)"]


def test_strategies_that_torch_itself_has_are_no_users_rules() -> None:
    """They are known to be wrong in places."""
    from meshstep.rules.user import registered_with_torch

    assert registered_with_torch(aten.mm.default) is None
    assert registered_with_torch(aten.convolution.default) is None
