"""The words that the page and the text share: figures with units, and the three answers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..plan.plan import AxisPlan
from .facts import Alternative, Axis, Facts, Memory

_STAGES = ("", "optimizer state", "optimizer state and gradients", "parameters, gradients and optimizer state")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STATE = ("parameters", "buffers", "gradients", "optimizer_state")


@dataclass(frozen=True, slots=True)
class Answer:
    """One of the three questions, answered.

    Args:
        question: As a person would ask it.
        headline: The answer in a line.
        details: What it rests on.
        good: Whether it is good news; None if it is just news.
    """

    question: str
    headline: str
    details: tuple[str, ...]
    good: bool | None = None


def answers(facts: Facts) -> tuple[Answer, Answer, Answer]:
    """Which parallelism, what does it cost, does it fit and why."""
    return _which(facts), _cost(facts), _fits(facts)


def time_text(us: float) -> str:
    """`12.3 us`, `4.56 ms`, `1.23 s`."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if abs(us) >= size:
            return f"{_precise(us / size)} {unit}"
    return f"{_precise(us)} us"


def size_text(count: int) -> str:
    """`256 B`, `1.5 KiB`, `61.2 GiB`."""
    size, unit = float(count), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{_precise(size)} {_UNITS[unit]}"


def _precise(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(part: float, whole: float) -> str:
    """`12 %`, `0.3 %`."""
    share = 100 * part / whole if whole else 0.0
    return f"{share:.0f} %" if share >= 1 or share == 0 else f"{share:.1g} %"


def count_text(count: int, noun: str) -> str:
    """`1 rank`, `1,024 ranks`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def does(plan: AxisPlan) -> str:
    """What the plan of an axis means, in words."""
    said = []
    if plan.batch_dim is not None:
        said.append("batch split" if plan.batch_dim == 0 else f"dim {plan.batch_dim} of the arguments split")
    if plan.stage:
        said.append(f"{_STAGES[plan.stage]} kept in shards")
    if plan.regather:
        said.append("parameters gathered again for the backward")
    if plan.in_place and plan.patterns:
        said.append(f"layers computed in shards by {count_text(len(plan.patterns), 'name pattern')}")
    return "; ".join(said) or "everything whole on every rank"


def alternative_text(found: Alternative | None, kind: str) -> str:
    """What could be done instead, its price, and why it is not done."""
    if found is None:
        return "no other rule"
    if not found.open:
        verdict = f"ruled out by {kind}"
    else:
        verdict = "rejected for its price" if found.price >= 0 else "open, and cheaper on this device alone"
    return f"{found.what}: {signed(found.price)}, {verdict}"


def signed(us: float) -> str:
    """`+1.2 ms`, `-30 us`."""
    return f"{'-' if us < 0 else '+'}{time_text(abs(us))}"


def pattern(name: str) -> str:
    """`blocks.*.up` of `blocks.7.up`: what repeated layers share."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _which(facts: Facts) -> Answer:
    headline = " + ".join(f"{axis.kind} on {axis.axis}={axis.size}" for axis in facts.mesh)
    total = len(facts.parameters)
    details = [f"{axis.axis}: {axis.does}; {axis.sharded} of {total} parameters in shards" for axis in facts.mesh]
    held = sum(p.bytes + p.state_bytes for p in facts.parameters)
    whole = sum(p.whole_bytes for p in facts.parameters)
    details.append(f"{size_text(whole)} of parameters in all; a rank holds {size_text(held)} with optimizer state")
    return Answer("Which parallelism?", f"{headline}, {count_text(facts.ranks, 'rank')}", tuple(details))


def _cost(facts: Facts) -> Answer:
    time = facts.time
    hidden = time.communication - time.exposed
    details = [
        f"{time_text(time.compute)} of compute, {time_text(time.communication)} of communication",
        f"{time_text(hidden)} of that is hidden behind compute, {time_text(time.exposed)} is waited for",
        *map(_axis, facts.mesh),
    ]
    waits = f"{percent(time.exposed, time.step)} of it waiting for communication"
    return Answer("What does it cost?", f"{time_text(time.step)} a step, {waits}", tuple(details))


def _axis(axis: Axis) -> str:
    if not axis.collectives:
        return f"{axis.axis}: nothing is sent"
    sent = f"{count_text(axis.collectives, 'collective')}, {size_text(axis.bytes)} sent by each rank"
    return f"{axis.axis}: {sent}, {time_text(axis.time)} ({time_text(axis.exposed)} exposed)"


def _fits(facts: Facts) -> Answer:
    memory = facts.memory
    peak = size_text(memory.peak)
    if memory.limit is None:
        headline = f"{peak} a rank at the peak; no limit was given"
    else:
        share = f"{peak} of {size_text(memory.limit)} a rank ({percent(memory.peak, memory.limit)})"
        headline = f"Yes: {share}" if memory.fits else f"No: {share}"
    return Answer("Does it fit, and why?", headline, _why(memory), memory.fits)


def _why(memory: Memory) -> tuple[str, ...]:
    state = sum(memory.parts[name] for name in _STATE)
    computed = memory.parts["activations"] + memory.parts["temporaries"]
    details = [
        f"{size_text(state)} is state, {size_text(computed)} is what the step computes, most at {memory.at}",
        "; ".join(f"{size_text(size)} {name.replace('_', ' ')}" for name, size in memory.parts.items() if size),
    ]
    if memory.largest:
        first = memory.largest[0]
        where = first.source or first.module or "no line of yours"
        details.append(f"largest value: {first.value} {first.type}, {size_text(first.bytes)}, {first.op} at {where}")
    if memory.limit is not None and not memory.fits:
        details.append(_advice(state, memory.limit))
    if memory.new_state:
        details.append(f"this call makes {size_text(memory.new_state)} of state; later calls are given it")
    return tuple(details)


def _advice(state: int, limit: int) -> str:
    if state > limit:
        return "the state alone does not fit: shard more of it, or over more ranks"
    return "the state fits; what the step computes does not: fewer rows a rank, more shards, or recomputation"
