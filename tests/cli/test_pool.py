"""`headwater pool` and its diagnosis, with real processes."""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headwater.cli import app
from headwater.config import environment
from headwater.core.errors import InvalidConfig, StoreUnavailable
from headwater.lab import pool_diagnosis as diagnosis
from headwater.lab.finding import Check
from headwater.lab.pool_diagnosis import diagnose
from headwater.pool import local, process, servers
from headwater.pool.process import Process, spawn
from headwater.storage.base import Deadline
from headwater.testing.mooncake import MooncakePool

MIB = 1 << 20


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Of a pool; whatever runs there at the end of a test is ended."""
    path = tmp_path / "pool"
    yield path
    local.down(path, patience_s=0.0)


def _run(*words: str) -> tuple[int, Any]:
    result = CliRunner().invoke(app, ["pool", *words, "--json"])
    return result.exit_code, json.loads(result.stdout) if result.exit_code in (0, 1) and result.stdout else None


# --- up, status, down -------------------------------------------------------------------------------------------------


def test_a_pool_comes_up_once_and_goes_down(directory: Path) -> None:
    where = ("--directory", str(directory))
    assert _run("status", *where)[0] == 1
    code, first = _run("up", "--size", "32MiB", *where)
    assert (code, first["up"], first["started"], first["capacity_bytes"]) == (0, True, True, 32 * MIB)
    code, again = _run("up", "--size", "64MiB", *where)
    assert (code, again["started"], again["url"], again["servers"]) == (0, False, first["url"], first["servers"])
    code, found = _run("status", *where)
    assert (code, found["up"], found["num_objects"], found["used_bytes"]) == (0, True, 0, 0)
    master, client = found["servers"]
    assert master["open_to_others"] == []
    assert all(one.startswith("127.0.0.1:") for one in master["listens_on"])
    assert sum(one.startswith("127.0.0.1:") for one in client["listens_on"]) == 1
    assert len(client["open_to_others"]) == 2  # the engine's own choice: said, and nothing to be done
    assert {check.state for check in diagnose(found["url"])} == {"ok"}
    assert "headwater serve --pool 'mooncake://" in CliRunner().invoke(app, ["pool", "status", *where]).stdout
    assert _run("down", *where) == (0, {"command": "pool down", "directory": str(directory), "num_ended": 2})
    assert not any(Path(f"/proc/{server['pid']}").exists() for server in found["servers"])
    assert _run("down", *where)[1]["num_ended"] == 0
    assert _run("status", *where)[0] == 1


def test_what_ended_is_said_and_started_again(directory: Path) -> None:
    first = local.up(directory, segment_bytes=16 * MIB)
    os.kill(first.servers[1].pid, signal.SIGKILL)
    wait = Deadline.after(5)
    while (found := local.status(directory)).up:
        assert not wait.expired
    assert (found.why, found.url) == ("ended: client", first.url)
    second = local.up(directory, segment_bytes=16 * MIB)
    assert second.up
    assert second.started
    assert {server.pid for server in second.servers}.isdisjoint(server.pid for server in first.servers)
    assert not Process(first.servers[0].pid, 0).alive
    os.kill(second.servers[0].pid, signal.SIGSTOP)
    found = local.status(directory)
    assert not found.up
    assert "does not answer" in found.why
    assert local.down(directory, patience_s=0.2) == 2  # who is stopped does not hear SIGTERM


def test_two_at_once_start_one_pool(directory: Path) -> None:
    found: list[local.PoolStatus] = []
    threads = [
        threading.Thread(target=lambda: found.append(local.up(directory, segment_bytes=16 * MIB))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0].url == found[1].url
    assert sorted(one.started for one in found) == [False, True]


def test_a_port_that_was_taken_meanwhile(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [taken.getsockname()[1]]
        monkeypatch.setattr(local, "free_port", lambda: ports.pop() if ports else servers.free_port())
        monkeypatch.setattr(local, "_READY_S", 3.0)
        assert local.up(directory, segment_bytes=16 * MIB).up
        assert not ports


def test_a_pool_that_cannot_come_up_says_why(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (1, 15 * MIB, -1):
        with pytest.raises(InvalidConfig, match="at least 16 MiB"):
            local.up(directory, segment_bytes=size)
    with pytest.raises(StoreUnavailable, match="more than this machine has free"):
        local.up(directory, segment_bytes=1 << 49)
    monkeypatch.setattr(local, "master_command", lambda **_: ["/bin/sh", "-c", "echo no such thing; exit 3"])
    with pytest.raises(StoreUnavailable, match="no such thing"):
        local.up(directory, segment_bytes=16 * MIB)
    monkeypatch.setattr(local, "master_command", lambda **_: ["/nonexistent/program"])
    with pytest.raises(StoreUnavailable, match="No such file"):
        local.up(directory, segment_bytes=16 * MIB)
    assert not (directory / "pool.json").exists()
    assert CliRunner().invoke(app, ["pool", "up", "--size", "big", "--directory", str(directory)]).exit_code == 1


def test_a_directory_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(StoreUnavailable, match="others may write"):
        local.up(open_to_all, segment_bytes=16 * MIB)
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnavailable, match="cannot keep a pool"):
        local.up(tmp_path / "file", segment_bytes=16 * MIB)


def test_where_a_pool_is_written_down() -> None:
    assert environment.default_pool_directory({"XDG_RUNTIME_DIR": "/run/user/7"}) == Path("/run/user/7/headwater-pool")
    assert environment.default_pool_directory({}) == Path(f"/tmp/headwater-pool-{os.geteuid()}")


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(StoreUnavailable, match=r"headwater\[mooncake\]"):
        servers.program("mooncake_master")


# --- only those processes ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _other(code: str, output: Path) -> Iterator[Process]:
    one = spawn([sys.executable, "-c", code], settings={}, output=output)
    try:
        yield one
    finally:
        one.send(signal.SIGKILL)
        one.wait(Deadline.after(5))


_IGNORES = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(99)"
)


def test_a_number_that_was_given_to_another_process_is_not_ended(directory: Path, tmp_path: Path) -> None:
    with _other("import time; time.sleep(99)", tmp_path / "out") as stranger:
        local.up(directory, segment_bytes=16 * MIB)
        state = json.loads((directory / "pool.json").read_text())
        real = {name: Process(**state[name]) for name in ("master", "client")}
        for lie in ({"started": stranger.started - 1}, {"boot": True}):
            spoiled = state | {"client": {"pid": stranger.pid, "started": lie.get("started", stranger.started)}}
            if "boot" in lie:
                spoiled["boot"] = "another"
            (directory / "pool.json").write_text(json.dumps(spoiled))
            assert not local.status(directory).up
            assert local.down(directory) == ("boot" not in lie)  # the master, which is ours
            assert stranger.alive
        assert not real["master"].alive
        assert real["client"].stop(patience_s=5)


def test_who_does_not_listen_is_ended_all_the_same(tmp_path: Path) -> None:
    with _other(_IGNORES, tmp_path / "out") as deaf:
        wait = Deadline.after(10)
        while "ready" not in (tmp_path / "out").read_text():
            assert not wait.expired
            time.sleep(0.01)
        assert deaf.send(signal.SIGTERM)
        assert not deaf.wait(Deadline.after(0.2))
        assert deaf.stop(patience_s=0.1)
        assert not deaf.alive
        assert not deaf.send(signal.SIGTERM)
        assert deaf.stop(patience_s=0.1)  # it is gone: nothing to do
    assert not Process(os.getpid(), 1).send(signal.SIGKILL)  # our number, another start


def test_rubbish_in_the_state_is_no_pool(directory: Path) -> None:
    directory.mkdir(mode=0o700)
    for text in ("", "{}", "[]", '{"version": 2}', '{"version": 1, "boot": 7, "client": 1}'):
        (directory / "pool.json").write_text(text)
        assert local.status(directory).why == "no pool was started here"
        assert local.down(directory) == 0


def test_addresses_of_the_kernels_tables() -> None:
    assert process._address("0100007F:C350") == "127.0.0.1:50000"
    assert process._address("00000000:0050") == "0.0.0.0:80"
    assert process._address("00000000000000000000000000000000:0050") == "*:80"
    assert process._address("00000000000000000000000001000000:0050").endswith(":0001]:80")
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("::1", 0), family=socket.AF_INET6) as six:
        mine = Process(os.getpid(), 0).listens_on()
        assert f"127.0.0.1:{one.getsockname()[1]}" in mine
        server = local.PoolProgram("x", 1, True, mine)
        assert not any(str(six.getsockname()[1]) in where for where in server.open_to_others)


# --- what is wrong with a pool ----------------------------------------------------------------------------------------


def _states(findings: list[Check]) -> dict[str, str]:
    return {finding.name: finding.state for finding in findings}


def test_a_pool_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = diagnose("mooncake://nowhere")
    assert (finding.state, "HOST:PORT" in finding.found) == ("fail", True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"mooncake://127.0.0.1:{probe.getsockname()[1]}?shm=127.0.0.1:1"
        assert _states(diagnose(url)) == {"pool master": "fail", "pool client": "fail", "pool engine": "ok"}
    # The engine as it is where a library is missing: found before everything else that is called mooncake.
    fake = tmp_path / "mooncake"
    fake.mkdir()
    (fake / "__init__.py").touch()
    (fake / "store.py").write_text("raise ImportError('libibverbs.so.1: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    (*_, engine) = diagnose("mooncake://127.0.0.1:1")
    assert (engine.state, "libibverbs1" in engine.found) == ("fail", True)


def test_a_master_without_memory_is_said() -> None:
    with MooncakePool() as pool:
        found = diagnose(pool.config().url)
        assert _states(found) == {"pool master": "ok", "pool engine": "ok", "pool page": "fail"}
        assert "gives the pool memory" in found[-1].found
        assert "segment=2GiB" in found[-1].hint
        brings_its_own = diagnose(f"{pool.config().url}?segment=32MiB")
        assert _states(brings_its_own)["pool page"] == "warn"
        metadata = diagnose(f"{pool.config().url}?metadata=http://127.0.0.1:1/metadata")
        assert _states(metadata) == {"pool master": "ok", "pool metadata": "fail", "pool engine": "ok"}
        assert "same metadata server" in metadata[1].hint
        pool.signal_master(signal.SIGSTOP)
        start_s = time.monotonic()
        stopped = diagnose(pool.config().url)
        assert time.monotonic() - start_s < 5
        assert (stopped[0].state, "does not answer" in stopped[0].found) == ("fail", True)


def test_a_pool_that_stops_while_it_is_tried_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "_PROBE_S", 0.05)
    with MooncakePool() as pool:
        found = diagnose(pool.config().url)
        assert (found[-1].name, found[-1].state) == ("pool page", "fail")
        assert "did not come back" in found[-1].found


def test_a_probe_that_crashes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert diagnose("mooncake://127.0.0.1:1")[-1].found == "it ended with 1"


def test_the_probe_prints_json_and_nothing_else() -> None:
    with MooncakePool(segment_bytes=16 * MIB) as pool:
        for url in (pool.config().url, pool.config(shm=True).url):
            run = [sys.executable, "-m", "headwater.lab.pool_diagnosis", url]
            done = subprocess.run(run, capture_output=True, text=True, timeout=30, check=True)
            assert [json.loads(line)["state"] for line in done.stdout.splitlines()] == ["ok", "ok"]
