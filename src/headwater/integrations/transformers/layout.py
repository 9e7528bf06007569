"""What one block of a DynamicCache looks like: a key and a value plane per layer, [heads, block, head_dim].

That is the order in which transformers keeps them, so a block is a slice of a layer's tensors. Shapes and dtype are
those that the model really wrote into a cache, not those that its configuration lets one expect: in some families keys
are wider than values, or layers differ.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch

from headwater.core.errors import InvalidInput
from headwater.layout.spec import KEY, VALUE, DType, KVLayout, Plane

_DTYPES: Final = {torch.bfloat16: DType.BF16, torch.float16: DType.FP16, torch.float32: DType.FP32}
_HEADS: Final = 0
_TOKENS: Final = 1


def cache_layout(layers: Sequence[Any], block_tokens: int) -> KVLayout:
    """The layout of a cache's layers, which hold the KV of at least one token. Raises InvalidInput."""
    planes: list[Plane] = []
    for number, layer in enumerate(layers):
        for role, tensor in ((KEY, layer.keys), (VALUE, layer.values)):
            if tensor is None or tensor.dim() != 4 or len(tensor) != 1 or not tensor.shape[2]:
                raise InvalidInput(f"layer {number} of the cache has no keys and values by head and token")
            if tensor.dtype not in _DTYPES:
                raise InvalidInput(f"the cache holds {tensor.dtype}; taken are {', '.join(map(str, _DTYPES))}")
            shape = (tensor.shape[1], block_tokens, tensor.shape[3])
            planes.append(Plane(role, number, shape, _DTYPES[tensor.dtype], _HEADS, _TOKENS))
    return KVLayout(block_tokens, tuple(planes))
