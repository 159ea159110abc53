"""Ops that nobody wrote rules for: what running them shows, what it must not conclude, and its cache."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import toy_ops
from torch import nn
from torch.distributed.tensor import Shard

import meshstep as ms
from meshstep._torch import FakeTensorMode
from meshstep.ir.infer import infer
from meshstep.ir.types import TensorType
from meshstep.layout import placement_text
from meshstep.rules import OpCall, found_by_running, rules_for
from meshstep.rules.discovery import Discovery, discovery, hindrance
from meshstep.rules.experiment import Clock, Experiment
from meshstep.rules.small import DRAWS, small_calls
from meshstep.rules.store import Store, cache_directory

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of the test's own, and nothing in memory."""
    monkeypatch.setenv("MESHSTEP_CACHE_DIR", str(tmp_path / "cache"))
    discovery.forget()
    yield tmp_path / "cache" / "rules"
    discovery.forget()


def f32(*shape: int) -> TensorType:
    return TensorType(torch.float32, shape)


def i64(*shape: int) -> TensorType:
    return TensorType(torch.int64, shape)


def call(op: Any, *args: Any) -> OpCall:
    return OpCall.of(op, args, {}, infer(op, args, {}))


def found(op: Any, *args: Any, size: int = 2, by: Discovery = discovery) -> list[str]:
    """The rules that are found for a call, as text."""
    rules = by.rules(call(op, *args), size)
    return [" -> ".join(", ".join(placement_text(p) for p in side) for side in (r.inputs, r.outputs)) for r in rules]


# ---- what is found


def test_elementwise_with_a_weight() -> None:
    assert found(toy_ops.gate, f32(8, 4, 16), f32(16), 1.5) == [
        "S(0), R -> S(0)",
        "S(1), R -> S(1)",
        "S(2), S(0) -> S(2)",
        "R, P(sum) -> P(sum)",
    ]


def test_backward_sums_the_gradient_of_the_weight() -> None:
    assert found(toy_ops.gate_backward, f32(8, 16), f32(8, 16), f32(16), 1.5) == [
        "S(0), S(0), R -> S(0), P(sum)",
        "S(1), S(1), S(0) -> S(1), S(0)",
        "P(sum), R, R -> P(sum), P(sum)",
        "R, R, P(sum) -> P(sum), R",
    ]


FINDINGS: list[tuple[Any, tuple, list[str]]] = [
    (toy_ops.last_softmax, (f32(8, 16),), ["S(0) -> S(0)"]),
    (toy_ops.total, (f32(8, 16),), ["S(0) -> P(sum)", "S(1) -> P(sum)", "P(sum) -> P(sum)"]),
    (toy_ops.batch_mean, (f32(8, 16),), ["P(sum) -> P(sum)"]),
    (toy_ops.largest, (f32(8, 64), 8), ["S(0) -> S(0)"]),
    (toy_ops.largest, (f32(8, 64), 3), ["S(0) -> S(0)"]),
    (toy_ops.by_heads, (f32(8, 64), 4), ["S(0) -> S(0)"]),
    (toy_ops.group_sums, (f32(8, 64), 4), ["S(0) -> S(0)", "P(sum) -> P(sum)"]),
    (toy_ops.lookup, (f32(32, 16), i64(8)), ["S(1), R -> S(1)", "R, S(0) -> S(0)", "P(sum), R -> P(sum)"]),
    (toy_ops.lookup, (f32(16, 16), i64(16)), ["S(1), R -> S(1)", "R, S(0) -> S(0)", "P(sum), R -> P(sum)"]),
    (
        toy_ops.by_place,
        (f32(32, 16), f32(8, 4)),
        ["S(1), R -> S(1)", "S(0), S(0) -> S(0)", "P(sum), R -> P(sum)", "R, P(sum) -> P(sum)"],
    ),
    (toy_ops.first_row, (f32(8, 16),), ["S(1) -> S(0)", "P(sum) -> P(sum)"]),
    (toy_ops.every_third, (f32(24, 16),), ["S(1) -> S(1)", "P(sum) -> P(sum)"]),
    (toy_ops.only_float, (f32(8, 16),), ["S(0) -> S(0)", "S(1) -> S(1)"]),
    (toy_ops.norm_backward, (f32(8, 16), f32(8, 16)), ["S(0), S(0) -> S(0), P(sum)", "P(sum), R -> P(sum), P(sum)"]),
]


