"""A node's application: its routes, and what is said about it.

`/health` is open to everybody; all else wants the key, where there is one (`door.py`). What happens to a request that
generates is in `service.py` and `generate.py`, what routers ask for in `tickets.py`.
"""

from typing import Any, Final

from headwater.core.errors import NotInstalled
from headwater.serve import errors
from headwater.serve.door import HEALTH, MODELS, application, prometheus
from headwater.serve.errors import ApiError
from headwater.serve.generate import Generate
from headwater.serve.openai import Chat, Completions
from headwater.serve.service import Service
from headwater.serve.tickets import ATTEMPTS, DECODE, PREFILL, Decode, Prefill

try:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise NotInstalled(f"the server needs {error.name}: pip install 'headwater[serve]'") from error

_METRICS: Final = "/metrics"
_PATHS: Final = (HEALTH, MODELS, _METRICS, Completions.endpoint, Chat.endpoint, PREFILL, DECODE, ATTEMPTS)


def create_app(service: Service) -> Starlette:
    """The application for a service. It owns nothing: whoever made the engine closes it."""
    running, config = service.running, service.config

    async def health(http: Request) -> Response:
        if service.stopping or not running.engine.alive:
            raise ApiError(503, "the engine does not run", kind="server_error", code="not_running")
        return JSONResponse({"status": "ok", "requests": running.engine.num_requests, "free": service.num_free})

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
    routes = [
        Route(HEALTH, health),
        Route(_METRICS, metrics),
        Route(MODELS, models),
        Route(MODELS + "/{name:path}", model),
        Route(PREFILL, Prefill(service), methods=["POST"]),
        Route(DECODE, Decode(service), methods=["POST"]),
        Route(ATTEMPTS + "/{attempt}", attempt),
        *(Route(api.endpoint, Generate(service, api), methods=["POST"]) for api in (Completions(), Chat())),
    ]
    return application(
        routes, limits=service.limits, metrics=running.metrics, paths=_PATHS, key_for=lambda path: config.api_key
    )
