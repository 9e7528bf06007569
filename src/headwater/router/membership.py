"""Who is in a router's fleet: heartbeats taken in, nodes greeted, drained, and forgotten when their lease is over.

`nodes.py` has the table of who is there; here are the clock, the log and the connections that go with it. Not here:
who is asked (`router.py`).
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlsplit

from headwater.config.checks import is_loopback
from headwater.core.node_key import NodeKey
from headwater.disagg.heartbeat import Heartbeat
from headwater.metrics import Metrics
from headwater.router.nodes import HeartbeatKind, NodeRefused, NodeTable
from headwater.router.relay import Relay

log: Final = logging.getLogger("headwater")

_CLOCKS_S: Final = 10.0  # that a node's clock may differ, before that is told


class Membership:
    """Keeps a table of nodes current. For one event loop; `aclose` it there."""

    def __init__(
        self, nodes: NodeTable, relay: Relay, metrics: Metrics, *, node_key: NodeKey, changed: Callable[[], None]
    ) -> None:
        """`changed` is called when there may be room that was not there before."""
        self._nodes = nodes
        self._relay = relay
        self._metrics = metrics
        self._node_key = node_key
        self._changed = changed
        self._greetings: set[asyncio.Task[None]] = set()

    async def aclose(self) -> None:
        """Greet nobody any more. Idempotent."""
        for task in self._greetings:
            task.cancel()
        if self._greetings:
            await asyncio.wait(self._greetings)

    def heard(self, heartbeat: Heartbeat) -> dict[str, Any]:
        """Take in a heartbeat; what the node is told. Raises NodeRefused."""
        try:
            self._require_reach(heartbeat)
            came = self._nodes.heard(heartbeat, self.sweep())
        except NodeRefused as error:
            self._metrics.event("node_refused", node=heartbeat.node, why=str(error))
            raise
        if came is not HeartbeatKind.KNOWN:
            self._metrics.event(
                "node_joined" if came is HeartbeatKind.NEW else "node_left", node=heartbeat.node, role=heartbeat.role
            )
        if came is HeartbeatKind.NEW:
            self._compare_clocks(heartbeat)
        if self._nodes.get(heartbeat.node) is None:
            self._relay.forget(heartbeat.node)
        else:
            task = asyncio.create_task(self._greet(heartbeat), name=f"greeting {heartbeat.node}")
            self._greetings.add(task)
            task.add_done_callback(self._greetings.discard)
        self._changed()
        entry = self._nodes.get(heartbeat.node)
        return {"node": heartbeat.node, "came": came, "draining": entry is not None and entry.draining}

    def _require_reach(self, heartbeat: Heartbeat) -> None:
        if self._node_key.own and not is_loopback(urlsplit(heartbeat.url).hostname or ""):
            raise NodeRefused(
                f"this router was given no node key, so it takes nodes on loopback only, and none at {heartbeat.url}: "
                "start all of them with --node-key-file"
            )

    def _compare_clocks(self, heartbeat: Heartbeat) -> None:
        """Tickets expire by the wall clock, so who reads them must have the same time as who made them, or nearly."""
        ahead_s = 0.0 if heartbeat.clock_s is None else heartbeat.clock_s - time.time()
        if abs(ahead_s) > _CLOCKS_S:
            how = "ahead of" if ahead_s > 0 else "behind"
            log.warning("the clock of %s is %.0f s %s this router's: set both", heartbeat.node, abs(ahead_s), how)
            self._metrics.event("clock_differs", node=heartbeat.node, ahead_s=ahead_s)

    async def _greet(self, heartbeat: Heartbeat) -> None:
        """Have a node prove itself again before anybody waits for that."""
        entry = self._nodes.get(heartbeat.node)
        if entry is None or entry.heartbeat.url != heartbeat.url:
            return
        why = await self._relay.greet(heartbeat.node, heartbeat.url)
        if why is None:  # it says nothing either way
            return
        if why and not entry.doubted:  # once
            log.warning("%s", why)
            self._metrics.event("node_unproven", node=heartbeat.node, why=why)
        entry.doubted = bool(why)

    def drain(self, node: str, *, draining: bool) -> dict[str, Any]:
        """Give a node nothing new, or something again. Raises InvalidInput if it is not there."""
        self.sweep()
        entry = self._nodes.drain(node, draining=draining)
        self._metrics.event("node_drained" if draining else "node_taken_back", node=node)
        self._changed()
        return {"node": node, "draining": entry.draining, "requests": entry.num_running}

    def sweep(self) -> float:
        """The time, with everybody gone whose lease ran out before it."""
        now_s = asyncio.get_running_loop().time()
        for node in self._nodes.expire(now_s):
            self._metrics.event("node_expired", node=node)
            self._relay.forget(node)
        return now_s
