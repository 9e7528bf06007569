"""What both servers stand on: a listening socket, where it is found, a line to try, uvicorn. No engine, no torch."""

import asyncio
import gc
import json
import logging
import math
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from headwater.core.errors import InvalidConfig, needs_extra
from headwater.serve.connection import Connection
from headwater.serve.connections import Connections

with needs_extra("serve"):
    import uvicorn

log = logging.getLogger("headwater")

_GRACE_S: Final = 5  # for connections to close; then they are cut
_BACKLOG: Final = 1024  # that wait to be let in
_BATCH: Final = 32  # that are let in at a time. Without descriptors, asyncio complains as often, once a second
_UNSENT_BYTES: Final = 128 << 10  # of an answer that the kernel takes and cannot send: the rest stays ours, and counts


def setup(app: Any, connections: Connections) -> uvicorn.Config:
    """How uvicorn serves an application here."""

    class Here(Connection):
        door = connections

    return uvicorn.Config(
        app,
        http=Here,
        backlog=_BATCH,
        timeout_keep_alive=math.ceil(connections.limits.idle_timeout_s) + 1,  # `Connection` is faster
        ws="none",
        lifespan="off",
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_GRACE_S,
    )


class DoorServer(uvicorn.Server):
    """Serves one application on sockets it is given. `run` blocks until a signal or `should_exit`."""

    def __init__(self, app: Any, connections: Connections, announce: Callable[[], None] | None) -> None:
        """`announce` is called when the server answers."""
        super().__init__(setup(app, connections))
        self._connections = connections
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer."""
        await super().startup(sockets)
        receive_on(sockets, self._connections)
        if self._announce is not None:
            self._announce()

    def serve_forever(self, sockets: Sequence[socket.socket]) -> None:
        """Run, and take the signal that ended it for what it is: a way to end."""
        with suppress(KeyboardInterrupt):  # uvicorn raises the signal again when it is done
            self.run(list(sockets))


def receive_on(sockets: Sequence[socket.socket] | None, connections: Connections) -> None:
    """Once uvicorn has begun: how connections are let in, and what those who are let in inherit."""
    asyncio.get_running_loop().set_exception_handler(connections.on_trouble)
    for one in sockets or ():
        one.listen(_BACKLOG)  # to asyncio it is the batch
        if one.family in (socket.AF_INET, socket.AF_INET6):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else events of a stream wait for 40 ms
            if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)


def listen(host: str, port: int, *, or_any: bool = False) -> socket.socket:
    """A socket that listens; with `or_any` on a free port if that one is taken. Raises InvalidConfig."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:  # the latter for a name that cannot be looked up
        raise InvalidConfig(f"{host!r} is no address to listen on: {error}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)  # now: two that are bound and do not listen may have the same port
    except OSError as error:
        listener.close()
        if or_any:
            log.info("port %d of %s is taken: using another", port, host)
            return listen(host, 0)
        raise InvalidConfig(f"cannot listen on port {port} of {host}: {error.strerror}") from error
    return listener


def address(listener: socket.socket) -> str:
    """Where clients on this machine find it, as a URL."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  what is bound is not said here
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def curl(url: str, model: str | None = None, *, with_key: bool) -> str:
    """A line that tries a server."""
    named = {} if model is None else {"model": model}
    body = json.dumps({**named, "prompt": "Once upon a time", "max_tokens": 16})
    key = ' -H "Authorization: Bearer $HEADWATER_API_KEY"' if with_key else ""
    quoted = body.replace("'", "'\\''")
    return f"curl {url}/v1/completions -H 'Content-Type: application/json'{key} -d '{quoted}'"


def keep_what_is_here() -> None:
    """Take all objects there are now out of the garbage collector's sight. Blocks, for a fraction of a second.

    What a program has when it begins to answer, it has until it ends. With torch loaded that is 218,000 objects. A full
    collection, which comes when enough was allocated, looks at all: 0.13 s in which no thread of the program goes on,
    in the middle of somebody's answer. Without them: 4 ms.
    """
    gc.collect()
    gc.freeze()
