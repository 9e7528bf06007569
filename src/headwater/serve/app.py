"""The application: routes, the key at the door, errors in OpenAI's shape for whatever goes wrong.

`/health` is open to everybody; all else wants the key, where there is one. What happens to a request that generates
is in `service.py`.
"""

import hmac
from typing import Any, Final

from headwater.core.errors import NotInstalled
from headwater.serve import errors
from headwater.serve.errors import ApiError
from headwater.serve.openai import Chat, Completions
from headwater.serve.service import Generate, Service

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ModuleNotFoundError as error:
    raise NotInstalled(f"the server needs {error.name}: pip install 'headwater[serve]'") from error

_HEALTH: Final = "/health"
_METRICS: Final = "/metrics"
_MODELS: Final = "/v1/models"
_PATHS: Final = (_HEALTH, _METRICS, _MODELS, Completions.endpoint, Chat.endpoint)


class Guard:
    """At the door: who has no key stays outside, and every request is counted."""

    def __init__(self, app: ASGIApp, *, service: Service) -> None:
        self._app = app
        self._service = service
        key = service.config.api_key
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = "gone"

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            if self._may_enter(scope):
                await self._app(scope, receive, sending)
            else:
                await _respond(errors.wrong_key())(scope, receive, sending)
        except Exception:
            status = "500"
            raise
        finally:
            path = scope["path"] if not scope["path"].startswith(_MODELS + "/") else _MODELS
            endpoint = path if path in _PATHS else "other"
            self._service.running.metrics.count("http_requests_total", endpoint=endpoint, status=status)

    def _may_enter(self, scope: Scope) -> bool:
        if self._key is None or scope["path"] == _HEALTH:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)


def create_app(service: Service) -> Starlette:
    """The application for a service. It owns nothing: whoever made the engine closes it."""
    running, config = service.running, service.config

    async def health(http: Request) -> Response:
        if service.stopping or not running.engine.alive:
            raise ApiError(503, "the engine does not run", kind="server_error", code="not_running")
        return JSONResponse({"status": "ok", "requests": running.engine.num_requests})

    async def metrics(http: Request) -> Response:
        running.cache.gauges()
        running.metrics.gauge("engine_requests", running.engine.num_requests)
        return Response(running.metrics.prometheus(), media_type="text/plain; version=0.0.4; charset=utf-8")

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

    started_s = int(config.model.stat().st_mtime)
    app = Starlette(
        routes=[
            Route(_HEALTH, health),
            Route(_METRICS, metrics),
            Route(_MODELS, models),
            Route(_MODELS + "/{name:path}", model),
            *(Route(api.endpoint, Generate(service, api), methods=["POST"]) for api in (Completions(), Chat())),
        ],
        middleware=[Middleware(Guard, service=service)],
        exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), _on_error),
    )
    app.router.redirect_slashes = False
    return app


def _respond(error: ApiError) -> Response:
    return JSONResponse(error.document(), status_code=error.status, headers=error.headers)


async def _on_error(http: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        path, status = errors.shown(http.url.path), error.status_code
        message = {404: f"there is no {path} here", 405: f"{path} does not take {http.method}"}
        code = {404: "not_found", 405: "method_not_allowed"}.get(status)
        error = ApiError(status, message.get(status, error.detail), code=code, headers=error.headers)
    return _respond(error if isinstance(error, ApiError) else errors.internal())  # the traceback goes to the log
