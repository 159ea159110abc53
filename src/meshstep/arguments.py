"""The arguments of one call: bound to names, flattened, and given their layouts."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement

from .capture.tree import Spec, flatten, paths, unflatten
from .errors import InputError, LayoutError
from .ir.program import Slot, SlotKind
from .layout import REPLICATE, Layout, shard, shard_dim
from .mesh import Mesh
from .plan.plan import Plan
from .runtime.sharded import layout_of

log = logging.getLogger("meshstep")


@dataclass(frozen=True, slots=True)
class Dynamic:
    """What is said of an argument whose size changes from call to call. See `dynamic`."""

    dims: tuple[int, ...]
    layout: Layout | Placement | None = None


Inputs = Mapping[str, Layout | Placement | Dynamic]


def dynamic(*dims: int, layout: Layout | Placement | None = None) -> Dynamic:
    """For `inputs=`: dims of an argument whose size may be another one in every call, with one program for all.

        @meshstep.compile(inputs={"tokens": meshstep.dynamic(0), "labels": meshstep.dynamic(0)})

    All dims that are named change together: their sizes keep their ratio. The first compilation traces the step for two
    more sizes, to learn how the program depends on the size; every new size is traced once, to see that the step does
    no other thing with it. Without `dynamic` the same begins at the second size that a step meets.

    Args:
        dims: The dims, counted from 0.
        layout: As for `inputs=` without it.

    Raises:
        InputError: A dim is no whole number from 0 on, or there is none.
    """
    if not dims or any(isinstance(dim, bool) or not isinstance(dim, int) or dim < 0 for dim in dims):
        raise InputError(f"dynamic{dims!r}", at="inputs={...: dynamic(...)}", hint="dims, counted from 0: dynamic(0)")
    return Dynamic(dims, layout)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a step.

    Args:
        signature: The parameters of the function.
        leaves: The leaves of the arguments.
        names: Their paths.
        spec: Puts them together.
    """

    signature: inspect.Signature
    leaves: list[Any]
    names: tuple[str, ...]
    spec: Spec

    def invoker(self, function: Callable[..., Any]) -> Callable[[list[Any]], Any]:
        """Calls `function` with other leaves."""

        def invoke(leaves: list[Any]) -> Any:
            bound = self.signature.bind_partial()
            bound.arguments.update(unflatten(leaves, self.spec))
            return function(*bound.args, **bound.kwargs)

        return invoke


def bind_call(signature: inspect.Signature, args: tuple, kwargs: dict[str, Any]) -> Call:
    """Bind and flatten.

    Raises:
        InputError: An argument is missing or too much.
    """
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(str(error), at=f"step{signature}", hint="call it like the function") from None
    leaves, spec = flatten(dict(bound.arguments))
    return Call(signature, leaves, tuple(paths(spec)), spec)


def argument_layouts(
    call: Call, mesh: Mesh, plan: Plan, inputs: Inputs | None, *, whole: bool = False, warn: bool = True
) -> list[Layout | None]:
    """The layout of each leaf that is a tensor; None for any other leaf.

    Args:
        call: The call.
        mesh: The mesh.
        plan: Says which axes split the batch.
        inputs: What the user says, by name or path.
        whole: The leaves have global shape; one whose rows do not divide evenly is replicated.
        warn: Whether a warning says so.

    Raises:
        InputError: `inputs` names no argument, or an axis that the mesh lacks.
    """
    _check_names(call, inputs or {})
    _check_axes(mesh, inputs or {})
    batch = {axis: dim for axis, dim in plan.batch_dims().items() if mesh[axis] > 1}
    layouts = [
        _own(leaf, name, mesh, whole) if isinstance(leaf, DTensor) else _layout(leaf, name, mesh, batch, inputs or {})
        for leaf, name in zip(call.leaves, call.names, strict=True)
    ]
    return (
        [
            _even(leaf, name, layout, mesh, warn)
            for leaf, name, layout in zip(call.leaves, call.names, layouts, strict=True)
        ]
        if whole
        else layouts
    )


def check_inputs(inputs: Any) -> None:
    """See that what the user says of arguments are layouts by name.

    Raises:
        InputError: They are not.
    """
    if inputs is None:
        return
    entries = dict(inputs) if isinstance(inputs, Mapping) else {"": inputs}
    for name, said in entries.items():
        layout = said.layout if isinstance(said, Dynamic) else said
        if not isinstance(name, str) or not isinstance(layout, Layout | Placement | None) or said is None or not name:
            raise InputError(
                f"{f'inputs has {said!r} for {name!r}' if name else f'inputs is a {type(inputs).__name__}'}",
                at="compile(inputs=...)",
                hint="layouts by the names of arguments: {'x': Shard(0), 'mask': Layout(...), 'ids': dynamic(0)}",
            )


