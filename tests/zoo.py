"""Models that people train, at toy size: a builder, a step and a batch for each. `python tests/zoo.py` prints a table.

Those of `transformers` are made from configs, as they are; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshstep as ms

ROWS, LENGTH, VOCAB = 8, 12, 64
Draw = Callable[[torch.Generator], Tensor]


@dataclass(frozen=True)
class Entry:
    """One model: `build(dropout)`, a step on (model, optimizer, x, y), and how to draw x and y."""

    build: Callable[[float], nn.Module]
    step: Callable[..., Any]
    x: Draw
    y: Draw
    has_dropout: bool = True


def tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(3, VOCAB, (ROWS, LENGTH), generator=generator)


def images(generator: torch.Generator) -> Tensor:
    return torch.randn(ROWS, 3, 16, 16, generator=generator)


def labels(generator: torch.Generator) -> Tensor:
    return torch.randint(10, (ROWS,), generator=generator)


def _train(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def language_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    logits = model(input_ids=x).logits.double()  # some models give float32 whatever their own dtype
    return _train(optimizer, F.cross_entropy(logits.flatten(0, 1), y.flatten()))


def image_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    return _train(optimizer, F.cross_entropy(model(pixel_values=x).logits, y))


def labelled_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    return _train(optimizer, model(input_ids=x, labels=y).loss)


def speech_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    return _train(optimizer, model(input_features=x, labels=y).loss)


def pairs_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    return _train(optimizer, model(pixel_values=x, input_ids=y, return_loss=True).loss)


def tokens_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    return _train(optimizer, F.cross_entropy(model(x).flatten(0, 1), y.flatten()))


def regression_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    return _train(optimizer, F.mse_loss(model(x), y))


# ---- from configs

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_TEXT = _SIZES | {"vocab_size": VOCAB}


def _dropouts(p: float) -> dict[str, float]:
    return {"hidden_dropout_prob": p, "attention_probs_dropout_prob": p}


def gpt2(p: float) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    dropouts = {"resid_pdrop": p, "embd_pdrop": p, "attn_pdrop": p}
    sizes = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts, bos_token_id=1, eos_token_id=2, use_cache=False))


def llama(p: float) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_TEXT, num_key_value_heads=2, attention_dropout=p, use_cache=False))


def qwen2(p: float) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**_TEXT, num_key_value_heads=2, attention_dropout=p, use_cache=False))


def bert(p: float) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_TEXT, **_dropouts(p)))


def t5(p: float) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(
        T5Config(**sizes, dropout_rate=p, decoder_start_token_id=0, pad_token_id=0, use_cache=False)
    )


def vit(p: float) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(**_SIZES, **_dropouts(p), image_size=16, patch_size=4, num_labels=10))


def resnet(p: float) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    return ResNetForImageClassification(ResNetConfig(**sizes, num_labels=10))


def convnext(p: float) -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    sizes = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "patch_size": 2}
    return ConvNextForImageClassification(ConvNextConfig(**sizes, drop_path_rate=p, num_labels=10))


def mixtral(p: float) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
    return MixtralForCausalLM(
        MixtralConfig(**_TEXT, **experts, num_key_value_heads=2, attention_dropout=p, use_cache=False)
    )


def mamba(p: float) -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}
    return MambaForCausalLM(MambaConfig(**sizes, use_cache=False))


def whisper(p: float) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    both = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
    sides = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in both.items()}
    marks = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    lengths = {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 16}
    return WhisperForConditionalGeneration(
        WhisperConfig(vocab_size=VOCAB, d_model=32, dropout=p, use_cache=False, **sides, **marks, **lengths)
    )


def swin(p: float) -> nn.Module:
    from transformers import SwinConfig, SwinForImageClassification

    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}
    return SwinForImageClassification(SwinConfig(**sizes, **_dropouts(p), drop_path_rate=p, num_labels=10))


def clip(p: float) -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = _TEXT | {"max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    vision = _SIZES | {"image_size": 16, "patch_size": 4}
    both = {"attention_dropout": p}
    return CLIPModel(CLIPConfig(text_config=text | both, vision_config=vision | both, projection_dim=16))


# ---- written by hand


class Recurrent(nn.Module):
    """A language model on a recurrent layer of two directions."""

    def __init__(self, kind: type[nn.RNNBase], p: float) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(48, VOCAB)
        self.layers = kind(16, 24, num_layers=2, batch_first=True, bidirectional=True, dropout=p)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x))[0])


class UNet(nn.Module):
    """Down, up, and across, with group norms."""

    def __init__(self, mode: str, p: float) -> None:
        super().__init__()
        self.mode, self.p = mode, p
        self.into, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.down, self.norm2 = nn.Conv2d(8, 16, 3, 2, 1), nn.GroupNorm(4, 16)
        self.up, self.out = nn.Conv2d(24, 8, 3, padding=1, padding_mode="reflect"), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.silu(self.norm1(self.into(x)))
        b = F.dropout2d(F.silu(self.norm2(self.down(a))), self.p, self.training)
        b = F.interpolate(b, scale_factor=2, mode=self.mode)
        return self.out(F.silu(self.up(torch.cat([a, b], 1))))


class Gan(nn.Module):
    """A generator of transposed convolutions and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(8, 256), nn.Unflatten(1, (16, 4, 4)), nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.BatchNorm2d(8),
            nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.judge = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(),
            nn.Linear(256, 1), nn.Flatten(0),
        )  # fmt: skip


