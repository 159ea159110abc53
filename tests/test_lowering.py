"""What torch runs: collectives that start early and are waited for late, and state that is updated in place."""

from __future__ import annotations

import operator

import pytest
import torch
from models import Mlp, built, labels, rows, train_step
from support import Build, check_equal, draw, kinds, programs_for_lowering, run_lowered
from torch import nn

import meshstep as ms
from meshstep.ir.program import Program, is_part
from meshstep.ir.updates import BY_OP
from meshstep.layout import PARTIAL, shard
from meshstep.passes import lower
from meshstep.passes.lower import AxisGroup, kept_results
from meshstep.passes.state import in_place

aten = torch.ops.aten
fused_sgd = next(op for op in BY_OP if "sgd" in op.name())
fused_adamw = next(op for op in BY_OP if "adamw" in op.name())


def lowered(program: Program) -> torch.fx.GraphModule:
    return lower(program, {axis: AxisGroup(axis, program.mesh[axis], 0) for axis in program.mesh})


def ops(program: Program) -> list[str]:
    return kinds(lowered(program))


def count(program: Program, op: str) -> int:
    return ops(program).count(op)


# ---- collectives


@pytest.mark.parametrize("scatters", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_every_collective_along_every_dim(size, scatters):
    for name, program in programs_for_lowering(size).items():
        try:
            run_lowered(program, draw(program), scatters)
        except AssertionError as error:
            raise AssertionError(name) from error


def test_collectives_of_two_axes_take_their_own_groups():
    build = Build(dp=2, tp=4)
    x = build.input("x", 4, 4, dp=PARTIAL, tp=shard(0))
    total = build.all_reduce(x, axis="dp")
    program = build.program(build.all_gather(total, 0, "tp"), build.axis_index("tp"), build.axis_index("dp"))
    found = run_lowered(program, draw(program))
    assert [int(rank["output 1"]) for rank in found] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [int(rank["output 2"]) for rank in found] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_collective_starts_where_it_stands_and_is_waited_for_at_its_first_use():
    build = Build(dp=2)
    x = build.input("x", 4, dp=PARTIAL)
    total = build.all_reduce(x)
    other = build(aten.exp.default, build(aten.neg.default, x))
    program = build.program(build(aten.add.Tensor, total, other))
    assert ops(program) == ["all_reduce", "neg", "exp", "wait_tensor", "add"]
    run_lowered(program, draw(program))


def test_a_value_that_is_used_twice_is_waited_for_once():
    build = Build(dp=2)
    total = build.all_reduce(build.input("x", 4, dp=PARTIAL))
    program = build.program(build(aten.exp.default, total), build(aten.neg.default, total))
    assert ops(program) == ["all_reduce", "wait_tensor", "exp", "neg"]


def test_dim_0_is_sent_as_it_lies():
    build = Build(dp=2)
    x = build.input("x", 4, 6, dp=shard(0))
    assert ops(build.program(build.all_gather(x, 0))) == ["contiguous", "all_gather_into_tensor", "wait_tensor"]


def test_parts_of_a_sum_are_exchanged_where_a_reduce_scatter_sends_all():
    build = Build(dp=2)
    total = build.reduce_scatter(build.input("x", 4, 6, dp=PARTIAL), 0)
    module = lower(build.program(total), {"dp": AxisGroup("dp", 2, 0, scatters=False)})
    assert kinds(module) == ["contiguous", "all_to_all_single", "wait_tensor", "reshape", "sum"]


def test_a_view_of_what_came_back_is_a_reshape():
    """A value that is not contiguous on a rank, and was on one device."""
    build = Build(dp=2)
    x = build(aten.t.default, build.all_gather(build.input("x", 4, 2, dp=shard(1)), 1))
    program = build.program(build(aten.reshape.default, x, [16]))
    next(n for n in program.calls if n.target is aten.reshape.default).target = aten.view.default
    run_lowered(program, draw(program))


# ---- state


def test_new_state_is_copied_into_its_input_and_not_returned():
    build = Build(dp=2)
    w = build.buffer("w", 4)
    loss = build(aten.sum.default, w)
    program = build.program(loss, w=build(aten.mul.Tensor, w, 0.5))
    assert ops(program) == ["sum", "mul", "copy_"]
    assert kept_results(program) == (0,)
    inputs = draw(program)
    before = [rank[0].clone() for rank in inputs]
    run_lowered(program, inputs)
    check_equal([rank[0] for rank in inputs], [t * 0.5 for t in before])


def test_two_buffers_change_places():
    build = Build(dp=2)
    a, b = build.buffer("a", 4), build.buffer("b", 4)
    program = build.program(a=b, b=a)
    inputs = draw(program)
    before = [t.clone() for t in inputs[0]]
    run_lowered(program, inputs)
    check_equal(inputs[0], [before[1], before[0]])


def test_three_buffers_change_places_through_views():
    build = Build(dp=2)
    a, b, c = (build.buffer(name, 3, 3) for name in "abc")
    program = build.program(
        a=build(aten.t.default, b), b=build(aten.flip.default, c, [0]), c=build(aten.view.default, a, [3, 3])
    )
    run_lowered(program, draw(program))


def test_a_buffer_becomes_a_view_of_itself():
    build = Build(dp=2)
    a = build.buffer("a", 3, 3)
    program = build.program(a=build(aten.t.default, a))
    run_lowered(program, draw(program))


def test_one_value_becomes_the_state_of_two_slots():
    build = Build(dp=2)
    a, b = build.buffer("a", 4), build.buffer("b", 4)
    new = build(aten.add.Tensor, a, b)
    program = build.program(a=new, b=new)
    assert count(program, "copy_") == 2
    run_lowered(program, draw(program))


def test_new_state_is_also_returned():
    build = Build(dp=2)
    a = build.buffer("a", 4)
    new = build(aten.neg.default, a)
    program = build.program(new, a=new)
    run_lowered(program, draw(program))


@pytest.mark.parametrize("view", [False, True])
def test_old_state_that_is_returned_is_that_from_before(view):
    build = Build(dp=2)
    a = build.buffer("a", 4, 4)
    program = build.program(build(aten.t.default, a) if view else a, a=build(aten.neg.default, a))
    run_lowered(program, draw(program))


def test_state_is_not_overwritten_while_it_is_sent():
    build = Build(dp=2)
    a = build.buffer("a", 4, dp=shard(0))
    program = build.program(build.all_gather(a), a=build(aten.neg.default, a))
    found = ops(program)
    assert found.index("wait_tensor") < found.index("copy_")
    run_lowered(program, draw(program))


def test_state_that_does_not_change_is_left_alone():
    build = Build(dp=2)
    a = build.buffer("a", 4)
    program = build.program(build(aten.t.default, a))
    assert ops(program) == ["t"]


def test_new_state_that_was_gathered_is_written():
    build = Build(dp=2)
    x = build.input("x", 2, dp=shard(0))
    build.buffer("a", 4)
    program = build.program(a=build.all_gather(x))
    run_lowered(program, draw(program))


# ---- optimizers


def sgd_updates(*shapes: tuple[int, ...], momentum: bool = False, **options) -> tuple[Build, dict]:
    """One update a parameter, its gradient summed over the ranks."""
    build = Build(dp=2)
    lr = build.input("lr")
    state = {}
    for i, shape in enumerate(shapes):
        w = build.parameter(f"w{i}", *shape)
        m = build.state(f"m{i}", *shape) if momentum else None
        g = build.all_reduce(build.input(f"g{i}", *shape, dp=PARTIAL))
        given = {"weight_decay": 0.1, "momentum": 0.9 * momentum, "lr": lr, "dampening": 0.0, "nesterov": False}
        given |= {"maximize": False, "is_first_step": False} | options
        w_new, m_new = build(fused_sgd, w, g, m, **given, layout=build.layout())[:2]
        state |= {f"w{i}": w_new} | ({f"m{i}": m_new} if momentum else {})
    return build, state


@pytest.mark.parametrize("momentum", [False, True])
def test_updates_of_one_kind_are_one_kernel_call_that_writes_where_the_state_lies(momentum):
    build, state = sgd_updates((4, 2), (3,), (), momentum=momentum)
    program = build.program(**state)
    assert ops(program)[-1] == "_fused_sgd_"
    assert count(program, "_fused_sgd_") == 1 and count(program, "copy_") == 0
    run_lowered(program, draw(program))


def test_updates_with_other_options_are_calls_of_their_own():
    build = Build(dp=2)
    lr = build.input("lr")
    state = {}
    for i, decay in enumerate((0.1, 0.2, 0.1)):
        w, g = build.parameter(f"w{i}", 3), build.input(f"g{i}", 3)
        options = {"momentum": 0.0, "lr": lr, "dampening": 0.0, "nesterov": False, "maximize": False}
        state[f"w{i}"] = build(fused_sgd, w, g, None, weight_decay=decay, is_first_step=False, **options)[0]
    program = build.program(**state)
    assert count(program, "_fused_sgd_") == 2
    run_lowered(program, draw(program))


def test_an_update_whose_result_is_used_again_is_not_in_place():
    build, state = sgd_updates((4,), (4,))
    program = build.program(build(aten.sum.default, state["w0"]), **state)
    assert len(in_place(program).updates) == 1
    run_lowered(program, draw(program))


def test_an_update_whose_result_is_returned_is_not_in_place():
    build, state = sgd_updates((4,))
    program = build.program(state["w0"], **state)
    assert not in_place(program).updates
    run_lowered(program, draw(program))


def test_an_update_that_becomes_the_state_of_another_is_not_in_place():
    build, state = sgd_updates((4,), (4,))
    program = build.program(w0=state["w1"], w1=state["w0"])
    assert not in_place(program).updates
    run_lowered(program, draw(program))


def test_two_updates_of_one_parameter():
    build, state = sgd_updates((4,))
    w, lr = state["w0"], next(n for n in build.graph.nodes if n.name == "lr")
    options = {"weight_decay": 0.1, "momentum": 0.0, "lr": lr, "dampening": 0.0, "nesterov": False}
    again = build(fused_sgd, w, w, None, **options, maximize=False, is_first_step=False)[0]
    program = build.program(w0=again)
    run_lowered(program, draw(program))


def test_a_gradient_that_is_overwritten_is_read_before():
    """`optimizer.step()` with the gradients of the last step, and new ones after it."""
    build = Build(dp=2)
    w, g, lr = build.parameter("w", 4), build.buffer("g", 4), build.input("lr")
    options = {"weight_decay": 0.0, "momentum": 0.0, "lr": lr, "dampening": 0.0, "nesterov": False}
    new = build(fused_sgd, w, g, None, **options, maximize=False, is_first_step=False)[0]
    program = build.program(w=new, g=build(aten.neg.default, g))
    assert count(program, "_fused_sgd_") == 1
    run_lowered(program, draw(program))


def test_old_parameters_that_are_returned_are_those_from_before_the_kernel():
    build, state = sgd_updates((4,))
    w = next(n for n in build.graph.nodes if n.name == "w0")
    program = build.program(w, **state)
    assert in_place(program).updates
    run_lowered(program, draw(program))


def adamw(build: Build, i: int, counter=None, **given):
    w, g = build.parameter(f"w{i}", 4), build.input(f"g{i}", 4)
    m, v, step = build.state(f"m{i}", 4), build.state(f"v{i}", 4), build.state(f"t{i}", dtype=torch.float32)
    new = build(aten.add.Scalar, step, 1) if counter is None else counter(build, step)
    lr = next((n for n in build.graph.nodes if n.name == "lr"), None) or build.input("lr")
    options = {"lr": lr, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False}
    parts = build(fused_adamw, w, g, m, v, None, new, **options, maximize=False, **given)
    return dict(zip((f"w{i}", f"m{i}", f"v{i}", f"t{i}"), (*parts[:3], new), strict=True))


def test_counters_advance_in_one_call_before_the_kernel():
    build = Build(dp=2)
    program = build.program(**adamw(build, 0), **adamw(build, 1))
    assert ops(program) == ["laid_out_like", "scalar_tensor", "_foreach_add_", "_fused_adamw_"]
    inputs = draw(program)
    run_lowered(program, inputs)


def test_a_counter_that_is_returned_too():
    build = Build(dp=2)
    state = adamw(build, 0)
    program = build.program(state["t0"], **state)
    run_lowered(program, draw(program))


def test_a_counter_that_is_the_state_of_two_slots():
    build = Build(dp=2)
    state = adamw(build, 0)
    program = build.program(**(state | adamw(build, 1) | {"t1": state["t0"]}))
    run_lowered(program, draw(program))


def test_counters_of_different_steps():
    build = Build(dp=2)
    first = adamw(build, 0)
    second = adamw(build, 1, lambda b, step: b(aten.add.Scalar, step, 2))
    program = build.program(**first, **second)
    assert count(program, "_foreach_add_") == 2
    run_lowered(program, draw(program))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adam, torch.optim.Adagrad])
