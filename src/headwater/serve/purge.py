"""`POST /admin/purge`: blocks that somebody wants gone from a server's cache, by prefix or by tenant; and who asks.

A prefix is purged from its last full block on, or from `from_token`: that block, and all that builds on it. Blocks
before it stay, because other prompts begin with them too. The asking side needs no server's packages.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from headwater.cache.cache import TieredCache
from headwater.cache.match import DEVICE
from headwater.core.errors import HeadwaterError, InvalidInput
from headwater.core.identity import CacheIdentity
from headwater.core.keys import BlockKey, block_keys
from headwater.serve.ask_server import ask_server

PURGE: Final = "/admin/purge"
MAX_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeReport:
    """What came of it, in blocks on the device and pages in stores."""

    from_token: int | None  # where the first block that went begins; None: a whole tenant
    removed: dict[str, int]  # by tier
    held: int  # of the device's: they leave with the requests that use them, and nobody new gets them
    left: dict[str, int]  # that could not be removed in time
    unreached: dict[str, str]  # tiers that may hold more, and why

    @property
    def whole(self) -> bool:
        """Whether nothing is left anywhere."""
        return not self.left and not self.unreached

    def document(self) -> dict[str, Any]:
        """As plain JSON."""
        return {**asdict(self), "whole": self.whole}


def prefix_keys(tokens: Sequence[int], identity: CacheIdentity, from_token: int | None) -> list[BlockKey]:
    """The path to the first block that is to go. Raises InvalidInput for a prefix without such a block."""
    size = identity.block_tokens
    keys = block_keys(tokens, parent=identity.root, block_tokens=size)
    if not keys:
        message = f"blocks have {size} tokens here, and this prefix {len(tokens)}: give a longer one, or purge a tenant"
        raise InvalidInput(message)
    first = len(keys) - 1 if from_token is None else from_token // size
    if not 0 <= first < len(keys):
        raise InvalidInput(f"from_token must lie within the {len(keys) * size} tokens of the prefix's full blocks")
    return keys[: first + 1]


def purge(
    cache: TieredCache,
    identity: CacheIdentity,
    *,
    salt: bytes,
    tokens: Sequence[int] | None,
    from_token: int | None = None,
    timeout_s: float,
) -> PurgeReport:
    """Have a prefix of a tenant gone, or without `tokens` the whole tenant. Blocks, about `timeout_s` at most.

    Raises InvalidInput for a prefix without a full block; what `TieredCache.purge` raises.
    """
    whose = replace(identity, salt=salt)
    keys = [] if tokens is None else prefix_keys(tokens, whose, from_token)
    said, tiers = cache.purge(keys, tenant=whose.tenant, timeout_s=timeout_s)
    return PurgeReport(
        from_token=(len(keys) - 1) * whose.block_tokens if keys else None,
        removed={DEVICE: len(said.keys), **{one.tier: one.num_removed for one in tiers}},
        held=said.num_held,
        left={one.tier: one.num_left for one in tiers if one.num_left},
        unreached={one.tier: one.unreached for one in tiers if one.unreached},
    )


def ask_to_purge(url: str, order: dict[str, Any], *, key: str | None, timeout_s: float) -> PurgeReport:
    """Have the server at a URL do it. Blocks. Raises HeadwaterError with what the server said, or why it did not."""
    body = json.dumps(order).encode()
    found = ask_server(url, PURGE, key=key, timeout_s=timeout_s + 10.0, body=body)
    try:
        return PurgeReport(
            from_token=found["from_token"],
            removed=dict(found["removed"]),
            held=found["held"],
            left=dict(found["left"]),
            unreached=dict(found["unreached"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise HeadwaterError(f"no headwater server answers at {url}: {error}") from error
