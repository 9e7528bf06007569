"""What a config.json may ask for that no family here builds: refused by name, because ignoring it changes the numbers.

A field counts if it is there, not null, and says anything but what we do anyway. Fields that nobody knows to change
numbers are not looked at: configs are full of notes. What adds tensors is found by the checkpoint's check besides.
"""

from typing import Final

from headwater.core.errors import InvalidInput
from headwater.engine.models.settings import Settings

_OFF: Final = (False, 0)  # 0.0 is equal to them
_ONE: Final = (1,)

# A field, the values that change nothing, and what it would do.
_NOT_BUILT: Final[tuple[tuple[str, tuple[object, ...], str], ...]] = (
    ("attn_logit_softcapping", _OFF, "attention scores are not capped here"),
    ("final_logit_softcapping", _OFF, "logits are not capped here"),
    ("query_pre_attn_scalar", (), "attention is scaled by its head size here"),
    ("attention_multiplier", (), "attention is scaled by its head size here"),
    ("softmax_scale", (), "attention is scaled by its head size here"),
    ("attn_temperature_tuning", _OFF, "attention is scaled by its head size here"),
    ("scale_attn_by_inverse_layer_idx", _OFF, "attention is scaled alike in all layers here"),
    ("attention_sinks", _OFF, "attention has no sinks here"),
    ("use_attention_sinks", _OFF, "attention has no sinks here"),
    ("num_sink_tokens", _OFF, "attention has no sinks here"),
    ("attn_output_gate", _OFF, "attention has no gate here"),
    ("clip_qkv", _OFF, "queries, keys and values are not clipped here"),
    ("use_qk_norm", _OFF, "queries and keys are normed as the architecture says here"),
    ("qk_layernorm", _OFF, "queries and keys are normed as the architecture says here"),
    ("is_causal", (True,), "attention is causal here"),
    ("use_bidirectional_attention", _OFF, "attention is causal here"),
    ("attention_chunk_size", _OFF, "attention is to all tokens before here"),
    ("dual_chunk_attention_config", (), "attention is to all tokens before here"),
    ("interleaved_sliding_window", _OFF, "sliding windows are not built"),
    ("sliding_window_pattern", _OFF, "sliding windows are not built"),
    ("alibi", _OFF, "positions are rotary here"),
    ("position_embedding_type", ("rope", "rotary"), "positions are rotary here"),
    ("no_rope_layers", ([],), "all layers are rotated here"),
    ("no_rope_layer_interval", _OFF, "all layers are rotated here"),
    ("partial_rotary_factor", _ONE, "heads are rotated whole here"),
    ("rotary_pct", _ONE, "heads are rotated whole here"),
    ("rotary_dim", (), "heads are rotated whole here"),
    ("rope_local_base_freq", (), "all layers have the same frequencies here"),
    ("embedding_multiplier", _ONE, "embeddings are taken as they are here"),
    ("scale_embedding", _OFF, "embeddings are taken as they are here"),
    ("scale_emb", _ONE, "embeddings are taken as they are here"),
    ("residual_multiplier", _ONE, "residuals are added as they are here"),
    ("scale_depth", (), "residuals are added as they are here"),
    ("parallel_attn", _OFF, "MLPs come behind attention here"),
    ("use_parallel_residual", _OFF, "MLPs come behind attention here"),
    ("hidden_activation", ("silu",), "other activations are not built"),
    ("swiglu_limit", _OFF, "activations are not clamped here"),
    ("logits_scaling", _ONE, "logits are taken as they are here"),
    ("logit_scale", _ONE, "logits are taken as they are here"),
    ("lm_head_multiplier", _ONE, "logits are taken as they are here"),
    ("dim_model_base", (), "logits are taken as they are here"),
    ("num_kv_shared_layers", _OFF, "every layer has keys and values of its own here"),
    ("pruned_heads", ({},), "all heads are built"),
    ("is_encoder_decoder", _OFF, "only decoders are built"),
    ("add_cross_attention", _OFF, "only decoders are built"),
)


def refuse_unbuilt(config: Settings, *, window_unless_said: bool) -> None:
    """Refuse what would change the numbers and is not built. Raises InvalidInput with the field's name.

    `window_unless_said`: whether a sliding window counts where `use_sliding_window` is not there.
    """
    for name, harmless, why in _NOT_BUILT:
        if name in config and config.values[name] not in harmless:
            known = " or ".join(map(repr, harmless))
            rest = f"; only {known}" if harmless else ""
            raise InvalidInput(f"{config.where}: {name} is {config.values[name]!r}: {why}{rest}")
    if set(config.strings("layer_types")) - {"full_attention"}:
        raise config.error("layer_types", "full_attention in every layer")
    _refuse_window(config, window_unless_said=window_unless_said)


def _refuse_window(config: Settings, *, window_unless_said: bool) -> None:
    """A window that no position reaches the end of is none."""
    if not config.flag("use_sliding_window", default=window_unless_said):
        return
    if "sliding_window" not in config:
        config.expect("use_sliding_window", False, why="sliding windows are not built")  # noqa: FBT003
        return
    positions = config.size("max_position_embeddings")
    window = config.values["sliding_window"]
    if type(window) is not int or window < positions:
        raise InvalidInput(
            f"{config.where}: sliding_window is {window!r} of {positions} positions: sliding windows are not built; "
            "only null, or use_sliding_window false"
        )
