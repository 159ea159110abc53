"""The tensors of modules and optimizers by name, whatever mesh they lie on, and what else they say of themselves."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..errors import CheckpointError
from ..layout import blocks, own_part


@dataclass(slots=True)
class Flat:
    """A state, taken apart.

    Args:
        tensors: Tensors by name: `model/fc1.weight`, `optimizer/fc1.weight/exp_avg`.
        python: What else there is, by the object's name.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    python: dict[str, Any] = field(default_factory=dict)


def flatten(objects: Mapping[str, Any]) -> Flat:
    """Take objects apart.

    Args:
        objects: Modules, optimizers, whatever has `state_dict()`, tensors, and Python values, by name.
    """
    flat, names = Flat(), parameter_names(objects)
    for name, found in objects.items():
        if isinstance(found, nn.Module):
            flat.tensors |= {f"{name}/{key}": t.detach() for key, t in _module_state(found).items()}
        elif isinstance(found, Optimizer):
            _flatten_optimizer(flat, name, found, names)
        elif isinstance(found, Tensor):
            flat.tensors[name] = found.detach()
        else:
            flat.python[name] = found.state_dict() if hasattr(found, "state_dict") else found
    return flat


def parameter_names(objects: Mapping[str, Any]) -> dict[int, str]:
    """The name of every parameter by its `id`; with the module's own name in front if there are several modules."""
    modules = {name: found for name, found in objects.items() if isinstance(found, nn.Module)}
    names: dict[int, str] = {}
    for name, module in modules.items():
        for key, parameter in module.named_parameters():
            names.setdefault(id(parameter), f"{name}.{key}" if len(modules) > 1 else key)
    return names


def _module_state(module: nn.Module) -> dict[str, Tensor]:
    return {key: value for key, value in module.state_dict().items() if isinstance(value, Tensor)}


