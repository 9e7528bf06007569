"""Rule 9: the positions of a partial block that hold no token are zero before it is sealed, and when it is used.

What an engine left there (an older request's KV, rejected draft tokens) is not the page's, and must not change its
digest either: two writers of the same tail seal the same bytes.
"""

import math

import numpy as np

from headwater.core.errors import InvalidConfig, InvalidInput, InvalidLayout
from headwater.layout.spec import KVLayout


def require_tails(layout: KVLayout) -> None:
    """Raise InvalidConfig for a layout whose blocks cannot be cut between tokens: it has no tails to hand over."""
    blunt = [plane.name for plane in layout.planes if plane.token_axis is None]
    if blunt:
        raise InvalidConfig(
            f"plane {blunt[0]} does not say which axis its tokens are on, so a prompt's last block cannot be handed "
            "over: give its Plane a token_axis, or do not part prefill from decode"
        )


def is_zero_behind(payload: memoryview, layout: KVLayout, valid_tokens: int) -> bool:
    """Whether a payload holds nothing behind so many tokens. Mutates nothing. Raises as `zero_tail`."""
    clean = bytearray(payload)
    zero_tail(memoryview(clean), layout, valid_tokens)
    return np.array_equal(np.frombuffer(payload, np.uint8), np.frombuffer(clean, np.uint8))


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
