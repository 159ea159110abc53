"""Meshes: values that know who is next to whom."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support import check_text
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshstep import InputError, Mesh

meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(
    lambda sizes: Mesh(**{f"axis{i}": size for i, size in enumerate(sizes)})
)


def test_size_and_axes():
    mesh = Mesh(dp=2, tp=4)
    assert (mesh.size, mesh.axes, tuple(mesh), mesh["tp"]) == (8, ("dp", "tp"), ("dp", "tp"), 4)
    assert "dp" in mesh and "pp" not in mesh


def test_the_last_axis_is_the_innermost():
    mesh = Mesh(dp=2, tp=4)
    assert mesh.coordinate(5) == {"dp": 1, "tp": 1}
    assert mesh.group(5, "tp") == (4, 5, 6, 7)
    assert mesh.group(5, "dp") == (1, 5)


@given(meshes)
def test_groups_divide_the_ranks(mesh):
    for axis in mesh:
        groups = {mesh.group(rank, axis) for rank in range(mesh.size)}
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
        for group in groups:
            assert [mesh.coordinate(rank)[axis] for rank in group] == list(range(mesh[axis]))


@given(meshes)
def test_no_two_ranks_have_one_coordinate(mesh):
    found = {tuple(mesh.coordinate(rank).items()) for rank in range(mesh.size)}
    assert len(found) == mesh.size


def test_a_mesh_is_a_value():
    mesh = Mesh(dp=2, tp=4)
    assert mesh == Mesh(dp=2, tp=4) and hash(mesh) == hash(Mesh(dp=2, tp=4))
    assert mesh not in (Mesh(tp=4, dp=2), Mesh(dp=2), Mesh(dp=4, tp=2), "mesh")
    assert pickle.loads(pickle.dumps(mesh)) == copy.deepcopy(mesh) == mesh
    with pytest.raises(AttributeError, match="cannot be changed"):
        mesh.size = 3  # type: ignore[misc]


def test_texts():
    assert str(Mesh(dp=2, tp=4)) == "mesh(dp=2, tp=4)"
    assert repr(Mesh(dp=2, tp=4)) == "Mesh(dp=2, tp=4)"
    assert eval(repr(Mesh(dp=2, tp=4))) == Mesh(dp=2, tp=4)


@pytest.mark.parametrize(
    ("make", "golden"),
    [
        (lambda: Mesh(), "errors/mesh_empty.txt"),
        (lambda: Mesh(dp=0), "errors/mesh_zero.txt"),
        (lambda: Mesh(dp=2.0), "errors/mesh_float.txt"),
        (lambda: Mesh(dp=True), "errors/mesh_bool.txt"),
        (lambda: Mesh(dp=2, tp=2)["pp"], "errors/mesh_axis.txt"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(make, golden):
    with pytest.raises(InputError) as caught:
        make()
    check_text(f"{caught.value}\n", golden)


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    """A process group of which this process is rank 5; nothing is sent."""
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("eight_ranks")
def test_device_meshes_there_and_back():
    mesh = Mesh(dp=2, tp=4)
    devices = mesh.device_mesh("cpu")
    assert (devices.mesh_dim_names, devices.mesh.tolist()) == (("dp", "tp"), [[0, 1, 2, 3], [4, 5, 6, 7]])
    assert list(devices.get_coordinate()) == list(mesh.coordinate(5).values())
    assert tuple(dist.get_process_group_ranks(devices.get_group("dp"))) == mesh.group(5, "dp")
    assert Mesh.from_device_mesh(devices) == mesh


@pytest.mark.usefixtures("eight_ranks")
def test_a_device_mesh_without_names_is_refused():
    with pytest.raises(InputError) as caught:
        Mesh.from_device_mesh(init_device_mesh("cpu", (2, 4)))
    check_text(f"{caught.value}\n", "errors/mesh_no_names.txt")
