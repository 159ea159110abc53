"""The jobs: a model whose forward returns the loss, its global batches, its optimizer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt import GPT

SEED = 1234
BATCHES = 8  # steps go round through these

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Workload:
    """One training job: `model()(x, y)` is the mean loss over the rows of the global batch (x, y) = batch(i).

    Gradients are clipped to the norm `clip` (None: not at all). `blocks(model)` are the submodules that FSDP
    wraps one by one. `tp_plan` maps names of modules to "colwise" or "rowwise"; empty: no tensor parallelism.
    `sync_norm`: whether batch norms are of the global batch in all peers (True) or of each rank's rows (False).
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    blocks: Callable[[nn.Module], list[nn.Module]]
    optimizer: Callable[..., torch.optim.Optimizer]
    clip: float | None = None
    tp_plan: dict[str, str] = field(default_factory=dict)
    sync_norm: bool | None = None
    note: str = ""

    def build(self) -> nn.Module:
        """The model with the same initial parameters on every rank and in every peer."""
        torch.manual_seed(SEED)
        return self.model()


class Supervised(nn.Module):
    """A network and its loss."""

    def __init__(self, net: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.net(x), y)


class Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.skip = nn.Identity() if stride == 1 else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.skip(x))


class MeanPool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def token_loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def gpt(**sizes: int) -> Callable[[], nn.Module]:
    return lambda: Supervised(GPT(**sizes), token_loss)


def gpt_blocks(model: nn.Module) -> list[nn.Module]:
    return list(model.net.blocks)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 384}
    config = LlamaConfig(use_cache=False, num_hidden_layers=4, num_attention_heads=4, **sizes)
    return Supervised(LlamaForCausalLM(config), lambda output, y: token_loss(output.logits, y))


def wide_mlp() -> nn.Module:
    layers = [layer for _ in range(4) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    return Supervised(nn.Sequential(*layers), F.mse_loss)


def convnet() -> nn.Module:
    sizes = [(16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
    tail = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    net = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), *(Residual(*size) for size in sizes), *tail)
    return Supervised(net, F.cross_entropy)


def big_embedding() -> nn.Module:
    net = nn.Sequential(nn.Embedding(50_000, 128), MeanPool(), nn.Linear(128, 16))
    return Supervised(net, F.cross_entropy)


def brightness(images: Tensor) -> Tensor:
    return (images[:, 0].mean((1, 2)) * 400).long() % 10


def batches(draw: Callable[[torch.Generator], Tensor], target: Callable[[Tensor], Tensor]) -> Callable[[int], Batch]:
    """`batch(i)`: inputs drawn from a seed of its own, no two rows alike, and a target to be learnt."""

    def batch(i: int) -> Batch:
        x = draw(torch.Generator().manual_seed(SEED + 1 + i))
        return x, target(x)

    return batch


def token_batches(rows: int, vocab: int) -> Callable[[int], Batch]:
    return batches(lambda g: torch.randint(vocab, (rows, 64), generator=g), lambda x: (x * 7 + 3) % vocab)


adamw = partial(torch.optim.AdamW, lr=1e-3)
image_batches = batches(lambda g: torch.randn(32, 3, 32, 32, generator=g), brightness)
WORKLOADS = {
    "gpt_example": Workload(
        gpt(),
        token_batches(64, 256),
        gpt_blocks,
        adamw,
        clip=1.0,
        note="the model, batch and step of examples/train_gpt.py",
    ),
    "gpt_narrow": Workload(
        gpt(width=64, layers=8, vocab=512),
        token_batches(4, 512),
        gpt_blocks,
        adamw,
        note="bound by overhead",
    ),
    "gpt_small": Workload(
        gpt(width=128, layers=4, vocab=512),
        token_batches(16, 512),
        gpt_blocks,
        adamw,
        note="bound by computing",
    ),
    "wide_mlp": Workload(
        wide_mlp,
        batches(lambda g: torch.randn(32, 2048, generator=g), lambda x: x.roll(1, 1)),
        lambda model: list(model.net[::2]),
        adamw,
        tp_plan={f"net.{i}": "rowwise" if i % 4 else "colwise" for i in (0, 2, 4, 6)},
        note="bound by communication under data parallel",
    ),
    "convnet": Workload(
        convnet,
        image_batches,
        lambda model: list(model.net[1:7]),
        adamw,
        sync_norm=False,
        note="all peers normalise over each rank's own rows, hence another loss than that of one process",
    ),
    "convnet_sync": Workload(
        convnet,
        image_batches,
        lambda model: list(model.net[1:7]),
        adamw,
        sync_norm=True,
        note="all peers normalise over the global batch",
    ),
    "big_embedding": Workload(
        big_embedding,
        batches(lambda g: torch.randint(50_000, (64, 32), generator=g), lambda x: x[:, 0] % 16),
        lambda model: list(model.net[::2]),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        tp_plan={"net.0": "colwise", "net.2": "rowwise"},
        note="SGD with momentum, dense gradients",
    ),
    "llama_tiny": Workload(
        llama,
        token_batches(8, 1024),
        lambda model: list(model.net.model.layers),
        adamw,
        note="LlamaForCausalLM of transformers",
    ),
}
DEFAULT = ["gpt_example", "gpt_narrow"]
