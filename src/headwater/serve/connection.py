"""One connection: uvicorn's HTTP/1.1 with a deadline on everything, and errors in OpenAI's form from the first byte on.

uvicorn reads and writes HTTP; it waits for ever for a head, for the rest of a body that nobody wants, and for a client
to read. Here every request is known from its first byte on, and whatever it waits for ends (`look`):

    waits for                                until
    a first request, or another one          `idle_timeout_s`                    closed
    the rest of a head                       `patience_s`                        408
    the rest of a body                       a pace, or the deadline: 408 or 504 (`bodies.py`)
    an answer                                the deadline: 504; `grace_s` later it is cut
    what is left of a body after an answer   `linger_s`                          closed
    a client that does not read              a pace, or the deadline             cut

A connection that is cut is one whose client has left, to the application: it cancels what it does for it.

Not here: how many connections there may be (`connections.py`); keys, hosts, routes (`middleware.py`).
"""

import json
import logging
import secrets
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar, Final

from headwater.core.errors import needs_extra
from headwater.disagg.headers import REQUEST_ID, TIMEOUT
from headwater.serve import errors
from headwater.serve.connections import Admission, ConnectionPhase, Connections, Cut
from headwater.serve.errors import ApiError
from headwater.serve.limits import Limits, Pace

with needs_extra("serve"):
    import h11
    from h11._receivebuffer import ReceiveBuffer  # there is no other place between h11 and what it takes apart
    from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

if TYPE_CHECKING:
    import asyncio

    from starlette.types import Receive, Scope, Send

ADMISSION: Final = "headwater_admission"  # in a request's scope

_ANSWERED: Final = (h11.DONE, h11.MUST_CLOSE, h11.CLOSED)

_log = logging.getLogger("headwater.http")
_log.setLevel(logging.ERROR)  # uvicorn warns of what clients do: that is counted, and would fill the log


