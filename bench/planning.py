"""How long it takes to find a plan for a large Llama, from its config alone: `python -m bench.planning 8b`."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import meshstep as ms

GIB = 2**30
SIZES: dict[str, tuple[dict[str, int], dict[str, int], int]] = {  # config, mesh, sequences in the global batch
    "8b": (
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
             "num_key_value_heads": 8, "vocab_size": 128256},
        {"dp": 8, "tp": 8}, 64,
    ),
    "70b": (
        {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
             "num_key_value_heads": 8, "vocab_size": 128256},
        {"dp": 128, "tp": 8}, 1024,
    ),
}  # fmt: skip


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """One step of a language model."""
    loss: Tensor = model(input_ids=x, labels=y, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def example_args(size: str, tokens: int = 2048) -> tuple[Any, ...]:
    """Model, optimizer and batch on the meta device."""
    config, _, rows = SIZES[size]
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="sdpa")).to(torch.bfloat16)
        ids = torch.zeros(rows, tokens, dtype=torch.int64)
    return model, torch.optim.AdamW(model.parameters()), ids, ids


def main(size: str = "8b", memory_gib: int = 80) -> None:
    """Print the plan, and the time and memory that finding it took."""
    torch.set_num_threads(1)
    arguments = example_args(size)
    mesh = ms.Mesh(**SIZES[size][1])
    began = time.perf_counter()
    step = ms.simulate(train_step, mesh=mesh, plan=ms.plans.auto(memory=memory_gib * GIB, device="h100"))
    lowered = step.lower(*arguments)
    took = time.perf_counter() - began
    print(lowered.search)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{size} on {mesh}: {took:.1f} s in all, {used:.2f} GiB resident at most")
    print(lowered.memory)


if __name__ == "__main__":
    main(*sys.argv[1:2])
