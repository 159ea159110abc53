"""Records every op of a running step as a node of a functional graph."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .._torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    TorchDispatchMode,
    UnsupportedOperatorException,
    has_composite_kernel,
    next_sequence_number,
    running_sequence_number,
    skip_dispatch_modes,
    storage_id,
)
from ..errors import CaptureError
from ..ir.infer import infer
from ..ir.program import Slot, SlotKind, call, part
from ..ir.types import TensorType
from ..ir.updates import UPDATES, Update
from ..layout import Layout
from .aliases import Base, Ref
from .decompose import DECOMPOSITIONS
from .factories import FACTORIES
from .questions import Question
from .randomness import Draws, is_random, random_result
from .schemas import Effects, defaults_of, effects_of, foreach_element, functional_of
from .source import user_line, value_needed

aten = torch.ops.aten

_IDENTITIES = frozenset({aten.detach.default, aten.alias.default, aten.detach_.default})
_FRESH_CONSTANTS = frozenset({aten.lift_fresh.default, aten.lift_fresh_copy.default})
_SCHEDULED = (
    "the step changes a hyper-parameter of the optimizer",
    "call scheduler.step() after the compiled step: a new lr needs no recompile",
)
_FOREIGN = (
    "a tensor that is no argument of the step is changed in it",
    "pass it as an argument, or make it a buffer of a module",
)
_TO_PYTHON = frozenset({aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default})
_REFUSED = frozenset(
    {
        aten.set_.default, aten.set_.source_Tensor, aten.set_.source_Storage, aten.set_.source_Storage_storage_offset,
        aten.set_.source_Tensor_storage_offset, aten.resize_.default, aten.resize_as_.default,
    }
)  # fmt: skip
_TRUE_VIEWS = {  # ops that hide it that they return views
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
}


Ask = Callable[[fx.Node, Callable[[fx.Node], Slot]], Question | None]


class Tracer(TorchDispatchMode):
    """A dispatch mode above a `FakeTensorMode`: ops run on fake tensors and are written down.

    Attributes:
        graph: What has been recorded, without an output node.
        slots: What its placeholders are, in order.
        constants: Tensors that the step uses although they are no arguments.
        seeds: For each SEED slot, the device that it is for and its fake tensor.
        questions: What Python asked of numbers of the state.
    """

    def __init__(self, name: str, ask: Ask) -> None:
        """Start with an empty graph.

        Args:
            name: Of the step.
            ask: Answers what Python asks of numbers of the state; None where it depends on anything else.
        """
        super().__init__()
        self._ask = ask
        self.graph = fx.Graph()
        self.slots: list[Slot] = []
        self.constants: dict[Slot, Tensor] = {}
        self.questions: dict[fx.Node, Question] = {}
        self._first: fx.Node | None = None  # op
        self._types: dict[Slot, TensorType] = {}
        self._slot_of: dict[fx.Node, Slot] = {}
        self._refs: dict[int, Ref] = {}
        self._storages: dict[int, tuple[Any, int]] = {}  # of the tensors above when they were bound, kept alive
        self._alive: list[Tensor] = []  # ids stay unique as long as their tensors live
        self._draws = Draws(name)
        self.seeds: dict[Slot, tuple[torch.device, Tensor]] = {}
        self._forward: dict[int, tuple[str, str]] = {}
        self._line, self._module, self._in_backward = "", "", False
        self._entered: list[str] = []

    def placeholder(self, slot: Slot, tensor: Tensor) -> fx.Node:
        """Declare a fake tensor to be an input."""
        node = self._new_placeholder(slot, TensorType.of(tensor))
        fixed = _SCHEDULED if slot.kind is SlotKind.HYPERPARAMETER else None
        self._bind(tensor, Ref(Base(fixed=fixed), node, node.meta["type"]))
        return node

    def value(self, tensor: Tensor) -> fx.Node:
        """The node of the present value of a tensor."""
        return self._ref(tensor).read(self._emit)

    def slot_of(self, placeholder: fx.Node) -> Slot:
        """The slot of an input node."""
        return self._slot_of[placeholder]

    def type_of(self, slot: Slot) -> TensorType:
        """The type of an input."""
        return self._types[slot]

    def memory(self, tensor: Tensor) -> Base:
        """What is the same for tensors that share memory."""
        return self._ref(tensor).base

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run one op below autograd and record it."""
        kwargs = kwargs or {}
        self._line, self._module, self._in_backward = self._where()
        if func.namespace in ("profiler", "prim"):  # no computation
            return func(*args, **kwargs)
        if func in _TO_PYTHON and (truth := self._truth(args[0])) is not None:
            return truth
        if func in _TO_PYTHON:
            raise value_needed(self._line)
        try:
            return self._record(_TRUE_VIEWS.get(func, func), args, kwargs)
        except CaptureError as error:
            raise CaptureError(error.what, at=error.at or self._line or None, hint=error.hint) from error.__cause__
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise CaptureError(
                f"the result of {func} has a shape that depends on values",
                at=self._line or None,
                hint="a form with a fixed shape: torch.where or a mask instead of boolean indexing or nonzero",
            ) from error
        except UnsupportedOperatorException as error:
            raise CaptureError(
                f"{func} has no fake implementation",
                at=self._line or None,
                hint="torch.library.register_fake",
            ) from error

    def _record(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if func in UPDATES:
            return self._record_update(UPDATES[func], args, kwargs)
        if func in DECOMPOSITIONS:
            with self:
                out = DECOMPOSITIONS[func](*args, **kwargs)
            if out is not NotImplemented:
                return out
        if (single := foreach_element(func)) is not None:
            return self._record_foreach(single, args, kwargs)
        if has_composite_kernel(func):
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        if is_random(func, args, kwargs):
            with self:
                return random_result(self._random_tensor, self._draws, func, args, kwargs)
        before = self._operands(func, args, kwargs)
        out = func(*args, **kwargs)
        if not isinstance(out, (bool, int)):  # what is known of shapes: there is nothing to compute
            self._write_down(func, args, kwargs, before, out)
        return out

    def _random_tensor(
        self, op: Any, shape: list[int], number: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A random tensor of the IR from the seed that is an input of the program."""
        slot = Slot(SlotKind.SEED, device.type)
        if slot not in self.seeds:
            seed = torch.empty(2, dtype=torch.int64, device=device)
            self.seeds[slot] = (device, seed)
            self._bind(seed, Ref(Base(), self._new_placeholder(slot, TensorType.of(seed)), TensorType.of(seed)))
        made: Tensor = op(self.seeds[slot][1], [None] * len(shape), number, shape, shape, dtype)
        return made

    def _truth(self, tensor: Tensor) -> bool | None:
        """What a 0-d bool is that depends on numbers of the state alone; None for anything else."""
        if tensor.dtype is not torch.bool or tensor.numel() != 1:
            return None
        node = self.value(tensor)
        question = self.questions.get(node) or self._ask(node, self.slot_of)
        if question is None:
            return None
        self.questions[node] = question
        return question.answer

    def _operands(self, func: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments as nodes, read before the op runs."""
        if func in _IDENTITIES or func in _FRESH_CONSTANTS:
            return (), {}
        return _map(args, self._node_of), _map(kwargs, self._node_of)

    def _write_down(self, func: Any, args: tuple, kwargs: dict, before: tuple[tuple, dict], out: Any) -> None:
        effects = effects_of(func)
        nodes, named = before
        if func in _REFUSED:
            raise CaptureError(f"{func} changes a tensor's storage", hint="make a new tensor")
        if func in _IDENTITIES:
            self._bind_same(out, self._ref(args[0]))
        elif func in _FRESH_CONSTANTS:
            self._bind(out, Ref(Base(), self._fresh(args[0]), TensorType.of(out)))
        elif torch.Tag.inplace_view in func.tags:
            self._bind_view(args[0], self._refs[id(args[0])], functional_of(func), nodes, named)
        elif effects.written:
            self._write(func, effects, args, kwargs, nodes, named, out)
        elif func in FACTORIES:
            target, arguments, options = FACTORIES[func](out, nodes, named)
            self._bind(
                out,
                Ref(Base(), self._emit(target, arguments, options, TensorType.of(out)), TensorType.of(out)),
            )
        else:
            node = self._emit(func, nodes, named, _types(out))
            parent = self._ref(args[0]) if effects.is_view or _shares_memory(out, args) else None
            self._bind_outputs(node, out, parent, (func, nodes[1:], named))

    def _bind_same(self, out: Tensor, parent: Ref) -> None:
        node = parent.read(self._emit)
        if self._refs.get(id(out)) is not parent:
            self._bind(out, Ref(parent.base, node, parent.type, parent, version=parent.base.version))

    def _bind_view(self, tensor: Tensor, parent: Ref, op: Any, nodes: tuple, named: dict) -> None:
        """A tensor that became a view of what it was, as by `t_`."""
        type_ = TensorType.of(tensor)
        node = self._emit(op, nodes, named, type_)
        self._bind(tensor, Ref(parent.base, node, type_, parent, (op, nodes[1:], named), None, parent.base.version))

    def _bind_outputs(self, node: fx.Node, out: Any, parent: Ref | None, view: tuple) -> None:
        if isinstance(out, Tensor):
            outputs: list[tuple[int | None, Any]] = [(None, out)]
        else:
            outputs = list(enumerate(out))
        for index, tensor in outputs:
            if tensor is None:
                continue
            value = node if index is None else part(self.graph, node, index)
            if parent is None:
                self._bind(tensor, Ref(Base(), value, TensorType.of(tensor)))
            else:
                ref = Ref(parent.base, value, TensorType.of(tensor), parent, view, index, parent.base.version)
                self._bind(tensor, ref)

    def _write(
        self, func: Any, effects: Effects, args: tuple, kwargs: dict, nodes: tuple, named: dict, out: Any
    ) -> None:
        names = [a.name for a in func._schema.arguments]
        bound = dict(zip(names, args, strict=False)) | kwargs
        targets = [bound[name] for name in effects.written]
        new = self._new_value(func, effects, targets, nodes, named)
        for target, node in zip(targets, new, strict=True):
            want = TensorType.of(target)
            if node.meta["type"].dtype != want.dtype:
                node = self._emit(aten._to_copy.default, (node,), {"dtype": want.dtype}, want)
                node.meta["narrowed"] = True  # by the storage it is written to, not by the user
            if node.meta["type"].shape != want.shape:
                node = self._emit(aten.expand.default, (node, list(want.shape)), {}, want)
            self._ref(target).write(node, self._emit)
        returned = [out] if isinstance(out, Tensor) else list(out or ())
        for tensor, target in zip(returned, targets, strict=False):
            if tensor is not target:
                self._bind(tensor, self._ref(target))

    def _new_value(
        self, func: Any, effects: Effects, targets: list[Tensor], nodes: tuple, named: dict
    ) -> list[fx.Node]:
        if func is aten.copy_.default:
            return [nodes[1]]
        if func in FACTORIES:  # zero_, fill_
            target, arguments, options = FACTORIES[func](targets[0], nodes, named)
            return [self._emit(target, arguments, options, TensorType.of(targets[0]))]
        functional = functional_of(func)
        if effects.out_only:
            named = {k: v for k, v in named.items() if k not in effects.written}
        node = self._emit(functional, nodes, defaults_of(func, functional, nodes) | named)
        return [node] if isinstance(node.meta["type"], TensorType) else self._parts(node)

    def _parts(self, node: fx.Node) -> list[fx.Node]:
        return [part(self.graph, node, i) for i, type_ in enumerate(node.meta["type"]) if type_ is not None]

    def _record_update(self, update: Update, args: tuple, kwargs: dict) -> None:
        """An optimizer kernel on lists, as one op a parameter."""
        lists = dict(zip(update.lists, args, strict=True))
        options = {k: self._node_of(v) for k, v in kwargs.items()}
        for i in range(len(lists["param"])):
            tensors = {name: found[i] if found else None for name, found in lists.items()}
            nodes = tuple(None if t is None else self.value(t) for t in tensors.values())
            kinds = [tensors[name] for name in update.written]
            empty = TensorType(lists["param"][i].dtype, (0,), lists["param"][i].device.type)
            node = self._emit(update.op, nodes, options, tuple(empty if t is None else TensorType.of(t) for t in kinds))
            for index, tensor in enumerate(kinds):
                if tensor is not None:
                    self._ref(tensor).write(part(self.graph, node, index), self._emit)

    def _record_foreach(self, single: Any, args: tuple, kwargs: dict) -> list | None:
        """An op on lists, as one op an element."""
        count = len(args[0])

        def element(value: Any, i: int) -> Any:
            return value[i] if isinstance(value, (list, tuple)) and len(value) == count else value

        with self:
            outs = [
                single(*(element(a, i) for a in args), **{k: element(v, i) for k, v in kwargs.items()})
                for i in range(count)
            ]
        return None if single._schema.is_mutable else outs

    def _emit(self, op: Any, args: tuple, kwargs: dict, type_: Any = None) -> fx.Node:
        if op is operator.getitem:
            return part(self.graph, *args)
        type_ = infer(op, args, kwargs) if type_ is None else type_
        node = call(self.graph, op, args, kwargs, type=type_, source=self._line)
        node.meta.update(module=self._module, backward=self._in_backward)
        self._first = self._first or node
        return node

    def _node_of(self, value: Any) -> Any:
        return self.value(value) if isinstance(value, Tensor) else value

    def _ref(self, tensor: Tensor) -> Ref:
        found = self._refs.get(id(tensor))
        if found is None:
            return self._constant(tensor)
        return found if self._storages[id(tensor)][1] == storage_id(tensor) else self._reassigned(tensor)

    def _reassigned(self, tensor: Tensor) -> Ref:
        """After `tensor.data = other`: the tensor has become an alias of the other one."""
        for other in reversed(self._alive):
            if other is not tensor and self._storages[id(other)][1] == storage_id(tensor) and _alike(other, tensor):
                parent = self._ref(other)
                self._bind(tensor, Ref(parent.base, parent.read(self._emit), parent.type, parent))
                self._refs[id(tensor)].version = parent.base.version
                return self._refs[id(tensor)]
        raise CaptureError(
            "`.data` of a tensor is set to memory that no tensor of the step has",
            hint="tensor.copy_(other) under torch.no_grad()",
        )

    def _bind(self, tensor: Tensor, ref: Ref) -> None:
        self._refs[id(tensor)] = ref
        self._storages[id(tensor)] = tensor.untyped_storage(), storage_id(tensor)
        self._alive.append(tensor)

    def _fresh(self, tensor: Tensor) -> fx.Node:
        """The value of `torch.tensor(...)`: nobody else holds this one, so it may be written to."""
        if isinstance(tensor, FakeTensor) or id(tensor) in self._refs:
            return self.value(tensor)
        if tensor.numel() != 1:
            return self._constant(tensor).node
        with skip_dispatch_modes():
            value = tensor.item()
        options = {"dtype": tensor.dtype, "device": tensor.device}
        return self._emit(aten.full.default, (list(tensor.shape), value), options, TensorType.of(tensor))

    def _constant(self, tensor: Tensor) -> Ref:
        if isinstance(tensor, FakeTensor):
            raise CaptureError("the step uses a fake tensor that was made outside of it", hint="pass it as an argument")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise CaptureError(
                "the step computes with a tensor that wants a gradient and is no argument of it",
                hint="pass it, or the module that it belongs to, to the step as an argument",
            )
        slot = Slot(SlotKind.CONSTANT, f"tensor_{len(self.constants)}")
        node = self._new_placeholder(slot, TensorType.of(tensor))
        with skip_dispatch_modes():
            self.constants[slot] = tensor.detach()
        self._bind(tensor, Ref(Base(fixed=_FOREIGN), node, TensorType.of(tensor)))
        return self._refs[id(tensor)]

    def _new_placeholder(self, slot: Slot, type_: TensorType) -> fx.Node:
        with self.graph.inserting_before(self._first) if self._first else contextlib.nullcontext():
            node = self.graph.create_node("placeholder", slot_name(slot), name=slot_name(slot))
        node.target = node.name  # in the Python that fx writes it is an argument: no keyword, no digit first
        node.meta.update(type=type_, layout=Layout(), source="")
        self.slots.append(slot)
        self._slot_of[node], self._types[slot] = slot, type_
        return node

    def _where(self) -> tuple[str, str, bool]:
        """The line and module of the op that runs, those of its forward op for a backward op; whether it is one."""
        running = running_sequence_number()
        if running is not None and running in self._forward:
            return *self._forward[running], True
        here = user_line(), self._entered[-1] if self._entered else ""
        if running is None and torch.is_grad_enabled():
            self._forward.setdefault(next_sequence_number() - 1, here)
        return *here, running is not None

    @contextlib.contextmanager
    def noting_modules(self, name_of: Callable[[nn.Module], str]) -> Iterator[None]:
        """Write down, with every op inside, the module in whose `forward` it runs."""

        def enter(module: nn.Module, inputs: Any) -> None:
            self._entered.append(name_of(module))

        def leave(module: nn.Module, inputs: Any, outputs: Any) -> None:
            self._entered.pop()

        with contextlib.ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(enter).remove)
            stack.callback(register_module_forward_hook(leave, always_call=True).remove)
            yield


def _shares_memory(out: Any, args: tuple) -> bool:
    """Whether an op returned its first argument's memory although its schema does not say so."""
    first = out[0] if isinstance(out, (list, tuple)) and out else out
    if not (isinstance(first, Tensor) and args and isinstance(args[0], Tensor)):
        return False
    return storage_id(first) == storage_id(args[0])


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one storage are the same elements in the same order."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset()
    )


def _types(out: Any) -> Any:
    if isinstance(out, Tensor):
        return TensorType.of(out)
    return tuple(_types(o) for o in out) if isinstance(out, (list, tuple)) else None


def _map(value: Any, f: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_map(v, f) for v in value)
    return {k: _map(v, f) for k, v in value.items()} if isinstance(value, dict) else f(value)


_UNMARKED = frozenset({SlotKind.PARAMETER, SlotKind.BUFFER, SlotKind.ARGUMENT, SlotKind.HYPERPARAMETER})


def slot_name(slot: Slot) -> str:
    """A name for the slot's node: the text form shows it."""
    kind = "" if slot.kind in _UNMARKED else f"{slot.kind.name.lower().removeprefix('optimizer_')}_"
    return kind + "".join(c if c.isalnum() else "_" for c in slot.name).strip("_")
