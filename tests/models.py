"""Small hand-written models that tests share, and how they are compared with plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshstep as ms

ROWS, WIDTH, CLASSES = 8, 6, 4


class Mlp(nn.Module):
    """f32[B, 6] -> f32[B, 4]."""

    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, hidden), nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.tanh(self.fc1(x)))


class Block(nn.Module):
    """Causal self-attention and a perceptron: f32[B, T, D] -> f32[B, T, D]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    """i64[B, T] -> f32[B, T, 16]; the head may share the weight of the embedding."""

    def __init__(self, tied: bool = False, dropout: float = 0.0, layers: int = 1) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(16, 8), nn.Parameter(torch.randn(5, 8) / 8)
        self.blocks = nn.Sequential(*(Block(8, 2, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 16, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x) + self.positions[: x.shape[1]])))


class ConvNet(nn.Module):
    """Convolution fed by BatchNorm: f32[B, 2, 6, 6] -> f32[B, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4)
        )
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


def rows(i: int = 0, *shape: int, count: int = ROWS) -> Tensor:
    """Random rows of step i: every row, and so every rank, has numbers of its own."""
    generator = torch.Generator().manual_seed(1000 + i)
    return torch.randn(count, *(shape or (WIDTH,)), generator=generator, dtype=torch.float64)


def labels(i: int = 0, *shape: int, classes: int = CLASSES, count: int = ROWS) -> Tensor:
    """Random classes, i64."""
    generator = torch.Generator().manual_seed(2000 + i)
    return torch.randint(classes, (count, *shape), generator=generator)


def built(make: Callable[..., nn.Module], *args: Any, seed: int = 0, **kwargs: Any) -> Any:
    """A module in float64, the same one every time."""
    torch.manual_seed(seed)
    return make(*args, **kwargs).double()


def sgd(*modules: nn.Module, lr: float = 0.1, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for m in modules for p in m.parameters()], lr=lr, **options)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """The step that most tests use."""
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def check_exact(
    step: Callable[..., Any],
    make: Callable[[int], tuple[Any, ...]],
    *,
    steps: int = 5,
    within: float = 1e-12,
    mesh: ms.Mesh | None = None,
    **kwargs: Any,
) -> ms.Verification:
    """Assert that `step` computes in float64 on 2 virtual ranks what it does on one device.

    Args:
        step: A plain step.
        make: Its arguments in step i; what is trained is taken from step 0.
        steps: Number of steps.
        within: Greatest relative difference.
        mesh: Other ranks.
        kwargs: Keyword arguments of the step.
    """
    result = ms.verify(step, lambda i: (make(i), kwargs), mesh=mesh or ms.Mesh(dp=2), steps=steps)
    assert result.ok and result.max_error <= within, str(result)
    return result
