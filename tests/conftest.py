"""What all tests share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator

import pytest
import torch
from ranks import Pool

_CACHE = tempfile.TemporaryDirectory(prefix="meshstep-tests-")
os.environ["MESHSTEP_CACHE_DIR"] = _CACHE.name  # inherited by the ranks: no test reads or writes the user's cache


@pytest.fixture(scope="session")
def pools() -> Iterator[Callable[[int], Pool]]:
    """Gives a pool of so many real ranks; started at the first call, and again after one has failed."""
    open_pools: dict[int, Pool] = {}

    def pool(size: int) -> Pool:
        if size not in open_pools or not open_pools[size].alive:
            open_pools[size] = Pool(size)
        return open_pools[size]

    yield pool
    for found in open_pools.values():
        found.close()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
