"""`compile`, `simulate` and the steps they return. The only module that knows the order of the phases."""

from __future__ import annotations

import functools
import inspect
import itertools
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from .arguments import Call, Inputs, argument_layouts, bind_call, check_inputs, dynamic_dims, placements_along
from .blame import Culprit, find_culprit
from .capture.capture import Captured, capture, is_capturing
from .capture.source import name_of
from .capture.widened import widened
from .errors import CheckpointError, InputError
from .finding import find_plan
from .ir.program import Program, Slot
from .layout import Layout
from .lowered import Lowered
from .mesh import Mesh
from .override import Override, Overrides, overrides_of, stand_ins
from .passes import DEFAULT, EAGER, PassRecord, Pipeline, Recompute, Transform, lower, pipeline
from .passes.lower import AxisGroup
from .phases import Placements, local_program, partitions
from .plan.decision import Stage
from .plan.named import data_parallel
from .plan.plan import Plan
from .plan.search import Search
from .resizing import Compiled, Resizing
from .runtime.agreement import agree_on_arguments, agree_on_call, agree_on_program, agree_on_state
from .runtime.backends import Backend, build, check_backend
from .runtime.cache import Cache, CacheInfo
from .runtime.execute import LocalExecutor, SimulatedExecutor, dtensor_wrap
from .runtime.lockstep import split_inputs
from .runtime.non_finite import NonFinite, find_here, find_on_all
from .runtime.seed import Seed
from .runtime.sharded import Shards, own_layouts
from .runtime.signature import Guards, Signature
from .runtime.world import axis_groups, check_mesh, init
from .schema import Schema
from .verification import MakeArgs, Verification, compare

