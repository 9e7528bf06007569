"""The door of both servers: hosts, keys, an id for every request, counting, and errors in one shape for all.

`/health` wants no key, nor does the dashboard's page, which holds nothing. A request may bring its id (`x-request-id`)
and say how long it is waited for, from its first byte on (`x-headwater-timeout-s`); an id that is no printable word is
replaced. Every answer says the id. Neither an engine nor torch is loaded here.

Not here: connections, and what is slow or too much (`connection.py`, `bodies.py`).
"""

import asyncio
import hmac
import re
import secrets
from collections.abc import Collection
from typing import Any, Final

from headwater.core.errors import needs_extra
from headwater.disagg.headers import ATTEMPTS, HEALTH, MODELS, REQUEST_ID, REQUESTS, TIMEOUT
from headwater.disagg.node_auth import HELLO_PATH, Admitted
from headwater.metrics import Metrics
from headwater.serve import errors
from headwater.serve.connection import ADMISSION
from headwater.serve.connections import Admission
from headwater.serve.errors import ApiError
from headwater.serve.fleet_guard import FleetGuard, checked
from headwater.serve.limits import Limits
from headwater.serve.page import FILES

with needs_extra("serve"):
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_ID: Final = re.compile(r"[!-~]{1,128}")
_SCOPE: Final = "headwater_request_id"


class Guard:
    """At the door: hosts, keys, ids, counting."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        limits: Limits,
        metrics: Metrics,
        paths: Collection[str],
        api_key: str | None,
        fleet: FleetGuard,
    ) -> None:
        """`api_key` is what clients show, None: nobody is asked for one. `paths` are told apart in the metrics."""
        self._app = app
        self._limits = limits
        self._metrics = metrics
        self._paths = paths
        self._api_key = api_key
        self._fleet = fleet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if ADMISSION not in scope:  # it did not come through a connection of ours
            began_s = asyncio.get_running_loop().time()
            scope[ADMISSION] = Admission(began_s, self._limits.timeout_s(_header(scope, TIMEOUT)))
        given = _header(scope, REQUEST_ID)
        name = given if given is not None and _ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope[_SCOPE] = name
        status = "gone"
        admitted: Admitted | None = None

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
                headers = [*message["headers"], (REQUEST_ID.encode(), name.encode())]
                if admitted is not None:
                    headers += self._fleet.headers(admitted, message["status"])
                message = {**message, "headers": headers}
            await send(message)

        try:
            try:
                if admission_of(scope).turned_away:
                    raise errors.crowded()
                admitted = self._fleet.admit(scope)
                if admitted is None:
                    self._require_entry(scope)
                else:
                    receive = checked(receive, admitted)
            except ApiError as refusal:
                await _respond(refusal)(scope, receive, sending)
                return
            if scope["path"] == HELLO_PATH:
                await Response(status_code=204)(scope, receive, sending)
                return
            await self._app(scope, receive, sending)
        except ClientDisconnect:  # in the middle of its body, and nobody is there to be told
            status = "gone"
        except Exception:
            status = "500"
            raise
        finally:
            self._metrics.count("http_requests_total", endpoint=self._endpoint(scope["path"]), status=status)

    def _endpoint(self, path: str) -> str:
        for family in (MODELS, ATTEMPTS, REQUESTS):
            if path.startswith(family + "/"):
                path = family
        return path if path in self._paths else "other"

    def _require_entry(self, scope: Scope) -> None:
        """Raise ApiError for who may not come in: under another machine's name, or without the key."""
        host = _header(scope, "host")
        if host is not None and not self._limits.answers_host(host):
            raise errors.wrong_host(host)
        path, key = scope["path"], self._api_key
        if path == HEALTH or path in FILES or (key is None and not self._fleet.members_only):
            return
        if key is None:
            raise errors.wrong_key()
        scheme, _, shown = (_header(scope, "authorization") or "").partition(" ")
        right = scheme.lower() == "bearer" and hmac.compare_digest(shown.strip().encode("latin-1"), key.encode())
        if not right:
            raise errors.wrong_key()


def application(
    routes: Collection[Route],
    *,
    limits: Limits,
    metrics: Metrics,
    paths: Collection[str],
    api_key: str | None,
    fleet: FleetGuard,
) -> Starlette:
    """An application behind the door, that answers with OpenAI's errors whatever goes wrong."""
    app = Starlette(
        routes=list(routes),
        middleware=[
            Middleware(
                Guard,
                limits=limits,
                metrics=metrics,
                paths=frozenset((*paths, HELLO_PATH)),
                api_key=api_key,
                fleet=fleet,
            )
        ],
        exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), _on_error),
    )
    app.router.redirect_slashes = False
    return app


def request_id(scope: Scope) -> str:
    """What a request is called, here and wherever it goes."""
    name: str = scope[_SCOPE]
    return name


def admission_of(scope: Scope) -> Admission:
    """What the connection knows of a request."""
    admission: Admission = scope[ADMISSION]
    return admission


def timeout_s(http: Request) -> float:
    """How long the client waits, from its request's first byte on. Raises ApiError."""
    seconds = admission_of(http.scope).timeout_s
    if seconds is None:
        said = errors.shown(http.headers.get(TIMEOUT))
        raise errors.invalid(None, f"{TIMEOUT} must be seconds above 0, not {said}")
    return seconds


def until_s(http: Request) -> float:
    """When it stops to wait, on the event loop's clock. Raises ApiError."""
    return admission_of(http.scope).began_s + timeout_s(http)


async def until_gone(receive: Receive) -> None:
    """Wait until the client has left. Nobody else may receive meanwhile."""
    while (await receive())["type"] != "http.disconnect":
        pass


def prometheus(metrics: Metrics) -> Response:
    """What Prometheus reads."""
    return Response(metrics.prometheus(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _header(scope: Scope, name: str) -> str | None:
    wanted = name.encode()
    found: Any = next((value for header, value in scope["headers"] if header == wanted), None)
    return None if found is None else str(found.decode("latin-1"))


def _respond(error: ApiError) -> Response:
    return JSONResponse(error.document(), status_code=error.status, headers=error.headers)


async def _on_error(http: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        path, status = errors.shown(http.url.path), error.status_code
        message = {404: f"there is no {path} here", 405: f"{path} does not take {http.method}"}
        code = {404: "not_found", 405: "method_not_allowed"}.get(status)
        error = ApiError(status, message.get(status, error.detail), code=code, headers=error.headers)
    return _respond(error if isinstance(error, ApiError) else errors.internal())  # the traceback goes to the log
