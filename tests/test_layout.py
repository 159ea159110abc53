"""Layouts: shapes, texts, order of the axes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import check_text
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from meshstep import Layout, LayoutError, Mesh
from meshstep.layout import PARTIAL, REPLICATE, local_shape, placement_text, shard, shard_dim
from meshstep.runtime.simulate import gather, scatter

MESH = Mesh(dp=2, tp=3)


def test_local_and_global_shape():
    layout = Layout((("tp", Shard(1)), ("dp", Shard(0))))
    assert layout.local_shape((4, 6), MESH) == (2, 2)
    assert layout.global_shape((2, 2), MESH) == (4, 6)
    assert [layout.splits(dim, MESH) for dim in range(2)] == [2, 3]


def test_one_dim_over_two_axes():
    layout = Layout((("tp", Shard(0)), ("dp", Shard(0))))
    assert layout.splits(0, MESH) == 6
    assert layout.local_shape((12,), MESH) == (2,)
    parts = [part.tolist() for part in scatter(torch.arange(12), layout, MESH)]
    assert parts == [[0, 1], [4, 5], [8, 9], [2, 3], [6, 7], [10, 11]]


def test_what_is_not_sharded_keeps_its_shape():
    layout = Layout((("tp", PARTIAL), ("dp", REPLICATE)))
    assert layout.local_shape((5, 7), MESH) == layout.global_shape((5, 7), MESH) == (5, 7)


def test_an_axis_of_which_nothing_is_said_is_replicated():
    assert Layout()["dp"] == Replicate()
    assert Layout((("dp", Shard(1)),))["dp"] == Shard(1)


def test_extended_adds_an_axis_at_the_end():
    layout = Layout((("tp", Shard(0)),))
    assert layout.extended("dp", PARTIAL).placements == (("tp", Shard(0)), ("dp", PARTIAL))
    assert layout.placements == (("tp", Shard(0)),)


def test_texts():
    layout = Layout((("tp", Shard(1)), ("dp", Replicate()), ("pp", Partial("max"))))
    assert str(layout) == "S(1)@tp R@dp P(max)@pp"
    assert str(Layout()) == ""
    assert [placement_text(p) for p in (REPLICATE, shard(0), PARTIAL)] == ["R", "S(0)", "P(sum)"]


def test_layouts_are_values():
    assert Layout((("dp", Shard(0)),)) == Layout((("dp", Shard(0)),))
    assert len({Layout((("dp", Shard(0)),)), Layout((("dp", Shard(0)),)), Layout((("dp", Shard(1)),))}) == 2
    with pytest.raises(AttributeError):
        Layout().placements = ()  # type: ignore[misc]


def test_shard_dim():
    assert [shard_dim(p) for p in (Shard(2), REPLICATE, PARTIAL)] == [2, None, None]
    assert shard(3) is shard(3)


@pytest.mark.parametrize(
    ("make", "golden"),
    [
        (lambda: Layout((("dp", Shard(0)), ("dp", Shard(1)))), "errors/axis_twice.txt"),
        (lambda: Layout((("dp", 0),)), "errors/no_placement.txt"),
        (lambda: local_shape((10, 16), Shard(0), "tp", 4), "errors/uneven.txt"),
        (lambda: local_shape((10,), Shard(1), "tp", 2), "errors/no_dim.txt"),
        (lambda: local_shape((10,), Shard(-1), "tp", 2), "errors/negative_dim.txt"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(make, golden):
    with pytest.raises(LayoutError) as caught:
        make()
    check_text(f"{caught.value}\n", golden)


placements = st.sampled_from([REPLICATE, shard(0), shard(1), shard(2)])


@given(st.permutations(["dp", "tp", "pp"]), st.tuples(placements, placements, placements))
def test_gather_undoes_scatter(axes, chosen):
    mesh = Mesh(dp=2, tp=2, pp=3)
    layout = Layout(tuple(zip(axes, chosen, strict=True)))
    whole: Tensor = torch.arange(12 * 12 * 12).reshape(12, 12, 12)
    parts = scatter(whole, layout, mesh)
    assert all(part.shape == layout.local_shape(whole.shape, mesh) for part in parts)
    assert torch.equal(gather(parts, layout, mesh), whole)
    assert layout.global_shape(parts[0].shape, mesh) == whole.shape
