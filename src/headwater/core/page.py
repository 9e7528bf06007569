"""How a page is named in every store: the block's key and the tensor-parallel shard, in 36 bytes.

A block of one rank's KV is one page. Rank and size are part of the *name* (and of the frame), never of the identity, so
that shards of one logical block find each other. `(0, 1)` is a whole block, or a replicated part that all ranks share.
"""

import struct
from typing import NewType

from headwater.core.errors import InvalidInput

PageName = NewType("PageName", bytes)

KEY_BYTES = 32
NAME_BYTES = KEY_BYTES + 4
_SHARD = struct.Struct("<HH")


def page_name(key: bytes, shard_index: int = 0, shard_count: int = 1) -> PageName:
    """Name of the page that holds shard `shard_index` of `shard_count` of the block `key`."""
    if len(key) != KEY_BYTES:
        raise InvalidInput(f"a block key has {KEY_BYTES} bytes, this one has {len(key)}")
    if not 0 <= shard_index < shard_count <= 0xFFFF:
        raise InvalidInput(f"shard {shard_index} of {shard_count} does not exist")
    return PageName(bytes(key) + _SHARD.pack(shard_index, shard_count))


def split_name(name: PageName) -> tuple[bytes, int, int]:
    """Key, shard index and shard count of a page name."""
    if len(name) != NAME_BYTES:
        raise InvalidInput(f"a page name has {NAME_BYTES} bytes, this one has {len(name)}")
    index, count = _SHARD.unpack_from(name, KEY_BYTES)
    return name[:KEY_BYTES], index, count
