"""Sums over the bits of a tensor that tell where two copies of it differ.

The memory is taken as 64-bit words, in blocks. A block's sum is that of its words, each times an odd number of its own,
modulo 2**64; the sum of a tensor is that of its blocks' sums likewise. A flipped bit changes a word by a power of two,
and an odd number times that is not zero modulo 2**64: one flip is always found, several but for one case in 2**64.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1 << 12  # words
AT_ONCE = 1 << 19  # words: what is held beside the tensor is 4 MiB


def words_of(tensor: Tensor) -> Tensor:
    """The elements of a tensor in row-major order as 64-bit words, the last one filled up with zeros: i64[n]."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    rest = -len(flat) % 8
    if rest:
        flat = torch.cat([flat, flat.new_zeros(rest)])
    elif flat.storage_offset() % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


def block_sums(words: Tensor) -> Tensor:
    """The sum of each block of words: i64[n / BLOCK], rounded up."""
    if len(words) == 0:
        return words.new_zeros(1)
    odd = torch.arange(1, 2 * BLOCK, 2, device=words.device)
    whole = len(words) // BLOCK * BLOCK
    sums = [(part.view(-1, BLOCK) * odd).sum(1) for part in words[:whole].split(AT_ONCE)] if whole else []
    rest = words[whole:]
    return torch.cat([*sums, (rest * odd[: len(rest)]).sum().view(1)] if len(rest) else sums)


def checksum(tensor: Tensor) -> Tensor:
    """One number for a tensor, on its device: i64[]."""
    sums = block_sums(words_of(tensor))
    while len(sums) > 1:
        sums = block_sums(sums)
    return sums[0]
