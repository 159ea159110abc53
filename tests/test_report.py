"""What a report says, exactly; that the page is harmless and small; that text, JSON and trace say the same."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from golden_step import lowered as golden
from models import Gpt
from support import check_text
from torch import nn
from torch.distributed.tensor import Shard

import meshstep as ms
from meshstep.report.facts import Disagreement, Facts, Parameter, Side
from meshstep.report.page import data_text, page
from meshstep.report.text import report_text
from meshstep.report.trace import trace
from meshstep.report.words import answers, pattern, percent, signed, size_text, time_text

LIMIT = 3 * 2**20
GIB = 2**30


def gpt_step(model, optimizer, x, y):
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


TENSOR = {"*.up": "colwise", "*.down": "rowwise", "*.qkv": "colwise", "*.proj": "rowwise", "*.norm?": "sequence"}


@pytest.fixture(scope="module")
def layers() -> ms.Lowered:
    """A GPT of 32 layers, over data and tensor ranks, after its first step."""
    torch.manual_seed(0)
    model = Gpt(layers=32)
    x = torch.randint(16, (8, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    plan = ms.plans.fsdp("dp") + ms.plans.tensor_parallel(TENSOR, "tp")
    return ms.simulate(gpt_step, mesh=ms.Mesh(dp=2, tp=2), plan=plan).lower(model, optimizer, x, x.roll(1, 1))


@pytest.fixture(scope="module")
def facts(layers: ms.Lowered) -> Facts:
    return layers.facts(memory=8 * GIB)


@pytest.fixture(scope="module")
def small() -> Facts:
    torch.manual_seed(0)
    return golden().facts()


def data_of(text: str) -> dict:
    """What the page's script gets."""
    return json.loads(re.search(r'<script type="application/json" id="facts">(.*?)</script>', text, re.S)[1])


# ---- facts


def test_memory_and_bytes_are_those_of_the_lowered_step(layers, facts):
    memory = layers.memory
    assert facts.memory.peak == memory.peak == sum(facts.memory.parts.values())
    assert facts.memory.parts["activations"] == memory.activations and facts.memory.at == memory.at
    sent = layers.communication
    assert [(c.kind, c.axis, c.bytes, c.values, c.why) for c in facts.collectives] == [
        (c.kind, c.axis, c.bytes, c.count, c.why) for c in sent
    ]
    for axis in facts.mesh:
        assert axis.bytes == sum(c.bytes for c in sent if c.axis == axis.axis)
        assert axis.collectives == sum(c.axis == axis.axis for c in sent)


def test_times_add_up(facts):
    time = facts.time
    assert time.compute == pytest.approx(sum(c.time for c in facts.calls if c.lane == "compute"), rel=1e-9)
    assert time.communication == pytest.approx(sum(c.time for c in facts.collectives), rel=1e-9)
    assert time.exposed == pytest.approx(sum(axis.exposed for axis in facts.mesh), rel=1e-9)
    assert max(time.compute, time.communication) <= time.step <= time.compute + time.communication
    assert all(-1e-9 <= c.exposed <= c.time + 1e-9 for c in facts.collectives)


def test_a_parameter_is_told_with_its_state_and_reasons(small, facts):
    assert small.parameters[0] == Parameter(
        "fc1.weight", "f64", (8, 6), (8, 6), ("R",), 384, 2 * 384 + 4, 384, ("data_parallel shards no state",)
    )
    found = {p.name: p for p in facts.parameters}
    up = found["blocks.7.up.weight"]
    assert (up.shape, up.local, up.placements) == ((16, 8), (8, 4), ("S(1)", "S(0)"))
    assert (up.bytes, up.state_bytes, up.whole_bytes) == (4 * 32, 2 * 4 * 32 + 4, 4 * 128)
    assert up.why == (
        "fsdp: dim 1 is the first that 2 ranks divide, and dim 0 is split by another axis",
        "tensor_parallel names '*.up': colwise",
    )
    assert found["positions"].placements == ("S(1)", "R")  # 5 x 8
    assert found["positions"].why[1] == "tensor_parallel shards no state"


def test_reasons_name_what_the_plan_says():
    plan = ms.plans.fsdp(parameters={"fc1.weight": 0, "fc2.weight": Shard(1)}, min_bytes=60)
    assert [p.why[0] for p in golden(plan=plan).facts().parameters] == [
        "fsdp names 'fc1.weight': 0",
        "fsdp: dim 0 is the first that 2 ranks divide",
        "fsdp names 'fc2.weight': S(1)",
        "the parameter is smaller than 60 B",
    ]
    assert {p.why for p in golden(plan=ms.plans.zero(1)).facts().parameters} == {("zero1 shards no parameters",)}
    assert [p.why[0] for p in golden(ranks=3, plan=ms.plans.fsdp()).facts().parameters] == [
        "fsdp: dim 1 is the first that 3 ranks divide",
        *["no free dim divides by 3"] * 3,
    ]


