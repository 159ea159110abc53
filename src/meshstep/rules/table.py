"""All that is known of PyTorch's ops, from the files that know it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .._torch import OpOverload
from . import (
    attention,
    collectives,
    factories,
    indexing,
    linalg,
    losses,
    matmuls,
    norms,
    pointwise,
    random,
    reductions,
    scans,
    softmax,
    statistics,
    updates,
    views,
    vision,
)
from .rule import Entry

TABLE: Mapping[OpOverload, Entry] = MappingProxyType(
    {
        **pointwise.TABLE,
        **views.TABLE,
        **reductions.TABLE,
        **scans.TABLE,
        **softmax.TABLE,
        **statistics.TABLE,
        **matmuls.TABLE,
        **linalg.TABLE,
        **norms.TABLE,
        **attention.TABLE,
        **indexing.TABLE,
        **losses.TABLE,
        **factories.TABLE,
        **vision.TABLE,
        **updates.TABLE,
        **random.TABLE,
        **collectives.TABLE,
    }
)
