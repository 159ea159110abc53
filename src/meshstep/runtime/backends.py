"""What runs a lowered graph: FX's generated Python, Inductor, or any callable of the user's."""

from __future__ import annotations

import operator
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from .._torch import OpOverload, compile_with_inductor, inductor_cache
from ..errors import InputError
from ..ir.random import EXPANSIONS
from ..ir.updates import laid_out_like

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
Runner = Callable[..., Any]
Backend = str | Callable[[fx.GraphModule, Sequence[Tensor]], Runner]


def build(backend: Backend, module: fx.GraphModule, inputs: Sequence[Tensor]) -> Runner:
    """A callable that takes the module's inputs and returns its outputs.

    Args:
        backend: `"eager"`, `"inductor"`, or a callable of (graph module, example inputs).
        module: The lowered graph.
        inputs: The inputs of the first run.

    Raises:
        InputError: There is no such backend.
    """
    check_backend(backend)
    if callable(backend):
        return backend(module, inputs)
    return _eager(module) if backend == "eager" else _inductor(module, inputs)


def check_backend(backend: Backend) -> None:
    """See that there is such a backend.

    Raises:
        InputError: There is not.
    """
    if not callable(backend) and backend not in ("eager", "inductor"):
        raise InputError(
            f"no backend {backend!r}", at="compile(backend=...)", hint='"eager", "inductor", or a callable'
        )


def _eager(module: fx.GraphModule) -> Runner:
    reused = fx.GraphModule(module, fx.Graph(), class_name=type(module).__name__)
    graph = reused.graph
    output = graph.graph_copy(module.graph, {}, return_output_node=False)
    graph.output(output)
    _reduce_in_place(graph)
    graph.set_codegen(fx.graph.CodeGen())
    reused.recompile()
    return reused.forward


def _reduce_in_place(graph: fx.Graph) -> None:
    """Reduce a bucket where it lies: nobody else reads it."""
    for node in graph.nodes:
        if node.target is c10d.all_reduce.default:
            bucket = node.args[0]
            if bucket.target is aten.cat.default and len(bucket.users) == 1:
                node.target = c10d.all_reduce_.default


def check_compiled_cache() -> None:
    """See that nobody else can put code where Inductor loads compiled code from; there may be nothing yet.

    Raises:
        InputError: Somebody can.
    """
    path = inductor_cache()
    if hasattr(os, "geteuid") and os.path.lexists(path) and not _is_ours(path):
        raise InputError(
            "Inductor's cache is not a directory of this user alone: code in it would be run",
            at=str(path),
            hint="TORCHINDUCTOR_CACHE_DIR=a directory of your own that nobody else can write to",
        )


def _is_ours(path: Path) -> bool:
    """Whether only this user, or root, can have put what is there: a link, too, and what it leads to."""
    try:
        link, found = path.lstat(), path.stat()
    except OSError:
        return False
    owners = {link.st_uid, found.st_uid} <= {0, os.geteuid()}
    return owners and stat.S_ISDIR(found.st_mode) and not found.st_mode & stat.S_IWOTH


def _inductor(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Runner:
    """The computation by Inductor; the optimizer's in-place kernels stay PyTorch's own, which are faster."""
    check_compiled_cache()
    cut = split_tail(module)
    compiled = compile_with_inductor(cut.body, [inputs[i] for i in cut.taken], EXPANSIONS)
    take, tail, passed = _picker(cut.taken), cut.tail, cut.passed
    if tail is None:
        return lambda *args: compiled(*take(args))
    run_tail = tail.forward

    def run(*args: Tensor) -> Any:
        found = compiled(*take(args))
        run_tail(*args, *found[-passed:] if passed else ())
        return found[: len(found) - passed]

    return run


def _picker(places: Sequence[int]) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """Gives the arguments at some places; all that is given to Inductor is looked at in every call."""
    if len(places) < 2:
        return lambda args: [args[i] for i in places]
    return operator.itemgetter(*places)


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A graph in two.

    Args:
        body: The computation; it takes some of the inputs, and returns the outputs and then what the tail needs.
        tail: The in-place kernels on lists after it; it takes all inputs, and then that. None if there are none.
        passed: How many values the tail needs.
        taken: The inputs that the body takes.
    """

    body: fx.GraphModule
    tail: fx.GraphModule | None
    passed: int
    taken: tuple[int, ...]


def split_tail(module: fx.GraphModule) -> Cut:
    """Cut the in-place kernels on lists off."""
    nodes = list(module.graph.nodes)
    kernels = {node: None for node in nodes if _is_list_kernel(node) or node.target is laid_out_like}
    needed = dict.fromkeys(n for k in kernels for n in k.all_input_nodes if n.op != "placeholder" and n not in kernels)
    inputs = [node for node in nodes if node.op == "placeholder"]
    body, tail = fx.Graph(), fx.Graph()
    used = {n for node in nodes if node not in kernels for n in node.all_input_nodes}
    in_body = {n: body.placeholder(n.name) for n in inputs if n in used}
    in_tail = {n: tail.placeholder(n.name) for n in (*inputs, *needed)}
    for node in nodes:
        if node in kernels:
            in_tail[node] = tail.node_copy(node, in_tail.__getitem__)
        elif node.op == "call_function":
            in_body[node] = body.node_copy(node, in_body.__getitem__)
    outputs: Any = nodes[-1].args[0]
    body.output(tuple(in_body[n] for n in (*outputs, *needed)))
    tail.output(())
    taken = tuple(i for i, n in enumerate(inputs) if n in used)
    return Cut(fx.GraphModule(module, body), fx.GraphModule(module, tail) if kernels else None, len(needed), taken)


def _is_list_kernel(node: fx.Node) -> bool:
    target: Any = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return False
    first = target._schema.arguments[0] if target._schema.arguments else None
    return target._schema.is_mutable and first is not None and str(first.type) == "List[Tensor]"
