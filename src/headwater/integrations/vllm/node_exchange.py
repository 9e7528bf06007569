"""One request at a node in front of vLLM: a task that ends when its client leaves or its time is over.

Not here: what is asked of vLLM (`node.py`).
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from headwater.core.errors import needs_extra
from headwater.integrations.vllm.client import VllmGone
from headwater.integrations.vllm.node_reading import VllmWork
from headwater.serve import errors
from headwater.serve.errors import ApiError
from headwater.serve.middleware import request_id, until_gone, until_s

with needs_extra("serve"):
    import httpx2
    from starlette.requests import Request
    from starlette.types import Message, Receive, Scope, Send

if TYPE_CHECKING:
    from headwater.integrations.vllm.node import VllmNode

BODY_BYTES: Final = 24 << 20


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """A request, with its body read."""

    http: Request
    work: VllmWork
    send: "NodeSending"
    left_s: float

    @property
    def name(self) -> str:
        """Its one id."""
        return request_id(self.http.scope)


class NodeSending:
    """The way to whoever asked, and whether anything went there."""

    def __init__(self, send: Send) -> None:
        self.begun = False
        self._send = send

    async def __call__(self, message: Message) -> None:
        """Send."""
        self.begun = True
        await self._send(message)


Handle: TypeAlias = Callable[[NodeRequest], Coroutine[Any, Any, None]]


class Exchange:
    """An endpoint: every request is a task of its own, which ends when its client leaves or its time is over."""

    def __init__(self, node: "VllmNode", what: str, handle: Handle) -> None:
        self._node = node
        self._what = what  # reads its bodies
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        node, http, sending = self._node, Request(scope, receive), NodeSending(send)
        node.require_room()
        async with node.bodies.body_of(http, BODY_BYTES) as data:  # held for as long as vLLM may want it
            work = await node.readers.read(self._what, data, num_bytes=len(data), until_s=until_s(http))
            del data
            async with node.inside(http, work.num_answers) as left_s:
                await self._exchange(NodeRequest(http, work, sending, left_s), receive)

    async def _exchange(self, asked: NodeRequest, receive: Receive) -> None:
        work = asyncio.create_task(self._handle(asked))
        leaving = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait({work, leaving}, timeout=asked.left_s, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            elif not leaving.done():
                raise errors.too_late(asked.left_s)
        except (ApiError, VllmGone, httpx2.HTTPError) as error:
            if asked.send.begun:  # too late for a status: the connection is closed, and the router sees that
                raise VllmGone(str(error)) from error
            if isinstance(error, ApiError):
                raise
            raise ApiError(502, str(error), kind="server_error", code="upstream_failed") from error
        finally:
            for task in (work, leaving):
                task.cancel()
            await asyncio.wait({work, leaving})
