"""Each pass: its text, that it is exact, that a second application changes nothing, and what it sends."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest
import torch
from golden_step import lowered
from hypothesis import given, settings
from hypothesis import strategies as st
from support import Build, check_equal, check_pass, check_text, draw, run_ranks

import meshstep as ms
from meshstep.ir.printer import program_text
from meshstep.ir.program import Program, SlotKind, communication
from meshstep.ir.verifier import verify_program
from meshstep.layout import PARTIAL, shard
from meshstep.passes import (
    DEFAULT,
    EAGER,
    Bucket,
    CommonSubexpressions,
    DeadCode,
    FoldRedistributions,
    LaunchEarly,
    Pipeline,
    Regather,
    TwoSums,
    pipeline,
)

aten = torch.ops.aten


def sent(program: Program) -> list[tuple[str, int, int]]:
    """Kind, bytes and values of each collective."""
    return [(c.kind, c.bytes, c.count) for c in communication(program)]


def training() -> Program:
    """The local program of a step with AdamW and clipping, before all passes."""
    return lowered(passes=Pipeline(())).local_program


# ---- dead code


def test_dead_code_is_erased_with_what_only_it_used():
    build = Build(dp=2)
    x = build.input("x", 4, dp=PARTIAL)
    build.all_reduce(build(aten.exp.default, x))
    program = build.program(build.all_reduce(x))
    assert sent(check_pass(DeadCode(), program, "dead_code.txt")) == [("all_reduce", 32, 1)]


def test_a_program_without_dead_code_stays_the_same_one():
    build = Build(dp=2)
    program = build.program(build(aten.neg.default, build.input("x", 4)))
    assert DeadCode()(program) is program


def test_an_input_that_nobody_uses_stays():
    build = Build(dp=2)
    build.input("unused", 4)
    made = check_pass(DeadCode(), build.program(build.input("x", 4)))
    assert [slot.name for slot in made.slots] == ["unused", "x"]


# ---- common subexpressions


def test_equal_values_are_computed_and_sent_once():
    build = Build(dp=2)
    x = build.input("x", 4, dp=PARTIAL)
    total = [build(aten.mul.Tensor, build.all_reduce(x), 2.0) for _ in range(3)]
    program = build.program(build(aten.cat.default, total))
    assert sent(check_pass(CommonSubexpressions(), program, "common_subexpressions.txt")) == [("all_reduce", 32, 1)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda b, x: b(aten.mul.Tensor, x, 0.0), lambda b, x: b(aten.mul.Tensor, x, -0.0)),
        (lambda b, x: b(aten.pow.Tensor_Scalar, x, 1), lambda b, x: b(aten.pow.Tensor_Scalar, x, 1.0)),
        (lambda b, x: b(aten.sum.dim_IntList, x, [0]), lambda b, x: b(aten.sum.dim_IntList, x, [1])),
        (lambda b, x: b(aten.rand_like.default, x), lambda b, x: b(aten.rand_like.default, x)),
        (lambda b, x: b.all_reduce(x, "sum"), lambda b, x: b.all_reduce(x, "max")),
        (lambda b, x: b.all_reduce(x, axis="dp"), lambda b, x: b.all_reduce(x, axis="tp")),
        (lambda b, x: b.all_gather(x, 0), lambda b, x: b.all_gather(x, 1)),
    ],
    ids=["sign of zero", "int and float", "dim", "random", "reduction", "axis", "gathered dim"],
)
def test_values_that_differ_stay_apart(first, second):
    build = Build(dp=2, tp=2)
    x = build.input("x", 4, 4)
    program = build.program(first(build, x), second(build, x))
    assert CommonSubexpressions()(program) is program


def test_equal_parts_of_values_of_different_layout_stay_apart():
    build = Build(dp=2)
    whole = build(aten.full.default, [4], 1.0, dtype=torch.float64)
    part = build(aten.full.default, [4], 1.0, dtype=torch.float64, layout=build.layout(dp=shard(0)))
    program = build.program(whole, part)
    made = CommonSubexpressions()(program)
    assert [str(node.meta["layout"]) for _, node in made.outputs] == ["R@dp", "S(0)@dp"]


def test_parts_of_equal_calls_are_merged():
    build = Build(dp=2)
    x = build.input("x", 4)
    first, second = (build(aten.split.Tensor, x, 2) for _ in range(2))
    made = check_pass(CommonSubexpressions(), build.program(build(aten.add.Tensor, first[0], second[0])))
    assert [node.name for node in made.calls] == ["split", "add"]


# ---- changes of placement that fold

FOLDED = FoldRedistributions()


def test_a_gather_of_a_slice_and_a_slice_of_a_gather_are_the_value():
    build = Build(dp=2)
    x, y = build.input("x", 4, 6), build.input("y", 2, 6, dp=shard(0))
    back = build.all_gather(build.axis_slice(x, 1), 1)
    there = build.axis_slice(build.all_gather(y, 0), 0)
    made = check_pass(FOLDED, build.program(build(aten.neg.default, back), build(aten.neg.default, there)))
    assert [node.name for node in made.calls] == ["neg", "neg_1"]


def test_another_dim_does_not_fold():
    build = Build(dp=2)
    x, y = build.input("x", 4, 6), build.input("y", 2, 6, dp=shard(0))
    program = build.program(build.all_gather(build.axis_slice(x, 1), 0), build.axis_slice(build.all_gather(y, 0), 1))
    assert FOLDED(program) is program


def test_a_slice_of_a_sum_is_a_scattered_sum():
    build = Build(dp=2)
    x = build.input("x", 4, 6, dp=PARTIAL)
    made = check_pass(FOLDED, build.program(build.axis_slice(build.all_reduce(x), 1)), "fold_scatter.txt")
    assert sent(made) == [("reduce_scatter", 96, 1)]


def test_a_sum_that_others_need_stays():
    build = Build(dp=2)
    total = build.all_reduce(build.input("x", 4, 6, dp=PARTIAL))
    program = build.program(build.axis_slice(total, 1), total)
    assert FOLDED(program) is program


def test_a_gather_of_a_scattered_sum_is_a_sum():
    build = Build(dp=2)
    x = build.input("x", 4, 6, dp=PARTIAL)
    made = check_pass(FOLDED, build.program(build.all_gather(build.reduce_scatter(x, 0), 0)))
    assert sent(made) == [("all_reduce", 192, 1)]


@pytest.mark.parametrize("narrow_first", [True, False])
def test_values_are_gathered_in_the_narrower_dtype(narrow_first):
    build = Build(dp=2)
    have, want = (torch.float32, torch.float64) if narrow_first else (torch.float64, torch.float32)
    x = build.input("x", 2, 6, dp=shard(0), dtype=have)
    if narrow_first:
        value = build.all_gather(build(aten._to_copy.default, x, dtype=want))
    else:
        value = build(aten._to_copy.default, build.all_gather(x), dtype=want)
    made = check_pass(FOLDED, build.program(value), "fold_cast_last.txt" if narrow_first else "fold_cast_first.txt")
    assert sent(made) == [("all_gather", 48, 1)]


def test_rows_are_picked_before_the_sum():
    build = Build(dp=2, tp=2)
    x = build.input("x", 4, 6, tp=PARTIAL, dp=shard(1))
    picked = build(aten.select.int, build.all_reduce(x, axis="tp"), 0, 1)
    made = check_pass(FOLDED, build.program(build(aten.neg.default, picked)), "fold_rows.txt")
    assert sent(made) == [("all_reduce", 48, 1)]


def test_two_sums_that_are_added_are_sent_once():
    build = Build(dp=2)
    x, y = (build.input(name, 4, dp=PARTIAL) for name in "xy")
    program = build.program(build(aten.sub.Tensor, build.all_reduce(x), build.all_reduce(y), alpha=2))
    made = FOLDED(program)
    assert sent(made) == [("all_reduce", 32, 1)] and FOLDED(made) is made
    verify_program(made, types=True)
    check_equal(run_ranks(made, draw(program)), run_ranks(program, draw(program)), within=1e-14)


def test_sums_of_another_kind_or_shape_are_sent_apart():
    build = Build(dp=2)
    x, y, z = build.input("x", 4, dp=PARTIAL), build.input("y", 4, dp=PARTIAL), build.input("z", 1, dp=PARTIAL)
    program = build.program(
        build(aten.add.Tensor, build.all_reduce(x), build.all_reduce(y, "max")),
        build(aten.add.Tensor, build.all_reduce(x), build.all_reduce(z)),
    )
    assert FOLDED(program) is program


# ---- buckets


def reduced(*shapes: tuple[int, ...], **axes: int) -> Program:
    """Each input squared, reduced, and halved."""
    build = Build(**(axes or {"dp": 2}))
    ends = []
    for i, shape in enumerate(shapes):
        x = build(aten.square.default, build.input(f"x{i}", *shape, dp=PARTIAL))
        ends.append(build(aten.mul.Tensor, build.all_reduce(x, axis="dp"), 0.5))
    return build.program(*ends)


def test_all_reduces_are_joined():
    made = check_pass(Bucket(), reduced((4,), (2, 3), (), (0, 3)), "bucket.txt")
    assert sent(made) == [("all_reduce", 11 * 8, 4)]


@pytest.mark.parametrize(
    ("limit", "counts"), [(1, [1, 1, 1, 1]), (16, [1, 1, 1, 1]), (32, [2, 2]), (48, [3, 1]), (64, [4]), (2**30, [4])]
)
def test_a_bucket_is_no_larger_than_the_limit(limit, counts):
    made = check_pass(Bucket(limit), reduced(*[(2,)] * 4))
    assert [count for _, _, count in sent(made)] == counts


def test_a_value_larger_than_the_limit_has_a_bucket_of_its_own():
    made = check_pass(Bucket(32), reduced((2,), (100,), (2,), (2,)))
    assert sorted(sent(made)) == [("all_reduce", 16, 1), ("all_reduce", 32, 2), ("all_reduce", 800, 1)]


def test_a_bucket_is_full_with_what_the_link_carries_in_ten_latencies():
    build = Build(dp=2)
    values = [build.input(f"x{i}", 50_000, dp=PARTIAL) for i in range(5)]  # 400 kB each, on CPU: 100 us at 1 GB/s
    made = check_pass(Bucket(), build.program(*map(build.all_reduce, values)))
    assert [count for _, _, count in sent(made)] == [2, 2, 1]


def test_what_depends_on_a_reduced_value_is_reduced_later():
    build = Build(dp=2)
    x, y = (build.input(name, 2, dp=PARTIAL) for name in "xy")
    first, second = build.all_reduce(x), build.all_reduce(y)
    third = build.all_reduce(build(aten.mul.Tensor, first, y))
    fourth = build.all_reduce(build(aten.mul.Tensor, x, second))
    made = check_pass(Bucket(), build.program(build(aten.add.Tensor, third, fourth)), "bucket_levels.txt")
    assert sent(made) == [("all_reduce", 32, 2), ("all_reduce", 32, 2)]


def test_a_user_that_stands_before_the_bucket_moves_behind_it():
    build = Build(dp=2)
    x, y = (build.input(name, 2, dp=PARTIAL) for name in "xy")
    early = build(aten.exp.default, build.all_reduce(x))
    late = build.all_reduce(build(aten.sin.default, y))
    made = check_pass(Bucket(), build.program(early, late))
    assert sent(made) == [("all_reduce", 32, 2)]


def test_only_what_is_alike_is_joined():
    build = Build(dp=2, tp=2)
    x = build.input("x", 2)
    y = build.input("y", 2, dtype=torch.float32)
    calls = [(x, "sum", "dp"), (x, "max", "dp"), (x, "sum", "tp"), (y, "sum", "dp")]
    ends = [build.all_reduce(value, op, axis) for value, op, axis in calls for _ in range(2)]
    made = check_pass(Bucket(), build.program(*ends))
    assert [count for _, _, count in sent(made)] == [2, 2, 2, 2]


def test_what_no_collective_waits_for_rides_with_the_last_one():
    build = Build(dp=2)
    x, y, extra = (build.input(name, 2, dp=PARTIAL) for name in ("x", "y", "extra"))
    count, statistic = build.all_reduce(x), build.all_reduce(build(aten.sin.default, extra))
    gradient = build.all_reduce(build(aten.mul.Tensor, count, y))
    made = check_pass(Bucket(), build.program(statistic, gradient))
    assert [count for _, _, count in sent(made)] == [1, 2]


def test_layouts_are_kept():
    build = Build(dp=2, tp=2)
    values = [build.input(n, 2, 2, dp=PARTIAL, tp=shard(1)) for n in "xy"]
    made = check_pass(Bucket(), build.program(*(build.all_reduce(x, axis="dp") for x in values)))
    assert [str(node.meta["layout"]) for _, node in made.outputs] == ["S(1)@tp R@dp"] * 2


# ---- order


def test_a_collective_starts_behind_the_last_value_that_it_needs():
    build = Build(dp=2)
    x = build.input("x", 4, dp=PARTIAL)
    sums = [x]
    for _ in range(3):
        sums.append(build(aten.mul.Tensor, sums[-1], 0.5))
    gone = build.all_reduce(sums[1])
    made = check_pass(LaunchEarly(cheap=0), build.program(build(aten.add.Tensor, gone, sums[-1])), "launch_early.txt")
    assert [node.name for node in made.calls] == ["mul", "all_reduce", "mul_1", "mul_2", "add"]


def test_what_a_cheap_collective_needs_goes_first():
    build = Build(dp=2)
    x, count = build.input("x", 4, dp=PARTIAL), build.input("count", dp=PARTIAL)
    end = x
    for _ in range(3):
        end = build(aten.mul.Tensor, end, 0.5)
    total = build.all_reduce(build(aten.neg.default, count))
    made = check_pass(LaunchEarly(), build.program(build(aten.mul.Tensor, total, end)))
    assert [node.name for node in made.calls] == ["neg", "all_reduce", "mul", "mul_1", "mul_2", "mul_3"]


def test_random_numbers_are_drawn_in_the_order_of_the_program():
    build = Build(dp=2)
    x = build.input("x", 4)
    first = build(aten.rand_like.default, x)
    second = build.all_reduce(build(aten.rand_like.default, x))
    program = build.program(first, second)
    assert [n.name for n in LaunchEarly()(program).calls] == ["rand_like", "rand_like_1", "all_reduce"]


# ---- statistics


def statistics(*args, **kwargs) -> Program:
    build = Build(dp=2)
    return build.program(*build(aten.var_mean.correction, build.input("x", 3, 4, 2), *args, **kwargs))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (([0, 2],), {"correction": 0, "keepdim": True}),
        (([-1],), {}),
        ((), {"correction": 1.5}),
        ((None,), {}),
        (([0, 1, 2],), {"correction": 24}),
    ],
    ids=str,
)
def test_variance_and_mean_by_sums(args, kwargs):
    program = statistics(*args, **kwargs)
    made = TwoSums()(program)
    assert not any(node.target is aten.var_mean.correction for node in made.calls)
    verify_program(made, types=True)
    assert TwoSums()(made) is made
    check_equal(run_ranks(made, draw(program)), run_ranks(program, draw(program)), within=1e-14)


def test_the_text_of_variance_and_mean_by_sums():
    check_text(program_text(TwoSums()(statistics([0, 2], correction=0))), "two_sums.txt")


def test_complex_and_narrow_numbers_stay_one_op():
    build = Build(dp=2)
    x = build.input("x", 4, dtype=torch.bfloat16)
    program = build.program(*build(aten.var_mean.correction, x))
    assert TwoSums()(program) is program


# ---- gathered again


def test_parameters_gathered_again_change_no_number_and_are_gathered_again_once():
    program = lowered(plan=ms.plans.fsdp(), passes=Pipeline(())).local_program
    made = Regather()(program)
    gathers = [[kind for kind, _, _ in sent(p)].count("all_gather") for p in (program, made)]
    assert gathers[1] > gathers[0] > 0
    verify_program(made, types=True)
    assert Regather()(made) is made
    check_equal(run_ranks(made, draw(program)), run_ranks(program, draw(program)))


# ---- all of them


@st.composite
def local_programs(draw) -> Program:
    """Random arithmetic over a few values, with many collectives in it."""
    build = Build(dp=2)
    values = [build.input(f"x{i}", 2, dp=PARTIAL) for i in range(2)]
    for _ in range(draw(st.integers(2, 16))):
        a, b = (values[draw(st.integers(0, len(values) - 1))] for _ in range(2))
        match draw(st.sampled_from(["reduce", "reduce", "max", "add", "double", "gather"])):
            case "reduce":
                values.append(build.all_reduce(a))
            case "max":
                values.append(build.all_reduce(a, "max"))
            case "add":
                values.append(build(aten.add.Tensor, a, b))
            case "double":
                values.append(build(aten.mul.Tensor, a, 0.5))
            case "gather":
                values.append(build(aten.slice.Tensor, build.all_gather(a), 0, 1, 3))
    ends = [build.all_reduce(value, "max") for value in values[-draw(st.integers(1, 3)) :]]
    return build.program(*ends)


@pytest.mark.parametrize("pass_", [CommonSubexpressions(), DeadCode(), Bucket(40), Bucket(), LaunchEarly(2)], ids=repr)
@given(program=local_programs())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_any_program(pass_, program):
    check_pass(pass_, program)


@pytest.mark.parametrize("pass_", [*DEFAULT, TwoSums(), Bucket(200)], ids=repr)
def test_a_train_step(pass_):
    check_pass(pass_, training())


def test_the_default_passes_on_a_train_step():
    program = training()
    made = replace(DEFAULT, check_types=True)(program)
    assert sent(made) == [("all_reduce", 8, 1), ("all_reduce", 8 * (8 * 6 + 8 + 4 * 8 + 4 + 1), 5)]


def test_a_pipeline_that_has_run_changes_nothing():
    made = DEFAULT(training())
    for pass_ in DEFAULT:
        assert pass_(made) is made, pass_


@dataclass(frozen=True)
class ComputeBeforeInputs:
    """A pass with a fault: the last call goes first."""

    def __call__(self, program: Program) -> Program:
        new, _ = program.copy()
        new.calls[0].prepend(new.calls[-1])
        return new


@dataclass(frozen=True)
class WrongType:
    """A pass with a fault that only the types show."""

    def __call__(self, program: Program) -> Program:
        new, _ = program.copy()
        new.calls[0].target = aten.logical_not.default
        return new


def pipeline_error(pass_, **options) -> str:
    build = Build(dp=2)
    values = [build.input("w", 4, kind=SlotKind.PARAMETER)]
    for op in (aten.neg, aten.exp, aten.sin, aten.cos):
        values.append(build(op.default, values[-1]))
    with pytest.raises(ms.PassError) as caught:
        Pipeline((DeadCode(), pass_), **options)(build.program(values[-1]))
    return f"{caught.value}\n"


def test_a_broken_pass_is_named_with_the_lines_around_the_fault():
    check_text(pipeline_error(ComputeBeforeInputs()), "errors/pass_order.txt")


def test_a_pass_that_returns_nothing_is_named():
    @dataclass(frozen=True)
    class Forgetful:
        def __call__(self, program: Program) -> None:
            program.copy()

        def __repr__(self) -> str:
            return "Forgetful()"

    check_text(pipeline_error(Forgetful()), "errors/pass_nothing.txt")


def test_a_pass_that_makes_wrong_types_is_named():
    check_text(pipeline_error(WrongType(), check_types=True), "errors/pass_type.txt")


def test_the_users_passes_run_in_the_place_of_the_default_ones():
    made = lowered(passes=Pipeline((DeadCode(),))).local_program
    assert [count for _, _, count in sent(made)] == [1] * 6
    verify_program(made, types=True)


def test_what_comes_out_of_a_bucket_lies_as_the_user_sees_it():
    """Also where it has the very shape that it has in the bucket: a row of one."""
    build = Build(dp=2)
    partial = [build.input(name, 1, n, dp=PARTIAL) for name, n in (("a", 4), ("b", 6))]
    made = Bucket()(build.program(*(build.reduce_scatter(x, 1) for x in partial)))
    assert sum(n.target is torch.ops.meshstep.reduce_scatter.default for n in made.calls) == 1
    assert [str(node.meta["layout"]) for _, node in made.outputs] == ["S(1)@dp"] * 2
    verify_program(made, types=True)


# ---- the text form, and what passes did


@pytest.mark.parametrize("given", [DEFAULT, EAGER, Pipeline(()), Pipeline((Bucket(1, 2), LaunchEarly(3, False)))])
def test_a_pipeline_is_its_text(given):
    assert pipeline(str(given)) == given
    assert str(pipeline(str(given))) == str(given)


def test_the_text_form_of_the_default_pipelines():
    assert str(DEFAULT) == "common_subexpressions | dead_code | fold_redistributions | regather | bucket | launch_early"
    assert str(EAGER) == (
        "common_subexpressions | dead_code | fold_redistributions | regather | two_sums | "
        "bucket(shard_bytes=524288) | launch_early(prefetch=False)"
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("dead_code | fuse", "no pass 'fuse'"),
        ("bucket(bytes=3)", "bucket has no such options"),
        ("bucket(3)", "no pass: a name, and options as name=value"),
        ("dead_code()()", "no pass: a name"),
        ("__import__('os')", "no pass: a name"),
        ("bucket(bucket_bytes=print(1))", "no pass: malformed"),
        ("dead code", "no pass: invalid syntax"),
    ],
)
def test_a_text_that_is_no_pipeline_is_refused(text, error):
    with pytest.raises(ms.InputError, match=re.escape(error)):
        pipeline(text)


def test_the_text_form_is_taken_by_compile_and_simulate():
    model = torch.nn.Linear(4, 4)

    def step(model, x):
        return model(x).sum()

    text = "dead_code | launch_early"
    lowered = ms.compile(mesh=ms.Mesh(dp=2), passes=text)(step).lower(model, torch.ones(2, 4))
    assert [str(record).split(":")[0] for record in lowered.passes] == ["dead_code", "launch_early"]
    torch.testing.assert_close(
        ms.simulate(step, mesh=ms.Mesh(dp=2), passes=text)(model, torch.ones(2, 4)), step(model, torch.ones(2, 4))
    )
    with pytest.raises(ms.InputError, match="no pass 'nothing'"):
        ms.compile(passes="nothing")


def test_what_each_pass_did_is_told():
    build = Build(dp=2)
    x = build.input("x", 4)
    build(aten.exp.default, x)  # nobody uses it
    program = build.program(build(aten.neg.default, x))
    records = []
    Pipeline((DeadCode(), Bucket()))(program, records.append, texts=True)
    assert [(r.name, r.changed, r.calls) for r in records] == [("dead_code", True, (2, 1)), ("bucket", False, (1, 1))]
    assert "aten.exp" in records[0].before and "aten.exp" not in records[0].after
    assert re.fullmatch(r"dead_code: 2 -> 1 calls in \d+\.\d{3} s", str(records[0]))
    assert re.fullmatch(r"bucket: nothing to do in \d+\.\d{3} s", str(records[1]))
