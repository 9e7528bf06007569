"""What the documents say is so: the tree, the example, the commands, the links."""

import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import headwater
from headwater.cli import app
from headwater.engine.request import Usage
from headwater.serve.asked import read_asked
from headwater.serve.body import Fields
from headwater.serve.openai import Chat, Completions, usage_document
from headwater.serve.phases import phases_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples that make a directory and leave it, as a reader would, leave it here."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_the_example_in_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("one 0 ")
    assert second.startswith("two 6 ")
    assert "hit_tokens=(('host', 96),)" in second


def test_the_names_that_stay_are_all_documented_and_there() -> None:
    text = (ROOT / "docs" / "API.md").read_text()
    for name in headwater.__all__:
        assert getattr(headwater, name) is not None
        assert name == "__version__" or f"`{name}" in text, name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        headwater.nonsense  # noqa: B018


def test_to_import_the_package_is_to_load_nothing() -> None:
    script = (
        "import sys, headwater; headwater.HeadwaterError; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_example_of_the_formats_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "FORMATS.md").read_text(), re.DOTALL)
    exec(compile(example, "FORMATS.md", "exec"), {})
    assert "STORED" in (printed := capsys.readouterr().out)
    assert "HIT" in printed


def test_the_example_of_the_cache_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "CACHE.md").read_text(), re.DOTALL)
    exec(compile(example, "CACHE.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "one ['MISS'] 0" in printed
    assert "two ['HIT'] 6" in printed
    assert "hit_tokens=(('host', 96),)" in printed


def test_the_example_of_the_engine_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "SERVE.md").read_text(), re.DOTALL)
    exec(compile(example, "SERVE.md", "exec"), {})
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("0 {} ")
    assert second.startswith("1 {'device': ")


def test_the_example_of_the_attention_store_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "ATTENTION_STORE.md").read_text(), re.DOTALL)
    exec(compile(example, "ATTENTION_STORE.md", "exec"), {})
    reached = re.findall(r"num_blocks=(\d), why=<Reason.(\w+):", printed := capsys.readouterr().out)
    assert reached == [("4", "WHOLE"), ("4", "INCOMPLETE"), ("1", "INCOMPLETE"), ("2", "WHOLE")]
    assert printed.endswith("True\n")


def test_the_example_of_residency_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "RESIDENCY.md").read_text(), re.DOTALL)
    exec(compile(example, "RESIDENCY.md", "exec"), {})
    assert capsys.readouterr().out == "node-1 6 6 0\n"


def test_the_example_of_the_copy_engine_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "COPY.md").read_text(), re.DOTALL)
    exec(compile(example, "COPY.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == ["layer 0: True", "good: 2", "good of spoiled: 1"]


def test_bodies_and_usage_in_the_documents_are_the_server_s() -> None:
    text = (ROOT / "docs" / "SERVE.md").read_text()
    apis = {api.endpoint: api for api in (Completions(), Chat())}
    bodies = re.findall(r"^curl \S+?(/v1/\S+) .* -d '(.*)'$", text, re.MULTILINE)
    assert {endpoint for endpoint, _ in bodies} == set(apis)
    for endpoint, body in bodies:
        fields = Fields(json.loads(body))
        read_asked(fields, endpoint, apis[endpoint].fields(fields))
    (shown,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    usage = Usage(
        prompt_tokens=185,
        completion_tokens=16,
        cached_tokens=176,
        cached_by_tier={"host": 176},
        computed_tokens=24,
        ttft_s=0.03,
        total_s=0.1,
        queue_s=0.01,
    )
    paces = {"host": (0.0004, 0.031), "disk": (0.0, 0.0)}
    tiers, phases = ("device", "host", "disk"), phases_of(usage, None)
    assert json.loads(shown) == usage_document(usage, 16, tiers, phases, paces, "req-5f1c/8a3e")


def test_the_options_in_the_documents_exist() -> None:
    whole = typer.main.get_command(app)
    for page in PAGES:
        for line in re.findall(r"^(?:\.venv/bin/)?headwater (.*)$", page.read_text(), re.MULTILINE):
            command = whole
            for word in shlex.split(line, comments=True):
                inner = getattr(command, "commands", {}).get(word)
                command = inner if inner is not None else command
                known = [option for parameter in command.params for option in parameter.opts]
                assert not word.startswith("-") or word in known, f"{page.name}: {line}"


_HELP_OF_ALL = """
import runpy, sys
for module in sys.argv[1:]:
    sys.argv = [module, "--help"]
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    else:
        sys.exit(f"{module} --help did not end")
"""


def test_the_commands_in_the_documents_exist() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    names = "chaos|check|demo|doctor|explain|ls|make-model|pd|purge|replay|router|serve|verify"
    for command in sorted(set(re.findall(rf"\bheadwater ({names}|bench \w+|pool \w+)\b", text))):
        assert CliRunner().invoke(app, [*command.split(), "--help"]).exit_code == 0, command
    modules = sorted(set(re.findall(r"python -m (headwater[\w.]+)", text)))
    subprocess.run([sys.executable, "-c", _HELP_OF_ALL, *modules], check=True, capture_output=True)
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"serve", "test"} <= set(re.findall(r"^make (\w+)", text, re.MULTILINE)) <= targets


def test_files_named_in_the_documents_exist() -> None:
    for page in PAGES:
        for name in re.findall(
            r"`((?:core|layout|policy|index|residency|cache|engine|lab|serve|storage|transfer|testing|disagg|pool|router|integrations|build|cli)/[\w/.]+\.py)`",
            page.read_text(),
        ):
            known = (ROOT / "src" / "headwater" / name).exists() or name == "core/block.py"
            assert known, f"{page.name} names {name}"
        for link in re.findall(r"\]\(([\w/.]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_chains_of_functions_are_counted_and_there() -> None:
    text = (ROOT / "docs" / "HOPS.md").read_text()
    counted = re.findall(r"^\| \[([\w ]+)\]\(#[\w-]+\) \| \d+ \| \d+ \| (\d+) \|$", text, re.MULTILINE)
    chains = {part.partition("\n")[0].lower(): part for part in text.split("\n## ")[1:]}
    assert {name: len(re.findall(r"^\d+\. ", chains[name], re.MULTILINE)) for name in chains} == {
        name: int(number) for name, number in counted
    }
    overview = (ROOT / "ARCHITECTURE.md").read_text()
    for name, number in counted:
        assert re.search(rf"^\| {name}\b[^|]*\| \d+ \| \d+ \| {number} \|$", overview, re.MULTILINE), name
    for name, path in re.findall(r"^\d+\. `([\w.]+)` in `([\w/.]+)`$", text, re.MULTILINE):
        owner, _, function = name.rpartition(".")
        source = (ROOT / "src" / "headwater" / path).read_text()
        assert re.search(rf"^ *(?:async )?def {function}\b", source, re.MULTILINE), f"{path}: {name}"
        assert not owner or re.search(rf"^class {owner}\b", source, re.MULTILINE), f"{path}: {name}"


def _headings(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {
        re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    }


def test_links_to_headings_lead_somewhere() -> None:
    for page in PAGES:
        for path, anchor in re.findall(r"\]\(([\w/.-]*)#([\w-]+)\)", page.read_text()):
            assert anchor in _headings(page.parent / path if path else page), f"{page.name} links to {path}#{anchor}"


def test_prose_has_at_most_100_columns() -> None:
    for page in PAGES:
        prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for line in prose.splitlines():
            assert len(line) <= 100 or line.startswith(("|", "#")) or " " not in line.strip(), f"{page.name}: {line}"
