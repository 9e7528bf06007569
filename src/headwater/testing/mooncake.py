"""Real Mooncake servers on free ports of loopback, for tests: started, killed, stopped and started again.

    with MooncakePool(segment_bytes=64 << 20) as pool:
        store = MooncakeStore(pool.config())          # a client of its own, over TCP
        shared = MooncakeStore(pool.config(shm=True))  # through the client process, by shared memory

Needs the engine (`headwater[mooncake]`) and Debian's libibverbs1. Leases are short, so that the master may evict what
was just read; clients that are silent are soon taken for dead.
"""

import signal
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headwater.pool.local import summary
from headwater.pool.process import Process, spawn
from headwater.pool.servers import LOOPBACK, QUIET, client_command, free_port, master_command
from headwater.storage.base import Deadline
from headwater.storage.mooncake.config import MooncakeConfig
from headwater.storage.mooncake.watch import knock


class MooncakePool:
    """A master, and with `segment_bytes` a client process that owns memory."""

    def __init__(
        self, *, segment_bytes: int = 0, lease_ms: int = 200, client_ttl_s: int = 2, evict_above: float = 0.95
    ) -> None:
        """Starts nothing yet. `evict_above`: the part of all memory that the master lets be used."""
        self.segment_bytes = segment_bytes
        self._choose_ports()
        self._options: dict[str, Any] = {
            "lease_ms": lease_ms,
            "client_ttl_s": client_ttl_s,
            "evict_above": evict_above,
        }
        self._directory = tempfile.TemporaryDirectory(prefix="headwater-mooncake-")
        self._master: Process | None = None
        self._client: Process | None = None

    def config(self, *, shm: bool = False, **options: Any) -> MooncakeConfig:
        """How to join the pool."""
        where = f"{LOOPBACK}:{self.client_port}" if shm else None
        return MooncakeConfig(master=f"{LOOPBACK}:{self.port}", shm=where, **options)

    def start_master(self) -> None:
        """Start the master, with an empty memory, and wait until it answers."""
        command = master_command(port=self.port, metrics_port=self.metrics_port, **self._options)
        self._master = self._start("master", command, self.port)

    def start_client(self) -> None:
        """Start the client process, and wait until the master may use its memory."""
        command = client_command(port=self.client_port, master_port=self.port, segment_bytes=self.segment_bytes)
        self._client = self._start("client", command, self.client_port)
        self.wait_for_bytes(self.segment_bytes)

    def wait_for_bytes(self, num_bytes: int) -> None:
        """Until the master knows so much memory, no more and no less. Raises TimeoutError."""
        wait = Deadline.after(20)
        while (found := summary(self.metrics_port)) is None or found["capacity_bytes"] != num_bytes:
            if wait.expired:
                raise TimeoutError(f"the pool does not have {num_bytes} bytes, but {found}")
            time.sleep(0.02)

    def kill_master(self) -> None:
        """End the master at once."""
        _kill(self._master)
        self._master = None

    def kill_client(self) -> None:
        """End the client process at once, with all that its memory holds."""
        _kill(self._client)
        self._client = None

    def signal_master(self, number: signal.Signals) -> None:
        """Stop the master, or let it go on."""
        _signal(self._master, number)

    def signal_client(self, number: signal.Signals) -> None:
        """Stop the client process, or let it go on."""
        _signal(self._client, number)

    def close(self) -> None:
        """End both. Idempotent."""
        self.kill_client()
        self.kill_master()
        self._directory.cleanup()

    def _choose_ports(self) -> None:
        self.port, self.metrics_port, self.client_port = free_port(), free_port(), free_port()

    def _start(self, name: str, command: list[str], port: int) -> Process:
        output = Path(self._directory.name) / f"{name}.log"
        process = spawn(command, settings=QUIET, output=output)
        wait = Deadline.after(20)
        while (trouble := knock(LOOPBACK, port, 0.5)) is not None or not process.alive:
            if wait.expired or not process.alive:
                raise TimeoutError(f"the Mooncake {name} does not come up: {trouble}; {output.read_text()[-500:]}")
            time.sleep(0.01)
        return process

    def __enter__(self) -> Self:
        """Start what was asked for; with other ports if somebody took one of them meanwhile."""
        for left in (2, 1, 0):
            try:
                self.start_master()
                if self.segment_bytes:
                    self.start_client()
            except BaseException as error:
                self.kill_client()
                self.kill_master()
                if not left or not isinstance(error, TimeoutError):
                    self.close()
                    raise
                self._choose_ports()
            else:
                break
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        """End both."""
        self.close()


def _signal(process: Process | None, number: signal.Signals) -> None:
    if process is None or not process.send(number):
        raise RuntimeError("it does not run")
    while number is signal.SIGSTOP and not process.stopped:  # a busy machine takes its time
        time.sleep(0.001)


def _kill(process: Process | None) -> None:
    if process is not None:
        process.send(signal.SIGKILL)
        process.wait(Deadline.after(10))
