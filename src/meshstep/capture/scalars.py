"""The arithmetic of an optimizer's scalars in float64, as plain Python floats would do it.

Optimizers that are traced as tensor programs keep `step` as a float32 tensor and compute `1 - beta ** step` in
float32; the plain loop does it with Python floats. So every 0-d value that depends only on 0-d state, live
hyper-parameters and constants is computed in float64 here. What is stored is rounded to the dtype of its storage, as
in the plain loop, and whoever reads the stored value sees it rounded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .._torch import OpOverload
from ..ir.infer import infer
from ..ir.program import Program, SlotKind, call, is_part
from ..ir.types import TensorType

aten = torch.ops.aten


def compute_scalars_in_float64(program: Program) -> Program:
    """The program with its scalar chains widened; the same program if it has none."""
    found = [node for chain in _chains(program) for node in chain if _is_for_tensors(chain)]
    scalars = [node for node in found if _is_narrow(node.meta["type"])]
    if not scalars:
        return program
    new, copies = program.copy()
    _Widening(new, {copies[node] for node in scalars}).run()
    return new


def _chains(program: Program) -> list[dict[fx.Node, None]]:
    """The scalars, grouped by what is computed from what; only groups that are about an optimizer's numbers."""
    scalars, chain_of = _scalars(program), dict[fx.Node, dict[fx.Node, None]]()
    anchors = {n for s, n in program.inputs if s.kind is SlotKind.HYPERPARAMETER}
    anchors |= {n for r, n in program.outputs if r.slot and r.slot.kind is SlotKind.OPTIMIZER_STATE}
    for node in scalars:
        chain = {node: None}
        for near in node.all_input_nodes:
            chain |= chain_of.get(near, {})
        for member in chain:
            chain_of[member] = chain
    unique = {id(chain): chain for chain in chain_of.values()}.values()
    return [chain for chain in unique if any(n in anchors or n.op == "placeholder" for n in _with_inputs(chain))]


def _with_inputs(chain: dict[fx.Node, None]) -> dict[fx.Node, None]:
    return chain | {near: None for node in chain for near in node.all_input_nodes}


def _is_for_tensors(chain: dict[fx.Node, None]) -> bool:
    """Whether a tensor is computed from the chain by an ordinary op: there its precision shows."""
    return any(user not in chain and _is_pointwise(user) for node in chain for user in node.users)


def _scalars(program: Program) -> dict[fx.Node, None]:
    """The nodes that are 0-d and depend on nothing else."""
    found = dict.fromkeys(
        node for slot, node in program.inputs if slot.kind is SlotKind.OPTIMIZER_STATE and _is_narrow(node.meta["type"])
    )
    sources = found | dict.fromkeys(n for s, n in program.inputs if s.kind is SlotKind.HYPERPARAMETER)
    for node in program.graph.nodes:
        type_ = node.meta.get("type")
        if node.op != "call_function" or is_part(node) or not isinstance(type_, TensorType) or type_.ndim:
            continue
        inputs = node.all_input_nodes
        if node.target is aten.full.default or (inputs and all(n in sources for n in inputs)):
            found[node] = sources[node] = None
    return found


def _is_rounding(node: fx.Node) -> bool:
    """Whether the user's code rounds a number: whoever reads it sees it rounded in the plain loop too."""
    return node.target is aten._to_copy.default and not node.meta.get("narrowed")


def _is_narrow(type_: Any) -> bool:
    narrow = (torch.float32, torch.float16, torch.bfloat16)
    return isinstance(type_, TensorType) and type_.ndim == 0 and type_.dtype in narrow


def _is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


class _Widening:
    def __init__(self, program: Program, scalars: set[fx.Node]) -> None:
        self.program, self.graph, self.scalars = program, program.graph, scalars
        self.stored = {node for result, node in program.outputs if result.slot is not None}
        chosen = [node for node in self.stored if node.target is aten.where.self]  # by a step that may be skipped
        self.stored.update(n for node in chosen for n in node.args[1:])  # type: ignore[misc]

    def run(self) -> None:
        wide: dict[fx.Node, fx.Node] = {}
        for node in list(self.graph.nodes):
            if node in self.scalars:
                wide[node] = self._widened(node, wide)
            elif node.op == "call_function" and not is_part(node):
                self._use(node, wide)

    def _widened(self, node: fx.Node, wide: dict[fx.Node, fx.Node]) -> fx.Node:
        """The float64 value of a scalar; `node` itself stays as the rounded one."""
        if node.op == "placeholder":
            first = next(n for n in self.graph.nodes if n.op != "placeholder")
            with self.graph.inserting_before(first):
                return self._cast(node, torch.float64)
        if _is_rounding(node) or (node in self.stored and node.target is not aten._to_copy.default):
            with self.graph.inserting_after(node):  # computed in its own dtype in the plain loop too
                return self._cast(node, torch.float64)
        with self.graph.inserting_before(node):
            kwargs = {**node.kwargs, "dtype": torch.float64} if "dtype" in node.kwargs else dict(node.kwargs)
            args = fx.node.map_arg(node.args, lambda n: wide.get(n, n))
            exact = call(self.graph, node.target, args, kwargs, type=node.meta["type"], source=node.meta["source"])
            exact.meta["type"] = infer(exact.target, exact.args, exact.kwargs)
            rounded = self._cast(exact, node.meta["type"].dtype)
        node.replace_all_uses_with(rounded)
        self.graph.erase_node(node)
        if node not in self.stored:
            wide[rounded] = exact
            return exact
        with self.graph.inserting_after(rounded):
            wide[rounded] = self._cast(rounded, torch.float64)
        return wide[rounded]

    def _use(self, node: fx.Node, wide: dict[fx.Node, fx.Node]) -> None:
        """Give an ordinary op the float64 scalars, where that does not change the type of its result."""
        if not _is_pointwise(node) or not any(n in wide for n in node.all_input_nodes):
            return
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: wide.get(n, n))
        try:
            type_ = infer(node.target, args, kwargs)
        except RuntimeError:  # an op that wants equal dtypes (lerp): it keeps the rounded scalar
            return
        if type_ == node.meta["type"]:
            node.args, node.kwargs = args, kwargs

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        type_ = replace(node.meta["type"], dtype=dtype)
        return call(
            self.graph,
            aten._to_copy.default,
            (node,),
            {"dtype": dtype},
            type=type_,
            source=node.meta["source"],
        )
