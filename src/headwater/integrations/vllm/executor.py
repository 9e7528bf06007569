"""The executor: a process beside a worker of vLLM, which moves its blocks. vLLM's interpreter has no part in it.

    worker of vLLM: `worker.py`                       executor: `executor_main.py`
    one message per job (`transfer/ranks/link.py`) -> the jobs (`transfer/executor/`), the stores, pinned memory, and
                              <- what became of it    vLLM's KV tensors, mapped (`registered.py`)

A process of its own has its own interpreter: looking up, verifying and publishing blocks costs tens of microseconds
each, in which vLLM could not launch. What a job reads was computed before it is begun, and what it wrote has arrived
when it ends, so no event of the device has to be shared.

It is begun as early as vLLM lets us, loads torch and opens the stores while vLLM looks how much memory it has, maps the
KV when there is one, and is waited for at vLLM's handshake. It touches the device only then: what vLLM measures is its
own. If it dies, or is killed because it does not answer, its
jobs end as failed, all tiers are off, and the engine computes everything; one line says so. Where it cannot be had,
threads of the worker do the same (`build.open_worker`).
"""

import contextlib
import fcntl
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, BinaryIO, Final

from headwater.core.errors import RankUnavailable
from headwater.core.events import StoreOff
from headwater.integrations.vllm.settings import ConnectorConfig, ExecutorKind
from headwater.integrations.vllm.worker import WorkerSide
from headwater.layout.shard import Shard
from headwater.metrics import Metrics
from headwater.storage.base import SYSTEM_CLOCK
from headwater.transfer.ranks.group import Ranks
from headwater.transfer.ranks.link import RankLink, connect_link
from headwater.transfer.ranks.members import Member

log: Final = logging.getLogger("headwater")

READY_S: Final = 120.0  # for an executor to be ready, from when vLLM waits for it
_LOST_AFTER_S: Final = 5.0  # a job that was cancelled is not answered: it is killed
_DRAIN_S: Final = 5.0  # at the end, for blocks on their way to the stores
_LAST_S: Final = 2.0
_EXIT_S: Final = 5.0  # for the process to end, when its work is done
_BEGIN: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from headwater.integrations.vllm.executor_main import main; main(int(sys.argv[1]))"
)


class ExecutorProcess:
    """An executor that works, as a worker of vLLM sees it."""

    def __init__(
        self, link: RankLink, process: "subprocess.Popen[bytes]", *, stores: Sequence[str], overlapping: int
    ) -> None:
        """`overlapping`: see `WorkerSide`."""
        self._stores = stores
        self.metrics = Metrics()  # what is counted over there, too
        self.process = process
        self._closing = False
        link.on_counted = self.metrics.take_in
        (far,) = link.executors
        alone = Member(0, Shard(0, 1), 0, far)  # a group of this worker
        self.executor = Ranks([alone], stores=stores, metrics=self.metrics, lost_after_s=_LOST_AFTER_S)
        self.side = WorkerSide(self.executor, rank=link.rank, overlapping=overlapping, kill=self.kill)
        self._tell_group = far.on_death
        far.on_death = self._died
        if far.death is not None:  # before it could be told
            self._died(far.death)

    def close(self, timeout_s: float = _DRAIN_S) -> None:
        """Let saves arrive, then end everything. Blocks, `timeout_s` and a little more at most; idempotent."""
        self.executor.drain(timeout_s)
        self._closing = True
        self.executor.close(_DRAIN_S)
        _end(self.process)
        self.executor.close(_LAST_S)  # if it had to be killed: now the link can end, too

    def kill(self) -> bool:
        """End the process, whatever it does. True: it reads and writes nothing any more. Blocks, for seconds at most.

        False: it is in the hands of a driver, or of a disk, that does not answer.
        """
        return _end(self.process, at_once=True)

    def _died(self, why: str) -> None:
        """Its jobs end, and then all tiers are off: the brain asks for nothing that nobody could do."""
        if self._tell_group is not None:
            self._tell_group(why)
        if not self._closing:
            log.error("Headwater's executor is gone (%s): nothing is loaded or saved until vLLM is started again", why)
        for store in self._stores:
            self.side.heard(StoreOff(now_s=SYSTEM_CLOCK.monotonic(), store=store, why=f"the executor: {why}"))


