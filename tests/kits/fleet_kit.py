"""A fleet's key for tests, and requests that are signed with it."""

from collections.abc import Generator

import httpx2

from headwater.core.node_key import NodeKey
from headwater.disagg.node_auth import AUTH, HELLO, HELLO_PATH, ROUTER, Signer
from headwater.disagg.signing import SignedBy

KEY = NodeKey.random(own=True)


class Signed(httpx2.Auth):
    """Signs what is for the fleet, and nothing else. Several threads may use it."""

    requires_request_body = True

    def __init__(self, who: str = ROUTER, key: NodeKey = KEY) -> None:
        self._key = key
        self._who = who

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        if request.url.path.startswith("/pd/"):
            yield from SignedBy(Signer(self._key, self._who)).auth_flow(request)
        else:
            yield request


def signature(url: str, path: str, body: bytes, *, who: str = ROUTER, key: NodeKey = KEY) -> dict[str, str]:
    """The header of a POST that is sent by hand."""
    signer = Signer(key, who)
    nonce, header = signer.hello()
    with httpx2.Client(base_url=url, timeout=30.0, trust_env=False) as client:
        found = client.get(HELLO_PATH, headers={HELLO: header})
    signer.check(nonce, found.status_code, found.headers)
    return {AUTH: signer.sign(method="POST", target=path, body=body)[1]}
