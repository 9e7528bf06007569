"""What the documents say is so: the tree, the example, the commands, the links."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_tree_in_the_readme_is_the_tree() -> None:
    tree = subprocess.run([sys.executable, "scripts/tree"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert tree in (ROOT / "README.md").read_text(), "run: scripts/tree, and put its output into README.md"


def test_the_example_in_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert "STORED" in (printed := capsys.readouterr().out)
    assert "HIT" in printed


def test_the_example_of_the_cache_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "CACHE.md").read_text(), re.DOTALL)
    exec(compile(example, "CACHE.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "one ['MISS'] 0" in printed
    assert "two ['HIT'] 6" in printed
    assert "hit_tokens=(('host', 96),)" in printed


def test_the_commands_in_the_documents_exist() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    for command in sorted(
        set(re.findall(r"\bheadwater (demo|replay|serve|verify|make-model|bench \w+|ls|check|purge)\b", text))
    ):
        subprocess.run(
            [sys.executable, "-c", "from headwater.cli import app; app()", *command.split(), "--help"],
            check=True,
            capture_output=True,
        )
    for module in sorted(set(re.findall(r"python -m (headwater[\w.]+)", text))):
        subprocess.run([sys.executable, "-m", module, "--help"], check=True, capture_output=True)
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"serve", "test"} <= set(re.findall(r"^make (\w+)", text, re.MULTILINE)) <= targets


def test_files_named_in_the_documents_exist() -> None:
    for page in PAGES:
        for name in re.findall(
            r"`((?:core|layout|policy|index|cache|engine|replay|serve|storage|transfer|testing|bench)/[\w/.]+\.py)`",
            page.read_text(),
        ):
            known = (ROOT / "src" / "headwater" / name).exists() or name == "core/block.py"
            assert known, f"{page.name} names {name}"
        for link in re.findall(r"\]\(([\w/.]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
