"""A pool, a router and nodes, as processes of this machine that are started together and end together: `headwater pd`.

The programs are the commands that users run. They know each other by a key that is made for them, and is passed in a
file that only this user can read. Each writes its log to a file; who dies is named, with the last words of its log.
Children are ended by their handles, nodes before the router; should this process be killed, the kernel ends them. The
pool, unless one is named, is a store in memory that needs no server. It is removed at the end, with the key; should
this process be killed, by one that waits for nothing else (`fleet_guardian.py`). The logs go too, unless the fleet
failed or was killed: somebody will want to read them.

Not here: what routers and nodes do, restarting who died.
"""

import ctypes
import http.client
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import urlsplit

from headwater import fleet_guardian
from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import HeadwaterError, InvalidConfig
from headwater.core.node_key import NodeKey
from headwater.core.role import Role
from headwater.disagg.key_file import read_node_key, write_node_key
from headwater.storage.scratch import memory_root

# The commands, and not their functions: what runs is what users run. -P: nothing from where we happen to stand.
COMMAND: Final = (sys.executable, "-P", "-c", "from headwater.cli import app; app()")

_START_S: Final = 600.0  # for a node to load its model
_STOP_S: Final = 20.0  # for a process to end; then it is killed
_LOOK_S: Final = 0.1
_LAST_LINES: Final = 8  # of a log, that are shown
_PR_SET_PDEATHSIG: Final = 1

_PREFIX: Final = "headwater-pd-"

_libc: Final = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """What to start."""

    prefill: int = 1
    decode: int = 1
    mixed: int = 0
    pool: str | None = None  # None: a store in memory, of
    pool_bytes: int = 256 << 20
    host: str = "127.0.0.1"
    port: int | None = None  # of the router; None: the usual one, or a free one
    router: Sequence[str] = ()  # more options of `headwater router`
    node: Sequence[str] = ()  # more options of every `headwater serve`
    command: Sequence[str] = field(default=COMMAND)

    def __post_init__(self) -> None:
        """Refuse what cannot answer a request."""
        if min(self.prefill, self.decode, self.mixed) < 0:
            raise InvalidConfig("a number of nodes is not negative")
        if not self.mixed and not (self.prefill and self.decode):
            raise InvalidConfig("at least one prefill and one decode node are needed, or a mixed one")


class Child:
    """A process of the fleet."""

    def __init__(
        self, name: str, role: Role | None, command: Sequence[str], log: Path, *, holds: int | None = None
    ) -> None:
        """Start it. `role` None: the router. `holds` is a descriptor that it keeps open while it lives."""
        self.name = name
        self.role = role
        self.log = log
        self.url = ""  # known when it answers
        with log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603  our own command
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,  # a Ctrl-C is ours to pass on, in order
                pass_fds=() if holds is None else (holds,),
                preexec_fn=_end_with_parent,
            )

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def why(self) -> str:
        """How it ended, and its last words."""
        code = self._process.poll()
        how = "runs" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        said = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_LAST_LINES:]
        return "\n  ".join([f"{self.name} {how}; its log is {self.log}", *said])

    def wait_for_url(self, until_s: float) -> None:
        """Until it says where it is. Blocks. Raises HeadwaterError if it does not."""
        pipe = self._process.stdout
        readable = pipe is not None and select.select([pipe], [], [], max(0.0, until_s - time.monotonic()))[0]
        line = pipe.readline() if pipe is not None and readable else ""
        found = re.search(r"(http://\S+?)(/v1)?$", line.strip())
        if found is None:
            self._settle()
            raise HeadwaterError(f"the fleet did not start: {self.why()}")
        self.url = found[1]

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        if self.running:
            self._process.send_signal(number)

    def end(self, until_s: float) -> None:
        """Until it has ended; kills it when the time is over. Blocks."""
        try:
            self._process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _settle(self) -> None:
        """One that said nothing is about to end, mostly: give it a moment to say how."""
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return


