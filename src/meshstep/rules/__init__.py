"""Which placements of an op's inputs give which placements of its outputs, along one mesh axis."""

from .factors import factor
from .lookup import entry_of, is_known, localize, register, rules_for, unregister
from .rule import Entry, Local, OpCall, Rule, replicate
from .table import TABLE
from .validator import Finding, validate

__all__ = [
    "TABLE",
    "Entry",
    "Finding",
    "Local",
    "OpCall",
    "Rule",
    "entry_of",
    "factor",
    "is_known",
    "localize",
    "register",
    "replicate",
    "rules_for",
    "unregister",
    "validate",
]
