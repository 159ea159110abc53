"""Sharded state, tensor, sequence, context and expert parallel, and meshes of several axes: the plain numbers."""

from __future__ import annotations

import parallel
import pytest

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.mark.parametrize(("name", "case"), parallel.ALL)
def test_a_model_trains_as_on_one_device(name, case):
    found = parallel.verified(name, case)
    assert found.max_error < 1e-9, found


@pytest.mark.parametrize("case", ["zero2", "fsdp x tp"])
@pytest.mark.parametrize("name", parallel.SPLITS)
def test_gradients_that_outlive_the_step_are_state_too(name, case):
    found = parallel.verified(name, case, steps=3, accumulate=True)
    assert found.max_error < 1e-9 and found.values["gradient"] > 0, found
