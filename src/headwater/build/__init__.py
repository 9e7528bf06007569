"""The one place that names concrete classes and introduces rooms to each other.

stores.py   what a configuration calls a tier or a pool     cache.py   a cache over them, from its parts
tiered.py   the same for an engine of one's own             engine.py  our engine
"""

from headwater.build.cache import open_cache, open_group, open_publisher, open_rank, open_recorder, open_residency
from headwater.build.engine import Running, open_engine
from headwater.build.stores import POOL_TIER, open_host_pages, open_local, open_pool, open_tier, open_tiers
from headwater.build.tiered import open_staging, open_tiered_cache

__all__ = [
    "POOL_TIER",
    "Running",
    "open_cache",
    "open_engine",
    "open_group",
    "open_host_pages",
    "open_local",
    "open_pool",
    "open_publisher",
    "open_rank",
    "open_recorder",
    "open_residency",
    "open_staging",
    "open_tier",
    "open_tiered_cache",
    "open_tiers",
]
