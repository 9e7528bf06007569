"""At a server's door: requests of the fleet's own routers and nodes, which are signed; their answers are signed too.

Everything under `/pd/` is for them and for nobody else, whatever key a client shows. Elsewhere a request that is signed
comes in without a client's key: that is how a router asks a mixed node. What a signature is says `disagg/node_auth.py`;
here is where it is found in a request, and that a body is what was signed before anybody has read it to its end.
"""

import hashlib
from typing import Final
from urllib.parse import quote

from headwater.core.errors import needs_extra
from headwater.disagg.headers import FLEET
from headwater.disagg.node_auth import AUTH, HELLO, HELLO_PATH, Admitted, Authenticator, NotAdmitted
from headwater.serve import errors

with needs_extra("serve"):
    from starlette.types import Message, Receive, Scope


class FleetGuard:
    """Lets the fleet in. For one event loop."""

    def __init__(self, authenticator: Authenticator, *, members_only: bool = False) -> None:
        """`members_only`: nobody but the fleet is let in anywhere, where no client's key says otherwise."""
        self.members_only: Final = members_only
        self._authenticator = authenticator

    def admit(self, scope: Scope) -> Admitted | None:
        """Who a request is of; None: not of the fleet, and it need not be. Raises ApiError."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"] if name in _HEADERS}
        try:
            if scope["path"] == HELLO_PATH:
                return self._authenticator.admit_hello(headers.get(HELLO.encode()))
            if scope["path"].startswith(FLEET) or AUTH.encode() in headers:
                return self._authenticator.admit(
                    headers.get(AUTH.encode()), method=scope["method"], target=_target(scope)
                )
        except NotAdmitted as error:
            raise errors.not_of_the_fleet(str(error)) from error
        return None

    def headers(self, admitted: Admitted, status: int) -> list[tuple[bytes, bytes]]:
        """What an answer says besides."""
        return [(name.encode(), value.encode()) for name, value in self._authenticator.answer(admitted, status).items()]


def checked(receive: Receive, admitted: Admitted) -> Receive:
    """A request's body, as it comes; ApiError in place of its end if it is not what was signed."""
    digest = hashlib.sha256()

    async def receiving() -> Message:
        message = await receive()
        if message["type"] == "http.request":
            digest.update(message.get("body", b""))
            if not message.get("more_body", False) and not admitted.fits(digest.hexdigest()):
                raise errors.not_of_the_fleet("the body is not the one that was signed")
        return message

    return receiving


_HEADERS: Final = {AUTH.encode(), HELLO.encode()}


def _target(scope: Scope) -> str:
    """What was asked for, as it was written."""
    path = scope.get("raw_path") or quote(scope["path"]).encode()
    query = scope.get("query_string", b"")
    return bytes(path + b"?" + query if query else path).decode("latin-1")
