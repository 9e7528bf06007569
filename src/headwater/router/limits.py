"""What a router's door lets in: `serve/limits.py`, with the numbers of a router."""

from collections.abc import Iterable

from headwater.router.settings import RouterConfig
from headwater.serve.limits import LOOPBACK, MAX_CONNECTIONS, NUM_BODIES, Limits, hosts_for


def router_limits(
    config: RouterConfig,
    *,
    bound: str = LOOPBACK,
    max_connections: int | None = None,
    allowed_hosts: Iterable[str] = (),
) -> Limits:
    """The limits of a router that is bound to that address."""
    return Limits(
        request_timeout_s=config.request_timeout_s,
        max_connections=max_connections or MAX_CONNECTIONS,
        bodies_bytes=NUM_BODIES * config.max_body_bytes,
        hosts=hosts_for(bound, key=config.api_key, allowed=allowed_hosts),
    )
