"""Which placements of an op's inputs give which placements of its outputs, along one mesh axis."""

from .discovery import Found
from .factors import factor
from .lookup import register, unregister
from .rule import Entry, Local, OpCall, Rule, replicate
from .sources import entry_of, found_by_running, is_known, localize, rules_for
from .table import TABLE
from .validator import Finding, validate

__all__ = [
    "TABLE",
    "Entry",
    "Finding",
    "Found",
    "Local",
    "OpCall",
    "Rule",
    "entry_of",
    "factor",
    "found_by_running",
    "is_known",
    "localize",
    "register",
    "replicate",
    "rules_for",
    "unregister",
    "validate",
]