OUTPUTS = ("local", "full", "dtensor")
Executor = Callable[[list[Any], list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Options:
    """How a step is compiled. See `compile`."""

    mesh: Mesh | None = None
    plan: Plan | None = None
    inputs: Inputs | None = None
    outputs: str = "local"
    backend: Backend = "inductor"
    passes: Pipeline | None = None
    module_override: Overrides | None = None
    gm_transformation: Callable[[fx.GraphModule], fx.GraphModule] | None = None
    memory: int | None = None
    check_every: int | None = None

    @property
    def edits(self) -> bool:
        """Whether the user edits graphs: then each program is made on its own."""
        return self.gm_transformation is not None or any(o.edits for o in overrides_of(self.module_override))

    def pipeline(self, mesh: Mesh) -> Pipeline:
        """What runs over a local program: the overrides' edits, the passes, the user's transformation.

        What is computed again is chosen first: the passes then see an ordinary program.
        """
        passes = self.passes or (EAGER if self.backend == "eager" else DEFAULT)
        edits = [_edit(override, mesh) for override in overrides_of(self.module_override) if override.edits]
        last = self.gm_transformation
        own = [] if last is None else [Transform(lambda gm, schemas: last(gm), f"gm_transformation {name_of(last)}")]
        fitted = [] if self.memory is None else [Recompute(self.memory)]
        return replace(passes, passes=(*edits, *fitted, *passes, *own)) if edits or own or fitted else passes


def _edit(override: Override, mesh: Mesh) -> Transform:
    def edit(gm: fx.GraphModule, layouts: Mapping[str, Layout]) -> Any:
        return override.transform(gm, {name: Schema.of(layout, mesh) for name, layout in layouts.items()})

    return Transform(edit, f"{type(override).__name__}.transform")


class Step(ABC):
    """A train step that is captured, planned and partitioned at its first call; call it like the function."""

    _takes_whole = False  # whether it is given the global batch, instead of a rank's own rows

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        """Keep the function; nothing is compiled yet."""
        functools.update_wrapper(self, function)
        self._function, self._options = function, options
        self._signature = inspect.signature(function)
        self._cache: Cache[Executor] = Cache()
        self._seed = Seed(None)
        self._objects: dict[str, Any] = {}
        self._resizing = Resizing()
        self._compilations = 0
        self._search: Search | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step.

        Returns:
            What the function returns: whole where it is replicated (a loss), else as `outputs` says.

        Raises:
            CaptureError: The function cannot be captured.
            InputError: The call does not fit.
            PlanError: The plan does not fit the mesh or the program.
            RankMismatchError: Ranks would run different programs.
        """
        if is_capturing():
            return self._function(*args, **kwargs)
        self._seed.begin()
        call = bind_call(self._signature, args, kwargs)
        signature = Signature.of(call.spec, call.names, call.leaves)
        found = self._cache.find(signature, call.leaves)
        if isinstance(found, str):
            executor, inputs = self._compile(call, signature, found)
        else:
            executor, inputs = found
        returned = executor(call.leaves, inputs)
        if self._options.check_every is not None:
            self._called(executor, inputs)
        return returned

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Capture, plan and partition a call without running it; needs no process group, for any mesh size.

        Args:
            args: As for a call.
            kwargs: As for a call.

        Raises:
            CaptureError: The function cannot be captured.
            PlanError: The plan does not fit the mesh or the program.
        """
        call = bind_call(self._signature, args, kwargs)
        mesh = self._mesh()
        self.plan.check(mesh)
        layouts, captured = self._captured(call, mesh)
        records, stages = list[PassRecord](), list[Stage]()
        local, plan = self._partitioned(call, captured, layouts, mesh, records.append, decided=stages.append)
        groups = {axis: AxisGroup(axis, mesh[axis], 0) for axis in mesh}
        return Lowered(captured.program, local, plan, lower(local, groups), tuple(records), tuple(stages), self._search)

    def verify(self, *args: Any, steps: int = 5, **kwargs: Any) -> Verification:
        """Compare the plain function with the compiled program on all virtual ranks; changes nothing of the caller's.

        Args:
            args: As for `simulate`: the GLOBAL batch. Every step sees the same one.
            steps: Number of steps.
            kwargs: Likewise.
        """
        simulated = SimulatedStep(self._function, self._options_for(self._mesh()))
        with _random_state_kept():
            return compare(self._function, simulated, lambda i: (args, kwargs), steps, locate=simulated.culprit)

    def find_non_finite(self, *args: Any, **kwargs: Any) -> NonFinite | None:
        """The first value of a call that is NaN or infinite while what it is made of is not; None if there is none.

        The call is made on the state as it is, value by value, and nothing is changed: ask before the step that goes
        wrong, or after loading the checkpoint before it. On several processes all ranks call it, and get one answer.

        Args:
            args: As for a call.
            kwargs: Likewise.
        """
        call, mesh = bind_call(self._signature, args, kwargs), self._mesh()
        with self._seed.ahead():
            layouts, captured = self._captured(call, mesh)
            local, _ = self._partitioned(call, captured, layouts, mesh, passes=Pipeline(()))
            inputs = Guards(captured, local).bind(call.leaves)
        assert not isinstance(inputs, str), inputs
        return self._non_finite(captured, local, inputs)

    def objects(self) -> dict[str, Any]:
        """Modules, optimizers and scalers of the last call that was compiled, by their names, and the step itself.

        Raises:
            CheckpointError: There was none.
        """
        if not self._objects:
            raise CheckpointError(
                "a step that was not called yet knows no modules",
                at=name_of(self._function),
                hint="{'model': model, 'optimizer': optimizer, 'step': step}",
            )
        return {**self._objects, "step": self}

    def state_dict(self) -> dict[str, Any]:
        """What the step keeps between calls: its random numbers."""
        return self._seed.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self._seed.load_state_dict(state)

    def cache_info(self) -> CacheInfo:
        """Hits and misses, and why each miss was one."""
        return self._cache.info()

    @property
    def plan(self) -> Plan:
        """The plan as given; `lower(...).plan` has the placement of every value."""
        return self._options.plan or data_parallel()

    def _options_for(self, mesh: Mesh) -> Options:
        return replace(self._options, mesh=mesh, plan=self._found or self.plan, outputs="full", check_every=None)

    @property
    def _found(self) -> Plan | None:
        """The plan that was found, if one was searched for."""
        return self._search.found.plan if self._search else None

    def _planned(self, mesh: Mesh) -> Plan:
        """The plan of every axis; before a search, what is known of the rows that each rank has."""
        return self._found or self.plan.over(mesh)

    @abstractmethod
    def _mesh(self) -> Mesh:
        """The mesh, resolved."""

    @abstractmethod
    def _layouts(self, call: Call, mesh: Mesh) -> tuple[list[Layout | None], list[tuple[int, ...] | None]]:
        """Layout and global shape of each leaf that is a tensor."""

    @abstractmethod
    def _own_layouts(self, captured: Captured, mesh: Mesh) -> dict[Slot, Layout]:
        """The layouts of state that lies in DTensors already."""

    @abstractmethod
    def _executor(self, captured: Captured, local: Program, inputs: Sequence[Any], call: Call) -> Executor:
        """What runs the program."""

    @abstractmethod
    def _agree(self, call: Call, mesh: Mesh, reason: str) -> None:
        """See that all ranks make the same call."""

    @abstractmethod
    def _non_finite(self, captured: Captured, local: Program, inputs: list[Any]) -> NonFinite | None:
        """See `find_non_finite`."""

    @abstractmethod
    def _called(self, executor: Executor, inputs: Sequence[Any]) -> None:
        """Look after what was called, where `check_every` asks for it."""

    def _compile(self, call: Call, signature: Signature, reason: str) -> tuple[Executor, list[Any]]:
        mesh = self._mesh()
        self._agree(call, mesh, reason)
        captured, local, resized = self._program(call, signature, mesh)
        guards = Guards(captured, local)
        self._objects = dict([*captured.state.modules, *captured.state.optimizers, *captured.state.scalers])
        captured.state.held.clear()  # what becomes a shard must not be held whole
        inputs = guards.bind(call.leaves)
        assert not isinstance(inputs, str), inputs
        executor = self._executor(captured, local, inputs, call)
        self._cache.add(signature, guards, executor, reason, name_of(self._function), resized=resized)
        self._compilations += 1
        return executor, inputs

    def _program(self, call: Call, signature: Signature, mesh: Mesh) -> tuple[Captured, Program, bool]:
        """The call captured, its local program, and whether that is one for other sizes."""
        self.plan.check(mesh)
        layouts, captured = self._captured(call, mesh)
        found = self._resizing.find(signature, layouts, captured.program)
        if found is not None:
            return captured, found, True
        local, _ = self._partitioned(call, captured, layouts, mesh)
        if (
            not captured.creates_state and not self._options.edits
        ):  # it runs more than once; edits are made once a program
            new = Compiled(signature, tuple(layouts), captured.program, local)
            dims = dynamic_dims(call, self._options.inputs)
            self._resizing.learn(call, new, dims, lambda other: self._compiled(other, mesh))
        return captured, local, False

    def _compiled(self, call: Call, mesh: Mesh) -> Compiled:
        """The programs for a call that is not made."""
        layouts, captured = self._captured(call, mesh)
        local, _ = self._partitioned(call, captured, layouts, mesh)
        return Compiled(Signature.of(call.spec, call.names, call.leaves), tuple(layouts), captured.program, local)

    def _captured(self, call: Call, mesh: Mesh) -> tuple[list[Layout | None], Captured]:
        """How the arguments of a call lie, and its global program."""
        layouts, shapes = self._layouts(call, mesh)
        captured = capture(
            self._function,
            call.invoker(self._function),
            call.leaves,
            call.names,
            shapes,
            mesh,
            self._seed.now,
            functools.partial(stand_ins, self._options.module_override),
        )
        if self.plan.auto is not None and self._search is None:
            self._search = self._searched(call, captured, mesh)
            layouts, _ = self._layouts(call, mesh)
        return layouts, captured

    def _searched(self, call: Call, captured: Captured, mesh: Mesh) -> Search:
        """The plan for a call, found; the step keeps it: state lies as it says."""
        own = self._own_layouts(captured, mesh)

        def arguments(plan: Plan) -> Placements:
            layouts = argument_layouts(call, mesh, plan, self._options.inputs, whole=self._takes_whole, warn=False)
            return lambda axis: placements_along(axis, call.names, layouts) | {s: lies[axis] for s, lies in own.items()}

        passes = self._options.pipeline(mesh)
        return find_plan(captured.program, self.plan, arguments, any_batch=self._takes_whole, passes=passes)

    def _partitioned(
        self,
        call: Call,
        captured: Captured,
        layouts: Sequence[Layout | None],
        mesh: Mesh,
        observe: Callable[[PassRecord], Any] | None = None,
        passes: Pipeline | None = None,
        decided: Callable[[Stage], Any] | None = None,
    ) -> tuple[Program, Plan]:
        """The local program, and the plan with the placement of every value."""
        own = self._own_layouts(captured, mesh)
        return local_program(
            captured.program,
            self._planned(mesh),
            lambda axis: placements_along(axis, call.names, layouts) | {s: layout[axis] for s, layout in own.items()},
            whole_outputs=self._options.outputs == "full",
            passes=self._options.pipeline(mesh) if passes is None else passes,
            observe=observe,
            decided=decided,
        )


class CompiledStep(Step):
    """A step that runs on the processes of this run, each rank passing its own rows."""

    _made = itertools.count()

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        """Number the step: all ranks make their steps in the same order."""
        super().__init__(function, options)
        self._topic = f"{name_of(function)}/{next(self._made)}"
        self._calls = self._history = self._looked = 0
        self._seed = Seed(self._topic)

    def _mesh(self) -> Mesh:
        return self._options.mesh or Mesh(dp=init().size)

    def _layouts(self, call: Call, mesh: Mesh) -> tuple[list[Layout | None], list[tuple[int, ...] | None]]:
        layouts = argument_layouts(call, mesh, self._planned(mesh), self._options.inputs)
        shapes = [
            None if layout is None else _global_shape(leaf, layout, mesh)
            for leaf, layout in zip(call.leaves, layouts, strict=True)
        ]
        return layouts, shapes

    def _agree(self, call: Call, mesh: Mesh, reason: str) -> None:
        check_mesh(mesh, init())
        agree_on_call(f"{self._topic}/{self._compilations}", call.names, call.leaves, reason)

    def _own_layouts(self, captured: Captured, mesh: Mesh) -> dict[Slot, Layout]:
        return own_layouts(captured.state, mesh)

    def _executor(self, captured: Captured, local: Program, inputs: Sequence[Any], call: Call) -> Executor:
        topic = f"{self._topic}/{self._compilations}"
        agree_on_program(topic, local, str(self.plan))
        if self._compilations == 0:
            agree_on_state(topic, local.slots, inputs)
            layouts, _ = self._layouts(call, local.mesh)
            agree_on_arguments(topic, call.names, call.leaves, layouts, local.mesh)
        device = next((t.device.type for t in inputs), "cpu")
        module = lower(local, axis_groups(local.mesh, device))
        cold = captured.creates_state and self._options.backend == "inductor"  # runs once: not worth compiling
        shards = Shards(captured, local)
        run = build("eager" if cold else self._options.backend, module, shards.local(inputs))
        wrap = dtensor_wrap(local.mesh) if self._options.outputs == "dtensor" else _as_it_is
        return LocalExecutor(captured, local, run, shards, wrap, self._compilations)

    def _non_finite(self, captured: Captured, local: Program, inputs: list[Any]) -> NonFinite | None:
        self._looked += 1
        return find_here(local, Shards(captured, local).local(inputs), f"{self._topic}/non_finite/{self._looked}")

    def _called(self, executor: Executor, inputs: Sequence[Any]) -> None:
        assert isinstance(executor, LocalExecutor) and self._options.check_every is not None
        self._calls, self._history = self._calls + 1, zlib.crc32(b"%d" % executor.number, self._history)
        if self._calls % self._options.check_every == 0:
            executor.replicas.check(f"{self._topic}/replicas/{self._calls}", inputs, self._history)


class SimulatedStep(Step):
    """A step that plays every rank of its mesh in this process; takes the GLOBAL batch, returns whole outputs."""

    _takes_whole = True

    def culprit(self, *args: Any, **kwargs: Any) -> Culprit | None:
        """The first value of a call that the ranks compute otherwise than one device; None if there is none.

        Args:
            args: As for a call. Nothing of the caller's is changed.
            kwargs: Likewise.
        """
        call, mesh = bind_call(self._signature, args, kwargs), self._mesh()
        with self._seed.ahead():
            layouts, captured = self._captured(call, mesh)
            inputs = Guards(captured, captured.program).bind(call.leaves)
        assert not isinstance(inputs, str), inputs
        stages = partitions(
            captured.program,
            self._planned(mesh),
            lambda axis: placements_along(axis, call.names, layouts),
            whole_outputs=self._options.outputs == "full",
        )
        return find_culprit(captured.program, stages, self._options.pipeline(mesh), inputs)

    def _mesh(self) -> Mesh:
        if self._options.mesh is None:
            raise InputError("simulate needs a mesh", at="simulate(mesh=None)", hint="mesh=Mesh(dp=2)")
        return self._options.mesh

    def _layouts(self, call: Call, mesh: Mesh) -> tuple[list[Layout | None], list[tuple[int, ...] | None]]:
        layouts = argument_layouts(call, mesh, self._planned(mesh), self._options.inputs, whole=True)
        shapes = [
            None if layout is None else tuple(leaf.shape) for leaf, layout in zip(call.leaves, layouts, strict=True)
        ]
        return layouts, shapes

    def _agree(self, call: Call, mesh: Mesh, reason: str) -> None:
        """There is only this process."""

    def _own_layouts(self, captured: Captured, mesh: Mesh) -> dict[Slot, Layout]:
        for held in captured.state.held:
            if isinstance(held.tensor, DTensor):
                raise InputError(
                    "simulate on state that lies in shards",
                    at=f"{held.slot}, a DTensor on {held.tensor.device_mesh}",
                    hint="a model of whole tensors: verify before the first step, or load a checkpoint",
                )
        return {}

    def _executor(self, captured: Captured, local: Program, inputs: Sequence[Any], call: Call) -> Executor:
        return SimulatedExecutor(captured, local)

    def _non_finite(self, captured: Captured, local: Program, inputs: list[Any]) -> NonFinite | None:
        return find_on_all(local, split_inputs(inputs, local))

    def _called(self, executor: Executor, inputs: Sequence[Any]) -> None:
        """Replicas are compared in every call."""


def _global_shape(leaf: Tensor, layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    return tuple(leaf.shape) if isinstance(leaf, DTensor) else layout.global_shape(leaf.shape, mesh)


def _as_it_is(value: Any, layout: Layout) -> Any:
    return value


@overload
def compile(function: Callable[..., Any], /) -> CompiledStep: ...  # noqa: A001
@overload
def compile(  # noqa: A001
    *,
    mesh: Mesh | None = None,
    plan: Plan | None = None,
    inputs: Inputs | None = None,
    outputs: str = "local",
    backend: Backend = "inductor",
    passes: Pipeline | str | None = None,
    module_override: Overrides | None = None,
    gm_transformation: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    memory: int | None = None,
    check_every: int | None = None,
) -> Callable[[Callable[..., Any]], CompiledStep]: ...
def compile(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:  # noqa: A001
    """Compile a single-device train step into one program for a mesh of devices. A decorator, bare or with arguments.

    Args:
        function: The step: forward, loss, backward, clipping, optimizer, on whatever arguments it takes.
        options: As keywords.

            mesh: The ranks; None is all processes on one axis "dp".
            plan: Where state and computation lie; None is `plans.data_parallel()`.
            inputs: Layout of arguments by name or path; else a tensor with dims is this rank's rows of dim 0, and
                anything else is the same on all ranks.
            outputs: How what is sharded comes back: "local" rows, "full", or "dtensor".
            backend: "inductor", "eager", or a callable of (GraphModule, example inputs) that returns a callable.
            passes: A `Pipeline`, or its text form; None is the default one.
            module_override: Stand-ins for modules while the step is traced, see `Override`; `Opaque` for modules that
                cannot be traced.
            gm_transformation: Gets the graph that each rank runs, after all passes, as a `GraphModule`, once for each
                program that is compiled, and returns it or another one. Its inputs and outputs must stay what they
                are; that is checked.
            memory: Bytes that a rank may hold, as `lower(...).memory` counts them: activations are computed again for
                the backward instead of being held, until it is enough. None holds all.
            check_every: After every so many calls, state that several ranks hold is compared between them, to the
                bit; None never does. What differs is a `VerifyError` that names rank, state and element.

    Raises:
        InputError: An option has a value that it cannot have.
    """
    return _decorator(CompiledStep, function, _options(options))


def simulate(
    function: Callable[..., Any],
    *,
    mesh: Mesh,
    plan: Plan | None = None,
    inputs: Inputs | None = None,
    passes: Pipeline | str | None = None,
    module_override: Overrides | None = None,
    gm_transformation: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    memory: int | None = None,
) -> SimulatedStep:
    """As `compile`, but every rank of the mesh runs in this process, without a launcher.

    The step takes the GLOBAL batch and returns whole outputs. A batch that does not divide evenly is computed
    replicated, which is exact, with a line in the log.

    Args:
        function: The step.
        mesh: The ranks.
        plan: As for `compile`.
        inputs: As for `compile`.
        passes: As for `compile`.
        module_override: As for `compile`.
        gm_transformation: As for `compile`.
        memory: As for `compile`.
    """
    given: Any = passes
    options = Options(mesh, plan, inputs, "full", "eager", given, module_override, gm_transformation, memory)
    return SimulatedStep(_plain(function, "simulate(...)"), _checked(options))


def _decorator(kind: type[CompiledStep], function: Callable[..., Any] | None, options: Options) -> Any:
    return (lambda f: _step(kind, f, options)) if function is None else _step(kind, function, options)


def _step(kind: type[CompiledStep], function: Any, options: Options) -> CompiledStep:
    return kind(_plain(function, "compile(...)"), options)


def _plain(function: Any, where: str) -> Callable[..., Any]:
    if isinstance(function, Step) or not callable(function):
        what = "a step that is compiled already" if isinstance(function, Step) else f"a {type(function).__name__}"
        raise InputError(f"{what} instead of a function", at=where, hint="the plain function, once")
    return function


def _options(given: dict[str, Any]) -> Options:
    try:
        options = Options(**given)
    except TypeError as error:
        raise InputError(
            str(error).split("__init__() ")[-1], at="compile(...)", hint=", ".join(Options.__slots__)
        ) from None
    return _checked(options)


def _checked(options: Options) -> Options:
    given: Any = options.passes
    if isinstance(given, str):
        options = replace(options, passes=pipeline(given))
    overrides_of(options.module_override)
    if not (options.gm_transformation is None or callable(options.gm_transformation)):
        raise InputError(
            f"gm_transformation is a {type(options.gm_transformation).__name__}",
            at="compile(gm_transformation=...)",
            hint="a function that takes a GraphModule and returns one",
        )
    check_backend(options.backend)
    for name, kind in (("mesh", Mesh), ("plan", Plan)):
        value: Any = getattr(options, name)
        if not isinstance(value, kind | None):
            raise InputError(
                f"{name} is a {type(value).__name__}", at=f"compile({name}=...)", hint=f"a meshstep.{kind.__name__}"
            )
    check_inputs(options.inputs)
    passes: Any = options.passes
    if not isinstance(passes, Pipeline | None):
        raise InputError(
            f"passes is a {type(passes).__name__}", at="compile(passes=...)", hint="meshstep.Pipeline((...))"
        )
    memory: Any = options.memory
    if memory is not None and not (isinstance(memory, int) and memory > 0):
        raise InputError(f"a memory of {memory!r}", at="compile(memory=...)", hint="bytes a rank: 80 * 2**30")
    every: Any = options.check_every
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise InputError(f"check_every is {every!r}", at="compile(check_every=...)", hint="a number of calls: 1000")
    if options.outputs not in OUTPUTS:
        raise InputError(
            f"no outputs {options.outputs!r}", at="compile(outputs=...)", hint=", ".join(map(repr, OUTPUTS))
        )
    return options


def verify(
    function: Callable[..., Any],
    make_args: MakeArgs,
    *,
    mesh: Mesh,
    plan: Plan | None = None,
    steps: int = 5,
    dtype: torch.dtype | None = torch.float64,
    backend: str = "eager",
) -> Verification:
    """Prove that the compiled step computes what the plain one does.

    Runs the plain Python on one device, and the compiled program on all virtual ranks, and compares outputs,
    parameters, buffers, gradients and optimizer state after every step.

    Args:
        function: The step.
        make_args: Gives (args, kwargs) of step i, with the GLOBAL batch. Models and optimizers are taken from step 0
            (copies of them: yours are not changed) and kept.
        mesh: The ranks.
        plan: As for `compile`.
        steps: Number of steps.
        dtype: What floating-point tensors are brought to, and what the step casts to a narrower dtype inside: rounding
            in float32 or bfloat16 would hide errors of the program. None leaves all as it is.
        backend: Only "eager" can play several ranks in one process.

    Raises:
        InputError: `make_args`, `dtype` or `backend` is not as said.
    """
    if backend != "eager":
        raise InputError(f"backend {backend!r} in verify", at="verify(backend=...)", hint='"eager"')
    given: Any = dtype
    if not (given is None or (isinstance(given, torch.dtype) and given.is_floating_point)):
        raise InputError(
            f"dtype {dtype!r} in verify", at="verify(dtype=...)", hint="torch.float64, or None to leave all as it is"
        )
    wide = function if dtype is None else widened(function, dtype)
    step = simulate(wide, mesh=mesh, plan=plan)
    with _random_state_kept():
        return compare(wide, step, make_args, steps, dtype, step.culprit)


def _random_state_kept() -> AbstractContextManager[None]:
    """What is drawn inside is not drawn outside: a comparison changes nothing of the caller's."""
    return torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else [])
