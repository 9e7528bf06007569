"""What an administrator may ask of a node that runs: purge, pin, warm, limits, drain. `revive` is in `revive.py`.

Behind the API key as everything is; bodies are JSON and bounded. What blocks runs beside the event loop, one call at a
time: a second one waits.
"""

import asyncio
import secrets
from collections import Counter
from dataclasses import replace
from typing import Any, Final

from headwater.core.errors import HeadwaterError, InvalidInput, ResourceClosed, needs_extra
from headwater.serve import errors
from headwater.serve.ask_server import DRAIN, LIMITS, PINS, UNPIN, WARM
from headwater.serve.asked import salt_of
from headwater.serve.body import Fields, as_text, parse
from headwater.serve.errors import ApiError
from headwater.serve.purge import MAX_TIMEOUT_S, PURGE, PurgeReport, prefix_keys, purge
from headwater.serve.service import Service

with needs_extra("serve"):
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

PATHS: Final = (PURGE, PINS, UNPIN, WARM, LIMITS, DRAIN)
_MAX_NAME: Final = 128
_FIXED: Final = {  # what cannot be changed while the server runs, and why
    "max_running": "the engine plans its steps with it; restart with --max-running",
    "step_tokens": "the engine plans its steps with it; restart with --step-tokens",
    "max_body_bytes": "bodies that are on their way were let in by it; restart with --max-body-mib",
    "max_connections": "it was fitted to the files this process may open; restart with --max-connections",
    "num_blocks": "the device's memory is taken at the start; restart with --num-blocks",
    "pin_share": "pins were made within it; restart with --pin-share",
    "block_tokens": "all blocks have that size; restart with --block-tokens",
}
_MAX_TTL_S: Final = 366 * 86_400.0
_MOST_BYTES: Final = 1 << 20  # of a body: a prefix
_MOST_TOKEN: Final = (1 << 32) - 1


