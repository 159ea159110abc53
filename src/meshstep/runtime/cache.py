"""The compiled programs of one step."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import Tensor

from .signature import Guards, Signature

log = logging.getLogger("meshstep")
T = TypeVar("T")
FIRST_CALL = "first call"


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """How often calls found their program.

    Args:
        hits: Calls that found one.
        misses: Calls that had to compile.
        size: Programs held now.
        maxsize: Programs held at most.
        reasons: Why each miss was one, in order.
        resized: Calls that found a program for other sizes, which fits theirs: it was only traced.
    """

    hits: int
    misses: int
    size: int
    maxsize: int
    reasons: tuple[str, ...]
    resized: int = 0


@dataclass(slots=True, eq=False)
class Entry(Generic[T]):
    """One program and what it needs."""

    signature: Signature
    guards: Guards
    program: T


@dataclass(slots=True)
class Cache(Generic[T]):
    """Programs by signature; the one used longest ago goes first when it is full.

    Args:
        maxsize: Programs held at most.
    """

    maxsize: int = 32
    _entries: list[Entry[T]] = field(default_factory=list)
    _hits: int = 0
    _reasons: list[str] = field(default_factory=list)
    _resized: int = 0

    def find(self, signature: Signature, leaves: list[Any]) -> tuple[T, list[Tensor]] | str:
        """The program that fits and its inputs, or why none does."""
        other: list[str] = []  # what differs from the most alike of the programs for other arguments
        closest = ""  # why the latest program for these arguments does not fit
        for entry in reversed(self._entries):
            if entry.signature != signature:
                apart = signature.differences(entry.signature)
                other = apart if not other or len(apart) < len(other) else other
                continue
            bound = entry.guards.bind(leaves)
            if not isinstance(bound, str):
                self._hits += 1
                self._touch(entry)
                return entry.program, bound
            closest = closest or bound
        return closest or (other[0] if other else FIRST_CALL)

    def add(
        self, signature: Signature, guards: Guards, program: T, reason: str, name: str, *, resized: bool = False
    ) -> None:
        """Keep a program that was compiled because of `reason`, or made of one for other sizes."""
        if len(self._entries) >= self.maxsize:
            self._entries.pop(0)
        self._entries.append(Entry(signature, guards, program))
        if resized:
            self._resized += 1
            log.info("%s: the program of another size fits (%s)", name, reason)
            return
        self._reasons.append(reason)
        log.info("%s: compiled program %d (%s)", name, len(self._reasons), reason)

    def info(self) -> CacheInfo:
        """Counts so far."""
        return CacheInfo(
            self._hits, len(self._reasons), len(self._entries), self.maxsize, tuple(self._reasons), self._resized
        )

    def _touch(self, entry: Entry[T]) -> None:
        if self._entries[-1] is not entry:
            self._entries.remove(entry)
            self._entries.append(entry)
