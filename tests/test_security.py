"""Files that somebody else made: nothing of them is executed, and what others can write to is not trusted."""

from __future__ import annotations

import builtins
import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Mlp, built, labels, rows, train_step

import meshstep as ms
from meshstep.checkpoint import files
from meshstep.layout import shard
from meshstep.rules.store import Store
from meshstep.runtime.backends import check_compiled_cache


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path, call: Any = builtins.open) -> None:
        self.marker, self.call = marker, call

    def __reduce__(self) -> Any:
        return self.call, (str(self.marker), "w") if self.call is builtins.open else (f"touch {self.marker}",)


def saved(tmp_path: Path) -> tuple[Path, Any, Any]:
    model = built(Mlp)
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer, rows(), labels())
    ms.checkpoint.save(tmp_path / "a", {"model": model, "optimizer": optimizer, "done": 3})
    return tmp_path / "a", model, optimizer


def forge(path: Path, name: str, content: bytes) -> None:
    """Another file, with the manifest made to fit: what somebody who can write there would do."""
    (path / name).write_bytes(content)
    manifest = json.loads((path / files.MANIFEST).read_text())
    manifest["files"] |= files.digests(path, [name])
    (path / files.MANIFEST).write_text(json.dumps(manifest))


def torch_file(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.mark.parametrize("call", [builtins.open, os.system, eval])
@pytest.mark.parametrize("name", [files.METADATA, files.PYTHON, "__0_0.distcp"])
def test_a_checkpoint_executes_nothing(name: str, call: Any, tmp_path: Path) -> None:
    path, model, optimizer = saved(tmp_path)
    marker, before = tmp_path / "executed", {k: v.clone() for k, v in model.state_dict().items()}
    payload = Payload(marker, call)
    forge(path, name, pickle.dumps(payload) if name == files.METADATA else torch_file(payload))
    with pytest.raises(ms.CheckpointError, match="a damaged checkpoint") as caught:
        ms.checkpoint.load(path, {"model": model, "optimizer": optimizer, "done": 0})
    assert not marker.exists()
    assert (name in str(caught.value) or "files of tensors" in str(caught.value)) and caught.value.hint
    assert name == "__0_0.distcp" or all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_the_payload_of_these_tests_would_be_executed(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "executed", os.system)))
    assert (tmp_path / "executed").exists()


def test_a_payload_inside_a_good_description_is_not_executed(tmp_path: Path) -> None:
    path, model, optimizer = saved(tmp_path)
    with open(path / files.METADATA, "rb") as file:
        description = pickle.load(file)
    description.planner_data = Payload(tmp_path / "executed", os.system)
    forge(path, files.METADATA, pickle.dumps(description))
    with pytest.raises(ms.CheckpointError, match=r"it names posix\.system, which describes no tensor"):
        ms.checkpoint.load(path, {"model": model, "optimizer": optimizer, "done": 0})
    assert not (tmp_path / "executed").exists()


def test_a_description_leads_to_no_file_outside(tmp_path: Path) -> None:
    path, model, optimizer = saved(tmp_path)
    (tmp_path / "other").write_bytes((path / "__0_0.distcp").read_bytes())
    with open(path / files.METADATA, "rb") as file:
        description = pickle.load(file)
    for info in description.storage_data.values():
        info.relative_path = "../other"
    forge(path, files.METADATA, pickle.dumps(description))
    with pytest.raises(ms.CheckpointError, match=r"it leads to \.\./other"):
        ms.checkpoint.load(path, {"model": model, "optimizer": optimizer, "done": 0})


def test_an_unchecked_checkpoint_executes_nothing_either(tmp_path: Path) -> None:
    path, model, optimizer = saved(tmp_path)
    (path / files.METADATA).write_bytes(pickle.dumps(Payload(tmp_path / "executed")))
    with pytest.raises(ms.CheckpointError):
        ms.checkpoint.load(path, {"model": model, "optimizer": optimizer, "done": 0}, check=False)
    assert not (tmp_path / "executed").exists()


