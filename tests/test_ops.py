"""Part of the sweep over PyTorch's OpInfo database (`op_sweep.py`), and local forms in whole steps."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_sweep import BY_DESIGN, Watched, all_ops, name_of, sweep
from torch import Tensor

import meshstep as ms
from meshstep.api import Options
from meshstep.ir.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from meshstep.layout import REPLICATE, Layout, shard

aten = torch.ops.aten
EVERY = 7  # of the ops in the order of the database
ALWAYS = (
    "_softmax_backward_data", "cdist", "cumsum", "gather", "index_add", "index_put", "linalg.solve_ex", "logsumexp",
    "nn.functional.cross_entropy", "nn.functional.embedding", "nn.functional.embedding_bag",
    "nn.functional.layer_norm", "nn.functional.multi_margin_loss", "nn.functional.rrelu", "put", "scatter_add",
    "scatter_reduce mean", "take", "tensor_split", "topk",
)  # fmt: skip
OPS = [op for i, op in enumerate(all_ops()) if i % EVERY == 0 or name_of(op) in ALWAYS]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", OPS, ids=name_of)
def test_op_is_exact_in_any_placement(op: Any) -> None:
    found = sweep(op, count=2)
    assert found.status in ("exact", "by design"), found.what


def test_ops_that_are_refused_are_in_the_database() -> None:
    assert BY_DESIGN.keys() <= {name_of(op) for op in all_ops()}


# ---- local forms, forward and backward


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def ints(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))


def cross_entropy(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(logits, target, ignore_index=3)
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


def weighted_cross_entropy(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.arange(8, dtype=torch.float64)
    loss = F.cross_entropy(logits, target, weight, label_smoothing=0.1)
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


def distillation(logits: Tensor, target: Tensor, teacher: Tensor) -> tuple[Tensor, ...]:
    """Case 6: a second log_softmax in the step."""
    student = F.log_softmax(logits * 0.5, -1)
    loss = F.cross_entropy(logits, target) + F.kl_div(
        student, teacher.detach().log_softmax(-1), reduction="batchmean", log_target=True
    )
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


def embedding(table: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    loss = F.embedding(tokens, table, padding_idx=2).square().sum()
    return loss.detach(), torch.autograd.grad(loss, table)[0]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    loss = (F.layer_norm(x, (8,), weight, bias) ** 3).sum()
    return loss.detach(), *torch.autograd.grad(loss, (x, weight, bias))


def attention_weights(x: Tensor) -> tuple[Tensor, Tensor]:
    loss = (x.softmax(-1) ** 2).sum() + x.logsumexp(-1).sum()
    return loss.detach(), torch.autograd.grad(loss, x)[0]


def only_returned(node: Any) -> bool:
    """Whether a value is returned and nothing else, be it as one of a bucket."""
    taken_apart = (aten.reshape.default, aten.permute.default, aten.split_with_sizes.default, operator.getitem)
    return all(user.op == "output" or (user.target in taken_apart and only_returned(user)) for user in node.users)


COLUMNS, ROWS = shard(1), shard(0)
FORMS: list[tuple[Callable[..., Any], list[Tensor], list[Any]]] = [
    (cross_entropy, [drawn(6, 8), ints(8, 6)], [COLUMNS, REPLICATE]),
    (weighted_cross_entropy, [drawn(6, 8), ints(8, 6)], [COLUMNS, REPLICATE]),
    (distillation, [drawn(6, 8), ints(8, 6), drawn(6, 8, seed=9)], [COLUMNS, REPLICATE, COLUMNS]),
    (embedding, [drawn(8, 4), ints(8, 6, 2)], [ROWS, REPLICATE]),
    (layer_norm, [drawn(6, 8), drawn(8), drawn(8, seed=1)], [COLUMNS, ROWS, ROWS]),
    (attention_weights, [drawn(6, 8)], [COLUMNS]),
]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("function", "tensors", "placements"), FORMS, ids=[f[0].__name__ for f in FORMS])
def test_sharded_dim_is_never_gathered(
    function: Callable[..., Any], tensors: list[Tensor], placements: list[Any], size: int
) -> None:
    tensors = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    names = function.__code__.co_varnames[: len(tensors)]
    inputs: Any = {name: Layout((("tp", p),)) for name, p in zip(names, placements, strict=True)}
    step = Watched(function, Options(ms.Mesh(tp=size), ms.plans.data_parallel("tp"), inputs, "full", "eager"))
    torch.testing.assert_close(step(*tensors), function(*tensors), rtol=1e-12, atol=1e-12)
    moved = [n for n in step.local.graph.nodes if n.target in (all_gather, all_to_all, reduce_scatter)]
    assert all(only_returned(node) for node in moved)
    assert any(n.target is all_reduce for n in step.local.graph.nodes)
