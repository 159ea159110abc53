"""Functions that prepare a module in place, each once, and promise to leave its names as they were.

@meshstep.contract(State)
def shard(module, group): ...

shard(model, group)
shard.state(model)              # the State of this function on this module
meshstep.get_registry(model)    # what was applied to it, in order, with its arguments
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from torch import nn

from .errors import InputError

_ATTRIBUTE = "_meshstep_contract"  # in the module's __dict__: it is copied and pickled with the module
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class NoState:
    """The state of a function that keeps none."""


@dataclass(frozen=True, slots=True)
class Applied:
    """One application of a function to a module.

    Args:
        name: Of the function, without its package.
        function: Its full name: `package.module.function`.
        args: What it was given after the module.
        kwargs: Likewise.
        incompatible_with: Names of functions that must not be applied to the module as well.
    """

    name: str
    function: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    incompatible_with: frozenset[str]


@dataclass(slots=True)
class _Record:
    """What a module carries."""

    applied: dict[str, Applied] = field(default_factory=dict)  # by the full name of the function
    states: dict[str, Any] = field(default_factory=dict)


class Contracted(Protocol[P, S_co, R_co]):
    """A function under a contract."""

    def __call__(self, module: Any, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Apply it."""

    def state(self, module: nn.Module) -> S_co | None:
        """Its state on a module; None if it was not applied to it."""


def contract(
    state_cls: type[S] = NoState,  # type: ignore[assignment]
    *,
    incompatible_with: Sequence[str] = (),
) -> Callable[[Callable[..., R]], Contracted[Any, S, R]]:
    """Put a function that changes a module in place under a contract.

    The function takes a module, or a list or tuple of several, and more arguments. It may register hooks, replace
    parameters by others of the same name, and keep its state in `state_cls()`, which exists before it runs. It may
    return None, or the modules. It must leave, in every module: the names of parameters, buffers and submodules, and
    their order; the types of submodules; the `forward` of each.

    Args:
        state_cls: Makes the state, without arguments.
        incompatible_with: Names of other such functions that must not be applied to the same module, before or after.
            A declaration on one side is enough.

    Raises:
        InputError: (by the decorated function) What it is given is no module, it was applied to it before, another
            function forbids it, or it broke the contract. Then the registry is as it was.
    """
    if not isinstance(state_cls, type):
        raise InputError(
            f"contract got {type(state_cls).__name__} instead of a class",
            at="contract(state_cls)",
            hint="@contract() above the function, with parentheses",
        )

    def decorate(function: Callable[..., R]) -> Contracted[Any, S, R]:
        full = f"{function.__module__}.{function.__qualname__}"

        @functools.wraps(function)
        def apply(module: Any, *args: Any, **kwargs: Any) -> R:
            modules = _modules(module, function.__name__)
            applied = Applied(function.__name__, full, args, dict(kwargs), frozenset(incompatible_with))
            for each in modules:
                _check_allowed(each, applied)
            state, before = state_cls(), [_Names.of(each) for each in modules]
            for each in modules:
                _enter(each, applied, state)
            try:
                returned = function(module, *args, **kwargs)
                _check_kept(modules, before, returned, applied)
            except BaseException:
                for each in modules:
                    _leave(each, full)
                raise
            return returned

        def state_of(module: nn.Module) -> S | None:
            (each,) = _modules([module], f"{function.__name__}.state")
            record = _record(each)
            return None if record is None else record.states.get(full)

        apply.state = state_of  # type: ignore[attr-defined]
        return cast("Contracted[Any, S, R]", apply)

    return decorate


def get_registry(module: nn.Module) -> Mapping[str, Applied] | None:
    """What was applied to a module, by the name of the function, in order; None if nothing was.

    Args:
        module: The module itself: what was applied to one above or below it does not count.
    """
    record = _record(module)
    if record is None or not record.applied:
        return None
    return MappingProxyType({applied.name: applied for applied in record.applied.values()})


def _record(module: Any) -> _Record | None:
    if not isinstance(module, nn.Module):
        raise InputError(
            f"a {type(module).__name__} instead of a module", at="get_registry(module)", hint="the module itself"
        )
    return module.__dict__.get(_ATTRIBUTE)


def _modules(given: Any, name: str) -> list[nn.Module]:
    modules = list(given) if isinstance(given, (list, tuple, nn.ModuleList)) else [given]
    wrong = [m for m in modules if not isinstance(m, nn.Module)]
    if wrong or not modules:
        what = f"a {type(wrong[0]).__name__} instead of a module" if wrong else "no module"
        raise InputError(f"{name} got {what}", at=f"{name}(module, ...)", hint="a module, or a list of modules")
    if len({id(m) for m in modules}) < len(modules):
        raise InputError(f"{name} got a module twice", at=f"{name}(modules, ...)", hint="each module once")
    return modules


