"""How a page is named in every store: the block's key, the tensor-parallel shard and the part, in 40 bytes.

Rank and size are in the *name* (and in the frame), never in the identity, so that the shards of one logical block find
each other. `(0, 1)` is a whole block, or a part that all ranks share. `part` tells which planes a page holds where the
shard does not: (0, 1) of a mixed model is all planes on one rank, and only the replicated ones on two.
"""

import struct
from typing import NewType

from headwater.core.errors import InvalidInput

PageName = NewType("PageName", bytes)

KEY_BYTES = 32
NAME_BYTES = KEY_BYTES + 8
_REST = struct.Struct("<HHI")


def page_name(key: bytes, shard_index: int = 0, shard_count: int = 1, *, part: int = 0) -> PageName:
    """Name of the page that holds shard `shard_index` of `shard_count` of one part of the block `key`."""
    if len(key) != KEY_BYTES:
        raise InvalidInput(f"a block key has {KEY_BYTES} bytes, this one has {len(key)}")
    if not 0 <= shard_index < shard_count <= 0xFFFF:
        raise InvalidInput(f"shard {shard_index} of {shard_count} does not exist")
    if not 0 <= part < 1 << 32:
        raise InvalidInput(f"part {part} is not a u32")
    return PageName(bytes(key) + _REST.pack(shard_index, shard_count, part))
