"""Grouped-query attention on key and value planes [heads, block, head_dim], plain or in FP8 with scale planes.

What is new is written first and used as written: rounded to the plane's dtype, or quantised. A prompt from position 0
attends to that without reading it back; everything else is gathered from the request's blocks. Bytes and results are
the same either way.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

import torch
from torch import Tensor

from headwater.engine.attention.base import TORCH_DTYPE, causal_attention, masked_attention, read_rows, write_rows
from headwater.engine.attention.quantise import dequantise_heads, quantise_heads
from headwater.engine.step import Group, Step
from headwater.layout.gqa import gqa_fp8_layout, gqa_layout
from headwater.layout.spec import KEY, KEY_SCALE, VALUE, VALUE_SCALE, DType, KVLayout
from headwater.transfer.device.arena import DeviceCache

_Stored: TypeAlias = tuple[Tensor, ...]  # one tensor per role: values, and scales where there are any

_KEY_ROLES: Final = (KEY.name, KEY_SCALE.name)
_VALUE_ROLES: Final = (VALUE.name, VALUE_SCALE.name)


@dataclass(frozen=True, kw_only=True)
class GqaAttention:
    """The backend. `kv_dtype` FP8_E4M3 means FP8 with a bf16 scale per head and token."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    kv_dtype: DType
    dtype: torch.dtype  # of queries, keys and values as the model has them

    @property
    def fp8(self) -> bool:
        """Whether values are quantised."""
        return self.kv_dtype is DType.FP8_E4M3

    @cached_property
    def layout(self) -> KVLayout:
        """Key and value planes of all layers, with scale planes where values are FP8."""
        make = gqa_fp8_layout if self.fp8 else gqa_layout
        return make(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_tokens=self.block_tokens,
            dtype=self.kv_dtype,
        )

    @property
    def heads(self) -> int:
        """Rows per token."""
        return self.num_kv_heads

    @property
    def quantisation(self) -> str:
        """How FP8 values and their scales were made."""
        return "e4m3, scale amax/448 per head and token" if self.fp8 else ""

    def attend(self, planes: DeviceCache, layer: int, step: Step, *, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v [tokens, kv heads, dim], attend with q [tokens, heads, dim] -> [tokens, heads x dim]."""
        stored = self._encode(k), self._encode(v)
        for roles, tensors in zip((_KEY_ROLES, _VALUE_ROLES), stored, strict=True):
            for role, tensor in zip(roles, tensors, strict=False):
                write_rows(planes.tensors[role, layer], step.rows, tensor.flatten(0, 1))
        out = [self._group(planes, layer, group, q[group.tokens], stored) for group in step.groups]
        return (out[0] if len(out) == 1 else torch.cat(out)).flatten(1)

    def _group(
        self, planes: DeviceCache, layer: int, group: Group, q: Tensor, stored: tuple[_Stored, _Stored]
    ) -> Tensor:
        scale = self.head_dim**-0.5
        if group.fresh:
            keys, values = (self._decode(tuple(x[group.tokens] for x in one)).transpose(0, 1) for one in stored)
            return causal_attention(q, keys, values, scale=scale)
        keys, values = (self._read(planes, layer, group, roles) for roles in (_KEY_ROLES, _VALUE_ROLES))
        if not group.few:
            return causal_attention(q, keys[0], values[0], scale=scale)
        visible = None if group.uniform and group.num_new == 1 else group.visible
        spans = q.view(group.num_spans, group.num_new, *q.shape[1:])
        return masked_attention(spans, keys, values, visible=visible, scale=scale).flatten(0, 1)

    def _read(self, planes: DeviceCache, layer: int, group: Group, roles: tuple[str, str]) -> Tensor:
        """All positions of a group, [spans, kv heads, positions, dim]."""
        widths = (self.head_dim, 1) if self.fp8 else (self.head_dim,)
        return self._decode(
            tuple(
                read_rows(planes.tensors[role, layer], group.rows, width)
                for role, width in zip(roles, widths, strict=False)
            )
        )

    def _encode(self, x: Tensor) -> _Stored:
        if self.fp8:
            return quantise_heads(x, torch.bfloat16)
        return (x.to(TORCH_DTYPE[self.kv_dtype]),)

    def _decode(self, stored: _Stored) -> Tensor:
        if self.fp8:
            values, scale = stored
            return dequantise_heads(values, scale, self.dtype)
        return stored[0].to(self.dtype)
