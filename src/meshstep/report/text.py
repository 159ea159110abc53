"""Facts as plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .facts import Collective, Facts, Parameter
from .words import alternative_text, answers, pattern, size_text, time_text

WIDE = 60  # of a column; what is longer stands out


def report_text(facts: Facts) -> str:
    """The whole report; parameters and collectives that repeated layers share are one line."""
    lines = [f"{facts.step} on {facts.ranks} ranks: {facts.device.name}, predicted", ""]
    for answer in answers(facts):
        lines += [answer.question, f"  {answer.headline}", *(f"    {detail}" for detail in answer.details), ""]
    lines += ["Parameters", *_table(_PARAMETERS, _parameters(facts)), ""]
    lines += ["Collectives", *_collectives(facts)]
    if facts.whole:
        lines += ["", "Without a rule, computed whole on every rank"]
        lines += [f"  {op} ({count})" for op, count in facts.whole]
    return "\n".join(lines) + "\n"


_PARAMETERS = ("count", "name", "shape", "local", "placement", "a rank", "with state", "why")


def _parameters(facts: Facts) -> list[tuple[str, ...]]:
    groups: dict[tuple, list[Parameter]] = {}
    for parameter in facts.parameters:
        p = parameter
        groups.setdefault((pattern(p.name), p.dtype, p.shape, p.local, p.placements, p.why), []).append(parameter)
    axes = [axis.axis for axis in facts.mesh]
    return [_parameter(group, axes) for group in groups.values()]


def _parameter(group: Sequence[Parameter], axes: Sequence[str]) -> tuple[str, ...]:
    first = group[0]
    own = sum(p.bytes for p in group)
    return (
        f"{len(group)}x",
        first.name if len(group) == 1 else pattern(first.name),
        f"{first.dtype}{list(first.shape)}",
        str(list(first.local)),
        " ".join(f"{placement}@{axis}" for placement, axis in zip(first.placements, axes, strict=True)),
        size_text(own),
        size_text(own + sum(p.state_bytes for p in group)),
        "; ".join(f"{axis}: {why}" for axis, why in zip(axes, first.why, strict=True) if why),
    )


def _collectives(facts: Facts) -> Iterable[str]:
    kinds = {axis.axis: axis.kind for axis in facts.mesh}
    groups: dict[tuple, list[Collective]] = {}
    for c in facts.collectives:
        groups.setdefault((c.kind, c.axis, c.dtype, c.bytes, c.values, c.phase, pattern(c.module), _why(c)), []).append(
            c
        )
    if not groups:
        yield "  nothing is sent"
    for group in groups.values():
        first = group[0]
        values = f" of {first.values} values" if first.values > 1 else ""
        time, exposed = sum(c.time for c in group), sum(c.exposed for c in group)
        yield (
            f"  {len(group)}x {first.kind} over {first.axis}{values}, {first.dtype}, {size_text(first.bytes)} each, "
            f"{time_text(time)} in all, {time_text(exposed)} exposed, {first.phase}"
        )
        yield f"      {_why(first)}"
        if first.causes:
            yield f"      instead: {alternative_text(first.alternative, kinds[first.axis])}"


def _why(collective: Collective) -> str:
    """`aten.mm at model.py:14 gives P(sum), aten.add.Tensor at model.py:15 wants R`."""
    if not collective.causes:
        return f"{collective.why}{_at(collective.source)}"
    first = collective.causes[0]
    more = f"; and {len(collective.causes) - 1} more" if len(collective.causes) > 1 else ""
    maker = f"{pattern(first.maker.what)}{_at(first.maker.source)} gives {first.maker.placement}"
    return f"{maker}, {pattern(first.user.what)}{_at(first.user.source)} wants {first.user.placement}{more}"


def _at(source: str) -> str:
    return f" at {source}" if source else ""


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [min(max(map(len, column)), WIDE) for column in zip(titles, *rows, strict=True)]
    return [
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (titles, *rows)
    ]
