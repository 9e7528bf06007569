"""Redis' protocol (RESP2), as much as a store needs: commands out, answers in, each by a deadline, whoever answers.

A server is not believed: lines, words and lists are bounded, nothing is nested deeply, and what is no answer ends the
line. A page is received straight into its buffer; a value of another size is read past, and never kept. The time limits
of sockets hold for one read, and a server that drips would stretch them: here the deadline is looked at before each.
Not here: connecting, and what answers mean.
"""

import itertools
import math
import re
import select
import socket
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from headwater.storage.base import Deadline

MAX_VALUE_BYTES: Final = 512 << 20  # Redis' own limit
_LINE_BYTES: Final = 64 << 10  # of a line, and of what is received at once besides pages
_SMALL_BYTES: Final = 4096  # words up to this size are copied together before they are sent
_MOST_BYTES: Final = 64 << 20  # of all words that one exchange keeps, pages not counted
_MOST_ANSWERS: Final = 1 << 20  # in one exchange, those in lists counted
_DEPTH: Final = 3  # of lists in lists
_NUMBER: Final = re.compile(rb"-?[0-9]{1,19}")

Command: TypeAlias = tuple[bytes | memoryview | int, ...]


class RedisError(Exception):
    """There is no answer."""


class LineLate(RedisError):
    """The deadline passed."""


class LineDown(RedisError):
    """The server hung up, is not there, or does not speak the protocol: the connection is of no use any more."""


class Refused(RedisError):
    """The server says that it will not do a command. An answer like others, so returned; raised where none came."""

    @property
    def code(self) -> str:
        """Its first word: OOM, NOAUTH, WRONGTYPE, ERR ..."""
        return str(self).partition(" ")[0]


@dataclass(frozen=True, slots=True)
class Skipped:
    """A value of another size than the buffer that was meant for it; nothing of it was kept."""

    num_bytes: int


