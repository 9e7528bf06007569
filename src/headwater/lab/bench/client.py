"""One HTTP connection of a benchmark to a server: JSON in, JSON or a stream of events out. For one thread.

The standard library's, and not measured itself. Not here: what is asked, what an answer means.
"""

import json
import re
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPResponse
from typing import Any, Final, NamedTuple, Self
from urllib.parse import urlsplit

from headwater.config import environment
from headwater.core.errors import HeadwaterError
from headwater.disagg.node_auth import AUTH, HELLO, HELLO_PATH, Signer

_WAIT_S: Final = 600.0  # for the next bytes of an answer
_SAMPLE: Final = re.compile(r"headwater_(\w+)(?:{(.*)})? (\S+)$")
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')


class Sample(NamedTuple):
    """One line of /metrics."""

    name: str  # without the project's
    labels: Mapping[str, str]
    value: float


class BenchClient:
    """One connection. A request must be read to its end before the next; `close` ends one that is not."""

    def __init__(self, url: str, signer: Signer | None = None) -> None:
        """With a `signer`, requests are signed as a router's are."""
        self._signer = signer
        parts = urlsplit(url)
        self._connection = HTTPConnection(parts.hostname or "", parts.port, timeout=_WAIT_S)
        key = environment.default_api_key()  # the server reads it too
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def __enter__(self) -> Self:
        """Return self; it closes itself at the end of the block."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Close."""
        self._connection.close()

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """A stream's events, as they come. Raises HeadwaterError, OSError, HTTPException; blocks between them."""
        with self._ask("POST", path, body) as response:
            for line in response:
                data = line.decode().strip().removeprefix("data: ")
                if data and data != "[DONE]":
                    event = json.loads(data)
                    if "error" in event:
                        raise HeadwaterError(event["error"]["message"])
                    yield event

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """An answer in one piece. Blocks; raises as `events`."""
        with self._ask("POST", path, body) as response:
            found: dict[str, Any] = json.loads(response.read())
        return found

    def metrics(self) -> list[Sample]:
        """What /metrics say. Blocks; raises as `events`."""
        with self._ask("GET", "/metrics", None) as response:
            lines = response.read().decode().splitlines()
        found = [match for match in map(_SAMPLE.match, lines) if match is not None]
        return [Sample(match[1], dict(_LABEL.findall(match[2] or "")), float(match[3])) for match in found]

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> HTTPResponse:
        content = b"" if body is None else json.dumps(body).encode()
        nonce, headers = self._signed(method, path, content)
        self._connection.request(method, path, content or None, {**self._headers, **headers})
        response = self._connection.getresponse()
        if self._signer is not None:
            self._signer.check(nonce, response.status, dict(response.headers))
        if response.status != 200:
            said = response.read(1000).decode(errors="replace")
            raise HeadwaterError(f"status {response.status}: {said}")
        return response

    def _signed(self, method: str, path: str, content: bytes) -> tuple[str, dict[str, str]]:
        if self._signer is None:
            return "", {}
        if self._signer.challenge is None:
            nonce, header = self._signer.hello()
            self._connection.request("GET", HELLO_PATH, headers={HELLO: header})
            response = self._connection.getresponse()
            response.read()
            self._signer.check(nonce, response.status, dict(response.headers))
        nonce, header = self._signer.sign(method=method, target=path, body=content)
        return nonce, {AUTH: header}
