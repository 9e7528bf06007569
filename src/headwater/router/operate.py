"""What an operator asks of a router, signed with the fleet's key: that a node drains, or is used again."""

from typing import Any, Final

from headwater.core.errors import HeadwaterError, needs_extra
from headwater.core.node_key import NodeKey
from headwater.disagg.headers import DRAIN
from headwater.disagg.node_auth import ROUTER, Signer
from headwater.disagg.signing import SignedBy

with needs_extra("serve"):
    import httpx2

_TIMEOUT_S: Final = 10.0


def drain(router: str, node: str, *, draining: bool, key: NodeKey) -> dict[str, Any]:
    """Have a router give a node nothing new, or something again; what it answers. Blocks. Raises HeadwaterError."""
    auth = SignedBy(Signer(key, ROUTER))
    try:
        with httpx2.Client(auth=auth, timeout=_TIMEOUT_S, trust_env=False) as client:
            found = client.post(f"{router}{DRAIN}", json={"node": node, "draining": draining})
            document: dict[str, Any] = found.json()
    except (httpx2.HTTPError, ValueError) as error:
        raise HeadwaterError(f"the router at {router} does not answer: {str(error) or type(error).__name__}") from error
    if found.status_code != 200:
        raise HeadwaterError(str(document.get("error", {}).get("message", f"status {found.status_code}")))
    return document
