"""FP8 bytes with scales, and the packed rows of a sparse latent cache: how values become a plane's bytes and back.

    per head       e4m3 values of one head of one token, one scale: amax / 448, rounded to the scale plane's dtype
    packed rows    e4m3 values, an fp32 scale for each 128 of them: the least power of two >= amax / 448
        key row      lora values ‖ lora/128 scales ‖ rope as bf16         512 + 16 + 128 = 656 bytes
        indexer row  dim values ‖ dim/128 scales                                128 + 4 = 132 bytes

A row holds its own scales, so rows can be written one by one and a block can be cut between tokens. Values are divided
by the scale *as it is stored*, so unpacking needs nothing that is not in the row. All arithmetic is in fp32; the same
values give the same bytes on every device. Pure functions; nothing here knows planes or slots.
"""

from typing import Final

import torch
from torch import Tensor

FP8: Final = torch.float8_e4m3fn
FP8_MAX: Final = 448.0
GROUP: Final = 128  # values that share a scale in a packed row

_TINY: Final = 1e-12  # a head of zeros still needs a scale to divide by


def quantise_heads(values: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """FP8 values [..., D] and their scales [..., 1]."""
    wide = values.float()
    scale = (wide.abs().amax(-1, keepdim=True).clamp_min(_TINY) / FP8_MAX).to(scale_dtype)
    return (wide / scale.float()).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scale


def dequantise_heads(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What `quantise_heads` kept of the values."""
    return (values.float() * scale.float()).to(dtype)


def pack_key_rows(latent: Tensor, rope: Tensor) -> Tensor:
    """Key rows [n, lora + lora/32 + 2 x rope] uint8 of latents [n, lora] and rotary parts [n, rope]."""
    return torch.cat((_pack(latent), rope.to(torch.bfloat16).contiguous().view(torch.uint8)), dim=-1)


def unpack_key_rows(rows: Tensor, lora: int, dtype: torch.dtype) -> Tensor:
    """Latents and rotary parts [..., lora + rope] of key rows."""
    end = lora + 4 * (lora // GROUP)
    rope = rows[..., end:].contiguous().view(torch.bfloat16).to(dtype)
    return torch.cat((_unpack(rows[..., :end], lora).to(dtype), rope), dim=-1)


def pack_index_rows(keys: Tensor) -> Tensor:
    """Indexer rows [n, dim + dim/32] uint8 of indexer keys [n, dim]."""
    return _pack(keys)


def unpack_index_rows(rows: Tensor, dim: int) -> Tensor:
    """Indexer keys [..., dim] of indexer rows, fp32."""
    return _unpack(rows, dim)


def _pack(values: Tensor) -> Tensor:
    grouped = values.float().unflatten(-1, (-1, GROUP))  # type: ignore[no-untyped-call]
    scale = _power_of_two(grouped.abs().amax(-1, keepdim=True) / FP8_MAX)
    quantised = (grouped / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8).flatten(-2)
    return torch.cat((quantised.view(torch.uint8), scale.flatten(-2).view(torch.uint8)), dim=-1)


def _unpack(rows: Tensor, num_values: int) -> Tensor:
    values = rows[..., :num_values].view(FP8).float().unflatten(-1, (-1, GROUP))  # type: ignore[no-untyped-call]
    scale = rows[..., num_values:].contiguous().view(torch.float32)
    unpacked: Tensor = (values * scale[..., None]).flatten(-2)
    return unpacked


def _power_of_two(values: Tensor) -> Tensor:
    """The least power of two that is not below each value, exactly; for 0 some small one."""
    bits = values.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent.clamp(1, 254) << 23).view(torch.float32)  # at least the smallest normal number
