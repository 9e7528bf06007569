"""Processes that read large bodies (`reading.py`), so that no body can hold up the server, nor grow it.

A reader is another process of this program, without an engine. It is given a body and answers with what is asked. When
that is not there by the request's deadline, the request ends; `_LEFT_S` later, if it is not done by then, the reader
does too, and the next body gets another one. Memory that reading takes is the reader's, bounded, and gone with it.

Two lanes, a process each: bodies above `_HUGE_BYTES`, of which one may take seconds, and the others. A lane reads one
body after the other. Bodies that wait are held in the server's budget (`bodies.py`).

Readers run with a lower priority, and are started when the first large body comes, or by `start`.
"""

import asyncio
import json
import logging
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Final

from headwater.serve import errors
from headwater.serve.errors import ApiError

log = logging.getLogger("headwater")

SIZE: Final = struct.Struct(">Q")  # before each message
READ, REFUSED, FAILED = "read", "refused", "failed"  # what a reader answers

_HUGE_BYTES: Final = 1 << 20
_MEMORY_PER_BYTE: Final = 256  # of a body; text whose every byte is a token takes 150 of them
_LEAST_MEMORY_BYTES: Final = 2 << 30
_LEFT_S: Final = 1.0  # for a body that nobody waits for: to start another process takes about as long
_MODULE: Final = "headwater.serve.reader_process"


class Readers:
    """Reads bodies elsewhere. For one event loop; `close` it there."""

    def __init__(self, *, max_body_bytes: int, **options: object) -> None:
        """`options` are what `reader_process.py` is started with, besides its memory."""
        memory_bytes = max(_LEAST_MEMORY_BYTES, _MEMORY_PER_BYTE * max_body_bytes)
        self._lanes = tuple(_Lane({"memory_bytes": memory_bytes, **options}) for _ in range(2))

    async def read(self, what: str, *arguments: Any, num_bytes: int, until_s: float) -> Any:
        """What a reader makes of a body. Raises ApiError, also if it is not read by then."""
        lane = self._lanes[num_bytes > _HUGE_BYTES]
        try:
            async with asyncio.timeout_at(until_s):
                return await lane.read(what, arguments)
        except TimeoutError as error:
            raise ApiError(
                504, "the body could not be read in time: it is large", kind="server_error", code="timeout"
            ) from error

    def start(self) -> None:
        """Start the processes now, so that nobody has to wait for them. Does not wait itself."""
        for lane in self._lanes:
            lane.start()

    def close(self) -> None:
        """End the processes. Blocks for a moment. Idempotent."""
        for lane in self._lanes:
            lane.close()


class _Lane:
    """One process, and who waits for it."""

    def __init__(self, options: Mapping[str, object]) -> None:
        self._options = options
        self._turn = asyncio.Lock()
        self._process: _Process | None = None
        self._ended: list[_Process] = []  # and perhaps not gone yet
        self._closed = False

    def start(self) -> "_Process":
        """The process, started if need be. Raises ApiError if there are to be none any more."""
        if self._closed:
            raise errors.closing()
        if self._process is not None and self._process.is_gone():  # killed by somebody, while it had nothing to do
            self._end()
        if self._process is None:
            self._process = _Process(self._options)
        return self._process

    async def read(self, what: str, arguments: tuple[Any, ...]) -> Any:
        """Have it read, after those who came before. Raises ApiError."""
        await self._turn.acquire()
        reading = asyncio.create_task(self._ask(what, arguments))
        reading.add_done_callback(self._over)
        try:
            answer, found = await asyncio.shield(reading)
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(_LEFT_S, reading.cancel)
            raise
        if answer == REFUSED:
            raise ApiError(**found)
        if answer == FAILED:
            raise RuntimeError(f"a reader failed: {found}")
        return found

    async def _ask(self, what: str, arguments: tuple[Any, ...]) -> tuple[str, Any]:
        process = self.start()
        try:
            return await process.ask((what, arguments))
        except (OSError, EOFError) as error:
            self._end()
            if self._closed:
                raise errors.closing() from error
            log.warning("the process that reads large bodies ended in the middle of one")
            raise errors.too_large_to_read() from error
        except BaseException:  # what it does cannot be stopped in another way
            self._end()
            raise

    def _over(self, reading: "asyncio.Task[tuple[str, Any]]") -> None:
        self._turn.release()
        if not reading.cancelled():
            reading.exception()  # nobody else may be there to hear it

    def close(self) -> None:
        """End the process, and take no more. Blocks until it is gone."""
        self._closed = True
        self._end()
        for process in self._ended:
            process.is_gone(wait=True)

    def _end(self) -> None:
        if self._process is not None:
            self._process.end()
            self._ended.append(self._process)
            self._process = None
            asyncio.get_running_loop().call_later(_LEFT_S, self._reap)

    def _reap(self) -> None:
        self._ended = [process for process in self._ended if not process.is_gone()]


class _Process:
    """A reader that runs."""

    def __init__(self, options: Mapping[str, object]) -> None:
        self._ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", _MODULE, str(theirs.fileno()), json.dumps(dict(options))]
            try:
                self._process = subprocess.Popen(  # noqa: S603  this program, with what it was started with
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
                )
            except OSError:
                self._ours.close()
                raise
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, message: object) -> tuple[str, Any]:
        """Its answer. Raises OSError or EOFError if it ends instead. Who stops waiting must `end` it."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(sock=self._ours)
        reader, writer = self._streams
        data = pickle.dumps(message)
        writer.write(SIZE.pack(len(data)))
        writer.write(data)
        await writer.drain()
        (size,) = SIZE.unpack(await reader.readexactly(SIZE.size))
        answer: tuple[str, Any] = pickle.loads(await reader.readexactly(size))  # noqa: S301  a process of our own
        return answer

    def end(self) -> None:
        """Kill it. Does not wait until it is gone."""
        self._process.kill()
        if self._streams is not None:
            self._streams[1].transport.abort()
        else:
            self._ours.close()

    def is_gone(self, *, wait: bool = False) -> bool:
        """Whether it has ended; with `wait`, when it has."""
        return (self._process.wait() if wait else self._process.poll()) is not None
