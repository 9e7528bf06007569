"""LocalStore: one directory of pages, in memory or on a disk, shared by the processes of a machine."""

from headwater.storage.local.mapped import MappedStore
from headwater.storage.local.names import LocalNames
from headwater.storage.local.store import LocalStore

__all__ = ["LocalNames", "LocalStore", "MappedStore"]
