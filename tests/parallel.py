"""Models under every plan that applies to them, equal to the plain step. `python tests/parallel.py` prints a table."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import zoo
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from zoo import Entry, tokens, tokens_step

import meshstep as ms
from gpt import GPT

P, Mesh = ms.plans, ms.Mesh
Styles = Mapping[str, Any]


class Experts(nn.Module):
    """A mixture of experts of limited capacity: tokens are sent by a product with one-hot places. f32[G, S, D]."""

    def __init__(self, width: int = 16, experts: int = 4, capacity: int = 6) -> None:
        super().__init__()
        self.capacity, self.gate = capacity, nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.2)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        score = self.gate(x).softmax(-1)
        chosen = F.one_hot(score.argmax(-1), score.shape[-1])
        place = (chosen.cumsum(1) - 1).clamp(0, self.capacity)  # one more place than there is, and then cut off
        slots = F.one_hot(place, self.capacity + 1)[..., :-1] * chosen.unsqueeze(-1)
        slots = slots.to(x.dtype)
        sent = torch.einsum("gsec,gsd->egcd", slots, x)
        hidden = F.gelu(torch.einsum("egcd,edf->egcf", sent, self.up))
        back = torch.einsum("egcf,efd->egcd", hidden, self.down)
        return torch.einsum("gsec,egcd->gsd", slots * score.unsqueeze(-1), back)


class MixtureOfExperts(nn.Module):
    """Tokens, two layers of experts, and the logits of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(zoo.VOCAB, 16), nn.Linear(16, zoo.VOCAB)
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


MODELS = zoo.ZOO | {
    "gpt": Entry(lambda p: GPT(width=32, layers=2, heads=4, context=12, vocab=zoo.VOCAB), tokens_step, tokens, tokens),
    "experts": Entry(lambda p: MixtureOfExperts(), tokens_step, tokens, tokens, has_dropout=False),
}


@dataclass(frozen=True)
class Split:
    """How a model is split over tensor-parallel ranks, and what of it is computed along the sequence.

    Args:
        tensor: Styles over 2 ranks.
        four: What differs over 4 ranks: None leaves a pattern out.
        sequence: Styles of what is computed in shards of the sequence.
        experts: The modules that hold stacked experts.
    """

    tensor: Styles
    four: Mapping[str, Any] = field(default_factory=dict)
    sequence: Styles | None = None
    experts: str | tuple[str, ...] | None = None

    def over(self, ranks: int) -> Styles:
        styles = {**self.tensor, **(self.four if ranks == 4 else {})}
        return {pattern: style for pattern, style in styles.items() if style is not None}


_ATTENTION = {"*.q_proj": "colwise", "*.k_proj": "colwise", "*.v_proj": "colwise", "*.o_proj": "rowwise"}
_GATED = {"*.gate_proj": "colwise", "*.up_proj": "colwise", "*.down_proj": "rowwise"}
_TWO_KEY_HEADS = {"*.k_proj": None, "*.v_proj": None}  # they do not divide over 4 ranks, and stay whole
_NORMS = {"*layernorm": "sequence", "model.norm": "sequence"}

