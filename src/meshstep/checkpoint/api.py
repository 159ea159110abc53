"""`save` and `load`."""

from __future__ import annotations

import json
import os
import shutil
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError
from ..runtime.world import exchange, world
from . import files
from .reader import Reader
from .state import (
    Flat,
    as_read,
    as_saved,
    check_fit,
    check_python,
    fill,
    flatten,
    kept_if_it_fails,
    restore_python,
    targets,
)

WAIT_S = 600.0  # for the slowest rank to write or read its part
_RANDOM = "random state"
_NOT_WRITTEN = ("the checkpoint could not be written", "the one before it is as it was")
_FAULTS = {
    "check": ("a damaged checkpoint", "another checkpoint"),
    "fit": ("the checkpoint does not fit on every rank", "the same objects on all ranks"),
}


@runtime_checkable
class HasObjects(Protocol):
    """A compiled step: knows the modules and optimizers that it was called with."""

    def objects(self) -> dict[str, Any]:
        """Modules, optimizers, and the step itself, by name."""
        ...


class Handle:
    """A save that goes on while training does."""

    def __init__(self, run: Callable[[], None]) -> None:
        """Start it."""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(run,), daemon=False)
        self._thread.start()

    def _run(self, run: Callable[[], None]) -> None:
        try:
            run()
        except BaseException as error:  # told to whoever waits
            self._error = error

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is whole.

        Raises:
            CheckpointError: It could not be written.
        """
        self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error


_running: list[Handle] = []
_groups: dict[Any, Any] = {}


def save(
    path: str | os.PathLike[str],
    step_or_dict: Any,
    *,
    asynchronous: bool = False,
    keep: int | None = None,
) -> Handle | None:
    """Write a checkpoint; all ranks call it.

    What was there before stays valid until the new one is whole, whatever happens in between.

    Args:
        path: A directory; or a file that ends with `.safetensors`, for one module alone, as plain PyTorch reads it.
        step_or_dict: Objects by name: modules, optimizers, schedulers and whatever else has `state_dict()`, tensors,
            Python values; or a compiled step, for the modules and optimizers of its last call, and its random numbers.
            torch's random state goes along.
        asynchronous: Copy the tensors, and write them while training goes on.
        keep: Remove all but so many of the newest checkpoints in the directory that `path` is in.

    Returns:
        A handle to wait for if `asynchronous`, else None.

    Raises:
        CheckpointError: It cannot be written; or the save before this one, that went on in the background, failed.
    """
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise CheckpointError(f"keep={keep!r}", at="checkpoint.save(keep=...)", hint="at least 1, or None to keep all")
    while _running:
        _running.pop().wait()
    target = Path(path)
    if target.suffix == ".safetensors":
        from .safe import export

        export(target, step_or_dict)
        return None
    token = fresh_name()
    with _together("collect", token):
        flat = flatten(_objects(step_or_dict))
        flat.python[_RANDOM] = _random_state()
        described = _described(step_or_dict)
    tensors = {name: as_saved(tensor) for name, tensor in flat.tensors.items()}
    if not asynchronous:
        _write(target, Flat(tensors, flat.python), described, token, keep, None)
        return None
    copies = {name: _copied(tensor) for name, tensor in tensors.items()}
    group = _own_group()
    handle = Handle(lambda: _write(target, Flat(copies, flat.python), described, token, keep, group))
    _running.append(handle)
    return handle


def load(path: str | os.PathLike[str], step_or_dict: Any, *, check: bool = True) -> dict[str, Any]:
    """Read a checkpoint into objects, in place, as they lie now; all ranks call it.

    Call it before the first compiled call or between calls: what is whole stays whole, what lies in shards gets its
    shards, on whatever mesh and by whatever plan it was saved.

    Args:
        path: What was given to `save`.
        step_or_dict: The same objects by the same names, or as many of them as are saved.
        check: Whether every file is compared with the checksum that was written with it.

    Returns:
        The Python values among the objects, by name.

    Raises:
        CheckpointError: It is missing, damaged, or does not fit.
    """
    target = Path(path)
    if target.suffix == ".safetensors":
        from .safe import read

        read(target, step_or_dict)
        return {}
    token = fresh_name()
    with _together("check", token) as said:
        directory = files.find(target)
        manifest = files.read_manifest(directory)
        if check:
            said.fault = files.check(directory, my_files(manifest["files"]))
    with ExitStack() as kept, _together("fit", token):  # a rank that fails ends it on all: what was made goes again
        objects, reader = _objects(step_or_dict), Reader(directory, manifest["files"])
        kept.enter_context(kept_if_it_fails(objects))
        shapes = {
            name: (found.size, found.properties.dtype)
            for name, found in reader.read_metadata().state_dict_metadata.items()
            if isinstance(found, TensorStorageMetadata)
        }
        python = _python(directory / files.PYTHON)
        wanted = targets(objects, shapes)
        check_fit(wanted, shapes)
        check_python(objects, python)
    read_into = {name: as_read(tensor) for name, tensor in wanted.items()}
    with _quiet(), _readable(directory):
        state_dict_loader.load(dict(read_into), storage_reader=reader)
    for name, tensor in wanted.items():
        fill(tensor, read_into[name])
    _set_random_state(python.pop(_RANDOM))
    return restore_python(objects, python)


@contextmanager
def _readable(directory: Path) -> Iterator[None]:
    """What torch raises on all ranks if a file cannot be read, as an error of ours."""
    try:
        yield
    except CheckpointException as error:
        raise CheckpointError(
            "a damaged checkpoint, of which nothing was executed",
            at=f"{directory}, files of tensors: {_first(error).splitlines()[0]}",
            hint="another checkpoint, from whom you know: what was read before is loaded already",
        ) from error


def _python(path: Path) -> dict[str, Any]:
    """The Python values of a checkpoint; nothing of the file is executed."""
    try:
        found = torch.load(path, weights_only=True)
        found[_RANDOM]["cpu"]
    except Exception as error:  # torch's unpickler raises many kinds
        raise CheckpointError(
            "a damaged checkpoint, of which nothing was executed",
            at=f"{path}: {str(error).splitlines()[0]}",
            hint="another checkpoint, from whom you know",
        ) from error
    return dict(found)


def _write(path: Path, flat: Flat, described: Mapping[str, Any], token: str, keep: int | None, group: Any) -> None:
    directory, first = files.temporary(path), world().rank == 0
    with _together("begin", token):
        if first:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
    with _together("write", token) as said:
        with _quiet():
            state_dict_saver.save(flat.tensors, storage_writer=FileSystemWriter(directory), process_group=group)
        if first:
            torch.save(flat.python, directory / files.PYTHON)
        mine = sorted(p.name for p in directory.glob(f"__{world().rank}_*"))
        mine += [files.METADATA, files.PYTHON] if first else []
        said.message = json.dumps(files.digests(directory, [n for n in mine if (directory / n).is_file()]))
    with _together("finish", token):
        if first:
            every: dict[str, str] = {}
            for message in said.heard:
                every |= json.loads(message)
            files.write_manifest(directory, {"torch": torch.__version__, "files": every, **described})
            files.put_in_place(path)
            if keep is not None:
                files.prune(path, keep)


class _Said:
    """What a rank tells the others at the end of a stage, and what they told.

    Attributes:
        fault: What is wrong; None if nothing is.
        message: What else it says.
        heard: The messages of all ranks.
    """

    def __init__(self) -> None:
        self.fault: str | None = None
        self.message = ""
        self.heard: list[str] = []


@contextmanager
def _together(stage: str, token: str) -> Iterator[_Said]:
    """All ranks do the same, and fail together: none waits for one that has given up."""
    said = _Said()
    error: BaseException | None = None
    try:
        yield said
    except (Exception, CheckpointException) as raised:  # told to all, and raised again; torch's is no Exception
        error = raised
        said.fault = said.fault or _first(raised)
    heard = exchange(f"checkpoint/{token}/{stage}", json.dumps([said.fault, said.message]), WAIT_S)
    if isinstance(error, CheckpointError):
        raise error
    faults = {rank: json.loads(text)[0] if text else "no answer" for rank, text in enumerate(heard)}
    for rank, fault in faults.items():
        if fault is not None:
            what, hint = _FAULTS.get(stage, _NOT_WRITTEN)
            at = f"rank {rank}: {fault}" if len(heard) > 1 else fault
            raise CheckpointError(what, at=at, hint=hint) from error
    said.heard = [json.loads(text)[1] for text in heard if text]


def _first(error: BaseException) -> str:
    """What it says; of torch's, that of the first rank."""
    fault = min(error.failures.items())[1][0] if isinstance(error, CheckpointException) else error
    return str(fault) or type(fault).__name__


