"""Requests that are signed with the fleet's key, over httpx: heartbeats, prompts, probes, and what operators ask.

`SignedBy` is what a client is given as its `auth`: says hello where that is needed, signs, checks the answer's proof,
and tries once more where the other has forgotten us (it was started again, or it is long ago).

A `Lifeline` is for prompts, which must not reach a stranger. Somebody may take over the address of a node that died.
So there is one idle connection to the process that proved itself: while that is open, that process lives, and while it
lives it is the one that listens there. It costs one system call to see that nothing has closed it.
"""

import asyncio
import functools
import select
import ssl
from collections.abc import Generator
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

from headwater.core.errors import needs_extra
from headwater.core.node_key import NodeKey
from headwater.disagg.node_auth import AUTH, HELLO, HELLO_PATH, NotProven, Signer

with needs_extra("serve"):
    import httpx2

_MAX_HEAD_BYTES: Final = 16 << 10
_CLOSED: Final = select.POLLIN | select.POLLRDHUP | select.POLLHUP | select.POLLERR


class SignedBy(httpx2.Auth):
    """Signs requests to one other."""

    requires_request_body = True

    def __init__(self, signer: Signer) -> None:
        self.signer: Final = signer

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        """Sign a request. Raises NotProven, also of an answer that anybody could have given."""
        target = request.url.raw_path.decode("ascii")
        says_hello = self.signer.challenge is None
        while True:
            if says_hello:
                yield from self._say_hello(request)
            nonce, request.headers[AUTH] = self.signer.sign(method=request.method, target=target, body=request.content)
            response = yield request
            if says_hello or response.status_code != 401:
                break
            says_hello = True  # it does not know us any more, or never did
        self.signer.check(nonce, response.status_code, response.headers)

    def _say_hello(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        nonce, header = self.signer.hello()
        hello = httpx2.Request(
            "GET",
            request.url.copy_with(raw_path=HELLO_PATH.encode()),
            headers={HELLO: header, "host": request.headers["host"], "connection": "close"},
            extensions=request.extensions,
        )
        response = yield hello
        self.signer.check(nonce, response.status_code, response.headers)


class Peer:
    """A node, as a router knows it: whether it has proven itself, and is still the same."""

    def __init__(self, key: NodeKey, who: str, url: str) -> None:
        """`who` must answer at `url`."""
        self.auth: Final = SignedBy(Signer(key, who))
        self._signer = self.auth.signer
        self.url: Final = url
        self._lifeline: asyncio.StreamWriter | None = None
        self._closed = False

    @property
    def proven(self) -> bool:
        """Whether the process that proved itself is certain to be still there. A system call."""
        line = self._lifeline
        if line is None or self._signer.challenge is None or line.is_closing():
            return False
        poll = select.poll()
        poll.register(line.get_extra_info("socket").fileno(), _CLOSED)
        return not poll.poll(0)

    def close(self) -> None:
        """Let go of it, for good. Idempotent."""
        self._closed = True
        self._hold(None)

    def _hold(self, line: asyncio.StreamWriter | None) -> None:
        if self._lifeline is not None:
            self._lifeline.close()
        if line is not None and self._closed:
            line.close()
            line = None
        self._lifeline = line

    async def prove(self, *, connect_s: float) -> None:
        """Have it prove that it holds the key. Raises NotProven, OSError; waits for as long as the caller does.

        Whoever does not is trusted no more, whatever was proven before.
        """
        line: asyncio.StreamWriter | None = None
        try:
            line = await self._say_hello(connect_s)
        finally:
            self._hold(line)

    async def _say_hello(self, connect_s: float) -> asyncio.StreamWriter:
        parts = urlsplit(self.url)
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        async with asyncio.timeout(connect_s):  # a TimeoutError is an OSError
            reader, writer = await asyncio.open_connection(
                parts.hostname, port, ssl=_trusted() if secure else None, limit=_MAX_HEAD_BYTES
            )
        try:
            nonce, header = self._signer.hello()
            writer.write(f"GET {HELLO_PATH} HTTP/1.1\r\nhost: {parts.netloc}\r\n{HELLO}: {header}\r\n\r\n".encode())
            status, headers = await _read_head(reader)
            self._signer.check(nonce, status, headers)
        except BaseException:
            writer.close()
            raise
        return writer


@functools.cache
def _trusted() -> ssl.SSLContext:
    """What httpx trusts; reading it takes a while."""
    return httpx2.create_ssl_context()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """The head of an answer without a body. Raises NotProven for anything else."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise NotProven("who answers there does not speak as a node does") from error
    line, *lines = head.decode("latin-1").split("\r\n")  # any bytes are text so: what is none of ours proves nothing
    status = 0
    with suppress(ValueError, IndexError):
        status = int(line.split(" ")[1])
    fields = (one.partition(":") for one in lines)
    return status, {name.lower(): value.strip() for name, _, value in fields}
