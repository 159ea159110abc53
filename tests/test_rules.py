"""What a call's rules are, where they come from, and that wrong ones are found."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from meshstep.ir import collectives
from meshstep.ir.infer import infer
from meshstep.ir.types import TensorType
from meshstep.layout import local_shape, placement_text
from meshstep.rules import (
    TABLE,
    Entry,
    OpCall,
    Rule,
    factor,
    is_known,
    localize,
    register,
    replicate,
    rules_for,
    unregister,
    validate,
)
from meshstep.rules.rule import spelled
from meshstep.rules.views import view_dims

aten = torch.ops.aten
R, P = Replicate(), Partial("sum")


def f64(*shape: int) -> TensorType:
    return TensorType(torch.float64, shape)


def i64(*shape: int) -> TensorType:
    return TensorType(torch.int64, shape)


def rules_of(op: Any, *args: Any, size: int = 2, **kwargs: Any) -> list[str]:
    """The rules of a call as text, without `replicate`."""
    call = OpCall.of(op, args, kwargs, infer(op, args, kwargs))
    return [_text(rule) for rule in rules_for(call, size)][1:]


def _text(rule: Rule) -> str:
    sides = (rule.inputs, rule.outputs)
    return " -> ".join(", ".join(placement_text(p) if p else "none" for p in side) for side in sides)


def chosen(op: Any, *args: Any, inputs: tuple, size: int = 2) -> tuple[OpCall, Rule]:
    """A call and the rule that it has for these inputs."""
    call = OpCall.of(op, args, {}, infer(op, args, {}))
    return call, next(rule for rule in rules_for(call, size) if rule.inputs == inputs)


# ---- what the rules of a call are


def test_replicate_comes_first_and_every_op_has_it() -> None:
    call = OpCall.of(aten.mm.default, (f64(3, 5), f64(5, 7)), {}, f64(3, 7))
    assert rules_for(call, 2)[0] == replicate(call) == Rule((R, R), (R,))


def test_matrix_product() -> None:
    assert rules_of(aten.mm.default, f64(4, 6), f64(6, 8)) == [
        "S(0), R -> S(0)",
        "S(1), S(0) -> P(sum)",
        "R, S(1) -> S(1)",
        "P(sum), R -> P(sum)",
        "R, P(sum) -> P(sum)",
    ]


def test_only_even_shards() -> None:
    assert rules_of(aten.relu.default, f64(4, 6), size=4) == ["S(0) -> S(0)"]
    assert rules_of(aten.relu.default, f64(5, 7), size=4) == []


def test_layer_norm_backward_sums_the_gradients_of_weight_and_bias() -> None:
    x, stat, w = f64(4, 8), f64(4, 1), f64(8)
    found = rules_of(aten.native_layer_norm_backward.default, x, x, [8], stat, stat, w, None, [True, True, False])
    assert found == ["S(0), S(0), S(0), S(0), R -> S(0), P(sum), none", "P(sum), R, R, R, R -> P(sum), P(sum), none"]


def test_a_sum_over_the_ranks_passes_through_no_affine_op() -> None:
    assert "P(sum), P(sum) -> P(sum)" in rules_of(aten.add.Tensor, f64(4), f64(4))
    assert rules_of(aten.add.Tensor, f64(4), 1.0) == ["S(0) -> S(0)"]
    assert rules_of(aten.add.Tensor, f64(4), 0.0) == ["S(0) -> S(0)", "P(sum) -> P(sum)"]
    assert rules_of(aten.add.Tensor, f64(4), f64(4))[-1:] != ["P(sum), R -> P(sum)"]


def test_a_sum_over_the_ranks_passes_through_a_product_with_a_whole_value_only() -> None:
    found = rules_of(aten.mul.Tensor, f64(5), f64(5))
    assert found == ["P(sum), R -> P(sum)", "R, P(sum) -> P(sum)"]


@pytest.mark.parametrize(
    ("dtype", "to", "passes"),
    [
        (torch.float64, torch.float32, True),
        (torch.int64, torch.float32, True),
        (torch.float32, torch.int64, False),
        (torch.float32, torch.bool, False),
        (torch.bool, torch.float32, False),
        (torch.uint8, torch.float32, False),
    ],
)
def test_a_sum_over_the_ranks_passes_through_a_cast_that_is_linear(
    dtype: torch.dtype, to: torch.dtype, passes: bool
) -> None:
    assert ("P(sum) -> P(sum)" in rules_of(aten._to_copy.default, TensorType(dtype, (4,)), dtype=to)) == passes


def test_integers_are_not_added_in_shares() -> None:
    found = rules_of(aten.addmm.default, i64(4), i64(2, 6), i64(6, 4))
    assert not any(rule.startswith("R") and rule.endswith("P(sum)") for rule in found)


def test_a_fill_passes_a_sum_only_if_it_is_zero() -> None:
    mask = TensorType(torch.bool, (4,))
    assert "P(sum), R -> P(sum)" in rules_of(aten.masked_fill.Scalar, f64(4), mask, 0)
    assert "P(sum), R -> P(sum)" not in rules_of(aten.masked_fill.Scalar, f64(4), mask, 1.0)


def test_attention_with_dropout_is_replicated() -> None:
    q = f64(4, 2, 8, 16)
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    dropped = OpCall.of(op, (q, q, q, 0.1), {}, (q, f64(4, 2, 8)))
    assert rules_for(dropped, 2) == (replicate(dropped),)
    assert rules_of(op, q, q, q) == [
        "S(0), S(0), S(0) -> S(0), S(0)",
        "S(1), S(1), S(1) -> S(1), S(1)",
        "S(2), R, R -> S(2), S(2)",
    ]


def test_grouped_query_heads_are_sharded_only_if_both_counts_divide() -> None:
    op, q, k = aten._scaled_dot_product_flash_attention.default, f64(3, 8, 4, 16), f64(3, 2, 4, 16)
    saved = (q, f64(3, 8, 4), None, None, None, None, i64(2), i64(), f64(0))
    call = OpCall.of(op, (q, k, k), {}, saved)
    assert [_text(rule) for rule in rules_for(call, 2)[1:]] == [
        "S(1), S(1), S(1) -> S(1), S(1), none, none, none, none, R, R, R"
    ]
    assert rules_for(call, 4) == (replicate(call),)


@pytest.mark.parametrize(
    "op", [aten.rand.default, aten.bernoulli.default, aten.native_dropout.default, aten.rrelu.default]
)
def test_random_ops_have_no_rules(op: Any) -> None:
    assert not is_known(op)


def test_elementwise_ops_are_known_by_their_tag() -> None:
    assert aten.erfinv.default not in TABLE
    assert is_known(aten.erfinv.default)
    assert rules_of(aten.erfinv.default, f64(4)) == ["S(0) -> S(0)"]


def test_unknown_op_is_replicated() -> None:
    call = OpCall.of(aten.nonzero.default, (f64(4),), {}, i64(4, 1))
    assert not is_known(aten.nonzero.default)
    assert rules_for(call, 2) == (replicate(call),)


def test_index_by_mask_is_replicated() -> None:
    call = OpCall.of(aten.index.Tensor, (f64(4), [TensorType(torch.bool, (4,))]), {}, f64(2))
    assert [_text(rule) for rule in rules_for(call, 2)[1:]] == ["P(sum), R -> P(sum)"]


def test_gathered_dim_is_not_sharded_along_another_axis() -> None:
    assert rules_of(collectives.all_gather, f64(4, 6), 0, "tp", 2) == ["S(1) -> S(1)", "P(sum) -> P(sum)"]
    assert rules_of(collectives.all_reduce, f64(4), "max", "tp") == ["S(0) -> S(0)"]


def test_order_of_rules_does_not_depend_on_hashing() -> None:
    script = (
        "import torch; from meshstep.rules import *; from meshstep.ir.types import TensorType as T;"
        "x = T(torch.float64, (4, 4, 4)); op = torch.ops.aten.baddbmm.default;"
        "print(rules_for(OpCall.of(op, (x, x, x), {}, x), 2))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1


# ---- arguments that change


def test_sizes_of_a_view_are_local() -> None:
    call, rule = chosen(aten.view.default, f64(4, 6, 8), [24, -1], inputs=(Shard(0),))
    assert localize(call, rule, 2) == {"size": [12, 8]}


def test_share_of_bias_is_added_on_every_rank() -> None:
    call, rule = chosen(aten.addmm.default, f64(8), f64(2, 4), f64(4, 8), inputs=(R, Shard(1), Shard(0)))
    assert localize(call, rule, 4) == {"beta": 0.25}


def test_groups_and_bias_of_a_depthwise_convolution_are_local() -> None:
    settings_ = [1, 1], [0, 0], [1, 1], False, [0, 0]
    x, w = f64(1, 4, 5, 5), f64(4, 1, 3, 3)
    call, rule = chosen(
        aten.convolution_backward.default, f64(1, 4, 3, 3), x, w, [4], *settings_, 4, [True] * 3,
        inputs=(Shard(1), Shard(1), Shard(0)),
    )  # fmt: skip
    assert localize(call, rule, 2) == {"groups": 2, "bias_sizes": [2]}


def test_replicate_changes_nothing() -> None:
    call, rule = chosen(aten.view.default, f64(4, 6), [24], inputs=(R,))
    assert localize(call, rule, 2) == {}


def test_arguments_as_by_default_are_not_spelled() -> None:
    call = OpCall.of(aten.sum.dim_IntList, (f64(4), [0]), {"dtype": torch.float64}, f64())
    assert spelled(call.op, call.arguments) == ((f64(4), [0]), {"dtype": torch.float64})


# ---- factors


def test_factor_of_missing_optional_tensor_is_passed_over() -> None:
    call = OpCall.of(
        aten.native_layer_norm.default, (f64(4, 6), [6], None, f64(6), 1e-5), {}, (f64(4, 6), f64(4, 1), f64(4, 1))
    )
    assert [_text(r) for r in factor("aB,B,B->aB,a1,a1")(call)] == ["S(0), R -> S(0), S(0), S(0)"]


def test_broadcast_dim_is_whole_and_its_gradient_a_sum() -> None:
    call = OpCall.of(aten.mm.default, (f64(4, 1), f64(4, 6)), {}, f64(1, 6))
    assert [_text(r) for r in factor("ab,aB->aB")(call)] == ["S(0), S(0) -> P(sum)"]


def test_term_with_too_few_letters_is_refused() -> None:
    call = OpCall.of(aten.relu.default, (f64(4, 6),), {}, f64(4, 6))
    with pytest.raises(AssertionError, match="more dims than the term"):
        list(factor("a->a")(call))


@pytest.mark.parametrize(
    ("before", "after", "dims"),
    [
        ((8, 16, 32), (128, 4, 8), [(0, 0), (2, 1)]),
        ((8, 16), (8, 4, 4), [(0, 0), (1, 1)]),
        ((1, 8), (8, 1, 1), [(1, 0)]),
        ((6, 4), (4, 6), [(0, 0)]),
        ((1, 1), (1,), []),
        ((0, 4), (4, 0), []),
    ],
)
def test_view_dims(before: tuple[int, ...], after: tuple[int, ...], dims: list[tuple[int, int]]) -> None:
    assert list(view_dims(before, after)) == dims


@st.composite
def views(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes of as many elements: both merge neighbours of the same list of sizes."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=6))
    return tuple(list(_merged(sizes, draw(st.lists(st.booleans(), min_size=6, max_size=6)))) for _ in range(2))


def _merged(sizes: list[int], joins: list[bool]) -> Iterator[int]:
    last = 1
    for size, join in zip(sizes, joins):
        if join:
            last *= size
        else:
            yield last
            last = size
    yield last


@settings(max_examples=60, deadline=None)
@given(shapes=views(), size=st.sampled_from([2, 3, 4]))
def test_every_view_is_exact(shapes: tuple[list[int], list[int]], size: int) -> None:
    before, after = shapes
    x = torch.arange(torch.tensor(before).prod(), dtype=torch.float64).view(before)
    assert not validate(aten.view.default, (x, after), size=size)


# ---- the user's rules


@pytest.fixture
def _unregistered() -> Iterator[None]:
    yield
    unregister(aten.nonzero.default)
    unregister(aten.mm.default)
    unregister(aten.view.default)


@pytest.mark.usefixtures("_unregistered")
def test_registered_rules_come_before_the_table() -> None:
    register(aten.mm.default, Entry(factor("mK,KN->mN")))
    assert rules_of(aten.mm.default, f64(4, 6), f64(6, 8)) == ["S(0), R -> S(0)"]
    unregister(aten.mm.default)
    assert len(rules_of(aten.mm.default, f64(4, 6), f64(6, 8))) == 5


@pytest.mark.usefixtures("_unregistered")
def test_registered_op_is_known() -> None:
    register(aten.nonzero.default, Entry(lambda call: ()))
    assert is_known(aten.nonzero.default)


# ---- ops that only a GPU has: the shapes of their shards


Q, MASK = TensorType(torch.bfloat16, (4, 8, 32, 64), "cuda"), TensorType(torch.bfloat16, (4, 1, 32, 32), "cuda")
KV = TensorType(torch.bfloat16, (4, 2, 32, 64), "cuda")


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten._scaled_dot_product_flash_attention.default, (Q, Q, Q)),
        (aten._scaled_dot_product_flash_attention.default, (Q, KV, KV)),
        (aten._scaled_dot_product_efficient_attention.default, (Q, Q, Q, MASK, True)),
        (aten._scaled_dot_product_efficient_attention.default, (Q, Q, Q, None, False)),
        (aten._scaled_dot_product_cudnn_attention.default, (Q, Q, Q, None, True)),
    ],
)
def test_shards_of_gpu_attention_have_the_shapes_that_the_rules_say(op: Any, args: tuple) -> None:
    whole = infer(op, args, {})
    call = OpCall.of(op, args, {}, whole)
    rules = rules_for(call, 2)
    assert len(rules) == 3
    for rule in rules:
        given_ = iter(rule.inputs)
        local = [_local(a, next(given_)) if isinstance(a, TensorType) else a for a in args]
        expected = tuple(t and _local(t, p) for t, p in zip(whole, rule.outputs, strict=True))
        assert infer(op, tuple(local), {}) == expected


def _local(type_: TensorType, placement: Any) -> TensorType:
    return type_.with_shape(local_shape(type_.shape, placement, "tp", 2))


# ---- the validator finds what is wrong


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


WRONG = [
    ("a sum of a shard taken for the whole", aten.sum.default, (draw(4),), Rule((Shard(0),), (R,))),
    ("a product of parts", aten.mul.Tensor, (draw(4), draw(4)), Rule((P, P), (P,))),
    ("a number added on every rank", aten.add.Tensor, (draw(4), 1.0), Rule((P,), (P,))),
    ("a whole value added on every rank", aten.add.Tensor, (draw(4), draw(4)), Rule((P, R), (P,))),
    ("a divisor in parts", aten.div.Tensor, (draw(4), draw(4)), Rule((R, P), (P,))),
    ("a function that is not linear", aten.relu.default, (draw(64),), Rule((P,), (P,))),
    ("parts rounded to integers", aten.trunc.default, (draw(64),), Rule((P,), (P,))),
    ("a softmax of each shard", aten._softmax.default, (draw(4, 4), 1, False), Rule((Shard(1),), (Shard(1),))),
    ("means of shards added", aten.mean.default, (draw(4),), Rule((Shard(0),), (P,))),
    ("a product without its sum", aten.mm.default, (draw(4, 4), draw(4, 4)), Rule((Shard(1), Shard(0)), (R,))),
    ("the wrong dim", aten.t.default, (draw(4, 4),), Rule((Shard(0),), (Shard(0),))),
    ("rows in another order", aten.flip.default, (draw(4), [0]), Rule((Shard(0),), (Shard(0),))),
    ("positions within a shard", aten.argmax.default, (draw(4, 4), 0), Rule((Shard(0),), (R,))),
    ("a mask that starts anew", aten.tril.default, (draw(4, 4),), Rule((Shard(0),), (Shard(0),))),
    (
        "a convolution over some of the channels",
        aten.convolution.default,
        (draw(1, 4, 5, 5), draw(4, 4, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        Rule((Shard(1), Shard(1)), (R,)),
    ),
    (
        "a table of which each rank has some rows",
        aten.embedding.default,
        (draw(4, 4), torch.tensor([0, 3, 1, 2])),
        Rule((Shard(0), R), (P,)),
    ),
]


@pytest.mark.parametrize(("op", "args", "rule"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_wrong_rule_is_found(op: Any, args: tuple, rule: Rule) -> None:
    (finding,) = validate(op, args, rules=[rule])
    assert finding.rule == rule


def test_finding_says_what_is_wrong() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    (finding,) = validate(aten.sum.default, (x,), rules=[Rule((Shard(0),), (R,))])
    assert str(finding) == "aten.sum.default over 2 ranks: S(0) -> R: output 0 is off by 7"


def test_replicas_must_agree_on_every_rank() -> None:
    x = torch.tensor([5.0, 5.0, 5.0, 7.0], dtype=torch.float64)
    (finding,) = validate(aten.amax.default, (x,), rules=[Rule((Shard(0),), (R,))])
    assert "off by 2" in finding.what


@pytest.mark.usefixtures("_unregistered")
def test_sizes_that_stay_global_are_found() -> None:
    register(aten.view.default, Entry(TABLE[aten.view.default].rules))
    findings = validate(aten.view.default, (draw(4, 6), [24]))
    assert [f.what.splitlines()[0] for f in findings] == [
        "the op fails on a shard: shape '[24]' is invalid for input of size 12"
    ]


def test_validation_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    assert not validate(aten.add.Tensor, (torch.ones(4), torch.ones(4)))
    assert torch.equal(torch.get_rng_state(), before)


def test_infinite_values_may_be_in_a_sum() -> None:
    x = torch.tensor([1.0, -torch.inf, 2.0, torch.nan], dtype=torch.float64)
    assert not validate(aten.neg.default, (x,))
