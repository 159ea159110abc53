"""Facts as a trace in Chrome's event format, which Perfetto and chrome://tracing open.

Source: "Trace Event Format", the Chromium project.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .facts import Call, Facts

_PROCESS = 0


def trace(facts: Facts) -> dict[str, Any]:
    """One rank's step as JSON: a track for what is computed, one for each axis, and counters of memory."""
    return {"traceEvents": list(_events(facts)), "displayTimeUnit": "ms", "otherData": {"device": facts.device.name}}


def _events(facts: Facts) -> Iterator[dict[str, Any]]:
    lanes = ["compute", *(axis.axis for axis in facts.mesh)]
    yield _named("process_name", 0, f"{facts.step}, one of {facts.ranks} ranks, predicted")
    for i, lane in enumerate(lanes):
        yield _named("thread_name", i, lane if lane == "compute" else f"communication over {lane}")
    for call in facts.calls:
        if call.time:
            yield _slice(call, lanes.index(call.lane))
    for call in facts.calls:
        if call.time and call.lane == "compute":
            activations, temporaries = call.held
            yield _event("C", "memory", call.start) | {"args": {"activations": activations, "temporaries": temporaries}}


def _slice(call: Call, thread: int) -> dict[str, Any]:
    said = {"value": call.name, "type": call.type, "layout": call.layout, "source": call.source, "module": call.module}
    event = _event("X", call.op, call.start) | {"dur": call.time, "tid": thread, "cat": call.phase}
    return event | {"args": {"arguments": call.arguments} | {key: text for key, text in said.items() if text}}


def _event(kind: str, name: str, when: float) -> dict[str, Any]:
    return {"ph": kind, "name": name, "pid": _PROCESS, "ts": when}


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": thread, "args": {"name": name}}
