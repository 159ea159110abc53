"""A small byte-level GPT, in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Causal self-attention, then a perceptron of two layers: f32[B, T, D] -> f32[B, T, D]."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes to the logits of the byte that follows each: i64[B, T] -> f32[B, T, vocab], T <= context.

    The sizes that are the default make 1.06 million parameters.
    """

    def __init__(self, width: int = 128, layers: int = 5, heads: int = 4, context: int = 64, vocab: int = 256):
        super().__init__()
        self.context = context
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions[: x.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def loss_of(model: GPT, x: Tensor, y: Tensor) -> Tensor:
    """Mean loss in nats per byte."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def generate(model: GPT, prompt: str = "def ", length: int = 400, temperature: float = 0.8) -> str:
    """`prompt` and `length` bytes that the model says go on from it."""
    text = torch.tensor([list(prompt.encode())], device=model.positions.device)
    for _ in range(length):
        logits = model(text[:, -model.context :])[:, -1] / temperature
        text = torch.cat([text, torch.multinomial(logits.softmax(-1), 1)], 1)
    return bytes(text[0].tolist()).decode(errors="replace")
