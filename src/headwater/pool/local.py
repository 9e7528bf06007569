"""`headwater pool up | down | status`: a master and a client process for this machine, in the background.

One directory (`pool.json`, the programs' output, a lock) is one pool. The state says which processes they are, by
number and start time, so that `down` ends exactly those. What is up is asked of the processes and of the master, never
of the file alone. Nothing here is needed to *use* a pool: the URL is.
"""

import fcntl
import http.client
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from headwater.core.errors import InvalidConfig, StoreBusy, StoreUnavailable
from headwater.pool.process import Process, spawn
from headwater.pool.servers import LOOPBACK, QUIET, client_command, free_port, master_command
from headwater.storage.base import Deadline
from headwater.storage.local.directory import available_memory, boot_id
from headwater.storage.mooncake.config import MIN_SEGMENT_BYTES, SCHEME
from headwater.storage.mooncake.watch import knock

DEFAULT_BYTES: Final = 2 << 30
_STATE: Final = "pool.json"
_VERSION: Final = 1
_NAMES: Final = ("client", "master")  # in the order in which they are ended
_STARTS: Final = 3  # a port that was free may be gone a moment later
_READY_S: Final = 20.0
_KNOCK_S: Final = 0.5
_METRICS: Final = {
    "used_bytes": "master_allocated_bytes",
    "capacity_bytes": "master_total_capacity_bytes",
    "num_objects": "master_key_count",
    "num_clients": "master_active_clients",
}


