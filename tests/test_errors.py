"""Errors: their tree, and the three parts of a message."""

from __future__ import annotations

import pickle
import re

import pytest
from support import check_text

import meshstep as ms
from meshstep import _torch, errors

CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, ms.MeshstepError)]


def test_a_message_says_what_where_and_what_to_try():
    error = ms.LayoutError("dim 0 cannot be split", at="model.py:14  fc1.weight", hint="Replicate() on 'tp'")
    check_text(f"{error}\n", "errors/three_parts.txt")
    assert (error.what, error.at, error.hint) == (
        "dim 0 cannot be split",
        "model.py:14  fc1.weight",
        "Replicate() on 'tp'",
    )


@pytest.mark.parametrize("parts", [{}, {"at": "here"}, {"hint": "this"}, {"at": None, "hint": None}])
def test_parts_that_are_not_there_leave_no_line(parts):
    lines = str(ms.InputError("wrong", **parts)).splitlines()
    assert lines[0] == "wrong"
    assert len(lines) == 1 + sum(part is not None for part in parts.values())


def test_the_tree_that_is_drawn_is_the_tree_that_is():
    drawn = re.findall(r"^ *(\w+Error)\b", errors.__doc__ or "", re.MULTILINE)
    assert drawn == [c.__name__ for c in CLASSES]


@pytest.mark.parametrize("error", CLASSES, ids=lambda c: c.__name__)
def test_every_class_is_public_and_one_of_ours(error):
    assert getattr(ms, error.__name__) is error
    assert issubclass(error, ms.MeshstepError)
    assert error.__doc__


@pytest.mark.parametrize("error", CLASSES, ids=lambda c: c.__name__)
def test_errors_travel_between_processes(error):
    original = error("wrong", at="here", hint="this")
    again = pickle.loads(pickle.dumps(original))
    assert (type(again), str(again), again.at, again.hint) == (error, str(original), "here", "this")


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu", "2.13.1+cu128", "2.13.0a0+git12"])
def test_a_tested_torch_is_accepted(version):
    _torch.check_version(version)


@pytest.mark.parametrize("version", ["2.12.1", "2.14.0", "1.13.0", "3.0.0"])
def test_another_torch_is_refused(version):
    with pytest.raises(_torch.UnsupportedTorchError):
        _torch.check_version(version)


def test_another_torch_is_refused_with_its_version():
    with pytest.raises(ImportError) as caught:
        _torch.check_version("2.12.1+cpu")
    check_text(f"{caught.value}\n", "errors/torch_version.txt")