def _flatten_optimizer(flat: Flat, name: str, optimizer: Optimizer, names: Mapping[int, str]) -> None:
    groups, plain = [], {}
    for index, group in enumerate(optimizer.param_groups):
        members = [names.get(id(p), f"group{index}.{i}") for i, p in enumerate(group["params"])]
        groups.append({key: value for key, value in group.items() if key != "params"} | {"params": members})
        for parameter, member in zip(group["params"], members, strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    flat.tensors[f"{name}/{member}/{key}"] = value.detach()
                else:
                    plain[f"{member}/{key}"] = value
    flat.python[name] = {"groups": groups, "state": plain}


def check_python(objects: Mapping[str, Any], python: Mapping[str, Any]) -> None:
    """See that a checkpoint has what `restore_python` wants.

    Raises:
        CheckpointError: Something is missing.
    """
    names = parameter_names(objects)
    for name, found in objects.items():
        if isinstance(found, (nn.Module, Tensor)):
            continue
        if name not in python:
            raise _unknown(name, python)
        if isinstance(found, Optimizer):
            saved = [member for group in python[name]["groups"] for member in group["params"]]
            for member in _members(found, names):
                if member not in saved:
                    raise _unknown(f"{name}/{member}", [f"{name}/{m}" for m in saved])


def _members(optimizer: Optimizer, names: Mapping[int, str]) -> list[str]:
    return [
        names.get(id(p), f"group{index}.{i}")
        for index, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
    ]


@contextlib.contextmanager
def kept_if_it_fails(objects: Mapping[str, Any]) -> Iterator[None]:
    """Optimizers have the entries that they had, if what is inside fails."""
    optimizers = [found for found in objects.values() if isinstance(found, Optimizer)]
    before = [{parameter: dict(entries) for parameter, entries in o.state.items()} for o in optimizers]
    try:
        yield
    except BaseException:
        for optimizer, held in zip(optimizers, before, strict=True):
            for parameter in [p for p in optimizer.state if p not in held]:
                del optimizer.state[parameter]
            for parameter, entries in held.items():
                optimizer.state[parameter].clear()
                optimizer.state[parameter].update(entries)
        raise


def restore_python(objects: Mapping[str, Any], python: Mapping[str, Any]) -> dict[str, Any]:
    """Give objects back what was no tensor, once `check_python` has seen that it is there.

    Returns:
        Python values by name: they cannot be changed where they are.
    """
    values, names = {}, parameter_names(objects)
    for name, found in objects.items():
        if isinstance(found, (nn.Module, Tensor)):
            continue
        if isinstance(found, Optimizer):
            _restore_groups(found, python[name], names)
        elif hasattr(found, "load_state_dict"):
            found.load_state_dict(python[name])
        else:
            values[name] = python[name]
    return values


def _restore_groups(optimizer: Optimizer, saved: Mapping[str, Any], names: Mapping[int, str]) -> None:
    of = {member: group for group in saved["groups"] for member in group["params"]}
    for index, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            member = names.get(id(parameter), f"group{index}.{i}")
            if i == 0:
                group.update({key: value for key, value in of[member].items() if key != "params"})
            for key, value in saved["state"].items():
                owner, _, entry = key.rpartition("/")
                if owner == member:
                    optimizer.state[parameter][entry] = value


def targets(objects: Mapping[str, Any], shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Tensor]:
    """The tensors that a checkpoint is read into; optimizer state that is not there yet is made.

    Args:
        objects: As for `flatten`.
        shapes: Shape and dtype of each saved tensor.
    """
    names = parameter_names(objects)
    for name, optimizer in objects.items():
        if not isinstance(optimizer, Optimizer):
            continue
        for index, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                member = names.get(id(parameter), f"group{index}.{i}")
                _make_entries(optimizer, parameter, f"{name}/{member}/", shapes)
    return flatten(objects).tensors


def _make_entries(
    optimizer: Optimizer, parameter: Tensor, prefix: str, shapes: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> None:
    """Entries as the saved ones: like the parameter where the shape is the same, else whole."""
    entries = optimizer.state[parameter]
    wanted = {key.removeprefix(prefix): found for key, found in shapes.items() if key.startswith(prefix)}
    for key in [key for key, value in entries.items() if isinstance(value, Tensor) and key not in wanted]:
        del entries[key]
    for key, (shape, dtype) in wanted.items():
        if key not in entries:
            like = shape == parameter.shape
            device = parameter.device if like or len(shape) else torch.device("cpu")
            entries[key] = (
                torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                if like
                else torch.zeros(shape, dtype=dtype, device=device)
            )
    if not entries:
        del optimizer.state[parameter]


def check_fit(targets: Mapping[str, Tensor], shapes: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
    """See that a checkpoint has what is wanted, and no more.

    Raises:
        CheckpointError: It has not; names the tensor.
    """
    for name, tensor in targets.items():
        if name not in shapes:
            raise _unknown(name, shapes)
        shape, dtype = shapes[name]
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            raise CheckpointError(
                f"{name} is {dtype} {list(shape)} in the checkpoint, and {tensor.dtype} {list(tensor.shape)} here",
                at=name,
                hint="the model and optimizer that were saved",
            )
    more = [name for name in shapes if name not in targets]
    if more:
        raise CheckpointError(
            f"the checkpoint has {more[0]}, which nothing here takes"
            + (f", and {len(more) - 1} more" * (len(more) > 1)),
            at=more[0],
            hint="the objects that were saved, by the same names",
        )


def _unknown(name: str, known: Any) -> CheckpointError:
    near = difflib.get_close_matches(name, list(known), 1, 0.5)
    return CheckpointError(
        f"the checkpoint has no {name}",
        at=name,
        hint=f"it has {near[0]}" if near else "the objects that were saved, by the same names",
    )


# ---- shards of blocks: what torch.distributed.checkpoint cannot say is written, and read, whole


def is_in_blocks(tensor: Tensor) -> bool:
    """Whether a tensor lies in shards of blocks along some axis."""
    return isinstance(tensor, DTensor) and any(blocks(placement) > 1 for placement in tensor.placements)


def as_saved(tensor: Tensor) -> Tensor:
    """What is written of a tensor."""
    return tensor.full_tensor() if is_in_blocks(tensor) else tensor  # type: ignore[attr-defined]


def as_read(tensor: Tensor) -> Tensor:
    """What is read into for a tensor."""
    if not is_in_blocks(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def fill(tensor: Tensor, read: Tensor) -> None:
    """Take over what was read, if it was read into another tensor."""
    if read is tensor:
        return
    assert isinstance(tensor, DTensor)
    mesh = tensor.device_mesh
    splits = ((p, mesh.size(axis), mesh.get_local_rank(axis)) for axis, p in enumerate(tensor.placements))
    with torch.no_grad():
        tensor.to_local().copy_(own_part(read, splits))