class Starting:
    """An executor that gets ready."""

    def __init__(self, config: ConnectorConfig, *, on_gpu: bool = False) -> None:
        """Begin one. Does not block. Raises OSError, ValueError. `on_gpu`: vLLM's KV is, or will be."""
        self.config: Final = config
        self.parent: Final = os.getpid()
        self._identity = b""
        self._page = (0, 1, 0)
        places = {"host": config.host_directory, "disk": config.disk_directory, "pool": config.pool}
        self._stores = [name for name, place in places.items() if place is not None]
        order = {
            "config": {name: _plain(value) for name, value in asdict(config).items()},
            "begun_s": SYSTEM_CLOCK.monotonic(),
            "parent": self.parent,
            "on_gpu": on_gpu,
        }
        self._sock, theirs = socket.socketpair()
        with theirs, _document(order) as stdin:
            number = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 3)  # what is below is the child's own
            path = json.dumps([str(place) for place in sys.path])
            try:
                self.process = subprocess.Popen(  # noqa: S603  this interpreter, and what it has on its path
                    [sys.executable, "-P", "-c", _BEGIN, str(number), path],
                    stdin=stdin,
                    stdout=subprocess.DEVNULL,  # who prints there may be a program that others read
                    pass_fds=[number],
                )
            except BaseException:
                self._sock.close()
                raise
            finally:
                os.close(number)

    def show(self, planes: Mapping[str, Any], *, identity: bytes, rank: int, world: int) -> None:
        """Tell it whose KV it moves. `planes`: what `say_planes` said. Once. Does not block. Raises OSError.

        If it is gone already, `wait` says so.
        """
        self._identity = identity
        self._page = (rank, world, 0)
        order = {"planes": planes, "identity": identity.hex(), "rank": rank, "world": world}
        # A file, of any size: a socket would take a part, and wait.
        with _document(order) as document, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._sock, [b"."], [document.fileno()])

    def wait(self, *, overlapping: int = 1, timeout_s: float = READY_S) -> ExecutorProcess:
        """Wait until it is ready. Blocks. Raises RankUnavailable, with nothing left behind, if that did not happen.

        `overlapping`: see `WorkerSide`.
        """
        try:
            link = connect_link(
                self._sock,
                rank=self._page[0],
                pid=self.process.pid,
                pages=[self._page],
                identity=self._identity,
                timeout_s=timeout_s,
                may_kill=True,
            )
        except RankUnavailable as error:
            self._sock.close()
            _end(self.process)
            raise RankUnavailable(f"no executor: {error}; what it said itself is in the log") from error
        return ExecutorProcess(link, self.process, stores=self._stores, overlapping=overlapping)

    def give_up(self) -> None:
        """End it before it was waited for; idempotent."""
        self._sock.close()
        _end(self.process, at_once=True)


_ahead: list[Starting] = []  # one at most, that nobody has shown any KV yet


def begin_ahead(config: ConnectorConfig) -> None:
    """Begin an executor before there is any KV on a GPU, for who will ask for one with these options.

    Blocks only to end another one that nobody took. For this process: one of a parent is not its child's. If none can
    be begun, who asks for it will say so.
    """
    give_up_ahead()
    if config.executor is not ExecutorKind.THREADS:
        with contextlib.suppress(OSError, ValueError):
            _ahead.append(Starting(config, on_gpu=True))


def take_begun(config: ConnectorConfig, *, on_gpu: bool) -> Starting:
    """The executor that was begun ahead with these options, or one that begins now. Raises OSError, ValueError."""
    if _ahead and _ahead[0].config == config and _ahead[0].parent == os.getpid() and _ahead[0].process.poll() is None:
        return _ahead.pop()
    give_up_ahead()
    return Starting(config, on_gpu=on_gpu)


def give_up_ahead() -> None:
    """End one that was begun ahead, if nobody took it. Blocks until it is gone; idempotent."""
    while _ahead:
        one = _ahead.pop()
        if one.parent == os.getpid():
            one.give_up()


def _document(order: Mapping[str, Any]) -> BinaryIO:
    """A file in memory for another process, at its beginning."""
    file = os.fdopen(os.memfd_create("headwater"), "w+b")
    file.write(json.dumps(order).encode())
    file.seek(0)
    return file


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, int | float) else str(value)


def _end(process: "subprocess.Popen[bytes]", *, at_once: bool = False) -> bool:
    """Wait for a process to end; one that does not is killed. Blocks. False: it lives on."""
    for kills in (True,) if at_once else (False, True):
        if kills:
            process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_S)
            return True
    log.error("Headwater's executor, process %d, cannot be killed", process.pid)
    return False