def gan_step(model: Gan, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    fake = model.generator(y)
    real_loss = F.softplus(-model.judge(x)).mean() + F.softplus(model.judge(fake.detach())).mean()
    fake_loss = F.softplus(-model.judge(fake)).mean()
    return {"judge": real_loss.detach(), "both": _train(optimizer, real_loss + fake_loss)}


class Variational(nn.Module):
    """An autoencoder with a random code."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.mean, self.log_variance = nn.Linear(20, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.out = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 20))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = F.relu(self.into(x))
        mean, log_variance = self.mean(h), self.log_variance(h)
        return self.out(mean + torch.randn_like(mean) * (0.5 * log_variance).exp()), mean, log_variance


def variational_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    found, mean, log_variance = model(x)
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
    return _train(optimizer, F.mse_loss(found, y) + divergence)


class Graph(nn.Module):
    """Messages along edges, added up where they end."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges.unbind(1)
        h = self.into(x)
        summed = torch.zeros_like(h).index_add(0, target, h[source])
        degree = torch.zeros_like(h[:, 0]).scatter_add(0, target, torch.ones_like(h[source, 0]))
        return self.out(F.relu(h + summed / degree.clamp(min=1)[:, None]))


def graph_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    return _train(optimizer, F.cross_entropy(model(x, y), y[: len(x), 0] % 3))


class Recommender(nn.Module):
    """Bags of embeddings, their pairwise products, and dense features."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, 8, mode=mode) for mode in ("sum", "mean", "max"))
        self.dense, self.top = nn.Linear(5, 8), nn.Linear(8 + 6, 1)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        parts = [self.dense(x), *(bag(part) for bag, part in zip(self.bags, ids.unbind(1), strict=True))]
        features = torch.stack(parts, 1)
        products = features @ features.transpose(1, 2)
        i, j = torch.triu_indices(4, 4, 1)
        return self.top(torch.cat([parts[0], products[:, i, j]], 1))[:, 0]


def recommender_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    return _train(optimizer, F.binary_cross_entropy_with_logits(model(x, y), (x[:, 0] > 0).to(x.dtype)))


def numbers(*shape: int) -> Draw:
    return lambda generator: torch.randn(*shape, generator=generator)


def integers(high: int, *shape: int) -> Draw:
    return lambda generator: torch.randint(high, shape, generator=generator)


ZOO: dict[str, Entry] = {
    "gpt2": Entry(gpt2, language_step, tokens, tokens),
    "llama": Entry(llama, language_step, tokens, tokens),
    "qwen2": Entry(qwen2, language_step, tokens, tokens),
    "bert": Entry(bert, language_step, tokens, tokens),
    "t5": Entry(t5, labelled_step, tokens, tokens),
    "vit": Entry(vit, image_step, images, labels),
    "resnet": Entry(resnet, image_step, images, labels, has_dropout=False),
    "convnext": Entry(convnext, image_step, images, labels),
    "mixtral": Entry(mixtral, language_step, tokens, tokens),
    "mamba": Entry(mamba, language_step, tokens, tokens, has_dropout=False),
    "whisper": Entry(whisper, speech_step, numbers(ROWS, 8, 24), tokens),
    "swin": Entry(swin, image_step, images, labels),
    "clip": Entry(clip, pairs_step, images, tokens),
    "lstm": Entry(lambda p: Recurrent(nn.LSTM, p), tokens_step, tokens, tokens),
    "gru": Entry(lambda p: Recurrent(nn.GRU, p), tokens_step, tokens, tokens),
    "unet": Entry(lambda p: UNet("nearest", p), regression_step, images, images),
    "unet_bilinear": Entry(lambda p: UNet("bilinear", p), regression_step, images, images),
    "gan": Entry(lambda p: Gan(), gan_step, images, numbers(ROWS, 8), has_dropout=False),
    "vae": Entry(lambda p: Variational(), variational_step, numbers(ROWS, 20), numbers(ROWS, 20), has_dropout=False),
    "graph": Entry(lambda p: Graph(), graph_step, numbers(16, 6), integers(16, 40, 2), has_dropout=False),
    "dlrm": Entry(
        lambda p: Recommender(), recommender_step, numbers(ROWS, 5), integers(50, ROWS, 3, 4), has_dropout=False
    ),
}


def arguments(name: str, dropout: float = 0.0) -> Callable[[int], tuple[tuple, dict]]:
    """`make_args` for `ms.verify`: AdamW, batches whose rows all differ."""
    entry = ZOO[name]
    torch.manual_seed(0)
    model = entry.build(dropout).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def make_args(i: int) -> tuple[tuple, dict]:
        generator = torch.Generator().manual_seed(i)
        return (model, optimizer, entry.x(generator), entry.y(generator)), {}

    return make_args


def row(name: str, dropout: float) -> str:
    """One model as a line of the table."""
    make_args, step = arguments(name, dropout), ZOO[name].step
    began = time.perf_counter()
    lowered = ms.compile(mesh=ms.Mesh(dp=2))(step).lower(*make_args(0)[0])
    seconds = time.perf_counter() - began
    found = [ms.verify(step, make_args, mesh=ms.Mesh(dp=ranks), steps=3) for ranks in (2, 4)]
    kinds = Counter(c.kind for c in lowered.communication)
    sent = sum(c.bytes for c in lowered.communication)
    fallbacks = ", ".join(f"{op} x{count}" for op, count in lowered.fallbacks) or "none"
    errors = " | ".join(f"{'' if v.ok else 'WRONG '}{v.max_error:.0e}" for v in found)
    sends = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"| {name} | {errors} | {seconds:.2f} | {len(lowered.program.calls)} | {fallbacks} | {sends} | {sent} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Every model of the zoo on 2 and 4 virtual ranks, 3 steps, float64.")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--models", default=",".join(ZOO))
    args = parser.parse_args()
    print("| model | error dp=2 | dp=4 | capture to passes, s | calls | replicated ops | sends | bytes a rank |")
    print("|---|---|---|---|---|---|---|---|")
    for name in args.models.split(","):
        if args.dropout and not ZOO[name].has_dropout:
            continue
        print(row(name, args.dropout), flush=True)


if __name__ == "__main__":
    sys.exit(main())