def _check_allowed(module: nn.Module, new: Applied) -> None:
    record = _record(module) or _Record()
    where = f"{new.name}({type(module).__name__})"
    if new.function in record.applied or any(old.name == new.name for old in record.applied.values()):
        raise InputError(
            f"{new.name} was applied to this module before", at=where, hint=f"{new.name}.state(module) has its state"
        )
    for old in record.applied.values():
        if old.name in new.incompatible_with or new.name in old.incompatible_with:
            raise InputError(
                f"{new.name} cannot be combined with {old.name}, which was applied to this module",
                at=where,
                hint="one of them, on a fresh module",
            )


def _enter(module: nn.Module, applied: Applied, state: Any) -> None:
    record = module.__dict__.setdefault(_ATTRIBUTE, _Record())
    record.applied[applied.function], record.states[applied.function] = applied, state


def _leave(module: nn.Module, function: str) -> None:
    record = module.__dict__[_ATTRIBUTE]
    del record.applied[function], record.states[function]
    if not record.applied:
        del module.__dict__[_ATTRIBUTE]


@dataclass(frozen=True, slots=True)
class _Names:
    """What a function must keep of a module."""

    kind: type
    kept: Mapping[str, tuple[str, ...]]  # "parameters", "buffers", "modules"
    types: Mapping[str, type]
    forwards: Mapping[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> _Names:
        """As it is now."""
        modules = dict(module.named_modules(remove_duplicate=False))
        names = {
            "parameters": tuple(name for name, _ in module.named_parameters(remove_duplicate=False)),
            "buffers": tuple(name for name, _ in module.named_buffers(remove_duplicate=False)),
            "modules": tuple(modules),
        }
        forwards = {name: (m.__dict__.get("forward"), type(m).forward) for name, m in modules.items()}
        return cls(type(module), names, {name: type(m) for name, m in modules.items()}, forwards)

    def difference(self, now: _Names) -> tuple[str, str] | None:
        """What is not as it was, and where; None if all is."""
        if now.kind is not self.kind:
            return f"changed the type of the module to {now.kind.__name__}", self.kind.__name__
        for kind, before in self.kept.items():
            if moved := _moved(before, now.kept[kind], kind):
                return moved
        for name, kind_before in self.types.items():
            if now.types[name] is not kind_before:
                changed = f"changed the type of a module from {kind_before.__name__} to {now.types[name].__name__}"
                return changed, name or "the module itself"
        for name, forward in self.forwards.items():
            if now.forwards[name] != forward:
                return "replaced the forward of a module", name or "the module itself"
        return None


def _moved(before: Sequence[str], now: Sequence[str], kind: str) -> tuple[str, str] | None:
    """Names that came, went or stand at another place."""
    gone = [name for name in before if name not in set(now)]
    new = [name for name in now if name not in set(before)]
    if gone or new:
        parts = [f"{what} {', '.join(names[:3])}" for what, names in (("removed", gone), ("added", new)) if names]
        return f"changed the names of {kind}", "; ".join(parts)
    for i, (old, found) in enumerate(zip(before, now, strict=True)):
        if old != found:
            return f"changed the order of {kind}", f"at place {i}: {old} was there, {found} is there now"
    return None


def _check_kept(modules: list[nn.Module], before: list[_Names], returned: Any, applied: Applied) -> None:
    if isinstance(returned, nn.Module) and len(modules) == 1:
        after = [returned]
    elif isinstance(returned, (list, tuple)) and any(isinstance(m, nn.Module) for m in returned):
        after = [m for m in returned if isinstance(m, nn.Module)]
    else:
        after = modules
    if len(after) != len(modules):
        raise InputError(
            f"{applied.name} returned {len(after)} modules for {len(modules)}", at=applied.function, hint="as many"
        )
    for old, names, module in zip(modules, before, after, strict=True):
        found = names.difference(_Names.of(module))
        if found is not None:
            what, where = found
            raise InputError(
                f"{applied.name} {what}", at=f"{type(old).__name__}: {where}", hint="hooks, or parameters of that name"
            )
        if module is not old:
            raise InputError(
                f"{applied.name} returned another module than it was given",
                at=type(old).__name__,
                hint="change the module in place",
            )
