"""DeepSeek-V2, V3 and V3.2: latent attention, experts, and in V3.2 an indexer that chooses what is attended to.

V2 scores experts by softmax, the others by sigmoid with a correction. Rotary values of latent attention come in pairs,
those of the indexer in halves. Layers behind the last (multi-token prediction) are not built.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from headwater.core.errors import InvalidInput
from headwater.engine.attention.dsa import DsaAttention, Index
from headwater.engine.attention.mla import MlaAttention, Queries
from headwater.engine.models.decoder import ModelOptions, Network, build_network
from headwater.engine.models.layers import Mlp, Moe, Routing, Scoring, Weights
from headwater.engine.models.rope import Rope, Rotation, read_rope
from headwater.engine.models.settings import Settings
from headwater.engine.models.unbuilt import refuse_unbuilt
from headwater.engine.step import Step
from headwater.layout.spec import DType
from headwater.transfer.device.arena import DeviceCache

_NORM_EPS: Final = 1e-6  # of the norms inside attention; the config's is for those around it


class MlaLayer:
    """Projections around latent attention, and the indexer where there is one."""

    def __init__(
        self, weights: Weights, name: str, *, config: Settings, attention: MlaAttention | DsaAttention, rope: Rope
    ) -> None:
        self.attention = attention
        self.heads = heads = config.size("num_attention_heads")
        self.nope, rotated = config.size("qk_nope_head_dim"), attention.rope_dim
        self.in_pairs = config.flag("rope_interleave", default=True)
        self.scale = (self.nope + rotated) ** -0.5 * rope.softmax_factor
        hidden, lora = config.size("hidden_size"), attention.lora_rank
        value = config.size("v_head_dim")
        bias = config.flag("attention_bias", default=False)

        def linear(part: str, out: int, inner: int, *, biased: bool) -> tuple[Tensor, Tensor | None]:
            weight = weights.take(f"{name}.{part}.weight", out, inner)
            return weight, weights.take(f"{name}.{part}.bias", out) if biased else None

        query_lora = config.size("q_lora_rank") if "q_lora_rank" in config else None
        self.q_a: tuple[Tensor, Tensor | None] | None = None
        if query_lora is None:
            self.q, _ = linear("q_proj", heads * (self.nope + rotated), hidden, biased=False)
        else:
            self.q_a = linear("q_a_proj", query_lora, hidden, biased=bias)
            self.q_norm = weights.take(f"{name}.q_a_layernorm.weight", query_lora)
            self.q, _ = linear("q_b_proj", heads * (self.nope + rotated), query_lora, biased=False)
        self.kv_a = linear("kv_a_proj_with_mqa", lora + rotated, hidden, biased=bias)
        self.kv_norm = weights.take(f"{name}.kv_a_layernorm.weight", lora)
        self.expand = linear("kv_b_proj", heads * (self.nope + value), lora, biased=False)[0].unflatten(0, (heads, -1))  # type: ignore[no-untyped-call]
        self.o = linear("o_proj", hidden, heads * value, biased=bias)
        self.indexer = None
        if isinstance(attention, DsaAttention):
            if query_lora is None:
                raise InvalidInput(f"{config.where}: q_lora_rank is missing; the indexer needs it")
            self.indexer = Indexer(
                weights, f"{name}.indexer", config=config, query_lora=query_lora, dim=attention.index_dim
            )

    def __call__(self, x: Tensor, *, planes: DeviceCache, layer: int, step: Step, rotation: Rotation) -> Tensor:
        """Compute [tokens, hidden]; writes the layer's planes."""
        turn = rotation.pairs if self.in_pairs else rotation.halves
        source = x
        if self.q_a is not None:
            source = functional.rms_norm(functional.linear(x, *self.q_a), self.q_norm.shape, self.q_norm, _NORM_EPS)
        query = functional.linear(source, self.q).view(len(x), self.heads, -1)
        nope, rotated = query.tensor_split((self.nope,), dim=-1)
        q = Queries(nope, turn(rotated), self.expand, self.scale)
        latent, key = functional.linear(x, *self.kv_a).tensor_split((self.attention.lora_rank,), dim=-1)
        latent = functional.rms_norm(latent, self.kv_norm.shape, self.kv_norm, _NORM_EPS)
        key = turn(key[:, None])[:, 0]
        if isinstance(self.attention, MlaAttention):
            out = self.attention.attend(planes, layer, step, q=q, latent=latent, rope=key)
        else:
            assert self.indexer is not None  # noqa: S101  (made with the backend)
            index = self.indexer(x, source, rotation, self.attention.rope_dim)
            out = self.attention.attend(planes, layer, step, q=q, latent=latent, rope=key, index=index)
        return functional.linear(out, *self.o)


