"""The train step of the golden texts. They show its line numbers: a change here changes them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshstep as ms


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.tanh(self.fc1(x)))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def lowered(ranks: int = 2, optimizer: Any = torch.optim.AdamW, **options: Any) -> ms.Lowered:
    """The step as it is after the first call, lowered for some ranks."""
    model = Mlp().double()
    updates = optimizer(model.parameters(), lr=0.1)
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.arange(8) % 4
    step = ms.simulate(train_step, mesh=ms.Mesh(dp=ranks), **options)
    step(model, updates, x, y)
    return step.lower(model, updates, x, y)
