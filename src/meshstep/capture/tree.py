"""Nested arguments and return values: flattened to named leaves and put together again.

Containers are `dict`, `list`, `tuple`, named tuples and dataclass instances, nested at will. Anything else is a leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Spec:
    """The shape of a tree, hashable.

    Args:
        kind: Type of the container; `None` for a leaf.
        keys: Its keys, field names or indices, in order.
        children: One for each key.
    """

    kind: type | None = None
    keys: tuple = ()
    children: tuple[Spec, ...] = ()


LEAF = Spec()


def flatten(tree: Any) -> tuple[list[Any], Spec]:
    """The leaves in order, and the spec that puts them back."""
    items = _items(tree)
    if items is None:
        return [tree], LEAF
    leaves: list[Any] = []
    children = []
    for _, child in items:
        below, spec = flatten(child)
        leaves += below
        children.append(spec)
    return leaves, Spec(type(tree), tuple(key for key, _ in items), tuple(children))


def unflatten(leaves: list[Any], spec: Spec) -> Any:
    """The tree of `spec` with these leaves."""
    return _build(iter(leaves), spec)


def paths(spec: Spec, prefix: str = "") -> list[str]:
    """A readable path for each leaf: `x`, `batch.ids`, `batch['ids']`, `pair[0]`."""
    if spec.kind is None:
        return [prefix]
    found = []
    for key, child in zip(spec.keys, spec.children, strict=True):
        found += paths(child, _step(prefix, spec.kind, key))
    return found


def _step(prefix: str, kind: type, key: Any) -> str:
    if not prefix and issubclass(kind, dict) and isinstance(key, str):
        return key
    by_name = dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")
    return f"{prefix}.{key}" if by_name else f"{prefix}[{key!r}]"


def _items(tree: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(tree, (Tensor, nn.Module)):
        return None
    if isinstance(tree, dict):
        return list(tree.items())
    if isinstance(tree, tuple) and (fields := getattr(tree, "_fields", None)) is not None:
        return list(zip(fields, tree, strict=True))
    if type(tree) in (list, tuple) or _is_struct(tree):
        return list(enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(f.name, getattr(tree, f.name)) for f in dataclasses.fields(tree) if hasattr(tree, f.name)]
    return None


def _is_struct(tree: Any) -> bool:
    """Whether it is one of `torch.return_types`: a tuple with names that are no fields."""
    return isinstance(tree, tuple) and type(tree).__module__ == "torch.return_types"


def _build(leaves: Iterator[Any], spec: Spec) -> Any:
    if spec.kind is None:
        return next(leaves)
    children = [_build(leaves, child) for child in spec.children]
    return _container(spec, children)


def _container(spec: Spec, children: list[Any]) -> Any:
    kind: Any = spec.kind
    pairs = dict(zip(spec.keys, children, strict=True))
    if issubclass(kind, dict) and dataclasses.is_dataclass(kind):
        return spec.kind(**pairs)  # type: ignore[misc]
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, pairs)
    if issubclass(kind, dict):
        return _mapping(kind, pairs)
    return kind(*children) if hasattr(kind, "_fields") else kind(children)


def _mapping(kind: Any, pairs: dict) -> Any:
    if kind is dict:
        return pairs
    made = kind.__new__(kind)  # a defaultdict, say: its constructor takes other things
    made.update(pairs)
    return made


def _dataclass(kind: Any, pairs: dict[str, Any]) -> Any:
    made = kind.__new__(kind)
    for name, value in pairs.items():
        object.__setattr__(made, name, value)
    return made
