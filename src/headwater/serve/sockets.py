"""What both servers stand on: a listening socket, where it is found, a line to try, uvicorn. No engine, no torch."""

import json
import logging
import socket
from collections.abc import Sequence
from typing import Any, Final

from headwater.core.errors import InvalidConfig, NotInstalled

try:
    import uvicorn
except ModuleNotFoundError as error:
    raise NotInstalled(f"a server needs {error.name}: pip install 'headwater[serve]'") from error

log = logging.getLogger("headwater")

_GRACE_S: Final = 5  # for connections to close; then they are cut
_BACKLOG: Final = 1024


def setup(app: Any) -> uvicorn.Config:
    """How uvicorn serves an application here."""
    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_GRACE_S,
    )


def hasten(sockets: Sequence[socket.socket] | None) -> None:
    """Send small things at once; who is let in inherits it. Else events of a stream wait for 40 ms."""
    for one in sockets or ():
        if one.family in (socket.AF_INET, socket.AF_INET6):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


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


def curl(url: str, model: str | None = None, *, with_key: bool) -> str:
    """A line that tries a server."""
    named = {} if model is None else {"model": model}
    body = json.dumps({**named, "prompt": "Once upon a time", "max_tokens": 16})
    key = ' -H "Authorization: Bearer $HEADWATER_API_KEY"' if with_key else ""
    quoted = body.replace("'", "'\\''")
    return f"curl {url}/v1/completions -H 'Content-Type: application/json'{key} -d '{quoted}'"
