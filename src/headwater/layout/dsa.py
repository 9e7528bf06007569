"""Sparse attention over a latent cache with an indexer: two planes per layer, both replicated on every rank.

Quantised rows are bytes, because one row mixes types:

    key row      lora fp8 values ‖ lora/128 fp32 scales ‖ rope bf16 values      512 + 16 + 128 = 656 bytes
    indexer row  dim fp8 values and dim/128 fp32 scales                               128 + 4  = 132 bytes

Where inside an indexer *block* its scales sit (row by row, or behind all values) is the kernel's choice and changes no
size; the bytes are moved as they are.
"""

from headwater.core.errors import InvalidLayout
from headwater.layout.spec import INDEXER, KEY, DType, KVLayout, Plane

_GROUP = 128  # values that share one fp32 scale


def dsa_layout(
    *,
    num_layers: int,
    block_tokens: int,
    lora_rank: int = 512,
    rope_dim: int = 64,
    index_dim: int = 128,
    layer_offset: int = 0,
) -> KVLayout:
    """Describe the quantised cache."""
    key_row = _quantised("lora_rank", lora_rank) + 2 * rope_dim
    index_row = _quantised("index_dim", index_dim)
    return _layout(num_layers, layer_offset, block_tokens, rows=(key_row, index_row), dtype=DType.UINT8)


def dsa_plain_layout(
    *,
    num_layers: int,
    block_tokens: int,
    dtype: DType = DType.BF16,
    lora_rank: int = 512,
    rope_dim: int = 64,
    index_dim: int = 128,
    layer_offset: int = 0,
) -> KVLayout:
    """Describe the same cache without quantisation, to compare with."""
    return _layout(num_layers, layer_offset, block_tokens, rows=(lora_rank + rope_dim, index_dim), dtype=dtype)


def _quantised(name: str, num_values: int) -> int:
    if num_values % _GROUP:
        raise InvalidLayout(f"{name} must be a multiple of {_GROUP} (one scale each), not {num_values}")
    return num_values + 4 * (num_values // _GROUP)


def _layout(num_layers: int, layer_offset: int, block_tokens: int, *, rows: tuple[int, int], dtype: DType) -> KVLayout:
    planes = [
        Plane(role, layer, (block_tokens, row), dtype, token_axis=0)
        for layer in range(layer_offset, layer_offset + num_layers)
        for role, row in zip((KEY, INDEXER), rows, strict=True)
    ]
    return KVLayout(block_tokens, tuple(planes))
