"""The contracts of pyproject.toml have no holes: every room has a layer, and what is pure is held to being so."""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import grimp
import pytest

import headwater

SOURCES = Path(headwater.__file__).parent
PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
SETTINGS: dict[str, Any] = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["tool"]["importlinter"]
CONTRACTS: list[dict[str, Any]] = SETTINGS["contracts"]
# Where decisions are made.
ROOMS = ("core", "layout", "policy", "index", "cache", "residency", "transfer", "disagg", "router")


def contract(word: str) -> dict[str, Any]:
    (found,) = [one for one in CONTRACTS if word in one["name"]]
    return found


@pytest.mark.fault("D7")
def test_every_room_has_a_layer() -> None:
    layers = contract("go down")
    assert layers["exhaustive"] is True
    assert layers["containers"] == ["headwater"]
    placed = {name.strip() for layer in layers["layers"] for name in layer.split("|")}
    rooms = {path.stem for path in SOURCES.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert placed == rooms - {"__init__"}


@pytest.mark.fault("D7")
def test_whatever_is_pure_is_held_to_it() -> None:
    """A module of a room that decides is in the contract of logical rooms, unless it is honestly physical."""
    logical = contract("Logical")
    graph = grimp.build_graph("headwater", include_external_packages=True)
    for line in logical.get("ignore_imports", []):
        importer, _, imported = line.partition(" -> ")
        graph.remove_import(importer=importer, imported=imported)
    forbidden = [name for name in logical["forbidden_modules"] if name in graph.modules]
    assert {"time", "threading", "socket"} <= set(forbidden)
    missing = [
        module
        for module in sorted(graph.modules)
        if module.split(".")[:1] == ["headwater"]
        and module.split(".")[1:2]
        and module.split(".")[1] in ROOMS
        and not any(module == one or module.startswith(f"{one}.") for one in logical["source_modules"])
        and not graph.find_children(module)
        and not any(graph.find_shortest_chain(importer=module, imported=name) for name in forbidden)
    ]
    assert not missing


@pytest.mark.fault("D7")
def test_no_contract_is_got_round_by_starting_a_program() -> None:
    """Only lab and test kit name their own modules to an interpreter; who needs them imports them, and is seen to."""
    kits = ("headwater.testing", "headwater.lab")
    for path in SOURCES.rglob("*.py"):
        if any(path.is_relative_to(SOURCES / kit.partition(".")[2]) for kit in kits):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        words = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        assert not [word for word in words if isinstance(word, str) and word.startswith(kits)], path


def test_a_green_run_of_tests_leaves_nothing_behind(tmp_path: Path) -> None:
    """Tests write gigabytes of slabs: what passed is removed, and what failed stays to be looked at."""
    scratch, test = tmp_path / "scratch", tmp_path / "test_one.py"
    scratch.mkdir()
    test.write_text(
        "def test_writes(tmp_path, tmp_path_factory):\n"
        "    for place in (tmp_path, tmp_path_factory.mktemp('more')):\n"
        "        (place / 'slab').write_bytes(bytes(1 << 20))\n"
        "def test_may_fail(tmp_path):\n"
        "    (tmp_path / 'seen').write_text('x')\n"
        "    assert not FAILS\n"
    )
    for fails in (False, True):
        test.write_text(test.read_text().split("FAILS =")[0] + f"FAILS = {fails}\n")
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", str(PROJECT)]
        environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONDONTWRITEBYTECODE": "1"}
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(test)],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == int(fails), ran.stdout + ran.stderr
        left = [path.name for path in scratch.rglob("*") if path.is_file() and not path.is_symlink()]
        assert "slab" not in left or fails
        assert ("seen" in left) == fails
