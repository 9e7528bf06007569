"""Multi-head latent attention: one latent plane per layer, [block, lora_rank + rope_dim], the same on every rank.

There is no head axis to divide, so the plane is replicated; `shard.py` then stores it once for all ranks.
"""

from headwater.layout.spec import LATENT, DType, KVLayout, Plane


def mla_layout(
    *,
    num_layers: int,
    block_tokens: int,
    dtype: DType = DType.BF16,
    lora_rank: int = 512,
    rope_dim: int = 64,
    layer_offset: int = 0,
) -> KVLayout:
    """Describe a latent cache: the compressed KV and the rotary part of the key in one row per token."""
    shape = (block_tokens, lora_rank + rope_dim)
    layers = range(layer_offset, layer_offset + num_layers)
    return KVLayout(block_tokens, tuple(Plane(LATENT, layer, shape, dtype, token_axis=0) for layer in layers))
