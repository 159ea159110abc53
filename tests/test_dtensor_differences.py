"""The comparison with DTensor says what execution says. The whole of it: `python tests/dtensor_differences.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

OPS = (
    "aten.mm.default", "aten.cumsum.default", "aten.mean.default", "aten.mse_loss.default", "aten.convolution.default",
    "aten.select_backward.default", "aten._softmax.default",
)  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """In a process of its own: it starts a process group."""
    script = Path(__file__).with_name("dtensor_differences.py")
    env = {"MESHSTEP_CACHE_DIR": str(tmp_path_factory.mktemp("cache")), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, str(script), "--json", *OPS], env=env, capture_output=True, text=True, check=True
    )
    return json.loads(run.stdout)


def verdicts(found: list[dict], op: str, inputs: str) -> set[tuple[str, str, str]]:
    return {(d["theirs"], d["ours"], d["verdict"]) for d in found if (d["op"], d["inputs"]) == (op, inputs)}


def test_meshstep_is_never_wrong(found: list[dict]) -> None:
    assert [d for d in found if d["verdict"] == "MESHSTEP WRONG"] == []


def test_both_know_a_matrix_product(found: list[dict]) -> None:
    assert verdicts(found, "aten.mm.default", "S(1), S(0)") == {("P(sum)", "P(sum)", "agree")}


def test_a_scan_along_a_sharded_dim_is_wrong_in_dtensor_if_the_dim_is_negative(found: list[dict]) -> None:
    wrong = {(d["inputs"], d["theirs"]) for d in found if d["op"] == "aten.cumsum.default" and "wrong" in d["verdict"]}
    assert wrong == {("S(2)", "S(2)")}


def test_a_mean_over_even_shards_is_right_in_both(found: list[dict]) -> None:
    assert ("P(avg)", "P(sum)", "both right") in verdicts(found, "aten.mean.default", "S(0)")


def test_a_loss_over_uneven_shards_is_wrong_in_dtensor(found: list[dict]) -> None:
    uneven = {(d["op"], d["verdict"]) for d in found if d["fault"].startswith("uneven")}
    assert ("aten.mse_loss.default", "DTensor wrong") in uneven
    assert ("aten.mse_loss.default", "DTensor wrong") not in {(d["op"], d["verdict"]) for d in found if not d["fault"]}
