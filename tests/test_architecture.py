"""The floors of design.md 6: who may import whom, and where the private parts of PyTorch may be touched."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import meshstep

ROOT = Path(meshstep.__file__).parent
FLOORS = {
    "cli": 7, "__main__": 7,
    "api": 6, "spmd": 6, "arguments": 6, "lowered": 6, "verification": 6, "phases": 6, "materialize": 6,
    "resizing": 6, "finding": 6, "piece": 6, "blame": 6, "hardware": 6, "progress": 0, "launch": 6,
    "report": 5, "runtime": 5, "checkpoint": 5,
    "partition": 4, "passes": 4,
    "plan": 3,
    "rules": 2, "capture": 2, "override": 2, "batch_norm": 2, "opaque": 2, "contract": 2,
    "ir": 1,
    "errors": 0, "mesh": 0, "layout": 0, "schema": 0, "_torch": 0,
}  # fmt: skip
STRANGERS = ({"rules", "capture"},)  # know nothing of each other
PROCESS_GROUPS = ("runtime", "checkpoint", "_torch")  # the rooms that may use them
FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def room_of(file: Path) -> str:
    """The room that a file is in: a sub-package, or the file itself."""
    return file.parts[0].removesuffix(".py")


def tree_of(file: Path) -> ast.Module:
    return ast.parse((ROOT / file).read_text())


def imported(file: Path) -> Iterator[str]:
    """The full names of the modules that a file imports, wherever in it, its own package's too."""
    package = ["meshstep", *file.parts[:-1]]
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield from (f"{module}.{name.name}" for name in node.names)


def rooms(file: Path) -> set[str]:
    """The other rooms of the house that a file imports from."""
    names = (name.split(".")[1] for name in imported(file) if name.startswith("meshstep."))
    return {name for name in names if name in FLOORS} - {room_of(file)}


def dotted(node: ast.AST) -> str:
    """`torch.fx.Graph` of such an expression; "" of any other."""
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return node.id if isinstance(node, ast.Name) else ""


def is_private(name: str) -> bool:
    """Whether a dotted name is of torch, and private; names of ops are not."""
    parts = name.split(".")
    if parts[0] != "torch" or parts[1:2] == ["ops"]:
        return False
    return any(part.startswith("_") and not (part.startswith("__") and part.endswith("__")) for part in parts)


def private_names(file: Path) -> Iterator[str]:
    used = (dotted(node) for node in ast.walk(tree_of(file)) if isinstance(node, ast.Attribute))
    yield from sorted({name for name in (*imported(file), *used) if is_private(name)})


def test_every_file_has_a_floor():
    files = {room_of(file) for file in FILES} - {"__init__"}
    assert files <= FLOORS.keys(), f"no floor for {sorted(files - FLOORS.keys())}"


@pytest.mark.parametrize("file", [f for f in FILES if f != Path("__init__.py")], ids=str)
def test_imports_go_down(file):
    for room in rooms(file):
        assert FLOORS[room] <= FLOORS[room_of(file)], f"{file} imports upward, from {room}"
        assert {room, room_of(file)} not in STRANGERS, f"{file} may know nothing of {room}"


def test_rooms_of_one_floor_do_not_loop():
    edges: dict[str, set[str]] = {}
    for file in FILES:
        edges.setdefault(room_of(file), set()).update(rooms(file))
    edges.pop("__init__")

    def reached(start: str) -> set[str]:
        found, open_ = set[str](), [start]
        while open_:
            new = edges.get(open_.pop(), set()) - found
            found |= new
            open_ += new
        return found

    assert [room for room in edges if room in reached(room)] == []


def test_modules_do_not_loop():
    """Not within a room either: every module can be the first that is imported."""
    files = {".".join(("meshstep", *file.with_suffix("").parts)): file for file in FILES if file.stem != "__init__"}
    edges = {
        name: {n for i in imported(file) for n in (i, i.rpartition(".")[0]) if n in files}
        for name, file in files.items()
    }
    state: dict[str, str] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert state.get(name) != "open", " -> ".join((*path, name))
        if name not in state:
            state[name] = "open"
            for other in sorted(edges[name]):
                visit(other, (*path, name))
            state[name] = "done"

    for name in files:
        visit(name, ())


@pytest.mark.parametrize("file", [f for f in FILES if room_of(f) != "_torch"], ids=str)
def test_private_parts_of_torch_are_in_one_file(file):
    found = list(private_names(file))
    assert not found, f"{file} uses {found}; give them a name in _torch.py"


@pytest.mark.parametrize("file", [f for f in FILES if room_of(f) not in PROCESS_GROUPS], ids=str)
def test_only_the_runtime_knows_process_groups(file):
    used = {dotted(node) for node in ast.walk(tree_of(file)) if isinstance(node, ast.Attribute)} | set(imported(file))
    found = {name for name in used if name.startswith("torch.distributed") and not _is_value(name)}
    if file == Path("mesh.py"):
        found -= {"torch.distributed.device_mesh.DeviceMesh", "torch.distributed.device_mesh.init_device_mesh"}
    assert not found, f"{file} uses {sorted(found)}"


def _is_value(name: str) -> bool:
    """Placements and DTensors are values."""
    return (name + ".").startswith("torch.distributed.tensor.")


def test_the_checks_see_what_they_shall_see():
    private = ("torch._C._x", "torch.fx._symbolic_trace", "torch.compiler._flag")
    public = ("torch.fx.Graph", "torch.ops._c10d_functional.all_reduce", "torch.__version__", "os._exit")
    assert all(map(is_private, private)) and not any(map(is_private, public))
    assert rooms(Path("partition.py")) >= {"ir", "rules", "plan"}
    assert "torch.library.define" in {dotted(n) for n in ast.walk(tree_of(Path("ir/collectives.py")))}


def test_every_module_can_be_imported_and_says_what_it_is():
    for module in pkgutil.walk_packages([str(ROOT)], "meshstep."):
        if not module.name.endswith("__main__"):
            doc = importlib.import_module(module.name).__doc__
            assert doc or module.ispkg, f"{module.name} has no docstring"


def test_importing_needs_no_process_group_and_prints_nothing():
    code = "import meshstep, torch.distributed as d; assert not d.is_initialized()"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
