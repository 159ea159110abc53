"""What the tests of `SPMD` run on every real rank: a plain loop around a module that runs on all of them."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import ConvNet, Gpt, Mlp, built
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import meshstep as ms


class Collectives(TorchDispatchMode):
    """Counts the collectives that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace in ("_c10d_functional", "c10d") and "wait" not in str(func):
            self.counts[str(func).split(".")[1]] += 1
        return func(*args, **(kwargs or {}))


def model_and_rows(kind: str, i: int) -> tuple[nn.Module, Tensor]:
    """A module and the global rows of step i."""
    generator = torch.Generator().manual_seed(100 + i)
    if kind == "gpt":
        return built(Gpt, tied=True), torch.randint(16, (8, 5), generator=generator)
    if kind == "convnet":
        return built(ConvNet), torch.randn(8, 2, 6, 6, generator=generator, dtype=torch.float64)
    return built(Mlp), torch.randn(8, 6, generator=generator, dtype=torch.float64)


def own(x: Tensor, mesh: ms.Mesh, schema: ms.Schema) -> Tensor:
    place = mesh.coordinate(dist.get_rank())
    for axis, placement in schema.layout.placements:
        if isinstance(placement, Shard):
            x = x.chunk(mesh[axis], placement.dim)[place[axis]]
    return x.clone()


def whole(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def worst(ours: nn.Module, plain: nn.Module) -> float:
    pairs = zip([*ours.parameters(), *ours.buffers()], [*plain.parameters(), *plain.buffers()], strict=True)
    return max(float((whole(a.detach()) - b.detach()).abs().max()) for a, b in pairs)


def train(
    mesh: ms.Mesh,
    placements: list[Placement],
    inputs: list[Placement] | None = None,
    kind: str = "mlp",
    backend: str = "eager",
    steps: int = 6,
) -> dict[str, Any]:
    """A plain loop on all ranks, and on each rank alone the plain module on the global rows."""
    plain, _ = model_and_rows(kind, 0)
    model = copy.deepcopy(plain)
    with torch.no_grad():
        for p in model.parameters():  # rank 0's values count
            p += dist.get_rank()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (plain, model)]
    seen: list[tuple[str, float]] = []
    rows = ms.Schema(mesh, inputs or [Shard(0)] * len(mesh.axes))
    spmd = ms.SPMD(model, ms.Schema(mesh, placements), [] if inputs is None else [rows], backend=backend)
    for trained in (plain, model):
        first = next(trained.parameters())
        first.register_hook(lambda g: seen.append(("hook", float(whole(g).abs().sum()))))
    found: dict[str, Any] = {"start": worst(model, plain), "loss": 0.0, "evaluation": 0.0}
    for i in range(steps):
        x = model_and_rows(kind, i)[1]
        mine = own(x, mesh, rows)
        outputs = plain(x), spmd(mine)
        for output in outputs:
            (1e-3 * output.square().sum()).backward()
        found["loss"] = max(found["loss"], float((own(outputs[0], mesh, rows) - outputs[1]).abs().max()))
        if i % 2:  # gradients of two calls add up
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            found["evaluation"] = max(found["evaluation"], float((own(plain(x), mesh, rows) - spmd(mine)).abs().max()))
    return found | {
        "state": worst(model, plain),
        "hooks": max(abs(a[1] - b[1]) for a, b in zip(seen[::2], seen[1::2], strict=True)),
        "calls of hooks": len(seen),
        "sharded": sum(isinstance(p, DTensor) for p in model.parameters()),
        "misses": spmd.cache_info().misses,
        "placements": sorted({str(p.placements) for p in model.parameters() if isinstance(p, DTensor)}),
    }


