"""`headwater pd`: everything from one command, who died is said, nothing is left behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest

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
