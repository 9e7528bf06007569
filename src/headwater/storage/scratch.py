"""Room for a moment: where a temporary store can lie, in memory or on a disk, and how large it has to be.

For demonstrations and benchmarks. Not for caches: whoever makes a directory here removes it. Invariant: `limit_for`
asks the slab's own arithmetic, so a store of that limit holds the pages without evicting one.
"""

import os
import tempfile
from pathlib import Path
from typing import Final

from headwater.config.stores import MIN_LIMIT_BYTES
from headwater.core.errors import InvalidInput
from headwater.storage.local import directory
from headwater.storage.local.geometry import SECTOR, Geometry, sectors

_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108  the tmpfs of every Linux
_MAX_FRAME_BYTES: Final = 1 << 30  # what the largest extent holds


def memory_root(need_bytes: int) -> Path:
    """A place on tmpfs with room for `need_bytes`, or the usual temporary directory where there is none."""
    usable = _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK) and directory.is_memory(_SHARED_MEMORY)
    return (
        _SHARED_MEMORY if usable and directory.free_bytes(_SHARED_MEMORY) >= need_bytes else Path(tempfile.gettempdir())
    )


def disk_root() -> Path:
    """A place for temporary files that is not memory, or the usual one where there is no such place."""
    usual = Path(tempfile.gettempdir())
    for path in (usual, Path("/var/tmp"), Path.cwd()):  # noqa: S108  a root, under which others make private directories
        if path.is_dir() and os.access(path, os.W_OK) and not directory.is_memory(path):
            return path
    return usual


def num_slots(limit_bytes: int, frame_bytes: int) -> int:
    """How many pages of this size a directory of this limit holds."""
    geometry = Geometry.plan(limit_bytes)
    return geometry.num_extents * geometry.slots_in_extent(sectors(frame_bytes))


def limit_for(*, frame_bytes: int, num_pages: int) -> int:
    """A byte limit, at most a little above the lowest, under which `num_pages` pages of this size stay."""
    if not 0 < frame_bytes <= _MAX_FRAME_BYTES:
        raise InvalidInput(f"a frame has 1 to {_MAX_FRAME_BYTES} bytes, not {frame_bytes}")
    limit_bytes = max(MIN_LIMIT_BYTES, frame_bytes * num_pages // SECTOR * SECTOR)
    while num_slots(limit_bytes, frame_bytes) < num_pages:
        limit_bytes += max(1 << 20, limit_bytes // 64)
    return limit_bytes
