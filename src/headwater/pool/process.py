"""Processes that outlive the command that started them, known by number *and* start time.

A process number alone proves nothing: it is given to somebody else later. With the start time it names one process of
this boot, and signals go through a pidfd that was checked while it was held, so that a stranger is never hit.
"""

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headwater.storage.base import Deadline

_POLL_S: Final = 0.02
_PROC: Final = Path("/proc")
_LISTENING: Final = "0A"


@dataclass(frozen=True, slots=True)
class Process:
    """One process of this machine, since its last start."""

    pid: int
    started: int  # clock ticks since boot

    @property
    def alive(self) -> bool:
        """Whether it still runs. One that ended and was not waited for does not."""
        return _started(self.pid) == self.started

    def send(self, number: signal.Signals) -> bool:
        """Send a signal, to this process and no other. False if it is gone."""
        try:
            handle = os.pidfd_open(self.pid)
        except OSError:
            return False
        try:
            if not self.alive:
                return False
            signal.pidfd_send_signal(handle, number)
            return True
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)

    @property
    def stopped(self) -> bool:
        """Whether it was stopped (SIGSTOP) and has not been let go on."""
        fields = _stat(self.pid)
        return fields is not None and fields[0] == "T"

    def wait(self, deadline: Deadline) -> bool:
        """Until it is gone; False if it still runs at the deadline. Blocks."""
        while self.alive:
            with contextlib.suppress(ChildProcessError):  # it is ours only in the process that started it
                os.waitpid(self.pid, os.WNOHANG)
            if deadline.expired:
                return not self.alive
            time.sleep(_POLL_S)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        return True

    def stop(self, *, patience_s: float) -> bool:
        """Ask it to end, and end it when `patience_s` are over. Blocks. False if even that did not help."""
        if self.send(signal.SIGTERM) and not self.wait(Deadline.after(patience_s)):
            self.send(signal.SIGKILL)
        return self.wait(Deadline.after(5.0))

    def listens_on(self) -> list[str]:
        """Addresses on which it takes TCP connections; none where that cannot be seen."""
        sockets = set()
        with contextlib.suppress(OSError):
            for entry in (_PROC / str(self.pid) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(entry))
        found = []
        for table in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):
                for line in (_PROC / "net" / table).read_text(encoding="ascii").splitlines()[1:]:
                    fields = line.split()
                    if fields[3] == _LISTENING and f"socket:[{fields[9]}]" in sockets:
                        found.append(_address(fields[1]))
        return sorted(found)


def spawn(command: Sequence[str], *, settings: Mapping[str, str], output: Path) -> Process:
    """Start a program in a session of its own, with our environment and `settings`, printing to `output`.

    It has no other file of ours. Raises OSError.
    """
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, log, 1),
            (os.POSIX_SPAWN_DUP2, log, 2),
        ]
        pid = os.posix_spawn(command[0], list(command), {**os.environ, **settings}, file_actions=actions, setsid=True)
    finally:
        os.close(log)
    return Process(pid, _started(pid) or 0)


def _stat(pid: int) -> list[str] | None:
    """What the kernel says of a process, from its state on."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()  # the name before it may hold anything


def _started(pid: int) -> int | None:
    """When the process with this number was started; None if there is none, or it has ended."""
    fields = _stat(pid)
    # A process whose first thread is gone has not ended while there are others.
    if fields is None or (fields[0] in ("Z", "X") and int(fields[17]) <= 1):
        return None
    return int(fields[19])


def _address(text: str) -> str:
    """`0100007F:C350` of the kernel's tables as `127.0.0.1:50000`."""
    host, port = text.split(":")
    words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
    if len(words) == 1:
        name = ".".join(str(byte) for byte in words[0])
    else:
        name = "*" if not any(map(any, words)) else "[" + b"".join(words).hex(":", 2) + "]"
    return f"{name}:{int(port, 16)}"
