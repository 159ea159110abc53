"""What the tests of programs share: golden texts, programs written by hand, and runs of all ranks in one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from meshstep import Mesh
from meshstep.ir import collectives
from meshstep.ir.infer import infer
from meshstep.ir.printer import program_text
from meshstep.ir.program import Program, Result, Slot, SlotKind, append, call, communication, is_part, part, producer
from meshstep.ir.types import TensorType
from meshstep.ir.verifier import verify_program
from meshstep.layout import PARTIAL, REPLICATE, Layout, shard
from meshstep.passes import Pass, lower
from meshstep.passes.lower import AxisGroup, kept_results
from meshstep.plan.calls import Calls
from meshstep.plan.decision import Decision
from meshstep.rules import Rule
from meshstep.runtime.simulate import gather, run_ranks, scatter

GOLDEN = Path(__file__).parent / "golden"
aten, c10d = torch.ops.aten, torch.ops._c10d_functional


# ---- golden texts


def check_text(text: str, golden: str) -> None:
    """Assert that a text is that of `tests/golden/<golden>`; `UPDATE_GOLDEN=1` writes it."""
    path = GOLDEN / golden
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path} has another text; see it, then UPDATE_GOLDEN=1"


def check_pass(pass_: Pass, program: Program, golden: str | None = None) -> Program:
    """Assert all that a pass promises, and give what it made.

    The input is untouched, the output verifies, its text equals `tests/golden/<golden>` (if one is named), every rank
    computes the same numbers to the bit, a second application changes nothing, and no more bytes are sent.
    """
    before = program_text(program)
    made = pass_(program)
    assert program_text(program) == before, "the pass changed its input"
    verify_program(made, types=True)
    if golden is not None:
        check_text(program_text(made), golden)
    assert pass_(made) is made, "a second application changes something"
    assert sum(c.bytes for c in communication(made)) <= sum(c.bytes for c in communication(program))
    check_equal(run_ranks(made, draw(program)), run_ranks(program, draw(program)))
    return made


def check_equal(found: Any, want: Any, within: float = 0.0) -> None:
    """Assert that tensors, or nests of them, are equal."""
    torch.testing.assert_close(found, want, rtol=within, atol=within, equal_nan=True)


# ---- programs by hand


class Build:
    """Writes a program, one value after another.

    Args:
        axes: Sizes of the mesh axes, outermost first.
        local: Whether the program is partitioned along all of them.
    """

    def __init__(self, local: bool = True, **axes: int) -> None:
        self.mesh, self.local, self.graph = Mesh(**axes), local, fx.Graph()
        self.slots: list[Slot] = []
        self.line = 0

    def input(
        self,
        name: str,
        *shape: int,
        kind: SlotKind = SlotKind.ARGUMENT,
        dtype: torch.dtype = torch.float64,
        **layout: Placement,
    ) -> fx.Node:
        """An input, `shape` being one rank's, placed along the axes as said and else whole."""
        node = append(self.graph, "placeholder", name, (), name=name)
        node.meta.update(type=TensorType(dtype, shape), layout=self.layout(**layout), source="")
        self.slots.append(Slot(kind, name))
        return node

    def parameter(self, name: str, *shape: int, **given: Any) -> fx.Node:
        return self.input(name, *shape, kind=SlotKind.PARAMETER, **given)

    def buffer(self, name: str, *shape: int, **given: Any) -> fx.Node:
        return self.input(name, *shape, kind=SlotKind.BUFFER, **given)

    def state(self, name: str, *shape: int, **given: Any) -> fx.Node:
        return self.input(name, *shape, kind=SlotKind.OPTIMIZER_STATE, **given)

    def layout(self, **placements: Placement) -> Layout:
        axes = reversed(self.mesh.axes) if self.local else ()
        return Layout(tuple((axis, placements.get(axis, REPLICATE)) for axis in axes))

    def __call__(self, op: Any, *args: Any, layout: Layout | None = None, **kwargs: Any) -> Any:
        """A call: its node, or a tuple with the part of each output. It is placed like its first input, if not said."""
        self.line += 1
        type_ = infer(op, args, kwargs)
        given = _nodes(args)
        if layout is None:
            layout = given[0].meta["layout"] if given else self.layout()
        layouts: Any = tuple(t and layout for t in type_) if isinstance(type_, tuple) else layout
        node = call(self.graph, op, args, kwargs, type=type_, layout=layouts, source=f"step.py:{self.line}")
        if not isinstance(type_, tuple):
            return node
        return tuple(part(self.graph, node, i) if t else None for i, t in enumerate(type_))

    def all_reduce(self, x: fx.Node, op: str = "sum", axis: str | None = None) -> fx.Node:
        axis = axis or self.mesh.axes[0]
        return self._moved(collectives.all_reduce, (x, op, axis), axis, REPLICATE)

    def all_gather(self, x: fx.Node, dim: int = 0, axis: str | None = None) -> fx.Node:
        axis = axis or self.mesh.axes[0]
        return self._moved(collectives.all_gather, (x, dim, axis, self.mesh[axis]), axis, REPLICATE)

    def reduce_scatter(self, x: fx.Node, dim: int = 0, op: str = "sum", axis: str | None = None) -> fx.Node:
        axis = axis or self.mesh.axes[0]
        return self._moved(collectives.reduce_scatter, (x, dim, op, axis, self.mesh[axis]), axis, shard(dim))

    def all_to_all(self, x: fx.Node, split: int, concat: int, axis: str | None = None) -> fx.Node:
        axis = axis or self.mesh.axes[0]
        return self._moved(collectives.all_to_all, (x, split, concat, axis, self.mesh[axis]), axis, shard(split))

    def axis_slice(self, x: fx.Node, dim: int = 0, axis: str | None = None) -> fx.Node:
        axis = axis or self.mesh.axes[0]
        return self._moved(collectives.axis_slice, (x, dim, axis, self.mesh[axis]), axis, shard(dim))

    def axis_index(self, axis: str | None = None) -> fx.Node:
        return self(collectives.axis_index, axis or self.mesh.axes[0], torch.device("cpu"))

    def _moved(self, op: Any, args: tuple, axis: str, placement: Placement) -> fx.Node:
        have = dict(args[0].meta["layout"].placements) | {axis: placement}
        node = self(op, *args, layout=Layout(tuple((a, have.get(a, REPLICATE)) for a in reversed(self.mesh.axes))))
        node.meta["why"] = f"%{args[0].name} is moved"
        return node

    def program(self, *outputs: fx.Node, name: str = "step", **state: fx.Node) -> Program:
        """The program that returns some values to the user, and gives the slots of some names new values."""
        append(self.graph, "output", "output", ((*outputs, *state.values()),))
        slots = {slot.name: slot for slot in self.slots}
        results = [Result(str(i)) for i in range(len(outputs))] + [Result(n, slots[n]) for n in state]
        axes = tuple(reversed(self.mesh.axes)) if self.local else ()
        program = Program(name, self.mesh, self.graph, tuple(self.slots), tuple(results), axes)
        verify_program(program, types=True)
        return program