class Channel:
    """A connected socket, plain or TLS, that ends all it does by a deadline. Takes the socket over."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        sock.settimeout(0.0)
        self.deadline = deadline
        self._sock = sock

    def secure(self, context: ssl.SSLContext, host: str) -> None:
        """Shake hands. Raises RedisError."""
        try:
            secured = context.wrap_socket(self._sock, server_hostname=host, do_handshake_on_connect=False)
        except (OSError, ValueError) as error:
            raise LineDown(f"no TLS: {error}") from error
        self._sock = secured
        while True:
            try:
                secured.do_handshake()
                return
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wants:
                self._wait(wants)
            except (OSError, ValueError) as error:
                raise LineDown(f"no TLS: {error}") from error

    def receive(self, view: memoryview) -> int:
        """Receive at least a byte. Raises RedisError."""
        while True:
            if self.deadline.expired:
                raise LineLate("no time left")
            try:
                num = self._sock.recv_into(view)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as wants:
                self._wait(wants)
                continue
            except (OSError, ValueError) as error:
                raise LineDown(str(error)) from error
            if not num:
                raise LineDown("the server hung up")
            return num

    def send(self, pieces: Iterable[bytes | memoryview]) -> None:
        """Send all. Raises RedisError."""
        for piece in pieces:
            view = memoryview(piece)
            while view:
                if self.deadline.expired:
                    raise LineLate("no time left")
                try:
                    view = view[self._sock.send(view) :]
                except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as wants:
                    self._wait(wants, send=True)
                except (OSError, ValueError) as error:
                    raise LineDown(str(error)) from error

    @property
    def quiet(self) -> bool:
        """Whether the other side has said nothing since it last answered, and has not hung up."""
        try:
            self._sock.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except (OSError, ValueError):
            return False
        return False

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._sock.close()

    def _wait(self, wants: OSError, *, send: bool = False) -> None:
        wake = select.poll()
        out = isinstance(wants, ssl.SSLWantWriteError) or (send and not isinstance(wants, ssl.SSLWantReadError))
        wake.register(self._sock, select.POLLOUT if out else select.POLLIN)
        if not wake.poll(math.ceil(1000 * self.deadline.remaining_s)):
            raise LineLate("no answer in time")


class Answers:
    """Reads answers off a channel, one exchange after another. Whatever it raises, the channel is of no use then."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._bytes = bytearray(_LINE_BYTES)
        self._buffer = memoryview(self._bytes)
        self._at = self._end = 0  # what was received and not read
        self._num_bytes = self._num_answers = 0  # that this exchange may still have

    @property
    def surplus(self) -> bool:
        """Whether something came that nobody asked for."""
        return self._at < self._end

    def read(self, buffers: Sequence[memoryview | None]) -> list[Any]:
        """An answer for each: an int, bytes, None, a list, Refused; or, where a page has a buffer, that, or Skipped."""
        self._num_bytes, self._num_answers = _MOST_BYTES, _MOST_ANSWERS
        return [self._next(buffer) for buffer in buffers]

    def _next(self, into: memoryview | None = None, depth: int = 0) -> Any:
        self._num_answers -= 1
        if self._num_answers < 0:
            raise LineDown("more answers than anybody asked for")
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"$":
            return self._word(_number(rest), into)
        if kind == b":":
            return _number(rest)
        if kind == b"+":
            return rest
        if kind == b"-":
            return Refused(rest.decode("utf-8", "replace"))
        if kind == b"*" and depth < _DEPTH:
            number = _number(rest)
            return None if number < 0 else [self._next(depth=depth + 1) for _ in range(number)]
        raise LineDown(f"this is not Redis' protocol: {line[:40]!r}")

    def _line(self) -> bytes:
        seen = self._at
        while True:
            found = self._bytes.find(b"\n", seen, self._end)
            if found >= 0:
                line, self._at = bytes(self._buffer[self._at : found]), found + 1
                if not line.endswith(b"\r"):
                    raise LineDown("this is not Redis' protocol: a line without its end")
                return line[:-1]
            if self._at:
                self._buffer[: self._end - self._at] = self._buffer[self._at : self._end]
                self._at, self._end = 0, self._end - self._at
            seen = self._end
            if seen == len(self._buffer):
                raise LineDown("this is not Redis' protocol: a line without end")
            self._end += self._channel.receive(self._buffer[seen:])

    def _word(self, num_bytes: int, into: memoryview | None) -> object:
        if num_bytes == -1:
            return None
        if not 0 <= num_bytes <= MAX_VALUE_BYTES:
            raise LineDown(f"this is not Redis' protocol: a value of {num_bytes} bytes")
        if into is None:
            self._num_bytes -= num_bytes
            if self._num_bytes < 0:
                raise LineDown("more bytes than anybody asked for")
            word = bytearray(num_bytes)
            self._fill(memoryview(word))
            found: object = bytes(word)
        elif len(into) == num_bytes:
            self._fill(into)
            found = into
        else:
            self._skip(num_bytes)
            found = Skipped(num_bytes)
        end = bytearray(2)
        self._fill(memoryview(end))
        if end != b"\r\n":
            raise LineDown("this is not Redis' protocol: a value without its end")
        return found

    def _fill(self, view: memoryview) -> None:
        num = min(len(view), self._end - self._at)
        view[:num] = self._buffer[self._at : self._at + num]
        self._at += num
        while num < len(view):
            if len(view) - num < len(self._buffer):  # with what comes behind it
                self._at, self._end = 0, self._channel.receive(self._buffer)
                more = min(len(view) - num, self._end)
                view[num : num + more] = self._buffer[:more]
                self._at = more
            else:
                more = self._channel.receive(view[num:])
            num += more

    def _skip(self, num_bytes: int) -> None:
        for at in range(0, num_bytes, _LINE_BYTES):
            self._fill(memoryview(bytearray(min(_LINE_BYTES, num_bytes - at))))


def _number(text: bytes) -> int:
    if not _NUMBER.fullmatch(text):
        raise LineDown(f"this is not Redis' protocol: {text[:40]!r} is no number")
    return int(text)


def packed(commands: Iterable[Command]) -> list[bytes | memoryview]:
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


class Nonces:
    """Words that no other exchange has: what comes back tells that the answers before it are this exchange's."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._numbers = itertools.count()

    def next(self) -> bytes:
        """Another one."""
        return b"%s:%d" % (self._secret, next(self._numbers))
