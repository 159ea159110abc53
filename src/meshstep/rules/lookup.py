"""The rules of a call: the user's, else the table's, else those of elementwise ops, else none but `replicate`."""

from __future__ import annotations

from typing import Any

import torch

from .._torch import OpOverload
from .pointwise import POINTWISE
from .rule import Entry, OpCall, Rule, Table, even_rules, replicate
from .table import TABLE

_registered: Table = {}


def register(op: OpOverload, entry: Entry) -> None:
    """Give an op rules that come before those of the table."""
    _registered[op] = entry


def unregister(op: OpOverload) -> None:
    """Take back what was registered."""
    _registered.pop(op, None)


def registered(op: OpOverload) -> Entry | None:
    """What an op was given by `register`."""
    return _registered.get(op)


def is_registered(op: OpOverload) -> bool:
    """Whether an op was given rules by `register`."""
    return op in _registered


def entry_of(op: OpOverload) -> Entry | None:
    """What is known of an op; None if nothing is. Random ops are never taken for elementwise ones."""
    elementwise = torch.Tag.pointwise in op.tags and torch.Tag.nondeterministic_seeded not in op.tags
    return _registered.get(op) or TABLE.get(op) or (POINTWISE if elementwise else None)


def is_known(op: OpOverload) -> bool:
    """Whether an op has rules; one that has not falls back to `replicate`."""
    return entry_of(op) is not None


def rules_for(call: OpCall, size: int, blocks: frozenset[int] = frozenset()) -> tuple[Rule, ...]:
    """The rules of a call along an axis of `size` ranks: `replicate` first, then those whose shards are even."""
    entry = entry_of(call.op)
    found = entry.rules(call) if entry else ()
    return even_rules(call, entry, found, size, blocks)


def localize(call: OpCall, rule: Rule, size: int) -> dict[str, Any]:
    """The non-tensor arguments that differ on one rank from those of the whole, by name."""
    entry = entry_of(call.op)
    return dict(entry.localize(call, rule, size)) if entry and entry.localize and not _whole(call, rule) else {}


def _whole(call: OpCall, rule: Rule) -> bool:
    return rule == replicate(call)
