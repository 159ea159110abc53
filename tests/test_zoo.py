"""Models that people train, as they are, equal to the plain step in float64 on every mesh."""

from __future__ import annotations

import warnings

import pytest
import zoo

import meshstep as ms

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

NOT_YET_SHARDED = {
    "dlrm": ("aten._embedding_bag", "aten._embedding_bag_dense_backward", "aten.triu_indices"),  # bags of mode "max"
    "swin": ("aten.as_strided", "aten.as_strided_scatter"),  # the backward of in-place writes to shifted windows
}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", zoo.ZOO)
def test_a_model_trains_as_on_one_device(name, ranks):
    found = ms.verify(zoo.ZOO[name].step, zoo.arguments(name), mesh=ms.Mesh(dp=ranks), steps=3)
    assert found.max_error < 1e-9, found


@pytest.mark.parametrize("name", [name for name, entry in zoo.ZOO.items() if entry.has_dropout])
def test_dropout_masks_are_those_of_one_device(name):
    for ranks in (2, 4):
        found = ms.verify(zoo.ZOO[name].step, zoo.arguments(name, 0.1), mesh=ms.Mesh(dp=ranks), steps=2)
        assert found.ok, found


@pytest.mark.parametrize("name", zoo.ZOO)
def test_no_op_falls_back_to_being_computed_whole(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args, _ = zoo.arguments(name)(0)
        lowered = ms.compile(mesh=ms.Mesh(dp=2))(zoo.ZOO[name].step).lower(*args)
    assert tuple(op for op, _ in lowered.fallbacks) == NOT_YET_SHARDED.get(name, ())
