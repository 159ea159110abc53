"""Gives a module on the meta device its first parameters, shard by shard."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ._torch import FakeTensorMode
from .capture.capture import Captured, capture
from .errors import InputError
from .ir.program import Program, Result, SlotKind
from .layout import Layout
from .mesh import Mesh
from .passes import lower
from .passes.lower import AxisGroup
from .phases import local_program
from .plan.named import data_parallel
from .plan.plan import Plan
from .runtime.seed import Seed
from .runtime.world import axis_groups, has_group, init, world

Init = Callable[[nn.Module], Any]
_made = itertools.count()  # all ranks call materialize in the same order


def materialize(
    module: nn.Module,
    mesh: Mesh | None = None,
    plan: Plan | None = None,
    *,
    initialize: Init | None = None,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Initialise a module that was made under `torch.device("meta")`, each rank only its own part.

    The values are those that one rank would get from the same `torch.manual_seed`, whatever the mesh and the plan; no
    rank ever holds more of a sharded parameter than its shard. What the plan shards becomes a DTensor.

    Args:
        module: Its parameters and buffers on the meta device are replaced; others stay.
        mesh: The ranks; None is all processes on one axis "dp".
        plan: Where parameters lie; None is `plans.data_parallel()`.
        initialize: Sets every parameter of the module, as it would on one device; None calls `reset_parameters()` of
            every submodule that has it.
        device: Where the parameters go; None is this process's device.

    Returns:
        The module.

    Raises:
        InputError: It is no module, or `initialize` leaves a parameter or buffer as it was.
        PlanError: The plan does not fit the mesh.
    """
    given: Any = module
    if not isinstance(given, nn.Module):
        raise InputError(
            f"a {type(given).__name__} instead of a module", at="materialize(module, ...)", hint="an nn.Module"
        )
    mesh = mesh or Mesh(dp=init().size)
    target = torch.device(device) if device is not None else world().device
    groups = axis_groups(mesh, target.type)
    seed = Seed(f"materialize/{next(_made)}" if has_group() else None)
    captured, local = _plan(module, mesh, plan or data_parallel(), initialize or reset_parameters, target, seed)
    for name, (value, layout) in _run(captured, local, groups).items():
        _set(module, name, _placed(value, layout, mesh, target))
    return module


def shard_of(
    module: nn.Module,
    mesh: Mesh,
    plan: Plan,
    rank: int,
    *,
    initialize: Init | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """What `materialize` would give one rank of a mesh, without the other ranks; the module stays on the meta device.

    Args:
        module: As for `materialize`.
        mesh: The ranks.
        plan: Where parameters lie.
        rank: Which rank.
        initialize: As for `materialize`.
        device: Where the values go.

    Returns:
        The local part of every parameter and buffer by name.
    """
    place = mesh.coordinate(rank)
    groups = {axis: AxisGroup("", mesh[axis], place[axis]) for axis in mesh}
    captured, local = _plan(module, mesh, plan, initialize or reset_parameters, torch.device(device), Seed(None))
    return {name: value for name, (value, _) in _run(captured, local, groups).items()}


def reset_parameters(module: nn.Module) -> None:
    """Call `reset_parameters()` of every submodule that has it, inner ones last, as their constructors did."""
    for submodule in module.modules():
        reset: Any = getattr(submodule, "reset_parameters", None)
        if reset is not None:
            reset()


def _plan(
    module: nn.Module, mesh: Mesh, plan: Plan, initialize: Init, device: torch.device, seed: Seed
) -> tuple[Captured, Program]:
    def initialise(leaves: list[Any]) -> None:
        with torch.no_grad():
            initialize(leaves[0])

    seed.begin()
    with _faked(module, device):
        captured = capture(initialize, initialise, [module], ["module"], [None], mesh, seed.now)
    program = captured.program
    written = {result.slot for result in program.results}
    for slot in program.slots:
        if slot.kind in (SlotKind.PARAMETER, SlotKind.BUFFER) and slot not in written:
            raise InputError(
                f"{slot} is not initialised",
                at=f"{type(module).__name__} on the meta device",
                hint="materialize(..., initialize=f) with an f(module) that sets every parameter and buffer",
            )
    return captured, local_program(program, plan, lambda axis: {})[0]


def _run(captured: Captured, local: Program, groups: Mapping[str, AxisGroup]) -> dict[str, tuple[Tensor, Layout]]:
    """The new values of this rank, with their layouts."""
    layouts = {result.name: node.meta["layout"] for result, node in local.outputs}
    values = replace(local, results=tuple(Result(result.name) for result in local.results))
    module = lower(values, groups)
    inputs = [
        place.read([]) if slot.kind in (SlotKind.SEED, SlotKind.CONSTANT) else None  # what is overwritten is not read
        for slot, place in zip(local.slots, captured.places, strict=True)
    ]
    with torch.no_grad():
        found = module(*inputs)
    return {result.name: (t, layouts[result.name]) for result, t in zip(values.results, found, strict=True)}


@contextlib.contextmanager
def _faked(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, the tensors on the meta device seem to be on `device`."""
    fakes: dict[int, Tensor] = {}
    saved = []
    with FakeTensorMode() as mode:
        for submodule in module.modules():
            for table in (submodule._parameters, submodule._buffers):
                saved.append((table, dict(table)))
                for name, tensor in table.items():
                    if tensor is not None and tensor.is_meta:
                        fakes.setdefault(id(tensor), _fake(tensor, device))
                        table[name] = fakes[id(tensor)]  # type: ignore[assignment]
    del mode
    try:
        yield
    finally:
        for table, before in saved:
            table.clear()
            table.update(before)  # type: ignore[arg-type]


def _fake(tensor: Tensor, device: torch.device) -> Tensor:
    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _placed(value: Tensor, layout: Layout, mesh: Mesh, device: torch.device) -> Tensor:
    placements = [layout[axis] for axis in mesh.axes]
    if all(placement.is_replicate() for placement in placements) or not has_group():
        return value
    return DTensor.from_local(value, mesh.device_mesh(device.type), placements, run_check=False)


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    """Put a tensor in the place of every entry that holds the one of this name: tied ones stay tied."""
    path, _, key = name.rpartition(".")
    owner = module.get_submodule(path)
    old = owner._parameters[key] if key in owner._parameters else owner._buffers[key]
    assert old is not None
    new = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value
    for submodule in module.modules():
        for table in (submodule._parameters, submodule._buffers):
            for entry, tensor in table.items():
                if tensor is old:
                    table[entry] = new  # type: ignore[assignment]
