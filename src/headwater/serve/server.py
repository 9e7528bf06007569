"""A node's server: a socket, uvicorn, heartbeats to routers, and an end that leaves nothing behind.

A signal (SIGTERM, SIGINT) or `should_exit` ends it: routers hear that it drains, no more requests are taken, those
under way get `drain_s` to end and are then cancelled and hear so, routers hear that it leaves, connections get a few
seconds to close. Closing the engine and its stores is their owner's business, afterwards.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Final

from headwater.serve.app import create_app
from headwater.serve.connections import Connections
from headwater.serve.heartbeats import HeartbeatSender
from headwater.serve.service import Service
from headwater.serve.sockets import DoorServer

_LOOK_S: Final = 0.05  # between looks whether the last request has ended


class Server(DoorServer):
    """Serves a node, and tells its routers."""

    def __init__(
        self, service: Service, *, beats: HeartbeatSender | None = None, announce: Callable[[], None] | None = None
    ) -> None:
        """`announce` is called when the server answers."""
        super().__init__(create_app(service), Connections(service.limits, service.running.metrics), announce)
        self._service = service
        self._beats = beats

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer. Raises InvalidConfig if a router refuses this node."""
        if self._beats is not None:  # before: a node that is refused never answers. Who asks meanwhile waits a moment
            await self._beats.join()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let what is under way end, or cancel it; then close connections."""
        self._service.refuse()
        if self._beats is not None:
            await self._beats.now()
        await self._drain()
        self._service.stop()
        if self._beats is not None:
            await self._beats.leave()
        await super().shutdown(sockets)
        self._service.readers.close()

    async def _drain(self) -> None:
        until_s = asyncio.get_running_loop().time() + self._service.config.drain_s
        while self._service.num_inside and asyncio.get_running_loop().time() < until_s and not self.force_exit:
            await asyncio.sleep(_LOOK_S)
