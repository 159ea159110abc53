"""Modules that are replaced while a step is traced, and ops that are put in their place afterwards."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import fx, nn

from .errors import InputError
from .schema import Schema

Replacement = Callable[..., nn.Module]


class Override(ABC):
    """What stands in for modules of one kind while a step is traced.

    Given to `compile(module_override=...)` as `{Type: Override()}`, `{"blocks.*.mlp": Override()}`, or in a list, where
    it sees every module and returns those that it does not replace.
    """

    @abstractmethod
    def replacement(self, *args: Any) -> nn.Module:
        """The stand-in: `replacement(self, module)` or `replacement(self, fqn, module)`.

        It is called with the arguments of the module's `forward`, and may use the module's parameters: they are state
        of the step as before, with gradients if the stand-in gives them some. Its own parameters are constants.

        Args:
            args: The module; with two parameters, its fully-qualified name and the module.
        """

    def transform(self, gm: fx.GraphModule, schema_map: Mapping[str, Schema]) -> fx.GraphModule:
        """The expanded graph, edited: this is where stand-in ops become real ones.

        Args:
            gm: One rank's graph: aten ops and `torch.ops.meshstep` collectives, before meshstep's own passes. Its
                inputs and outputs must stay what they are.
            schema_map: How the value of each node lies, by the name of the node.

        Returns:
            `gm`, edited in place, or another one.
        """
        return gm

    edits = False  # whether programs are the override's own; else one can serve several sizes of a batch

    def __init_subclass__(cls) -> None:
        """Note whether there is a `transform`."""
        super().__init_subclass__()
        cls.edits = cls.edits or cls.transform is not Override.transform


Overrides = Mapping[type[nn.Module] | str, Override | Replacement] | Sequence[Override | Replacement]


def overrides_of(given: Overrides | None) -> list[Override]:
    """The overrides, each once.

    Raises:
        InputError: It is no override.
    """
    if given is None:
        return []
    if isinstance(given, Mapping):
        for key in given:
            if not (isinstance(key, str) or (isinstance(key, type) and issubclass(key, nn.Module))):
                raise InputError(
                    f"module_override names {key!r}",
                    at="compile(module_override=...)",
                    hint="a class of modules, or a pattern of names as in 'blocks.*.mlp'",
                )
        values: list[Any] = list(given.values())
    elif isinstance(given, (list, tuple)):
        values = list(given)
    else:
        values = [None]
    for value in values:
        if (not callable(value) and not isinstance(value, Override)) or _is_class_of_overrides(value):
            raise InputError(
                f"module_override has {value!r} instead of an Override",
                at="compile(module_override=...)",
                hint="{Type: MyOverride()}",
            )
    return list({id(value): value for value in values if isinstance(value, Override)}.values())


def _is_class_of_overrides(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Override)


def stand_ins(given: Overrides | None, modules: Sequence[tuple[str, nn.Module]]) -> dict[int, nn.Module]:
    """The stand-in of each module that is replaced, by the `id` of the module.

    Args:
        given: The overrides.
        modules: Modules by name; what is below a replaced one is not looked at.

    Raises:
        InputError: A replacement is no module, or nothing is of the type or name that an override is for.
    """
    if not given:
        return {}
    found: dict[int, nn.Module] = {}
    used = set[Any]()
    for prefix, root in modules:
        for name, module in _outermost(root, prefix, found):
            for key, override in _matching(given, name, module):
                stand_in = _made(override, name, module)
                used.add(key)
                if stand_in is not module:
                    found[id(module)] = stand_in
                    break
    missing = [key for key in given if key not in used] if isinstance(given, Mapping) else []
    if missing:
        key = missing[0]
        raise InputError(
            f"no module is {'named ' + repr(key) if isinstance(key, str) else 'a ' + key.__name__}",
            at="compile(module_override=...)",
            hint="a class or a pattern of names of the modules that the step is called with",
        )
    return found


def _outermost(root: nn.Module, prefix: str, found: Mapping[int, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Modules by name, without those below one that has been replaced."""
    yield prefix.removesuffix("."), root
    if id(root) not in found:
        for name, child in root.named_children():
            yield from _outermost(child, f"{prefix}{name}.", found)


def _matching(given: Overrides, name: str, module: nn.Module) -> Iterator[tuple[Any, Override | Replacement]]:
    if not isinstance(given, Mapping):
        yield from ((None, override) for override in given)
        return
    for key, override in given.items():
        if fnmatchcase(name, key) if isinstance(key, str) else isinstance(module, key):
            yield key, override


def _made(override: Override | Replacement, name: str, module: nn.Module) -> nn.Module:
    make = override.replacement if isinstance(override, Override) else override
    count = len(inspect.signature(make).parameters)
    named = count > 1 or any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(make).parameters.values())
    made = make(name, module) if named else make(module)
    if not isinstance(made, nn.Module):
        raise InputError(
            f"the replacement is a {type(made).__name__} and no module",
            at=f"{type(module).__name__} {name}".strip(),
            hint="return a module; the one that was given to leave it as it is",
        )
    return made
