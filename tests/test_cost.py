"""Predictions: times of ops and collectives by hand-computed numbers, the table, and the timeline of small programs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.distributed.tensor import Partial, Replicate, Shard

import meshstep as ms
from meshstep.ir import collectives as c
from meshstep.ir.program import Program, Result, Slot, SlotKind, call
from meshstep.ir.types import TensorType
from meshstep.passes.timeline import Timeline, timeline
from meshstep.plan.flops import flops, flops_of_types
from meshstep.plan.hardware import Hardware

aten = torch.ops.aten
SIMPLE = Hardware(  # round numbers
    latency=10.0, link=100.0, memory=1_000.0, flops=1_000.0, hop=1.0, far_hop=5.0, far_link=10.0, node=4, launch=2.0
)


def of(*shape: int, dtype: torch.dtype = torch.float32) -> TensorType:
    return TensorType(dtype, shape)


# Operations


def test_flops_are_those_of_torchs_formulas():
    assert flops_of_types(aten.mm.default, [of(3, 5), of(5, 7)], [of(3, 7)]) == 2 * 3 * 5 * 7
    assert flops_of_types(aten.addmm.default, [of(7), of(3, 5), of(5, 7)], [of(3, 7)]) == 2 * 3 * 5 * 7
    assert flops_of_types(aten.bmm.default, [of(2, 3, 5), of(2, 5, 7)], [of(2, 3, 7)]) == 2 * 2 * 3 * 5 * 7
    assert flops_of_types(aten.add.Tensor, [of(3), of(3)], [of(3)]) == 0


def test_convolutions_are_counted_from_types_as_from_arguments():
    x, w, out = of(2, 3, 8, 8), of(4, 3, 3, 3), of(2, 4, 6, 6)
    args = (x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    by_hand = 2 * (2 * 6 * 6) * 4 * (3 * 3 * 3)
    assert flops(aten.convolution.default, args, {}, out) == by_hand
    assert flops_of_types(aten.convolution.default, [x, w], [out]) == by_hand
    backward = flops_of_types(aten.convolution_backward.default, [out, x, w], [x, w, None])
    assert backward == 2 * by_hand


def test_attention_of_the_cpu_is_counted():
    q = of(2, 4, 16, 8)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    products = 2 * (2 * 4) * 16 * 16 * 8  # one batched product of heads
    assert flops(forward, (q, q, q), {}, (q, of(2, 4, 16))) == 2 * products
    assert flops(backward, (q, q, q, q, q, of(2, 4, 16), 0.0, False), {}, (q, q, q)) == 5 * products


def test_an_op_takes_what_bounds_it_and_its_launch():
    assert SIMPLE.op(5_000, 1_000, torch.float32) == 2 + 5
    assert SIMPLE.op(500, 4_000, torch.float32) == 2 + 4
    bf16 = Hardware(flops=1_000.0, by_dtype=((torch.bfloat16, 4_000.0),), efficiency=0.5, memory=1e9)
    assert bf16.op(4_000, 0, torch.float32) == 8
    assert bf16.op(4_000, 0, torch.bfloat16) == 2
    assert SIMPLE.computation(aten.mm.default, [of(10, 10), of(10, 10)], [of(10, 10)], 2) == 2 + 1.0
    assert SIMPLE.computation(aten.view.default, [of(10, 10)], [of(100)], 1) == 0


# Collectives


@pytest.mark.parametrize(
    ("op", "nbytes", "size", "stride", "want"),
    [
        (c.all_gather, 100, 4, 1, 10 + 3 * 1 + 3),  # three hops, 300 B at 100 B/us
        (c.reduce_scatter, 400, 4, 1, 10 + 3 * 1 + 3),
        (c.all_to_all, 400, 4, 1, 10 + 3 * 1 + 3),
        (c.all_reduce, 400, 4, 1, 10 + 2 * (3 * 1 + 3)),
        (c.all_reduce, 400, 2, 4, 10 + 2 * (5 + 20)),  # neighbours are in other nodes: one port of 10 B/us each
        (c.reduce_scatter, 800, 8, 1, 10 + 6 * 1 + 5 + 17.5),  # two nodes of four: 700 B by four ports, 40 B/us
        (c.reduce_scatter, 800, 4, 2, 10 + 2 * 1 + 5 + 30),  # two of two, 600 B by two ports, 20 B/us
        (c.all_reduce, 16, 32, 4, 10 + 2 * 5 * 5 + 2 * 1.6),  # a tree of 32 nodes: five hops up, five down
        (c.axis_slice, 800, 8, 1, 0),
        (c.all_reduce, 800, 1, 1, 0),
    ],
)
def test_a_collective_is_a_ring_or_a_tree(op, nbytes, size, stride, want):
    assert SIMPLE.collective(op, nbytes, size, stride) == pytest.approx(want, abs=1e-9)


def test_a_redistribution_costs_the_collective_that_makes_it():
    x = of(100)  # 400 B
    r, s, p = Replicate(), Shard(0), Partial("sum")
    assert SIMPLE.redistribution(x, p, r, 4) == SIMPLE.collective(c.all_reduce, 400, 4)
    assert SIMPLE.redistribution(x, p, s, 4) == SIMPLE.collective(c.reduce_scatter, 400, 4)
    assert SIMPLE.redistribution(x, s, r, 4, 4) == SIMPLE.collective(c.all_gather, 100, 4, 4)
    assert SIMPLE.redistribution(x, s, s, 4) == 0
    assert SIMPLE.redistribution(x, r, s, 4) == SIMPLE.op(0, 200, torch.float32)
    assert SIMPLE.redistribution(x, r, p, 4) is None


# The table


def test_the_table_has_devices_with_sources_that_grow_with_their_generation():
    assert list(ms.hardware.table)[:6] == ["cpu", "a100", "h100", "h200", "b200", "mi300x"]
    for name, entry in ms.hardware.table.items():
        assert entry.name == name
        assert entry.source
    a100, h100, h200, b200 = map(ms.hardware.get, ("A100", "h100", "h200", "b200"))
    assert a100.capacity == h100.capacity == 80 * 10**9
    assert h200.capacity == 141 * 10**9
    rates = [d.rate(torch.bfloat16) for d in (a100, h100, b200)]
    assert rates == pytest.approx([312e6 * 0.7, 989e6 * 0.7, 2250e6 * 0.7])
    assert a100.memory < h100.memory < h200.memory < b200.memory
    for gpu in (a100, h100, h200, b200, ms.hardware.get("mi300x")):
        assert gpu.far_link < gpu.link < gpu.memory
        assert gpu.rate(torch.float32) < gpu.rate(torch.bfloat16)


def test_an_unknown_device_is_refused_with_the_nearest_name():
    with pytest.raises(ms.InputError) as error:
        ms.hardware.get("h20")
    assert str(error.value) == "no device 'h20' in the hardware table\n  at   device\n  try  'h200'"


def test_figures_that_cannot_be_are_refused():
    with pytest.raises(ms.InputError, match="efficiency of hardware is 0"):
        Hardware(efficiency=0)
    with pytest.raises(ms.InputError, match="launch of hardware is -1"):
        Hardware(launch=-1)
    with pytest.raises(ms.InputError, match="cannot be registered as ''"):
        ms.hardware.register(Hardware())


# The timeline


def program(mesh: ms.Mesh, *steps: tuple[str, Any, tuple, TensorType]) -> Program:
    """A program of one argument `x`: f32[10, 10]; each step has a name, an op, arguments (names of values), a type."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta.update(type=of(10, 10), layout=ms.Layout(), source="")
    values = {"x": x}
    for name, op, args, type_ in steps:
        given = tuple(values.get(a, a) if isinstance(a, str) else a for a in args)
        values[name] = call(graph, op, given, type=type_, name=name)
    graph.output((values[steps[-1][0]],))
    return Program("step", mesh, graph, (Slot(SlotKind.ARGUMENT, "x"),), (Result("out"),), mesh.axes)


