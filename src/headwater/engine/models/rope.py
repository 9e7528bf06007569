"""Rotary position embeddings: the frequencies of a config, plain or scaled (llama3, yarn), and the rotation itself.

A frequency is one over theta^(2i/dim). `llama3` divides the slow ones by a factor and blends in between, by wavelength
against the original context; `yarn` the same by dimension, and stretches cos and sin by an attention factor. Everything
is computed in fp32, angles are positions times frequencies; nothing is kept per position.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from headwater.core.errors import InvalidInput
from headwater.engine.models.settings import Settings

KNOWN: Final = ("default", "llama3", "yarn")
_FIELDS: Final = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor"),  # llama3
    *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate", "finetuned"),  # yarn
)


@dataclass(frozen=True)
class Rotation:
    """The angles of a step's tokens, in the model's dtype: [tokens, 1, dim / 2]."""

    cos: Tensor
    sin: Tensor

    def halves(self, x: Tensor) -> Tensor:
        """Rotate x [tokens, heads, dim], where value i turns with value i + dim / 2."""
        first, second = x.chunk(2, dim=-1)
        return self._turn(first, second)

    def pairs(self, x: Tensor) -> Tensor:
        """Rotate x [tokens, heads, dim], where value 2i turns with value 2i + 1; the result is in halves' order.

        Queries and keys are reordered alike, so their products are what they would be in the original order.
        """
        return self._turn(x[..., 0::2], x[..., 1::2])

    def _turn(self, first: Tensor, second: Tensor) -> Tensor:
        out = first.new_empty(*first.shape[:-1], 2 * first.shape[-1])
        low, high = out.chunk(2, dim=-1)
        torch.mul(first, self.cos, out=low).addcmul_(second, self.sin, value=-1)
        torch.mul(second, self.cos, out=high).addcmul_(first, self.sin)
        return out


@dataclass(frozen=True)
class Rope:
    """Frequencies [dim / 2] in fp32, and what cos and sin are multiplied with."""

    frequencies: Tensor
    factor: float
    softmax_factor: float = 1.0  # what a latent-attention model multiplies its softmax scale with, for yarn

    def at(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """The angles of these positions."""
        angles = positions[:, None].float() * self.frequencies
        cos, sin = (angles.cos() * self.factor, angles.sin() * self.factor)
        return Rotation(cos.to(dtype)[:, None], sin.to(dtype)[:, None])

    def to(self, device: torch.device) -> "Rope":
        """The same on a device."""
        return Rope(self.frequencies.to(device), self.factor, self.softmax_factor)


def read_rope(config: Settings, dim: int) -> Rope:
    """The embedding that a config describes, for heads (or parts of them) of `dim` values.

    Both spellings are read: `rope_parameters`, and the older `rope_scaling` beside `rope_theta`.
    """
    scaling = config.part("rope_scaling" if config.values.get("rope_scaling") else "rope_parameters")
    newer = config.values.get("rope_parameters")
    if newer and newer != scaling.values:
        raise InvalidInput(f"{config.where}: rope_scaling and rope_parameters are both there, and say different things")
    scaling.expect("partial_rotary_factor", 1, 1.0, why="heads are rotated whole here")
    theta = scaling.number("rope_theta", config.number("rope_theta", 10_000.0))
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in KNOWN:
        raise InvalidInput(f"{scaling.where}: rope type {kind!r} is not known; known are {', '.join(KNOWN)}")
    for name in scaling.values:
        if name in scaling and name not in _FIELDS:
            raise InvalidInput(f"{scaling.where}: {name} is not known; known are {', '.join(_FIELDS)}")
    if dim % 2:
        raise InvalidInput(f"{config.where}: an odd number of values ({dim}) cannot be rotated")
    plain = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if kind == "default":
        return Rope(plain, 1.0)
    original = config.size(
        "original_max_position_embeddings",
        scaling.size("original_max_position_embeddings", config.size("max_position_embeddings")),
    )
    if kind == "llama3":
        return Rope(_llama3(plain, scaling, original), 1.0)
    factor = scaling.number("factor", config.size("max_position_embeddings") / original)
    ramp = _yarn_ramp(scaling, dim, theta, original)
    return Rope(
        plain / factor * ramp + plain * (1 - ramp),
        _yarn_factor(scaling, factor),
        _mscale(factor, scaling.number("mscale_all_dim", 0.0)) ** 2,
    )


def _llama3(plain: Tensor, scaling: Settings, original: int) -> Tensor:
    """Short waves stay, long ones are stretched by the factor; between the two limits the stretch fades in."""
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    turns = original * plain / (2 * math.pi)  # full turns of each wave within the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain / scaling.number("factor") * (1 - kept) + plain * kept


def _yarn_ramp(scaling: Settings, dim: int, theta: float, original: int) -> Tensor:
    """0 where a wave turns often within the original context and stays, 1 where it is stretched, linear in between."""

    def place(turns: float) -> float:
        """At which pair of values a wave makes so many turns."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = place(scaling.number("beta_fast", 32.0)), place(scaling.number("beta_slow", 1.0))
    if scaling.flag("truncate", default=True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step, not a division by zero
    return ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def _yarn_factor(scaling: Settings, factor: float) -> float:
    """What cos and sin are stretched by."""
    if "attention_factor" in scaling:
        return scaling.number("attention_factor")
    one, other = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
    if one and other:
        return _mscale(factor, one) / _mscale(factor, other)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
