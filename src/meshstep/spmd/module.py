"""A module whose forward and backward are programs of all ranks, under torch's autograd: the optimizer stays outside.

    model = meshstep.SPMD(model, meshstep.Schema(mesh, [Replicate()]))
    loss = model(rows).sum()
    loss.backward()
    optimizer.step()

Every rank passes its own rows and gets its own rows of what is split like them. The backward is that of the sum over
all ranks of what each rank's loss is: of losses that are means over a rank's own rows, divide by the number of ranks.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from ..arguments import placements_along
from ..capture.capture import Captured
from ..capture.tree import Spec, flatten, paths
from ..errors import InputError, PlanError
from ..ir.program import Program
from ..layout import Layout
from ..passes import DEFAULT, EAGER, Pipeline, lower
from ..passes.split import Split, split
from ..phases import local_program
from ..plan.plan import Plan
from ..runtime.agreement import agree_on_call, agree_on_program
from ..runtime.backends import Backend, check_backend
from ..runtime.cache import Cache, CacheInfo
from ..runtime.seed import Seed
from ..runtime.sharded import Holders, is_sharded, like, own_layouts, part_of, to_dtensor
from ..runtime.signature import Guards, Signature
from ..runtime.synchronise import broadcast_from_first
from ..runtime.world import axis_groups, check_mesh, has_group, init, world
from ..schema import Schema
from .pair import Pair
from .schemas import Given, Schemas, check_module
from .traced import Traced

_NO_PASSES = Pipeline(())


@dataclass(slots=True, eq=False)
class DistributedGraph:
    """The graphs of a module that `distribute` has made, one of each for each kind of call.

    Args:
        orig_module: The module as the user wrote it.
        fwd_graph_modules: The forwards: their inputs are the program's slots, their outputs what the module returns
            and then what the backward needs.
        bwd_graph_modules: The backwards: their inputs are slots, what the forward saved, and the gradients of outputs.
    """

    orig_module: nn.Module
    fwd_graph_modules: list[fx.GraphModule] = field(default_factory=list)
    bwd_graph_modules: list[fx.GraphModule] = field(default_factory=list)

    def __post_init__(self) -> None:
        """See that there is a module.

        Raises:
            InputError: There is none.
        """
        check_module(self.orig_module, "DistributedGraph(orig_module=...)")


class SPMD(nn.Module):
    """A module that runs on all ranks of a mesh, by programs that are compiled at its first calls.

    The module given stays the owner of its parameters (`SPMD.module`); their names get no prefix but "module.".
    Parameters that a schema shards become DTensors, in the module and in every optimizer that has them, and their
    gradients are DTensors of the same placements. All ranks start from rank 0's parameters and buffers.

    Args:
        module: Any module: changed in place.
        schema: How its parameters lie; or schemas by patterns of their names, those that fit none being whole. A
            parameter of which a dim does not divide stays whole along that axis. Along an axis that splits the inputs,
            a sharded parameter is gathered where it is used (FSDP), along one that does not it is computed with as it
            lies (tensor parallelism).
        input_schemas: How the tensors among the arguments lie, in order; the last one counts for all after it. By
            default every rank passes rows of its own: `Shard(0)` along every axis.
        backend: As for `compile`.

    Raises:
        InputError: There is nothing to run, or schemas speak of different meshes.
    """

    def __init__(
        self,
        module: nn.Module,
        schema: Given,
        input_schemas: Sequence[Schema] = (),
        *,
        backend: Backend = "eager",
    ) -> None:
        """Bring all ranks to rank 0's state, and shard it."""
        super().__init__()
        check_module(module, "SPMD(module, ...)")
        check_backend(backend)
        init()
        self.module = module
        self._run = _Distributed(DistributedGraph(module), schema, input_schemas, backend)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, on this rank's part of the arguments."""
        return self._run(*args, **kwargs)

    @property
    def graph(self) -> DistributedGraph:
        """The graphs so far."""
        return self._run.graph

    def cache_info(self) -> CacheInfo:
        """Programs compiled, and why."""
        return self._run.cache_info()


def distribute(
    dist_graph: DistributedGraph,
    param_schema: Given,
    input_schemas: Sequence[Schema],
    *args: Any,
    **kwargs: Any,
) -> nn.Module:
    """Compile the module of a graph for a kind of call, and put the graphs into `dist_graph`.

    Args:
        dist_graph: Has the module, changed in place as by `SPMD`.
        param_schema: As for `SPMD`.
        input_schemas: As for `SPMD`.
        args: Arguments like those of later calls: this rank's part.
        kwargs: Likewise.

    Returns:
        The module to call. Arguments of another kind compile, and add, graphs of their own.

    Raises:
        InputError: It is no `DistributedGraph`, or as for `SPMD`.
    """
    if not isinstance(dist_graph, DistributedGraph):
        raise InputError(
            f"a {type(dist_graph).__name__} instead of a DistributedGraph",
            at="distribute(dist_graph, ...)",
            hint="meshstep.DistributedGraph(orig_module=module)",
        )
    init()
    run = _Distributed(dist_graph, param_schema, input_schemas, "eager")
    run.compiled(*args, **kwargs)
    return run


