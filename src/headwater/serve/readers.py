"""Who reads bodies (`reading.py`): threads the small ones, processes the large ones. No body holds up the server.

A reader of large ones is another process of this program, without an engine. It is given a body and answers with what
is asked. When that is not there by the request's deadline, the request ends; `_LEFT_S` later, if it is not done by
then, the reader does too, and the next body gets another one. So does one whose reader was killed. Memory that reading
takes is the reader's, bounded, and gone with it.

Two lanes, a process each: bodies above `_HUGE_BYTES`, of which one may take seconds, and the others. A lane reads one
body after the other, small ones first; nobody is passed over more than `_MOST_PASSED` times by who came later. So many
may wait; one more hears so at once. Bodies that wait are held in the server's budget (`bodies.py`).

Readers run with a lower priority, and are started when the first large body comes, or by `start`. What they load takes
most of a second of a core: `spare_readers` has that done while a model is loaded, and not beside the first requests.
"""

import asyncio
import json
import logging
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from headwater.serve import errors
from headwater.serve.errors import ApiError
from headwater.serve.limits import SMALL_BYTES

log = logging.getLogger("headwater")

SIZE: Final = struct.Struct(">Q")  # before each message
READ, REFUSED, FAILED = "read", "refused", "failed"  # what a reader answers

_HUGE_BYTES: Final = 1 << 20
_MEMORY_PER_BYTE: Final = 256  # of a body; text whose every byte is a token takes 150 of them
_LEAST_MEMORY_BYTES: Final = 2 << 30
_LEFT_S: Final = 1.0  # for a body that nobody waits for: to start another process takes about as long
_MOST_PASSED: Final = 8
_NUM_THREADS: Final = 4
_NUM_LANES: Final = 2
_MODULE: Final = "headwater.serve.reader_process"


class Readers:
    """Reads bodies. For one event loop; `close` it there."""

    def __init__(
        self,
        here: Mapping[str, Callable[..., Any]] | None = None,
        *,
        max_body_bytes: int,
        max_waiting: int = 256,
        **options: object,
    ) -> None:
        """`here` is what reads small bodies, by name; `max_waiting` bodies of a sort may wait.

        `options` are what `reader_process.py` is started with, besides its memory.
        """
        memory_bytes = max(_LEAST_MEMORY_BYTES, _MEMORY_PER_BYTE * max_body_bytes)
        self._threads = _ReaderThreads(here or {}, max_waiting)
        self._lanes: tuple[_Lane, ...] = tuple(
            _Lane({"memory_bytes": memory_bytes, **options}, max_waiting) for _ in range(_NUM_LANES)
        )

    async def read(self, what: str, *arguments: Any, num_bytes: int, until_s: float) -> Any:
        """What a reader makes of a body. Raises ApiError, also if it is not read by then."""
        small = num_bytes <= SMALL_BYTES and self._threads.reads(what)
        reader = self._threads if small else self._lanes[num_bytes > _HUGE_BYTES]
        try:
            async with asyncio.timeout_at(until_s):
                return await reader.read(what, arguments, num_bytes)
        except TimeoutError as error:
            raise ApiError(504, "the body could not be read in time", kind="server_error", code="timeout") from error

    def start(self, spares: "list[Spare] | None" = None) -> None:
        """Start the processes now, so that nobody has to wait for them. Does not wait itself. Takes spares, if any."""
        for lane in self._lanes:
            with suppress(OSError):  # the first large body tries again, and is told
                lane.start(spares.pop() if spares else None)

    def stop(self) -> None:
        """Read no more: who waits hears so at once (503). Does not wait. Idempotent."""
        self._threads.stop()
        for lane in self._lanes:
            lane.stop()

    def close(self) -> None:
        """End the processes. Blocks for a moment. Idempotent."""
        self.stop()
        self._threads.close()
        for lane in self._lanes:
            lane.close()


@dataclass(eq=False, slots=True)
class _Waiting:
    """Somebody who waits for a turn."""

    num_bytes: int
    turn: "asyncio.Future[None]"
    num_passed: int = 0  # turns of others who came later


