"""Facts as one self-contained page: no network, no framework.

Whatever comes from a model is text, here and in the page's script; and the page's own policy lets no other script run
and nothing be loaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from .facts import Alternative, Call, Collective, Facts, Side
from .words import Answer, answers, count_text

POINTS = 800  # of the memory curve
_INTERNED = ("op", "type", "layout", "source", "module", "phase", "lane")
_ESCAPED = {"<": r"\u003c", ">": r"\u003e", "&": r"\u0026", "\u2028": r"\u2028", "\u2029": r"\u2029"}


def page(facts: Facts) -> str:
    """The HTML."""
    script = _file("page.js")
    return Template(_file("page.html")).substitute(
        title=escape(f"{facts.step} on {', '.join(f'{axis.axis}={axis.size}' for axis in facts.mesh)}"),
        subtitle=escape(f"{count_text(facts.ranks, 'rank')} · {facts.device.name} · predicted, nothing was run"),
        answers="\n".join(map(_answer, answers(facts))),
        footer="\n".join(f"<p>{escape(line)}</p>" for line in _footer(facts)),
        facts=data_text(_data(facts)),
        style=_file("page.css"),
        script=script,
        script_hash=f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
    )


def data_text(data: Any) -> str:
    """JSON that can stand in a script element: nothing in it ends the element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return "".join(_ESCAPED.get(c, c) for c in text)


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8").strip()


def _answer(answer: Answer) -> str:
    kind = {True: " good", False: " bad", None: ""}[answer.good]
    details = "".join(f"<li>{_together(detail)}</li>" for detail in answer.details)
    return (
        f'<div class="answer{kind}"><h2>{escape(answer.question)}</h2>'
        f'<p class="headline">{_together(answer.headline)}</p><ul>{details}</ul></div>'
    )


def _together(text: str) -> str:
    """Escaped, and no line is broken between a figure and its unit."""
    return re.sub(r"(?<=\d) (?=(?:%|[KMGT]?i?B|us|ms|s)\b|%)", "&nbsp;", escape(text))


def _footer(facts: Facts) -> list[str]:
    lines = [facts.device.about, "Bytes are what each rank sends in a ring; memory is that of the program's tensors."]
    if facts.whole:
        ops = ", ".join(f"{op} ({count})" for op, count in facts.whole)
        lines.append(f"Without a sharding rule, computed whole on every rank: {ops}.")
    return [line for line in lines if line]


def _data(facts: Facts) -> dict[str, Any]:
    """What the script gets: calls as columns, with strings that many share as numbers."""
    strings: dict[str, int] = {}
    shared = {key: [strings.setdefault(getattr(call, key), len(strings)) for call in facts.calls] for key in _INTERNED}
    own = {
        "name": [call.name for call in facts.calls],
        "arguments": [call.arguments for call in facts.calls],
        "start": [round(call.start, 1) for call in facts.calls],
        "time": [_short(call.time) for call in facts.calls],
    }
    return {
        "step": facts.step,
        "ranks": facts.ranks,
        "mesh": [asdict(axis) for axis in facts.mesh],
        "time": asdict(facts.time),
        "memory": asdict(facts.memory),
        "curve": _curve(facts.calls),
        "parameters": [asdict(parameter) for parameter in facts.parameters],
        **_collectives(facts.collectives),
        "strings": list(strings),
        "calls": shared | own,
    }


def _collectives(found: Sequence[Collective]) -> dict[str, Any]:
    """What many share (sides of disagreements, alternatives) stands once, and each has its number."""
    sides: dict[Side, int] = {}
    alternatives: dict[Alternative | None, int] = {}

    def number(side: Side) -> int:
        return sides.setdefault(side, len(sides))

    rows = [
        asdict(replace(collective, causes=(), alternative=None, why="" if collective.causes else collective.why))
        | {"causes": [[cause.value, number(cause.maker), number(cause.user)] for cause in collective.causes]}
        | {"alternative": alternatives.setdefault(collective.alternative, len(alternatives))}
        | {key: _short(getattr(collective, key)) for key in ("time", "exposed")}
        | {"start": round(collective.start, 1)}
        for collective in found
    ]
    others = [other and asdict(other) for other in alternatives]
    return {"collectives": rows, "sides": list(map(asdict, sides)), "alternatives": others}


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _curve(calls: Sequence[Call]) -> dict[str, list[float]]:
    """What is held over time: of neighbours that would fall together, the one that holds most."""
    each = max(1, -(-len(calls) // POINTS))
    kept = [max(calls[i : i + each], key=lambda call: sum(call.held)) for i in range(0, len(calls), each)]
    at, latest = [], 0.0
    for call in kept:
        latest = max(latest, call.start)  # a view takes no time, and has none
        at.append(round(latest, 1))
    return {"at": at, "activations": [c.held[0] for c in kept], "temporaries": [c.held[1] for c in kept]}