class Fleet:
    """A router and its nodes, ready when the block is entered; all of them gone at its end."""

    def __init__(self, options: FleetOptions, *, directory: Path | None = None) -> None:
        """Logs go to `directory`, which stays; without one, to a temporary place that stays if the fleet fails."""
        self._options = options
        self._stack = ExitStack()
        self._given = directory
        self._made = False  # the directory is ours to remove
        self._guardian = -1  # where it hears of directories, and that we are gone
        self._key_file = Path()
        self.children: dict[str, Child] = {}
        self.url = ""  # of the router
        self.pool = ""
        self.directory = Path()

    def __enter__(self) -> Self:
        """Start all, and wait until a request could be answered. Blocks. Raises HeadwaterError that says why not."""
        try:
            self._start()
        except BaseException as error:
            self.close(failed=isinstance(error, HeadwaterError))
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        """End all."""
        self.close(failed=isinstance(exc, HeadwaterError))

    @property
    def node_key(self) -> NodeKey:
        """What its router and nodes know each other by."""
        return read_node_key(self._key_file)

    @property
    def router(self) -> Child:
        """The router."""
        return self.children["router"]

    def of(self, role: Role) -> list[Child]:
        """The nodes of a role, also those that have ended."""
        return [child for child in self.children.values() if child.role is role]

    def add(self, role: Role, name: str | None = None) -> Child:
        """Start one more node, or one of this name again. It is not waited for."""
        name = name or f"{role}-{len(self.of(role))}"
        old = self.children.get(name)
        if old is not None:
            old.end(0.0)
        arguments = ["serve", "--role", role, "--node", name, "--router", self.url, "--host", self._options.host]
        tiers = ["--host-mib", "0", "--disk-mib", "0", "--pool", self.pool]
        return self._spawn(name, role, [*arguments, "--port", "0", *tiers, *self._options.node])

    def drop(self, name: str) -> None:
        """Forget a child; one that still runs is killed."""
        self.children.pop(name).end(0.0)

    def wait(self, until_s: float) -> None:
        """Until all nodes have said where they are, and the router could answer. Blocks. Raises HeadwaterError."""
        for child in self.children.values():
            if not child.url:  # one that has ended by now, too: it says why
                child.wait_for_url(until_s)
        while not self.healthy():
            for child in self.children.values():
                if not child.running:
                    raise HeadwaterError(f"the fleet did not start: {child.why()}")
            if time.monotonic() >= until_s:
                raise HeadwaterError("the fleet did not start: its router knows of too few nodes")
            time.sleep(_LOOK_S)

    def healthy(self) -> bool:
        """Whether the router could answer a request."""
        return _status(f"{self.url}/health") == 200

    def watch(self, say: Callable[[str], None]) -> None:
        """Until no request could be answered any more: then raises HeadwaterError. Blocks. Says who died, and why."""
        told: set[int] = set()
        while True:
            for child in self.children.values():
                if not child.running and child.pid not in told:
                    told.add(child.pid)
                    say(child.why())
            alive = {child.role for child in self.children.values() if child.running}
            if None not in alive or not (Role.MIXED in alive or {Role.PREFILL, Role.DECODE} <= alive):
                raise HeadwaterError("too few of the fleet are left to answer a request")
            time.sleep(_LOOK_S)

    def close(self, *, failed: bool = False) -> None:
        """End all, nodes first. Blocks, for some seconds. Idempotent. Of what failed, the logs stay."""
        nodes = [child for child in self.children.values() if child.role is not None]
        rest = [child for child in self.children.values() if child.role is None]
        for group in (nodes, rest):
            for child in group:
                child.signal(signal.SIGTERM)
            until_s = time.monotonic() + _STOP_S
            for child in group:
                child.end(until_s)
        if self._made and not failed:
            shutil.rmtree(self.directory, ignore_errors=True)
        self._made = False
        self._stack.close()

    def _start(self) -> None:
        options = self._options
        until_s = time.monotonic() + _START_S
        self.directory = self._given or Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._made = self._given is None
        self._guardian = self._start_guardian()
        self._key_file = self._temporary(Path(tempfile.gettempdir())) / "node.key"
        write_node_key(self._key_file, NodeKey.random())
        self.pool = options.pool or self._make_pool()
        port = [] if options.port is None else ["--port", str(options.port)]
        router = self._spawn("router", None, ["router", "--host", options.host, *port, *options.router])
        router.wait_for_url(until_s)
        self.url = router.url
        for role, number in (
            (Role.PREFILL, options.prefill),
            (Role.DECODE, options.decode),
            (Role.MIXED, options.mixed),
        ):
            for _ in range(number):
                self.add(role)
        self.wait(until_s)

    def _spawn(self, name: str, role: Role | None, arguments: Sequence[str]) -> Child:
        command = [*self._options.command, *arguments, "--node-key-file", str(self._key_file)]
        child = Child(name, role, command, self.directory / f"{name}.log", holds=self._guardian)
        self.children[name] = child
        return child

    def _start_guardian(self) -> int:
        """Start who cleans up after us, whatever happens to us; what to write to. Every child holds that open too."""
        read, write = os.pipe()
        try:
            guardian = subprocess.Popen(  # noqa: S603  our own program
                [sys.executable, "-I", "-S", fleet_guardian.__file__],
                stdin=read,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:
            os.close(write)
            raise
        finally:
            os.close(read)
        self._stack.callback(_end, guardian)
        self._stack.callback(os.close, write)
        return write

    def _make_pool(self) -> str:
        limit_bytes = self._options.pool_bytes
        path = self._temporary(memory_root(limit_bytes)) / "pool"
        self._stack.enter_context(open_local(LocalStoreConfig(directory=path, limit_bytes=limit_bytes)))
        return f"local:{path}"

    def _temporary(self, root: Path) -> Path:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        os.write(self._guardian, fleet_guardian.describe(path).encode())
        self._stack.callback(shutil.rmtree, path, ignore_errors=True)
        return path


def _end_with_parent() -> None:
    """In the child: the kernel ends it when its parent is gone, however that ended."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _end(guardian: subprocess.Popen[bytes]) -> None:
    """Until it has seen that there is nothing to do."""
    try:
        guardian.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        guardian.kill()
        guardian.wait()


def _status(url: str) -> int:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=2.0)
    try:
        connection.request("GET", parts.path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()