def test_a_plan_that_was_decided_says_so():
    plan = golden(plan=ms.plans.fsdp()).plan
    assert {p.why for p in golden(plan=plan).facts().parameters} == {("decided by the plan that was given",)}


def test_a_collective_names_both_ops_that_disagree(small):
    assert [c.causes[0] for c in small.collectives] == [
        Disagreement(
            "%to_copy",
            Side("aten._to_copy", "P(sum)", "golden_step.py:24", ""),
            Side("aten.div.Tensor", "R", "golden_step.py:24", ""),
        ),
        Disagreement(
            "%t_8",
            Side("aten.t", "P(sum)", "golden_step.py:20", "fc1"),
            Side("aten.linalg_vector_norm", "R", "golden_step.py:26", ""),
        ),
    ]
    assert [len(c.causes) for c in small.collectives] == [c.values for c in small.collectives] == [1, 5]
    assert small.collectives[1].causes[4].user.what == "output 0"


def test_what_the_plan_left_open_is_not_cheaper(facts, small):
    found = [c.alternative for f in (facts, small) for c in f.collectives if c.alternative]
    assert any(a.open for a in found) and any(not a.open for a in found)
    assert [a for a in found if a.open and a.price < -0.05] == []


def test_the_alternative_to_reducing_a_gradient_is_to_compute_it_everywhere(small):
    gradient = small.collectives[1].alternative
    assert gradient is not None and (gradient.what, gradient.open) == ("aten.mm of R, R to R", False)
    assert gradient.price > 99  # two gathers, of 100 us each, instead of one reduction


def test_repeated_layers_are_priced_alike(facts):
    kinds = defaultdict(set)
    for c in facts.collectives:
        if re.match(r"blocks\.([2-9]|1\d)\.", c.module) and c.causes:
            cause = c.causes[0]
            kinds[pattern(c.module), c.kind, c.bytes, c.phase, cause.maker.what, cause.user.what].add(c.alternative)
    assert kinds and all(len(alternatives) == 1 for alternatives in kinds.values())


def test_the_largest_values_at_the_peak_are_told(facts):
    largest = facts.memory.largest
    assert [held.bytes for held in largest] == sorted((held.bytes for held in largest), reverse=True)
    computed = facts.memory.parts["activations"] + facts.memory.parts["temporaries"]
    assert len(largest) == 8 and sum(held.bytes for held in largest) <= computed
    assert computed == max(sum(call.held) for call in facts.calls)


def test_calls_are_forward_backward_or_update(small):
    phase = {c.name: c.phase for c in small.calls}
    assert phase["addmm"] == "forward" and phase["mm_1"] == "backward"
    assert {phase[n] for n in ("linalg_vector_norm_4", "clamp", "mul_2", "fused_adamw", "add_1")} == {"update"}


# ---- the three answers


def test_a_step_that_does_not_fit_says_why():
    step = golden()
    which, cost, fits = answers(step.facts(memory=2000))
    assert which.headline == "data_parallel on dp=2, 2 ranks" and cost.headline.endswith("waiting for communication")
    assert (fits.good, fits.headline) == (False, "No: 3.85 KiB of 1.95 KiB a rank (197 %)")
    assert fits.details[-1] == "the state alone does not fit: shard more of it, or over more ranks"
    better = answers(step.facts(memory=3000))[2]
    assert better.details[-1].startswith("the state fits; what the step computes does not")
    assert answers(step.facts(memory=4000))[2].good is True and answers(step.facts())[2].good is None


def test_state_that_the_first_call_makes_is_told():
    model = nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model, optimizer, x):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    first = ms.simulate(step, mesh=ms.Mesh(dp=2)).lower(model, optimizer, torch.randn(8, 6)).facts()
    assert first.memory.new_state == 2 * 4 * 28 + 2 * 4
    assert [p.state_bytes for p in first.parameters] == [2 * 4 * 24 + 4, 2 * 4 * 4 + 4]
    assert "this call makes 232 B of state; later calls are given it" in answers(first)[2].details


def test_figures_have_units():
    assert [time_text(t) for t in (0.25, 12.34, 4560, 1.234e6, 6.3e9)] == [
        "0.25 us", "12.3 us", "4.56 ms", "1.23 s", "6,300 s",
    ]  # fmt: skip
    assert [size_text(n) for n in (256, 1536, 1002 * 1024, 61.25 * GIB)] == [
        "256 B",
        "1.5 KiB",
        "1,002 KiB",
        "61.2 GiB",
    ]
    assert (signed(-30), signed(1200), percent(1, 300), percent(1, 8)) == ("-30 us", "+1.2 ms", "0.3 %", "12 %")
    assert pattern("0.blocks.12.up.weight2") == "*.blocks.*.up.weight2"


# ---- the page