@pytest.mark.parametrize(("op", "args", "rules"), FINDINGS, ids=lambda v: str(v) if isinstance(v, tuple) else None)
def test_what_holds_is_found_and_nothing_else(op: Any, args: tuple, rules: list[str]) -> None:
    assert found(op, *args) == rules


def test_lists_of_tensors_and_of_outputs() -> None:
    rules = found(toy_ops.swapped, [f32(8, 16), f32(8, 16)])
    assert {"S(0), S(0) -> S(0), S(0)", "S(1), R -> R, S(1)", "P(sum), R -> R, P(sum)"} <= set(rules)
    assert "S(0), R -> S(0), R" not in rules


def test_number_that_follows_a_sharded_size_is_shared_out() -> None:
    (rule, *_) = discovery.find(call(toy_ops.same_rows, f32(8, 16), 8)).learned
    assert rule.places == (("rows", None),)
    (rule, *_) = discovery.find(call(toy_ops.reshaped, f32(8, 16), [8, 4, 4])).learned
    assert rule.places == (("shape", 0),)


def test_number_that_only_looks_like_a_size_is_kept() -> None:
    (rule,) = discovery.find(call(toy_ops.largest, f32(8, 64), 8)).learned
    assert rule.places == ()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_found_rules_are_right_on_the_real_call(size: int) -> None:
    """By the house validator, which runs the local form, too."""
    from meshstep.rules import validate

    x = torch.randn(8, 16, dtype=torch.float64)
    rules = discovery.rules(call(toy_ops.reshaped, f32(8, 16), [8, 4, 4]), size)
    assert rules[0].local is not None
    assert not validate(toy_ops.reshaped, (x, [8, 4, 4]), size=size, rules=rules)


def test_only_even_shards() -> None:
    assert found(toy_ops.total, f32(6, 16), size=4) == ["S(1) -> P(sum)", "P(sum) -> P(sum)"]
    assert found(toy_ops.total, f32(5, 7), size=2) == ["P(sum) -> P(sum)"]


# ---- what must not be concluded

NOTHING: list[tuple[Any, tuple, str]] = [
    (toy_ops.clip, (f32(8, 16), 1000.0), ""),  # the identity on small numbers
    (toy_ops.clip, (f32(8, 16), 1e5), ""),
    (toy_ops.any_above, (f32(8, 16),), "an output is the same for all inputs"),
    (toy_ops.best, (f32(8, 16),), ""),
    (toy_ops.blocks, (f32(64, 16),), ""),
    (toy_ops.noisy, (f32(8, 16),), "it draws random numbers"),
    (toy_ops.counting, (f32(8, 16),), "two runs differ"),
    (toy_ops.constant, (f32(8, 16),), "an output is the same for all inputs"),
    (toy_ops.fails, (f32(8, 16),), "it fails on small tensors: no kernel for this machine"),
]


@pytest.mark.parametrize(("op", "args", "why"), NOTHING, ids=lambda v: None if isinstance(v, tuple) else str(v))
def test_nothing_is_concluded(op: Any, args: tuple, why: str) -> None:
    assert found(op, *args) == []
    assert discovery.find(call(op, *args)).why == why


def test_what_small_tensors_hide_shows_on_the_real_shapes() -> None:
    """One rule holds for 6 rows, and not for 64."""
    assert found(toy_ops.changes_its_mind, f32(24, 16)) == ["S(0) -> S(0)", "S(1) -> S(1)", "P(sum) -> P(sum)"]
    assert found(toy_ops.changes_its_mind, f32(64, 16)) == ["S(1) -> S(1)", "P(sum) -> P(sum)"]