def _check_axes(mesh: Mesh, inputs: Inputs) -> None:
    for name, said in inputs.items():
        layout = said.layout if isinstance(said, Dynamic) else said
        for axis in [axis for axis, _ in layout.placements] if isinstance(layout, Layout) else []:
            if axis not in mesh:
                raise InputError(
                    f"inputs has axis {axis!r} for {name!r}, which the mesh lacks",
                    at=str(mesh),
                    hint=f"one of {', '.join(map(repr, mesh.axes))}",
                )


def dynamic_dims(call: Call, inputs: Inputs | None) -> tuple[tuple[int, int], ...]:
    """The dims that `inputs` says are dynamic, as (index of a leaf, dim).

    Raises:
        InputError: An argument has no such dim.
    """
    found = []
    for index, (leaf, name) in enumerate(zip(call.leaves, call.names, strict=True)):
        said = _said(name, inputs or {})
        if not isinstance(said, Dynamic) or not isinstance(leaf, Tensor):
            continue
        for dim in said.dims:
            if dim >= leaf.ndim:
                raise InputError(
                    f"dim {dim} of a {leaf.ndim}-d tensor is said to be dynamic",
                    at=f"argument {name}",
                    hint="a dim of it",
                )
            found.append((index, dim))
    return tuple(found)


def placements_along(axis: str, names: Sequence[str], layouts: Sequence[Layout | None]) -> dict[Slot, Placement]:
    """The placement of each argument along one axis."""
    return {
        Slot(SlotKind.ARGUMENT, name): layout[axis]
        for name, layout in zip(names, layouts, strict=True)
        if layout is not None
    }


def _own(leaf: DTensor, name: str, mesh: Mesh, whole: bool) -> Layout:
    """How a DTensor says that it lies."""
    if whole:
        raise InputError("simulate on a DTensor", at=f"argument {name}", hint="x.full_tensor()")
    layout = layout_of(leaf, f"argument {name}", mesh)
    _check_not_partial([placement for _, placement in layout.placements], name)
    return layout


def _check_not_partial(placements: Sequence[Placement | None], name: str) -> None:
    if any(isinstance(placement, Partial) for placement in placements):
        raise LayoutError(
            "a partial argument", at=f"argument {name}", hint="Shard(dim) or Replicate(): reduce it first"
        )


def _layout(leaf: Any, name: str, mesh: Mesh, batch: Mapping[str, int], inputs: Inputs) -> Layout | None:
    if not isinstance(leaf, Tensor):
        return None
    said = _said(name, inputs)
    said = said.layout if isinstance(said, Dynamic) else said
    _check_not_partial([p for _, p in said.placements] if isinstance(said, Layout) else [said], name)
    if isinstance(said, Layout):
        return Layout(tuple((axis, said[axis]) for axis in mesh.axes))
    return Layout(tuple((axis, _rows(leaf, batch.get(axis), said)) for axis in mesh.axes))


def _said(name: str, inputs: Inputs) -> Layout | Placement | Dynamic | None:
    return next((inputs[prefix] for prefix in _prefixes(name) if prefix in inputs), None)


def _rows(leaf: Tensor, dim: int | None, said: Placement | None) -> Placement:
    """How an argument lies along an axis that splits `dim` of the batch."""
    if dim is None:
        return REPLICATE
    if said is not None:
        return said
    return shard(dim) if leaf.ndim > dim and not isinstance(leaf, nn.Parameter) else REPLICATE


def _even(leaf: Any, name: str, layout: Layout | None, mesh: Mesh, warn: bool) -> Layout | None:
    """The layout, whole along each axis over which a dim does not divide."""
    if layout is None:
        return None
    even = Layout()
    for axis, placement in layout.placements:
        more, dim = even.extended(axis, placement), shard_dim(placement)
        divides = dim is None or dim >= leaf.ndim or leaf.shape[dim] % more.splits(dim, mesh) == 0
        even = more if divides else even.extended(axis, REPLICATE)
        if not divides and warn:
            log.warning(
                "argument %s of shape %s does not divide over axis %r of %s: computed replicated",
                name, list(leaf.shape), axis, mesh,
            )  # fmt: skip
    return even


def _prefixes(name: str) -> list[str]:
    """`batch.ids[0]`, `batch.ids`, `batch`."""
    ends = [i for i, c in enumerate(name) if c in ".["]
    return [name, *(name[:i] for i in reversed(ends))]


def _check_names(call: Call, inputs: Inputs) -> None:
    known = {prefix for name in call.names for prefix in _prefixes(name)}
    for name in inputs:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), 1)
            raise InputError(
                f"inputs= names {name!r}, which is no argument",
                at=f"arguments {', '.join(call.names)}",
                hint=repr(near[0]) if near else None,
            )