def gradients(mesh: ms.Mesh, placements: list[Placement]) -> dict[str, Any]:
    """The gradients as they lie on the user's parameters, those of an argument, and what was sent for them."""
    plain, x = model_and_rows("mlp", 0)
    model = copy.deepcopy(plain)
    spmd = ms.SPMD(model, ms.Schema(mesh, placements))
    rows = ms.Schema(mesh, [Shard(0)] * len(mesh.axes))
    x.requires_grad_()
    mine = own(x.detach(), mesh, rows).requires_grad_()
    plain(x).square().sum().backward()
    spmd(mine).square().sum().backward()
    model.zero_grad()
    mine.grad = None
    with Collectives() as sent:
        spmd(mine).square().sum().backward()
    assert x.grad is not None and mine.grad is not None
    return {
        "argument": float((own(x.grad, mesh, rows) - mine.grad).abs().max()),
        "parameters": max(
            float((whole(p.grad) - q.grad).abs().max())  # type: ignore[arg-type, operator]
            for p, q in zip(model.parameters(), plain.parameters(), strict=True)
        ),
        "alike": all(getattr(p, "placements", None) == getattr(p.grad, "placements", None) for p in model.parameters()),
        "sent": dict(sent.counts),
    }


def tensor_parallel(mesh: ms.Mesh) -> dict[str, Any]:
    """Schemas by patterns: Megatron's split of an MLP, inputs whole on all ranks."""
    plain, x = model_and_rows("mlp", 0)
    model = copy.deepcopy(plain)
    one = ms.Schema(mesh, [Replicate()])
    schemas = {"fc1.*": ms.Schema(mesh, [Shard(0)]), "fc2.weight": ms.Schema(mesh, [Shard(1)])}
    spmd = ms.SPMD(model, schemas, [one])
    plain(x).square().sum().backward()
    spmd(x)
    with Collectives() as sent:
        output = spmd(x)
    output.square().sum().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return {
        "parameters": max(float((whole(p.grad) - q.grad).abs().max()) for p, q in pairs),  # type: ignore[arg-type, operator]
        "sent": dict(sent.counts),
        "placements": {n: str(p.placements) for n, p in model.named_parameters() if isinstance(p, DTensor)},
    }


def synchronised() -> dict[str, Any]:
    """What brings all ranks to rank 0's state."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    model.register_buffer("odd", torch.tensor([True, False, True]))
    for t in [*model.parameters(), *model.buffers()]:
        t.data = t.data + dist.get_rank() if t.dtype is not torch.bool else t.data ^ bool(dist.get_rank())
    with Collectives() as sent:
        ms.SPMD(model, ms.Schema(ms.Mesh(dp=dist.get_world_size()), [Replicate()]))
    return {
        "sent": dict(sent.counts),
        "state": [t.double().sum().item() for t in [*model.parameters(), *model.buffers()]],
    }


def by_distribute(mesh: ms.Mesh) -> dict[str, Any]:
    """`distribute` as a function of its own."""
    plain, x = model_and_rows("mlp", 0)
    graph = ms.DistributedGraph(orig_module=copy.deepcopy(plain))
    rows = ms.Schema(mesh, [Shard(0)])
    module = ms.distribute(graph, ms.Schema(mesh, [Replicate()]), [rows], own(x, mesh, rows))
    counts = [(len(graph.fwd_graph_modules), len(graph.bwd_graph_modules))]
    output = module(own(x, mesh, rows))
    counts.append((len(graph.fwd_graph_modules), len(graph.bwd_graph_modules)))
    F.mse_loss(output, torch.zeros_like(output)).backward()
    half = [p.grad / dist.get_world_size() for p in graph.orig_module.parameters()]  # type: ignore[operator]
    F.mse_loss(plain(x), torch.zeros(8, 4).double()).backward()
    return {
        "counts": counts,
        "mean of means": max(float((h - p.grad).abs().max()) for h, p in zip(half, plain.parameters(), strict=True)),  # type: ignore[operator]
        "output": float((output - own(plain(x), mesh, rows)).abs().max()),
        "code": graph.bwd_graph_modules[0].code,
    }


def differs() -> str:
    """Ranks that call with unlike arguments are told so."""
    spmd = ms.SPMD(nn.Linear(2, 2), ms.Schema(ms.Mesh(dp=2), [Replicate()]))
    try:
        spmd(torch.zeros(2 + dist.get_rank(), 2))
    except ms.InputError as error:
        return str(error)
    return ""
