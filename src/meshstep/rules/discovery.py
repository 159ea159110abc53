"""Rules of an op that no one wrote rules for: it is run on small random tensors, whole and in shards.

What is found are facts about runs and no proof: a threshold that no draw reaches, or a block size larger than the small
tensors, stays hidden. So several scales are drawn, each rule must hold on all draws and on 2 and 3 ranks in double
precision, and where the tensors of the real call are not large it is run once more on their shapes and number of ranks.

Not tried: ops that draw random numbers, change their inputs, have effects, communicate, or whose output shapes depend
on values; ops with a compiled kernel, which may end the process on tensors that do not fit together (PyTorch's own have
rules in the table; give others rules by `@meshstep.rule`); ops that fail on small tensors. They are replicated.

A fingerprint of an op's implementation is not possible, so what the file cache says is tried again, once a process,
before it is believed.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement

from .._torch import OpOverload, has_effects, has_native_kernel
from ..ir.infer import infer
from ..ir.types import TensorType
from ..layout import PARTIAL, REPLICATE, local_shape, placement_text, shard
from .experiment import SIZES, Clock, Experiment, NeverError, OutOfTimeError, UnfitError, apart, share
from .rule import Local, OpCall, Rule, divides, spelled
from .small import DRAWS, UNIT, Draw, Place, Small, mapped, precisions, real_call, tried_calls
from .store import Store
from .validator import Trial

log = logging.getLogger(__name__)

SECONDS = 20.0  # for one op and argument pattern; trials are bounded by number, so that ranks find the same rules
_MOST_SIZES = 8
_PER_SIZE = 64  # candidates that shard dims of one size
_CONFIRMED_ELEMENTS = 2**20  # of a real call, times ranks
_OTHERS = (
    "meshstep", "c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem", "profiler", "prim",
    "higher_order", "inductor", "fsdp",
)  # fmt: skip
_NEVER_TAGS = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_CHECKS = (Draw(), Draw(positive=True))


Candidate = tuple[tuple[Placement, ...], list[tuple[Place, ...]]]


@dataclass(frozen=True, slots=True)
class Learned:
    """A rule that held.

    Args:
        inputs: One placement for each tensor.
        outputs: One for each output; None where the op returns none.
        places: The numbers among the arguments that each rank gets its share of.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement | None, ...]
    places: tuple[Place, ...] = ()

    def __str__(self) -> str:
        """`S(0), R -> S(0)`."""
        sides = (", ".join(placement_text(p) if p else "none" for p in side) for side in (self.inputs, self.outputs))
        return " -> ".join(sides)

    def rule(self) -> Rule:
        """As a rule of a call of any size."""
        return Rule(self.inputs, self.outputs, _form(self.places) if self.places else None)


@dataclass(frozen=True, slots=True)
class Found:
    """What running an op has shown.

    Args:
        learned: The rules that held, those that shard the first dims first.
        seconds: Time that it took in this process.
        runs: How often the op was run for it.
        why: Why there are no rules, or not all; "" if nothing hindered.
        from_file: Whether the rules were read from the cache.
    """

    learned: tuple[Learned, ...] = ()
    seconds: float = 0.0
    runs: int = 0
    why: str = ""
    from_file: bool = False