SPLITS: dict[str, Split] = {
    "gpt": Split(
        {
            "blocks.*.qkv": "colwise", "blocks.*.proj": "rowwise", "blocks.*.up": "colwise", "blocks.*.down": "rowwise",
            "tokens": "rowwise", "head": "colwise",
        },
        sequence={"*norm?": "sequence", "norm": "sequence"},
    ),
    "gpt2": Split(
        {"*.c_attn": "colwise", "*.attn.c_proj": "rowwise", "*.c_fc": "colwise", "*.mlp.c_proj": "rowwise"},
        sequence={"*.ln_?": "sequence", "*.ln_f": "sequence"},
    ),
    "llama": Split(_ATTENTION | _GATED, _TWO_KEY_HEADS, _NORMS),
    "t5": Split(
        {
            "*.q": "colwise", "*.k": "colwise", "*.v": "colwise", "*.o": "rowwise",
            "*.wi": "colwise", "*.wo": "rowwise", "*.relative_attention_bias": "colwise",
        },
        sequence={"*layer_norm": "sequence"},
    ),
    "vit": Split(_ATTENTION | {"*.fc1": "colwise", "*.fc2": "rowwise"}, sequence={"*layernorm*": "sequence"}),
    "mixtral": Split(_ATTENTION, _TWO_KEY_HEADS, _NORMS, experts="*.experts"),
    "experts": Split(
        {"head": "colwise", "layers.*.up": Shard(2), "layers.*.down": Shard(1)},
        experts=("layers.*.up", "layers.*.down"),
    ),
    "lstm": Split({"embed": "colwise", "layers.weight_ih*": "colwise", "head": "rowwise"}),
    "unet": Split({"into": "colwise", "down": "rowwise", "up": "colwise", "out": "rowwise"}),
    "gan": Split({"generator.0": "colwise", "judge.0": "colwise", "judge.2": "rowwise"}),
    "vae": Split(
        {"into": "colwise", "mean": "rowwise", "log_variance": "rowwise", "out.0": "colwise", "out.2": "rowwise"}
    ),
    "graph": Split({"into": "colwise", "out": "rowwise"}),
    "dlrm": Split({"bags.0": "colwise", "bags.1": "colwise", "bags.2": Shard(1), "dense": "colwise"}),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A plan on a mesh."""

    plan: ms.Plan
    mesh: ms.Mesh


def cases(name: str) -> dict[str, Case]:
    """Every plan that applies to a model, by a short name."""
    return dict(_cases(SPLITS[name]))


def _cases(split: Split) -> Iterator[tuple[str, Case]]:
    two = P.tensor_parallel(split.over(2))
    yield "zero1", Case(P.zero(1), Mesh(dp=2))
    yield "zero2", Case(P.zero(2), Mesh(dp=4))
    yield "zero3", Case(P.zero(3), Mesh(dp=2))
    yield "fsdp", Case(P.fsdp(), Mesh(dp=4))
    yield "hsdp", Case(P.data_parallel("replicate") + P.fsdp("shard"), Mesh(replicate=2, shard=2))
    yield "tp2", Case(two, Mesh(tp=2))
    yield "tp4", Case(P.tensor_parallel(split.over(4)), Mesh(tp=4))
    yield "dp x tp", Case(P.data_parallel() + two, Mesh(dp=2, tp=2))
    yield "fsdp x tp", Case(P.fsdp() + two, Mesh(dp=2, tp=2))
    if split.sequence:
        with_sequence = P.tensor_parallel({**split.over(2), **split.sequence})
        yield "sp", Case(with_sequence, Mesh(tp=2))
        yield "dp x fsdp x sp", Case(P.data_parallel() + P.fsdp("fsdp") + with_sequence, Mesh(dp=2, fsdp=2, tp=2))
        yield "cp", Case(P.context_parallel(), Mesh(cp=2))
        yield "dp x cp", Case(P.data_parallel() + P.context_parallel(), Mesh(dp=2, cp=2))
    if split.experts:
        yield "ep", Case(P.expert_parallel(split.experts), Mesh(ep=2))
        yield "dp x ep", Case(P.data_parallel() + P.expert_parallel(split.experts), Mesh(dp=2, ep=2))
        yield "ep, whole batch", Case(P.expert_parallel(split.experts, splits_batch=False), Mesh(ep=4))


ALL = [(name, case) for name in SPLITS for case in cases(name)]


def arguments(name: str) -> Callable[[int], tuple[tuple, dict]]:
    """`make_args` for `ms.verify`."""
    entry = MODELS[name]
    torch.manual_seed(0)
    model = entry.build(0.0).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def make_args(i: int) -> tuple[tuple, dict]:
        generator = torch.Generator().manual_seed(i)
        return (model, optimizer, entry.x(generator), entry.y(generator)), {}

    return make_args


def accumulating(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step without its `zero_grad()`: gradients outlive it, and add up over calls."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, *args: Any) -> Any:
        optimizer.__dict__["zero_grad"] = lambda set_to_none=True: None
        try:
            return step(model, optimizer, *args)
        finally:
            del optimizer.__dict__["zero_grad"]

    return run


def verified(name: str, case: str, steps: int = 2, *, accumulate: bool = False) -> ms.Verification:
    """A model under a plan, against the plain step."""
    found, step = cases(name)[case], MODELS[name].step
    step = accumulating(step) if accumulate else step
    return ms.verify(step, arguments(name), mesh=found.mesh, plan=found.plan, steps=steps)


def lowered(name: str, plan: ms.Plan, mesh: ms.Mesh) -> ms.Lowered:
    """A model's step as it is after the first call."""
    args, _ = arguments(name)(0)
    step = ms.simulate(MODELS[name].step, mesh=mesh, plan=plan)
    step(*args)
    return step.lower(*args)


def main() -> None:
    parser = argparse.ArgumentParser(description="Models under every plan, 5 steps, float64.")
    parser.add_argument("--models", default=",".join(SPLITS))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| model | plan | mesh | error | sends | KiB a rank | s |")
    print("|---|---|---|---|---|---|---|")
    for name in args.models.split(","):
        for label, case in cases(name).items():
            began = time.perf_counter()
            found = verified(name, label, 5)
            sent = lowered(name, case.plan, case.mesh).communication
            kinds = Counter(f"{c.kind}@{c.axis}" for c in sent)
            text = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            error = f"{'' if found.ok else 'WRONG '}{found.max_error:.0e}"
            size, seconds = sum(c.bytes for c in sent) / 1024, time.perf_counter() - began
            print(f"| {name} | {label} | {case.mesh} | {error} | {text} | {size:.1f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
