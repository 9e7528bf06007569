"""The router's server: sockets, uvicorn, and an end that leaves nothing behind.

A signal (SIGTERM, SIGINT) or `should_exit` ends it: no more requests are taken, those under way hear so and their
exchanges with nodes are closed, connections get a few seconds to close, then the router is closed.
"""

import socket
from collections.abc import Callable, Iterable

from headwater.router.app import create_router_app
from headwater.router.router import Router
from headwater.router.settings import RouterConfig
from headwater.serve.connections import Connections
from headwater.serve.limits import LOOPBACK, MAX_CONNECTIONS, NUM_BODIES, Limits, hosts_for
from headwater.serve.sockets import DoorServer


class RouterServer(DoorServer):
    """Serves a router, and closes it."""

    def __init__(
        self, router: Router, *, limits: Limits | None = None, announce: Callable[[], None] | None = None
    ) -> None:
        """`limits` of the door; None: as the router is configured. `announce` is called when it answers."""
        limits = limits or router_limits(router.config)
        app, self._face = create_router_app(router, limits)
        super().__init__(app, Connections(limits, router.metrics), announce)

    def start_readers(self) -> None:
        """Have what reads large bodies ready before the first one comes. Does not wait for it."""
        self._face.readers.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what is under way, then close connections."""
        self._face.stop()
        await super().shutdown(sockets)
        await self._face.router.aclose()
        self._face.readers.close()


def router_limits(
    config: RouterConfig,
    *,
    bound: str = LOOPBACK,
    max_connections: int | None = None,
    allowed_hosts: Iterable[str] = (),
) -> Limits:
    """The limits of a router that is bound to that address."""
    return Limits(
        request_timeout_s=config.request_timeout_s,
        max_connections=max_connections or MAX_CONNECTIONS,
        bodies_bytes=NUM_BODIES * config.max_body_bytes,
        hosts=hosts_for(bound, key=config.api_key, allowed=allowed_hosts),
    )
