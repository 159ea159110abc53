"""The plain attributes of modules, optimizers and schedulers: what a step compiles in, changes, and must find again."""

from __future__ import annotations

import contextlib
import operator
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_TABLES = ("_parameters", "_buffers", "_modules")  # of a module: swapped by themselves
_NOTED = ("_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OTHERWISE = frozenset({*nn.Module().__dict__, "param_groups", "state", "defaults"}) - {"training"}
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
_MUTABLE = (list, dict, set, deque)
_CONTAINERS = (*_MUTABLE, tuple, frozenset)
_LARGE = 100  # elements: beyond that a container (a vocabulary, say) is compared by identity
MISSING = object()  # the value of an attribute that is not there


def is_own(owner: Any, name: str) -> bool:
    """Whether an attribute is the user's, and not one by which torch implements the object."""
    return name not in _OTHERWISE and not (isinstance(owner, Optimizer) and (name[0] == "_" or name == "step"))


def tensors(owner: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors that are attributes of a module or a scaler, but no parameters and no buffers."""
    return ((key, value) for key, value in owner.__dict__.items() if isinstance(value, Tensor) and is_own(owner, key))


@contextlib.contextmanager
def restored(owner: Any) -> Iterator[None]:
    """Attributes, and the containers among them, are as before afterwards."""
    attributes, contents = dict(owner.__dict__), list[tuple[Any, Any]]()
    for name, value in attributes.items():
        if name not in _TABLES and not (isinstance(owner, Optimizer) and name in ("param_groups", "state")):
            _note(value, contents)
    try:
        yield
    finally:
        for container, content in contents:
            _refill(container, content)
        owner.__dict__.clear()
        owner.__dict__.update(attributes)


def _note(value: Any, contents: list[tuple[Any, Any]]) -> None:
    """Remember what is in a container, and in those in it."""
    if not isinstance(value, _MUTABLE) or any(value is known for known, _ in contents):
        return
    contents.append((value, dict(value) if isinstance(value, dict) else list(value)))
    for inner in value.values() if isinstance(value, dict) else value:
        _note(inner, contents)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(content)
    else:
        container.extend(content)


class Attributes:
    """Python values among the attributes, as they were: a program has them compiled in.

    Args:
        owners: Modules and optimizers.
    """

    def __init__(self, owners: Sequence[Any]) -> None:
        """Note the present values."""
        self._owners = [
            (owner, [(name, value, _frozen(value)) for name, value in owner.__dict__.items() if is_own(owner, name)])
            for owner in owners
        ]
        self._values = [(owner.__dict__, list(owner.__dict__.values())) for owner in owners]
        modules = [
            (m.__dict__, [name for name, _, _ in noted]) for m, noted in self._owners if isinstance(m, nn.Module)
        ]
        self._dicts = [found for found, _ in modules]
        self._lengths = list(map(len, self._dicts))
        self._getters = [operator.itemgetter("training", "training", *names) for _, names in modules]
        self._held = [found[name] for found, names in modules for name in ("training", "training", *names)]
        self._others = [
            (owner.__dict__, name, value)
            for (owner, noted) in self._owners
            if not isinstance(owner, nn.Module)
            for name, value, _ in noted
        ]
        self._containers = [
            (value, frozen)
            for _, noted in self._owners
            for _, value, frozen in noted
            if isinstance(value, _MUTABLE) and not isinstance(frozen, _Same)
        ]
        self._tables = [
            (owner, name, owner.__dict__[name], list(owner.__dict__[name].values()))
            for owner in owners
            for name in _NOTED
            if name in owner.__dict__
        ]
        self._empty = [table for _, _, table, before in self._tables if not before]
        self._lists = [table for _, _, table, before in self._tables if before]
        self._listed = [value for _, _, _, before in self._tables for value in before]

    def difference(self) -> str | None:
        """The first attribute that is not as it was, or submodule or hook; None if all are."""
        if self._untouched():
            return None
        for owner, name, before, now in self.changes():
            return f"{type(owner).__name__}.{name} was {_text(before)}, is {_text(now)}"
        return self.changed_table()

    def _untouched(self) -> bool:
        """Whether the very same objects are there: quick, for it is asked at every call."""
        return (
            not any(self._empty)
            and self._modules_have_the_same()
            and same_values(self._lists, self._listed)
            and all(found.get(name, MISSING) is value for found, name, value in self._others)
            and all(_frozen(value) == frozen for value, frozen in self._containers)
        )

    def _modules_have_the_same(self) -> bool:
        if list(map(len, self._dicts)) != self._lengths:
            return False
        try:
            found = list(chain.from_iterable(map(operator.call, self._getters, self._dicts)))
        except KeyError:  # one attribute less, and another one
            return False
        return all(map(operator.is_, found, self._held))

    def changed_table(self) -> str | None:
        """A module whose submodules or hooks are not as they were; None if there is none."""
        for owner, name, table, before in self._tables:
            if not _same_values(table, before):
                return f"{type(owner).__name__} has other {name.strip('_').replace('_', ' ')}"
        return None

    def changes(self) -> Iterator[tuple[Any, str, Any, Any]]:
        """Owner, name, value before and value now of each attribute that changed."""
        for (owner, noted), (found, values) in zip(self._owners, self._values, strict=True):
            for name, before, frozen in noted:
                now = found.get(name, MISSING)
                if (now is not before or isinstance(now, _MUTABLE)) and _frozen(now) != frozen:
                    yield owner, name, before, now
            if len(found) != len(values):
                known = {name for name, _, _ in noted}
                for name, now in found.items():
                    if name not in known and is_own(owner, name):
                        yield owner, name, MISSING, now


def same_values(tables: Sequence[dict[Any, Any]], values: Sequence[Any]) -> bool:
    """Whether the values of tables, one after another, are these very objects. No Python runs for each of them."""
    found = list(chain.from_iterable(map(dict.values, tables)))
    return len(found) == len(values) and all(map(operator.is_, found, values))


def _same_values(table: dict[str, Any], values: list[Any]) -> bool:
    return len(table) == len(values) and all(map(operator.is_, table.values(), values))


class _Same:
    """An object that is compared by identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def has_tensors(value: Any) -> bool:
    """Whether a container holds a tensor at some depth."""
    if isinstance(value, dict):
        return any(map(has_tensors, value.values()))
    return any(map(has_tensors, value)) if isinstance(value, _CONTAINERS) else isinstance(value, Tensor)


def _frozen(value: Any) -> Any:
    """What is compared: plain values and small containers by content, tensors by kind, the rest by identity."""
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, Tensor):
        return Tensor
    if not isinstance(value, _CONTAINERS) or len(value) > _LARGE:
        return _Same(value)
    if isinstance(value, (set, frozenset)):
        return (type(value), frozenset(value))
    if isinstance(value, dict):
        return (type(value), *((key, _frozen(inner)) for key, inner in value.items()))
    return (type(value), *map(_frozen, value))


def _text(value: Any) -> str:
    if value is MISSING:
        return "missing"
    return "a tensor" if isinstance(value, Tensor) else repr(value)
