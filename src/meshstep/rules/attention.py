"""Scaled dot-product attention: batch and heads are independent."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .factors import Linear, partials, sharded
from .rule import Entry, OpCall, Rule

aten = torch.ops.aten

# b batch, h heads (of queries and of keys: a shard of one goes with the same shard of the other), S and T sequence,
# D and E head size. The mask may have any of its dims broadcast.
_QKV = "bhSD,bhTD,bhTE"
_MASK = "bhST"


def _attention(spec: str, linear: Linear = ()) -> Entry:
    """Nothing is sharded while there is dropout: its mask would depend on the rank."""

    def rules(call: OpCall) -> Iterator[Rule]:
        if call["dropout_p"] == 0:
            yield from sharded(call, spec)
            yield from partials(call, linear)

    return Entry(rules)


_GRADS = _QKV
_SAVED = "bhSE,bhS"

TABLE: dict[torch._ops.OpOverload, Entry] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention(f"{_QKV},{_MASK}->{_SAVED}"),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention(
        f"bhSE,{_QKV},{_SAVED},{_MASK}->{_GRADS}", "first"
    ),
}
