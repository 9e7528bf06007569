"""The router's HTTP face: OpenAI's endpoints for clients, heartbeats from nodes, and what people look at.

    /v1/completions, /v1/chat/completions, /v1/models     as a node has them (`app.py`); answered by nodes
    /health     200 if a request could be answered, 503 if not; open to everybody
    /state      nodes, queues, the last decisions and why          /metrics    for Prometheus
    /pd/nodes, /pd/drain    for nodes and operators that hold the node key; the protocol is in `disagg/router.py`

A client may say in `x-headwater-timeout-s` how long it waits, and its own `x-request-id`; every answer has the latter.

Not here: who answers, and whether another is tried (`disagg/router.py`); keys and ids (`door.py`); sockets and
signals (`router_server.py`). Neither an engine nor torch is loaded.

Invariants: a client that goes away is noticed by a task that does nothing but listen for it, and its exchange with a
node is closed; errors have OpenAI's shape, whatever goes wrong.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from headwater.core.errors import InvalidInput, NotInstalled
from headwater.disagg.beat import NAME_TAKEN, Beat
from headwater.disagg.events import event_of
from headwater.disagg.node_auth import ROUTER, Authenticator
from headwater.disagg.nodes import NameTaken, NodeRefused
from headwater.disagg.router import Router
from headwater.disagg.trip import Call, NoAnswer
from headwater.serve import errors
from headwater.serve.body import Fields
from headwater.serve.door import HEALTH, MODELS, application, body_of, prometheus, request_id, timeout_s
from headwater.serve.errors import ApiError
from headwater.serve.fleet_guard import FleetGuard

try:
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from starlette.types import Receive, Scope, Send
except ModuleNotFoundError as error:
    raise NotInstalled(f"the router needs {error.name}: pip install 'headwater[serve]'") from error

_ENDPOINTS: Final = ("/v1/completions", "/v1/chat/completions")
_METRICS, _STATE, _NODES, _DRAIN = "/metrics", "/state", "/pd/nodes", "/pd/drain"
_PATHS: Final = (HEALTH, MODELS, _METRICS, _STATE, _NODES, _DRAIN, *_ENDPOINTS)
_STREAM: Final = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
_MAX_BEAT_BYTES: Final = 64 << 10


class Responder:
    """The client of one request (`disagg.trip.Client`)."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun = False
        self.over = False  # all of it was sent: from then on, a server says that the client has left
        self._scope = scope
        self._receive = receive
        self._send = send

    async def whole(self, document: Mapping[str, Any]) -> None:
        """The answer, in one."""
        self.begun = self.over = True
        await JSONResponse(document)(self._scope, self._receive, self._send)

    async def begin(self) -> None:
        """Events follow."""
        self.begun = True
        await self._send({"type": "http.response.start", "status": 200, "headers": list(_STREAM)})

    async def event(self, event: bytes) -> None:
        """One of them."""
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    async def end(self) -> None:
        """That was the last."""
        self.over = True
        await self._send({"type": "http.response.body", "body": b""})


class Routed:
    """An endpoint that generates: every request is a task of its own, which ends when its client leaves."""

    def __init__(self, face: "Face", endpoint: str) -> None:
        self._face = face
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        with suppress(ClientDisconnect):  # nobody is there
            call = await self._call(Request(scope, receive))
            client = Responder(scope, receive, send)
            work = asyncio.create_task(self._face.router.route(call, client))
            leaving = asyncio.create_task(_until_gone(receive))
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

    async def _call(self, http: Request) -> Call:
        router, loop = self._face.router, asyncio.get_running_loop()
        arrived_s = loop.time()
        if self._face.stopping.is_set():
            raise errors.closing()
        if router.num_requests >= router.config.max_requests:
            raise errors.queue_full()
        waits_s = timeout_s(http, router.config.request_timeout_s)
        body = await body_of(http, router.config.max_body_bytes)
        try:
            content = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
        except (ValueError, RecursionError) as error:
            raise errors.invalid(None, "a number in the body is too large", code="invalid_json") from error
        return Call(
            endpoint=self._endpoint,
            body=body,
            content=content,
            request_id=request_id(http.scope),
            until_s=arrived_s + waits_s,
        )


class Face:
    """What the routes share. For one event loop."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.stopping = asyncio.Event()
        self._started = time.time() - time.monotonic()  # between the two clocks

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
        body = await body_of(http, _MAX_BEAT_BYTES)
        try:
            return JSONResponse(self.router.heard(Beat.read(body)))
        except NodeRefused as error:
            code = NAME_TAKEN if isinstance(error, NameTaken) else "node_refused"
            raise ApiError(409, str(error), code=code) from error
        except InvalidInput as error:
            raise errors.invalid(None, str(error)) from error

    async def drain(self, http: Request) -> Response:
        """Give a node nothing new, or something again."""
        fields = Fields(await body_of(http, _MAX_BEAT_BYTES))
        node = fields.text("node")
        if node is None:
            raise errors.invalid("node", "node must name a node")
        draining = fields.get("draining") is None or fields.flag("draining")
        try:
            return JSONResponse(self.router.drain(node, draining=draining))
        except InvalidInput as error:
            raise ApiError(404, str(error), param="node", code="not_found") from error


def create_router_app(router: Router) -> tuple[Starlette, Face]:
    """The application for a router, which is its owner's to close."""
    face, config = Face(router), router.config
    routes = [
        Route(HEALTH, face.health),
        Route(_METRICS, face.metrics),
        Route(_STATE, face.state),
        Route(MODELS, face.models),
        Route(MODELS + "/{name:path}", face.model),
        Route(_NODES, face.nodes, methods=["POST"]),
        Route(_DRAIN, face.drain, methods=["POST"]),
        *(Route(endpoint, Routed(face, endpoint), methods=["POST"]) for endpoint in _ENDPOINTS),
    ]
    app = application(
        routes,
        metrics=router.metrics,
        paths=_PATHS,
        key_for=lambda path: config.api_key,
        fleet=FleetGuard(Authenticator(config.node_key, ROUTER)),
    )
    return app, face


# --- small things -----------------------------------------------------------------------------------------------------


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _tell(client: Responder, error: ApiError) -> None:
    """A last word, in whatever way it can still be said."""
    if not client.begun:
        raise error
    await client.event(event_of(error.document()))
    await client.end()


def _api_error(failure: NoAnswer) -> ApiError:
    if failure.document is not None:
        return NodeError(failure.status, failure.document)
    headers = {"Retry-After": str(errors.RETRY_AFTER_S)} if failure.status == 503 else None
    return ApiError(failure.status, str(failure), kind="server_error", code=failure.code, headers=headers)


class NodeError(ApiError):
    """A node's own error, on its way to the client as it is."""

    def __init__(self, status: int, document: Mapping[str, Any]) -> None:
        super().__init__(status, "a node refused this request")
        self._document = dict(document)

    def document(self) -> dict[str, object]:
        """The body."""
        return self._document
