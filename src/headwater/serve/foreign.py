"""Whether a local store has a prompt's blocks under another identity: another model, configuration, KV type ...

After a restart with other settings a directory is full and yet has nothing. Servers write into their stores what their
identity is in short (a label, `build/engine.py`; `headwater ls` shows it); whoever looks for a prompt under that
identity can say which fields differ. Pools do not tell whose pages they have.

Reads a store's whole index, twice for each identity at most; what is not found in time is not known.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from headwater.cache.explanations import Text
from headwater.core.errors import StoreError
from headwater.core.events import NO_TENANT
from headwater.core.identity import differences, root_of
from headwater.core.keys import block_keys
from headwater.core.page import KEY_BYTES
from headwater.storage.base import Deadline, Store
from headwater.storage.local import LocalStore
from headwater.storage.local.families import FamilyUse

_LEFT_OUT: Final = "identity"  # what differs, where nobody wrote down what it is


def find_foreign(stores: Mapping[str, Store], text: Text, start: int, deadline: Deadline) -> dict[str, Any] | None:
    """Where the block `start` of a text without a salt is under another identity, and what differs. Blocks.

    Of several, the one that differs in the fewest fields.
    """
    need, mine = (start + 1) * text.identity.block_tokens, text.identity.in_short()
    found: list[tuple[dict[str, str], str]] = []
    for tier, store in stores.items():
        if not isinstance(store, LocalStore):
            continue
        with suppress(StoreError):
            for family in store.usage(deadline=deadline):
                if family.tenant == NO_TENANT and family.identity != text.identity.digest:
                    fields = dict(word.split("=", 1) for word in family.label.split() if "=" in word)
                    if _has(store, family, fields, text, need, deadline):
                        unknown = {_LEFT_OUT: family.identity.hex()[:8]}
                        found.append((differences(mine, fields) if fields else unknown, tier))
    if not found:
        return None
    nearest, tier = min(found, key=lambda one: len(one[0]))
    return {"differs_in": nearest, "tier": tier}


def _has(
    store: LocalStore, family: FamilyUse, fields: Mapping[str, str], text: Text, need: int, deadline: Deadline
) -> bool:
    """Whether a family has a text up to some token, or up to its last whole block before."""
    said = fields.get("block_tokens", "")
    size = int(said) if said.isdecimal() and int(said) else text.identity.block_tokens
    num = -(-need // size) if -(-need // size) * size <= len(text.tokens) else need // size
    if not num:
        return False
    key = block_keys(text.tokens[: num * size], parent=root_of(family.identity), block_tokens=size)[-1]
    names = store.names(deadline=deadline, identity=family.identity, tenant=family.tenant)
    return any(name[:KEY_BYTES] == key for name in names)
