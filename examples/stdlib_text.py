"""The data of the examples: the source text of Python's own standard library, so nothing is downloaded."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

# Not the library's own, or not installed everywhere.
SKIPPED = {"site-packages", "dist-packages", "test", "tests"}


def read_texts(every: int = 20) -> tuple[Tensor, Tensor]:
    """All files in order of their names: those to train on, and each `every`-th one held out, u8[N] each."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    files = [(root / name).read_bytes() for name in names if SKIPPED.isdisjoint(name.parts)]
    training = [text for i, text in enumerate(files) if i % every]
    return to_tensor(training), to_tensor(files[::every])


def to_tensor(texts: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n".join(texts)), dtype=torch.uint8)


def rows_at(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Rows that begin at `starts`, and what to predict, which is the same one byte later: i64[B, T] each."""
    rows = text[starts[:, None] + torch.arange(length + 1)].long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def random_rows(
    text: Tensor, count: int, length: int, generator: torch.Generator, rank: int = 0, ranks: int = 1
) -> tuple[Tensor, Tensor]:
    """What `rank` reads of a random batch of `count` rows.

    Every rank draws where all rows begin and reads only its own, so the batch does not depend on `ranks`.
    """
    starts = torch.randint(len(text) - length, (count,), generator=generator)
    return rows_at(text, starts.tensor_split(ranks)[rank], length)


def even_rows(text: Tensor, count: int, length: int) -> tuple[Tensor, Tensor]:
    """`count` rows that lie at even distances in `text`."""
    return rows_at(text, torch.linspace(0, len(text) - length - 1, count, dtype=torch.float64).long(), length)
