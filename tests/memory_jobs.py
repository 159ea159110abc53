"""Measures, on every real rank, the tensors that a step makes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rank_jobs import Convolutional, batch, train_step
from sharded_jobs import my_part, optimizer_for, small_gpt
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import meshstep as ms


class Held(TorchDispatchMode):
    """Counts the bytes of the storages that ops make, as long as a tensor holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.counts: dict[int, int] = {}
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs or {})):
            if tensor.untyped_storage().data_ptr() not in self.counts:
                self.known.add(tensor.untyped_storage().data_ptr())  # was there before
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            self._hold(tensor)
        self.peak = max(self.peak, self.now)
        return out

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if key in self.known or not size:
            return
        if key not in self.counts:
            self.counts[key] = 0
            self.now += size
        self.counts[key] += 1
        weakref.finalize(tensor, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self.counts[key] -= 1
        if not self.counts[key]:
            del self.counts[key]
            self.now -= size


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    return [t for v in value.values() for t in _tensors(v)] if isinstance(value, dict) else []


def fsdp_peaks() -> dict[str, int]:
    """Bytes allocated above the state during one step, at most: of this library's fsdp and of torch's fully_shard."""
    plan, mesh = ms.plans.fsdp(), ms.Mesh(dp=dist.get_world_size())
    sizes = {"width": 128, "layers": 4, "context": 64, "vocab": 256}
    x, y = (t[:, :64] for t in batch(0, rows=8, length=64, vocab=256))
    ours = small_gpt(**sizes)
    optimizer = optimizer_for(ours, "adamw")
    step = ms.compile(backend="eager", plan=plan, mesh=mesh)(train_step)
    parts = my_part(mesh, plan, x, y)
    theirs = small_gpt(**sizes)
    devices = mesh.device_mesh("cpu")
    for block in theirs.blocks:
        fully_shard(block, mesh=devices)
    fully_shard(theirs, mesh=devices)
    their_optimizer = optimizer_for(theirs, "adamw")
    for _ in range(2):
        found = step(ours, optimizer, *parts)
        want = train_step(theirs, their_optimizer, *parts)
    dist.all_reduce(want)
    return {
        "ours": _median(lambda: _allocated(lambda: step(ours, optimizer, *parts))),
        "theirs": _median(lambda: _allocated(lambda: train_step(theirs, their_optimizer, *parts))),
        "difference": abs(found.item() - want.item() / dist.get_world_size()) < 1e-2,
    }


def _median(measure: Callable[[], int]) -> int:
    """Of five: what gloo's threads hold at a moment is theirs to say."""
    return sorted(measure() for _ in range(5))[2]


def _allocated(run: Callable[[], Any]) -> int:
    """The most that the allocator has handed out at once, above what there was."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


class Perceptron(nn.Module):
    """Wide layers, few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))
        self.head = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)))


KINDS = {"gpt": small_gpt, "convnet": Convolutional, "perceptron": Perceptron}


def predicted_and_measured(kind: str, plan: ms.Plan, mesh: ms.Mesh) -> tuple[int, int]:
    """Bytes of what the program makes, at most: said by `lower`, and held by tensors of a real step."""
    torch.manual_seed(0)
    model = KINDS[kind]()
    optimizer = optimizer_for(model, "adamw")
    step = ms.compile(backend="eager", plan=plan, mesh=mesh)(train_step)
    parts = my_part(mesh, plan, *batch(0))
    for _ in range(2):
        step(model, optimizer, *parts)
    memory = step.lower(model, optimizer, *parts).memory
    return memory.activations + memory.temporaries, min(_held(lambda: step(model, optimizer, *parts)) for _ in range(5))


def within_a_budget(share: float) -> tuple[int, int, int, int]:
    """Bytes of what a step makes that may hold a share of what it would: said, held, allowed, and held without."""
    mesh, plan = ms.Mesh(dp=dist.get_world_size()), ms.plans.data_parallel()
    model = small_gpt(layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = my_part(mesh, plan, *batch(0, rows=64))
    free = ms.compile(backend="eager", plan=plan, mesh=mesh)(train_step)
    free(model, optimizer, *parts)
    memory = free.lower(model, optimizer, *parts).memory
    fixed, limit = memory.state + memory.arguments, int(share * (memory.activations + memory.temporaries))
    tight = ms.compile(backend="eager", plan=plan, mesh=mesh, memory=fixed + limit)(train_step)
    tight(model, optimizer, *parts)
    found = tight.lower(model, optimizer, *parts).memory
    held = [min(_held(partial(step, model, optimizer, *parts)) for _ in range(5)) for step in (tight, free)]
    return found.activations + found.temporaries, held[0], limit, held[1]


def _held(run: Callable[[], Any]) -> int:
    """The least of several: a thread that communicates lets go of what it has sent when it comes to it."""
    gc.collect()  # the memory of what is freed later would be taken for new
    with Held() as held:
        run()
    return held.peak
