"""Partition: every change of placement, on every dim, along one axis and along a second one, against the whole run."""

from __future__ import annotations

import itertools
from dataclasses import replace

import golden_step
import pytest
import torch
from support import Build, check_equal, check_text, draw, follow, run_local, run_whole

from meshstep import LayoutError, Mesh, RuleError
from meshstep.ir import collectives
from meshstep.ir.printer import program_text
from meshstep.ir.program import Program, SlotKind, communication
from meshstep.ir.types import TensorType
from meshstep.ir.verifier import verify_program
from meshstep.layout import PARTIAL, REPLICATE, placement_text, shard
from meshstep.partition import partition, redistribution
from meshstep.plan.decide import decide
from meshstep.plan.named import data_parallel
from meshstep.rules import Rule

aten = torch.ops.aten
WANTED = (REPLICATE, shard(0), shard(1), shard(2))
MOVES = [(have, want) for have in (PARTIAL, *WANTED) for want in WANTED]
KINDS = {
    ("P", "R"): "all_reduce",
    ("P", "S"): "reduce_scatter",
    ("S", "R"): "all_gather",
    ("S", "S"): "all_to_all",
    ("R", "S"): "axis_slice",
}


def kind_of(have, want) -> str | None:
    return None if have == want else KINDS[placement_text(have)[0], placement_text(want)[0]]


def ids(value) -> str | None:
    return placement_text(value) if not isinstance(value, int) else str(value)


def summed(**axes: int) -> Program:
    """`-x.sum(3)`: x sharded along dim 3 makes a partial sum."""
    build = Build(local=False, **axes)
    total = build(aten.sum.dim_IntList, build.input("x", 4, 8, 4, 8), [3])
    return build.program(build(aten.neg.default, total))


def moved(program: Program, axis: str, have, want) -> Program:
    """The program partitioned so that the sum comes out as `have`, and is used as `want`."""
    given = shard(3) if have == PARTIAL else have
    rules = {"sum_1": Rule((given,), (have,)), "neg": Rule((want,), (want,))}
    return partition(program, follow(program, axis, [given], **rules))


def targets(program: Program) -> list[str]:
    return [n.target._schema.name.split("::")[-1] for n in program.calls if n.target in collectives.COLLECTIVES]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("have", "want"), MOVES, ids=ids)
def test_a_change_of_placement_is_one_collective_and_gives_the_same_numbers(have, want, size):
    program = summed(dp=size)
    local = moved(program, "dp", have, want)
    verify_program(local, types=True)
    assert targets(local) == ([kind_of(have, want)] if have != want else [])
    x = draw(program)[0]
    check_equal(run_local(local, x), run_whole(program, x), within=1e-14)


@pytest.mark.parametrize("first", MOVES, ids=lambda m: "-".join(map(placement_text, m)))
def test_the_second_axis_partitions_a_program_that_holds_collectives_of_the_first(first):
    program = summed(dp=2, tp=2)
    x = draw(program)[0]
    whole = run_whole(program, x)
    inner = moved(program, "tp", *first)
    for outer in (shard(0), shard(1), shard(2), shard(3), REPLICATE):
        local = partition(inner, follow(inner, "dp", [outer]))
        verify_program(local, types=True)
        assert local.axes == ("tp", "dp")
        check_equal(run_local(local, x), whole, within=1e-14)


@pytest.mark.parametrize("second", MOVES, ids=lambda m: "-".join(map(placement_text, m)))
def test_a_change_of_placement_along_the_outer_axis_after_one_along_the_inner(second):
    program = summed(dp=2, tp=2)
    x = draw(program)[0]
    whole = run_whole(program, x)
    for first in ((shard(0), shard(0)), (PARTIAL, REPLICATE), (REPLICATE, shard(1))):
        inner = moved(program, "tp", *first)
        local = moved(inner, "dp", *second)
        verify_program(local, types=True)
        check_equal(run_local(local, x), whole, within=1e-14)


def test_one_dim_split_over_two_axes_is_split_by_the_inner_one_first():
    program = summed(dp=2, tp=2)
    inner = moved(program, "tp", shard(0), shard(0))
    local = moved(inner, "dp", shard(0), shard(0))
    assert str(local.placeholders[0].meta["layout"]) == "S(0)@tp S(0)@dp"
    assert local.placeholders[0].meta["type"].shape == (1, 8, 4, 8)
    x = draw(program)[0]
    check_equal(run_local(local, x), run_whole(program, x))


def test_three_axes():
    program = summed(pp=2, dp=2, tp=2)
    x = draw(program)[0]
    local = program
    for axis, move in (("tp", (PARTIAL, shard(0))), ("dp", (shard(2), shard(1))), ("pp", (shard(1), shard(1)))):
        local = moved(local, axis, *move) if axis != "pp" else partition(local, follow(local, axis, [shard(1)]))
        verify_program(local, types=True)
    check_equal(run_local(local, x), run_whole(program, x), within=1e-14)