class Admin:
    """The routes. For one event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._purging = asyncio.Lock()
        self._warming = asyncio.Lock()
        self.routes: Final = [
            Route(PURGE, self.purge, methods=["POST"]),
            Route(PINS, self.pin, methods=["POST"]),
            Route(PINS, self.pins, methods=["GET"]),
            Route(UNPIN, self.unpin, methods=["POST"]),
            Route(WARM, self.warm, methods=["POST"]),
            Route(LIMITS, self.limits, methods=["POST"]),
            Route(LIMITS, self.in_force, methods=["GET"]),
            Route(DRAIN, self.drain, methods=["POST"]),
            Route(DRAIN, self.drained, methods=["GET"]),
        ]

    async def purge(self, http: Request) -> Response:
        """Have a prefix, or a tenant, gone from every tier."""
        body = await self._body(http)
        prompt, salt = _prompt(body), salt_of(body)
        from_token = body.integer("from_token", 0, _MOST_TOKEN)
        timeout_s = body.number("timeout_s", 0.1, MAX_TIMEOUT_S) or 60.0
        whole = body.flag("whole_tenant")
        special = body.flag("add_special_tokens", default=True)
        body.refuse_rest(PURGE)
        if whole == (prompt is not None):
            message = "give a `prompt`, text or token ids, or say `whole_tenant`; with `cache_salt`, of that tenant"
            raise errors.invalid("prompt", message)
        running = self._service.running

        def work() -> PurgeReport:
            ids = self._tokens(prompt, special=special)
            identity = running.engine.model.identity
            return purge(
                running.cache, identity, salt=salt, tokens=ids, from_token=from_token, timeout_s=timeout_s
            )  # fmt: skip

        async with self._purging:
            try:
                found = await run_in_threadpool(work)
            except InvalidInput as error:
                raise errors.invalid("prompt", str(error)) from error
            except ResourceClosed as error:
                raise errors.closing() from error
            except HeadwaterError as error:
                raise ApiError(503, str(error), kind="server_error", code="purge_failed") from error
        return JSONResponse(found.document())

    async def pin(self, http: Request) -> Response:
        """Keep a prefix on the device, within the budget."""
        body = await self._body(http)
        prompt, salt, name = _prompt(body), salt_of(body), _name(body)
        ttl_s = body.number("ttl_s", 0.1, _MAX_TTL_S)
        special = body.flag("add_special_tokens", default=True)
        body.refuse_rest(PINS)
        if prompt is None:
            raise errors.invalid("prompt", "give a `prompt`, text or token ids")
        running = self._service.running

        def work() -> dict[str, Any]:
            identity = replace(running.engine.model.identity, salt=salt)
            keys = prefix_keys(self._tokens(prompt, special=special) or (), identity, None)
            made = running.cache.pin(name or keys[-1].hex()[:12], keys, tenant=identity.tenant, ttl_s=ttl_s)
            return {**made._asdict(), "wanted": len(keys)}

        try:
            return JSONResponse(await run_in_threadpool(work))
        except InvalidInput as error:
            raise errors.invalid("prompt", str(error)) from error
        except ResourceClosed as error:
            raise errors.closing() from error

    async def pins(self, http: Request) -> Response:
        """Every pin, and the budget, in blocks."""
        cache = self._service.running.cache
        with cache.still() as brain:
            pinned = {key for pin in brain.pins for key in pin.keys}
            budget = {"num_blocks": len(pinned), "most_blocks": brain.pins.most_blocks}
        return JSONResponse({**budget, "pins": [pin._asdict() for pin in cache.pins()]})

    async def unpin(self, http: Request) -> Response:
        """Let a pin's blocks go again."""
        body = await self._body(http)
        name = _name(body)
        body.refuse_rest(UNPIN)
        if name is None:
            raise errors.invalid("name", "give the `name` of a pin")
        try:
            self._service.running.cache.unpin(name)
        except InvalidInput as error:
            raise ApiError(404, str(error), param="name", code="not_found") from error
        return await self.pins(http)

    async def warm(self, http: Request) -> Response:
        """Bring what slower tiers have of one prompt to the fastest store."""
        body = await self._body(http)
        prompt, salt = _prompt(body), salt_of(body)
        timeout_s = body.number("timeout_s", 0.1, MAX_TIMEOUT_S) or 30.0
        special = body.flag("add_special_tokens", default=True)
        body.refuse_rest(WARM)
        if prompt is None:
            raise errors.invalid("prompt", "give a `prompt`, text or token ids")
        running = self._service.running

        def work() -> dict[str, Any]:
            identity = replace(running.engine.model.identity, salt=salt)
            keys = prefix_keys(self._tokens(prompt, special=special) or (), identity, None)
            name = f"warm {secrets.token_hex(8)}"
            found = running.cache.warm(name, keys, root=identity.root, tenant=identity.tenant, timeout_s=timeout_s)
            held: Counter[str] = Counter()
            for part in found.parts:
                held[part.tier or "none"] += part.end - part.start
            return {"blocks": found.num_blocks, "held": dict(held)}

        async with self._warming:
            try:
                return JSONResponse(await run_in_threadpool(work))
            except InvalidInput as error:
                raise errors.invalid("prompt", str(error)) from error
            except ResourceClosed as error:
                raise errors.closing() from error

    async def limits(self, http: Request) -> Response:
        """Change what may change while the server runs: the order of eviction, and how many requests may wait."""
        body = await self._body(http)
        policy = body.text("policy")
        max_waiting = body.integer("max_waiting", 0, self._service.config.max_waiting)
        for name, why in _FIXED.items():
            body.refuse(name, (), why)
        body.refuse_rest(LIMITS)
        try:
            if policy is not None:
                self._service.running.cache.choose_policy(policy)
        except InvalidInput as error:
            raise errors.invalid("policy", str(error)) from error
        except ResourceClosed as error:
            raise errors.closing() from error
        if max_waiting is not None:
            self._service.max_waiting = max_waiting
        return await self.in_force(http)

    async def in_force(self, http: Request) -> Response:
        """What may be changed, as it is now."""
        with self._service.running.cache.still() as brain:
            policy = brain.policy
        return JSONResponse({"policy": policy, "max_waiting": self._service.max_waiting})

    def _tokens(self, prompt: str | list[int] | None, *, special: bool) -> list[int] | None:
        """A long text takes a while."""
        if isinstance(prompt, str):
            return self._service.running.tokenizer.encode(prompt, add_special_tokens=special)
        return prompt

    async def drain(self, http: Request) -> Response:
        """Take nothing new, or, with `undo`, take it again."""
        body = await self._body(http)
        undo = body.flag("undo")
        body.refuse_rest(DRAIN)
        self._service.draining = not undo
        return await self.drained(http)

    async def drained(self, http: Request) -> Response:
        """Whether nothing new is taken, and how many requests are still under way."""
        num_left = self._service.num_inside
        draining = self._service.draining
        return JSONResponse({"draining": draining, "requests": num_left, "drained": draining and not num_left})

    async def _body(self, http: Request) -> Fields:
        async with self._service.bodies.body_of(http, _MOST_BYTES) as data:
            return Fields(parse(data))


def _name(body: Fields) -> str | None:
    name = body.text("name")
    if name is not None and not (1 <= len(name) <= _MAX_NAME and name.isprintable()):
        raise errors.invalid("name", f"a name has 1 to {_MAX_NAME} printable characters")
    return name


def _prompt(body: Fields) -> str | list[int] | None:
    """Text or token ids; None where there are none. Raises ApiError."""
    value = body.get("prompt")
    if value is None:
        return None
    if isinstance(value, str):
        return as_text(value, "prompt")
    if not (isinstance(value, list) and all(type(one) is int and 0 <= one <= _MOST_TOKEN for one in value)):
        raise errors.invalid("prompt", "prompt must be text or a list of token ids")
    return value
