"""Nested arguments and return values."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from meshstep.capture.tree import LEAF, flatten, paths, unflatten

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Batch:
    ids: Any
    mask: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    pair: Pair
    derived: int = dataclasses.field(init=False, default=7)


def test_every_kind_of_container_is_opened_and_put_together_again() -> None:
    tree = {"a": [1, (2, "x")], "b": Pair(3, {"c": Batch(4, None)}), 5: Frozen(Pair(6, ()))}
    leaves, spec = flatten(tree)
    assert leaves == [1, 2, "x", 3, 4, None, 6, 7]
    assert unflatten(leaves, spec) == tree
    assert type(unflatten(leaves, spec)["b"]) is Pair


def test_paths_read_like_the_users_code() -> None:
    tree = {"x": 1, "batch": Batch([1, 2], {"k": 3, 0: 4}), "pair": Pair(5, (6,))}
    _, spec = flatten(tree)
    assert paths(spec) == [
        "x", "batch.ids[0]", "batch.ids[1]", "batch.mask['k']", "batch.mask[0]", "pair.left", "pair.right[0]",
    ]  # fmt: skip


def test_a_bare_value_is_a_leaf_with_an_empty_path() -> None:
    leaves, spec = flatten(3)
    assert (leaves, spec, paths(spec)) == ([3], LEAF, [""])


@pytest.mark.parametrize(
    "value", [nn.Linear(2, 2), nn.ModuleList([nn.ReLU()]), torch.ones(2), {1, 2}, Batch, torch.Size([2])]
)
def test_modules_tensors_and_unknown_objects_are_leaves(value: Any) -> None:
    leaves, _ = flatten([value])
    assert len(leaves) == 1 and leaves[0] is value


def test_special_dicts_keep_their_type() -> None:
    counts: defaultdict = defaultdict(list, a=1)
    leaves, spec = flatten([counts, OrderedDict(b=2)])
    made = unflatten([10, 20], spec)
    assert leaves == [1, 2] and made == [{"a": 10}, {"b": 20}]
    assert [type(d) for d in made] == [defaultdict, OrderedDict]


def test_a_model_output_comes_back_as_one() -> None:
    output = CausalLMOutput(loss=torch.ones(()), logits=torch.zeros(2))
    leaves, spec = flatten(output)
    made = unflatten(leaves, spec)
    assert isinstance(made, CausalLMOutput) and made.loss is output.loss and made["logits"] is output.logits


def test_frozen_dataclasses_and_fields_that_init_does_not_take_are_kept() -> None:
    leaves, spec = flatten(Frozen(Pair(1, 2)))
    made = unflatten([10, 20, 30], spec)
    assert leaves == [1, 2, 7] and made.pair == Pair(10, 20) and made.derived == 30


def test_specs_tell_structures_apart_and_are_hashable() -> None:
    trees = [[1], (1,), {"a": 1}, {"b": 1}, Pair(1, 2), Batch(1), [[1]], 1, [1, 2]]
    assert len({flatten(tree)[1] for tree in trees}) == len(trees)
    assert flatten({"a": 1})[1] == flatten({"a": 2})[1]


_TREES = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Batch, inner, inner),
    ),
    max_leaves=12,
)


@given(_TREES)
def test_unflatten_undoes_flatten(tree: Any) -> None:
    leaves, spec = flatten(tree)
    assert unflatten(leaves, spec) == tree
    assert len(paths(spec)) == len(leaves)
