"""Bodies on their way in: each at a pace, within a limit of its own; all of them within one budget of bytes.

Bodies of up to SMALL_BYTES are everybody's: there are no more of them than connections. A larger one counts, all of it,
from its arrival until whoever reads the body lets go of it. When there is too much, of those that are still coming the
one is given up (503) that kept its pace the longest ago, perhaps the one that wants more. So small requests are never
in the way of large ones, half a body never in that of a whole one, and a slow one never in that of one that comes.

Invariant: a body keeps its pace, or is given up (408); it is whole by its request's deadline, or given up (504).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headwater.core.errors import needs_extra
from headwater.serve import errors
from headwater.serve.body import parse
from headwater.serve.errors import ApiError
from headwater.serve.limits import SMALL_BYTES, Limits, Pace
from headwater.serve.middleware import admission_of, until_s

with needs_extra("serve"):
    from starlette.requests import Request


class _Coming:
    """A body that is on its way, or held."""

    def __init__(self, alarm: asyncio.Timeout, pace: Pace) -> None:
        self.data = bytearray()
        self.alarm = alarm  # ends the waiting for more
        self.pace = pace
        self.why: ApiError | None = None  # it was given up, and the alarm perhaps not heard yet

    @property
    def num_counted(self) -> int:
        """Bytes that count."""
        return _num_counted(len(self.data))


class Bodies:
    """The bodies that a server holds. For one event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._coming: set[_Coming] = set()
        self._num_bytes = 0  # that count, of bodies that are coming or held
        self._stopped = False

    @property
    def num_bytes(self) -> int:
        """That count."""
        return self._num_bytes

    def stop(self) -> None:
        """Take no more. Whoever is still sending hears so at once (503)."""
        self._stopped = True
        for coming in list(self._coming):
            self._give_up(coming, errors.closing())

    @asynccontextmanager
    async def body_of(self, http: Request, limit_bytes: int) -> AsyncIterator[bytes]:
        """A request's body, JSON as it says, held until the end of the block. Raises ApiError; waits for the client."""
        # Pages of other sites may post plain text to a server on this machine without asking; JSON they may not.
        if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "send JSON, with 'Content-Type: application/json'", code="unsupported_media_type")
        encoding = http.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            message = f"send JSON as it is, not with 'Content-Encoding: {errors.shown(encoding)[1:-1]}'"
            raise ApiError(415, message, code="unsupported_media_type")
        length = http.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > limit_bytes:
            raise errors.too_large(limit_bytes)
        num_counted = 0
        try:
            held = [await self._read(http, limit_bytes)]
            num_counted = _num_counted(len(held[0]))
            yield held.pop()  # it is the reader's alone
        finally:
            self._num_bytes -= num_counted

    async def object_of(self, http: Request, limit_bytes: int) -> dict[str, object]:
        """The object in a small body. Raises ApiError; waits for the client."""
        async with self.body_of(http, min(limit_bytes, SMALL_BYTES)) as data:
            return parse(data)

    async def _read(self, http: Request, limit_bytes: int) -> bytes:
        """All of it; what counts of it is counted then."""
        if self._stopped:
            raise errors.closing()
        admission, most_s, loop = admission_of(http.scope), until_s(http), asyncio.get_running_loop()
        pace = Pace(self._limits, admission.began_s)
        coming: _Coming | None = None
        try:
            async with asyncio.timeout_at(min(most_s, pace.until_s)) as alarm:
                coming = _Coming(alarm, pace)
                self._coming.add(coming)
                async for chunk in http.stream():
                    if len(coming.data) + len(chunk) > limit_bytes:
                        raise errors.too_large(limit_bytes)
                    pace.moved(loop.time(), len(coming.data) + len(chunk))
                    self._add(coming, chunk)
                    alarm.reschedule(min(most_s, pace.until_s))
                return self._whole(coming)
        except TimeoutError as error:
            if coming is not None and coming.why is not None:
                raise coming.why from error
            if loop.time() >= most_s:
                raise errors.too_late(most_s - admission.began_s) from error
            raise errors.slow_body() from error
        finally:
            if coming is not None:
                self._forget(coming)

    def _add(self, coming: _Coming, chunk: bytes) -> None:
        if coming.why is not None:
            raise coming.why
        num_more = _num_counted(len(coming.data) + len(chunk)) - coming.num_counted
        while self._num_bytes + num_more > self._limits.bodies_bytes:  # first there is room, then it is taken
            found = (one for one in self._coming if one.num_counted or one is coming)
            slowest = min(found, key=lambda one: one.pace.until_s)
            if slowest is coming:
                raise errors.bodies_full()
            self._give_up(slowest, errors.bodies_full())
        coming.data += chunk
        self._num_bytes += num_more

    def _give_up(self, coming: _Coming, why: ApiError) -> None:
        self._forget(coming)
        coming.why = why
        if not coming.alarm.expired():
            coming.alarm.reschedule(asyncio.get_running_loop().time())

    def _whole(self, coming: _Coming) -> bytes:
        """It is here, and counts until its reader lets go."""
        if coming.why is not None:
            raise coming.why
        self._coming.discard(coming)
        return bytes(coming.data)

    def _forget(self, coming: _Coming) -> None:
        """It does not come any more. Idempotent."""
        if coming in self._coming:
            self._coming.discard(coming)
            self._num_bytes -= coming.num_counted
            coming.data = bytearray()


def _num_counted(num_bytes: int) -> int:
    """How many bytes of a body of that size count."""
    return num_bytes if num_bytes > SMALL_BYTES else 0