class Connection(H11Protocol):
    """A connection of a server. For the event loop's thread."""

    door: ClassVar[Connections]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _Conversation(self.door.limits, self.loop.time)
        self.logger = _log
        self._inner = self.app
        self.app = self._answer
        self._welcome = True
        self._since_s = self.loop.time()  # when it came, or was last answered
        self._began_s: float | None = None  # the first byte of the request that is here or comes
        self._until_s = 0.0  # its deadline
        self._num_answered = 0
        self._pace: Pace | None = None  # of an answer that lies here; None: the client keeps up
        self._most_unread_bytes = 0  # when it began to lie here

    @property
    def phase(self) -> ConnectionPhase:
        """What it is at."""
        theirs, ours = self.conn.their_state, self.conn.our_state
        if self.transport.is_closing() or theirs is h11.ERROR:
            return ConnectionPhase.CLOSING
        if theirs is h11.IDLE:
            return ConnectionPhase.IDLE if self._began_s is None and self._num_answered else ConnectionPhase.ARRIVING
        if theirs is h11.SEND_BODY:
            return ConnectionPhase.LINGERING if ours in _ANSWERED else ConnectionPhase.ARRIVING
        return ConnectionPhase.ANSWERING

    @property
    def num_unread_bytes(self) -> int:
        """Of answers that its client has not taken."""
        return self.transport.get_write_buffer_size()

    # --- what uvicorn calls -------------------------------------------------------------------------------------------

    def connection_made(self, transport: "asyncio.Transport") -> None:  # type: ignore[override]  # as uvicorn has it
        """Somebody is here."""
        super().connection_made(transport)
        self._welcome = self.door.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Somebody has gone."""
        self.door.left(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """More of a request."""
        if self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE and self._began_s is None:
            self._begin()
        super().data_received(data)
        self.door.moved(self)

    def on_response_complete(self) -> None:
        """Everything was said. What the client sent meanwhile is its next request, or the rest of this one."""
        self._num_answered += 1
        self._since_s = self.loop.time()
        self._began_s = None
        closing = self.transport.is_closing()
        if not closing and self.conn.their_state is h11.DONE and self.conn.trailing_data[0]:
            self._begin()
        super().on_response_complete()
        self.door.moved(self)

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP; the exception that says so is being handled."""
        found = sys.exception()
        status = found.error_status_hint if isinstance(found, h11.RemoteProtocolError) else 400
        if status == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            error = errors.head_too_large(self.door.limits.head_bytes, self.door.limits.head_lines)
        elif isinstance(found, _Crumbs):
            error = errors.crumbs(self.door.limits.piece_bytes)
        else:
            error = ApiError(status, f"this is no request of HTTP/1.1: {found}", code="invalid_http")
        self._refuse(error, Cut.MALFORMED)

    def pause_writing(self) -> None:
        """More lies here than the client takes."""
        super().pause_writing()
        self._lies_here()
        self.door.unread(self)

    def resume_writing(self) -> None:
        """It has taken most of it."""
        super().resume_writing()
        self._pace = None
        self.door.read(self)

    # --- what the door calls ------------------------------------------------------------------------------------------

    def look(self, now_s: float) -> float:
        """End it, if it has waited too long. When to look again, if nothing changes until then."""
        limits, phase = self.door.limits, self.phase
        if phase is ConnectionPhase.CLOSING and self._pace is None:  # what was said last has to be read, too
            self._lies_here()
        if self._pace is not None:
            self._pace.moved(now_s, self._most_unread_bytes - self.num_unread_bytes)
            if now_s >= self._pace.until_s:
                self._abort(Cut.UNREAD)
                return now_s
            if phase is ConnectionPhase.CLOSING:
                return now_s
        if self._began_s is None:
            until_s = self._since_s + (limits.linger_s if phase is ConnectionPhase.LINGERING else limits.idle_timeout_s)
            if now_s >= until_s:
                self._close(Cut.SLOW if phase is ConnectionPhase.LINGERING else Cut.SILENT)
        elif self.conn.their_state is h11.IDLE:
            until_s = self._began_s + limits.patience_s
            if now_s >= until_s:
                self._refuse(errors.slow_head(limits.patience_s), Cut.SLOW)
        else:
            until_s = self._until_s + limits.grace_s
            if now_s >= until_s:
                self._abort(Cut.LATE)
        return until_s if self._pace is None else now_s

    def leave(self, why: Cut) -> None:
        """End it now, with a word if one can be said."""
        if why is Cut.UNREAD or self.num_unread_bytes:  # it would not hear it
            self._abort(why)
        elif self._began_s is None:
            self._close(why)
        else:
            self._refuse(errors.crowded(), why)

    # --- one request --------------------------------------------------------------------------------------------------

    def _lies_here(self) -> None:
        """An answer does, until it is read."""
        self._pace = Pace(self.door.limits, self.loop.time())
        self._most_unread_bytes = self.num_unread_bytes

    def _begin(self) -> float:
        self._began_s = now_s = self.loop.time()
        self._until_s = now_s + self.door.limits.request_timeout_s
        self.door.changed(self)
        return now_s

    async def _answer(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """The application, which is told when the request began."""
        # One that came with the rest of a body that was thrown away begins here.
        began_s = self._begin() if self._began_s is None else self._began_s
        said = next((value.decode("latin-1") for name, value in self.headers if name == TIMEOUT.encode()), None)
        timeout_s = self.door.limits.timeout_s(said)
        if timeout_s is not None:
            self._until_s = began_s + timeout_s
            self.door.changed(self)
        scope[ADMISSION] = Admission(began_s, timeout_s, turned_away=not self._welcome)
        await self._inner(scope, receive, send)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _refuse(self, error: ApiError, why: Cut) -> None:
        """Say what is wrong, if nothing was said yet, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(error.document()).encode()
            headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            headers |= {REQUEST_ID: f"req-{secrets.token_hex(12)}", **error.headers}
            told = [
                *self.server_state.default_headers,
                *((name.encode(), value.encode()) for name, value in headers.items()),
            ]
            reason = HTTPStatus(error.status).phrase.encode()
            for event in (
                h11.Response(status_code=error.status, headers=told, reason=reason),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self._close(why)

    def _close(self, why: Cut) -> None:
        """Send what there is to send, then close."""
        self._ended(why)
        self.transport.close()

    def _abort(self, why: Cut) -> None:
        """Close at once. Whoever waits for this client hears that it is gone."""
        self._ended(why)
        self.transport.abort()

    def _ended(self, why: Cut) -> None:
        self.door.cut(why)
        cycle: RequestResponseCycle | None = self.cycle  # none before the first request
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()


class _Crumbs(h11.RemoteProtocolError):
    """A body in pieces that are too small."""


class _Conversation(h11.Connection):
    """HTTP as it is read; refuses what is cheap to send and dear to read: heads of many lines, bodies in crumbs."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        super().__init__(h11.SERVER, limits.head_bytes)
        self._receive_buffer = _HeadLines(limits)
        self._limits = limits
        self._clock = clock
        self._num_pieces = 0
        self._num_bytes = 0
        self._began_s = 0.0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next thing that came. Raises RemoteProtocolError."""
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._num_pieces += 1
            self._num_bytes += len(event.data)
            if self._num_pieces > self._limits.free_pieces:
                self._require_pace()
        elif isinstance(event, h11.Request):
            self._num_pieces = self._num_bytes = 0
            self._began_s = self._clock()
            names = {name for name, _ in event.headers}
            if {b"transfer-encoding", b"content-length"} <= names:  # servers differ in which of them counts
                raise h11.RemoteProtocolError("it has both Transfer-Encoding and Content-Length")
        return event

    def _require_pace(self) -> None:
        """Many pieces are fine if they are large, or come slowly: each costs as much as a large one."""
        limits, past_s = self._limits, self._clock() - self._began_s
        if self._num_pieces > limits.free_pieces + self._num_bytes / limits.piece_bytes + limits.pieces_s * past_s:
            raise _Crumbs("the body comes in crumbs")


class _HeadLines(ReceiveBuffer):
    """What came and is not taken apart. Heads, and what follows a body in chunks, have so many bytes and lines."""

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self._limits = limits

    def maybe_extract_lines(self) -> list[bytearray] | None:
        """All lines before the next empty one, if that is here. Raises RemoteProtocolError for too many of them."""
        most = self._limits.head_bytes
        ends = [end for empty in (b"\n\n", b"\n\r\n") if (end := self._data.find(empty, 0, most)) >= 0]
        if (not ends and len(self) > most) or self._data.count(
            b"\n", 0, min(ends, default=most)
        ) > self._limits.head_lines:
            raise h11.RemoteProtocolError("it is too large", error_status_hint=431)
        return super().maybe_extract_lines()