def test_a_train_step_has_one_kernel_and_no_copies(make):
    model = built(Mlp)
    optimizer = make(model.parameters(), lr=0.1)
    step = ms.simulate(train_step, mesh=ms.Mesh(dp=2))
    step(model, optimizer, rows(), labels())
    program = step.lower(model, optimizer, rows(), labels()).local_program
    found = ops(program)
    assert len([op for op in found if op.startswith("_fused_")]) == 1
    assert "copy_" not in found
    run_lowered(program, draw(program))


def test_a_train_step_that_keeps_buffers_and_an_average():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
            self.register_buffer("average", torch.zeros(4, 6))

        def forward(self, x):
            return self.body(x)

    def step(model, optimizer, x, y):
        loss = train_step(model, optimizer, x, y)
        with torch.no_grad():
            model.average.mul_(0.9).add_(model.body[2].weight, alpha=0.1)
        return loss

    model = built(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    simulated = ms.simulate(step, mesh=ms.Mesh(dp=2))
    simulated(model, optimizer, rows(), labels())
    program = simulated.lower(model, optimizer, rows(), labels()).local_program
    run_lowered(program, draw(program))


# ---- the graph


def test_parts_of_what_is_computed_in_place_are_not_there():
    build, state = sgd_updates((4,))
    module = lowered(build.program(**state))
    assert not [n for n in module.graph.nodes if n.target is operator.getitem]
    assert not any(is_part(n) for n in module.graph.nodes)


def test_inputs_are_the_slots_in_order():
    build, state = sgd_updates((4,), (2,))
    program = build.program(**state)
    module = lowered(program)
    assert [n.name for n in module.graph.nodes if n.op == "placeholder"] == [slot.name for slot in program.slots]
    assert type(module).__name__ == "step"


def test_the_program_is_not_changed():
    build, state = sgd_updates((4,))
    program = build.program(**state)
    before = [(n.name, n.target, n.args) for n in program.graph.nodes]
    lowered(program)
    assert [(n.name, n.target, n.args) for n in program.graph.nodes] == before
