"""The router's HTTP face: OpenAI's endpoints for clients, heartbeats from nodes, and what people look at.

    /v1/completions, /v1/chat/completions, /v1/models     as a node has them (`app.py`); answered by nodes
    /health     200 if a request could be answered, 503 if not; open to everybody
    /state      nodes, queues, the last decisions and why          /metrics    for Prometheus
    /, /admin/state, /admin/stream     the dashboard (`serve/dashboard.py`)
    /admin/requests     404: which nodes explain requests
    /pd/nodes, /pd/drain    for nodes and operators that hold the node key; the protocol is in `router/router.py`

A client may say in `x-headwater-timeout-s` how long it waits, and its own `x-request-id`; every answer has the latter.

Not here: who answers, and whether another is tried (`router/router.py`); keys and ids (`middleware.py`); sockets and
signals (`router/server.py`). Neither an engine nor torch is loaded.

Invariants: a client that goes away is noticed by a task that does nothing but listen for it, and its exchange with a
node is closed; errors have OpenAI's shape, whatever goes wrong.
"""

import asyncio
import time
from contextlib import suppress
from typing import Any, Final

from headwater.core.errors import InvalidInput, needs_extra
from headwater.disagg.events import event_of
from headwater.disagg.headers import DRAIN, ENDPOINTS, HEALTH, METRICS, MODELS, NODES, REQUESTS, TRACEPARENT
from headwater.disagg.heartbeat import NAME_TAKEN, Heartbeat
from headwater.disagg.node_auth import ROUTER, Authenticator
from headwater.router.board import router_snapshot
from headwater.router.client import Client
from headwater.router.nodes import NameTaken, NodeRefused
from headwater.router.routed_request import Call, NoAnswer
from headwater.router.router import Router
from headwater.serve import errors
from headwater.serve.bodies import Bodies
from headwater.serve.body import Fields
from headwater.serve.dashboard import PATHS, Dashboard
from headwater.serve.errors import ApiError, PassedOn
from headwater.serve.fleet_guard import FleetGuard
from headwater.serve.limits import Limits
from headwater.serve.middleware import application, prometheus, request_id, until_gone, until_s
from headwater.serve.readers import Readers
from headwater.serve.reading import Routable, routable

with needs_extra("serve"):
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from starlette.types import Receive, Scope, Send

_STATE: Final = "/state"
_PATHS: Final = (HEALTH, MODELS, METRICS, REQUESTS, _STATE, NODES, DRAIN, *ENDPOINTS)
_MAX_BEAT_BYTES: Final = 64 << 10
_NODES_TOLD: Final = 8


