"""`headwater dashboard`: the page for a server that has metrics and no page, such as vLLM with our connector.

It asks that server's `/metrics` when somebody looks, and at no other time; several who look share an answer. Counters
have their place in the state document; what such an endpoint does not have (requests in flight, bytes in stores, paces)
is None there. Nothing can be revived from here.

Not here: the page and its endpoints (`dashboard.py`).
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from headwater.core.breaker import BreakerState
from headwater.core.errors import needs_extra
from headwater.core.node_key import NodeKey
from headwater.disagg.node_auth import ROUTER, Authenticator
from headwater.metrics import FAMILIES, PREFIX, Metrics, Notice
from headwater.serve.connections import Connections
from headwater.serve.dashboard import PATHS, Dashboard
from headwater.serve.fleet_guard import FleetGuard
from headwater.serve.limits import Limits
from headwater.serve.middleware import application
from headwater.serve.sockets import DoorServer
from headwater.serve.state import Snapshot, TierFacts

with needs_extra("serve"):
    import httpx2
    from prometheus_client.parser import text_string_to_metric_families

_ORDER: Final = ("device", "host", "disk", "pool")
_MOST_BYTES: Final = 16 << 20  # of an answer
_TIMEOUT_S: Final = 5.0
_FRESH_S: Final = 0.5
_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"

Found = dict[str, dict[tuple[str, ...], float]]


def read_metrics(text: str) -> tuple[Found, dict[str, float], str | None]:
    """Our families by label values, sums of all others, and the model's name, from Prometheus' text. Raises ValueError.

    vLLM puts its own labels before ours, and calls one of ours `headwater_...` if it has the same: engines are summed.
    """
    ours: Found = {}
    others: dict[str, float] = {}
    model = None
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            known = FAMILIES.get(sample.name.removeprefix(PREFIX)) if sample.name.startswith(PREFIX) else None
            model = sample.labels.get("model_name", model)
            if known is None:
                others[sample.name] = others.get(sample.name, 0.0) + sample.value
                continue
            labels = tuple(sample.labels.get(PREFIX + one, sample.labels.get(one, "")) for one in known.labels)
            series = ours.setdefault(known.name, {})
            series[labels] = series.get(labels, 0.0) + sample.value
    return ours, others, model


def metrics_snapshot(text: str, *, name: str, now_s: float) -> Snapshot:
    """What an endpoint's text says. Raises ValueError if it is none."""
    ours, others, model = read_metrics(text)
    families = [ours.get(name, {}) for name in ("hit_tokens_total", "moved_bytes_total", "breaker_state")]
    names = {of[0] for family in families for of in family}
    tiers = [*(one for one in _ORDER if one in names), *sorted(names.difference(_ORDER))]
    states = {of[0]: BreakerState(int(value)).name.lower() for of, value in ours.get("breaker_state", {}).items()}
    engine = {"running": others.get(_RUNNING), "waiting": others.get(_WAITING), "free": None}
    rates = dict.fromkeys(("prefill_tokens_per_s", "decode_tokens_per_s", "pool_tokens_per_s"))
    return Snapshot(
        kind="metrics",
        name=name,
        model=model,
        role=None,
        ready=True,
        now_s=now_s,
        numbers=ours,
        tiers=[TierFacts(name=one, state=states.get(one)) for one in tiers],
        engine={**engine, **rates} if _RUNNING in others else None,
    )


class MetricsReader:
    """Asks an endpoint for its metrics. For one event loop."""

    def __init__(self, url: str, *, key: str | None = None) -> None:
        """`key`: what the endpoint wants to be shown."""
        self._url = url
        self._name = urlsplit(url).netloc
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._lock = asyncio.Lock()
        self._last: tuple[float, Snapshot] | None = None

    async def take(self) -> Snapshot:
        """How things stand there, or that nobody answers."""
        loop = asyncio.get_running_loop()
        async with self._lock:
            if self._last is None or loop.time() - self._last[0] > _FRESH_S:
                self._last = (loop.time(), await self._ask())
            return self._last[1]

    async def _ask(self) -> Snapshot:
        now_s = time.time()
        try:
            text = await self._text()
            return await asyncio.to_thread(metrics_snapshot, text, name=self._name, now_s=now_s)
        except (httpx2.HTTPError, TimeoutError, ValueError, KeyError) as error:
            why = str(error) or type(error).__name__
            return Snapshot(
                kind="metrics",
                name=self._name,
                model=None,
                role=None,
                ready=False,
                now_s=now_s,
                numbers={},
                events=[Notice("no_metrics", {"url": self._url, "why": why}, 1, now_s)],
            )

    async def _text(self) -> str:
        """All of it. Raises ValueError for what is no such page, or too large."""
        async with (
            asyncio.timeout(_TIMEOUT_S),
            httpx2.AsyncClient(timeout=_TIMEOUT_S, trust_env=False) as client,
            client.stream("GET", f"{self._url}/metrics", headers=self._headers) as answer,
        ):
            if answer.status_code != 200:
                raise ValueError(f"/metrics answers {answer.status_code}")
            found = bytearray()
            async for piece in answer.aiter_bytes():
                found += piece
                if len(found) > _MOST_BYTES:
                    raise ValueError(f"/metrics has more than {_MOST_BYTES} bytes")
            return found.decode()


class MetricsBoard(DoorServer):
    """Serves the page for an endpoint."""

    def __init__(
        self, reader: MetricsReader, *, limits: Limits, api_key: str | None, announce: Callable[[], None]
    ) -> None:
        """`api_key`: who looks must show it; None: nobody must. `announce` is called when it answers."""
        metrics = Metrics()
        board = Dashboard(reader.take, limits=limits, stopping=lambda: self.should_exit, wants_key=api_key is not None)
        app = application(
            board.routes,
            limits=limits,
            metrics=metrics,
            paths=PATHS,
            api_key=api_key,
            fleet=FleetGuard(Authenticator(NodeKey.random(), ROUTER)),  # nobody has it: there is no fleet here
        )
        super().__init__(app, Connections(limits, metrics), announce)