@dataclass(frozen=True, slots=True)
class PoolProgram:
    """One of the two programs."""

    name: str
    pid: int
    running: bool
    listens_on: list[str]

    @property
    def open_to_others(self) -> list[str]:
        """Addresses that are not loopback: who reaches the machine reaches them."""
        return [
            one for one in self.listens_on if not one.startswith(("127.", "[0000:0000:0000:0000:0000:0000:0000:0001]"))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """What there is of the pool in one directory."""

    directory: str
    up: bool  # both run, and the master answers
    url: str | None = None  # for processes of this machine; None where there is no pool
    why: str = ""  # not up
    servers: tuple[PoolProgram, ...] = ()
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    num_objects: int | None = None
    num_clients: int | None = None
    started: bool = False  # by this call

    def document(self) -> dict[str, Any]:
        """Plain JSON values."""
        servers = [asdict(server) | {"open_to_others": server.open_to_others} for server in self.servers]
        return asdict(self) | {"servers": servers}


def up(directory: Path, *, segment_bytes: int = DEFAULT_BYTES) -> PoolStatus:
    """Start what is not running, and wait until it answers. Blocks, a second or so. Idempotent.

    Raises InvalidConfig for a size that cannot be, StoreUnavailable with the reason where it does not come up.
    """
    if not MIN_SEGMENT_BYTES <= segment_bytes < 1 << 50:
        raise InvalidConfig(f"a pool has at least {MIN_SEGMENT_BYTES >> 20} MiB, not {segment_bytes} bytes")
    with _only_one(directory):
        found = _status(directory)
        if found.up:
            return found
        if segment_bytes > available_memory():
            raise StoreUnavailable(
                f"{segment_bytes >> 20} MiB are more than this machine has free: take a smaller --size"
            )
        _end(directory, patience_s=5.0)
        until = Deadline.after(_READY_S)
        for _ in range(_STARTS):
            try:
                trouble = _start(directory, segment_bytes, until)
            except BaseException:
                _end(directory, patience_s=2.0)
                raise
            if trouble is None:
                return _status(directory, started=True)
            _end(directory, patience_s=2.0)
            if until.expired:
                break
        raise StoreUnavailable(f"the pool does not come up: {trouble}")


def down(directory: Path, *, patience_s: float = 10.0) -> int:
    """End the processes of the pool, and no others. Blocks. How many there were. Raises StoreUnavailable."""
    if not directory.is_dir():
        return 0
    with _only_one(directory):
        return _end(directory, patience_s=patience_s)


def status(directory: Path) -> PoolStatus:
    """Look, without changing anything. Blocks, a second at most."""
    return _status(directory)


def summary(metrics_port: int, *, timeout_s: float = 1.0) -> dict[str, int] | None:
    """What a master on loopback counts: bytes, objects, clients. None if it does not say."""
    line = http.client.HTTPConnection(LOOPBACK, metrics_port, timeout=timeout_s)
    try:
        line.request("GET", "/metrics")
        text = line.getresponse().read().decode("utf-8", errors="replace")
    except (OSError, http.client.HTTPException):
        return None
    finally:
        line.close()
    rows = dict(row.rsplit(" ", 1) for row in text.splitlines() if " " in row and not row.startswith("#"))
    try:
        return {ours: int(float(rows[theirs])) for ours, theirs in _METRICS.items()}
    except (KeyError, ValueError):
        return None


# --- the directory ----------------------------------------------------------------------------------------------------


@contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    """One command at a time. Makes the directory, ours alone; raises StoreUnavailable where it cannot be, StoreBusy."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise StoreUnavailable(f"cannot keep a pool in {directory}: {error.strerror}") from error
    try:
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise StoreUnavailable(f"{directory} belongs to somebody else, or others may write to it: use another")
        wait = Deadline.after(2 * _READY_S)
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if wait.expired:
                    raise StoreBusy(f"another command has been at the pool in {directory} for long") from None
                time.sleep(0.05)
        yield
    finally:
        os.close(lock)


def _read(directory: Path) -> dict[str, Any] | None:
    """The state, if there is one that we wrote."""
    try:
        found = json.loads((directory / _STATE).read_text(encoding="utf-8"))
        ours = found["version"] == _VERSION and found["boot"] == boot_id()  # numbers of processes mean nothing later
        whole = ours and all(isinstance(found[name]["pid"], int) for name in _NAMES)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if whole else None


def _write(directory: Path, state: Mapping[str, Any]) -> None:
    temporary = directory / f"{_STATE}.new"
    temporary.write_text(json.dumps(state, indent=2), encoding="utf-8")
    temporary.replace(directory / _STATE)


# --- starting, looking, ending ----------------------------------------------------------------------------------------


def _start(directory: Path, segment_bytes: int, until: Deadline) -> str | None:
    """Start both; None when they answer, else why not. Writes down each process as soon as it is there."""
    ports = {"master": free_port(), "metrics": free_port(), "client": free_port()}
    commands = {
        "master": master_command(port=ports["master"], metrics_port=ports["metrics"]),
        "client": client_command(port=ports["client"], master_port=ports["master"], segment_bytes=segment_bytes),
    }
    nobody = {"pid": 0, "started": 0}
    state: dict[str, Any] = {"version": _VERSION, "boot": boot_id(), "ports": ports, "segment_bytes": segment_bytes}
    state |= dict.fromkeys(_NAMES, nobody)
    for name, command in commands.items():
        output = directory / f"{name}.log"
        output.unlink(missing_ok=True)
        try:
            process = spawn(command, settings=QUIET, output=output)
        except OSError as error:
            return f"{command[0]}: {error.strerror}"
        state[name] = asdict(process)
        _write(directory, state)
        trouble = _wait_for(process, ports[name], output, until)
        if trouble is not None:
            return trouble
    while not (found := summary(ports["metrics"])) or not found["capacity_bytes"]:
        if until.expired:
            return "the client process gives the master no memory"
        time.sleep(0.02)
    return None


def _wait_for(process: Process, port: int, output: Path, until: Deadline) -> str | None:
    while (trouble := knock(LOOPBACK, port, _KNOCK_S)) is not None or not process.alive:
        if not process.alive or until.expired:
            said = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
            return f"{output.stem}: {' / '.join(said) or trouble}"
        time.sleep(0.02)
    return None


def _end(directory: Path, *, patience_s: float) -> int:
    state = _read(directory)
    if state is None:
        return 0
    processes = {name: Process(**state[name]) for name in _NAMES if state[name]["pid"]}
    running = [name for name, process in processes.items() if process.alive]
    stuck = [name for name in running if not processes[name].stop(patience_s=patience_s)]
    if stuck:
        raise StoreUnavailable(f"cannot be ended: {', '.join(f'{name} ({processes[name].pid})' for name in stuck)}")
    (directory / _STATE).unlink(missing_ok=True)
    return len(running)


def _status(directory: Path, *, started: bool = False) -> PoolStatus:
    state = _read(directory)
    if state is None:
        return PoolStatus(directory=str(directory), up=False, why="no pool was started here")
    processes = {name: Process(**state[name]) for name in reversed(_NAMES)}
    servers = tuple(
        PoolProgram(name, one.pid, one.alive, one.listens_on() if one.alive else []) for name, one in processes.items()
    )
    ports = state["ports"]
    url = f"{SCHEME}://{LOOPBACK}:{ports['master']}?shm={LOOPBACK}:{ports['client']}"
    ended = [server.name for server in servers if not server.running]
    why = f"ended: {', '.join(ended)}" if ended else knock(LOOPBACK, ports["master"], _KNOCK_S) or ""
    counted = summary(ports["metrics"]) if not why else None
    if not why and counted is None:
        why = "the master does not say what it holds"
    return PoolStatus(
        directory=str(directory), up=not why, url=url, why=why, servers=servers, started=started, **(counted or {})
    )
