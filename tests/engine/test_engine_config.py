"""What a config.json says that is not built, or cannot be: refused by name, before anything is built or allocated."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.core.errors import InvalidInput
from headwater.engine.loader import load_model, load_tokenizer
from headwater.engine.models.base import Span
from headwater.transfer.device.arena import create_kv_cache
from test_engine_loader import copy_of, directory

__all__ = ["directory"]  # a fixture

# --- what a config asks for and nobody builds -------------------------------------------------------------------------


@pytest.mark.fault("B10")
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"sliding_window": 1024}),
        ("llama", {"sliding_window": 8191, "use_sliding_window": True}),
        ("llama", {"sliding_window": "wide"}),
        ("qwen2", {"sliding_window": 1024, "use_sliding_window": True}),
        ("qwen3", {"sliding_window": 1024, "use_sliding_window": True}),
        ("deepseek_v3", {"sliding_window": 1024}),
    ],
)
def test_a_sliding_window_in_force_is_refused(
    family: str, changes: dict[str, Any], tmp_path: Path, directory: Callable[[str], Path]
) -> None:
    with pytest.raises(InvalidInput, match=r"config\.json: sliding_window is .*: sliding windows are not built"):
        load_model(copy_of(directory(family), tmp_path / "model", **changes))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"sliding_window": None}),
        ("llama", {"sliding_window": 1024, "use_sliding_window": False}),
        ("llama", {"sliding_window": 8192}),
        ("llama", {"sliding_window": 1 << 20, "use_sliding_window": True}),
        ("qwen2", {"sliding_window": 1024, "max_window_layers": 1}),  # off unless it is switched on
        ("qwen3", {"sliding_window": 1024, "use_sliding_window": False}),
        (
            "llama",
            {"layer_types": ["full_attention"] * 3, "partial_rotary_factor": 1.0, "final_logit_softcapping": None},
        ),
    ],
)
def test_a_window_that_nobody_uses_changes_nothing(
    family: str, changes: dict[str, Any], tmp_path: Path, directory: Callable[[str], Path]
) -> None:
    changed, plain = (
        model.forward(create_kv_cache(model.layout, 2), [Span([1, 2, 3], 0, (0,))]).logits
        for model in map(load_model, (copy_of(directory(family), tmp_path / "model", **changes), directory(family)))
    )
    assert torch.equal(changed, plain)


@pytest.mark.fault("B10")
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0: attention scores are not capped here"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar is 256"),
        ({"attention_multiplier": 0.1}, "attention_multiplier is 0.1"),
        ({"residual_multiplier": 0.2}, "residual_multiplier is 0.2.*; only 1"),
        ({"logits_scaling": 8}, "logits_scaling is 8"),
        ({"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ({"attention_sinks": True}, "attention_sinks is True"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5: heads are rotated whole here"),
        ({"is_causal": False}, "is_causal is False"),
        ({"no_rope_layers": [1, 1, 0]}, "no_rope_layers is"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "layer_types must be"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section is not known"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_scaling and rope_parameters are both there"),
    ],
    ids=str,
)
def test_a_field_that_changes_the_numbers_is_not_ignored(
    changes: dict[str, Any], says: str, tmp_path: Path, directory: Callable[[str], Path]
) -> None:
    with pytest.raises(InvalidInput, match=says):
        load_model(copy_of(directory("llama"), tmp_path / "model", **changes))


# --- sizes that lie ---------------------------------------------------------------------------------------------------


@pytest.mark.fault("B11")
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("llama", "num_hidden_layers", 10**9),
        ("deepseek_v3", "num_hidden_layers", 10**9),
        ("deepseek_v3", "n_routed_experts", 10**9),
        ("llama", "num_attention_heads", 10**15),
        ("llama", "head_dim", 10**12),
        ("llama", "hidden_size", 10**18),
        ("llama", "vocab_size", 10**18),
        ("llama", "max_position_embeddings", 10**30),
    ],
)
def test_sizes_that_cannot_be_are_refused_before_anything_is_built(
    family: str, name: str, value: int, tmp_path: Path, directory: Callable[[str], Path]
) -> None:
    with pytest.raises(InvalidInput, match=rf"config\.json: {name} must be at most \d+, not {value}"):
        load_model(copy_of(directory(family), tmp_path / "model", **{name: value}))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"num_hidden_layers": 1024}),
        ("deepseek_v3", {"num_hidden_layers": 1024, "n_routed_experts": 4096}),
        ("llama", {"num_attention_heads": 1 << 18, "num_key_value_heads": 1 << 18, "head_dim": 1 << 18}),
        ("deepseek_v3", {"num_attention_heads": 1 << 18, "q_lora_rank": 1 << 18, "qk_nope_head_dim": 1 << 18}),
    ],
)
def test_sizes_that_could_be_and_are_not_there_are_refused_soon(
    family: str, changes: dict[str, Any], tmp_path: Path, directory: Callable[[str], Path]
) -> None:
    with pytest.raises(InvalidInput, match=r"has no tensor|far more than there are|has shape"):
        load_model(copy_of(directory(family), tmp_path / "model", **changes))


@pytest.mark.fault("B11")
def test_a_directory_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    for load in (load_tokenizer, load_model):
        with pytest.raises(InvalidInput, match=r"there is no model directory .*nowhere"):
            load(tmp_path / "nowhere")
        (tmp_path / "file").touch()
        with pytest.raises(InvalidInput, match="file is not a directory"):
            load(tmp_path / "file")
