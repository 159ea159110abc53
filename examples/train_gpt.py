"""Trains a GPT of a million parameters on the source text of Python's standard library, byte by byte.

    python examples/train_gpt.py                           # one process
    torchrun --nproc-per-node 2 examples/train_gpt.py      # two processes, each with its half of every batch
    python examples/train_gpt.py --simulate dp=4           # one process that plays four ranks

All three compute the same numbers, for `train_step` says what ONE device would do with the whole batch.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

import meshstep as ms
from gpt import GPT, generate, loss_of
from stdlib_text import even_rows, random_rows, read_texts


def train_step(model: GPT, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """One step in plain PyTorch: nothing here knows of ranks. This is what meshstep compiles."""
    loss = loss_of(model, x, y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def warm_up_then_cosine(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Up in a line over the first tenth of the steps, then down along a cosine to a tenth of the rate."""
    rise = max(1, steps // 10)
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / rise, 0.55 + 0.45 * math.cos(math.pi * min(i / steps, 1.0)))
    )


def main() -> None:
    args = arguments()
    world = ms.init()
    if args.simulate and world.size > 1:
        raise SystemExit("--simulate plays every rank in one process: run it by plain python")
    say = tqdm.write if world.rank == 0 else lambda _: None
    if args.float64:
        torch.set_default_dtype(torch.float64)

    torch.manual_seed(args.seed)
    model = GPT().to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = warm_up_then_cosine(optimizer, args.steps)
    if args.simulate:
        step = ms.simulate(train_step, mesh=args.simulate)
    else:
        step = ms.compile(backend=args.backend)(train_step)

    training, held_out = read_texts()
    exam = [t.to(world.device) for t in even_rows(held_out, 256, model.context)]
    ranks = args.simulate or f"{world.size} process(es)"
    say(f"{sum(p.numel() for p in model.parameters()):,} parameters on {ranks}")
    say(f"{len(training):,} bytes of text to train on, {len(held_out):,} held out")

    generator = torch.Generator().manual_seed(args.seed)
    losses, scores, began = [], {}, time.monotonic()
    tokens = args.batch * model.context
    bar = tqdm(total=args.steps * tokens, unit="tok", unit_scale=True, mininterval=1, disable=world.rank > 0)
    with bar:
        for i in range(1, args.steps + 1):
            rows = random_rows(training, args.batch, model.context, generator, world.rank, world.size)
            x, y = (t.to(world.device) for t in rows)  # this rank's own
            losses.append(step(model, optimizer, x, y).item())
            schedule.step()
            bar.set_postfix(step=i, loss=f"{losses[-1]:.3f}", refresh=False)
            bar.update(tokens)
            if i % max(1, args.steps // 6) == 0 or i == args.steps:
                with torch.no_grad():
                    scores[i] = loss_of(model, *exam).item()
                say(f"step {i}: held-out loss {scores[i]:.3f} nats per byte")

    if world.rank == 0:
        save(args.out, model, losses, scores, time.monotonic() - began)


def save(out: Path, model: GPT, losses: list[float], scores: dict[int, float], seconds: float) -> None:
    """Write the curve, the numbers, the weights and some text of the model's own into the folder `out`."""
    text = generate(model)
    print(f"\nThe model writes:\n\n{text}\n")
    out.mkdir(parents=True, exist_ok=True)
    (out / "sample.txt").write_text(text)
    numbers = {"seconds": seconds, "held_out": scores, "training": losses}
    (out / "losses.json").write_text(json.dumps(numbers, indent=1))
    torch.save(model.state_dict(), out / "model.pt")

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1, label="training batch")
    axes.plot(list(scores), list(scores.values()), "o-", label="held-out files")
    axes.set(xlabel="step", ylabel="loss, nats per byte", title="A byte-level GPT on the standard library")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out / "loss.png", dpi=120)
    print(f"{seconds:.0f} s; held-out loss {scores[len(losses)]:.3f} nats per byte; files in {out}/")


def mesh(text: str) -> ms.Mesh:
    """The mesh that `dp=4` or `dp=2,tp=2` names."""
    return ms.Mesh(**{axis: int(size) for axis, size in (part.split("=") for part in text.split(","))})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64, help="rows of a batch, those of all ranks together")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate at the end of the warm-up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--float64", action="store_true", help="to compare runs to the last digits")
    parser.add_argument("--backend", default="eager", help="eager, or inductor (wants a C++ compiler)")
    parser.add_argument("--simulate", type=mesh, metavar="dp=4", help="play these ranks in one process")
    parser.add_argument("--out", type=Path, default=Path("runs/gpt"), help="folder for what the run leaves")
    return parser.parse_args()


if __name__ == "__main__":
    main()