def test_a_value_that_several_consumers_want_alike_moves_once():
    build = Build(local=False, dp=2)
    x = build.input("x", 4, 4)
    y = build(aten.neg.default, x)
    program = build.program(build(aten.exp.default, y), build(aten.sin.default, y), y)
    whole = Rule((REPLICATE,), (REPLICATE,))
    decision = follow(program, "dp", [shard(0)], exp=whole, sin=whole)
    local = partition(program, decision)
    assert targets(local) == ["all_gather"]
    assert communication(local)[0].why == "%neg is S(0), exp needs R"


def test_a_partial_value_is_reduced_before_it_is_returned():
    program = summed(dp=2)
    inner = follow(program, "dp", [shard(3)], neg=Rule((PARTIAL,), (PARTIAL,)))
    local = partition(program, inner)
    assert targets(local) == ["all_reduce"]
    x = draw(program)[0]
    check_equal(run_local(local, x), run_whole(program, x), within=1e-14)


def test_sizes_in_arguments_are_those_of_one_rank():
    build = Build(local=False, dp=2)
    x = build.input("x", 4, 6)
    y = build(aten.view.default, x, [4, 2, 3])
    program = build.program(build(aten.expand.default, build(aten.sum.dim_IntList, y, [1], True), [4, 5, 3]))
    x0 = draw(program)[0]
    for dim, sizes in ((0, [2, 2, 3]), (1, [4, 1, 3])):
        local = partition(program, follow(program, "dp", [shard(dim)]))
        verify_program(local, types=True)
        assert next(n for n in local.calls if n.target is aten.view.default).args[1] == sizes
        check_equal(run_local(local, x0), run_whole(program, x0), within=1e-14)


def test_an_op_with_several_outputs_keeps_its_parts():
    build = Build(local=False, dp=2)
    a, b = build(aten.split.Tensor, build.input("x", 4, 6), 3, 1)
    program = build.program(build(aten.add.Tensor, a, b), a)
    local = partition(program, follow(program, "dp", [shard(0)]))
    verify_program(local, types=True)
    x = draw(program)[0]
    check_equal(run_local(local, x), run_whole(program, x))


def test_the_program_is_not_changed():
    program = summed(dp=2)
    before = program_text(program)
    moved(program, "dp", shard(0), REPLICATE)
    assert program_text(program) == before
    assert program.axes == ()


def test_partition_carries_line_and_reason():
    program = summed(dp=2)
    record = communication(moved(program, "dp", PARTIAL, REPLICATE))[0]
    assert (record.kind, record.axis, record.dtype, record.count) == ("all_reduce", "dp", torch.float64, 1)
    assert (record.source, record.why) == ("step.py:1", "%sum_1 is P(sum), neg needs R")
    assert record.bytes == 4 * 8 * 4 * 8  # 2 (N - 1) / N of it, with N = 2


@pytest.mark.parametrize("size", [2, 4, 8])
def test_bytes_are_those_of_a_ring(size):
    program = summed(dp=size)
    nbytes = 4 * 8 * 4 * 8
    want = {"all_reduce": 2 * (size - 1), "all_gather": size - 1, "reduce_scatter": size - 1}
    for have, wish in itertools.product((PARTIAL, shard(1)), (REPLICATE, shard(1))):
        if have == wish:
            continue
        record = communication(moved(program, "dp", have, wish))[0]
        assert record.bytes == want[record.kind] * nbytes // size, record.kind


def test_a_dim_that_does_not_divide_is_refused():
    with pytest.raises(LayoutError) as caught:
        moved(summed(dp=3), "dp", shard(0), shard(0))
    check_text(f"{caught.value}\n", "errors/uneven_dim.txt")


def test_a_local_form_that_breaks_its_word_is_named():
    program = summed(dp=2)
    wrong = Rule((shard(0),), (REPLICATE,), local=lambda form: (form.again(),))
    with pytest.raises(RuleError) as caught:
        partition(program, follow(program, "dp", [shard(0)], sum_1=wrong))
    check_text(f"{caught.value}\n", "errors/local_form.txt")


def test_no_collective_makes_a_partial_value():
    with pytest.raises(AssertionError, match=r"no collective makes P\(sum\) of R"):
        redistribution(REPLICATE, PARTIAL, "dp", 2)


def test_one_rank_is_a_mesh_too():
    program = summed(dp=1)
    local = moved(program, "dp", shard(0), shard(1))
    assert local.mesh == Mesh(dp=1)
    x = draw(program)[0]
    check_equal(run_local(local, x), run_whole(program, x))
    assert local.placeholders[0].meta["type"] == TensorType(torch.float64, (4, 8, 4, 8))


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 8}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2, "tp": 2}], ids=str)
def test_a_train_step_over_any_mesh(axes):
    program = golden_step.lowered(optimizer=torch.optim.SGD).program
    x = draw(program)[0]
    whole = run_whole(program, x)
    local = replace(program, mesh=Mesh(**axes))
    for axis in reversed(axes):
        rows = {slot: shard(0) for slot in program.slots if slot.kind is SlotKind.ARGUMENT}
        local = partition(local, decide(local, data_parallel(axis)[axis], rows)[0])
        verify_program(local, types=True)
    check_equal(run_local(local, x), whole, within=1e-13)
    assert communication(local)