def fresh_name() -> str:
    """A name for one save or load, the same on all ranks."""
    here = world()
    if here.size == 1:
        return uuid.uuid4().hex
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name)
    return name[0]


def my_files(all_files: Mapping[str, str]) -> dict[str, str]:
    """Every rank checks some of the files."""
    here = world()
    return {name: d for i, (name, d) in enumerate(sorted(all_files.items())) if i % here.size == here.rank}


def _own_group() -> Any:
    """A process group for what is written in the background: it must not mix with the collectives of training."""
    if world().size == 1:
        return None
    key = dist.group.WORLD
    if key not in _groups:
        _groups[key] = dist.new_group(backend="gloo")
    return _groups[key]


def _copied(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        local = tensor.to_local().detach().to("cpu", copy=True)
        mesh = tensor.device_mesh
        return DTensor.from_local(
            local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    return tensor.detach().to("cpu", copy=True)


def _objects(step_or_dict: Any) -> dict[str, Any]:
    if isinstance(step_or_dict, Mapping):
        unnamed = next((name for name in step_or_dict if not isinstance(name, str)), None)
        if unnamed is not None:
            raise CheckpointError(
                f"an object by {unnamed!r} instead of a name",
                at="checkpoint.save or load(path, step_or_dict)",
                hint="{'model': model, 'optimizer': optimizer}",
            )
        return dict(step_or_dict)
    if isinstance(step_or_dict, HasObjects):
        return step_or_dict.objects()
    if isinstance(step_or_dict, nn.Module):
        return {"model": step_or_dict}
    raise CheckpointError(
        f"a {type(step_or_dict).__name__} instead of objects by name",
        at="checkpoint.save or load(path, step_or_dict)",
        hint="{'model': model, 'optimizer': optimizer}, or a compiled step",
    )


def _described(step_or_dict: Any) -> dict[str, Any]:
    """What is written of the plan: for people, and for a step that asks."""
    plan = getattr(step_or_dict, "plan", None)
    if plan is None and isinstance(step_or_dict, Mapping):
        plan = next((p for found in step_or_dict.values() if (p := getattr(found, "plan", None))), None)
    return {} if plan is None else {"plan": str(plan)}


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


@contextmanager
def _quiet() -> Iterator[None]:
    """Torch warns that there is no process group, which is as it should be with one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is.*")
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield
