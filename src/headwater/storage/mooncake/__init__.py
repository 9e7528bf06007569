"""MooncakeStore: pages in a Mooncake pool. The engine's own package is loaded when a pool is opened."""

from headwater.storage.mooncake.store import MooncakeStore

__all__ = ["MooncakeStore"]
