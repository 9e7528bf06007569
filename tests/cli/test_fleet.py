"""`headwater pd`: everything from one command, who died is said, nothing is left behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from headwater import fleet_guardian
from headwater.core.errors import HeadwaterError, InvalidConfig
from headwater.core.role import Role
from headwater.fleet import COMMAND, Fleet, FleetOptions
from serve_kit import WAIT_S, directory

__all__ = ["directory"]

# Says where it is, and that it is well; one whose name is in DEAD says why not, and ends.
FAKE = """
import http.server, os, sys
name = sys.argv[sys.argv.index("--node") + 1] if "--node" in sys.argv else "router"
if name in os.environ.get("DEAD", "").split():
    sys.exit(f"headwater: {name} has no pool")
class Well(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *said):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Well)
print(f"{name} answers on http://127.0.0.1:{server.server_port}/v1", flush=True)
server.serve_forever()
"""


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


def options(**more: int) -> FleetOptions:
    return FleetOptions(command=(sys.executable, "-c", FAKE), pool_bytes=8 << 20, **more)  # type: ignore[arg-type]


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_whole_fleet_from_one_command(directory: Path, tmp_path: Path) -> None:
    """What `make pd` runs: it prints a line that works."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HEADWATER_", "FD_"))}
    log = tmp_path / "log"
    arguments = ["pd", "--model", str(directory), "--port", "0", "--pool-mib", "16", "--num-blocks", "64"]
    with log.open("w") as stderr:
        fleet = subprocess.Popen([*COMMAND, *arguments], env=env, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        assert fleet.stdout is not None
        lines = [fleet.stdout.readline() for _ in range(6)]
        assert lines[-1].startswith("curl "), (lines, log.read_text())
        found = re.findall(r"^(\S+) is process (\d+) on (\S+); its log is (\S+)$", "".join(lines), re.MULTILINE)
        assert [name for name, *_ in found] == ["router", "prefill-0", "decode-0"]
        (pool,) = re.findall(r"the pool is local:(\S+)", "".join(lines))
        if shutil.which("curl"):
            answer = subprocess.run(lines[-1], shell=True, check=True, capture_output=True, text=True).stdout
        else:
            answer = httpx2.post(f"{found[0][2]}/v1/completions", json={"prompt": "x"}, timeout=WAIT_S).text
        nodes = json.loads(answer)["usage"]["headwater"]["router"]["nodes"]
        assert nodes == {"prefill": "prefill-0", "decode": "decode-0"}
        fleet.send_signal(signal.SIGTERM)
        assert fleet.wait(WAIT_S) == 0
        assert "Traceback" not in log.read_text()
        assert all(gone(int(pid)) for _, pid, *_ in found)
        assert not any(Path(path).exists() for path in (pool, *(one[3] for one in found)))
    finally:
        fleet.kill()
        fleet.communicate()


def test_who_dies_is_named_and_the_rest_goes_on_while_it_can(tmp_path: Path) -> None:
    told: list[str] = []
    with Fleet(options(decode=2), directory=tmp_path) as fleet:
        assert fleet.healthy()
        first, second = fleet.of(Role.DECODE)
        pids = [child.pid for child in fleet.children.values()]

        def hear(text: str) -> None:
            told.append(text)
            second.signal(signal.SIGTERM)

        first.signal(signal.SIGKILL)
        with pytest.raises(HeadwaterError, match="too few"):
            fleet.watch(hear)
        assert "decode-0 was ended by SIGKILL" in told[0]
        assert "decode-1 was ended by SIGTERM" in told[1]
        pool = Path(fleet.pool.removeprefix("local:"))
        assert pool.is_dir()
        again = fleet.add(Role.DECODE, "decode-0")
        fleet.drop("decode-1")
        fleet.wait(time.monotonic() + WAIT_S)
        assert again.url != first.url or again.pid != first.pid
    assert all(gone(pid) for pid in (*pids, again.pid))
    assert not pool.exists()
    assert (tmp_path / "decode-0.log").is_file()  # a directory that was given stays


def test_a_fleet_that_cannot_start_says_who_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for dead in ("router", "decode-0"):
        monkeypatch.setenv("DEAD", dead)
        with pytest.raises(HeadwaterError, match=rf"(?s){dead} ended with exit code 1.*{dead} has no pool"):
            Fleet(options(), directory=tmp_path).__enter__()
    for numbers in ({"decode": 0}, {"prefill": 0}, {"prefill": -1}):
        with pytest.raises(InvalidConfig, match="node"):
            options(**numbers)
    options(prefill=0, decode=0, mixed=1)


def test_children_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    script = f"""
import sys, time
from pathlib import Path
from headwater.fleet import Fleet, FleetOptions
options = FleetOptions(command=(sys.executable, "-c", {FAKE!r}), pool="local:/nowhere")
with Fleet(options, directory=Path({str(tmp_path)!r})) as fleet:
    print(*(child.pid for child in fleet.children.values()), flush=True)
    time.sleep({WAIT_S})
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 3
    finally:
        parent.kill()
        parent.communicate()
    until(lambda: all(map(gone, pids)))


# --- what a fleet leaves behind ---------------------------------------------------------------------------------------

HOLD = f"""
import sys, time
from headwater.fleet import Fleet, FleetOptions
options = FleetOptions(command=(sys.executable, "-c", {FAKE!r}), pool_bytes=8 << 20)
with Fleet(options) as fleet:
    print(fleet.pool, *(child.pid for child in fleet.children.values()), flush=True)
    time.sleep({WAIT_S})
"""


@contextmanager
def held(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[str]", Path, list[int]]]:
    """A fleet in another process: that, its pool, and its children's numbers."""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert parent.stdout is not None
        pool, *pids = parent.stdout.readline().split()
        yield parent, Path(pool.removeprefix("local:")), [int(pid) for pid in pids]
    finally:
        parent.kill()
        parent.communicate()


def words(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


@pytest.mark.fault("B11")
def test_a_fleet_that_was_killed_leaves_no_pool(tmp_path: Path) -> None:
    """kill -9 of whoever holds it: children end, then what they used is removed, and nothing else is."""
    beside = tmp_path / "headwater-pd-of-somebody-else"
    beside.mkdir()
    with held(tmp_path) as (parent, pool, pids):
        assert (pool / "slab").is_file()
        (tmp_path / "headwater-pd-link").symlink_to(beside)
        parent.kill()
        parent.wait()
        until(lambda: not pool.parent.exists())
        until(lambda: all(map(gone, pids)))
    assert beside.is_dir()
    assert not list(tmp_path.rglob("node.key"))
    assert list(tmp_path.rglob("router.log"))  # somebody will want to know


@pytest.mark.fault("B11")
def test_a_pool_stays_while_anybody_uses_it(tmp_path: Path) -> None:
    """A child that does not end with its parent: nothing is taken from under it."""
    with held(tmp_path) as (parent, pool, pids):
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            parent.kill()
            parent.wait()
            assert not any(map(gone, pids))
            assert (pool / "slab").is_file()
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        until(lambda: not pool.parent.exists())


def test_who_cleans_up_removes_what_it_was_told_and_nothing_else(tmp_path: Path) -> None:
    for name in ("ours", "replaced", "linked", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    lines = [fleet_guardian.describe(tmp_path / name) for name in ("ours", "replaced", "linked")]
    (tmp_path / "replaced").rename(tmp_path / "old")
    (tmp_path / "replaced").mkdir()
    shutil.rmtree(tmp_path / "linked")
    (tmp_path / "linked").symlink_to(tmp_path / "elsewhere")
    for line in (*lines, *lines):
        fleet_guardian.remove(line)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "linked", "old", "replaced"]
    assert (tmp_path / "elsewhere" / "file").is_file()


@pytest.mark.fault("B11")
def test_the_logs_of_a_fleet_that_failed_can_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The one that the failure names is there; those of a fleet that ended well are not."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("DEAD", "decode-0")
    with pytest.raises(HeadwaterError) as raised:
        Fleet(options()).__enter__()
    named = re.search(r"its log is (\S+)", str(raised.value))
    assert named is not None
    assert "decode-0 has no pool" in Path(named[1]).read_text()
    monkeypatch.delenv("DEAD")
    fleet = Fleet(options())
    with pytest.raises(HeadwaterError, match="too few"), fleet:
        _lose_decode(fleet)
    assert (fleet.directory / "decode-0.log").is_file()
    with Fleet(options()) as fleet:
        assert (fleet.directory / "decode-0.log").is_file()
    assert not fleet.directory.exists()


def test_a_fleet_has_a_key_of_its_own_that_nobody_sees(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    keys = set()
    for _ in range(2):
        with Fleet(options()) as fleet:
            keys.add(fleet.node_key)
            files = {said[said.index("--node-key-file") + 1] for said in map(words, _pids(fleet))}
            (file,) = map(Path, files)  # the same for all
            assert file.stat().st_mode & 0o077 == 0
            assert file.parent.stat().st_mode & 0o077 == 0
            assert not any(fleet.node_key.text in one for pid in _pids(fleet) for one in words(pid))
        assert not file.exists()
    assert len(keys) == 2


def _lose_decode(fleet: Fleet) -> None:
    fleet.of(Role.DECODE)[0].signal(signal.SIGKILL)
    fleet.watch(lambda said: None)


def _pids(fleet: Fleet) -> list[int]:
    return [child.pid for child in fleet.children.values()]
