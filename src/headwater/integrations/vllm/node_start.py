"""From options to a node in front of a vLLM server: the socket, vLLM, the pool, heartbeats; until a signal ends it."""

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from headwater.build import open_pool
from headwater.config.checks import is_loopback
from headwater.config.serve import require_node_key
from headwater.core.errors import InvalidConfig, needs_extra
from headwater.disagg.heartbeat import Heartbeat, NodeLoad, Rates
from headwater.disagg.node_auth import Authenticator, node_called
from headwater.integrations.vllm.client import Facts, Vllm, VllmGone
from headwater.integrations.vllm.node import NodeOptions, VllmNode
from headwater.metrics import Metrics
from headwater.serve.connections import Connections
from headwater.serve.fleet_guard import FleetGuard
from headwater.serve.heartbeats import HeartbeatSender
from headwater.serve.limits import Limits, fit_connections, hosts_for
from headwater.serve.sockets import DoorServer, address, listen
from headwater.storage.base import Store

with needs_extra("serve"):
    from starlette.types import ASGIApp, Receive, Scope, Send

_LOOK_S: Final = 0.5  # between looks whether vLLM is there yet
_FIRST_S: Final = 120.0  # for vLLM's first answer


def run(options: NodeOptions, pool: str, *, say: Callable[[str], None]) -> None:
    """Answer routers until a signal ends it. Blocks. `pool` is the address of vLLM's. Raises InvalidConfig."""
    advertise = options.advertise
    require_node_key(options.node_key, options.host, *options.routers, *(() if advertise is None else (advertise,)))
    with listen(options.host, options.port) as listener, open_pool(pool) as store:
        named = (*options.allowed_hosts, *(() if advertise is None else (urlsplit(advertise).hostname or "",)))
        limits = Limits(
            request_timeout_s=options.request_timeout_s,
            max_connections=fit_connections(options.max_connections, other_files=options.max_requests),
            hosts=hosts_for(listener.getsockname()[0], key=None, allowed=named),
        )
        server = VllmServer(
            options,
            store,
            url=advertise or address(listener),
            limits=limits,
            announce=lambda facts: say(f"{facts.model} is a {options.role} node on {address(listener)}, before vLLM"),
        )
        server.serve_forever([listener])
        if server.failure is not None:
            raise server.failure


class _Later:
    """An application that is known when vLLM is; nobody is let in before."""

    def __init__(self) -> None:
        self.inner: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on."""
        if self.inner is not None:
            await self.inner(scope, receive, send)


class VllmServer(DoorServer):
    """Serves a node before vLLM. It begins when vLLM answers."""

    def __init__(
        self,
        options: NodeOptions,
        pool: Store,
        *,
        url: str,
        limits: Limits,
        announce: Callable[[Facts], None],
    ) -> None:
        """`url` is where routers find it, `limits` are the door's. `announce` is called when it answers."""
        self.failure: InvalidConfig | None = None
        self._options = options
        self._pool = pool
        self._url = url
        self._fleet = FleetGuard(
            Authenticator(options.node_key, node_called(options.node, url)), members_only=not is_loopback(options.host)
        )
        self._node: VllmNode | None = None
        self._vllm: Vllm | None = None
        self._beats: HeartbeatSender | None = None
        self._watching: asyncio.Task[None] | None = None
        self._app = _Later()
        self._metrics = Metrics()
        self._limits = limits
        self._say = announce
        super().__init__(self._app, Connections(limits, self._metrics), None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Find vLLM, join routers, begin to answer."""
        try:
            await self._begin()
        except (InvalidConfig, VllmGone) as error:
            self.failure = error if isinstance(error, InvalidConfig) else InvalidConfig(str(error))
            self.should_exit = True
            if self._vllm is not None:
                await self._vllm.aclose()
            return
        await super().startup(sockets)

    async def _begin(self) -> None:
        self._vllm = vllm = Vllm(self._options.vllm, self._options.vllm_key)
        options = self._options
        until_s = time.monotonic() + options.wait_s
        while not await vllm.is_well():
            if time.monotonic() > until_s or self.should_exit:
                raise VllmGone(
                    f"no vLLM answers at {options.vllm} after {options.wait_s:g} s: start it, or mend the address"
                )
            await asyncio.sleep(_LOOK_S)
        facts = await vllm.facts(_FIRST_S)
        self._node = node = VllmNode(
            options, facts, vllm, self._pool, fleet=self._fleet, metrics=self._metrics, limits=self._limits
        )
        self._app.inner = node.app()
        self._announce = lambda: self._say(facts)
        if options.routers:
            self._beats = HeartbeatSender(options.routers, self._beat, lease_s=options.lease_s, key=options.node_key)
            await self._beats.join()
        self._watching = asyncio.create_task(node.watch())

    def _beat(self, lease_s: float) -> Heartbeat:
        node = self._node
        if node is None:
            raise InvalidConfig("the node has not begun")
        facts, free = node.facts, node.num_free
        return Heartbeat(
            node=self._options.node,
            url=self._url,
            role=self._options.role,
            model=facts.model,
            identity=facts.identity,
            block_tokens=facts.block_tokens,
            layout=facts.layout,
            lease_s=lease_s,
            epoch=_STARTED_MS,
            max_model_len=facts.max_model_len,
            max_answers=self._options.max_requests,
            draining=node.stopping or node.lost,
            clock_s=time.time(),
            load=NodeLoad(running=node.num_requests, waiting=0, free_slots=free),
            rates=Rates(prefill_tokens_per_s=node.prefill_tokens_per_s),
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Say good-bye, then close connections."""
        if self._node is not None:
            await self._node.stop()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        if self._beats is not None:
            await self._beats.leave()
        if self.started:
            await super().shutdown(sockets)
        if self._node is not None:
            self._node.close()
        if self._vllm is not None:
            await self._vllm.aclose()


_STARTED_MS: Final = time.time_ns() // 1_000_000
