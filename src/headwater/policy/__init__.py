"""Who leaves first: pure priorities, used by device slots and by stores alike."""

from headwater.core.errors import InvalidConfig
from headwater.policy.base import BlockFacts, Outlook, Policy
from headwater.policy.by_session import MOST_KEPT_S, BySession
from headwater.policy.history import History
from headwater.policy.leaves import LeafOrder
from headwater.policy.lru import Lru
from headwater.policy.lru_k import LruK
from headwater.policy.returns import NUM_KINDS, Returns, kind_of
from headwater.policy.sessions import Session, Sessions
from headwater.policy.value import Value
from headwater.policy.wishes import Wishes

__all__ = [
    "MOST_KEPT_S",
    "NUM_KINDS",
    "BlockFacts",
    "BySession",
    "History",
    "LeafOrder",
    "Lru",
    "LruK",
    "Outlook",
    "Policy",
    "Returns",
    "Session",
    "Sessions",
    "Value",
    "Wishes",
    "kind_of",
    "policy_by_name",
    "policy_names",
]

_POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (Lru, LruK, Value, BySession)}


def policy_names() -> list[str]:
    """The names of all policies."""
    return sorted(_POLICIES)


def policy_by_name(name: str) -> Policy:
    """The policy called `name`; an unknown one is refused with the list of those there are."""
    if name not in _POLICIES:
        raise InvalidConfig(f"no eviction policy {name!r}; there are: {', '.join(policy_names())}")
    return _POLICIES[name]()
