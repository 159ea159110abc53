"""State that lies in shards: DTensors on the user's own modules and optimizers."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from .._torch import tensor_hooks
from ..capture.capture import Captured
from ..capture.places import ArgumentPlace, GradientPlace, OptimizerStatePlace
from ..capture.state import State
from ..errors import PlanError
from ..ir.program import STATE_KINDS, Program, Slot
from ..layout import REPLICATE, Layout, own_part, shard_dim
from ..mesh import Mesh
from .world import device_mesh, world


def layout_of(tensor: DTensor, name: str, mesh: Mesh) -> Layout:
    """How a DTensor lies on a mesh that has the axes of its own one.

    Args:
        tensor: The DTensor.
        name: What it is, for the error.
        mesh: The mesh of the step.

    Raises:
        PlanError: It lies on another mesh.
    """
    theirs = tensor.device_mesh
    sizes = dict(zip(theirs.mesh_dim_names or (), theirs.shape, strict=False))
    if not sizes or any(axis not in mesh or mesh[axis] != size for axis, size in sizes.items()):
        raise PlanError(
            f"{name} is a DTensor on another mesh",
            at=f"{theirs}, and the step is for {mesh!r}",
            hint="the same mesh, or meshstep.checkpoint.save and load to move the state",
        )
    placements = dict(zip(sizes, tensor.placements, strict=True))
    return Layout(tuple((axis, placements.get(axis, REPLICATE)) for axis in mesh.axes))


def own_layouts(state: State, mesh: Mesh) -> dict[Slot, Layout]:
    """The layouts of state that lies in DTensors already: a plan leaves it as it lies.

    Raises:
        PlanError: It lies on another mesh.
    """
    return {
        held.slot: layout_of(held.tensor, str(held.slot), mesh)
        for held in state.held
        if isinstance(held.tensor, DTensor)
    }


def placements_of(layout: Layout, mesh: Mesh) -> tuple[Placement, ...]:
    """The placements of a DTensor of a layout."""
    return tuple(layout[axis] for axis in mesh.axes)


def is_sharded(layout: Layout) -> bool:
    """Whether ranks hold parts."""
    return any(shard_dim(placement) is not None for _, placement in layout.placements)


def to_dtensor(local: Tensor, layout: Layout, mesh: Mesh) -> DTensor:
    """A DTensor of which this rank holds `local`."""
    shape = torch.Size(layout.global_shape(local.shape, mesh))
    stride = torch.empty(shape, device="meta").stride()
    devices = device_mesh(mesh, local.device.type)
    return DTensor.from_local(local, devices, placements_of(layout, mesh), run_check=False, shape=shape, stride=stride)


def part_of(whole: Tensor, layout: Layout, mesh: Mesh, place: Mapping[str, int]) -> Tensor:
    """The part of the rank at a place of the mesh, in memory of its own."""
    splits = ((placement, mesh[axis], place[axis]) for axis, placement in layout.placements)
    return own_part(whole.detach(), splits).clone(memory_format=torch.contiguous_format)


class Shards:
    """The tensors of a program's slots on this rank: parts of what is whole, the local tensors of DTensors.

    Args:
        captured: The captured step.
        program: Its local program.

    Raises:
        PlanError: State that nobody but the caller holds is to be sharded.
    """

    def __init__(self, captured: Captured, program: Program) -> None:
        """Note which slots lie in shards."""
        self._captured, self._mesh = captured, program.mesh
        self._coordinate = program.mesh.coordinate(world().rank)
        self._layouts: dict[int, Layout] = {}
        self._kinds: list[type] = []
        self._dtensors: list[int] = []
        for index, (slot, node) in enumerate(program.inputs):
            if slot.kind in STATE_KINDS and is_sharded(node.meta["layout"]):
                self._layouts[index] = node.meta["layout"]
                _check_held(captured, index, slot, node.meta["layout"])

    def local(self, inputs: Sequence[Any]) -> list[Tensor]:
        """The tensors that the program takes. Changes nothing."""
        local = [t.to_local() if isinstance(t, DTensor) else t for t in inputs]
        for index in self._plain(inputs):
            local[index] = self._part(inputs[index], self._layouts[index])
        return local

    def bind(self, leaves: list[Any], inputs: list[Any]) -> list[Tensor]:
        """The tensors that the program takes; what is whole, and should not be, becomes a DTensor where it is held.

        Args:
            leaves: The leaves of the arguments.
            inputs: The tensor of each slot; emptied of what is replaced, so that its memory can go.
        """
        plain = self._plain(inputs)
        if plain:
            holders = Holders()
            for index in sorted(plain, key=lambda i: isinstance(self._captured.places[i], GradientPlace)):
                layout, old = self._layouts[index], inputs[index]
                inputs[index] = to_dtensor(self._part(old, layout), layout, self._mesh)
                self._replace(index, leaves, holders, old, inputs[index])
        kinds = list(map(type, inputs))
        if kinds != self._kinds:
            self._kinds, self._dtensors = kinds, [i for i, t in enumerate(inputs) if isinstance(t, DTensor)]
        local = list(inputs)
        for index in self._dtensors:
            local[index] = inputs[index].to_local()
        return local

    def _plain(self, inputs: Sequence[Any]) -> list[int]:
        return [index for index in self._layouts if not isinstance(inputs[index], DTensor)]

    def _part(self, whole: Tensor, layout: Layout) -> Tensor:
        return part_of(whole, layout, self._mesh, self._coordinate)

    def _replace(self, index: int, leaves: list[Any], holders: Holders, old: Tensor, new: DTensor) -> None:
        place = self._captured.places[index]
        if isinstance(place, (GradientPlace, OptimizerStatePlace)):
            place.create(leaves, new)
        else:
            holders.replace(old, like(old, new))


def _check_held(captured: Captured, index: int, slot: Slot, layout: Layout) -> None:
    place = captured.places[index]
    while isinstance(place, (GradientPlace, OptimizerStatePlace)):
        place = place.owner
    if isinstance(place, ArgumentPlace):
        raise PlanError(
            "a plan that shards a parameter which is an argument by itself: no module holds it",
            at=f"{slot}: {layout}",
            hint="pass the module that it belongs to as well, or leave it out of the plan",
        )


def like(old: Tensor, new: DTensor) -> Tensor:
    """The new tensor as the kind of tensor that the old one is, with its hooks and the user's attributes."""
    made = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
    before, after = tensor_hooks(old)
    for hook in before:
        made.register_hook(hook)
    for hook in after:
        made.register_post_accumulate_grad_hook(hook)
    for name, value in vars(old).items():
        setattr(made, name, value)
    return made


