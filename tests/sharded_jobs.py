"""What the tests of sharded state run on every real rank: state in shards is DTensors on the user's own objects."""

from __future__ import annotations

import copy
import gc
import tempfile
import weakref
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from rank_jobs import Convolutional, batch, state_of, train_step, worst
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import meshstep as ms
from gpt import GPT

STYLES = {
    "blocks.*.qkv": "colwise", "blocks.*.proj": "rowwise", "blocks.*.up": "colwise", "blocks.*.down": "rowwise",
    "tokens": "rowwise", "head": "colwise",
}  # fmt: skip


def small_gpt(**sizes: int) -> GPT:
    torch.manual_seed(7)
    return GPT(**({"width": 32, "layers": 2, "heads": 4, "context": 16, "vocab": 64} | sizes))


def my_part(mesh: ms.Mesh, plan: ms.Plan, *tensors: Tensor) -> list[Tensor]:
    """This rank's part of global arguments: split along each axis that splits the batch."""
    place = mesh.coordinate(dist.get_rank())
    parts = list(tensors)
    for axis, dim in plan.batch_dims().items():
        parts = [t.chunk(mesh[axis], dim)[place[axis]] for t in parts]
    return [part.clone() for part in parts]


def whole(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The whole tensors of a state: a collective."""
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}


def optimizer_for(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def train_against_plain(
    plan: ms.Plan,
    mesh: ms.Mesh,
    backend: str = "eager",
    steps: int = 20,
    kind: str = "adamw",
    dtype: Any = torch.float64,
) -> dict[str, Any]:
    """Train on all ranks and, on each rank alone, plainly on the global batch; the differences."""
    model: nn.Module = Convolutional() if kind == "convnet" else small_gpt()
    model.to(dtype)
    optimizer = optimizer_for(model, kind)
    plain_model, plain_optimizer = copy.deepcopy((model, optimizer))
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, steps) for o in (optimizer, plain_optimizer)]
    step = ms.compile(backend=backend, plan=plan, mesh=mesh)(train_step)
    losses = []
    for i in range(steps):
        x, y = batch(i)
        want = train_step(plain_model, plain_optimizer, x, y)
        found = step(model, optimizer, *my_part(mesh, plan, x, y))
        losses.append(abs(want.item() - found.item()))
        for schedule in schedules:
            schedule.step()
    held = state_of(model, optimizer)
    return {
        "loss": max(losses),
        "state": worst(whole(held), state_of(plain_model, plain_optimizer)),
        "misses": step.cache_info().misses,
        "sharded": sum(isinstance(t, DTensor) for t in held.values()),
        "of": len(held),
        "bytes": sum(_bytes(t) for t in held.values()),
        "whole bytes": sum(t.numel() * t.itemsize for t in held.values()),
    }


def _bytes(tensor: Tensor) -> int:
    """What a tensor really holds on this rank: a view of something larger counts as that."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().nbytes()


def layouts(plan: ms.Plan, mesh: ms.Mesh) -> dict[str, str]:
    """The placements of parameters after a step, and whether names, order, hooks and attributes are as they were."""
    model = small_gpt()
    model.head.weight.decay = False  # type: ignore[assignment]
    called: list[str] = []
    model.head.weight.register_hook(lambda grad: called.append("hook"))
    optimizer = optimizer_for(model, "adamw")
    names = [name for name, _ in model.named_parameters()]
    step = ms.compile(backend="eager", plan=plan, mesh=mesh)(train_step)
    step(model, optimizer, *my_part(mesh, plan, *batch(0)))
    assert names == [name for name, _ in model.named_parameters()]
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    assert [id(p) for p in model.parameters()] == [id(p) for p in optimizer.param_groups[0]["params"]]
    assert set(optimizer.state) == set(model.parameters())
    assert model.head.weight.decay is False
    assert len(model.head.weight._backward_hooks or {}) == 1
    return {n: str(p.placements) if isinstance(p, DTensor) else "whole" for n, p in model.named_parameters()}


class Tied(nn.Module):
    """The embedding is the output head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


def tied(plan: ms.Plan) -> dict[str, Any]:
    """A tied parameter stays one parameter."""
    torch.manual_seed(3)
    mesh = ms.Mesh(dp=dist.get_world_size())
    model = Tied().double()
    optimizer = optimizer_for(model, "adamw")
    plain_model, plain_optimizer = copy.deepcopy((model, optimizer))
    step = ms.compile(backend="eager", plan=plan)(train_step)
    for i in range(4):
        train_step(plain_model, plain_optimizer, *batch(i))
        step(model, optimizer, *my_part(mesh, plan, *batch(i)))
    return {
        "one": model.head.weight is model.embed.weight,
        "state": worst(whole(state_of(model, optimizer)), state_of(plain_model, plain_optimizer)),
    }


def gradients_that_stay(plan: ms.Plan) -> float:
    """Gradients accumulate over calls, and a second step, of its own, uses them."""
    mesh = ms.Mesh(dp=dist.get_world_size())
    model = small_gpt().double()
    optimizer = optimizer_for(model, "sgd")
    plain_model, plain_optimizer = copy.deepcopy((model, optimizer))

    def accumulate(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        return loss

    def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    first, second = (ms.compile(backend="eager", plan=plan)(f) for f in (accumulate, update))
    for i in range(6):
        accumulate(plain_model, *batch(i))
        first(model, *my_part(mesh, plan, *batch(i)))
        if i % 2:
            update(plain_model, plain_optimizer)
            second(model, optimizer)
    return worst(whole(state_of(model, optimizer)), state_of(plain_model, plain_optimizer))


def evaluation(plan: ms.Plan) -> dict[str, Any]:
    """A step without a backward, by another plan, shares the state of the training step."""
    mesh = ms.Mesh(dp=dist.get_world_size())
    model = small_gpt().double()
    optimizer = optimizer_for(model, "adamw")
    plain_model, plain_optimizer = copy.deepcopy((model, optimizer))

    @torch.no_grad()
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    train = ms.compile(backend="eager", plan=plan)(train_step)
    evaluate = ms.compile(backend="eager")(loss_of)
    differences = []
    for i in range(4):
        train_step(plain_model, plain_optimizer, *batch(i))
        train(model, optimizer, *my_part(mesh, plan, *batch(i)))
        x, y = batch(10 + i)
        found = evaluate(model, *my_part(mesh, plan, x, y))
        differences.append(abs(found.item() - loss_of(plain_model, x, y).item()))
    return {"loss": max(differences), "misses": (train.cache_info().misses, evaluate.cache_info().misses)}


def loaded_state() -> float:
    """Whole optimizer state, loaded before the first call and again between calls, is sharded by the step."""
    plan, mesh = ms.plans.fsdp(), ms.Mesh(dp=dist.get_world_size())
    model = small_gpt().double()
    optimizer = optimizer_for(model, "adamw")
    for i in range(2):
        train_step(model, optimizer, *batch(i))
    saved = copy.deepcopy(optimizer.state_dict())
    plain_model, plain_optimizer = copy.deepcopy((model, optimizer))
    model = copy.deepcopy(model)
    optimizer = optimizer_for(model, "adamw")
    optimizer.load_state_dict(saved)
    step = ms.compile(backend="eager", plan=plan)(train_step)
    for i in range(4):
        train_step(plain_model, plain_optimizer, *batch(i))
        step(model, optimizer, *my_part(mesh, plan, *batch(i)))
        if i == 1:  # as one reads a file into it
            for o in (optimizer, plain_optimizer):
                for entries, old in zip(o.state.values(), saved["state"].values(), strict=True):
                    entries.update({key: value.clone() for key, value in old.items()})
    return worst(whole(state_of(model, optimizer)), state_of(plain_model, plain_optimizer))


def failing_first_call() -> str:
    """A first call that fails leaves the state whole, and the next one works."""
    plan, mesh = ms.plans.fsdp(), ms.Mesh(dp=dist.get_world_size())
    model = small_gpt()
    optimizer = optimizer_for(model, "adamw")
    before = [(id(p), p.detach().clone()) for p in model.parameters()]

    def refuse(module: Any, inputs: Any) -> Any:
        raise RuntimeError("no backend today")

    broken = ms.compile(backend=refuse, plan=plan)(train_step)
    try:
        broken(model, optimizer, *my_part(mesh, plan, *batch(0)))
    except RuntimeError as error:
        said = str(error)
    after = list(model.parameters())
    assert all(id(p) == known and torch.equal(p, value) for p, (known, value) in zip(after, before, strict=True))
    assert not any(isinstance(p, DTensor) for p in after) and not optimizer.state
    step = ms.compile(backend="eager", plan=plan)(train_step)
    step(model, optimizer, *my_part(mesh, plan, *batch(0)))
    assert isinstance(model.head.weight, DTensor)
    return said


def other_mesh() -> str:
    """State that lies on another mesh."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    by = {axis: ms.compile(backend="eager", mesh=ms.Mesh(**{axis: 2}), plan=ms.plans.fsdp(axis)) for axis in ("a", "b")}
    step = {axis: make(lambda model, x: model(x).sum()) for axis, make in by.items()}
    step["a"](model, torch.ones(4, 8))
    try:
        step["b"](model, torch.ones(4, 8))
    except ms.PlanError as error:
        return str(error)
    return "no error"


def whole_parameters_alive(plan: ms.Plan) -> list[int]:
    """How many of the first, whole parameters there still are after each call."""
    mesh = ms.Mesh(dp=dist.get_world_size())
    model = small_gpt()
    optimizer = optimizer_for(model, "adamw")
    known = [weakref.ref(p) for p in model.parameters()]
    step = ms.compile(backend="eager", plan=plan, mesh=mesh)(train_step)
    counts = []
    for i in range(3):
        step(model, optimizer, *my_part(mesh, plan, *batch(i)))
        gc.collect()
        counts.append(sum(ref() is not None for ref in known))
    return counts


def other_rows_along_tp() -> str:
    """Ranks of a tensor-parallel axis that load batches of their own."""
    step = ms.compile(backend="eager", mesh=ms.Mesh(tp=2), plan=ms.plans.tensor_parallel({"head": "colwise"}))
    model = small_gpt()
    try:
        step(train_step)(model, optimizer_for(model, "adamw"), *batch(dist.get_rank()))
    except ms.InputError as error:
        return str(error)
    return "no error"


def parameter_as_argument() -> str:
    """A parameter that no module holds."""
    step = ms.compile(backend="eager", plan=ms.plans.fsdp())(lambda w, x: (x @ w).sum())
    try:
        step(nn.Parameter(torch.ones(4, 4)), torch.ones(4, 4))
    except ms.PlanError as error:
        return str(error)
    return "no error"


def dtensor_argument() -> dict[str, Any]:
    """An argument that says itself how it lies."""
    mesh = ms.Mesh(dp=2)
    x = torch.arange(32.0).reshape(4, 8)
    devices = mesh.device_mesh("cpu")
    step = ms.compile(backend="eager", mesh=mesh, outputs="dtensor")(lambda x, y: (x * 2 + y.sum(), x.sum()))
    found, total = step(
        DTensor.from_local(x.chunk(2, 0)[dist.get_rank()], devices, [Shard(0)]),
        DTensor.from_local(x, devices, [Replicate()]),
    )
    return {
        "value": torch.equal(found.full_tensor(), x * 2 + x.sum()),
        "total": total.full_tensor().item() == x.sum().item(),
        "placements": (found.placements, total.placements),
    }


def saved_by_torch() -> float:
    """torch.distributed.checkpoint saves and loads the sharded model and optimizer as they are."""
    plan, mesh = ms.plans.fsdp(), ms.Mesh(dp=dist.get_world_size())

    def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = small_gpt().double()
        optimizer = optimizer_for(model, "adamw")
        step = ms.compile(backend="eager", plan=plan)(train_step)
        for i in range(steps):
            step(model, optimizer, *my_part(mesh, plan, *batch(i)))
        return model, optimizer, step

    model, optimizer, step = trained(3)
    other, other_optimizer, other_step = trained(1)
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(path)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path[0])
    target = {"model": other.state_dict(), "optimizer": other_optimizer.state_dict()}
    dcp.load(target, checkpoint_id=path[0])
    other.load_state_dict(target["model"])
    other_optimizer.load_state_dict(target["optimizer"])
    for s, m, o in ((step, model, optimizer), (other_step, other, other_optimizer)):
        s(m, o, *my_part(mesh, plan, *batch(9)))
    return worst(whole(state_of(model, optimizer)), whole(state_of(other, other_optimizer)))


