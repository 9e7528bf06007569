"""Shapes of random models that several benchmarks compute with, by name. No torch here."""

from typing import Any, Final

from headwater.core.errors import InvalidConfig

SHAPES: Final[dict[str, dict[str, Any]]] = {
    "tiny": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 512,
        "vocab_size": 1024,
    },
    "0.5b": {  # what somebody may run without a GPU
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 4864,
        "vocab_size": 32768,
    },
    "8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    },
}
COMMON: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def require_shape(shape: str) -> None:
    """Raise InvalidConfig for a name that is none."""
    if shape not in SHAPES:
        raise InvalidConfig(f"no shape {shape!r}; there are: {', '.join(SHAPES)}")
