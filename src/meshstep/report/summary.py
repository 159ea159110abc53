"""Facts as plain dicts, for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .facts import Facts


def complete(facts: Facts) -> dict[str, Any]:
    """Everything."""
    found = asdict(facts)
    found["memory"]["fits"] = facts.memory.fits
    return found


def summary(facts: Facts) -> dict[str, Any]:
    """Everything but the single calls."""
    return {key: value for key, value in complete(facts).items() if key != "calls"}
