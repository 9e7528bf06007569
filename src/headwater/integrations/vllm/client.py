"""A vLLM server, from outside: is it well, what is it, ask it something. Every exchange has a connection of its own."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from headwater.core.errors import HeadwaterError, needs_extra
from headwater.disagg.headers import ENDPOINTS, HEALTH, MODELS, REQUEST_ID
from headwater.disagg.prompt_pages import TELL, read_pages

with needs_extra("serve"):
    import httpx2

HEALTH_S: Final = 1.0  # between looks whether vLLM is well, and for one of them

_PROBE: Final = {"prompt": [1], "max_tokens": 1, "temperature": 0, "kv_transfer_params": TELL}
_ANSWER_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a vLLM server says of itself."""

    model: str
    max_model_len: int | None
    identity: str
    layout: str
    block_tokens: int


class VllmGone(HeadwaterError):
    """vLLM does not answer, or not as it should."""


class Vllm:
    """A vLLM server, from outside. For one event loop; `aclose` it."""

    def __init__(self, url: str, key: str | None = None) -> None:
        headers = {"user-agent": "headwater-node"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        self._client = httpx2.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=None,  # every exchange is under the caller's own
            limits=httpx2.Limits(max_keepalive_connections=0, max_connections=None),
            trust_env=False,
        )
        self.well_s = 0.0  # when it last said that it is well

    async def aclose(self) -> None:
        """Close connections."""
        await self._client.aclose()

    async def is_well(self) -> bool:
        """Ask. Bounded."""
        try:
            async with asyncio.timeout(HEALTH_S):
                found = await self._client.get(HEALTH)
        except (TimeoutError, httpx2.HTTPError):
            return False
        if found.status_code == 200:
            self.well_s = time.monotonic()
        return found.status_code == 200

    async def facts(self, limit_s: float) -> Facts:
        """What it is: asked of the connector through a prompt of one token. Raises VllmGone."""
        try:
            async with asyncio.timeout(limit_s):
                models = (await self._client.get(MODELS)).json()["data"]
                model = str(models[0]["id"])
                found = await self._client.post(ENDPOINTS[0], json={"model": model, **_PROBE})
                told = read_pages(found.json()["kv_transfer_params"])
                return Facts(
                    model=model,
                    max_model_len=models[0].get("max_model_len"),
                    identity=told.identity,
                    layout=told.layout,
                    block_tokens=told.block_tokens,
                )
        except (TimeoutError, httpx2.HTTPError) as error:
            raise VllmGone(f"vLLM does not answer: {str(error) or type(error).__name__}") from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise VllmGone(
                "vLLM answers without Headwater's connector: start it with --kv-transfer-config "
                '\'{"kv_connector":"HeadwaterConnector","kv_connector_module_path":"headwater.integrations.vllm",...}\''
            ) from error

    @asynccontextmanager
    async def ask(self, path: str, content: bytes, name: str) -> AsyncIterator[httpx2.Response]:
        """Send a body of JSON; the answer, as it comes. Raises VllmGone before it begins, httpx2.HTTPError later."""
        try:
            headers = {"content-type": "application/json", REQUEST_ID: name}
            request = self._client.build_request("POST", path, content=content, headers=headers)
            response = await self._client.send(request, stream=True)
        except httpx2.HTTPError as error:
            raise VllmGone(f"vLLM does not answer: {str(error) or type(error).__name__}") from error
        try:
            yield response
        finally:
            await response.aclose()


async def read(response: httpx2.Response) -> bytes:
    """All of an answer, up to a limit. Raises VllmGone, httpx2.HTTPError."""
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > _ANSWER_BYTES:
            raise VllmGone(f"vLLM sent more than {_ANSWER_BYTES} bytes")
    return bytes(content)