class _Turns:
    """Whose turn it is: the smallest body's, unless others were passed over too often. So many at a time."""

    def __init__(self, num_free: int, max_waiting: int) -> None:
        self._num_free = num_free
        self._max_waiting = max_waiting
        self._waiting: list[_Waiting] = []  # who came first is first
        self._stopped = False

    async def take(self, num_bytes: int) -> None:
        """Wait for a turn. Raises ApiError if too many do, or there are no more turns."""
        if self._stopped:
            raise errors.closing()
        if self._num_free:
            self._num_free -= 1
            return
        if len(self._waiting) >= self._max_waiting:
            raise errors.bodies_waiting()
        one = _Waiting(num_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        try:
            await one.turn
        except asyncio.CancelledError:
            if one in self._waiting:
                self._waiting.remove(one)
            elif not one.turn.cancelled() and one.turn.exception() is None:  # it had just been given
                self.give_back()
            raise

    def give_back(self) -> None:
        """A turn is over: the next one's."""
        self._waiting = waiting = [one for one in self._waiting if not one.turn.done()]
        if not waiting:
            self._num_free += 1
            return
        shortest = min(range(len(waiting)), key=lambda at: waiting[at].num_bytes)
        at = next((at for at, one in enumerate(waiting) if one.num_passed >= _MOST_PASSED), shortest)
        for one in waiting[:at]:
            one.num_passed += 1
        waiting.pop(at).turn.set_result(None)

    def stop(self) -> None:
        """There are no more. Idempotent."""
        self._stopped = True
        for one in self._waiting:
            if not one.turn.done():
                one.turn.set_exception(errors.closing())
        self._waiting = []


class _ReaderThreads:
    """Threads of this process, and who waits for them."""

    def __init__(self, calls: Mapping[str, Callable[..., Any]], max_waiting: int) -> None:
        self._calls = calls
        self._turns = _Turns(_NUM_THREADS, max_waiting)
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="headwater reading")

    def reads(self, what: str) -> bool:
        """Whether such bodies are read here, if they are small."""
        return what in self._calls

    async def read(self, what: str, arguments: tuple[Any, ...], num_bytes: int) -> Any:
        """Have it read. Raises ApiError."""
        await self._turns.take(num_bytes)
        reading = asyncio.get_running_loop().run_in_executor(self._pool, self._calls[what], *arguments)
        reading.add_done_callback(self._over)
        return await asyncio.shield(reading)  # it cannot be stopped, and has its turn until it is over

    def _over(self, reading: "asyncio.Future[Any]") -> None:
        self._turns.give_back()
        if not reading.cancelled():
            reading.exception()  # nobody else may be there to hear it

    def stop(self) -> None:
        """Take no more."""
        self._turns.stop()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)


class _Lane:
    """One process, and who waits for it."""

    def __init__(self, options: Mapping[str, object], max_waiting: int) -> None:
        self._options = options
        self._turns = _Turns(1, max_waiting)
        self._process: _ReaderProcess | None = None
        self._ended: list[_ReaderProcess] = []  # and perhaps not gone yet
        self._stopped = False

    def start(self, spare: "Spare | None" = None) -> "_ReaderProcess":
        """The process, started if need be. Raises ApiError if there are to be none any more."""
        if self._stopped:
            raise errors.closing()
        if self._process is not None and self._process.is_gone():  # killed by somebody, while it had nothing to do
            self._end()
        if self._process is None:
            self._process = _begun(self._options, spare)
        elif spare is not None:
            spare.end()
            self._ended.append(spare)
        return self._process

    async def read(self, what: str, arguments: tuple[Any, ...], num_bytes: int) -> Any:
        """Have it read, when it is its turn. Raises ApiError."""
        await self._turns.take(num_bytes)
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
        try:
            return await self._ask_once(what, arguments)
        except _Ended:  # it may have been somebody's doing, and not the body's
            try:
                return await self._ask_once(what, arguments)
            except _Ended as error:
                raise errors.reader_ended() from error

    async def _ask_once(self, what: str, arguments: tuple[Any, ...]) -> tuple[str, Any]:
        """Raises _Ended if the process ends instead."""
        try:
            return await self.start().ask((what, arguments))
        except (OSError, EOFError) as error:
            self._end()
            if self._stopped:
                raise errors.closing() from error
            log.warning("the process that reads large bodies ended in the middle of one")
            raise _Ended from error
        except BaseException:  # what it does cannot be stopped in another way
            self._end()
            raise

    def _over(self, reading: "asyncio.Task[tuple[str, Any]]") -> None:
        self._turns.give_back()
        if not reading.cancelled():
            reading.exception()  # nobody else may be there to hear it

    def stop(self) -> None:
        """End the process, and take no more."""
        self._stopped = True
        self._turns.stop()
        self._end()

    def close(self) -> None:
        """Wait until the process is gone."""
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


class _Ended(Exception):
    """A reader that ended in the middle of a body."""


class _ReaderProcess:
    """A reader that runs. It loads its modules, and waits to be told what it reads with."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", _MODULE, str(theirs.fileno())]
            try:
                self._process = subprocess.Popen(  # noqa: S603  this program, with what it was started with
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C is the server's: it ends us
                )
            except OSError:
                self._ours.close()
                raise
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def begin(self, options: Mapping[str, object]) -> None:
        """Tell it what it reads with, once, before it is asked. Raises OSError if it is gone."""
        data = json.dumps(dict(options)).encode()
        self._ours.sendall(SIZE.pack(len(data)) + data)  # less than a socket takes: it does not block

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


Spare: TypeAlias = _ReaderProcess


@contextmanager
def spare_readers() -> Iterator[list[Spare]]:
    """Processes for `Readers.start`, which load what they need meanwhile. Those that nobody took are ended."""
    spares: list[Spare] = []
    try:
        with suppress(OSError):  # who needs one will say so
            spares += [_ReaderProcess() for _ in range(_NUM_LANES)]
        yield spares
    finally:
        for one in spares:
            one.end()
            one.is_gone(wait=True)


def _begun(options: Mapping[str, object], spare: Spare | None) -> _ReaderProcess:
    """A process that has its options: the spare one, if that still lives. Raises OSError."""
    if spare is not None:
        try:
            spare.begin(options)
        except OSError:
            spare.end()
        else:
            return spare
    process = _ReaderProcess()
    process.begin(options)
    return process