class Discovery:
    """Finds rules by running, and remembers them.

    Args:
        store: Where results are kept between processes; None is nowhere.
        seconds: Time that one op and pattern may take.
    """

    def __init__(self, store: Store | None = None, seconds: float = SECONDS) -> None:
        """Nothing is known yet."""
        self.store, self.seconds = store, seconds
        self._of_call: dict[Any, Found] = {}
        self._of_pattern: dict[str, Found] = {}
        self._rules: dict[Any, tuple[Rule, ...]] = {}
        self._lock = threading.RLock()

    def rules(self, call: OpCall, size: int) -> tuple[Rule, ...]:
        """The rules of a call along an axis of `size` ranks, without `replicate`."""
        key = (_key(call), size)
        with self._lock:
            if key not in self._rules:
                found = [learned for learned in self.find(call).learned if divides(call, learned.rule(), size)]
                self._rules[key] = tuple(learned.rule() for learned in self._confirmed(call, found, size))
            return self._rules[key]

    def find(self, call: OpCall) -> Found:
        """What is known of a call; runs the op if nothing is."""
        key = _key(call)
        with self._lock:
            if key not in self._of_call:
                why = hindrance(call.op)
                self._of_call[key] = Found(why=why) if why else self._search(call)
                _report(call.op, self._of_call[key])
            return self._of_call[key]

    def forget(self) -> None:
        """Forget what this process knows; files stay."""
        with self._lock:
            self._of_call.clear()
            self._of_pattern.clear()
            self._rules.clear()

    def _search(self, call: OpCall) -> Found:
        clock, why = Clock(self.seconds), "no small call of it can be made"
        with apart():
            for small in tried_calls(call):
                try:
                    experiment = Experiment(call.op, small, clock, DRAWS)
                except NeverError as error:
                    return Found((), clock.spent(), clock.runs, str(error))
                except UnfitError as error:
                    why = str(error)
                except OutOfTimeError:
                    why = "its time is over"
                    break
                else:
                    return self._known(call.op, experiment)
        return Found((), clock.spent(), clock.runs, why)

    def _known(self, op: OpOverload, experiment: Experiment) -> Found:
        pattern = f"{op} {experiment.small} of {op._schema}"
        if pattern not in self._of_pattern:
            found = self._from_file(pattern, op, experiment)
            if found is None:
                found = search(op, experiment)
                if self.store and not found.why:
                    self.store.write(pattern, [(r.inputs, r.outputs, r.places) for r in found.learned])
            self._of_pattern[pattern] = found
            return found
        return replace(self._of_pattern[pattern], seconds=experiment.clock.spent(), runs=experiment.clock.runs)

    def _from_file(self, pattern: str, op: OpOverload, experiment: Experiment) -> Found | None:
        read = self.store.read(pattern) if self.store else None
        if read is None:
            return None
        learned = [Learned(*entry) for entry in read]
        try:
            if not all(_still(experiment, rule) for rule in learned):
                log.warning("what the cache says of %s no longer holds; it is run again", op)
                return None
        except OutOfTimeError:
            return None
        return Found(tuple(learned), experiment.clock.spent(), experiment.clock.runs, from_file=True)

    def _confirmed(self, call: OpCall, learned: Sequence[Learned], size: int) -> Iterator[Learned]:
        """Those whose shards have the right types, and, if the call is not large, the right values."""
        if not learned:
            return
        with apart():
            experiment = self._real_experiment(call, size)
            for rule in learned:
                if not _fits(call, rule, size):
                    log.info(
                        "%s: shards by %s have other types by the op's fake implementation; not used", call.op, rule
                    )
                elif experiment and not _agrees(experiment, rule, size):
                    log.warning(
                        "%s: %s does not hold on %s; not used", call.op, rule, ", ".join(map(str, call.tensors))
                    )
                else:
                    yield rule

    def _real_experiment(self, call: OpCall, size: int) -> Experiment | None:
        elements = sum(t.numel for t in (*call.tensors, *call.outputs) if t)
        if elements * size > _CONFIRMED_ELEMENTS:
            return None
        for small in precisions(real_call(call)):
            with _expected():
                return Experiment(call.op, small, Clock(self.seconds), _CHECKS)
        return None


class _expected:  # noqa: N801
    """Passes over what an experiment raises."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, (UnfitError, OutOfTimeError))


@functools.cache
def hindrance(op: Any) -> str:
    """Why an op is never run to find its rules; "" if it may be."""
    if not isinstance(op, OpOverload) or op.namespace in _OTHERS:
        return "it is no op on tensors alone"
    schema = op._schema
    if "as_strided" in schema.name or schema.name == "aten::_reshape_alias":
        return "it reads memory by strides"
    if schema.is_mutable:
        return "it changes its inputs"
    tags = [tag for tag in _NEVER_TAGS if tag in op.tags]
    if tags:
        return "it draws random numbers" if tags[0] == _NEVER_TAGS[0] else "its output depends on values"
    if has_effects(op):
        return "it has effects"
    if not schema.returns or not all("Tensor" in str(r.type) for r in schema.returns):
        return "it returns what is no tensor"
    if has_native_kernel(op):  # seen: mkldnn_rnn_layer and _weight_norm_interface end the process on unlike sizes
        return "its kernel is compiled and need not check what it is given"
    return ""


def search(op: OpOverload, experiment: Experiment) -> Found:
    """All rules that hold on an experiment."""
    learned: list[Learned] = []
    why = ""
    try:
        for stage in _stages(experiment):  # of one that is broken off nothing is kept: ranks must agree
            learned += [rule for candidate in stage if (rule := _tried(op, experiment, *candidate))]
    except OutOfTimeError:
        why = "its time is over"
    return Found(tuple(learned), experiment.clock.spent(), experiment.clock.runs, why)


def _tried(
    op: OpOverload, experiment: Experiment, inputs: tuple[Placement, ...], variants: Sequence[tuple[Place, ...]]
) -> Learned | None:
    """The rule that these inputs have."""
    for places in variants:
        outputs = experiment.holds(inputs, places)
        if outputs is not None and _passes(op, experiment, Learned(inputs, outputs, places)):
            return Learned(inputs, outputs, places)
    return None


def _passes(op: OpOverload, experiment: Experiment, learned: Learned) -> bool:
    """Whether the validator of the written rules has nothing against it, nor against the form that it is given."""
    arguments, _ = experiment.samples[0]
    try:
        return all(Trial.of(op, (), arguments, size).fault(learned.rule()) is None for size in SIZES)
    except Exception:  # whatever a fake implementation raises on a shard
        return False


def _still(experiment: Experiment, learned: Learned) -> bool:
    if len(learned.inputs) != len(experiment.types):
        return False
    return experiment.holds(learned.inputs, learned.places) == learned.outputs


def _agrees(experiment: Experiment, learned: Learned, size: int) -> bool:
    try:
        return experiment.holds(learned.inputs, learned.places, (size,)) == learned.outputs
    except OutOfTimeError:
        return True


def _fits(call: OpCall, learned: Learned, size: int) -> bool:
    """Whether the op on the local types gives the local types that the rule says."""
    given = iter(learned.inputs)
    local = mapped(call.arguments, TensorType, lambda t: _local(t, next(given), size))
    args, kwargs = spelled(call.op, share(local, learned.places, size))
    try:
        made = infer(call.op, args, kwargs)
    except Exception:  # whatever a fake implementation raises
        return False
    expected = tuple(t and _local(t, p, size) for t, p in zip(call.outputs, learned.outputs, strict=True))
    return (made if isinstance(made, tuple) else (made,)) == expected


def _local(type_: TensorType, placement: Placement | None, size: int) -> TensorType:
    return type_.with_shape(local_shape(type_.shape, placement, "", size)) if placement else type_


# ---- candidates


def _stages(experiment: Experiment) -> Iterator[list[Candidate]]:
    """Placements of the inputs worth trying, each with the sets of numbers that may follow: by size, sums at last."""
    small = experiment.small
    seen: set[tuple[Placement, ...]] = {(REPLICATE,) * len(small.tensors)}
    sizes = dict.fromkeys(s for t in small.tensors for s in t.shape if s % UNIT == 0 and s)
    for size in itertools.islice(sizes, _MOST_SIZES):
        tried = itertools.islice(itertools.product(*_options(small, size)), _PER_SIZE)
        new = [inputs for inputs in tried if inputs not in seen]
        seen |= set(new)
        yield [(inputs, _variants(small, size)) for inputs in new]
    yield [(inputs, [()]) for inputs in _sums(small.tensors)]


def _options(small: Small, size: int) -> Iterator[list[Placement]]:
    """For each tensor, the dims that may be sharded along with dims of a size; and whole."""
    leads = small.leads(size)
    for type_ in small.tensors:
        dims = [d for lead in leads for d, s in enumerate(type_.shape) if s == lead]
        yield [*map(shard, dims), REPLICATE]


def _variants(small: Small, size: int) -> list[tuple[Place, ...]]:
    tied = tuple(place for place, value in small.tied if value == size)
    return list(dict.fromkeys([(), tied, *((place,) for place in tied)]))


def _sums(types: Sequence[TensorType]) -> Iterator[tuple[Placement, ...]]:
    """One tensor as a sum over the ranks, two, or all that can be."""
    floats = [i for i, t in enumerate(types) if t.dtype.is_floating_point or t.dtype.is_complex]
    sets = [*((i,) for i in floats), *(itertools.combinations(floats, 2) if len(floats) <= 4 else ()), tuple(floats)]
    for which in dict.fromkeys(s for s in sets if s):
        yield tuple(PARTIAL if i in which else REPLICATE for i in range(len(types)))


def _form(places: tuple[Place, ...]) -> Callable[[Local], tuple[fx.Node, ...]]:
    """The same op with this rank's share of some numbers."""

    def local(form: Local) -> tuple[fx.Node, ...]:
        names = {name: form.call[name] for name, _ in places}
        node = form.again(**share(names, places, form.size))
        return form.parts(node) if isinstance(node.meta["type"], tuple) else (node,)

    return local


# ---- memory


def _key(call: OpCall) -> Any:
    return (call.op, tuple(map(_hashable, call.arguments.values())), call.outputs)


def _hashable(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    return (type(value), value)


def _report(op: OpOverload, found: Found) -> None:
    if found.learned:
        where = "read and tried again" if found.from_file else "found by running it"
        log.info("%s: %d rules %s %d times, %.2f s", op, len(found.learned), where, found.runs, found.seconds)
    if found.why:
        log.info("%s: %s; what is not known is replicated", op, found.why)


discovery = Discovery(Store())
