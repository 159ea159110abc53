"""Scaled dot-product attention: batch and heads are independent."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .factors import Linear, partials, sharded
from .rule import Entry, OpCall, Rule, Table

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


# Tensors of the random state and of ragged batches are the same on every rank.
_GRADS = "bhSD,bhTD,bhTE"

TABLE: Table = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention(f"{_QKV},{_MASK}->bhSE,bhS"),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention(
        f"bhSE,{_QKV},bhSE,bhS,{_MASK}->{_GRADS}", "first"
    ),
    aten._scaled_dot_product_flash_attention.default: _attention(f"{_QKV}->bhSE,bhS,=,=,=,=,=,=,="),
    aten._scaled_dot_product_flash_attention_backward.default: _attention(
        f"bhSE,{_QKV},bhSE,bhS,=,=,=,=->{_GRADS}", "first"
    ),
    aten._scaled_dot_product_efficient_attention.default: _attention(f"{_QKV},{_MASK}->bhSE,bhS,=,="),
    aten._scaled_dot_product_efficient_attention_backward.default: _attention(
        f"bhSE,{_QKV},{_MASK},bhSE,bhS,=,=->{_GRADS},{_MASK}", "first"
    ),
    aten._scaled_dot_product_cudnn_attention.default: _attention(f"{_QKV},{_MASK}->bhSE,bhS1,=,=,=,=,=,=,="),
    aten._scaled_dot_product_cudnn_attention_backward.default: _attention(
        f"bhSE,{_QKV},bhSE,bhS1,=,=,{_MASK},=,=->{_GRADS}", "first"
    ),
}
