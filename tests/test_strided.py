"""Shards of each of several blocks of a dim: a fused projection split by heads, rows of split sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rules_stand_ins import STAND_INS
from test_rules_validated import OPS, all_samples

import meshstep as ms
from meshstep.ir.types import TensorType
from meshstep.layout import (
    REPLICATE,
    Layout,
    blocks,
    join,
    local_shape,
    placement_text,
    shard,
    shard_dim,
    split,
    strided,
)
from meshstep.rules import OpCall, Rule, rules_for, validate
from meshstep.rules.validator import Trial

aten = torch.ops.aten
BLOCKS = frozenset({2, 3, 6})


def test_a_rank_has_its_share_of_every_block():
    x = torch.arange(12)
    first, second = split(x, strided(0, 3), 2)
    assert first.tolist() == [0, 1, 4, 5, 8, 9]
    assert second.tolist() == [2, 3, 6, 7, 10, 11]
    assert join([first, second], strided(0, 3)).tolist() == list(range(12))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_what_is_split_is_joined_again(size, count, length, dim):
    shape = [2, 3, 5]
    shape[dim] = size * count * length
    x = torch.randn(shape)
    parts = split(x, strided(dim, count), size)
    assert all(tuple(p.shape) == local_shape(shape, strided(dim, count), "tp", size) for p in parts)
    assert torch.equal(join(parts, strided(dim, count)), x)


def test_one_block_is_a_plain_shard():
    assert strided(1, 1) == shard(1)
    assert strided(1, 2) != shard(1)
    assert (blocks(strided(1, 2)), shard_dim(strided(1, 2))) == (2, 1)
    assert (blocks(shard(1)), blocks(REPLICATE)) == (1, 1)
    assert placement_text(strided(0, 3)) == "S(0 in 3)"


def test_blocks_that_do_not_divide_are_refused():
    with pytest.raises(ms.LayoutError) as caught:
        local_shape([10, 4], strided(0, 3), "tp", 2)
    assert str(caught.value) == (
        "dim 0 of size 10 cannot be split over axis 'tp' (2 shards)\n"
        "  at   shape [10, 4]\n"
        "  try  Replicate() on 'tp', or pad the dim to 12"
    )


def test_a_layout_of_blocks_and_shards_is_as_torch_has_it():
    layout = Layout((("dp", shard(1)), ("tp", strided(0, 3))))
    assert str(layout) == "S(1)@dp S(0 in 3)@tp"
    assert layout.local_shape((12, 4), ms.Mesh(dp=2, tp=2)) == (6, 2)


@pytest.mark.parametrize("op", OPS, ids=str)
def test_rules_of_blocks_give_what_the_whole_gives(op: Any) -> None:
    findings = [
        finding
        for args, kwargs in all_samples()[op]
        for finding in validate(op, args, kwargs, size=2, blocks=BLOCKS, run=STAND_INS.get(op))
    ]
    assert not findings, "\n".join(map(str, findings))


def in_blocks(op: Any, *args: Any, size: int = 2) -> set[Rule]:
    call = Trial.of(op, args, {}, size).call
    return set(rules_for(call, size, BLOCKS)) - set(rules_for(call, size))


def has(op: Any, args: tuple, inputs: tuple, outputs: tuple) -> bool:
    return Rule(inputs, outputs) in in_blocks(op, *args)


def test_the_chain_of_a_fused_projection():
    """Weight, product, split; and back."""
    whole = REPLICATE
    x, w, y = torch.randn(4, 6), torch.randn(6, 12), torch.randn(2, 2, 12)
    assert has(aten.t.default, (w.T.contiguous(),), (strided(0, 3),), (strided(1, 3),))
    assert has(aten.mm.default, (x, w), (whole, strided(1, 3)), (strided(1, 3),))
    assert has(aten.view.default, (x @ w, [2, 2, 12]), (strided(1, 3),), (strided(2, 3),))
    assert has(aten.split.Tensor, (y, 4, 2), (strided(2, 3),), (shard(2),) * 3)
    assert has(aten.split_with_sizes.default, (y, [4, 4, 4], 2), (strided(2, 3),), (shard(2),) * 3)
    assert not has(aten.split_with_sizes.default, (y, [2, 4, 6], 2), (strided(2, 3),), (shard(2),) * 3)
    assert has(aten.cat.default, ([y, y, y], 2), (shard(2),) * 3, (strided(2, 3),))
    assert has(aten.view.default, (y, [2, 2, 3, 4]), (strided(2, 3),), (shard(3),))
    assert has(aten.slice.Tensor, (y, 2, 4, 8), (strided(2, 3),), (shard(2),))
    assert not has(aten.slice.Tensor, (y, 2, 2, 6), (strided(2, 3),), (shard(2),))


def test_rows_of_split_sequences_are_merged():
    x = torch.randn(3, 4, 5)
    assert has(aten.view.default, (x, [12, 5]), (shard(1),), (strided(0, 3),))
    assert has(aten.view.default, (x.view(12, 5), [3, 4, 5]), (strided(0, 3),), (shard(1),))


def test_groups_of_channels_are_not_taken_apart():
    image = torch.randn(2, 12, 4, 4)
    assert not any(
        blocks(p) > 1 and shard_dim(p) == 1
        for rule in in_blocks(aten.native_group_norm.default, image, None, None, 2, 12, 16, 4, 1e-5)
        for p in rule.inputs
    )


def test_a_wrong_rule_of_blocks_is_caught():
    x = torch.randn(4, 12, dtype=torch.float64)
    wrong = [
        Rule((strided(1, 3),), (strided(1, 2),)),
        Rule((strided(1, 3),), (shard(1),)),
        Rule((shard(1),), (strided(1, 3),)),
    ]
    for rule in wrong:
        assert validate(aten.neg.default, (x,), size=2, rules=[rule]), rule
    view = Rule((strided(1, 2),), (shard(1),))
    assert validate(aten.view.default, (x, [4, 4, 3]), size=2, rules=[view])


def test_a_call_without_blocks_has_the_rules_that_it_had():
    call = OpCall.of(aten.neg.default, (TensorType(torch.float32, (8, 8)),), {}, TensorType(torch.float32, (8, 8)))
    assert all(blocks(p) == 1 for rule in rules_for(call, 2) for p in rule.inputs)
