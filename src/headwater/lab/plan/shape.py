"""How many bytes of KV a token of a model takes, from its config.json.

Only for kinds of models that are known to keep a key and a value, or one latent, of every token in every layer, under
the settings' usual names; others are refused by name. Not here: layouts of an engine.
"""

import json
from pathlib import Path
from typing import Final

from headwater.core.errors import InvalidInput
from headwater.engine.models.settings import Settings
from headwater.layout.gqa import gqa_layout
from headwater.layout.mla import mla_layout
from headwater.layout.spec import DType

_DTYPES: Final = {"float32": DType.FP32, "float16": DType.FP16, "bfloat16": DType.BF16}
#: Kinds (`model_type`) whose settings are read as below.
_KINDS: Final = frozenset(
    {
        *("cohere", "deepseek_v2", "deepseek_v3", "ernie4_5", "glm", "glm4", "glm4_moe", "granite", "granitemoe"),
        *("helium", "llama", "mistral", "mistral3", "mixtral", "nemotron", "olmo", "olmo2", "olmoe", "phi3", "phimoe"),
        *("qwen2", "qwen2_5_vl", "qwen2_moe", "qwen2_vl", "qwen3", "qwen3_moe", "qwen3_vl", "seed_oss", "smollm3"),
        *("stablelm", "starcoder2"),
    }
)
#: Any of these says that not every layer keeps a key and a value of every token, or that heads have other names.
_PARTS: Final = (
    "sliding_window_pattern",
    "attention_chunk_size",
    "num_kv_shared_layers",
    "attn_layer_period",
    "hybrid_override_pattern",
    "layers_block_type",
    "linear_num_key_heads",
    "mamba_d_state",
    "ssm_state_size",
    "state_size",
    "index_head_dim",
    "_block_types",
    "attention_window_size",
    "attn_type_list",
    "linear_attn_config",
    "cross_attention_layers",
    "block_configs",
    "multi_query",
    "num_kv_heads",
)
_MOST_BYTES: Final = 1 << 24


def read_token_bytes(path: Path) -> int:
    """Of a config.json, or a directory with one. Raises InvalidInput, OSError."""
    where = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(where.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidInput(f"{where}: not an object of a model's settings")
    config = Settings(found, str(where))
    return _token_bytes(config.part("text_config") if "text_config" in config else config, config)


def _token_bytes(config: Settings, outer: Settings) -> int:
    _refuse_others(config, outer)
    _refuse_parts(config)
    layers = config.size("num_hidden_layers")
    dtype = _dtype(config, outer)
    if "kv_lora_rank" in config:
        lora, rope = config.size("kv_lora_rank"), config.size("qk_rope_head_dim")
        layout = mla_layout(num_layers=layers, block_tokens=1, dtype=dtype, lora_rank=lora, rope_dim=rope)
    else:
        heads = config.size("num_attention_heads")
        layout = gqa_layout(
            num_layers=layers,
            num_kv_heads=config.size("num_key_value_heads", heads),
            head_dim=config.size("head_dim") if "head_dim" in config else max(1, config.size("hidden_size") // heads),
            block_tokens=1,
            dtype=dtype,
        )
    if layout.page_bytes > _MOST_BYTES:
        raise InvalidInput(f"{config.where}: {layout.page_bytes:,} bytes of KV a token: no model has so many")
    return layout.page_bytes


def _dtype(config: Settings, outer: Settings) -> DType:
    for settings in (config, outer):
        for name in ("dtype", "torch_dtype"):
            if name in settings:
                said = settings.text(name)
                if said not in _DTYPES:
                    raise settings.error(name, f"one of {', '.join(_DTYPES)} (else say --token-bytes)")
                return _DTYPES[said]
    return DType.BF16


def _refuse_others(config: Settings, outer: Settings) -> None:
    kinds = [settings.text("model_type", "") for settings in (config, outer)]
    if not any(kind.removesuffix("_text") in _KINDS for kind in kinds):
        named = kinds[0] or kinds[1] or "that says no model_type"
        raise InvalidInput(f"{config.where}: how large a token of a model {named} is, is not known: say --token-bytes")


def _refuse_parts(config: Settings) -> None:
    parts = [name for name in _PARTS if name in config]
    kinds = config.strings("layer_types") if "layer_types" in config else []
    if any(kind != "full_attention" for kind in kinds):
        parts.append("layer_types")
    elif not kinds and "sliding_window" in config and config.flag("use_sliding_window", default=True):
        parts.append("sliding_window")
    if parts:
        raise InvalidInput(
            f"{config.where}: not every layer keeps all of every token ({', '.join(parts)}): say --token-bytes"
        )
