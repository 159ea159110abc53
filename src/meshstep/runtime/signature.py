"""What a call must have in common with a compiled program, and what to say when it has not."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._torch import hooks_by_place, tensor_hooks
from ..capture.capture import Captured
from ..capture.places import GradientPlace, OptimizerStatePlace
from ..capture.state import frozen_hyperparameters
from ..capture.tree import Spec
from ..ir.program import Program, SlotKind
from ..ir.types import TensorType
from ..ir.updates import laid_out_like
from .sharded import placements_of

AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments of a call, hashable: structure, types of tensors, Python values, identities of objects.

    Args:
        spec: Structure of the arguments.
        names: Path of each leaf.
        leaves: What is compared of each leaf.
        surroundings: What around the call changes what it computes: gradients, default dtype, autocast.
    """

    spec: Spec
    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    surroundings: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, spec: Spec, names: Sequence[str], leaves: Sequence[Any]) -> Signature:
        """The signature of a call."""
        return cls(spec, tuple(names), tuple(map(_compared, leaves)), _surroundings())

    def differences(self, other: Signature) -> list[str]:
        """What differs, for the log; the first says it best."""
        if self.spec != other.spec:
            return ["the arguments have another structure"] * (1 + max(len(self.leaves), len(other.leaves)))
        found = [
            f"argument {name} was {_text(theirs)}, is {_text(ours)}"
            for name, ours, theirs in zip(self.names, self.leaves, other.leaves, strict=True)
            if ours != theirs
        ]
        changed = [name for ours, (name, _) in zip(self.surroundings, other.surroundings, strict=True) if ours[1] != _]
        return found + ([f"{', '.join(changed)} differ{'s' if len(changed) == 1 else ''}"] if changed else [])

    def sizes(self, other: Signature) -> dict[tuple[int, int], tuple[int, int]] | None:
        """Where tensors have other sizes, by (leaf, dim): ours and theirs; None if anything else differs too."""
        if (self.spec, self.names, self.surroundings) != (other.spec, other.names, other.surroundings):
            return None
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for index, (ours, theirs) in enumerate(zip(self.leaves, other.leaves, strict=True)):
            if ours == theirs:
                continue
            if not (_is_tensor(ours) and _is_tensor(theirs)) or ours[1:] != theirs[1:]:
                return None
            a, b = ours[0], theirs[0]
            if (a.dtype, a.device, a.ndim) != (b.dtype, b.device, b.ndim):
                return None
            found |= {
                (index, d): pair for d, pair in enumerate(zip(a.shape, b.shape, strict=True)) if pair[0] != pair[1]
            }
        return found


def _is_tensor(compared: Any) -> bool:
    return isinstance(compared, tuple) and isinstance(compared[0], TensorType)