class Holders:
    """All modules and optimizers there are: a parameter may be held by some that are no arguments of the step.

    An evaluation that is compiled with a model alone, say, must not leave its optimizer with the old parameters.
    """

    def __init__(self) -> None:
        """Look through all objects, once for all that is replaced."""
        self._places: dict[int, list[tuple[Any, Any]]] = {}  # by tensor: what holds it, and under which key
        self._states: dict[int, list[Any]] = {}
        for found in gc.get_objects():
            if issubclass(type(found), nn.Module):
                self._note_tables(found.__dict__, found.__dict__.get("_parameters"), found.__dict__.get("_buffers"))
            elif issubclass(type(found), Optimizer):
                self._note_optimizer(found)

    def replace(self, old: Tensor, new: Tensor) -> None:
        """Put one tensor in the place of another."""
        for holder, key in self._places.get(id(old), ()):
            holder[key] = new
        for state in self._states.get(id(old), ()):
            state[new] = state.pop(old)

    def _note_tables(self, *tables: dict[str, Any] | None) -> None:
        for table in tables:
            for name, value in (table or {}).items():
                if isinstance(value, Tensor):
                    self._places.setdefault(id(value), []).append((table, name))

    def _note_optimizer(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for index, tensor in enumerate(group["params"]):
                self._places.setdefault(id(tensor), []).append((group["params"], index))
        for tensor in optimizer.state:
            self._states.setdefault(id(tensor), []).append(optimizer.state)


def sharded_results(program: Program) -> Mapping[int, Layout]:
    """The results that are new state in shards, by index."""
    return {
        i: node.meta["layout"]
        for i, (result, node) in enumerate(program.outputs)
        if result.slot is not None and is_sharded(node.meta["layout"])
    }
