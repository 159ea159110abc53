"""What the schema of an op tells: what it writes, of what its outputs are views, which op is its functional form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..errors import CaptureError

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Effects:
    """What a schema says of aliasing: names of arguments written to, and whether outputs are views of the first."""

    written: tuple[str, ...]
    is_view: bool
    out_only: bool


@cache
def effects_of(func: Any) -> Effects:
    """The aliasing of an op."""
    written = [a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    aliased = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return Effects(tuple(a.name for a in written), aliased, bool(written) and all(a.kwarg_only for a in written))


@cache
def functional_of(func: Any) -> Any:
    """The op that returns what an in-place or `out=` op writes: it takes the same arguments but for `out`."""
    namespace, name = func._schema.name.split("::")
    wanted = _arguments(func)
    for found in (name.removesuffix("_"), f"{name.removesuffix('_')}_functional"):
        packet = getattr(getattr(torch.ops, namespace), found, None)
        for overload in packet.overloads() if packet is not None else ():
            candidate = getattr(packet, overload)
            if not candidate._schema.is_mutable and _arguments(candidate) == wanted:
                return candidate
    raise CaptureError(
        f"{func} changes a tensor in place and has no functional form",
        hint="an op that returns a new tensor",
    )


def _arguments(op: Any) -> list[tuple[str, str]]:
    """Names and types of what an op reads."""
    return [
        (a.name, str(a.type))
        for a in op._schema.arguments
        if not (a.kwarg_only and a.alias_info is not None and a.alias_info.is_write)
    ]


def defaults_of(func: Any, functional: Any, args: tuple) -> dict[str, Any]:
    """Values that an in-place op may leave out and its functional form may not."""
    required = {a.name for a in functional._schema.arguments if not a.has_default_value()}
    return {
        a.name: a.default_value
        for a in func._schema.arguments[len(args) :]
        if a.has_default_value() and a.name in required
    }


@cache
def foreach_element(func: Any) -> Any:
    """The op on one element of an op on lists of tensors; `None` for any other op."""
    namespace, name = func._schema.name.split("::")
    if namespace != "aten" or not name.startswith("_foreach_"):
        return None
    base = name.removeprefix("_foreach_")
    overloads = {"Scalar": "Scalar", "ScalarList": "Scalar", "List": "Tensor", "Tensor": "Tensor"}
    special = {"norm": aten.linalg_vector_norm.default, "zero_": aten.zero_.default}
    if base in special:
        return special[base]
    packet = getattr(aten, base)
    for overload in (overloads.get(func._overloadname, "default"), "Tensor", "Scalar", "default"):
        if hasattr(packet, overload):
            return getattr(packet, overload)
    raise CaptureError(f"{func} has no form for one tensor", hint="the op on one tensor, in a loop")
