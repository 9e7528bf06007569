"""Grouped-query attention: a key and a value plane per layer, [heads, block, head_dim], divided over ranks by head.

MHA is the case where there are as many KV heads as query heads, MQA the case of one. Not here: what scales *outside*
the pages mean (an int8 cache with one scale per tensor); their digest belongs to the cache identity.
"""

from headwater.core.errors import InvalidLayout
from headwater.layout.spec import KEY, KEY_SCALE, VALUE, VALUE_SCALE, DType, KVLayout, Plane

_HEADS = 0  # axis of the shape that ranks divide
_TOKENS = 1


def gqa_layout(
    *, num_layers: int, num_kv_heads: int, head_dim: int, block_tokens: int, dtype: DType, layer_offset: int = 0
) -> KVLayout:
    """Describe an unquantised cache, or one whose scales are kept outside the pages."""
    shape = (num_kv_heads, block_tokens, head_dim)
    layers = range(layer_offset, layer_offset + num_layers)
    planes = (Plane(role, layer, shape, dtype, _HEADS, _TOKENS) for layer in layers for role in (KEY, VALUE))
    return KVLayout(block_tokens, tuple(planes))


def gqa_fp8_layout(
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    block_tokens: int,
    dtype: DType = DType.FP8_E4M3,
    scale_dtype: DType = DType.BF16,
    layer_offset: int = 0,
) -> KVLayout:
    """Describe a one-byte cache with a scale per head and token in planes of their own, [heads, block]."""
    if dtype.itemsize != 1:
        raise InvalidLayout(f"a cache with scales has one-byte values, not {dtype.value}")
    values = gqa_layout(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        dtype=dtype,
        layer_offset=layer_offset,
    )
    shape = (num_kv_heads, block_tokens)
    layers = range(layer_offset, layer_offset + num_layers)
    scales = (
        Plane(role, layer, shape, scale_dtype, _HEADS, _TOKENS) for layer in layers for role in (KEY_SCALE, VALUE_SCALE)
    )
    return KVLayout(block_tokens, (*values.planes, *scales))
