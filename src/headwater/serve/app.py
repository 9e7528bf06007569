"""A node's application: its routes, and what is said about it.

`/health` and the dashboard's page are open to everybody; all else wants the API key, where there is one
(`middleware.py`), or the fleet's signature. A node that listens beyond this machine and has no API key answers its
routers alone. What happens to a request that generates is in `service.py` and `generate.py`, what routers ask for in
`pd_endpoints.py`, what an administrator may in `admin.py` and `revive.py`, what people look at in `dashboard.py`, why
requests missed in `explain.py`.
"""

import asyncio
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from headwater.config.checks import is_loopback
from headwater.config.serve import ExplainLevel
from headwater.core.errors import InvalidInput, needs_extra
from headwater.disagg.headers import ATTEMPTS, DECODE, ENDPOINTS, HEALTH, METRICS, MODELS, PREFILL, REQUESTS
from headwater.disagg.node_auth import Authenticator, node_called
from headwater.serve import admin, errors
from headwater.serve.board import node_snapshot
from headwater.serve.dashboard import PATHS, Dashboard, require_own
from headwater.serve.errors import ApiError
from headwater.serve.explain import Explainer
from headwater.serve.fleet_guard import FleetGuard
from headwater.serve.foreign import find_foreign
from headwater.serve.generate import Generate
from headwater.serve.limits import SMALL_BYTES
from headwater.serve.middleware import application, prometheus
from headwater.serve.pd_endpoints import Decode, Prefill
from headwater.serve.reading import APIS
from headwater.serve.revive import BRAIN, REVIVE, revive
from headwater.serve.service import Service

with needs_extra("serve"):
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

_PATHS: Final = (HEALTH, MODELS, METRICS, REVIVE, REQUESTS, *ENDPOINTS, PREFILL, DECODE, ATTEMPTS)
_NOT_KEPT: Final = {"Cache-Control": "no-store"}


def create_app(service: Service) -> Starlette:
    """The application for a service. It owns nothing: whoever made the engine closes it."""
    running, config = service.running, service.config

    async def health(http: Request) -> Response:
        if service.stopping or not running.engine.alive:
            raise ApiError(503, "the engine does not run", kind="server_error", code="not_running")
        found = {
            "status": "draining" if service.draining else "ok",
            "requests": running.engine.num_requests,
            "free": service.num_free,
        }
        return JSONResponse(found if running.cache.failed is None else {**found, "cache": "only misses"})

    async def revival(http: Request) -> Response:
        """Have what is switched off used again."""
        body = await service.bodies.object_of(http, SMALL_BYTES)
        what = body.pop("what", None)
        if body or not isinstance(what, str | None):
            raise errors.invalid("what", f"{REVIVE} takes `what`: a tier's name, or {BRAIN!r}; all that is off without")
        async with reviving:
            try:
                found = await run_in_threadpool(revive, running.cache, what)
            except InvalidInput as error:
                raise errors.invalid("what", str(error)) from error
        return JSONResponse(found.document())

    async def requests(http: Request) -> Response:
        """The last requests, and what they hit and missed."""
        require_own(http)
        found = await run_in_threadpool(explainer.listed, http.query_params.get("limit"))
        return JSONResponse(found, headers=_NOT_KEPT)

    async def request(http: Request) -> Response:
        """Why one of them did."""
        require_own(http)
        async with explaining:  # each takes a core's time: one after another
            found = await run_in_threadpool(explainer.explained, http.path_params["name"])
        return JSONResponse(found, headers=_NOT_KEPT)

    async def metrics(http: Request) -> Response:
        running.cache.gauges()
        running.metrics.gauge("engine_requests", running.engine.num_requests)
        return prometheus(running.metrics)

    def described() -> dict[str, Any]:
        return {
            "id": running.name,
            "object": "model",
            "created": started_s,
            "owned_by": "headwater",
            "max_model_len": running.engine.max_tokens,
            "sampling_defaults": asdict(running.defaults),  # what is done where a request says nothing
        }

    async def models(http: Request) -> Response:
        return JSONResponse({"object": "list", "data": [described()]})

    async def model(http: Request) -> Response:
        if http.path_params["name"] != running.name:
            raise errors.unknown_model(http.path_params["name"], running.name)
        return JSONResponse(described())

    async def attempt(http: Request) -> Response:
        """Whether a router's request is here, and whether anything gets done."""
        progress = service.progress_of(http.path_params["attempt"])
        if progress is None:
            raise ApiError(404, "no such attempt is under way here", code="not_found")
        return JSONResponse(progress)

    started_s = int(config.model.stat().st_mtime)
    reviving, explaining = asyncio.Lock(), asyncio.Lock()
    explainer = Explainer(
        running.cache,
        block_tokens=running.engine.model.block_tokens,
        level=config.explain if config.explain and config.cache else ExplainLevel.BLOCKS,  # else all salts differ
        decode=running.tokenizer.decode,
        find_foreign=partial(find_foreign, running.stores),
    )
    board = Dashboard(
        lambda: node_snapshot(service),
        limits=service.limits,
        stopping=lambda: service.stopping,
        wants_key=config.api_key is not None,
    )
    routes = [
        *board.routes,
        Route(HEALTH, health),
        Route(METRICS, metrics),
        Route(REVIVE, revival, methods=["POST"]),
        Route(REQUESTS, requests),
        Route(REQUESTS + "/{name:path}", request),
        *admin.Admin(service).routes,
        Route(MODELS, models),
        Route(MODELS + "/{name:path}", model),
        Route(PREFILL, Prefill(service), methods=["POST"]),
        Route(DECODE, Decode(service), methods=["POST"]),
        Route(ATTEMPTS + "/{attempt}", attempt),
        *(Route(path, Generate(service, api), methods=["POST"]) for path, api in APIS.items()),
    ]
    fleet = FleetGuard(
        Authenticator(config.node_key, node_called(service.node, service.url)),
        members_only=config.in_fleet and not is_loopback(config.host),
    )
    return application(
        routes,
        limits=service.limits,
        metrics=running.metrics,
        paths=(*_PATHS, *PATHS, *admin.PATHS),
        api_key=config.api_key,
        fleet=fleet,
    )
