"""What is said of the package in pyproject.toml is so: every package that is imported is declared, and one version."""

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import headwater

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(headwater.__file__).parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CALLED: dict[str, str] = {  # where the module has another name
    "mooncake": "mooncake-transfer-engine-non-cuda",
    "opentelemetry": "opentelemetry-sdk",
}
APART = {"vllm", "huggingface_hub", "lmcache"}  # what is in a venv of its own, or comes with that


def declared() -> set[str]:
    """Names of all packages that the base install or an extra brings."""
    wanted = [
        *PROJECT["dependencies"],
        *(word for words in PROJECT["optional-dependencies"].values() for word in words),
    ]
    return {re.split(r"[^A-Za-z0-9_.-]", word)[0].lower() for word in wanted}


def imported() -> dict[str, list[str]]:
    """Top-level packages that are imported somewhere in the sources, and where."""
    found: dict[str, list[str]] = {}
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                found.setdefault(name.partition(".")[0], []).append(str(path.relative_to(SOURCES)))
    return {name: where for name, where in found.items() if name not in sys.stdlib_module_names | {"headwater"}}


@pytest.mark.fault("D9")
def test_every_package_that_is_imported_is_declared() -> None:
    found = imported()
    assert {"numpy", "torch", "starlette"} <= found.keys()
    missing = {name: where for name, where in found.items() if CALLED.get(name, name) not in declared() | APART}
    assert not missing


@pytest.mark.fault("D9")
def test_the_version_is_written_once() -> None:
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", headwater.__version__)
