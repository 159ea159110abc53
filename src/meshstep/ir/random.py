"""Random numbers that depend on a seed and on where an element lies in the whole tensor, never on the mesh.

Element i (in row-major order of the whole tensor) of the k-th random tensor of step t under seed s is
`philox4x32-10(key=s, counter=(i, k, t))`, turned into the wanted distribution. A shard is computed from its own
positions, so any placement gives the same numbers and nothing is sent.

    uniform(seed, start, stream, size, whole, dtype)     [0, 1)
    normal(seed, start, stream, size, whole, dtype)      mean 0, deviation 1
    integers(seed, start, stream, size, whole)           i64, [0, 2**63)

`seed` is i64[2] (seed, step); `start` holds for each dim the place of the first element in the whole tensor (a 0-d
i64, None for 0); `stream` is k; `size` and `whole` are the shapes of the part and of the whole.

Source: Salmon, Moraes, Dror & Shaw 2011, "Parallel Random Numbers: As Easy as 1, 2, 3"; Box & Muller 1958.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
WORD = 0xFFFFFFFF
CHUNK = 1 << 15  # elements at a time where the arithmetic is not fused: the words stay in the cache

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Philox4x32-10. All words are i64 with values in [0, 2**32)."""
    a, b, c, d = counter
    k0, k1 = key
    for i in range(ROUNDS):
        if i:
            k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
        left, right = a * MULTIPLIERS[0], c * MULTIPLIERS[1]  # 64 bits, wrapped: their bits are right all the same
        a, b, c, d = (
            (right >> 32 & WORD) ^ b ^ k0,
            right & WORD,
            (left >> 32 & WORD) ^ d ^ k1,
            left & WORD,
        )
    return a, b, c, d


def positions(
    start: Sequence[Tensor | None], size: Sequence[int], whole: Sequence[int], device: torch.device
) -> Tensor:
    """Row-major place in the whole tensor of each element of a part: i64 of shape `size`."""
    place = torch.zeros((), dtype=torch.int64, device=device)
    stride = math.prod(whole)
    for dim, (first, length, total) in enumerate(zip(start, size, whole, strict=True)):
        stride //= max(total, 1)
        along = torch.arange(length, device=device)
        along = along if first is None else along + first
        place = place + (along * stride).reshape([-1] + [1] * (len(size) - dim - 1))
    return place.expand(list(size))


def words(seed: Tensor, place: Tensor, stream: int) -> Words:
    """Four random words for each place."""
    key = (seed[0] & WORD, seed[0] >> 32 & WORD)
    step = seed[1] & WORD
    counter = (place & WORD, place >> 32 & WORD, torch.full_like(place, stream & WORD), step.expand(place.shape))
    return philox(counter, key)


def to_uniform(found: Words, dtype: torch.dtype) -> Tensor:
    """[0, 1) with as many random bits as the dtype holds."""
    a, b, *_ = found
    if dtype == torch.float64:
        return ((a >> 5 << 26) + (b >> 6)).to(torch.float64) * 2.0**-53
    bits = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[dtype]
    return ((a >> (32 - bits)).to(torch.float32) * 2.0**-bits).to(dtype)


def to_normal(found: Words, dtype: torch.dtype) -> Tensor:
    """Mean 0, deviation 1; in float64 from 53 bits, else in float32 from 24 and 32 bits."""
    a, b, c, d = found
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    first = 1.0 - to_uniform((a, b, c, d), wide)  # (0, 1]
    angle = to_uniform((c, d, a, b), wide) * (2 * math.pi)
    return ((first.log() * -2).sqrt() * angle.cos()).to(dtype)


def to_integers(found: Words, dtype: torch.dtype) -> Tensor:
    """63 random bits."""
    a, b, *_ = found
    return (a >> 1 << 32) | b


def random_tensor(
    transform: Callable[[Words, torch.dtype], Tensor],
    seed: Tensor,
    start: Sequence[Tensor | None],
    stream: int,
    size: Sequence[int],
    whole: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """The formula in torch ops: what Inductor fuses."""
    return transform(words(seed, positions(start, size, whole, seed.device), stream), dtype)


def _in_chunks(
    transform: Callable[[Words, torch.dtype], Tensor],
    seed: Tensor,
    start: Sequence[Tensor | None],
    stream: int,
    size: Sequence[int],
    whole: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """The same numbers where every op runs by itself."""
    place = positions(start, size, whole, seed.device).reshape(-1)
    if place.numel() <= CHUNK:
        return transform(words(seed, place, stream), dtype).reshape(list(size))
    out = torch.empty(place.shape, dtype=dtype, device=seed.device)
    for part, into in zip(place.split(CHUNK), out.split(CHUNK), strict=True):
        into.copy_(transform(words(seed, part, stream), dtype))
    return out.reshape(list(size))


def _fake(
    seed: Tensor,
    start: Sequence[Tensor | None],
    stream: int,
    size: Sequence[int],
    whole: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    return torch.empty(list(size), dtype=dtype, device=seed.device)


_TRANSFORMS = {"uniform": to_uniform, "normal": to_normal, "integers": to_integers}
_SCHEMA = "(Tensor seed, Tensor?[] start, int stream, int[] size, int[] whole, ScalarType dtype) -> Tensor"


def _register() -> None:
    for name, transform in _TRANSFORMS.items():
        torch.library.define(f"meshstep::{name}", _SCHEMA)
        torch.library.impl(f"meshstep::{name}", "default", partial(_in_chunks, transform))
        torch.library.register_fake(f"meshstep::{name}", _fake)


_register()

uniform = torch.ops.meshstep.uniform.default
normal = torch.ops.meshstep.normal.default
integers = torch.ops.meshstep.integers.default

EXPANSIONS = {  # for a compiler that fuses: no table of random numbers in memory
    uniform: partial(random_tensor, to_uniform),
    normal: partial(random_tensor, to_normal),
    integers: partial(random_tensor, to_integers),
}
RANDOM = frozenset(EXPANSIONS)
