"""State that is to be the same on all ranks, made so."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def broadcast_from_first(tensors: Sequence[Tensor]) -> None:
    """Give all ranks the values of rank 0, in one call of a collective for each device.

    Args:
        tensors: The same shapes and dtypes on all ranks; written in place.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    with torch.no_grad():
        for device in dict.fromkeys(tensor.device for tensor in tensors):
            here = [tensor for tensor in tensors if tensor.device == device and tensor.numel()]
            sent = torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in here])
            dist.broadcast(sent, 0)
            sizes = [tensor.nbytes for tensor in here]
            for tensor, part in zip(here, sent.split(sizes), strict=True):
                own = part.clone() if part.storage_offset() % tensor.itemsize else part  # memory that fits the dtype
                tensor.copy_(own.view(tensor.dtype).view(tensor.shape))
