"""Headwater: a tiered, shared, verified KV cache for LLM serving.

What is here is for everybody (`docs/API.md`); all else may change without notice. Names are loaded when they are first
used: torch takes a second, and who only looks into a store does without.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

from headwater.core.version import __version__

if TYPE_CHECKING:
    from headwater.attention_store import AttentionStore
    from headwater.build import open_local, open_pool, open_tiered_cache
    from headwater.cache.cache import TieredCache
    from headwater.config.stores import CacheTiers, LocalStoreConfig
    from headwater.core.errors import HeadwaterError, InvalidInput, StoreError
    from headwater.core.identity import CacheIdentity, config_digest
    from headwater.core.keys import block_keys
    from headwater.layout.gqa import gqa_layout
    from headwater.layout.mla import mla_layout
    from headwater.layout.spec import DType, KVLayout
    from headwater.storage.base import Deadline
    from headwater.transfer.device.arena import create_kv_cache

_ROOMS: Final = {
    "AttentionStore": "attention_store",
    "CacheIdentity": "core.identity",
    "CacheTiers": "config.stores",
    "DType": "layout.spec",
    "Deadline": "storage.base",
    "HeadwaterError": "core.errors",
    "InvalidInput": "core.errors",
    "KVLayout": "layout.spec",
    "LocalStoreConfig": "config.stores",
    "StoreError": "core.errors",
    "TieredCache": "cache.cache",
    "block_keys": "core.keys",
    "config_digest": "core.identity",
    "create_kv_cache": "transfer.device.arena",
    "gqa_layout": "layout.gqa",
    "mla_layout": "layout.mla",
    "open_local": "build",
    "open_pool": "build",
    "open_tiered_cache": "build",
}

__all__ = [
    "AttentionStore",
    "CacheIdentity",
    "CacheTiers",
    "DType",
    "Deadline",
    "HeadwaterError",
    "InvalidInput",
    "KVLayout",
    "LocalStoreConfig",
    "StoreError",
    "TieredCache",
    "__version__",
    "block_keys",
    "config_digest",
    "create_kv_cache",
    "gqa_layout",
    "mla_layout",
    "open_local",
    "open_pool",
    "open_tiered_cache",
]


def __getattr__(name: str) -> Any:
    """Load a name of the list above. Raises AttributeError for others."""
    room = _ROOMS.get(name)
    if room is None:
        raise AttributeError(f"module 'headwater' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"headwater.{room}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """All of it."""
    return sorted({*globals(), *__all__})
