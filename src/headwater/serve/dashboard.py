"""What people look at: the page (`page/`), `GET /admin/state` and `GET /admin/stream`; for nodes and routers alike.

    /, /dashboard.css, /dashboard.js ...    the page; open to everybody, because it holds nothing
    /admin/state                            the state document (`state.py`), once
    /admin/stream                           server-sent events: the document now, and again each second

What they say is in `state.py`, how it is found out in `board.py` (a node), `router/board.py` and `metrics_board.py`
(others' metrics). Neither an engine nor torch is loaded here.

While nobody looks, nothing of this runs: no task, no timer, no sample. A stream samples for itself and keeps nothing.

Invariants:
- A stream holds one document at a time: the next one is made when the client has taken the last. One that does not read
  is cut by its connection, as every answer is (`connection.py`), and its place is free then.
- There are few streams. One more hears 429, and may ask for `/admin/state`.
- A stream ends by itself: after `LASTS_S`, by its request's deadline, when its client has left, and, a second later at
  most, when the server stops.
- A page of another site gets nothing, and takes no stream's place: browsers say where a request comes from.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Final

from headwater.core.errors import needs_extra
from headwater.serve import page
from headwater.serve.errors import RETRY_AFTER_S, ApiError, closing
from headwater.serve.limits import Limits
from headwater.serve.middleware import until_gone, until_s
from headwater.serve.state import Snapshot, document

with needs_extra("serve"):
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
    from starlette.types import Receive, Scope, Send

STATE: Final = "/admin/state"
STREAM: Final = "/admin/stream"
PATHS: Final = (*page.FILES, STATE, STREAM)

MAX_STREAMS: Final = 8
EVERY_S: float = 1.0  # between two documents
LASTS_S: float = 300.0  # a stream; whoever still looks asks again
_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-accel-buffering", b"no"),
)


class Dashboard:
    """The dashboard's routes. For one event loop."""

    def __init__(
        self,
        take: Callable[[], Snapshot | Awaitable[Snapshot]],
        *,
        limits: Limits,
        stopping: Callable[[], bool],
        wants_key: bool,
    ) -> None:
        """`take` says how things stand, at once or awaited. `stopping`: whether the server takes nothing new."""
        self._take = take
        self._wants_key = wants_key
        self._stopping = stopping
        self._max_streams = min(MAX_STREAMS, limits.max_unread)  # connections that nobody else can have
        self.num_streams = 0
        self.routes: Final = [
            *(Route(path, self.page) for path in page.FILES),
            Route(STATE, self.state),
            Route(STREAM, _Streams(self), methods=["GET"]),
        ]

    async def page(self, http: Request) -> Response:
        """A file of the page. It is told whether to ask for a key, so that it need not try without."""
        path = http.url.path
        content = page.content(path)
        if self._wants_key:
            content = content.replace(b'data-key="none"', b'data-key="wanted"', 1)
        return Response(content, headers={**page.HEADERS, "Content-Type": page.FILES[path][1]})

    async def state(self, http: Request) -> Response:
        """The document, once."""
        require_own(http)
        return Response(await self._document(), media_type="application/json", headers={"Cache-Control": "no-store"})

    async def _document(self) -> bytes:
        now = self._take()
        if not isinstance(now, Snapshot):
            now = await now
        return json.dumps(document(now), allow_nan=False, separators=(",", ":")).encode()

    async def watch(self, http: Request, send: Send) -> None:
        """Answer one stream, until one of its ends. Raises ApiError if it does not begin."""
        require_own(http)
        if self._stopping():
            raise closing()
        if self.num_streams >= self._max_streams:
            raise _too_many(self._max_streams)
        loop = asyncio.get_running_loop()
        ends_s = min(loop.time() + LASTS_S, until_s(http))
        self.num_streams += 1
        leaving = asyncio.create_task(until_gone(http.receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
            while not (leaving.done() or self._stopping() or loop.time() >= ends_s or http.method == "HEAD"):
                event = b"data: " + await self._document() + b"\n\n"
                await send({"type": "http.response.body", "body": event, "more_body": True})  # waits until it is taken
                await asyncio.wait({leaving}, timeout=max(0.0, min(EVERY_S, ends_s - loop.time())))
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.num_streams -= 1
            leaving.cancel()


class _Streams:
    """The endpoint of streams: it sends for itself."""

    def __init__(self, board: Dashboard) -> None:
        self._board = board

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._board.watch(Request(scope, receive), send)


def require_own(http: Request) -> None:
    """Refuse what a page of another site sent. It could read nothing, but would be in the way."""
    if http.headers.get("sec-fetch-site") in ("cross-site", "same-site"):
        raise ApiError(403, "another site's page may not ask this", code="cross_site")


def _too_many(most: int) -> ApiError:
    return ApiError(
        429,
        f"{most} streams are open, and there are no more: ask for {STATE}, or try again later",
        kind="rate_limit_error",
        code="too_many_streams",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )
