"""The IR's collectives along one axis, as seen from another: any dim that they do not touch may be sharded."""

from __future__ import annotations

from collections.abc import Iterator

from ..ir import collectives
from .factors import apart_from, follow
from .rule import Entry, OpCall, Rule, Table


def reduced(call: OpCall) -> Iterator[Rule]:
    """`all_reduce` and `reduce_scatter`; a sum of sums is a sum."""
    scattered = ["dim"] if "dim" in call.arguments else []
    yield from follow(apart_from(*scattered), "all" if call["op"] == "sum" else ())(call)


def _position(call: OpCall) -> Iterator[Rule]:
    """`axis_index` is the same along every other axis."""
    del call
    yield from ()


TABLE: Table = {
    collectives.all_reduce: Entry(reduced),
    collectives.reduce_scatter: Entry(reduced),
    collectives.all_gather: Entry(follow(apart_from("dim"), "all")),
    collectives.axis_slice: Entry(follow(apart_from("dim"), "all")),
    collectives.all_to_all: Entry(follow(apart_from("split_dim", "concat_dim"), "all")),
    collectives.axis_index: Entry(_position),
}
