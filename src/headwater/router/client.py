"""Who waits for a routed answer: what reaches a client over HTTP. Nothing is sent twice, and nothing uncertain.

Not here: when something is certain (`asking.py`, `router.py`).
"""

from typing import Final

from headwater.core.errors import needs_extra

with needs_extra("serve"):
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

_STREAM: Final = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))


class Client:
    """The client of one request."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun = False
        self.over = False  # all of it was sent: from then on, a server says that the client has left
        self._scope = scope
        self._receive = receive
        self._send = send

    async def whole(self, content: bytes) -> None:
        """The answer, in one: a JSON object."""
        self.begun = self.over = True
        await Response(content, media_type="application/json")(self._scope, self._receive, self._send)

    async def begin(self) -> None:
        """Events follow."""
        self.begun = True
        await self._send({"type": "http.response.start", "status": 200, "headers": list(_STREAM)})

    async def event(self, event: bytes) -> None:
        """One of them."""
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def end(self) -> None:
        """That was the last."""
        self.over = True
        await self._send({"type": "http.response.body", "body": b""})
