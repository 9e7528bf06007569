"""Connections to a Redis server that end every exchange by a deadline, and come back after the server did.

Each exchange ends with a PING of a word that no other has. If anything but that word comes back in its place, answers
were lost, doubled or mixed up on the way: none of them counts, and the connection is not used again.

Hosts with several addresses share the time there is between them. The system's resolver blocks as it likes, so it is
asked in a thread, and waited for until the deadline.
"""

import errno
import math
import os
import select
import socket
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from headwater.core.errors import StoreUnavailable
from headwater.storage.base import Deadline
from headwater.storage.redis.protocol import (
    Answers,
    Channel,
    Command,
    LineDown,
    LineLate,
    Nonces,
    RedisError,
    Refused,
    Skipped,
    packed,
)

__all__ = ["Command", "LineDown", "LineLate", "RedisError", "RedisLines", "Refused", "Skipped", "Unauthorised"]

_PORT: Final = 6379
_UNAUTHORISED: Final = frozenset({"NOAUTH", "WRONGPASS"})
_CERTIFICATES: Final = {"required": ssl.CERT_REQUIRED, "optional": ssl.CERT_OPTIONAL, "none": ssl.CERT_NONE}
_TLS: Final = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"})

_Endpoint = tuple[int, tuple[Any, ...] | str]  # a family, and an address of it


class Unauthorised(RedisError):
    """The server wants other credentials."""


class _Line:
    """One connection."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.answers = Answers(channel)

    def exchange(self, commands: Sequence[Command], nonce: bytes, into: Sequence[memoryview | None] = ()) -> list[Any]:
        self.channel.send(packed([*commands, (b"PING", nonce)]))
        *found, proof = self.answers.read([*(into or [None] * len(commands)), None])
        if isinstance(proof, Refused):
            raise Unauthorised(str(proof)) if proof.code in _UNAUTHORISED else proof
        if proof != nonce:
            raise LineDown("answers were lost or doubled on the way")
        return found


class RedisLines:
    """As many connections as there are calls at once. All calls may come from several threads."""

    def __init__(self, url: str) -> None:
        """Connects when asked. Raises StoreUnavailable for what is no address."""
        self.where = _without_secrets(url)
        self._address = _parsed(url, self.where)
        self._resolver = _Resolver(self._address.host, self._address.port)
        self._nonces = Nonces(os.urandom(8).hex().encode())
        self._lock = threading.Lock()
        self._idle: list[_Line] = []
        self._closed = False

    def ask(
        self, commands: Sequence[Command], deadline: Deadline, *, into: Sequence[memoryview | None] = ()
    ) -> list[Any]:
        """One round trip; an answer that is a refusal is returned. Raises RedisError where there is no answer at all.

        `into`: a buffer for the value that each command brings: what is of its size is put there, and the buffer is the
        answer. A server that was restarted has hung up on all old connections: then once more, with a new one. Every
        command of a store may be done twice.
        """
        if deadline.expired:
            raise LineLate("no time left")
        line = self._take()
        if line is not None:
            try:
                return self._exchange(line, commands, deadline, into)
            except LineDown:
                self._hang_up()
            if deadline.expired:
                raise LineLate("no time left")
        return self._exchange(self._connect(deadline), commands, deadline, into)

    def close(self) -> None:
        """Hang up, now and after every call that is under way. Idempotent."""
        with self._lock:
            self._closed = True
        self._hang_up()

    def _take(self) -> _Line | None:
        """A connection that nobody uses and that is as it was left, if there is one."""
        while True:
            with self._lock:
                line = self._idle.pop() if self._idle else None
            if line is None or line.channel.quiet:
                return line
            line.channel.close()

    def _hang_up(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for line in idle:
            line.channel.close()

    def _exchange(
        self, line: _Line, commands: Sequence[Command], deadline: Deadline, into: Sequence[memoryview | None]
    ) -> list[Any]:
        line.channel.deadline = deadline
        try:
            answers = line.exchange(commands, self._nonces.next(), into)
        except BaseException:
            line.channel.close()  # its answers would be taken for those of the next call
            raise
        with self._lock:
            if not self._closed and not line.answers.surplus:
                self._idle.append(line)
                return answers
        line.channel.close()
        return answers

    # --- connecting ---------------------------------------------------------------------------------------------------

    def _connect(self, deadline: Deadline) -> _Line:
        address = self._address
        endpoints = [(socket.AF_UNIX, address.path)] if address.path else self._resolver.find(deadline)
        channel = Channel(_dialled(endpoints, deadline), deadline)
        line = _Line(channel)
        try:
            if address.tls is not None:
                channel.secure(address.tls, address.host)
            if address.greeting:
                self._greet(line, address.greeting)
        except BaseException:
            channel.close()
            raise
        return line

    def _greet(self, line: _Line, greeting: Sequence[Command]) -> None:
        for command, answer in zip(greeting, line.exchange(greeting, self._nonces.next()), strict=True):
            if isinstance(answer, Refused):
                raise Unauthorised(str(answer)) if command[0] == b"AUTH" else answer
            if answer != b"OK":
                raise LineDown("this is not Redis' protocol: a greeting without an answer")


def _dialled(endpoints: Sequence[_Endpoint], deadline: Deadline) -> socket.socket:
    """Connect to the first address that answers. Each gets its share of the time that is left. Raises RedisError."""
    trouble: RedisError = LineDown("the host has no address")
    for at, (family, address) in enumerate(endpoints):
        share = Deadline.after(deadline.remaining_s / (len(endpoints) - at))
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            _connect_to(sock, address, share)
            if family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return sock
        except (RedisError, OSError) as error:
            sock.close()
            trouble = error if isinstance(error, RedisError) else LineDown(str(error))
        except BaseException:
            sock.close()
            raise
    raise trouble


def _connect_to(sock: socket.socket, address: tuple[Any, ...] | str, deadline: Deadline) -> None:
    sock.settimeout(0.0)
    begun = sock.connect_ex(address)
    if begun == errno.EINPROGRESS:
        wake = select.poll()
        wake.register(sock, select.POLLOUT)
        if not wake.poll(math.ceil(1000 * deadline.remaining_s)):
            raise LineLate("nobody took the connection in time")
        begun = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if begun:
        raise LineDown(os.strerror(begun))


class _Resolver:
    """A host's addresses, found by the system, which blocks as it likes: at most one thread waits for it."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._changed = threading.Condition()
        self._asking = False
        self._num_asked = 0
        self._found: list[_Endpoint] | RedisError = []

    def find(self, deadline: Deadline) -> list[_Endpoint]:
        """The addresses, as they are now. Blocks until the deadline at most. Raises RedisError."""
        try:
            return self._ask(socket.AI_NUMERICHOST)
        except (OSError, UnicodeError):
            pass  # it is a name, or none
        with self._changed:
            before = self._num_asked
            if not self._asking:
                try:
                    threading.Thread(target=self._serve, name="headwater redis address", daemon=True).start()
                except RuntimeError as error:  # the machine has no more: the next call tries again
                    raise LineDown(f"no address of {self._host}: {error}") from error
                self._asking = True
            if not self._changed.wait_for(lambda: self._num_asked > before, deadline.remaining_s):
                raise LineLate(f"no address of {self._host} in time")
            if isinstance(self._found, RedisError):
                raise self._found
            return self._found

    def _serve(self) -> None:
        found: list[_Endpoint] | RedisError
        try:
            found = self._ask(0)
        except (OSError, UnicodeError) as error:
            found = LineDown(f"{self._host} has no address: {error}")
        with self._changed:
            self._found, self._asking = found, False
            self._num_asked += 1
            self._changed.notify_all()

    def _ask(self, flags: int) -> list[_Endpoint]:
        found = socket.getaddrinfo(self._host, self._port, 0, socket.SOCK_STREAM, 0, flags)
        return [(family, address) for family, _, _, _, address in found]


# --- addresses --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Address:
    """Where a server is, and what it hears first."""

    host: str
    port: int
    path: str  # of a socket; "": none
    tls: ssl.SSLContext | None
    greeting: tuple[Command, ...]


def _parsed(url: str, where: str) -> _Address:
    try:
        parts = urlsplit(url)
        port = parts.port
        options = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
        user, password, host = (unquote(word or "") for word in (parts.username, parts.password, parts.hostname))
        database = options.pop("db", "") if parts.scheme == "unix" else unquote(parts.path[1:]) or options.pop("db", "")
        number = int(database or "0")
    except ValueError as error:
        raise _no_address(where) from error
    user, password = options.pop("username", user), options.pop("password", password)
    path = unquote(parts.path) if parts.scheme == "unix" else ""
    if parts.scheme not in ("redis", "rediss", "unix") or number < 0 or (parts.scheme == "unix" and not path):
        raise _no_address(where)
    tls = _context(options, where) if parts.scheme == "rediss" else None
    if options:
        raise StoreUnavailable(f"{where}: options that are not known in the URL: {', '.join(options)}")
    words = [word.encode() for word in (user, password) if word]
    greeting: list[Command] = [(b"AUTH", *words)] if password else []
    greeting += [(b"SELECT", number)] if number else []
    return _Address(host or "localhost", port or _PORT, path, tls, tuple(greeting))


def _context(options: dict[str, str], where: str) -> ssl.SSLContext:
    """Of what a URL says about TLS; takes that out of the options."""
    said = {name: options.pop(name) for name in list(options) if name in _TLS}
    try:
        context = ssl.create_default_context(cafile=said.get("ssl_ca_certs"))
        if said.get("ssl_check_hostname", "true").lower() in ("false", "no", "0"):
            context.check_hostname = False
        asked = _CERTIFICATES[said.get("ssl_cert_reqs", "required")]
        if asked is not ssl.CERT_REQUIRED:
            context.check_hostname = False
        context.verify_mode = asked
        if "ssl_certfile" in said:
            context.load_cert_chain(said["ssl_certfile"], said.get("ssl_keyfile"))
    except (KeyError, OSError, ValueError) as error:
        raise StoreUnavailable(f"{where}: TLS as the URL wants it cannot be had: {error}") from error
    return context


def _no_address(where: str) -> StoreUnavailable:
    return StoreUnavailable(f"{where} is no address of a Redis server: redis://HOST:PORT/DB, rediss:// or unix:///PATH")


def _without_secrets(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        return "what was given"
    return (
        f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}" if parts.netloc or parts.path else repr(url)
    )