def _nodes(args: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(args, found.append)
    return found


def programs_for_lowering(size: int = 2) -> dict[str, Program]:
    """Local programs for `size` ranks along "dp" with one collective each: every kind, along every dim.

    `draw(program)` gives inputs for them; `run_ranks` says what comes out.
    """
    found: dict[str, Program] = {}
    for transposed in (False, True):
        suffix = " of a transposed value" if transposed else ""

        def add(
            name: str, move: Callable[[Build, fx.Node], fx.Node], suffix: str = suffix, **layout: Placement
        ) -> None:
            build = Build(dp=size)
            x = build.input("x", *_SHAPE, **layout)
            if suffix:
                x = build(aten.transpose.int, x, 0, 2)
            found[name + suffix] = build.program(build(aten.mul.Tensor, move(build, x), 2.0))

        for op in ("sum", "max", "min", "product"):
            add(f"all_reduce {op}", lambda b, x, op=op: b.all_reduce(x, op), dp=PARTIAL)
        for dim in range(3):
            add(f"all_gather {dim}", lambda b, x, dim=dim: b.all_gather(x, dim), dp=shard(dim))
            add(f"axis_slice {dim}", lambda b, x, dim=dim: b.axis_slice(x, dim))
            for op in ("sum", "max"):
                add(f"reduce_scatter {op} {dim}", lambda b, x, dim=dim, op=op: b.reduce_scatter(x, dim, op), dp=PARTIAL)
            for to in range(3):
                if to != dim:
                    move = lambda b, x, dim=dim, to=to: b.all_to_all(x, to, dim)  # noqa: E731
                    add(f"all_to_all {dim} to {to}", move, dp=shard(dim))
    build = Build(dp=size)
    x = build.input("x", 4)
    found["axis_index"] = build.program(build(aten.add.Tensor, x, build.axis_index()))
    return found


_SHAPE = (4, 8, 12)


# ---- decisions by hand


def follow(program: Program, axis: str, inputs: Sequence[Placement], **chosen: Rule) -> Decision:
    """A decision that takes, call by call, the first rule whose inputs lie as they are; else the one that replicates.

    Args:
        program: A program not yet partitioned along `axis`.
        axis: The axis.
        inputs: Placement of each slot.
        chosen: Rules of calls, by node name, that come before that. A partial result is reduced.
    """
    calls = Calls(program, program.mesh[axis])
    placed: dict[tuple[fx.Node, int], Placement | None] = {
        (node, 0): placement for node, placement in zip(program.placeholders, inputs, strict=True)
    }
    rules: dict[fx.Node, Rule] = {}
    for node in program.calls:
        have = tuple(placed[producer(n)] for n in calls.tensors(node))
        fitting = [rule for rule in calls.rules(node) if rule.inputs == have]
        rules[node] = chosen.get(node.name) or next(iter(fitting), calls.rules(node)[0])
        placed |= {(node, i): placement for i, placement in enumerate(rules[node].outputs)}
    ends = [placed[producer(node)] for _, node in program.outputs]
    outputs = tuple(REPLICATE if isinstance(p, Partial) or p is None else p for p in ends)
    return Decision(axis, tuple(inputs), outputs, rules)


# ---- runs


def draw(program: Program, seed: int = 0) -> list[list[Tensor]]:
    """Inputs of every rank: shards of one random tensor a slot; what is partial differs from rank to rank."""
    generator = torch.Generator().manual_seed(seed)
    columns = [_column(node, program.mesh, generator) for node in program.placeholders]
    return [[column[rank].clone() for column in columns] for rank in range(program.mesh.size)]


def _column(node: fx.Node, mesh: Mesh, generator: torch.Generator) -> list[Tensor]:
    type_, layout = node.meta["type"], node.meta["layout"]
    if any(isinstance(placement, Partial) for _, placement in layout.placements):
        return [_random(type_.shape, type_.dtype, generator) for _ in range(mesh.size)]
    return scatter(_random(layout.global_shape(type_.shape, mesh), type_.dtype, generator), layout, mesh)


def _random(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype.is_floating_point:
        return torch.rand(shape, dtype=torch.float64, generator=generator).to(dtype) + 0.5
    return torch.randint(2, shape, generator=generator).to(dtype)


def run_whole(program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Execute a global program on whole tensors."""
    assert program.axes == ()
    return run_ranks(program, [inputs] * program.mesh.size)[0]


def run_local(program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Execute a local program on all ranks, from whole tensors to whole tensors."""
    layouts = [node.meta["layout"] for node in program.placeholders]
    parts = [scatter(t, layout, program.mesh) for t, layout in zip(inputs, layouts, strict=True)]
    found = run_ranks(program, [[p[rank] for p in parts] for rank in range(program.mesh.size)])
    return [
        gather([ranks[i] for ranks in found], node.meta["layout"], program.mesh, str(result))
        for i, (result, node) in enumerate(program.outputs)
    ]


def run_lowered(program: Program, inputs: Sequence[Sequence[Tensor]], scatters: bool = True) -> list[dict[str, Tensor]]:
    """Execute what `lower` makes for every rank, side by side in this process, and check it against `run_ranks`.

    A collective's result is computed when it is waited for, if it may still read its input then: so a value that is
    overwritten while it is sent shows. State is written in place, into `inputs`.

    Returns:
        For each rank, what is returned and the state after the run, by name.
    """
    mesh = program.mesh
    want = run_ranks(program, [[t.clone() for t in rank] for rank in inputs])
    modules = [lower(program, _groups(mesh, rank, scatters)) for rank in range(mesh.size)]
    returned = _side_by_side(modules, inputs, mesh)
    held = [dict(zip(program.slots, rank, strict=True)) for rank in inputs]
    kept = kept_results(program)
    found = [
        {
            str(result): outputs[kept.index(i)] if i in kept else state[result.slot]  # type: ignore[index]
            for i, result in enumerate(program.results)
        }
        for outputs, state in zip(returned, held, strict=True)
    ]
    names = [str(result) for result in program.results]
    check_equal(found, [dict(zip(names, rank, strict=True)) for rank in want], within=1e-14)
    return found


def _groups(mesh: Mesh, rank: int, scatters: bool) -> dict[str, AxisGroup]:
    return {axis: AxisGroup(axis, mesh[axis], index, scatters) for axis, index in mesh.coordinate(rank).items()}


def _side_by_side(
    modules: Sequence[fx.GraphModule], inputs: Sequence[Sequence[Tensor]], mesh: Mesh
) -> list[tuple[Tensor, ...]]:
    values: list[dict[fx.Node, Any]] = [{} for _ in modules]
    given = [iter(rank) for rank in inputs]
    for nodes in zip(*(module.graph.nodes for module in modules), strict=True):
        if nodes[0].op == "output":
            break
        found: Sequence[Any]
        if nodes[0].op == "placeholder":
            found = [next(rank) for rank in given]
        else:
            calls = [fx.node.map_arg((n.args, n.kwargs), v.__getitem__) for n, v in zip(nodes, values, strict=True)]
            found = _call_all(nodes[0].target, calls, mesh)
        for node, value, known in zip(nodes, found, values, strict=True):
            known[node] = value
    return [fx.node.map_arg(nodes[i].args[0], values[i].__getitem__) for i in range(len(modules))]


def _call_all(target: Any, calls: Sequence[tuple[tuple, dict]], mesh: Mesh) -> Sequence[Any]:
    if target not in _EXCHANGES:
        return [target(*args, **kwargs) for args, kwargs in calls]
    if target is c10d.wait_tensor.default:
        return [args[0]() if callable(args[0]) else args[0] for args, _ in calls]
    axis = calls[0][0][-1]
    assert all(args[0].is_contiguous() for args, _ in calls) or target is c10d.all_reduce.default
    running = []
    for rank in range(mesh.size):
        parts = [calls[other][0][0] for other in mesh.group(rank, axis)]
        index = mesh.coordinate(rank)[axis]
        if target is c10d.all_reduce.default:
            parts = [p.clone() for p in parts]  # c10d copies the input of this one
        running.append(lambda parts=parts, index=index: _EXCHANGES[target](parts, index, *calls[0][0][1:-1]))
    return running


_REDUCE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda t: t.sum(0),
    "max": lambda t: t.amax(0),
    "min": lambda t: t.amin(0),
    "product": lambda t: t.prod(0),
}
_EXCHANGES: Mapping[Any, Callable[..., Tensor]] = {
    c10d.all_reduce.default: lambda parts, index, op: _REDUCE[op](torch.stack(parts)),
    c10d.all_gather_into_tensor.default: lambda parts, index, size: torch.cat(parts),
    c10d.reduce_scatter_tensor.default: lambda parts, index, op, size: (
        _REDUCE[op](torch.stack(parts)).chunk(size)[index].clone()
    ),
    c10d.all_to_all_single.default: lambda parts, index, out_counts, in_counts: torch.cat(
        [part.split(in_counts)[index] for part in parts]
    ),
    c10d.wait_tensor.default: lambda parts, index: parts[index],
}


def kinds(module: fx.GraphModule) -> list[str]:
    """Names of the ops of a lowered graph, in order."""
    ops = [node.target for node in module.graph.nodes if _is_op(node)]
    return [op._schema.name.split("::")[-1] if hasattr(op, "_schema") else op.__name__ for op in ops]


def _is_op(node: fx.Node) -> bool:
    return node.op == "call_function" and not is_part(node)
