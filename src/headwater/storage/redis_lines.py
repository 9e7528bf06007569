"""Connections to a Redis server that end every exchange by a deadline, and come back after the server did.

The client's own time limits hold for one read of a socket, not for a call: a server that drips would stretch them. So
each socket is told before each read and write how much is left until the deadline (`_Paced`). Only finding a host's
address is the system's business: give an address where its resolver is not to be trusted.
"""

import socket
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from headwater.core.errors import NotInstalled, StoreUnavailable
from headwater.storage.base import Deadline

try:
    from redis.backoff import NoBackoff
    from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection, parse_url
    from redis.exceptions import AuthenticationError, OutOfMemoryError, RedisError, ResponseError
    from redis.exceptions import ConnectionError as RedisConnectionError
    from redis.exceptions import TimeoutError as RedisTimeoutError
    from redis.retry import Retry
except ImportError as error:
    raise NotInstalled(f"a store on Redis needs {error.name}: pip install 'headwater[redis]'") from error

__all__ = [
    "AuthenticationError",
    "Command",
    "OutOfMemoryError",
    "RedisError",
    "RedisLines",
    "RedisTimeoutError",
    "ResponseError",
]

_READ_BYTES: Final = 256 << 10
_SMALL_BYTES: Final = 4096  # words up to this size are copied together before they are sent
_IN_A_URL: Final = frozenset({"host", "port", "path", "db", "username", "password"})

Command = tuple[bytes | memoryview | int, ...]


class _Pace:
    """Until when a socket may read and write."""

    __slots__ = ("deadline",)

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline


class _Paced:
    """A socket that ends what it does by a deadline, however slowly the other side drips."""

    def __init__(self, sock: socket.socket, pace: _Pace) -> None:
        self._sock = sock
        self._pace = pace

    def _arm(self) -> None:
        left_s = self._pace.deadline.remaining_s
        if not left_s:
            raise TimeoutError("no time left")
        self._sock.settimeout(left_s)

    def settimeout(self, _: float | None) -> None:
        """Nothing: the deadline rules."""

    def recv(self, num_bytes: int) -> bytes:
        self._arm()
        return self._sock.recv(num_bytes)

    def recv_into(self, buffer: memoryview) -> int:  # what hiredis' parser calls
        self._arm()
        return self._sock.recv_into(buffer)

    def sendall(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            self._arm()
            view = view[self._sock.send(view) :]

    def __getattr__(self, name: str) -> Any:  # what else a connection asks of its socket
        return getattr(self._sock, name)


class _Line:
    """Mixed into the client's connections: what it connects is paced."""

    pace: _Pace

    def _connect(self) -> _Paced:
        return _Paced(super()._connect(), self.pace)  # type: ignore[misc]


class _Tcp(_Line, Connection):
    pass


class _Tls(_Line, SSLConnection):
    pass


class _Unix(_Line, UnixDomainSocketConnection):
    pass


class RedisLines:
    """As many connections as there are calls at once. All calls may come from several threads."""

    def __init__(self, url: str) -> None:
        """Connects when asked. Raises StoreUnavailable for what is no address."""
        self.where = _without_secrets(url)
        self._kind, self._options = _parsed(url, self.where)
        self._lock = threading.Lock()
        self._idle: list[Any] = []  # the client's types are no help
        self._closed = False

    def ask(self, commands: Sequence[Command], deadline: Deadline) -> list[Any]:
        """One round trip; an answer that is an error is returned. Raises RedisError where there is no answer at all.

        A server that was restarted has hung up on all old connections: then once more, with a new one. Every command
        of a store may be done twice.
        """
        if deadline.expired:
            raise RedisTimeoutError("no time left")
        with self._lock:
            line = self._idle.pop() if self._idle else None
        if line is not None:
            try:
                return self._exchange(line, commands, deadline)
            except RedisConnectionError:
                self._hang_up()
            if deadline.expired:
                raise RedisTimeoutError("no time left")
        left_s = deadline.remaining_s
        line = self._kind(**self._options, socket_timeout=left_s, socket_connect_timeout=left_s)
        line.pace = _Pace(deadline)
        return self._exchange(line, commands, deadline)

    def close(self) -> None:
        """Hang up, now and after every call that is under way. Idempotent."""
        with self._lock:
            self._closed = True
        self._hang_up()

    def _hang_up(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for line in idle:
            line.disconnect()

    def _exchange(self, line: Any, commands: Sequence[Command], deadline: Deadline) -> list[Any]:
        line.pace.deadline = deadline
        try:
            line.connect()  # unless it is
            line.send_packed_command(_packed(commands), check_health=False)
            answers = [_answer(line) for _ in commands]
        except BaseException:
            line.disconnect()  # its answers would be taken for those of the next call
            raise
        with self._lock:
            if not self._closed:
                self._idle.append(line)
                return answers
        line.disconnect()
        return answers


def _answer(line: Any) -> Any:
    try:
        return line.read_response(disable_decoding=True)
    except ResponseError as error:
        return error
    except ValueError as error:
        raise RedisConnectionError(f"this is not Redis' protocol: {error}") from error


def _packed(commands: Iterable[Command]) -> list[bytes | memoryview]:
    """What goes over the line, frames uncopied."""
    pieces: list[bytes | memoryview] = []
    small = bytearray()
    for command in commands:
        small += b"*%d\r\n" % len(command)
        for word in command:
            data = b"%d" % word if isinstance(word, int) else word
            small += b"$%d\r\n" % len(data)
            if len(data) <= _SMALL_BYTES:
                small += data
            else:
                pieces += [bytes(small), data]
                small.clear()
            small += b"\r\n"
    return [*pieces, bytes(small)]


def _parsed(url: str, where: str) -> tuple[type[_Tcp] | type[_Tls] | type[_Unix], dict[str, Any]]:
    """The kind of connection that a URL asks for, and its options."""
    try:
        options: dict[str, Any] = dict(parse_url(url))  # type: ignore[no-untyped-call]
    except ValueError as error:
        message = f"{where} is no address of a Redis server: redis://HOST:PORT/DB, rediss:// or unix:///PATH"
        raise StoreUnavailable(message) from error
    asked = options.pop("connection_class", Connection)
    kind = _Tls if asked is SSLConnection else _Unix if asked is UnixDomainSocketConnection else _Tcp
    strange = [name for name in options if name not in _IN_A_URL and not (kind is _Tls and name.startswith("ssl_"))]
    if strange:
        raise StoreUnavailable(f"{where}: options that are not known in the URL: {', '.join(strange)}")
    options |= {"retry": Retry(NoBackoff(), 0), "protocol": 2, "socket_read_size": _READ_BYTES}
    return kind, options


def _without_secrets(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        return "what was given"
    return (
        f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if parts.netloc or parts.path else repr(url)
    )