def spans(found: Timeline) -> dict[str, tuple[float, float]]:
    return {event.node.name: (event.start, event.end) for event in found.events}


SQUARE = of(10, 10)  # 400 B; its product takes 2 us to launch and 2 us to compute, an addition 1.2 us of memory
SUM = ("reduced", c.all_reduce, ("x", "sum", "dp"), SQUARE)  # 10 + 2 * (1 + 2) = 16 us
MM = ("mm", aten.mm.default, ("x", "x"), SQUARE)


def test_a_collective_is_sent_while_what_does_not_need_it_is_computed():
    found = timeline(program(ms.Mesh(dp=2), SUM, MM, ("add", aten.add.Tensor, ("reduced", "mm"), SQUARE)), SIMPLE)
    assert spans(found) == {"reduced": (0, 16), "mm": (0, 4), "add": (16, 19.2)}
    assert (found.total, found.compute, found.communication, found.exposed) == pytest.approx((19.2, 7.2, 16, 12))
    assert found.events[0].bytes == 400
    assert str(found) == "0.0192 ms a step: 0.0072 ms computed, 0.016 ms sent, of which 0.012 ms exposed"


def test_it_is_launched_at_its_place():
    found = timeline(program(ms.Mesh(dp=2), MM, SUM, ("add", aten.add.Tensor, ("reduced", "mm"), SQUARE)), SIMPLE)
    assert spans(found) == {"mm": (0, 4), "reduced": (4, 20), "add": (20, 23.2)}


