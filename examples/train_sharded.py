"""Trains the GPT with its parameters in shards, saves a checkpoint, and goes on from it on any other mesh.

    torchrun --nproc-per-node 4 examples/train_sharded.py --mesh dp=4 --plan fsdp --steps 20
    torchrun --nproc-per-node 4 examples/train_sharded.py --mesh dp=2,tp=2 --plan fsdp+tp --steps 40   # goes on at 20
    python examples/train_sharded.py --mesh dp=1 --plan data_parallel --steps 60                        # and at 40

`--look` prints what a step of that plan would hold and send, without training.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

import meshstep as ms
from gpt import GPT, loss_of
from stdlib_text import even_rows, random_rows, read_texts
from train_gpt import mesh, train_step

BATCH = 32
PLANS = {
    "data_parallel": ms.plans.data_parallel(),
    "zero1": ms.plans.zero(1),
    "fsdp": ms.plans.fsdp(),
    "tp": ms.plans.tensor_parallel(
        {
            "blocks.*.qkv": "colwise",
            "blocks.*.proj": "rowwise",
            "blocks.*.up": "colwise",
            "blocks.*.down": "rowwise",
            "tokens": "rowwise",
            "head": "colwise",
        }
    ),
}


@torch.no_grad()
def evaluate(model: GPT, x: Tensor, y: Tensor) -> Tensor:
    """Mean loss; compiled like the step, for parameters in shards are no plain tensors."""
    return loss_of(model, x, y)


def main() -> None:
    args = arguments()
    world = ms.init()
    torch.manual_seed(0)
    model = GPT().to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    step = ms.compile(mesh=args.mesh, plan=args.plan, backend=args.backend)(train_step)
    exam = ms.compile(mesh=args.mesh, plan=args.plan, backend=args.backend)(evaluate)

    place = args.mesh.coordinate(world.rank)["dp"]  # ranks along "tp" pass the same rows
    groups = args.mesh["dp"]
    training, held_out = read_texts()
    questions = [t.chunk(groups)[place].to(world.device) for t in even_rows(held_out, 64, model.context)]
    if args.look:
        lowered = step.lower(model, optimizer, *(t[: BATCH // groups] for t in questions))
        print(lowered.plan, lowered.memory, *lowered.communication, sep="\n")
        return

    first, generator = 0, torch.Generator().manual_seed(0)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": step}
    if args.checkpoint.exists():
        first = ms.checkpoint.load(args.checkpoint, state | {"done": 0})["done"]
    for i in range(args.steps):
        rows = random_rows(training, BATCH, model.context, generator, place, groups)
        if i < first:
            continue  # seen before the checkpoint
        loss = step(model, optimizer, *(t.to(world.device) for t in rows))
        schedule.step()
        if world.rank == 0 and (i + 1) % 5 == 0:
            print(f"step {i + 1}: loss {loss.item():.4f}", flush=True)
    score = exam(model, *questions).item()
    ms.checkpoint.save(args.checkpoint, state | {"done": args.steps})
    if world.rank == 0:
        print(f"held-out loss {score:.4f} nats per byte; {args.checkpoint}")


def plan(text: str) -> ms.Plan:
    """`fsdp`, `fsdp+tp`."""
    first, *others = (PLANS[name] for name in text.split("+"))
    return sum(others, first)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", type=mesh, required=True, metavar="dp=2,tp=2", help="with an axis dp")
    parser.add_argument("--plan", type=plan, default="fsdp", metavar="fsdp+tp", help=", ".join(PLANS))
    parser.add_argument("--steps", type=int, default=20, help="of the whole run, those before the checkpoint too")
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/sharded"))
    parser.add_argument("--look", action="store_true", help="print what a step holds and sends, and end")
    return parser.parse_args()


if __name__ == "__main__":
    main()
