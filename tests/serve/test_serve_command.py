"""`headwater serve` for somebody who has nothing: it makes a model, prints a line that works, ends by a signal."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from typer.testing import CliRunner

from headwater.cli import app
from headwater.config.serve import ServeConfig
from headwater.core.errors import InvalidConfig
from headwater.serve.sockets import listen
from headwater.serve.start import tiny_model
from serve_kit import WAIT_S

COMMAND = [
    sys.executable,
    "-c",
    "from headwater.cli import app; app()",
    "serve",
    "--disk-mib",
    "64",
    "--host-mib",
    "64",
]


@contextmanager
def running(home: Path, shm: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A server process, its address and its line to try."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWATER_", "XDG_"))}
    env |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "HEADWATER_HOST_DIR": str(shm / "host")}
    with (home / "log").open("w") as log:
        process = subprocess.Popen([*COMMAND, *options], env=env, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        where, line = process.stdout.readline(), process.stdout.readline()
        assert where.startswith("tiny-llama answers on http://127.0.0.1:"), (home / "log").read_text()
        yield process, where.split()[-1], line
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_on_a_machine_without_anything(number: signal.Signals, tmp_path: Path, shm: Path) -> None:
    with running(tmp_path, shm) as (process, url, line):
        if shutil.which("curl"):
            printed = subprocess.run(line, shell=True, check=True, capture_output=True, text=True).stdout
            answer = json.loads(printed)
            assert answer["usage"]["prompt_tokens"] == 17
            assert answer["usage"]["headwater"]["cached_tokens"].keys() == {"device", "host", "disk"}
        body = {"prompt": "on and on", "max_tokens": 6000, "ignore_eos": True, "stream": True}
        with httpx2.stream("POST", f"{url}/completions", json=body, timeout=WAIT_S) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: {")
            process.send_signal(number)
            assert any('"code":"shutting_down"' in one for one in lines)
        assert process.wait(WAIT_S) == 0
        assert "Traceback" not in (tmp_path / "log").read_text()
    base = tmp_path / "cache" / "headwater"
    assert (base / "models" / "tiny-llama" / "config.json").is_file()
    assert [path.name for path in (base / "models").iterdir()] == ["tiny-llama"]
    assert base.stat().st_mode & 0o077 == 0


def test_a_port_that_was_asked_for_and_is_taken_is_one_line(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as other:
        port = other.getsockname()[1]
        found = CliRunner().invoke(app, ["serve", "--model", str(tmp_path), "--port", str(port)])
    assert found.exit_code == 1
    assert f"cannot listen on port {port} of 127.0.0.1" in found.stderr
    assert found.stdout == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "/nowhere"], "/nowhere"),
        (["--host-mib", "1"], "host_bytes must be"),
        (["--num-blocks", "1", "--device-mib", "1"], "not both"),
        (["--role", "prefill"], "say --pool URL"),
        (["--role", "cook"], "prefill, decode, mixed"),
        (["--role", "decode", "--pool", "local:/nowhere", "--no-cache"], "leave --no-cache out"),
        (["--router", "nowhere"], "http://HOST:PORT"),
    ],
)
def test_options_that_cannot_work_are_one_line(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "base"))
    monkeypatch.delenv("HEADWATER_DIR", raising=False)
    monkeypatch.delenv("HEADWATER_POOL", raising=False)
    found = CliRunner().invoke(app, ["serve", *options])
    assert found.exit_code == 1
    assert message in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.fault("D6")
@pytest.mark.parametrize("said", ["option", "variable"])
def test_index_only_uses_no_pool_whatever_the_environment_says(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told to all nodes of a cluster which pool there is; one of them is to keep the index and nothing else."""
    found: list[ServeConfig] = []
    monkeypatch.setattr("headwater.serve.start.run", lambda options, **_: found.append(options))
    monkeypatch.setenv("HEADWATER_DIR", str(tmp_path / "base"))
    monkeypatch.setenv("HEADWATER_POOL", f"local:{tmp_path / 'pool'}")
    monkeypatch.setenv("HEADWATER_RESIDENCY", "redis://127.0.0.1:1")
    if said == "variable":
        monkeypatch.setenv("HEADWATER_INDEX_ONLY", "1")
    words = ["serve", "--model", str(tmp_path), *(["--index-only"] if said == "option" else [])]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert (found[0].index_only, found[0].pool, found[0].residency) == (True, None, "redis://127.0.0.1:1")
    refused = CliRunner().invoke(app, [*words, "--pool", f"local:{tmp_path / 'pool'}"])
    assert refused.exit_code == 1
    assert "leave the pool out" in refused.stderr
    assert len(found) == 1


@pytest.mark.fault("B11")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "/nowhere"], "there is no model directory /nowhere"),
        (["--num-blocks", str(10**9)], "bytes of KV (--num-blocks, --device-mib) cannot be had on cpu"),
        (["--num-blocks", str(10**30)], "num_blocks must be a whole number below 2**62"),
        (["--device-mib", str(10**9)], "cannot be had on cpu"),
        (["--device-mib", str(10**30)], "device_bytes must be a whole number below 2**62"),
        (["--block-tokens", str(10**9)], "hold no block"),
    ],
)
def test_sizes_that_cannot_be_had_are_one_line(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything of that size is allocated, and before the tiers are made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "base"))
    monkeypatch.delenv("HEADWATER_DIR", raising=False)
    monkeypatch.setenv("HEADWATER_HOST_DIR", str(tmp_path / "host"))
    monkeypatch.delenv("HEADWATER_POOL", raising=False)
    found = CliRunner().invoke(app, ["serve", *options])
    assert found.exit_code == 1
    assert message in " ".join(found.stderr.split())
    assert "Traceback" not in found.stderr
    assert isinstance(found.exception, SystemExit)
    assert not (tmp_path / "host").exists()


def test_a_tiny_model_is_made_once_and_whole(tmp_path: Path) -> None:
    made = [tiny_model(tmp_path / "base") for _ in range(2)]
    assert made[0] == made[1]
    assert [path.name for path in made[0].parent.iterdir()] == [made[0].name]
    (made[0] / "config.json").unlink()
    with pytest.raises(InvalidConfig, match="holds no model"):
        tiny_model(tmp_path / "base")


@pytest.mark.fault("X24")
@pytest.mark.parametrize("host", ["a..b", "a" * 64])
def test_a_name_that_cannot_be_one_is_no_address(host: str) -> None:
    """X24: UnicodeError, and a traceback for whoever mistyped."""
    with pytest.raises(InvalidConfig, match="is no address to listen on"):
        listen(host, 0)