def test_collectives_of_one_axis_queue_and_those_of_two_run_at_once():
    again = ("more", c.all_reduce, ("x", "max", "dp"), SQUARE)
    other = ("more", c.all_reduce, ("x", "max", "tp"), SQUARE)
    last = ("add", aten.add.Tensor, ("reduced", "more"), SQUARE)
    mesh = ms.Mesh(dp=2, tp=2)  # dp has a stride of 2: still in one node of 4
    assert spans(timeline(program(mesh, SUM, again, last), SIMPLE))["more"] == (16, 32)
    found = timeline(program(mesh, SUM, other, last), SIMPLE)
    assert spans(found)["more"] == (0, 16)
    assert (found.communication, found.exposed) == (32, 16)


def test_views_cost_nothing_and_copies_do():
    flat, turned = of(100), of(10, 10)
    steps = (("t", aten.t.default, ("x",), turned), ("view", aten.view.default, ("x", [100]), flat))
    copied = ("copied", aten.reshape.default, ("t", [100]), flat)
    found = timeline(program(ms.Mesh(dp=2), *steps, copied, ("s", aten.add.Tensor, ("copied", "view"), flat)), SIMPLE)
    assert spans(found) == {"copied": (0, pytest.approx(2.8)), "s": (pytest.approx(2.8), pytest.approx(6.0))}


def test_inductor_keeps_elementwise_chains_out_of_memory():
    chain = (("a", aten.relu.default, ("x",), SQUARE), ("b", aten.exp.default, ("a",), SQUARE))
    step = program(ms.Mesh(dp=2), *chain, ("mm", aten.mm.default, ("b", "b"), SQUARE))
    assert timeline(step, SIMPLE).total == pytest.approx(2 * (2 + 0.8) + 4)
    assert timeline(step, SIMPLE, "inductor").total == pytest.approx((2 + 0.4) + 0.4 + 4)  # one read, one written


def test_a_lookup_reads_rows_and_not_the_table():
    ids, out = of(4, dtype=torch.int64), of(4, 10)
    step = program(
        ms.Mesh(dp=2),
        ("ids", aten.arange.default, (4,), ids),
        ("found", aten.embedding.default, ("x", "ids"), out),
    )
    assert spans(timeline(step, SIMPLE))["found"] == (pytest.approx(2.032), pytest.approx(2.032 + 2 + 0.352))


def test_a_lowered_step_has_a_cost_by_the_name_of_a_device():
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), x)
        loss.backward()
        return loss

    torch.manual_seed(0)
    found = ms.simulate(step, mesh=ms.Mesh(dp=4)).lower(nn.Linear(64, 64), torch.ones(8, 64))
    assert found.cost() == found.timeline("cpu").total > found.timeline("cpu").exposed > 0
    assert found.cost("h100", "inductor") < found.cost("h100")
    assert found.cost(SIMPLE) == found.timeline(SIMPLE).total
    with pytest.raises(ms.InputError, match="no device 'h101'"):
        found.cost("h101")


def test_the_code_of_the_page_runs():
    text = (Path(__file__).parents[1] / "docs" / "cost.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(compile(code, "cost.md", "exec"), {"__name__": "docs"})
    assert ms.hardware.get("Half-H100").capacity == 40 * 10**9


def test_ranks_measure_their_machine_and_agree_on_the_link(pools):
    found = pools(2).run(ms.hardware.measure)
    assert found[0].latency == found[1].latency > 1
    assert found[0].link == found[1].link > 1
    for one in found:
        assert one.rate(torch.float32) > one.memory > one.launch > 0
        assert one.capacity > 2**28
