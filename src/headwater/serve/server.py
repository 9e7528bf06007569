"""The server: a socket, uvicorn, and an end that leaves nothing behind.

A signal (SIGTERM, SIGINT) or `should_exit` ends it: no more requests are taken, those under way are cancelled and hear
so, connections get a few seconds to close. Closing the engine and its stores is their owner's business, afterwards.
"""

import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from headwater.core.errors import InvalidConfig, NotInstalled
from headwater.serve.app import create_app
from headwater.serve.service import Service

try:
    import uvicorn
except ModuleNotFoundError as error:
    raise NotInstalled(f"the server needs {error.name}: pip install 'headwater[serve]'") from error

log = logging.getLogger("headwater")

_GRACE_S: Final = 5  # for connections to close; then they are cut
_BACKLOG: Final = 1024


class Server(uvicorn.Server):
    """Serves one application on sockets it is given. `run` blocks until a signal or `should_exit`."""

    def __init__(self, service: Service, *, announce: Callable[[], None] | None = None) -> None:
        """`announce` is called when the server answers."""
        config = uvicorn.Config(
            create_app(service),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
        super().__init__(config)
        self._service = service
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer."""
        await super().startup(sockets)
        if self._announce is not None:
            self._announce()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Cancel what is under way, then close connections."""
        self._service.stop()
        await super().shutdown(sockets)

    def serve_forever(self, sockets: Sequence[socket.socket]) -> None:
        """Run, and take the signal that ended it for what it is: a way to end."""
        with suppress(KeyboardInterrupt):  # uvicorn raises the signal again when it is done
            self.run(list(sockets))


def listen(host: str, port: int, *, or_any: bool = False) -> socket.socket:
    """A socket that listens; with `or_any` on a free port if that one is taken. Raises InvalidConfig."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InvalidConfig(f"{host!r} is no address to listen on: {error.strerror}") from error
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