def memory_formats(plan: ms.Plan, kind: str) -> float:
    """A channels-last model whose gradients outlive the step, against the plain run: the worst difference."""

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    torch.manual_seed(3)
    mesh = ms.Mesh(dp=dist.get_world_size())
    model = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 4))
    model = model.double().to(memory_format=torch.channels_last)
    optimizer = optimizer_for(model, kind)
    plain = copy.deepcopy((model, optimizer))
    compiled = ms.compile(backend="eager", plan=plan, mesh=mesh)(step)
    for i in range(4):
        x = torch.randn(8, 2, 6, 6, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        step(*plain, x)
        compiled(model, optimizer, *my_part(mesh, plan, x))
    return worst(whole(state_of(model, optimizer)), state_of(*plain))


def scaled_and_scheduled(plan: ms.Plan, kind: str) -> dict[str, Any]:
    """A scaler and a schedule in the step, an average of the weights, a step that overflows on rank 1 only."""

    def step(model: nn.Module, average: Any, optimizer: Any, schedule: Any, scaler: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        average.update_parameters(model)
        schedule.step()
        return loss

    torch.manual_seed(5)
    mesh = ms.Mesh(dp=dist.get_world_size())
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    average = torch.optim.swa_utils.AveragedModel(model)
    named = {"adafactor": torch.optim.Adafactor, "adamw": torch.optim.AdamW, "nadam": torch.optim.NAdam}
    optimizer = named[kind](model.parameters(), lr=0.01)  # type: ignore[operator]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=9) if kind == "adamw" else None
    schedule = schedule or torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    ours: Any = (model, average, optimizer, schedule, scaler)
    plain = copy.deepcopy(ours)
    compiled = ms.compile(backend="eager", plan=plan, mesh=mesh)(step)
    scales = []
    for i in range(6):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        if i == 3:
            x[-1, 0] = float("inf")  # of the last rank
        step(*plain, x)
        compiled(*ours, *my_part(mesh, plan, x))
        rates = (optimizer.param_groups[0]["lr"], plain[2].param_groups[0]["lr"])
        scales.append((scaler.get_scale(), plain[4].get_scale(), *rates))
    with tempfile.TemporaryDirectory() as folder:
        folders: list[Any] = [folder]
        dist.broadcast_object_list(folders)
        ms.checkpoint.save(folders[0] + "/a", {"model": model, "scaler": scaler, "schedule": schedule})
        scaler.update(7.0)
        ms.checkpoint.load(folders[0] + "/a", {"model": model, "scaler": scaler, "schedule": schedule})
        dist.barrier()
    return {
        "state": worst(whole(state_of(model, optimizer)), state_of(plain[0], plain[2])),
        "average": worst(whole(average.state_dict()), plain[1].state_dict()),
        "scales": all(a == b and c == d for a, b, c, d in scales) and len({a for a, *_ in scales}) > 1,
        "loaded": scaler.get_scale() == scales[-1][0],
        "misses": compiled.cache_info().reasons,
    }
