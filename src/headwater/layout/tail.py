"""Rule 9: the positions of a partial block that hold no token are zero before the block is sealed.

What an engine left there (an older request's KV, rejected draft tokens) is not the page's, and must not change its
digest either: two writers of the same tail seal the same bytes.
"""

import math

import numpy as np

from headwater.core.errors import InvalidInput, InvalidLayout
from headwater.layout.spec import KVLayout


def zero_tail(payload: memoryview, layout: KVLayout, valid_tokens: int) -> None:
    """Zero every position from `valid_tokens` on, in every plane. Mutates `payload`; a full block is left alone."""
    if not 0 < valid_tokens <= layout.block_tokens:
        raise InvalidInput(f"a block of {layout.block_tokens} tokens cannot hold {valid_tokens} valid ones")
    if valid_tokens == layout.block_tokens:
        return
    for plane, offset in zip(layout.planes, layout.offsets, strict=True):
        axis = plane.token_axis
        if axis is None:
            raise InvalidLayout(
                f"plane {plane.name} does not say which axis its tokens are on: it has no partial blocks"
            )
        outer = math.prod(plane.shape[:axis])
        data = np.frombuffer(payload[offset : offset + plane.num_bytes], dtype=np.uint8)
        data.reshape(outer, layout.block_tokens, -1)[:, valid_tokens:] = 0
