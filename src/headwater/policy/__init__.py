"""Who leaves first: pure priorities, used by device slots and by stores alike."""

from headwater.core.errors import InvalidConfig
from headwater.policy.base import BlockFacts, Policy
from headwater.policy.leaves import LeafOrder
from headwater.policy.lru import Lru

__all__ = ["BlockFacts", "LeafOrder", "Lru", "Policy", "policy_by_name"]

_POLICIES: dict[str, type[Policy]] = {Lru.name: Lru}


def policy_by_name(name: str) -> Policy:
    """The policy called `name`; an unknown one is refused with the list of those there are."""
    if name not in _POLICIES:
        raise InvalidConfig(f"no eviction policy {name!r}; there are: {', '.join(sorted(_POLICIES))}")
    return _POLICIES[name]()
