"""The contestants: each builder turns a workload into one `step(x, y) -> loss`, as the peer's own guide says.

A builder runs in a process of its own (worker.py) with torchrun's environment set and a gloo group up.
"""

import importlib.util
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .workloads import WORKLOADS, Workload

Step = Callable[[Tensor, Tensor], Tensor]
Wrap = Callable[[Workload, nn.Module], nn.Module]


def alone(work: Workload, model: nn.Module) -> nn.Module:
    return model


def ddp(work: Workload, model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def fsdp2(work: Workload, model: nn.Module, compiled: bool = False) -> nn.Module:
    """Each block compiled, then wrapped, then the root, as torchtitan does."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in work.blocks(model):
        if compiled:
            block.compile(dynamic=False)  # else Inductor of torch 2.13 fails on the convnet's second block
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(work: Workload, model: nn.Module) -> nn.Module:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    return parallelize_module(model, mesh, {name: styles[style]() for name, style in work.tp_plan.items()})


class SyncBatchNorm(nn.Module):
    """Over the global batch: torch's own does not run on CPU. One message forward and one backward, as by hand."""

    def __init__(self, norm: nn.BatchNorm2d):
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        norm, count = self.norm, x.numel() // x.shape[1] * dist.get_world_size()
        sums = all_reduce(torch.stack((x.sum((0, 2, 3)), (x * x).sum((0, 2, 3)))))
        mean = sums[0] / count
        variance = sums[1] / count - mean * mean
        with torch.no_grad():
            norm.running_mean.lerp_(mean, norm.momentum)
            norm.running_var.lerp_(variance * (count / (count - 1)), norm.momentum)
            norm.num_batches_tracked += 1
        scale = norm.weight * torch.rsqrt(variance + norm.eps)
        return x * scale[:, None, None] + (norm.bias - mean * scale)[:, None, None]


def synchronise(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, SyncBatchNorm(child))


def torch_step(work: Workload, wrap: Wrap, compiled: bool = False, compiled_optimizer: bool = False) -> Step:
    """The usual loop with the fused optimizer, or the `foreach` one compiled (`fused` is one opaque op)."""
    model = work.build()
    if work.sync_norm and dist.get_world_size() > 1:
        synchronise(model)
    model = wrap(work, model)
    sharded = isinstance(next(model.parameters()), DTensor)
    no_fused = compiled_optimizer or (sharded and work.optimizer.func is torch.optim.SGD)  # no _fused_sgd_
    optimizer = work.optimizer(model.parameters(), **{"foreach" if no_fused else "fused": True})
    forward = torch.compile(model) if compiled else model
    update = torch.compile(optimizer.step) if compiled_optimizer else optimizer.step

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = forward(x, y)
        loss.backward()
        if work.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), work.clip)
        update()
        optimizer.zero_grad()
        return loss.detach()

    return step


def meshstep_step(work: Workload, plan: str, backend: str) -> Step:
    import meshstep as ms

    world = ms.init()
    named = {"data_parallel": ms.plans.data_parallel, "fsdp": ms.plans.fsdp, "zero1": lambda: ms.plans.zero(1)}
    model = work.build()
    optimizer = work.optimizer(model.parameters())
    sharded = ms.plans.tensor_parallel(work.tp_plan) if plan == "tp" else named[plan]()
    mesh = ms.Mesh(tp=world.size) if plan == "tp" else ms.Mesh(dp=world.size)

    local = {nn.BatchNorm2d: ms.LocalBatchNorm(world.size)} if work.sync_norm is False else None

    @ms.compile(mesh=mesh, plan=sharded, backend=backend, module_override=local)
    def train_step(
        model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, clip: float | None
    ) -> Tensor:
        loss = model(x, y)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return lambda x, y: train_step(model, optimizer, x, y, work.clip)


PEERS: dict[str, Callable[[Workload], Step]] = {  # in order: where time runs out, the last are skipped
    "single": partial(torch_step, wrap=alone),
    "ddp_eager": partial(torch_step, wrap=ddp),
    "ddp_compile": partial(torch_step, wrap=ddp, compiled=True),
    **{
        f"meshstep_{plan}_{backend}": partial(meshstep_step, plan=plan, backend=backend)
        for plan in ("data_parallel", "tp", "fsdp", "zero1")
        for backend in ("eager", "inductor")
    },
    "fsdp2_eager": partial(torch_step, wrap=fsdp2),
    "fsdp2_compile": partial(torch_step, wrap=partial(fsdp2, compiled=True)),
    "tp": partial(torch_step, wrap=tensor_parallel),
    "tp_compile": partial(torch_step, wrap=tensor_parallel, compiled=True),
    "ddp_compile_all": partial(torch_step, wrap=ddp, compiled=True, compiled_optimizer=True),
    "single_compile": partial(torch_step, wrap=alone, compiled=True),
}
DEFAULT = [
    "single",
    "ddp_eager",
    "ddp_compile",
    "meshstep_data_parallel_eager",
    "meshstep_data_parallel_inductor",
]
BASELINES = {"ddp_eager": "DDP eager", "ddp_compile": "DDP compiled"}
AIMS = {  # a peer, and the baseline that it should be no slower than
    "meshstep_data_parallel_eager": "ddp_eager",
    "meshstep_data_parallel_inductor": "ddp_compile",
}


def runs_alone(name: str) -> bool:
    return name.startswith("single")


def takes_global_batch(name: str) -> bool:
    return runs_alone(name) or splits_layers(name)


def splits_layers(name: str) -> bool:
    return name.startswith(("tp", "meshstep_tp"))


def reason_to_skip(name: str, workload: str) -> str | None:
    """Why the peer cannot run the workload here, or None."""
    if splits_layers(name) and not WORKLOADS[workload].tp_plan:
        return "no plan for this workload"
    if name.startswith("meshstep") and importlib.util.find_spec("meshstep") is None:
        return "absent"
    return None