def _compared(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        lies = leaf.placements if isinstance(leaf, DTensor) else None
        return (TensorType.of(leaf), leaf.requires_grad, type(leaf), lies)
    if isinstance(leaf, (nn.Module, Optimizer)):
        return _Same(leaf)
    return _value(leaf)


def _value(leaf: Any) -> Any:
    try:
        hash(leaf)
    except TypeError:
        return _Same(leaf)
    return (type(leaf), leaf, repr(leaf) if isinstance(leaf, (float, complex)) else "")  # 0.0 and -0.0 differ


def _surroundings() -> tuple[tuple[str, Any], ...]:
    return (
        ("whether gradients are enabled", torch.is_grad_enabled()),
        ("the default dtype", torch.get_default_dtype()),
        ("autocast", tuple(_autocast(device) for device in AUTOCAST_DEVICES)),
    )


def _autocast(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


@dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """An object that is compared by identity, and kept alive so that its identity is not reused."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def _text(compared: Any) -> str:
    if isinstance(compared, _Same):
        return f"another {type(compared.value).__name__}"
    first = compared[0]
    return str(first) if isinstance(first, TensorType) else repr(compared[1])


def _nothing() -> None:
    """What has been seen at first."""


class Guards:
    """The state that a program was compiled for: read at every call, and compared while it is read.

    Args:
        captured: The capture.
        local: Its local program: says how state lies.
        gradients: Whether the program has to do with `.grad` and hooks of parameters.
    """

    def __init__(self, captured: Captured, local: Program, *, gradients: bool = True) -> None:
        """Note what must stay as it is."""
        state = captured.state
        self._attributes, self._questions = captured.attributes, captured.questions
        self._lies = [placements_of(node.meta["layout"], local.mesh) for node in local.placeholders]
        place_of = {slot: i for i, slot in enumerate(captured.program.slots)}
        index_of = {id(held.tensor): place_of[held.slot] for held in state.held}
        watched = list(state.parameters()) if gradients else []
        self._hooks = [(place_of[held.slot], tensor_hooks(held.tensor)) for held in watched]
        self._tables = [_Table.of(module, index_of) for module in state.submodules()]
        self._modes = [(module, module.training) for module in state.submodules()]
        self._numbers = [(optimizer, frozen_hyperparameters(optimizer)) for _, optimizer in state.optimizers]
        self._entries = [(optimizer, _count(optimizer)) for _, optimizer in state.optimizers]
        with_gradient = {h.slot.name for h in state.held if h.slot.kind is SlotKind.GRADIENT}
        self._gradients = [(GradientPlace(h.place), h.slot.name in with_gradient) for h in watched]
        self._names = [str(slot) for slot in captured.program.slots]
        self._places = captured.places
        held = {str(h.slot): (TensorType.of(h.tensor), h.tensor.requires_grad) for h in state.held}
        self._wanted = [held.get(name) for name in self._names]
        at = {id(place): i for i, place in enumerate(captured.places)}
        self._owner = [at.get(id(getattr(place, "owner", None))) for place in captured.places]
        self._quick = _Quick(captured, watch_gradients=gradients)
        # Weak: a whole parameter that has become a shard must not stay for having been looked at.
        self._seen: list[Callable[[], Any]] = [_nothing] * len(self._places)

    def bind(self, leaves: list[Any]) -> list[Tensor] | str:
        """The tensor of each slot now, or why the program does not fit."""
        now = self._quick.take()
        if self._quick.knows(now) and self._attributes.difference() is None and self._numbers_are_the_same():
            tensors = self._quick.tensors(now, leaves)
            return self._other_answer(leaves) or tensors
        found = self._bound(leaves)
        if not isinstance(found, str):
            self._quick.note(now, found)
        return found

    def _numbers_are_the_same(self) -> bool:
        return all(frozen_hyperparameters(optimizer) == numbers for optimizer, numbers in self._numbers)

    def _other_answer(self, leaves: list[Any]) -> str | None:
        return next(filter(None, (question.difference(leaves) for question in self._questions)), None)

    def _bound(self, leaves: list[Any]) -> list[Tensor] | str:
        for module, training in self._modes:
            if module.training is not training:
                return f"{type(module).__name__} is in {'train' if module.training else 'eval'} mode"
        for optimizer, numbers in self._numbers:
            if frozen_hyperparameters(optimizer) != numbers:
                return f"{type(optimizer).__name__} has other hyper-parameters"
        changed = self._attributes.difference()
        if changed is not None:
            return changed
        for optimizer, count in self._entries:
            if _count(optimizer) != count:
                return f"{type(optimizer).__name__} has state now" if count == 0 else "the optimizer has other state"
        for place, present in self._gradients:
            if (place.read(leaves) is not None) is not present:
                return "parameters have gradients now" if not present else "parameters have no gradients now"
        tensors = self._tensors(leaves)
        if isinstance(tensors, str):
            return tensors
        return self._other_answer(leaves) or tensors

    def _tensors(self, leaves: list[Any]) -> list[Tensor] | str:
        tensors: list[Any] = [place.read(leaves) for place in self._places]
        seen, wanted = self._seen, self._wanted
        for i, tensor in enumerate(tensors):
            want = wanted[i]
            if want is None:
                continue
            if tensor is None or tensor is not seen[i]():
                if not isinstance(tensor, Tensor) or TensorType.of(tensor) != want[0]:
                    return f"{self._names[i]} has another type"
                if isinstance(tensor, DTensor) and tensor.placements != self._lies[i]:
                    return f"{self._names[i]} lies otherwise"
                seen[i] = weakref.ref(tensor)
                self._lay_out(i, tensors)
            if tensor.requires_grad is not want[1]:
                return f"{self._names[i]} {'now' if tensor.requires_grad else 'no longer'} requires grad"
        for i, hooks in self._hooks:
            if tensor_hooks(tensors[i]) != hooks:
                return "a parameter has other hooks"
        for table in self._tables:
            reason = table.difference(tensors)
            if reason:
                return reason
        held = [id(tensor) for tensor, want in zip(tensors, wanted, strict=True) if want is not None]
        return tensors if len(set(held)) == len(held) else "two tensors of the state are one now"

    def _lay_out(self, index: int, tensors: list[Tensor]) -> None:
        """Give optimizer state that came from elsewhere (a checkpoint) memory like its parameter's."""
        owner = self._owner[index]
        if owner is None or not isinstance(self._places[index], OptimizerStatePlace):
            return
        tensor, like = tensors[index], tensors[owner]
        if not isinstance(tensor, DTensor) and not isinstance(like, DTensor) and like is not None:
            (found,) = laid_out_like([tensor], [like.detach()])
            if found is not tensor:
                tensor.data = found


class _Quick:
    """Sees that all holds as it did at the last call, in a time that hardly depends on how many parameters there are.

    What modules and optimizers hold is taken as one flat list of objects, and compared with the one of the last call by
    identity, without a line of Python for each of them.

    Args:
        captured: The capture.
        watch_gradients: Whether gradients and hooks of parameters count.
    """

    def __init__(self, captured: Captured, *, watch_gradients: bool) -> None:
        state = captured.state
        self._places, self._watch = captured.places, watch_gradients
        tables: Any = [t for m in state.submodules() for t in (m._parameters, m._buffers)]
        self._tables, self._empty = [t for t in tables if t], [t for t in tables if not t]
        self._optimizers = [optimizer for _, optimizer in state.optimizers]
        self._seen: list[Callable[[], Any]] | None = None  # weak, as in `Guards`
        self._take: Callable[[list[Any]], Any] = tuple  # the tensors of slots out of the flat list, 0 for others
        self._read: list[int] = []  # slots that are read one by one
        self._parameters: list[int] = []  # where the tensors of modules are in the flat list
        self._facts: Any = None

    def take(self) -> list[Any]:
        """All that is held, flat."""
        found: list[Any] = list(chain.from_iterable(map(_VALUES, self._tables)))
        for optimizer in self._optimizers:
            found.extend(chain.from_iterable(group["params"] for group in optimizer.param_groups))
            found.extend(chain.from_iterable(map(dict.values, optimizer.state.values())))
        return found

    def knows(self, now: list[Any]) -> bool:
        """Whether these are the objects of the last call, and what is known of them is so still."""
        seen = self._seen
        return (
            seen is not None
            and not any(self._empty)
            and len(now) == len(seen)
            and all(map(operator.is_, now, map(operator.call, seen)))
            and self._of(now) == self._facts
        )

    def note(self, now: list[Any], bound: list[Tensor]) -> None:
        """Remember a call that was looked at closely."""
        at = {id(value): i for i, value in reversed(list(enumerate(now)))}
        places = [at.get(id(tensor)) for tensor in bound]
        self._take = operator.itemgetter(0, *(i or 0 for i in places)) if now else lambda _: [None] * (1 + len(places))
        self._read = [slot for slot, i in enumerate(places) if i is None]
        modules = len(list(chain.from_iterable(self._tables)))
        self._parameters = [i for i, value in enumerate(now[:modules]) if isinstance(value, Tensor)]
        self._seen = [weakref.ref(v, self._forget) if isinstance(v, Tensor) else _constant(v) for v in now]
        self._facts = self._of(now)

    def _forget(self, dead: Any) -> None:
        """A tensor that was seen is gone: None in its place would look the same."""
        self._seen = None

    def tensors(self, now: list[Any], leaves: list[Any]) -> list[Tensor]:
        """The tensor of each slot."""
        bound: list[Any] = list(self._take(now))[1:]
        for slot in self._read:
            bound[slot] = self._places[slot].read(leaves)
        return bound

    def _of(self, now: list[Any]) -> Any:
        """What of tensors can change while they stay the same objects."""
        held = [now[i] for i in self._parameters]
        wants = list(map(_WANTS_GRADIENT, held))
        if not self._watch:
            return wants
        learnt = list(compress(held, wants))
        return wants, [t.grad is None for t in learnt], hooks_by_place(learnt)


_VALUES: Any = dict.values
_WANTS_GRADIENT = operator.attrgetter("requires_grad")


def _constant(value: Any) -> Callable[[], Any]:
    return lambda: value


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """Which tensor each entry of a module's parameters and buffers is: those that are tied are one, some are None.

    Args:
        module: The module.
        sizes: How many parameters and how many buffers it has.
        others: Table, name and slot of each entry; None for one that is None.
    """

    module: nn.Module
    sizes: tuple[int, int]
    others: tuple[tuple[dict[str, Any], str, int | None], ...]

    @classmethod
    def of(cls, module: nn.Module, index_of: dict[int, int]) -> _Table:
        """Note the entries as they are."""
        tables: Any = (module._parameters, module._buffers)
        entries = [(table, name, tensor) for table in tables for name, tensor in table.items()]
        others = tuple((table, name, None if t is None else index_of[id(t)]) for table, name, t in entries)
        return cls(module, (len(tables[0]), len(tables[1])), others)

    def difference(self, tensors: list[Tensor]) -> str | None:
        """What is not as it was; None if nothing."""
        if (len(self.module._parameters), len(self.module._buffers)) != self.sizes:
            return f"{type(self.module).__name__} has other parameters or buffers"
        for table, name, index in self.others:
            if table.get(name) is not (None if index is None else tensors[index]):
                return f"{type(self.module).__name__}.{name} is tied to another tensor, or no longer None"
        return None


def _count(optimizer: Optimizer) -> int:
    return sum(map(len, optimizer.state.values()))
