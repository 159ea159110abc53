"""Programs: types, texts, what the verifier sees."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from golden_step import lowered
from support import Build, check_text, follow

import meshstep as ms
from meshstep.ir import collectives
from meshstep.ir.collectives import axis_of, bytes_sent
from meshstep.ir.infer import infer
from meshstep.ir.printer import SHOWN_ARGUMENTS, argument_text, op_text, program_text, type_text, value_text
from meshstep.ir.program import Program, Result, Slot, SlotKind, communication, name_of, producer
from meshstep.ir.types import TensorType, bytes_text, dtype_text
from meshstep.ir.updates import BY_OP, UPDATES
from meshstep.ir.verifier import verify_program
from meshstep.layout import PARTIAL, REPLICATE, Layout, shard
from meshstep.partition import partition
from meshstep.rules import Rule

aten = torch.ops.aten
MESH = ms.Mesh(dp=2, tp=4)


# ---- types


def test_a_type_is_that_of_a_tensor():
    type_ = TensorType.of(torch.zeros(2, 3, dtype=torch.bfloat16))
    assert type_ == TensorType(torch.bfloat16, (2, 3), "cpu")
    assert (type_.ndim, type_.numel, type_.nbytes, str(type_)) == (2, 6, 12, "bf16[2, 3]")
    assert type_.with_shape(()) == TensorType(torch.bfloat16, ())


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (torch.float32, "f32"), (torch.float64, "f64"), (torch.float16, "f16"), (torch.bfloat16, "bf16"),
        (torch.int64, "i64"), (torch.uint8, "u8"), (torch.bool, "bool"), (torch.complex64, "c64"),
        (torch.float8_e4m3fn, "f8_e4m3fn"),
    ],
)  # fmt: skip
def test_dtypes_are_short(dtype, text):
    assert dtype_text(dtype) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (256, "256 B"), (1536, "1.5 KiB"), (20 * 2**20, "20 MiB"), (3 * 2**50, "3072 TiB"), (1023, "1023 B")],
)
def test_bytes_have_a_unit(count, text):
    assert bytes_text(count) == text


def test_types_show_global_sizes_and_shards():
    layout = Layout((("tp", shard(0)), ("dp", shard(0))))
    assert type_text(TensorType(torch.float32, (2, 16)), layout, MESH) == "f32[16/8, 16]"
    assert type_text(TensorType(torch.float32, ()), Layout(), MESH) == "f32[]"


def test_types_are_inferred():
    x = TensorType(torch.float32, (4, 6))
    assert infer(aten.mm.default, (x, x.with_shape((6, 2))), {}) == x.with_shape((4, 2))
    assert infer(aten.split.Tensor, (x, 4, 1), {}) == (x.with_shape((4, 4)), x.with_shape((4, 2)))
    assert infer(aten.cat.default, ([x, x],), {}) == x.with_shape((8, 6))


# ---- collectives


@pytest.mark.parametrize(
    ("op", "args", "shape"),
    [
        (collectives.all_reduce, ("sum", "dp"), (4, 8)),
        (collectives.all_gather, (1, "dp", 2), (4, 16)),
        (collectives.reduce_scatter, (0, "sum", "dp", 2), (2, 8)),
        (collectives.all_to_all, (0, 1, "dp", 2), (2, 16)),
        (collectives.axis_slice, (1, "dp", 2), (4, 4)),
    ],
    ids=lambda v: name_of(v) if callable(v) else None,
)
def test_collectives_know_their_shapes_and_their_axis(op, args, shape):
    x = TensorType(torch.float64, (4, 8))
    assert infer(op, (x, *args), {}) == x.with_shape(shape)
    assert axis_of(op, (x, *args)) == "dp"


def test_the_index_along_an_axis_is_a_number():
    assert infer(collectives.axis_index, ("dp", torch.device("cpu")), {}) == TensorType(torch.int64, ())


def test_bytes_that_a_ring_sends():
    sends = {op: bytes_sent(op, 1000, 4) for op in collectives.COLLECTIVES}
    assert sends == {
        collectives.all_reduce: 1500,
        collectives.all_gather: 3000,
        collectives.reduce_scatter: 750,
        collectives.all_to_all: 750,
        collectives.axis_slice: 0,
        collectives.axis_index: 0,
    }


def test_collectives_cannot_run_without_a_runtime():
    with pytest.raises(NotImplementedError):
        collectives.all_reduce(torch.zeros(2), "sum", "dp")


# ---- optimizer updates


@pytest.mark.parametrize("update", UPDATES.values(), ids=lambda u: name_of(u.op))
def test_an_update_computes_what_its_kernel_does_and_changes_nothing(update):
    names = [a.name for a in update.op._schema.arguments]
    values = {
        "lr": torch.tensor(0.1), "lr_decay": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8,
        "amsgrad": True, "maximize": False, "momentum": 0.9, "dampening": 0.1, "nesterov": False,
        "is_first_step": False,
    }  # fmt: skip
    lists = {name: torch.tensor(2.0) if name == "state_steps" else torch.rand(3) + 1 for name in update.lists}
    given = {name: (lists | values).get(name) for name in names}
    before = {name: t.clone() for name, t in lists.items()}
    found = update.op(**given)
    assert all(torch.equal(lists[name], before[name]) for name in lists)
    update.kernel(*([t] for t in before.values()), **{n: v for n, v in given.items() if n not in lists})
    assert all(torch.equal(value, before[name]) for value, name in zip(found, update.written, strict=True))
    assert [TensorType.of(t) for t in found] == list(infer(update.op, (), {n: _typed(v) for n, v in given.items()}))
    assert BY_OP[update.op] is update


def _typed(value):
    return TensorType.of(value) if isinstance(value, torch.Tensor) else value


# ---- texts


def test_ops_and_arguments_have_short_texts():
    build = Build(dp=2)
    x = build.input("x", 4, 6)
    part = build(aten.split.Tensor, x, 3, 1)[1]
    assert [op_text(op) for op in (aten.mm.default, aten.add.Scalar, collectives.all_reduce)] == [
        "aten.mm", "aten.add.Scalar", "all_reduce",
    ]  # fmt: skip
    assert (value_text(x), value_text(part), producer(part)) == ("%x", "%split[1]", (part.args[0], 1))
    assert argument_text([x, 1, 2.5, None, True]) == "[%x, 1, 2.5, None, ... 1 more]"
    assert argument_text([0] * SHOWN_ARGUMENTS) == "[0, 0, 0, 0]"
    assert argument_text((torch.float32, torch.device("cpu"), "mean")) == "[f32, cpu, mean]"


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (aten.mm.default, "mm"), (aten.native_layer_norm_backward.default, "layer_norm_backward"),
        (aten._log_softmax.default, "log_softmax"), (aten._to_copy.default, "to_copy"),
        (aten._scaled_dot_product_flash_attention_for_cpu.default, "attention"),
        (aten._scaled_dot_product_flash_attention_for_cpu_backward.default, "attention_backward"),
        (aten._scaled_dot_product_efficient_attention.default, "attention"), (collectives.all_reduce, "all_reduce"),
    ],
)  # fmt: skip
def test_nodes_have_short_names(op, name):
    assert name_of(op) == name


def linear_layers(**axes: int) -> Program:
    """The example of design.md 3: two layers."""
    build = Build(local=False, **axes)
    x = build.input("x", 8, 16)
    w1, w2 = build.parameter("fc1.weight", 64, 16), build.parameter("fc2.weight", 16, 64)
    h = build(aten.mm.default, x, build(aten.t.default, w1))
    return build.program(build(aten.mm.default, h, build(aten.t.default, w2)), name="train_step")


def tensor_parallel(program: Program) -> Program:
    """Columns of the first layer and rows of the second along "tp"."""
    column = Rule((REPLICATE, shard(1)), (shard(1),))
    row = Rule((shard(1), shard(0)), (PARTIAL,))
    inputs = [REPLICATE, shard(0), shard(1)]
    return partition(program, follow(program, "tp", inputs, mm=column, mm_1=row))


def test_text_of_a_global_program():
    check_text(program_text(linear_layers(dp=2, tp=2)), "layers_global.txt")


def test_text_along_one_axis():
    check_text(program_text(tensor_parallel(linear_layers(tp=2))), "layers_tp.txt")


def test_text_along_two_axes():
    local = tensor_parallel(linear_layers(dp=2, tp=2))
    local = partition(local, follow(local, "dp", [shard(0), REPLICATE, REPLICATE]))
    verify_program(local, types=True)
    check_text(program_text(local), "layers_dp_tp.txt")


def test_text_of_a_train_step():
    step = lowered(optimizer=torch.optim.SGD)
    check_text(step.as_text("global"), "train_step_global.txt")
    check_text(step.as_text("local"), "train_step_local.txt")
    check_text(step.as_text("torch").strip() + "\n", "train_step_torch.txt")
    assert str(step) == step.as_text()
    verify_program(step.program, types=True)
    verify_program(step.local_program, types=True)


HASHED = """
import torch
from models import Gpt, labels
import meshstep as ms
def step(model, optimizer, x, y):
    loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss
model = Gpt(tied=True, layers=2)
optimizer = torch.optim.AdamW(model.parameters())
x = labels(0, 5, classes=16)
lowered = ms.compile(mesh=ms.Mesh(dp=4))(step).lower(model, optimizer, x, x)
print(*map(lowered.as_text, ("global", "local", "torch")), lowered.plan, lowered.communication, sep="\\n")
"""


def test_texts_are_the_same_bytes_in_every_process():
    """Whatever the seed of Python's hashes, and so the order of its sets."""
    here = str(Path(__file__).parent)
    texts = [
        subprocess.run(
            [sys.executable, "-c", HASHED],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": here},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]) > 10_000


# ---- programs


def test_a_copy_is_private():
    program = linear_layers(dp=2)
    new, copies = program.copy()
    assert program_text(new) == program_text(program)
    assert set(copies.values()).isdisjoint(program.graph.nodes)
    copies[program.calls[0]].meta["source"] = "changed"
    assert program.calls[0].meta["source"] == "step.py:1"


def test_slots_and_results_are_what_they_say():
    program = linear_layers(dp=2)
    assert [f"{slot}: {node.name}" for slot, node in program.inputs] == [
        "argument x: x",
        "parameter fc1.weight: fc1_weight",
        "parameter fc2.weight: fc2_weight",
    ]
    assert [f"{result}: {node.name}" for result, node in program.outputs] == ["output 0: mm_1"]
    assert str(Result("w", Slot(SlotKind.PARAMETER, "w"))) == "parameter w"


def test_communication_is_in_the_order_of_the_program():
    build = Build(dp=2, tp=4)
    x = build.input("x", 4, dp=PARTIAL)
    program = build.program(build.all_gather(build.axis_slice(build.all_reduce(x), 0, "tp"), 0, "tp"))
    found = [(c.kind, c.axis, c.bytes) for c in communication(program)]
    assert found == [("all_reduce", "dp", 32), ("all_gather", "tp", 24)]


# ---- the verifier


def broken(change) -> str:
    """What is said of a program that `change` has broken."""
    build = Build(dp=2)
    x, w = build.input("x", 4, 6, dp=shard(0)), build.parameter("w", 4, 6)
    first, second = build(aten.split.Tensor, x, 3, 1)
    total = build.all_reduce(build(aten.add.Tensor, first, second))
    program = build.program(total, w=build(aten.neg.default, w))
    changed = change(program, {node.name: node for node in program.graph.nodes})
    with pytest.raises(ms.PassError) as caught:
        verify_program(changed or program, types=True)
    return f"{caught.value}\n"


def _set(node, key, value):
    node.meta[key] = value


@pytest.mark.parametrize(
    ("change", "golden"),
    [
        (lambda p, n: n["x"].prepend(n["neg"]) or n["w"].append(n["x"]), "used_before.txt"),
        (lambda p, n: n["neg"].meta.pop("layout") and None, "no_layout.txt"),
        (lambda p, n: _set(n["add"], "type", TensorType(torch.float32, (4, 3))), "wrong_type.txt"),
        (lambda p, n: _set(n["split_part_1"], "type", TensorType(torch.float32, (4, 3))), "wrong_part.txt"),
        (lambda p, n: setattr(n["split_part"], "args", (n["split"], 2)), "no_part.txt"),
        (lambda p, n: setattr(n["all_reduce"], "args", (n["add"], "sum", "tp")), "no_axis.txt"),
        (lambda p, n: replace(p, slots=p.slots[:1]), "slots.txt"),
        (lambda p, n: _set(n["all_reduce"], "layout", Layout((("dp", PARTIAL),))), "partial_output.txt"),
        (lambda p, n: _set(n["neg"], "layout", Layout((("dp", shard(0)),))), "state_moved.txt"),
    ],
    ids=lambda v: v.removesuffix(".txt") if isinstance(v, str) else "",
)
def test_a_broken_program_is_refused_with_the_lines_around_the_fault(change, golden):
    check_text(broken(change), f"errors/verifier_{golden}")