class _Distributed(nn.Module):
    """Runs a module by its programs. No submodule of it: the module may be one of the module's own."""

    _made = itertools.count()
    graph: DistributedGraph
    _module: nn.Module

    def __init__(
        self, graph: DistributedGraph, schema: Given, input_schemas: Sequence[Schema], backend: Backend
    ) -> None:
        super().__init__()
        self.__dict__["graph"] = graph
        self.__dict__["_module"] = graph.orig_module
        self._signature = inspect.signature(graph.orig_module.forward)
        self._schemas, self._backend = Schemas.of(graph.orig_module, schema, input_schemas), backend
        self._mesh = self._schemas.mesh
        self._topic = f"SPMD/{type(graph.orig_module).__name__}/{next(self._made)}"
        self._seed = Seed(self._topic if has_group() else None)
        self._cache: Cache[Pair] = Cache()
        check_mesh(self._mesh, world())
        state = [*graph.orig_module.parameters(), *graph.orig_module.buffers()]
        broadcast_from_first([t for t in state if not isinstance(t, DTensor)])
        self._shard()

    def cache_info(self) -> CacheInfo:
        """Programs compiled, and why."""
        return self._cache.info()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        pair, leaves, inputs = self.compiled(*args, **kwargs)
        return pair(leaves, inputs)

    def compiled(self, *args: Any, **kwargs: Any) -> tuple[Pair, list[Any], list[Any]]:
        """The programs for a call, its leaves and the tensors of the programs' slots."""
        self._seed.begin()
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InputError(
                str(error), at=f"{type(self._module).__name__}.forward", hint="call it like the module"
            ) from None
        arguments, spec = flatten((bound.args, bound.kwargs))
        names = ["module", *(path or "input" for path in paths(spec))]
        leaves = [self._module, *arguments]
        signature = Signature.of(spec, names, leaves)
        found = self._cache.find(signature, leaves)
        if not isinstance(found, str):
            return found[0], leaves, found[1]
        pair, guards = self._compile(spec, names, leaves, found)
        inputs = guards.bind(leaves)
        assert not isinstance(inputs, str), inputs
        self._cache.add(signature, guards, pair, found, f"SPMD {type(self._module).__name__}")
        return pair, leaves, inputs

    def _shard(self) -> None:
        """Parameters become DTensors, wherever they are held."""
        mesh, holders = self._schemas.mesh, Holders()
        place = mesh.coordinate(world().rank)
        for name, old in list(self._module.named_parameters()):
            layout = self._schemas.layout(name, old.shape)
            if is_sharded(layout) and not isinstance(old, DTensor):
                holders.replace(old, like(old, to_dtensor(part_of(old, layout, mesh, place), layout, mesh)))

    def _compile(self, spec: Spec, names: list[str], leaves: list[Any], reason: str) -> tuple[Pair, Guards]:
        topic = f"{self._topic}/{self.cache_info().misses}"
        agree_on_call(topic, names, leaves, reason)
        layouts = self._schemas.arguments(leaves)
        shapes = [
            None if layout is None else layout.global_shape(leaf.shape, self._mesh)
            for leaf, layout in zip(leaves, layouts, strict=True)
        ]
        traced = Traced(self._module, self._module, spec, self._seed, self._mesh)
        captured = alone = traced.forward(leaves, names, shapes)
        plan = self._schemas.plan({h.slot.name: h.tensor.shape for h in captured.state.parameters()}, layouts)
        local = self._partitioned(captured, plan, names, layouts)
        late: list[int] = []
        if any(output.requires_grad for output in traced.outputs):
            outputs: Any = local.output_node.args[0]
            for i, output in enumerate(traced.outputs):
                if output.requires_grad:
                    names, layouts = [*names, f"gradient of output {i}"], [*layouts, outputs[i].meta["layout"]]
                    leaves, shapes = [*leaves, _like(output)], [*shapes, tuple(output.shape)]
            captured = traced.joint(leaves, names, shapes)
            local = self._partitioned(captured, plan, names, layouts)
            _check_outputs(outputs, local)
            late = traced.gradients(captured)
        agree_on_program(topic, local)
        pair = self._pair(alone, captured, split(local, late), traced)
        return pair, Guards(captured, local, gradients=False)

    def _partitioned(
        self, captured: Captured, plan: Plan, names: Sequence[str], layouts: Sequence[Layout | None]
    ) -> Program:
        own = own_layouts(captured.state, self._mesh)
        local, _ = local_program(
            captured.program,
            plan,
            lambda axis: placements_along(axis, names, layouts) | {slot: lies[axis] for slot, lies in own.items()},
            passes=_NO_PASSES,
        )
        return local

    def _pair(self, alone: Captured, captured: Captured, cut: Split, traced: Traced) -> Pair:
        passes = EAGER if self._backend == "eager" else DEFAULT
        parts = [cut.forward, cut.backward] if cut.backward_results else [cut.forward]
        groups = axis_groups(self._mesh, next(self._module.parameters(), torch.empty(0)).device.type)
        modules = [lower(passes(part), groups) for part in parts]
        self.graph.fwd_graph_modules.append(modules[0])
        self.graph.bwd_graph_modules.extend(modules[1:])
        return Pair(alone, captured, cut, modules, (self._backend, self._backend), traced)


def _like(fake: Tensor) -> Tensor:
    """A tensor that says the dtype and device of another one."""
    return torch.empty(0, dtype=fake.dtype, device=fake.device)


def _check_outputs(alone: Sequence[fx.Node], joint: Program) -> None:
    """The gradients of outputs were placed as the outputs lie in the forward alone."""
    outputs: Any = joint.output_node.args[0]
    for i, (before, now) in enumerate(zip(alone, outputs, strict=False)):
        if joint.results[i].slot is None and before.meta["layout"] != now.meta["layout"]:
            raise PlanError(
                f"output {i} lies as {before.meta['layout']} in the forward, as {now.meta['layout']} with a backward",
                at=joint.name,
                hint="report this: the plan of a forward must not depend on its backward",
            )