class Indexer:
    """Small queries and one key per token, by which positions are chosen."""

    def __init__(self, weights: Weights, name: str, *, config: Settings, query_lora: int, dim: int) -> None:
        hidden, self.heads, self.dim = config.size("hidden_size"), config.size("index_n_heads"), dim
        self.query = weights.take(f"{name}.wq_b.weight", self.heads * dim, query_lora)
        self.key = weights.take(f"{name}.wk.weight", dim, hidden)
        self.norm = weights.take(f"{name}.k_norm.weight", dim), weights.take(f"{name}.k_norm.bias", dim)
        self.weigh = weights.take(f"{name}.weights_proj.weight", self.heads, hidden, fp32=True)

    def __call__(self, x: Tensor, source: Tensor, rotation: Rotation, rope_dim: int) -> Index:
        """The indexer's queries, keys and weights of these tokens; the first `rope_dim` values are rotated."""

        def turned(values: Tensor) -> Tensor:
            return torch.cat((rotation.halves(values[..., :rope_dim]), values[..., rope_dim:]), dim=-1)

        queries = turned(functional.linear(source, self.query).view(len(x), self.heads, self.dim))
        keys = functional.layer_norm(functional.linear(x, self.key), (self.dim,), *self.norm, _NORM_EPS)
        weights = functional.linear(x.float(), self.weigh) * (self.heads * self.dim) ** -0.5
        return Index(queries, turned(keys[:, None])[:, 0], weights)


def build_deepseek_v2(config: Settings, weights: Weights, options: ModelOptions) -> Network:
    """Build a DeepSeek-V2."""
    config.expect("scoring_func", "softmax", why="V2 has no other scores here")
    config.expect("norm_topk_prob", False, why="implementations of V2 disagree on normalised weights")  # noqa: FBT003
    config.expect("topk_method", "greedy", "group_limited_greedy", why="V2 has no other method here")
    return _build(config, weights, options, _mla(config, options), Scoring.SOFTMAX)


def build_deepseek_v3(config: Settings, weights: Weights, options: ModelOptions) -> Network:
    """Build a DeepSeek-V3."""
    _expect_v3(config)
    return _build(config, weights, options, _mla(config, options), Scoring.SIGMOID)


def build_deepseek_v32(config: Settings, weights: Weights, options: ModelOptions) -> Network:
    """Build a DeepSeek-V3.2."""
    _expect_v3(config)
    attention = DsaAttention(
        num_layers=config.size("num_hidden_layers"),
        lora_rank=config.size("kv_lora_rank"),
        rope_dim=config.size("qk_rope_head_dim"),
        index_dim=config.size("index_head_dim"),
        top_k=config.size("index_topk"),
        block_tokens=options.block_tokens,
        kv_dtype=options.kv_dtype,
        dtype=options.dtype,
    )
    return _build(config, weights, options, attention, Scoring.SIGMOID)


def _expect_v3(config: Settings) -> None:
    config.expect("scoring_func", "sigmoid", why="V3 has no other scores here")
    config.expect("topk_method", "noaux_tc", why="V3 has no other method here")


