"""One module as a file of safetensors, which plain PyTorch reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError
from ..runtime.world import world
from .state import as_read, check_fit, fill


def export(path: Path, module: Any) -> None:
    """Write the whole tensors of a module; a tied parameter under each of its names.

    Raises:
        CheckpointError: It is no module, or `safetensors` is not installed.
    """
    library, state = _library(), _state(module)
    whole: dict[str, Tensor] = {}
    for name, tensor in state.items():  # a collective for each: all ranks go through them
        value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if world().rank == 0:
            whole[name] = value.detach().to("cpu", copy=True).contiguous()
    if world().rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.saving")
        library.save_file(whole, beside, metadata={"format": "pt"})
        os.replace(beside, path)
    if world().size > 1:
        torch.distributed.barrier()


def read(path: Path, module: Any) -> None:
    """Read a file into a module, as it lies.

    Raises:
        CheckpointError: There is no such file, it is damaged, or it does not fit.
    """
    library, state = _library(), _state(module)
    if not path.is_file():
        raise CheckpointError("no checkpoint", at=str(path), hint="the path given to save")
    try:
        found = library.load_file(path)
    except Exception as error:  # the library raises one of its own, which only it knows
        raise CheckpointError("a damaged checkpoint", at=f"{path}: {error}", hint="another one") from error
    check_fit(state, {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()})
    for name, tensor in state.items():
        _fill(tensor, found[name])


def _fill(tensor: Tensor, value: Tensor) -> None:
    if isinstance(tensor, DTensor):
        fill(tensor, value.to(tensor.device))
    else:
        with torch.no_grad():
            as_read(tensor).copy_(value)


def _state(module: Any) -> dict[str, Tensor]:
    if not isinstance(module, nn.Module):
        raise CheckpointError(
            f"a {type(module).__name__} in a file of safetensors",
            at="checkpoint.save('....safetensors', module)",
            hint="a module alone; a directory takes all else",
        )
    return {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}


def _library() -> Any:
    try:
        import safetensors.torch as library
    except ImportError:
        raise CheckpointError(
            "safetensors is not installed", at="a path that ends with .safetensors", hint="pip install safetensors"
        ) from None
    return library
