"""A server that speaks Redis' protocol and spoils what it says: answers cut, doubled, lost, nested, huge, of any kind.

It is honest until told otherwise: `spoil` is given the answers of one exchange, each as its bytes, and says what goes
over the line instead, in pieces with pauses before them. It remembers on which connections answers went out of step.
"""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

Command = list[bytes]


@dataclass(frozen=True)
class Said:
    """What goes over the line for one exchange."""

    pieces: Sequence[bytes]
    pause_s: float = 0.0  # before each piece
    hangs_up: bool = False
    silent: bool = False  # afterwards nothing is said any more, and the line stays
    out_of_step: bool = False  # answers and commands do not fit from now on


Spoil = Callable[[Sequence[Command], Sequence[bytes]], Said]


def honest(commands: Sequence[Command], answers: Sequence[bytes]) -> Said:
    return Said([b"".join(answers)])


@dataclass
class _Connection:
    sock: socket.socket
    is_out_of_step: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_busy: bool = False  # something came, and is not yet answered; with the lock
    is_over: bool = False  # nothing that comes is heard any more

    def take(self) -> bytes:
        """What came, as soon as something does."""
        self.sock.recv(1, socket.MSG_PEEK)
        with self.lock:
            self.is_busy = True
            return self.sock.recv(1 << 20)

    def is_quiet(self) -> bool:
        """Whether all that came was answered."""
        with self.lock:
            if self.is_over:
                return True
            try:
                self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return not self.is_busy
            except OSError:
                pass
            return False  # there is more, or its end


class FakeRedis:
    """Keeps values in a dict. `spoil` may be changed at any time."""

    def __init__(self, spoil: Spoil = honest) -> None:
        self.spoil = spoil
        self.values: dict[bytes, bytes] = {}
        self.num_connections = 0
        self.reused: list[Sequence[Command]] = []  # what came on a connection that was out of step
        self._stopped = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()  # of who has come
        self._connections: list[_Connection] = []
        self._threads = [threading.Thread(target=self._accept, name="fake redis")]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}"

    def settle(self) -> None:
        """Wait until all that clients ever said was done, by those too who gave up and hung up.

        Without it a write that was given up may be done behind a later delete, on a busy machine: Redis promises no
        order between two connections.
        """
        until_s = time.monotonic() + 60
        while True:
            with self._lock:
                waiting, _, _ = select.select([self._listener], [], [], 0)
                if not waiting and all(one.is_quiet() for one in self._connections):
                    return
            assert time.monotonic() < until_s, "clients go on talking"
            time.sleep(0.001)

    def recover(self) -> None:
        """Be honest from now on, and hang up where nothing was said any more.

        A client may have had all its answers before its line fell silent: it would use the line again, and wait for its
        whole deadline.
        """
        self.spoil = honest
        self.settle()
        for one in self._connections:
            with one.lock, contextlib.suppress(OSError):
                if one.is_over:
                    one.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._stopped.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._connections:
            with contextlib.suppress(OSError):
                one.sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> "FakeRedis":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._stopped.is_set():
            try:
                select.select([self._listener], [], [])
                with self._lock:
                    one = _Connection(self._listener.accept()[0])
                    self._connections.append(one)
            except (OSError, ValueError):  # closed
                return
            self.num_connections += 1
            thread = threading.Thread(target=self._serve, args=(one,), name="fake redis")
            self._threads.append(thread)
            thread.start()

    def _serve(self, one: _Connection) -> None:
        try:
            self._talk(one)
        finally:
            with one.lock:
                one.is_over = True
                one.sock.close()

    def _talk(self, one: _Connection) -> None:
        with contextlib.suppress(OSError):
            for commands in _exchanges(one):
                if one.is_out_of_step:
                    self.reused.append(commands)
                said = self.spoil(commands, [self._answer(command) for command in commands])
                one.is_out_of_step |= said.out_of_step
                for piece in said.pieces:
                    if said.pause_s and self._stopped.wait(said.pause_s):
                        return
                    one.sock.sendall(piece)
                if said.silent:
                    one.is_over = True
                    self._stopped.wait()
                    return
                if said.hangs_up:
                    return

    def _answer(self, command: Command) -> bytes:
        name, words = command[0].upper(), command[1:]
        if name == b"PING":
            return bulk(words[0]) if words else b"+PONG\r\n"
        if name == b"SET":
            if words[0] in self.values and b"NX" in words:
                return b"$-1\r\n"
            self.values[words[0]] = words[1]
            return b"+OK\r\n"
        if name in (b"GETEX", b"GET"):
            value = self.values.get(words[0])
            return b"$-1\r\n" if value is None else bulk(value)
        if name == b"STRLEN":
            return b":%d\r\n" % len(self.values.get(words[0], b""))
        if name == b"EXISTS":
            return b":%d\r\n" % sum(word in self.values for word in words)
        if name == b"UNLINK":
            return b":%d\r\n" % sum(self.values.pop(word, None) is not None for word in words)
        if name in (b"PEXPIRE", b"PEXPIREAT"):
            return b":%d\r\n" % (words[0] in self.values)
        return b"+OK\r\n"


def bulk(value: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(value), value)


def _exchanges(one: _Connection) -> Iterator[list[Command]]:
    """Commands as they come, those of one exchange together: all that are there when there is no more for a moment."""
    buffer = bytearray()
    commands: list[Command] = []
    while True:
        found = _parsed(buffer)
        if found is not None:
            command, size = found
            del buffer[:size]
            commands.append(command)
            continue
        if commands and not buffer and (commands[-1][0] != b"PING") and _has_more(one.sock):
            pass  # the end of an exchange is a PING, or nothing more
        elif commands and not buffer:
            yield commands
            commands = []
            one.is_busy = False
        data = one.take()
        if not data:
            return
        buffer += data


def _has_more(sock: socket.socket) -> bool:
    sock.settimeout(0.02)
    try:
        return bool(sock.recv(1, socket.MSG_PEEK))
    except TimeoutError:
        return False
    finally:
        sock.settimeout(None)


def _parsed(buffer: bytearray) -> tuple[Command, int] | None:
    """The first command, and how many bytes it takes; None: not all of it is there."""
    end = buffer.find(b"\r\n")
    if end < 0:
        return None
    at, words = end + 2, []
    for _ in range(int(buffer[1:end])):
        end = buffer.find(b"\r\n", at)
        if end < 0:
            return None
        size = int(buffer[at + 1 : end])
        at = end + 2 + size + 2
        if len(buffer) < at:
            return None
        words.append(bytes(buffer[end + 2 : end + 2 + size]))
    return words, at


@dataclass
class SilentHost:
    """An address of this machine that takes no connection and refuses none: its queue is full."""

    listener: socket.socket = field(init=False)
    waiting: list[socket.socket] = field(init=False, default_factory=list)

    def __enter__(self) -> "SilentHost":
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(0)
        until_s = time.monotonic() + 10
        while time.monotonic() < until_s:
            sock = socket.socket()
            sock.settimeout(0.0)
            self.waiting.append(sock)
            sock.connect_ex(self.address)
            probe = socket.socket()
            self.waiting.append(probe)
            probe.settimeout(0.3)
            try:
                probe.connect(self.address)
            except TimeoutError:
                return self
        raise AssertionError("its queue takes everybody")

    def __exit__(self, *_: object) -> None:
        for sock in (*self.waiting, self.listener):
            sock.close()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.listener.getsockname()
        return host, port