def test_a_plan_file_executes_nothing(tmp_path: Path) -> None:
    for content in (pickle.dumps(Payload(tmp_path / "executed")), b"__import__('os').system('true')"):
        (tmp_path / "plan.json").write_bytes(content)
        with pytest.raises(ms.PlanError):
            ms.plans.load(tmp_path / "plan.json")
    assert not (tmp_path / "executed").exists()


# ---- caches


def discovered(tmp_path: Path) -> tuple[Store, Path]:
    """A cache with the rules of one pattern."""
    store = Store(tmp_path / "cache")
    store.write("op(f32[8])", [((shard(0),), (shard(0),), ())])
    (file,) = (tmp_path / "cache" / "rules").iterdir()
    assert store.read("op(f32[8])") == [((shard(0),), (shard(0),), ())]
    return store, file


@pytest.mark.parametrize("mode", [0o622, 0o606, 0o666])
def test_a_cached_rule_that_others_can_write_to_is_passed_over(mode: int, tmp_path: Path) -> None:
    store, file = discovered(tmp_path)
    file.chmod(mode)
    assert store.read("op(f32[8])") is None


@pytest.mark.parametrize("mode", [0o722, 0o777, 0o1777])
def test_a_cache_in_which_others_can_make_files_is_not_used(mode: int, tmp_path: Path) -> None:
    store, file = discovered(tmp_path)
    file.parent.chmod(mode)
    assert store.read("op(f32[8])") is None
    store.write("op(f32[16])", [])
    assert list(file.parent.iterdir()) == [file]


def test_a_cached_rule_of_another_user_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = discovered(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert store.read("op(f32[8])") is None


@pytest.mark.parametrize("what", ["the file", "its directory"])
def test_a_cache_behind_a_symlink_is_not_used(what: str, tmp_path: Path) -> None:
    store, file = discovered(tmp_path)
    link = file if what == "the file" else file.parent
    link.rename(tmp_path / "elsewhere")
    link.symlink_to(tmp_path / "elsewhere")
    assert store.read("op(f32[8])") is None


def test_a_cached_rule_executes_nothing(tmp_path: Path) -> None:
    store, file = discovered(tmp_path)
    file.write_bytes(pickle.dumps(Payload(tmp_path / "executed")))
    assert store.read("op(f32[8])") is None
    assert not (tmp_path / "executed").exists()


def _owned_by(user: int, found: os.stat_result) -> os.stat_result:
    return os.stat_result((*found[:4], user, *found[5:]))


@pytest.mark.parametrize(
    "fault", ["others can write", "another user", "a link to such a one", "a link to nothing", "a file"]
)
def test_a_cache_of_compiled_code_that_is_not_ours_alone_is_refused(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "inductor"
    cache.touch() if fault == "a file" else cache.mkdir()
    match fault:
        case "others can write":
            cache.chmod(0o777)
        case "another user":
            monkeypatch.setattr(os, "geteuid", lambda: 12345)
            monkeypatch.setattr(Path, "lstat", lambda self: _owned_by(54321, os.lstat(self)))
        case "a link to such a one":
            (tmp_path / "elsewhere").mkdir()
            (tmp_path / "elsewhere").chmod(0o777)
            cache.rmdir()
            cache.symlink_to(tmp_path / "elsewhere")
        case "a link to nothing":
            cache.rmdir()
            cache.symlink_to(tmp_path / "elsewhere")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    model = built(Mlp)
    step = ms.compile(train_step)  # by Inductor, which loads code from there
    with pytest.raises(ms.InputError) as caught:
        step(model, torch.optim.SGD(model.parameters(), 0.1), rows(), labels())
    assert str(caught.value).replace(str(tmp_path), "DIR") == (
        "Inductor's cache is not a directory of this user alone: code in it would be run\n"
        "  at   DIR/inductor\n"
        "  try  TORCHINDUCTOR_CACHE_DIR=a directory of your own that nobody else can write to"
    )


def test_a_cache_of_compiled_code_of_our_own_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    check_compiled_cache()
    (tmp_path / "own").mkdir(mode=0o755)
    (tmp_path / "inductor").symlink_to(tmp_path / "own")
    check_compiled_cache()
