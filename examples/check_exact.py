"""Proves on a small GPT that two ranks compute what one device would, each with rows of its own.

Runs five steps (forward, backward, clipping, AdamW) twice in float64: as plain Python on one device, and
compiled for two virtual ranks. Compares the loss, the parameters and the optimizer's state after every step.
"""

import sys

import torch

import meshstep as ms
from gpt import GPT
from stdlib_text import random_rows, read_texts
from train_gpt import train_step

RANKS, ROWS, STEPS, BOUND = 2, 8, 5, 1e-10


def main() -> None:
    torch.manual_seed(0)
    model = GPT(width=32, layers=2, heads=2, context=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    text, _ = read_texts()
    generator = torch.Generator().manual_seed(0)
    batches = [random_rows(text, ROWS, model.context, generator) for _ in range(STEPS)]

    for i, (x, _) in enumerate(batches):
        assert len(x.unique(dim=0)) == ROWS, "rows that repeat would prove nothing"
        firsts = (bytes(rows[0, :16].tolist()) for rows in x.chunk(RANKS))
        print(f"step {i}:", *(f"rank {rank} reads {first!r}..." for rank, first in enumerate(firsts)))

    result = ms.verify(train_step, lambda i: ((model, optimizer, *batches[i]), {}), mesh=ms.Mesh(dp=RANKS), steps=STEPS)
    print(result)
    exact = result.ok and result.max_error < BOUND
    verdict = "below" if exact else "NOT below"
    print(f"float64, {STEPS} steps, {RANKS} ranks: max error {result.max_error:.1e}, {verdict} {BOUND:.0e}")
    sys.exit(0 if exact else 1)


if __name__ == "__main__":
    main()
