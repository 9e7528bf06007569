"""Llama, Qwen2 and Qwen3: grouped-query attention and a dense MLP.

They differ in little: Qwen2 has biases on q, k and v, Qwen3 norms each head of q and k before it is rotated.
"""

import torch
from torch import Tensor
from torch.nn import functional

from headwater.core.errors import InvalidInput
from headwater.engine.attention.gqa import GqaAttention
from headwater.engine.models.decoder import ModelOptions, Network, build_network
from headwater.engine.models.layers import Mlp, Weights, joined
from headwater.engine.models.rope import Rotation, read_rope
from headwater.engine.models.settings import Settings
from headwater.engine.models.unbuilt import refuse_unbuilt
from headwater.engine.step import Step
from headwater.transfer.device.arena import DeviceCache


def build_llama(config: Settings, weights: Weights, options: ModelOptions) -> Network:
    """Build a Llama."""
    refuse_unbuilt(config, window_unless_said=True)
    return _build(config, weights, options, qkv_bias=config.flag("attention_bias", default=False))


def build_qwen2(config: Settings, weights: Weights, options: ModelOptions) -> Network:
    """Build a Qwen2."""
    refuse_unbuilt(config, window_unless_said=False)
    return _build(config, weights, options, qkv_bias=True, o_bias=False)


def build_qwen3(config: Settings, weights: Weights, options: ModelOptions) -> Network:
    """Build a Qwen3."""
    refuse_unbuilt(config, window_unless_said=False)
    return _build(config, weights, options, qkv_bias=config.flag("attention_bias", default=False), head_norms=True)


class GqaLayer:
    """Projections around grouped-query attention; q, k and v are one matmul."""

    def __init__(
        self,
        weights: Weights,
        name: str,
        *,
        attention: GqaAttention,
        hidden: int,
        biases: tuple[bool, bool],
        head_norm_eps: float | None,
    ) -> None:
        dim, query, key = attention.head_dim, attention.num_heads, attention.num_kv_heads
        widths = {"q": query * dim, "k": key * dim, "v": key * dim}
        self.attention = attention
        self.eps = head_norm_eps
        self.qkv = joined([weights.take(f"{name}.{x}_proj.weight", width, hidden) for x, width in widths.items()])
        self.qkv_bias = self.o_bias = self.q_norm = self.k_norm = None
        if biases[0]:
            self.qkv_bias = joined([weights.take(f"{name}.{x}_proj.bias", width) for x, width in widths.items()])
        self.o = weights.take(f"{name}.o_proj.weight", hidden, query * dim)
        if biases[1]:
            self.o_bias = weights.take(f"{name}.o_proj.bias", hidden)
        if head_norm_eps is not None:
            self.q_norm, self.k_norm = (weights.take(f"{name}.{x}_norm.weight", dim) for x in "qk")

    def __call__(self, x: Tensor, *, planes: DeviceCache, layer: int, step: Step, rotation: Rotation) -> Tensor:
        """Compute [tokens, hidden]; writes the layer's planes."""
        query, key = self.attention.num_heads, self.attention.num_kv_heads
        qkv = functional.linear(x, self.qkv, self.qkv_bias).view(len(x), query + 2 * key, -1)
        turned = qkv[:, : query + key]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = turned.split((query, key), dim=1)  # type: ignore[no-untyped-call]
            shape = self.q_norm.shape
            turned = torch.cat(
                (
                    functional.rms_norm(q, shape, self.q_norm, self.eps),
                    functional.rms_norm(k, shape, self.k_norm, self.eps),
                ),
                1,
            )
        q, k = rotation.halves(turned).split((query, key), dim=1)  # type: ignore[no-untyped-call]
        out = self.attention.attend(planes, layer, step, q=q, k=k, v=qkv[:, query + key :])
        return functional.linear(out, self.o, self.o_bias)


def _build(
    config: Settings,
    weights: Weights,
    options: ModelOptions,
    *,
    qkv_bias: bool,
    o_bias: bool | None = None,
    head_norms: bool = False,
) -> Network:
    config.expect("hidden_act", "silu", why="other activations are not built")
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise InvalidInput(f"{config.where}: {heads} attention heads cannot share {kv_heads} KV heads")
    attention = GqaAttention(
        num_layers=config.size("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=config.size("head_dim", hidden // heads),
        block_tokens=options.block_tokens,
        kv_dtype=options.kv_dtype,
        dtype=options.dtype,
    )
    eps = config.number("rms_norm_eps", 1e-6)

    def parts(name: str, layer: int) -> tuple[GqaLayer, Mlp]:
        return (
            GqaLayer(
                weights,
                f"{name}.self_attn",
                attention=attention,
                hidden=hidden,
                biases=(qkv_bias, qkv_bias if o_bias is None else o_bias),
                head_norm_eps=eps if head_norms else None,
            ),
            Mlp(
                weights,
                f"{name}.mlp",
                hidden=hidden,
                inner=config.size("intermediate_size"),
                bias=config.flag("mlp_bias", default=False),
            ),
        )

    rope = read_rope(config, attention.head_dim)
    return build_network(config, weights, rope=rope, attention=attention, parts=parts)
