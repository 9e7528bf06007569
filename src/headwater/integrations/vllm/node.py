"""A vLLM server as a node of our router: a small server beside it that speaks the router's protocol for it.

    router --/pd/prefill--> this --/v1/..., one token--> vLLM (kv_producer)      then the pool is asked for every page
    router --/pd/decode --> this --/v1/..., as it is---> vLLM (kv_consumer)      which loads what the pool has

vLLM runs with HeadwaterConnector and the same pool. Its answer to a prefill says which pages the prompt has
(`kv_transfer_params`); the ticket leaves when the pool was seen to hold all of them (rule 7), and not at all if it does
not by the deadline. The last, partial block is not handed over: vLLM saves whole blocks, so decode computes the rest of
the prompt, and the first token too. What decode cannot load, vLLM computes: so its answer is always a whole one.

Not here: what is loaded or saved (the connector's business), which node is asked (`router/router.py`).

Invariants: every exchange with vLLM ends with its client's connection or its deadline, and is closed; a token of vLLM's
is never followed by a status; a vLLM that does not answer, or is another one than at the start, takes nothing new. Work
comes from whoever holds the fleet's key and from nobody else, a ticket is good for one answer.
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from headwater.config.environment import default_node
from headwater.core.errors import InvalidInput, needs_extra
from headwater.core.node_key import NodeKey
from headwater.core.results import Reason
from headwater.core.role import Role
from headwater.disagg.headers import ATTEMPT, ATTEMPTS, DECODE, ENDPOINTS, HEALTH, METRICS, POOL_SECONDS, PREFILL
from headwater.disagg.prompt_pages import read_pages
from headwater.disagg.used import TicketUse, UsedTickets
from headwater.disagg.vllm_ticket import VllmTicket
from headwater.integrations.vllm import node_reading
from headwater.integrations.vllm.client import HEALTH_S, Facts, Vllm, VllmGone, read
from headwater.integrations.vllm.node_exchange import BODY_BYTES, Exchange, NodeRequest
from headwater.integrations.vllm.node_reading import VllmWork
from headwater.metrics import Metrics
from headwater.serve import errors
from headwater.serve.bodies import Bodies
from headwater.serve.errors import ApiError, HandoffFailed, PassedOn
from headwater.serve.fleet_guard import FleetGuard
from headwater.serve.limits import MAX_CONNECTIONS, Limits
from headwater.serve.middleware import application, prometheus, request_id, until_s
from headwater.serve.pool_probes import PoolProbes
from headwater.serve.readers import Readers
from headwater.storage.base import Store

with needs_extra("serve"):
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

log = logging.getLogger("headwater")

_TICKET_S: Final = 120.0  # that a ticket lives


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """A node in front of a vLLM server."""

    vllm: str  # http://HOST:PORT
    role: Role
    node: str = field(default_factory=default_node)  # what it is called: as vLLM's connector is in the residency index
    host: str = "127.0.0.1"
    port: int = 0  # 0: a free one
    advertise: str | None = None  # where routers find it; None: where it listens
    routers: tuple[str, ...] = ()  # who is told that it is here
    lease_s: float = 6.0  # that routers believe a heartbeat
    wait_s: float = 600.0  # for vLLM, at the start
    node_key: NodeKey = field(default_factory=lambda: NodeKey.random(own=True))  # unless told, one that nobody knows
    vllm_key: str | None = field(default=None, repr=False)  # what we show vLLM
    max_requests: int = 256  # at a time; one with several prompts or choices counts as so many
    max_connections: int = MAX_CONNECTIONS
    allowed_hosts: tuple[str, ...] = ()  # names in `Host` that it answers to, besides its own
    request_timeout_s: float = 600.0
    pool_timeout_s: float = 30.0  # from vLLM's answer until the pool has a prompt


class VllmNode:
    """Answers routers for one vLLM server. For one event loop."""

    def __init__(
        self,
        options: NodeOptions,
        facts: Facts,
        vllm: Vllm,
        pool: Store,
        *,
        fleet: FleetGuard,
        metrics: Metrics,
        limits: Limits | None = None,
    ) -> None:
        """Owns neither the server nor the pool. `limits` of the door; None: as the options say."""
        self.options = options
        self.limits = limits or Limits(request_timeout_s=options.request_timeout_s)
        self.bodies = Bodies(self.limits)
        self.readers = Readers(
            node_reading.READS,
            max_body_bytes=BODY_BYTES,
            max_waiting=self.limits.max_unread,
            reads=node_reading.__name__,
        )
        self.facts = facts
        self.metrics = metrics
        self.stopping = False
        self.lost = False  # vLLM was away, and nobody knows yet what is there now
        self.prefill_tokens_per_s: float | None = None
        self._fleet = fleet
        self._vllm = vllm
        self._probes = PoolProbes(pool)
        self._used = UsedTickets()
        self._attempts: set[str] = set()
        self._num_inside = 0  # places that are taken: answers

    @property
    def num_requests(self) -> int:
        """Requests under way."""
        return len(self._attempts)

    @property
    def num_free(self) -> int:
        """Answers that would be taken on now."""
        return self.options.max_requests - self._num_inside

    def app(self) -> Starlette:
        """What routers, and people, ask."""
        inner = {
            Role.PREFILL: [(PREFILL, "vllm_prefill", self._prefill)],
            Role.DECODE: [(DECODE, "vllm_decode", self._decode)],
            Role.MIXED: [(path, "vllm_plain", self._forward) for path in ENDPOINTS],
        }[self.options.role]
        routes = [
            Route(HEALTH, self._health),
            Route(METRICS, self._metrics),
            Route(ATTEMPTS + "/{attempt}", self._attempt),
            *(Route(path, Exchange(self, what, handle), methods=["POST"]) for path, what, handle in inner),
        ]
        paths = [HEALTH, METRICS, ATTEMPTS, *(path for path, _, _ in inner)]
        return application(
            routes,
            limits=self.limits,
            metrics=self.metrics,
            paths=paths,
            api_key=None,
            fleet=self._fleet,
        )

    async def stop(self) -> None:
        """Take nothing new, and wait for the pool no more."""
        self.stopping = True
        self.bodies.stop()
        self.readers.stop()
        await self._probes.close()

    def close(self) -> None:
        """Read no more. Blocks for a moment. Idempotent."""
        self.readers.close()

    # --- what routers ask ---------------------------------------------------------------------------------------------

    async def _prefill(self, asked: NodeRequest) -> None:
        """Have vLLM compute a prompt; the ticket, when the pool has all of it."""
        begin_s, work = time.monotonic(), asked.work
        async with self._vllm.ask(work.path, work.content, asked.name) as response:
            content = await read(response)
        if response.status_code != 200:
            raise _upstream(response.status_code, content)
        try:
            answer = json.loads(content)
            told = read_pages(answer["kv_transfer_params"])
            num_tokens = int(answer["usage"]["prompt_tokens"])
        except (KeyError, TypeError, ValueError) as error:  # InvalidInput is a ValueError
            raise HandoffFailed(f"vLLM's answer cannot be handed on: {error}", reason=Reason.FAILED) from error
        if told.identity != self.facts.identity:
            raise HandoffFailed("vLLM is another one than before", reason=Reason.FAILED)
        computed_s = time.monotonic() - begin_s
        self.prefill_tokens_per_s = num_tokens / computed_s
        wait_s = min(self.options.pool_timeout_s, asked.left_s - computed_s)
        num_seen = await self._probes.until_held(told.pages, wait_s)
        if num_seen < len(told.pages):
            raise HandoffFailed(
                f"the pool has {num_seen} of {len(told.pages)} pages of the prompt after {wait_s:.1f} s",
                reason=Reason.LATE,
            )
        pool_s = time.monotonic() - begin_s - computed_s
        self.metrics.observe("pd_phase_seconds", pool_s, phase="pool_write")
        cached = ((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")) or 0
        ticket = VllmTicket(
            model=self.facts.model,
            identity=told.identity,
            body=work.digest,
            num_prompt_tokens=num_tokens,
            nonce=secrets.token_hex(32),
            expires_at_ms=int((time.time() + _TICKET_S) * 1000),
        )
        document = {
            "ticket": ticket.sealed(self.options.node_key).document(),
            "usage": {
                "prompt_tokens": num_tokens,
                "cached_tokens": cached,
                "computed_tokens": num_tokens - cached,
            },
            "phases": {"pool_s": pool_s},
        }
        await JSONResponse(document)(asked.http.scope, asked.http.receive, asked.send)

    async def _decode(self, asked: NodeRequest) -> None:
        """The whole answer, by vLLM, which loads what the pool has."""
        ticket = self._ticket(asked.work)
        nonce = bytes.fromhex(ticket.nonce)
        use = self._used.take(nonce, expires_at_ms=ticket.expires_at_ms, now_ms=time.time() * 1000)
        if use is not TicketUse.FIRST:
            raise errors.no_room() if use is TicketUse.NO_ROOM else errors.used_ticket()
        try:
            await self._forward(asked)
        finally:
            if not asked.send.begun:
                self._used.give_back(nonce)

    def _ticket(self, work: VllmWork) -> VllmTicket:
        """The ticket, if it is good here and for this request. Raises HandoffFailed."""
        facts, now_ms = self.facts, time.time() * 1000
        try:
            ticket = VllmTicket.read(work.ticket)
        except InvalidInput as error:
            raise HandoffFailed(str(error), reason=Reason.FOREIGN) from error
        why = ticket.refusal(
            self.options.node_key, model=facts.model, identity=facts.identity, body=work.digest, now_ms=now_ms
        )
        if why is not None:
            late = ticket.expires_at_ms <= now_ms
            raise HandoffFailed(why, reason=Reason.EXPIRED if late else Reason.FOREIGN)
        return ticket

    async def _forward(self, asked: NodeRequest) -> None:
        """Pass on what vLLM answers, as it comes."""
        send, path = asked.send, asked.work.path or asked.http.url.path
        async with self._vllm.ask(path, asked.work.content, asked.name) as response:
            if response.status_code != 200:
                raise _upstream(response.status_code, await read(response))
            kind = response.headers.get("content-type", "application/json").encode("latin-1")
            headers = [(b"content-type", kind), (POOL_SECONDS.encode(), b"0")]
            if not kind.startswith(b"text/event-stream"):
                content = await read(response)
                headers.append((b"content-length", str(len(content)).encode()))
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": content})
                return
            chunks = response.aiter_raw()
            first = await anext(chunks, b"")  # what fails before it is a plain error with a status
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for chunk in chunks:  # a stream that breaks closes the connection: the router tells the client
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    # --- what people ask ----------------------------------------------------------------------------------------------

    async def _health(self, http: Request) -> Response:
        if self.stopping or self.lost:
            raise ApiError(503, "vLLM does not answer", kind="server_error", code="not_running")
        return JSONResponse({"status": "ok", "requests": self.num_requests})

    async def _metrics(self, http: Request) -> Response:
        return prometheus(self.metrics)

    async def _attempt(self, http: Request) -> Response:
        attempt = http.path_params["attempt"]
        if attempt not in self._attempts:
            raise ApiError(404, f"no attempt {errors.shown(attempt)} is under way", code="not_found")
        return JSONResponse({"idle_s": max(0.0, time.monotonic() - self._vllm.well_s - 2 * HEALTH_S), "state": "vllm"})

    # --- coming and going ---------------------------------------------------------------------------------------------

    def require_room(self, num_answers: int = 1) -> None:
        """Raise ApiError if there is no room for so many, or no vLLM."""
        if self.stopping:
            raise errors.closing()
        most = self.options.max_requests
        if num_answers > most:
            raise errors.invalid(None, f"{num_answers} answers are more than the {most} that this node takes at once")
        if self.lost or num_answers > self.num_free:
            raise errors.no_room()

    @asynccontextmanager
    async def inside(self, http: Request, num_answers: int) -> AsyncIterator[float]:
        """Come in with a request; seconds that it has. Raises ApiError if there is no room, or no vLLM."""
        self.require_room(num_answers)
        attempt = http.headers.get(ATTEMPT) or request_id(http.scope)
        if attempt in self._attempts:
            raise ApiError(409, f"the attempt {errors.shown(attempt)} is under way already", code="duplicate_attempt")
        left_s = until_s(http) - asyncio.get_running_loop().time()
        self._attempts.add(attempt)
        self._num_inside += num_answers
        try:
            yield left_s
        finally:
            self._attempts.discard(attempt)
            self._num_inside -= num_answers

    async def watch(self) -> None:
        """See whether vLLM is well, for ever. One that was away is asked again who it is."""
        while True:
            await asyncio.sleep(HEALTH_S)
            if not await self._vllm.is_well():
                if not self.lost:
                    log.warning("vLLM at %s does not answer", self.options.vllm)
                self.lost = True
            elif self.lost:
                try:
                    facts = await self._vllm.facts(self.options.pool_timeout_s)
                except VllmGone as error:
                    log.warning("%s", error)
                    continue
                if facts != self.facts:
                    log.warning("vLLM at %s came back as another one: start this node again", self.options.vllm)
                    continue
                log.info("vLLM at %s answers again", self.options.vllm)
                self.lost = False


def _upstream(status: int, content: bytes) -> ApiError:
    """The client's faults are told as vLLM tells them, all else is a failure of this node."""
    try:
        document = json.loads(content)
    except ValueError:
        document = None
    if isinstance(document, dict) and isinstance(document.get("error"), dict) and 400 <= status < 500:
        return PassedOn(status, document)
    if status in (429, 503):
        return errors.no_room()
    return ApiError(502, f"vLLM answered with status {status}", kind="server_error", code="upstream_failed")
