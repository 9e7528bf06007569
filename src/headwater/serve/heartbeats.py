"""A node's heartbeats: tells its routers every third of its lease that it is here, how busy and how fast it is.

Each router has a task of its own in the server's loop, so one that hangs holds up neither the others nor an answer. A
heartbeat says everything, so a router that was started again knows the node with the next one. A router that is down is
told of in the log once, and tried again; one that refuses the node when it comes keeps it from starting, because two
configurations that do not fit are somebody's mistake. Where another node has its name, it waits for that one's lease to
end: it may have been the same node, on another machine.

Both ends prove that they hold the fleet's key (`disagg/node_auth.py`): what a router says that has not is not heard.

At the end a node says at once that it takes nothing new (`now`), later good-bye (`leave`). Both are bounded, and
neither raises.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from headwater.core.errors import InvalidConfig, needs_extra
from headwater.core.node_key import NodeKey
from headwater.disagg.headers import NODES
from headwater.disagg.heartbeat import NAME_TAKEN, Heartbeat
from headwater.disagg.node_auth import ROUTER, NotProven, Signer
from headwater.disagg.signing import SignedBy

with needs_extra("serve"):
    import httpx2

log = logging.getLogger("headwater")

Say = Callable[[float], Heartbeat]  # from a lease, what is to be said now

_TIMEOUT_S: Final = 2.0  # for one heartbeat, or a third of the lease if that is less
_DOWN: Final = "down"
_NAME_S: Final = 30.0  # at most, for a name that another has; or a lease
_RETRY_S: Final = 1.0  # at most, where a router was not there: it may be back


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why a router does not take this node."""

    why: str
    may_pass: bool = False  # by itself


class HeartbeatSender:
    """Heartbeats to some routers. For one event loop."""

    def __init__(self, routers: Sequence[str], say: Say, *, lease_s: float, key: NodeKey) -> None:
        """What is said is signed with `key`, and so must be what routers answer."""
        self._routers = tuple(routers)
        self._auth = {url: SignedBy(Signer(key, ROUTER)) for url in self._routers}
        self._say = say
        self._lease_s = lease_s
        self._headers = {"user-agent": "headwater-node", "connection": "close"}
        self._tasks: list[asyncio.Task[None]] = []
        self._joined: set[str] = set()  # routers that took this node in
        self._trouble: dict[str, str] = {}  # by router, what was last wrong with it
        self._client: httpx2.AsyncClient | None = None

    async def join(self) -> None:
        """Say it for the first time, and go on. Raises InvalidConfig if a router refuses this node."""
        self._client = httpx2.AsyncClient(
            headers=self._headers,
            limits=httpx2.Limits(max_keepalive_connections=0),  # a kept one may be dead without anybody knowing
            verify=any(url.startswith("https:") for url in self._routers),
            follow_redirects=False,
            trust_env=False,
        )
        until_s = asyncio.get_running_loop().time() + min(self._lease_s, _NAME_S)
        while refusals := [one for one in await self._all(self._lease_s) if one is not None]:
            if not all(one.may_pass for one in refusals) or asyncio.get_running_loop().time() >= until_s:
                await self.leave()
                raise InvalidConfig("; ".join(one.why for one in refusals))
            await asyncio.sleep(min(self._lease_s / 3, _RETRY_S))
        self._tasks = [asyncio.create_task(self._beat(url), name=f"heartbeats to {url}") for url in self._routers]

    async def now(self) -> None:
        """Say how it is at once: something has changed."""
        await self._all(self._lease_s)

    async def leave(self) -> None:
        """Say that this node leaves, and nothing more. Idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks = []
        if self._client is not None:
            await self._all(0.0)
            await self._client.aclose()
            self._client = None

    async def _beat(self, url: str) -> None:
        every_s = self._lease_s / 3
        while True:
            await asyncio.sleep(min(every_s, _RETRY_S) if url in self._trouble else every_s)
            await self._send(url, self._lease_s)

    async def _all(self, lease_s: float) -> list[_Refusal | None]:
        # Who never took this node in is told no good-bye: it may know another one by this name.
        told = [url for url in self._routers if lease_s > 0 or url in self._joined]
        return list(await asyncio.gather(*(self._send(url, lease_s) for url in told)))

    async def _send(self, url: str, lease_s: float) -> _Refusal | None:
        """Say it once; why this node was refused, if it was. Waits for a moment at most, and never raises."""
        if self._client is None:
            return None
        try:
            async with asyncio.timeout(min(_TIMEOUT_S, self._lease_s / 3)):
                document = self._say(lease_s).document()
                found = await self._client.post(url + NODES, json=document, auth=self._auth[url])
        except NotProven as error:
            if error.status >= 500:  # something before it says that it is down
                self._down(url, f"status {error.status}")
                return None
            why = f"the router at {url} is not trusted: {error}"
            self._tell(url, why, why)
            return _Refusal(why)
        except (TimeoutError, httpx2.HTTPError, httpx2.InvalidURL) as error:
            self._down(url, str(error) or type(error).__name__)
            return None
        except Exception:  # of ours; the next one may be fine
            log.exception("a heartbeat to %s", url)
            return None
        if found.status_code == 200:
            self._joined.add(url)
            if self._trouble.pop(url, None) is not None:
                log.info("the router at %s answers", url)
            return None
        code, message = _error(found)
        if found.status_code >= 500:  # it is about to end, mostly
            self._down(url, message)
            return None
        why = f"the router at {url} refuses this node: {message}"
        self._tell(url, why, why)
        return _Refusal(why, may_pass=code == NAME_TAKEN) if found.status_code in (400, 409) else None

    def _down(self, url: str, why: str) -> None:
        self._tell(url, _DOWN, f"the router at {url} does not answer: {why}")

    def _tell(self, url: str, kind: str, why: str) -> None:
        """In the log, unless it is what was wrong before."""
        if self._trouble.get(url) != kind:
            self._trouble[url] = kind
            log.warning("%s", why)


def _error(found: httpx2.Response) -> tuple[str, str]:
    """Code and message."""
    try:
        error: Any = found.json()["error"]
        return str(error["code"]), str(error["message"])[:500]
    except (ValueError, KeyError, TypeError):
        return "", f"status {found.status_code}"