def _mla(config: Settings, options: ModelOptions) -> MlaAttention:
    if options.kv_dtype is DType.FP8_E4M3:
        raise InvalidInput(
            "latent attention without an indexer has no FP8 cache here; take kv='auto', bf16, fp16 or fp32"
        )
    return MlaAttention(
        num_layers=config.size("num_hidden_layers"),
        lora_rank=config.size("kv_lora_rank"),
        rope_dim=config.size("qk_rope_head_dim"),
        block_tokens=options.block_tokens,
        kv_dtype=options.kv_dtype,
        dtype=options.dtype,
    )


def _build(
    config: Settings,
    weights: Weights,
    options: ModelOptions,
    attention: MlaAttention | DsaAttention,
    scoring: Scoring,
) -> Network:
    refuse_unbuilt(config, window_unless_said=True)
    config.expect("hidden_act", "silu", why="other activations are not built")
    config.expect("mlp_bias", False, why="biases of experts are not built")  # noqa: FBT003
    config.expect("moe_layer_freq", 1, why="every layer behind the dense ones has experts here")
    rope = read_rope(config, attention.rope_dim)
    hidden = config.size("hidden_size")
    sparse = _sparse_layers(config)
    routing = _routing(config, scoring) if any(sparse) else None

    def parts(name: str, layer: int) -> tuple[MlaLayer, Callable[[Tensor], Tensor]]:
        attends = MlaLayer(weights, f"{name}.self_attn", config=config, attention=attention, rope=rope)
        if routing is None or not sparse[layer]:
            return attends, Mlp(weights, f"{name}.mlp", hidden=hidden, inner=config.size("intermediate_size"))
        inner = config.size("moe_intermediate_size")
        shared = config.size("n_shared_experts") if "n_shared_experts" in config else 0
        return attends, Moe(
            weights, f"{name}.mlp", routing=routing, hidden=hidden, inner=inner, shared_inner=inner * shared
        )

    return build_network(config, weights, rope=rope, attention=attention, parts=parts)


def _sparse_layers(config: Settings) -> list[bool]:
    """Which layers have experts."""
    num_layers = config.size("num_hidden_layers")
    kinds = config.strings("mlp_layer_types")
    if kinds:
        if len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
            raise config.error("mlp_layer_types", f"{num_layers} times dense or sparse")
        return [kind == "sparse" for kind in kinds]
    num_dense = config.values.get("first_k_dense_replace")
    if type(num_dense) is not int or num_dense < 0:
        raise config.error("first_k_dense_replace", "an integer, at least 0")
    return [layer >= num_dense and "n_routed_experts" in config for layer in range(num_layers)]


def _routing(config: Settings, scoring: Scoring) -> Routing:
    grouped = scoring is Scoring.SIGMOID or config.text("topk_method", "greedy") == "group_limited_greedy"
    routing = Routing(
        num_experts=config.size("n_routed_experts"),
        num_picked=config.size("num_experts_per_tok"),
        scoring=scoring,
        num_groups=config.size("n_group") if grouped else 1,
        num_groups_picked=config.size("topk_group") if grouped else 1,
        normalise=scoring is Scoring.SIGMOID and config.flag("norm_topk_prob", default=True),
        scale=config.number("routed_scaling_factor"),
    )
    per_group, rest = divmod(routing.num_experts, routing.num_groups)
    few = routing.num_groups > 1 and scoring is Scoring.SIGMOID and per_group < 2  # groups are scored by their best two
    picked = min(routing.num_groups_picked, routing.num_groups)
    if rest or few or routing.num_groups_picked > routing.num_groups or routing.num_picked > per_group * picked:
        raise InvalidInput(
            f"{config.where}: {routing.num_picked} of {routing.num_experts} experts cannot be picked "
            f"from {routing.num_groups_picked} of {routing.num_groups} groups"
        )
    return routing
