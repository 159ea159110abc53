"""The rules of a call from every source: the user, torch's `register_sharding`, the table, and what running shows."""

from __future__ import annotations

from typing import Any

from .._torch import OpOverload
from . import lookup
from .discovery import Found, discovery
from .rule import Entry, OpCall, Rule, even_rules, replicate
from .user import registered_with_torch


def entry_of(op: OpOverload) -> Entry | None:
    """What somebody wrote of an op; None if nobody did."""
    return (None if lookup.is_registered(op) else registered_with_torch(op)) or lookup.entry_of(op)


def is_known(op: OpOverload) -> bool:
    """Whether somebody wrote rules for an op; else they are found by running it, or it is replicated."""
    return entry_of(op) is not None


def rules_for(call: OpCall, size: int, blocks: frozenset[int] = frozenset()) -> tuple[Rule, ...]:
    """The rules of a call along an axis of `size` ranks: `replicate` first, then those whose shards are even.

    Args:
        call: The call.
        size: Number of ranks.
        blocks: The numbers of blocks that dims may be sharded in, besides plain shards.

    Raises:
        RuleError: A rule of the user's is wrong.
    """
    entry = entry_of(call.op)
    found = entry.rules(call) if entry else discovery.rules(call, size)
    return even_rules(call, entry, found, size, blocks)


def localize(call: OpCall, rule: Rule, size: int) -> dict[str, Any]:
    """The non-tensor arguments that differ on one rank from those of the whole, by name."""
    entry = entry_of(call.op)
    changes = entry.localize if entry and rule != replicate(call) else None
    return dict(changes(call, rule, size)) if changes else {}


def found_by_running(call: OpCall) -> Found | None:
    """What running the op of a call has shown; None if its rules were written."""
    return None if is_known(call.op) else discovery.find(call)
