"""Scaled dot-product attention: batch and heads are independent, and so are the queries, given all keys and values."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from ..ir.collectives import axis_index
from ..layout import shard
from .factors import Linear, partials, sharded
from .rule import Entry, Local, OpCall, Rule, Table

aten = torch.ops.aten

# b batch, h heads (of queries and of keys: a shard of one goes with the same shard of the other), s and T sequences of
# queries and keys, D and E head size. The mask may have any of its dims broadcast.
_QKV = "bhSD,bhTD,bhTE"
_MASK = "bhST"
_GRADS = _QKV  # of queries, keys and values
_QUERIES = "bhsD,bhTD,bhTE"


def _attention(spec: str, linear: Linear = ()) -> Entry:
    """Nothing is sharded while there is dropout: its mask would depend on the rank.

    Where a term has the factor of the queries, which keys a query may see depends on its place in the whole.
    """

    def rules(call: OpCall) -> Iterator[Rule]:
        if call["dropout_p"] != 0:
            return
        for rule in sharded(call, spec):
            along = call["is_causal"] and rule.inputs[call.names.index("query")] == _ALONG_QUERIES
            yield Rule(rule.inputs, rule.outputs, _causal) if along else rule
        yield from partials(call, linear)

    return Entry(rules)


def _causal(form: Local) -> tuple[fx.Node, ...]:
    """The same op, with a mask of what lies in the future of this rank's queries."""
    query, keys = form["query"].meta["type"], form["key"].meta["type"].shape[-2]
    device, rows = torch.device(query.device), query.shape[-2]

    def count(length: int) -> fx.Node:
        return form.emit(aten.arange.default, length, dtype=torch.int64, device=device)

    first = form.emit(aten.mul.Scalar, form.emit(axis_index, form.axis, device), rows)
    place = form.emit(aten.unsqueeze.default, form.emit(aten.add.Tensor, count(rows), first), 1)
    later = form.emit(aten.lt.Tensor, place, count(keys))
    seen = form.emit(aten.full.default, [rows, keys], 0.0, dtype=query.dtype, device=device)
    mask = form.emit(aten.masked_fill.Scalar, seen, later, -torch.inf)
    return form.parts(form.again(is_causal=False, attn_mask=mask))


_ALONG_QUERIES = shard(2)

# Tensors of the random state and of ragged batches are the same on every rank.
TABLE: Table = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention(f"{_QUERIES},bhsT->bhsE,bhs"),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention(
        f"bhsE,{_QUERIES},bhsE,bhs,bhsT->{_QUERIES}", "first"
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