class Routed:
    """An endpoint that generates: every request is a task of its own, which ends when its client leaves."""

    def __init__(self, face: "Face", endpoint: str) -> None:
        self._face = face
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        face, http = self._face, Request(scope, receive)
        face.require_room()
        with suppress(ClientDisconnect):  # nobody is there
            async with face.bodies.body_of(http, face.router.config.max_body_bytes) as body:
                ends_s = until_s(http)
                read: Routable = await face.readers.read("routable", body, num_bytes=len(body), until_s=ends_s)
                del body  # the call has its own, for as long as nodes may be asked
                face.require_room()
                call = Call(
                    endpoint=self._endpoint,
                    body=read.body,
                    content=read.content,
                    request_id=request_id(scope),
                    until_s=ends_s,
                    num_prompts=read.num_prompts,
                    traceparent=http.headers.get(TRACEPARENT, ""),
                )
                await self._route(call, Client(scope, receive, send), receive)

    async def _route(self, call: Call, client: Client, receive: Receive) -> None:
        work = asyncio.create_task(self._face.router.route(call, client))
        leaving = asyncio.create_task(until_gone(receive))
        stopping = asyncio.create_task(self._face.stopping.wait())
        try:
            await asyncio.wait({work, leaving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if client.over:
                await asyncio.wait({work})
        finally:
            for task in (work, leaving, stopping):
                task.cancel()
            await asyncio.wait({work, leaving, stopping})
        if work.cancelled():
            if self._face.stopping.is_set():
                await _tell(client, errors.closing())
            return
        try:
            work.result()
        except NoAnswer as failure:
            raise _api_error(failure) from failure


class Face:
    """What the routes share. For one event loop."""

    def __init__(self, router: Router, limits: Limits) -> None:
        self.router = router
        self.bodies = Bodies(limits)
        self.stopping = asyncio.Event()
        self.readers = Readers(
            {"routable": routable}, max_body_bytes=router.config.max_body_bytes, max_waiting=limits.max_unread
        )
        self._started = time.time() - time.monotonic()  # between the two clocks

    def require_room(self) -> None:
        """Raise ApiError if no more requests are taken, now or at all."""
        if self.stopping.is_set():
            raise errors.closing()
        if self.router.num_requests >= self.router.config.max_requests:
            raise errors.queue_full()

    def stop(self) -> None:
        """Take no more: those under way hear so."""
        self.stopping.set()
        self.bodies.stop()
        self.readers.stop()

    async def health(self, http: Request) -> Response:
        """Whether a request could be answered."""
        if self.stopping.is_set() or not self.router.ready():
            message = "no mixed node is here, nor a prefill and a decode node"
            raise ApiError(503, message, kind="server_error", code="no_node")
        return JSONResponse({"status": "ok", "requests": self.router.num_requests})

    async def metrics(self, http: Request) -> Response:
        """What Prometheus reads."""
        self.router.gauges()
        return prometheus(self.router.metrics)

    async def state(self, http: Request) -> Response:
        """What people look at."""
        return JSONResponse(self.router.state())

    async def requests(self, http: Request) -> Response:
        """Nobody here knows why a prompt missed. Raises ApiError, which says who does."""
        nodes = [f"{one.heartbeat.node} at {one.heartbeat.url}" for one in self.router.nodes.entries()]
        more = f" and {len(nodes) - _NODES_TOLD} more" if len(nodes) > _NODES_TOLD else ""
        message = (
            "a request is explained by the node that computed it (usage.headwater.router.nodes): headwater explain ID "
            f"--url URL; here are {', '.join(nodes[:_NODES_TOLD]) or 'no nodes'}{more}"
        )
        raise ApiError(404, message, code="ask_the_node")

    async def models(self, http: Request) -> Response:
        """The models that nodes serve."""
        return JSONResponse({"object": "list", "data": self._models()})

    async def model(self, http: Request) -> Response:
        """One of them."""
        name = http.path_params["name"]
        models = self._models()
        for one in models:
            if one["id"] == name:
                return JSONResponse(one)
        raise errors.unknown_model(name, ", ".join(one["id"] for one in models) or "none yet")

    def _models(self) -> list[dict[str, Any]]:
        return [
            {
                "id": name,
                "object": "model",
                "created": int(self._started + since_s),
                "owned_by": "headwater",
                "max_model_len": limit,
            }
            for name, (limit, since_s) in self.router.models().items()
        ]

    async def nodes(self, http: Request) -> Response:
        """Hear a heartbeat."""
        body = await self.bodies.object_of(http, _MAX_BEAT_BYTES)
        try:
            return JSONResponse(self.router.membership.heard(Heartbeat.read(body)))
        except NodeRefused as error:
            code = NAME_TAKEN if isinstance(error, NameTaken) else "node_refused"
            raise ApiError(409, str(error), code=code) from error
        except InvalidInput as error:
            raise errors.invalid(None, str(error)) from error

    async def drain(self, http: Request) -> Response:
        """Give a node nothing new, or something again."""
        fields = Fields(await self.bodies.object_of(http, _MAX_BEAT_BYTES))
        node = fields.text("node")
        if node is None:
            raise errors.invalid("node", "node must name a node")
        draining = fields.get("draining") is None or fields.flag("draining")
        try:
            return JSONResponse(self.router.membership.drain(node, draining=draining))
        except InvalidInput as error:
            raise ApiError(404, str(error), param="node", code="not_found") from error


def create_router_app(router: Router, limits: Limits) -> tuple[Starlette, Face]:
    """The application for a router, which is its owner's to close, as is the face."""
    face, config = Face(router, limits), router.config
    board = Dashboard(
        lambda: router_snapshot(router),
        limits=limits,
        stopping=face.stopping.is_set,
        wants_key=config.api_key is not None,
    )
    routes = [
        *board.routes,
        Route(HEALTH, face.health),
        Route(METRICS, face.metrics),
        Route(_STATE, face.state),
        Route(REQUESTS, face.requests),
        Route(REQUESTS + "/{name:path}", face.requests),
        Route(MODELS, face.models),
        Route(MODELS + "/{name:path}", face.model),
        Route(NODES, face.nodes, methods=["POST"]),
        Route(DRAIN, face.drain, methods=["POST"]),
        *(Route(endpoint, Routed(face, endpoint), methods=["POST"]) for endpoint in ENDPOINTS),
    ]
    app = application(
        routes,
        limits=limits,
        metrics=router.metrics,
        paths=(*_PATHS, *PATHS),
        api_key=config.api_key,
        fleet=FleetGuard(Authenticator(config.node_key, ROUTER)),
    )
    return app, face


# --- small things -----------------------------------------------------------------------------------------------------


async def _tell(client: Client, error: ApiError) -> None:
    """A last word, in whatever way it can still be said."""
    if not client.begun:
        raise error
    await client.event(event_of(error.document()))
    await client.end()


def _api_error(failure: NoAnswer) -> ApiError:
    if failure.document is not None:
        return PassedOn(failure.status, failure.document)
    headers = {"Retry-After": str(errors.RETRY_AFTER_S)} if failure.status == 503 else None
    return ApiError(failure.status, str(failure), kind="server_error", code=failure.code, headers=headers)
