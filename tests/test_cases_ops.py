"""Cases 8, 12 and 22 of what other systems get wrong, each against the plain step in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshstep as ms


class Mixed(nn.Module):
    """Attention of three kinds, a group norm, and the backward of split, chunk, prod and cumprod."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm = nn.Linear(16, 32), nn.GroupNorm(4, 16)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).split((16, 8, 8), -1)
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in (q, k, v))
        grouped = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        masked = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        h = (grouped + masked).transpose(1, 2).flatten(2)
        a, b = self.norm(h.transpose(1, 2)).chunk(2, 1)
        return a.sigmoid().cumprod(-1) + b.tanh().prod(-1, keepdim=True)


def check(function, make_args, **options):
    for ranks in (2, 4):
        found = ms.verify(function, make_args, mesh=ms.Mesh(dp=ranks), **options)
        assert found.ok, found


def test_case_22_attention_norms_and_products():
    def train_step(model, optimizer, x, mask):
        loss = model(x, mask).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def make_args(i):
        generator = torch.Generator().manual_seed(i)
        mask = torch.rand(8, 6, 6, generator=generator) > 0.3
        return (model, optimizer, torch.randn(8, 6, 16, generator=generator), mask | torch.eye(6, dtype=torch.bool)), {}

    check(train_step, make_args)


def test_case_12_a_mean_over_a_sharded_dim_that_is_indexed_unevenly():
    def step(x, w):
        means = (x * w.sum()).mean(0, keepdim=True) + x
        loss = means[:5].sum() + means[[0, 3, 7]].square().mean() + means[1:].mean()
        return loss, torch.autograd.grad(loss, w)[0]

    check(step, lambda i: ((torch.randn(8, 3), torch.randn(8, 2).requires_grad_()), {}), steps=1)


@pytest.mark.parametrize("plan", [ms.plans.data_parallel(), ms.plans.fsdp()])
def test_case_8_a_linear_whose_rows_do_not_divide(plan):
    def train_step(model, optimizer, x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = nn.Linear(7, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    check(train_step, lambda i: ((model, optimizer, torch.randn(8, 7)), {}), plan=plan)