@pytest.mark.parametrize(
    ("op", "why"),
    [
        (aten.bernoulli.default, "it draws random numbers"),
        (aten.multinomial.default, "it draws random numbers"),
        (aten.nonzero.default, "its output depends on values"),
        (aten.masked_select.default, "its output depends on values"),
        (aten.add_.Tensor, "it changes its inputs"),
        (aten.as_strided.default, "it reads memory by strides"),
        (aten.as_strided_scatter.default, "it reads memory by strides"),
        (aten.mm.out, "it changes its inputs"),
        (aten._local_scalar_dense.default, "its output depends on values"),
        (torch.ops._c10d_functional.all_reduce.default, "it is no op on tensors alone"),
        (torch.ops.meshstep.all_reduce.default, "it is no op on tensors alone"),
        (len, "it is no op on tensors alone"),
        (aten.trace.default, "its kernel is compiled and need not check what it is given"),
        (aten._weight_norm_interface.default, "its kernel is compiled and need not check what it is given"),
    ],
    ids=str,
)
def test_never_run(op: Any, why: str) -> None:
    assert hindrance(op) == why


def test_an_op_with_effects_is_never_run() -> None:
    library = torch.library.custom_op(
        "toy::announces", lambda x: x.clone(), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    library.register_fake(torch.empty_like)
    from torch._library.effects import EffectType

    library.register_effect(EffectType.ORDERED)
    assert hindrance(torch.ops.toy.announces.default) == "it has effects"


# ---- how it runs


def test_random_state_of_the_process_is_left_alone() -> None:
    before = torch.get_rng_state(), random.getstate()
    found(toy_ops.noisy, f32(8, 16))
    found(toy_ops.gate, f32(8, 16), f32(16), 1.0)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_it_runs_on_real_tensors_within_a_fake_mode() -> None:
    with FakeTensorMode():
        assert found(toy_ops.last_softmax, f32(8, 16)) == ["S(0) -> S(0)"]


def test_a_70_billion_parameter_call_takes_no_memory() -> None:
    assert found(toy_ops.gate, f32(2**20, 2**16), f32(2**16), 1.5)[:2] == ["S(0), R -> S(0)", "S(1), S(0) -> S(1)"]


def test_time_is_bounded() -> None:
    mine = Discovery(seconds=0.3)
    result = mine.find(call(toy_ops.slow, f32(8, 16)))
    assert result.why == "its time is over"
    assert result.seconds < 3 * 0.3 + 1
    assert [r.inputs for r in result.learned] in ([], [(Shard(0),)])  # whole stages only


def test_equal_sizes_stay_equal_and_numbers_follow() -> None:
    small = next(small_calls(call(toy_ops.same_rows, f32(40, 40), 40)))
    assert small.arguments == {"x": f32(6, 6), "rows": 6}
    small = next(small_calls(call(toy_ops.by_place, f32(32, 16), f32(8, 4))))
    assert small.arguments == {"x": f32(72, 216), "start": f32(6, 12)} or small.arguments["x"].shape[0] == 72


def test_different_data_in_every_shard() -> None:
    experiment = Experiment(
        toy_ops.gate, next(small_calls(call(toy_ops.gate, f32(8, 16), f32(16), 1.0))), Clock(9), DRAWS
    )
    for arguments, _ in experiment.samples:
        first, second = arguments["x"].chunk(2)
        assert not torch.equal(first, second)


# ---- the cache


def rewritten(path: Path, change: Callable[[dict], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def again(op: Any, *args: Any) -> Any:
    """The finding of a process that knows nothing yet."""
    discovery.forget()
    return discovery.find(call(op, *args))


def test_results_are_kept_on_disk_by_pattern(cache: Path) -> None:
    first = discovery.find(call(toy_ops.last_softmax, f32(8, 16)))
    (file,) = cache.iterdir()
    assert json.loads(file.read_text())["rules"] == [{"inputs": ["S(0)"], "outputs": ["S(0)"], "shared": []}]
    assert "toy::last_softmax(Tensor x) -> Tensor" in json.loads(file.read_text())["pattern"]
    other = again(toy_ops.last_softmax, f32(32, 64))  # the same pattern
    assert other.from_file and other.learned == first.learned
    assert again(toy_ops.last_softmax, f32(8, 8)).from_file is False  # another one
    assert len(list(cache.iterdir())) == 2


def test_equal_patterns_are_run_once_a_process(cache: Path) -> None:
    first, second = (discovery.find(call(toy_ops.gate, f32(8, n), f32(n), 1.0)) for n in (16, 32))
    assert second.learned == first.learned and second.runs < first.runs / 2


def test_what_a_file_says_of_a_custom_op_is_tried_again(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    found(toy_ops.last_softmax, f32(8, 16))
    (file,) = cache.iterdir()
    rewritten(file, lambda c: c["rules"].append({"inputs": ["S(1)"], "outputs": ["S(1)"], "shared": []}))
    result = again(toy_ops.last_softmax, f32(8, 16))
    assert not result.from_file and len(result.learned) == 1
    assert "no longer holds" in caplog.text
    assert len(json.loads(file.read_text())["rules"]) == 1  # put right


BROKEN: dict[str, Callable[[Path], Any]] = {
    "cut off": lambda p: p.write_text(p.read_text()[:50]),
    "empty": lambda p: p.write_text(""),
    "binary": lambda p: p.write_bytes(b"\x80\x04\x95\xff"),
    "a list": lambda p: p.write_text("[]"),
    "deep": lambda p: p.write_text("[" * 100_000),
    "another version": lambda p: rewritten(p, lambda c: c.update(torch="1.0")),
    "another pattern": lambda p: rewritten(p, lambda c: c.update(pattern="x")),
    "no rules": lambda p: rewritten(p, lambda c: c.pop("rules")),
    "foreign placement": lambda p: rewritten(p, lambda c: c["rules"][0].update(inputs=["__import__('os')"])),
    "no placement": lambda p: rewritten(p, lambda c: c["rules"][0].update(inputs=[None])),
    "number": lambda p: rewritten(p, lambda c: c["rules"][0].update(inputs=7)),
    "too large": lambda p: rewritten(p, lambda c: c.update(more="x" * 2**21)),
    "others may write": lambda p: p.chmod(0o666),
    "a link": lambda p: (p.rename(p.with_name("elsewhere")), p.symlink_to("elsewhere")),
    "a directory": lambda p: (p.unlink(), p.mkdir()),
    "a pipe": lambda p: (p.unlink(), os.mkfifo(p)),
}


@pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN)
def test_a_damaged_or_foreign_file_is_passed_over(
    damage: Callable[[Path], Any], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found(toy_ops.last_softmax, f32(8, 16))
    (file,) = cache.iterdir()
    damage(file)
    result = again(toy_ops.last_softmax, f32(8, 16))
    assert not result.from_file and len(result.learned) == 1
    assert "passed over" in caplog.text


def test_too_many_placements_in_a_file_are_found_wrong(cache: Path) -> None:
    found(toy_ops.last_softmax, f32(8, 16))
    (file,) = cache.iterdir()
    rewritten(file, lambda c: c["rules"][0].update(inputs=["S(0)", "R"]))
    assert not again(toy_ops.last_softmax, f32(8, 16)).from_file


@pytest.mark.parametrize("shared", [["rows", 3], ["nothing", None], ["x", None]])
def test_a_file_that_shares_out_what_is_no_number(shared: list, cache: Path) -> None:
    found(toy_ops.same_rows, f32(8, 16), 8)
    (file,) = cache.iterdir()
    rewritten(file, lambda c: c["rules"][0].update(shared=[shared]))
    result = again(toy_ops.same_rows, f32(8, 16), 8)
    assert not result.from_file and len(result.learned) == 3


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_directory_that_others_can_write_to_is_not_used(
    mode: int, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir(parents=True)
    cache.chmod(mode)
    found(toy_ops.last_softmax, f32(8, 16))
    assert list(cache.iterdir()) == [] and "not used" in caplog.text


def test_a_link_in_place_of_the_directory_is_not_followed(cache: Path, tmp_path: Path) -> None:
    cache.parent.mkdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    cache.symlink_to(tmp_path / "elsewhere")
    found(toy_ops.last_softmax, f32(8, 16))
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_cache_that_cannot_be_written_hinders_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MESHSTEP_CACHE_DIR", str(tmp_path / "file"))
    assert found(toy_ops.last_softmax, f32(8, 16)) == ["S(0) -> S(0)"]
    assert "is not written" in caplog.text


def test_directory_of_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHSTEP_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_directory() == Path("/somewhere/meshstep")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_directory() == Path("/home/me/.cache/meshstep")


def test_findings_are_logged_with_their_cost(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "meshstep")
    found(toy_ops.last_softmax, f32(8, 16))
    assert "toy.last_softmax.default: 1 rules found by running it" in caplog.text


def test_the_same_rules_in_every_process(tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.insert(0, 'tests'); import torch, toy_ops;"
        "from meshstep.ir.types import TensorType as T; from meshstep.rules import *;"
        "x = T(torch.float32, (8, 4, 16)); w = T(torch.float32, (16,));"
        "print(rules_for(OpCall.of(toy_ops.gate_backward, (x, x, w, 2.0), {}, (x, w)), 2))"
    )
    texts = set()
    for seed in ("1", "2"):
        env = {"PYTHONHASHSEED": seed, "MESHSTEP_CACHE_DIR": str(tmp_path / seed)}
        run = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, check=True, text=True)
        texts.add(run.stdout)
    assert len(texts) == 1


def test_written_rules_are_not_looked_for(cache: Path) -> None:
    x = f32(8, 16)
    assert len(rules_for(call(aten.relu.default, x), 2)) == 3
    assert found_by_running(call(aten.relu.default, x)) is None
    assert not cache.exists()


# ---- "Shown by" f: a model with an op that no table knows trains sharded


class Gated(nn.Module):
    """Two layers with a custom op between them, which has a custom backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 4)
        self.weight = nn.Parameter(torch.randn(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.ops.toy.gate(self.up(x), self.weight, 1.5))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def make_args(i: int) -> tuple[tuple, dict]:
    torch.manual_seed(0)
    model = Gated()
    generator = torch.Generator().manual_seed(i)
    x, y = torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)
    return (model, torch.optim.AdamW(model.parameters(), lr=1e-2), x, y), {}


@pytest.mark.parametrize("ranks", [2, 4])
def test_custom_op_trains_sharded_after_discovery(ranks: int) -> None:
    mesh = ms.Mesh(dp=ranks)
    verification = ms.verify(train_step, make_args, mesh=mesh, steps=5)
    assert verification.ok and verification.max_error < 1e-12, str(verification)
    discovery.forget()
    lowered = ms.simulate(train_step, mesh=mesh).lower(*make_args(0)[0])
    assert {c.kind for c in lowered.communication} == {"all_reduce"}
    assert f"f32[8/{ranks}, 32]  S(0)@dp    = toy.gate(" in lowered.as_text()
    assert lowered.fallbacks == ()
    names, rules = zip(*((d.op, d.rules) for d in lowered.discovered), strict=True)
    assert (names, rules) == (("toy.gate", "toy.gate_backward"), (3, 4))
    print(*lowered.discovered, sep="\n")
    assert sum(d.seconds for d in lowered.discovered) < 2


def test_what_cannot_be_sharded_is_shown_as_a_fallback() -> None:
    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.toy.clip(model(x), 1.0).sum()

    lowered = ms.simulate(step, mesh=ms.Mesh(dp=2)).lower(nn.Linear(4, 4), torch.randn(4, 4))
    assert lowered.fallbacks == (("toy.clip", 1),)
    assert lowered.discovered == ()


def test_discovered_is_one_line_an_op() -> None:
    from meshstep.lowered import Discovered

    assert str(Discovered("toy.gate", 2, 4, 310, 0.0512, False)) == (
        "toy.gate: 4 rules found by 310 runs in 0.05 s (2 calls)"
    )
    assert str(Discovered("toy.gate", 1, 4, 31, 0.0012, True)) == (
        "toy.gate: 4 rules read from the cache and tried again by 31 runs in 0.00 s (1 call)"
    )


def test_store_without_a_place_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshstep.rules.store.cache_directory", lambda: None)
    assert Store().read("x") is None
    Store().write("x", [])
    assert list(Store().contents()) == []
