"""Llama to look at: what a train step of it would hold and send on a mesh, on a laptop, before anything runs.

The model is on the meta device: 70 billion parameters take no memory.

    meshstep plan examples/plan_llama.py:train_step --args examples/plan_llama.py:example_args \
        --mesh dp=8,tp=8 --plan examples/plan_llama.py:plan --device h100 --html llama.html

`MODEL=8b` takes the smaller one; `ROWS` and `TOKENS` set the global batch.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

import meshstep as ms

VOCABULARY = 128_256
SIZES = {
    "tiny": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 16},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}
ROWS, TOKENS = int(os.environ.get("ROWS", "16")), int(os.environ.get("TOKENS", "4096"))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def example_args() -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    """The arguments of a call with the global batch, none of which holds a number."""
    size = SIZES[os.environ.get("MODEL", "70b")]
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=8, rope_theta=500_000.0, use_cache=False, **size)
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        tokens = torch.empty(ROWS, TOKENS, dtype=torch.int64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer, tokens, torch.empty_like(tokens)


def plan() -> ms.Plan:
    """Parameters and optimizer state in shards over `dp`; over `tp`, Megatron's cut of every layer."""
    columns = dict.fromkeys(("*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj", "lm_head"), "colwise")
    rows = dict.fromkeys(("*.o_proj", "*.down_proj", "*embed_tokens"), "rowwise")
    return ms.plans.fsdp("dp") + ms.plans.tensor_parallel({**columns, **rows, "*norm*": "sequence"}, "tp")
