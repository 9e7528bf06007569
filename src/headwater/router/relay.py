"""One exchange with one node over HTTP: sent, watched, judged. The answer, or one `Unanswered` that says why not.

A node that says nothing is asked, after `silence_s`, whether it still works on the attempt (`GET /pd/attempts/{id}`):
one that computes for minutes says so and is waited for, one that hangs costs `silence_s + probe_s` and no more. The
request's deadline is the caller's (`asyncio.timeout`): whatever ends an exchange closes its connection, and that is
how a node hears that nobody waits any more. Each exchange has a connection of its own: a kept one may be dead without
anybody knowing, and what that saves is nothing beside a prompt.

Not here: which node, whether to try another (`router.py`), what reaches the client.

Invariants: nothing of a request is sent to a process that has not proven to hold the fleet's key, and no answer counts
whose head does not prove it again (`signing.py`); every failure of a node is an `Unanswered`, nothing else escapes but
the caller's own errors; an answer is held up to `max_answer_bytes`, an event up to MAX_EVENT_BYTES; nothing is read
from the environment.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

from headwater.core.errors import needs_extra
from headwater.core.node_key import NodeKey
from headwater.disagg.events import EventReader, NotEvents
from headwater.disagg.headers import ATTEMPT, ATTEMPTS, REQUEST_ID, TIMEOUT, TRACEPARENT
from headwater.disagg.node_auth import NotProven, node_called
from headwater.disagg.signing import Peer
from headwater.router.trouble import (
    NO_ROOM,
    Trouble,
    Unanswered,
    judge,
    no_connection,
    object_in,
    too_large,
    untrusted,
    words,
)

with needs_extra("serve"):
    import httpx2


_MAX_SMALL_BYTES: Final = 64 << 10
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_TIDY_S: Final = 1.0  # for the end of a stream whose last event has come


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCall:
    """What is sent where."""

    node: str
    url: str
    path: str
    content: bytes
    request_id: str
    attempt: str  # a name of its own for each attempt: a client may send the same id twice
    timeout_s: float  # left until the request's deadline
    stream: bool = False  # events are wanted
    traceparent: str = ""  # of the trace that this is part of


class RelayedAnswer:
    """An answer that has begun, with status 200."""

    def __init__(self, call: NodeCall, response: httpx2.Response, watch: "_Watch", *, limit_bytes: int) -> None:
        self._node_call = call
        self._response = response
        self._watch = watch
        self._limit_bytes = limit_bytes
        self._chunks = response.aiter_raw()

    def seconds(self, header: str) -> float | None:
        """A time that the node measured, from a header; None if it says none."""
        with suppress(ValueError):
            value = float(self._response.headers.get(header, ""))
            return value if 0 <= value < 1e6 else None
        return None

    async def body(self, *, asked_for: bool = False) -> bytes:
        """The bytes of the answer, all of them. Raises Unanswered.

        `asked_for`: its size is the client's choice. One that is too large is then no fault of the node.
        """
        body = bytearray()
        while (chunk := await self._chunk()) is not None:
            body += chunk
            if len(body) > self._limit_bytes:
                raise (
                    too_large(self._limit_bytes)
                    if asked_for
                    else Unanswered(Trouble.FAILED, f"{self._node_call.node} sent more than {self._limit_bytes} bytes")
                )
        return bytes(body)

    async def events(self) -> AsyncIterator[tuple[bytes, dict[str, Any]]]:
        """The events of a stream, each whole: its bytes, and what it says; `[DONE]` says {}. Raises Unanswered.

        Ends after `[DONE]`, or after an event that says `error`. A stream that ends before is a broken one.
        """
        if not self._response.headers.get("content-type", "").startswith("text/event-stream"):
            raise Unanswered(Trouble.FAILED, f"{self._node_call.node} was asked for a stream and sent something else")
        reader = EventReader()
        while (chunk := await self._chunk()) is not None:
            try:
                events = reader.feed(chunk)
            except NotEvents as error:
                raise Unanswered(Trouble.FAILED, f"{self._node_call.node} sent no stream: {error}") from error
            for event, said in events:
                yield event, said
                if not said or "error" in said:
                    return
        raise Unanswered(Trouble.BROKEN, f"the stream of {self._node_call.node} ended in the middle")

    async def tidy(self) -> None:
        """Let a stream end by itself after its last event, so that its node does not take us for somebody who left."""
        with suppress(TimeoutError, httpx2.HTTPError):
            async with asyncio.timeout(_TIDY_S):
                while await self._chunk() is not None:
                    pass

    async def _chunk(self) -> bytes | None:
        with self._watch:
            return await anext(self._chunks, None)


class Relay:
    """The way to the nodes. For one event loop; `aclose` it there."""

    def __init__(
        self,
        *,
        connect_s: float,
        silence_s: float,
        probe_s: float,
        max_answer_bytes: int,
        node_key: NodeKey,
    ) -> None:
        """What is sent is signed with `node_key`."""
        self.silence_s: Final = silence_s  # a node may say nothing for so long before it is asked, and
        self.probe_s: Final = probe_s  # then has so long to answer
        self._limit_bytes = max_answer_bytes
        self._connect_s = connect_s
        self._headers = {"accept-encoding": "identity", "user-agent": "headwater-router", "connection": "close"}
        self._key = node_key
        self._clients: dict[bool, httpx2.AsyncClient] = {}
        self._peers: dict[str, Peer] = {}  # by name

    async def aclose(self) -> None:
        """Close everything. Idempotent."""
        for peer in self._peers.values():
            peer.close()
        for client in self._clients.values():
            await client.aclose()

    def _client(self, url: str) -> httpx2.AsyncClient:
        secure = url.startswith("https:")
        if secure not in self._clients:
            self._clients[secure] = httpx2.AsyncClient(
                headers=self._headers,
                timeout=httpx2.Timeout(None, connect=self._connect_s),
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
                verify=secure,  # reading the machine's certificates takes a while, and is for nothing without TLS
                follow_redirects=False,
                trust_env=False,
            )
        return self._clients[secure]

    @asynccontextmanager
    async def exchange(self, call: NodeCall) -> AsyncIterator[RelayedAnswer]:
        """Send, and wait for an answer that begins with 200. Raises Unanswered, now or while it is read."""
        watch: _Watch | None = None
        try:
            async with asyncio.timeout(None) as alarm:
                async with _Watch(self, call, alarm) as watch:
                    with watch:
                        peer, client = self._peer(call.node, call.url), self._client(call.url)
                        if not peer.proven:
                            await self._prove(call.node, peer)
                        response = await client.send(_request(client, call), stream=True, auth=peer.auth)
                    try:
                        if response.status_code != 200:
                            with watch:
                                raise judge(call.node, response.status_code, await _read_small(response))
                        yield RelayedAnswer(call, response, watch, limit_bytes=self._limit_bytes)
                    finally:
                        await response.aclose()
        except TimeoutError:
            if watch is None or watch.why is None:
                raise  # the caller's own
            raise Unanswered(Trouble.HUNG, f"{call.node} {watch.why}") from None
        except NotProven as error:
            raise untrusted(call.node, error) from error
        except httpx2.ConnectTimeout as error:
            raise no_connection(call.node, self._connect_s) from error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise Unanswered(Trouble.BROKEN, f"the connection to {call.node} failed: {words(error)}") from error

    # --- whether a node is one ----------------------------------------------------------------------------------------

    async def greet(self, node: str, url: str) -> str | None:
        """Have a node prove that it holds the key, ahead of its next request; why it is not trusted, or "": it did.

        Waits `probe_s` at most. None: it did not answer, or has no room, and is asked again when it is needed.
        """
        with suppress(TimeoutError, OSError, UnicodeError):
            async with asyncio.timeout(self.probe_s):
                try:
                    await self._peer(node, url).prove(connect_s=self._connect_s)
                except NotProven as error:
                    return None if error.status in NO_ROOM else f"{node} is not trusted: {error}"
                return ""
        return None

    def forget(self, node: str) -> None:
        """It has gone: let go of the connection to it."""
        peer = self._peers.pop(node, None)
        if peer is not None:
            peer.close()

    def _peer(self, node: str, url: str) -> Peer:
        peer = self._peers.get(node)
        if peer is None or peer.url != url:
            self.forget(node)
            peer = self._peers[node] = Peer(self._key, node_called(node, url), url)
        return peer

    async def _prove(self, node: str, peer: Peer) -> None:
        try:
            await peer.prove(connect_s=self._connect_s)
        except NotProven as error:
            raise untrusted(node, error) from error
        except TimeoutError as error:
            raise no_connection(node, self._connect_s) from error
        except (OSError, UnicodeError) as error:  # the latter for a name that cannot be looked up
            raise Unanswered(Trouble.BROKEN, f"the connection to {node} failed: {words(error)}") from error

    # --- whether it still works ---------------------------------------------------------------------------------------

    async def probe(self, call: NodeCall) -> str | None:
        """Ask a node that says nothing; None if it still works on this, else what is wrong. Waits `probe_s` at most."""
        silent = f"said nothing for {self.silence_s:g} s"
        try:
            async with asyncio.timeout(self.probe_s):
                auth = self._peer(call.node, call.url).auth
                async with self._client(call.url).stream(
                    "GET", f"{call.url}{ATTEMPTS}/{call.attempt}", auth=auth
                ) as found:
                    said = await _read_small(found)
        except NotProven as error:
            return f"{silent}, and is not trusted: {error}"
        except Exception:  # noqa: BLE001  whatever it is: a watch that ended with it would let its request wait
            return f"{silent}, nor when it was asked"
        if found.status_code != 200:
            return f"{silent}, and does not know this request"
        idle = (said or {}).get("idle_s")
        if not isinstance(idle, int | float) or not 0 <= idle <= self.silence_s:
            return f"{silent}, and has not computed anything for {idle!r:.20} s"
        return None


class _Watch:
    """Sounds the alarm when a node is silent and cannot say why. As a context: while we listen to the node."""

    def __init__(self, relay: Relay, call: NodeCall, alarm: asyncio.Timeout) -> None:
        self.why: str | None = None
        self._relay = relay
        self._node_call = call
        self._alarm = alarm
        self._loop = asyncio.get_running_loop()
        self._since_s: float | None = None  # when we began to wait for its next word; None: it waits for us
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        self._since_s = self._loop.time()

    def __exit__(self, *raised: object) -> None:
        self._since_s = None

    async def __aenter__(self) -> "_Watch":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *raised: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        silence_s, asked_s = self._relay.silence_s, 0.0
        while True:
            since_s = self._since_s
            quiet_s = 0.0 if since_s is None else self._loop.time() - max(since_s, asked_s)
            if quiet_s < silence_s:
                await asyncio.sleep(silence_s - quiet_s)
                continue
            why = await self._relay.probe(self._node_call)
            asked_s = self._loop.time()
            if why is not None and self._since_s == since_s:  # not a word in between
                self.why = why
                self._alarm.reschedule(asked_s)
                return


def _request(client: httpx2.AsyncClient, call: NodeCall) -> httpx2.Request:
    headers = {
        "content-type": "application/json",
        "accept": "text/event-stream" if call.stream else "application/json",
        REQUEST_ID: call.request_id,
        ATTEMPT: call.attempt,
        TIMEOUT: f"{max(call.timeout_s, 0.0):.3f}",
    }
    if _TRACEPARENT.fullmatch(call.traceparent):
        headers[TRACEPARENT] = call.traceparent
    return client.build_request("POST", call.url + call.path, content=call.content, headers=headers)


async def _read_small(response: httpx2.Response) -> dict[str, Any] | None:
    """What a node says when it answers nothing. None: it is no JSON, or more than that."""
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > _MAX_SMALL_BYTES:
            return None
    return object_in(bytes(body))
