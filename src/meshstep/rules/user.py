"""Rules that the user writes: `@meshstep.rule(op)`, and those given to torch's `register_sharding`.

They come before those of the table, and are not believed either: at the first call of each kind the op is run on small
tensors, whole and in shards.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .._torch import OpOverload, registered_sharding
from ..errors import RuleError
from ..layout import REPLICATE, placement_text, shard, shard_dim
from . import lookup
from .experiment import Clock, Experiment, OutOfTimeError, UnfitError, apart, first_line
from .rule import Entry, OpCall, Rule, divides, spelled
from .small import DRAWS, Small, draw, real_call, tried_calls
from .validator import Trial

Rules = Callable[[OpCall], Iterable[Rule]]
Localize = Callable[[OpCall, Rule, int], Mapping[str, Any]]
R = TypeVar("R", bound=Rules)

_SIZES = (2, 3, 5, 7)
_MOST_ELEMENTS = 2**20  # of a real call that is used where no small one reaches a rule
_BELIEVE = "validate=False believes it"


def rule(op: OpOverload, *, localize: Localize | None = None, validate: bool = True) -> Callable[[R], R]:
    """Give an op sharding rules, which come before those that meshstep has. A decorator.

        @meshstep.rule(torch.ops.my.scale.default)
        def scale_rules(call: OpCall) -> Iterable[Rule]:
            for dim in range(call["x"].ndim):
                yield Rule((Shard(dim), Replicate()), (Shard(dim),))

        meshstep.rule(torch.ops.my.linear.default)(meshstep.rules.factor("bm,mk->bk"))

    Args:
        op: The op, a functional one.
        localize: For a call, a chosen rule and the number of ranks: the non-tensor arguments that are others on one
            rank (a size, say), by name.
        validate: Whether the rules are run on real shards at the first call of each kind.

    Raises:
        RuleError: `op` is no op, or its rules are no function. At the first use: a rule does not fit its arguments,
            or is wrong.
    """
    where, path = _caller(), traceback.extract_stack(limit=2)[0].filename
    given: Any = op
    if not isinstance(given, OpOverload):
        raise RuleError(
            f"rules for {given}, which is a {type(given).__name__} and no op",
            at=where,
            hint="an overload, as in torch.ops.my.op.default",
        )

    def register(rules: R) -> R:
        if not callable(rules):
            raise RuleError(
                f"the rules of {op} are a {type(rules).__name__}",
                at=where,
                hint="a function of a call that gives rules, or rules.factor('bm,mk->bk')",
            )
        checked = Checked(op, rules, where, validate, path)
        lookup.register(op, Entry(checked, localize, permutes=False))
        return rules

    return register


def origin(op: OpOverload) -> tuple[str, str] | None:
    """Where a user has given an op rules: the line for people, and the path of the file; None if nobody has."""
    entry = lookup.registered(op)
    given = None if entry is None else entry.rules
    return (given.where, given.path) if isinstance(given, Checked) else None


def registered_with_torch(op: OpOverload) -> Entry | None:
    """The rules given to `torch.distributed.tensor.experimental.register_sharding`; None if there are none."""
    function = registered_sharding(op)
    return None if function is None else _torch_entry(op, function)


@functools.cache
def _torch_entry(op: OpOverload, function: Callable[..., Any]) -> Entry:
    code = getattr(function, "__code__", None)
    where = f"register_sharding of {getattr(function, '__name__', 'a function')}"
    place = f"{where} ({_line(code.co_filename, code.co_firstlineno)})" if code else where
    return Entry(Checked(op, functools.partial(_converted, op, function), place, True), permutes=False)


def _converted(op: OpOverload, function: Callable[..., Any], call: OpCall) -> Iterator[Rule]:
    """Pairs of output and input placements, with None for each argument that is no tensor, as rules."""
    args, kwargs = spelled(op, call.arguments)
    for outputs, inputs in function(*args, **kwargs):
        given = [p for p in inputs if p is not None]
        found = Rule(_counted(given, call.tensors), tuple(_forward(p, t) for p, t in zip(outputs, call.outputs)))
        if all(isinstance(p, Replicate) for p in given) or not all(map(_is_ours, (*found.inputs, *found.outputs))):
            continue
        yield found


def _counted(given: list[Placement], types: tuple) -> tuple[Placement, ...]:
    return tuple(_forward(p, t) for p, t in zip(given, types)) if len(given) == len(types) else tuple(given)


def _forward(placement: Any, type_: Any) -> Any:
    """The same placement, its dim counted from 0."""
    if type(placement) is Shard and type_ is not None:
        return shard(placement.dim % max(type_.ndim, 1))
    return placement


def _is_ours(placement: Placement | None) -> bool:
    if isinstance(placement, Partial):
        return placement.reduce_op in ("sum", "max", "min")
    return placement is None or type(placement) in (Shard, Replicate)


@dataclass(slots=True)
class Checked:
    """Rules that are checked when they are used.

    Args:
        op: The op.
        rules: Gives them.
        where: Where the user wrote them.
        validate: Whether they are run.
        path: The file in which they were registered; "" if unknown.
    """

    op: OpOverload
    rules: Rules
    where: str
    validate: bool
    path: str = ""
    valid: set[Any] = field(default_factory=set)

    def __call__(self, call: OpCall) -> list[Rule]:
        """The rules of a call.

        Raises:
            RuleError: One does not fit the call, or is wrong.
        """
        found = self._made(call)
        key = (repr(call.arguments), tuple((r.inputs, r.outputs) for r in found))
        if self.validate and key not in self.valid:
            with apart():
                self._validate(call, found)
            self.valid.add(key)
        return found

    def _made(self, call: OpCall) -> list[Rule]:
        try:
            found = list(self.rules(call))
        except RuleError:
            raise
        except Exception as error:  # whatever the user's function raises
            what = str(error) or type(error).__name__
            raise RuleError(
                f"the rules of {self.op} cannot be made: {what}", at=self._at(call), hint=_signature(self.op)
            ) from error
        for made in found:
            fault = _unfit(made, call)
            if fault:
                raise RuleError(f"a rule of {self.op} {fault}", at=self._at(call), hint=_signature(self.op))
        return found

    def _validate(self, call: OpCall, rules: list[Rule]) -> None:
        """Run every rule on the first small call that it can shard."""
        open_ = [made for made in rules if any(p != REPLICATE for p in made.inputs)]
        why = "no small call of it divides"
        for small in self._calls(call):
            if not open_:
                return
            try:
                trials = [Trial.of(self.op, (), draw(small, how, i), 1) for i, how in enumerate(DRAWS[:4])]
            except Exception as error:  # whatever a kernel raises
                why = f"it fails on small tensors: {first_line(error)}"
                continue
            open_ = [made for made in open_ if not self._reaches(made, trials, small, call)]
        if open_:
            raise RuleError(
                f"a rule of {self.op} cannot be validated: {_text(open_[0])}: {why}", at=self._at(call), hint=_BELIEVE
            )

    def _calls(self, call: OpCall) -> Iterator[Small]:
        yield from tried_calls(call)
        if sum(t.numel for t in call.tensors) <= _MOST_ELEMENTS:
            yield real_call(call).widened()
            yield real_call(call)

    def _reaches(self, made: Rule, trials: list[Trial], small: Small, call: OpCall) -> bool:
        """Whether these trials can shard as a rule says; raises if they show that it is wrong."""
        reached = False
        for trial in trials:
            here = next((r for r in self._made(trial.call) if r == made), made)
            for size in (s for s in _SIZES if divides(trial.call, here, s)):
                reached = True
                fault = _fault(Trial(trial.call, trial.arguments, trial.whole, size, trial.run), here)
                if fault:
                    raise RuleError(
                        f"a rule of {self.op} is wrong over {size} ranks: {_text(made)}: {fault.splitlines()[0]}",
                        at=self._at(call),
                        hint=self._hint(made, small),
                    )
        return reached

    def _hint(self, made: Rule, small: Small) -> str:
        """What these inputs give, if anything."""
        tied = tuple(place for place, _ in small.tied)
        try:
            experiment = Experiment(self.op, small, Clock(1.0), DRAWS)
            outputs = experiment.holds(made.inputs)
            shared = experiment.holds(made.inputs, tied) if tied and outputs is None else None
        except (UnfitError, OutOfTimeError):
            outputs = shared = None
        if outputs is not None:
            return f"{_text(Rule(made.inputs, outputs))}, which holds; {_BELIEVE}"
        if shared is not None:
            names = ", ".join(dict.fromkeys(name for name, _ in tied))
            right = _text(Rule(made.inputs, shared))
            return f"localize=..., by which each rank gets its share of {names}: so {right} holds"
        return f"leave the rule out: these inputs give no outputs that are placed; {_BELIEVE}"

    def _at(self, call: OpCall) -> str:
        types = ", ".join(map(str, call.tensors))
        return f"{self.where}, for {self.op}({types}) -> {', '.join(map(str, call.outputs))}"


def _unfit(made: Any, call: OpCall) -> str | None:
    """What is wrong with the form of a rule."""
    if not isinstance(made, Rule):
        return f"is a {type(made).__name__}, not a Rule"
    for what, placements, types in (("inputs", made.inputs, call.tensors), ("outputs", made.outputs, call.outputs)):
        if len(placements) != len(types):
            return f"has {len(placements)} placements for {len(types)} {what}"
        for i, (placement, type_) in enumerate(zip(placements, types)):
            if (placement is None) != (type_ is None) or not _is_ours(placement):
                return f"places {what[:-1]} {i}, {type_}, as {placement}"
            if (
                placement is not None
                and type_ is not None
                and not 0 <= (shard_dim(placement) or 0) < max(type_.ndim, 1)
            ):
                return f"places {what[:-1]} {i}, {type_}, as {placement_text(placement)}"
    if any(isinstance(p, Partial) and p.reduce_op != "sum" for p in made.inputs):
        return "takes a partial input that is no sum"
    return None


def _fault(trial: Trial, made: Rule) -> str | None:
    """What the validator has against a rule."""
    try:
        return trial.fault(made)
    except RuleError:
        raise
    except Exception as error:  # whatever a kernel or a local form raises
        return f"the op fails on a shard: {first_line(error)}"


def _text(made: Rule) -> str:
    before = ", ".join(map(placement_text, made.inputs))
    after = ", ".join("none" if p is None else placement_text(p) for p in made.outputs)
    return f"{before} -> {after}"


def _signature(op: OpOverload) -> str:
    return f"one placement for each tensor of {op._schema}, dims counted from 0"


def _caller() -> str:
    frame = traceback.extract_stack(limit=3)[0]
    return _line(frame.filename, frame.lineno or 0)


def _line(path: str, number: int) -> str:
    return f"{path.replace(chr(92), '/').rpartition('/')[2]}:{number}"