class Elements(HTMLParser):
    """The elements of a page, with what is in those that hold text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.found.append((tag, dict(attrs)))


EVIL = "</script><img src=x onerror=alert(1)><!--"


def test_names_of_a_model_are_harmless():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(EVIL, nn.Linear(6, 4))

        def forward(self, x):
            return self._modules[EVIL](x)

    def step(model, x):
        return model(x).sum()

    step.__name__ = EVIL
    step = ms.simulate(step, mesh=ms.Mesh(dp=2))
    text = page(step.lower(Model(), torch.randn(8, 6)).facts())
    parsed = Elements(text)
    assert [tag for tag, _ in parsed.found if tag == "img"] == []
    assert [tag for tag, _ in parsed.found].count("script") == text.count("</script>") == 2
    assert not any(name.startswith("on") for _, attributes in parsed.found for name in attributes)
    data = data_of(text)
    assert data["step"] == EVIL and data["parameters"][0]["name"] == f"{EVIL}.weight"
    assert EVIL in data["strings"]


def test_data_cannot_end_its_element():
    text = data_text({"a": "</script>&<!--\u2028\u2029"})
    assert json.loads(text) == {"a": "</script>&<!--\u2028\u2029"}
    assert not set("<>&\u2028\u2029") & set(text)


def test_the_page_needs_no_network_and_lets_no_other_script_run(facts):
    text = page(facts)
    parsed = Elements(text)
    policy = next(a["content"] for _, a in parsed.found if a.get("http-equiv") == "Content-Security-Policy")
    assert re.fullmatch(r"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-[\w+/]{43}='", policy)
    assert not any({"src", "srcset"} & attributes.keys() for _, attributes in parsed.found)
    assert all(a["href"].startswith("#") for _, a in parsed.found if "href" in a)
    targets = {a["id"] for _, a in parsed.found if "id" in a}
    assert {a["href"][1:] for _, a in parsed.found if "href" in a} <= targets


def test_the_page_of_32_layers_is_small_and_complete(facts):
    text = page(facts)
    assert len(text.encode()) < LIMIT
    data = data_of(text)
    assert len(data["parameters"]) == len(facts.parameters) == 32 * 11 + 5
    assert {len(column) for column in data["calls"].values()} == {len(facts.calls)}
    assert [data["strings"][i] for i in data["calls"]["op"]] == [call.op for call in facts.calls]
    curve = data["curve"]
    assert len(curve["at"]) <= 800 and curve["at"] == sorted(curve["at"])
    held = [a + t for a, t in zip(curve["activations"], curve["temporaries"], strict=True)]
    assert max(held) == facts.memory.parts["activations"] + facts.memory.parts["temporaries"]


def test_what_the_tables_sort_by_are_numbers(facts):
    data = data_of(page(facts))
    numbers = {
        "mesh": ("size", "sharded", "collectives", "bytes", "time", "exposed"),
        "parameters": ("bytes", "state_bytes", "whole_bytes"),
        "collectives": ("bytes", "values", "time", "exposed", "start"),
    }
    for table, keys in numbers.items():
        assert all(isinstance(row[key], (int, float)) for row in data[table] for key in keys), table


# ---- other forms


def test_the_text_of_a_report():
    check_text(report_text(golden(plan=ms.plans.fsdp()).facts(memory=4096)), "report.txt")


def test_repeated_layers_are_one_line_of_text(facts):
    text = report_text(facts)
    assert "32x    blocks.*.up.weight" in text and "blocks.7" not in text
    assert len(text.splitlines()) < 250


def test_the_trace_has_a_track_for_compute_and_one_for_each_axis(facts):
    events = json.loads(json.dumps(trace(facts)))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "compute", 1: "communication over dp", 2: "communication over tp"}
    slices = [e for e in events if e["ph"] == "X"]
    assert sum(e["dur"] for e in slices if e["tid"] == 0) == pytest.approx(facts.time.compute, rel=1e-9)
    assert sum(e["tid"] > 0 for e in slices) == len(facts.collectives)
    for track in names:
        ends = [(e["ts"], e["ts"] + e["dur"]) for e in slices if e["tid"] == track]
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(ends)), names[track]
    assert max(sum(e["args"].values()) for e in events if e["ph"] == "C") <= facts.memory.peak


def test_reports_are_written_by_their_ending(tmp_path: Path):
    step = golden()
    for name in ("a.html", "a.txt", "a.json"):
        step.report(tmp_path / name, memory=8 * GIB)
    step.trace(tmp_path / "trace.json")
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "a.txt").read_text().startswith("train_step on 2 ranks: ")
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["memory"]["fits"] is True and len(found["calls"]) == len(step.local_program.calls)
    assert json.loads((tmp_path / "trace.json").read_text())["displayTimeUnit"] == "ms"
    with pytest.raises(ms.InputError) as caught:
        step.report("a.pdf")
    assert str(caught.value) == ("no report of the kind '.pdf'\n  at   report('a.pdf')\n  try  .html, .txt, .json")


def test_a_step_that_sends_nothing_has_a_report():
    found = ms.compile(mesh=ms.Mesh(dp=2))(lambda x: x * 2).lower(torch.randn(4, 6)).facts()
    assert found.collectives == () and found.parameters == ()
    assert "nothing is sent" in report_text(found) and len(page(found)) < LIMIT
