"""The processes of this run."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._torch import default_store
from ..errors import InputError
from ..mesh import Mesh
from ..passes.lower import AxisGroup
from .faults import TIMEOUT_S, watch


@dataclass(frozen=True, slots=True)
class World:
    """This process among all.

    Args:
        rank: Its number.
        size: How many there are.
        device: Where its tensors live.
    """

    rank: int
    size: int
    device: torch.device

    def __str__(self) -> str:
        """`rank 0 of 2 on cpu`."""
        return f"rank {self.rank} of {self.size} on {self.device}"


def init(*, timeout: float = TIMEOUT_S) -> World:
    """Join the other processes, as the launcher's environment says; without a launcher, a world of one.

    Under `torchrun` the process group is set up with nccl on GPUs and gloo else, unless it is up already. A rank whose
    process is stopped or gone, so that a thread of it says nothing for a while, ends the others with a report.

    Args:
        timeout: Seconds that a rank may say nothing; the first call decides.

    Raises:
        InputError: It is not more than a second.
    """
    if not timeout > 1:
        raise InputError(f"a timeout of {timeout!r} s", at="init(timeout=...)", hint="seconds, more than 1")
    device = _device()
    if not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    here = world()
    watch(here.rank, here.size, timeout)
    return here


def world() -> World:
    """The processes as they are now."""
    if not dist.is_initialized():
        return World(0, 1, _device())
    return World(dist.get_rank(), dist.get_world_size(), _device())


def has_group() -> bool:
    """Whether a process group is up."""
    return dist.is_initialized()


def has_backends() -> dict[str, bool]:
    """Which backends of process groups this build of torch has."""
    there = dist.is_available()
    return {"gloo": there and dist.is_gloo_available(), "nccl": there and dist.is_nccl_available()}


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


def device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """The torch mesh of a mesh over all ranks, made once: each one makes process groups of its own."""
    return _device_mesh(mesh, device_type, dist.group.WORLD)


@functools.lru_cache(maxsize=16)
def _device_mesh(mesh: Mesh, device_type: str, group: Any) -> DeviceMesh:
    return mesh.device_mesh(device_type)


def axis_groups(mesh: Mesh, device_type: str) -> Mapping[str, AxisGroup]:
    """The process group of each axis of a mesh over all ranks.

    Raises:
        InputError: The mesh has another number of ranks than there are processes.
    """
    here = world()
    check_mesh(mesh, here)
    if not dist.is_initialized():
        return {axis: AxisGroup("", 1, 0) for axis in mesh}
    devices, place = device_mesh(mesh, device_type), mesh.coordinate(here.rank)
    groups = {axis: devices.get_group(axis) for axis in mesh}
    return {
        axis: AxisGroup(group.group_name, mesh[axis], place[axis], scatters=dist.get_backend(group) != "gloo")
        for axis, group in groups.items()
    }


def check_mesh(mesh: Mesh, here: World) -> None:
    """See that a mesh has as many ranks as there are processes.

    Raises:
        InputError: It has not.
    """
    if mesh.size != here.size:
        raise InputError(
            f"the mesh has {mesh.size} ranks, and {here.size} process{'es run' if here.size > 1 else ' runs'}",
            at=f"{mesh!r}, {here}",
            hint=f"torchrun --nproc-per-node {mesh.size}, or meshstep.simulate to run all ranks in one process",
        )


def exchange(topic: str, message: str, timeout: float) -> list[str | None]:
    """Tell all ranks something and hear what they say, through the store: no collective that could hang.

    Args:
        topic: The same on all ranks, never used before.
        message: What this rank says.
        timeout: Seconds to wait for the others, all together.

    Returns:
        The message of each rank; None for one that said nothing in time.
    """
    here = world()
    if here.size == 1:
        return [message]

    store, deadline = default_store(), time.monotonic() + timeout
    store.set(f"meshstep/{topic}/{here.rank}", message)
    heard: list[str | None] = []
    for rank in range(here.size):
        key = f"meshstep/{topic}/{rank}"
        heard.append(store.get(key).decode() if _appears(store, key, deadline) else None)
    return heard


def agreed_number(topic: str, proposal: int | None) -> int | None:
    """The number that the first rank to say one has said; None if nobody has yet.

    Args:
        topic: The same on all ranks.
        proposal: What this rank says; None is nothing.
    """
    store, key = default_store(), f"meshstep/{topic}"
    if proposal is not None:
        return int(store.compare_set(key, "", str(proposal)))
    return int(store.get(key)) if store.check([key]) else None


def _appears(store: Any, key: str, deadline: float) -> bool:
    """Whether a key is set in time. Asked again and again: a wait would keep other threads from the store."""
    pause = 0.0005
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return True
