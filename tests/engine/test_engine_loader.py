"""Model directories: what identifies one, and that a wrong one is named before anything large is made."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headwater.core.errors import HeadwaterError, InvalidInput
from headwater.engine.loader import identify, load_model
from headwater.engine.make_model import make_model


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("directories")

    @cache
    def find(family: str) -> Path:
        make_model(family, root / family, seed=3)
        return root / family

    return find


# --- identity ---------------------------------------------------------------------------------------------------------


def copy_of(source: Path, target: Path, **changes: object) -> Path:
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


def test_the_identity_is_of_content(tmp_path: Path, directory: Callable[[str], Path]) -> None:
    first = load_model(directory("llama")).identity
    assert first == identify(directory("llama"))
    assert first.salt == b""
    other_path = copy_of(directory("llama"), tmp_path / "elsewhere", transformers_version="9.9", _name_or_path="/x")
    assert identify(other_path).digest == first.digest
    shards = tmp_path / "shards"
    make_model("llama", shards, seed=3, num_shards=3)
    assert len(list(shards.glob("*.safetensors"))) == 3
    assert identify(shards).digest == first.digest
    make_model("llama", tmp_path / "seed", seed=4)
    turned = json.loads((other_path / "config.json").read_text())["rope_scaling"] | {"factor": 8.0}
    weights = load_file(other_path / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-6
    nudged = copy_of(other_path, tmp_path / "nudged")
    save_file(weights, nudged / "model.safetensors")
    spoken = copy_of(other_path, tmp_path / "spoken")
    tokenizer = (spoken / "tokenizer.json").read_text()
    (spoken / "tokenizer.json").write_text(tokenizer.replace("<|tool|>", "<|tule|>"))
    others = [
        identify(tmp_path / "seed"),
        identify(nudged),
        identify(spoken),
        identify(copy_of(other_path, tmp_path / "rope", rope_scaling=turned)),
        identify(other_path, kv="fp8"),
        identify(other_path, kv="bf16"),
        identify(other_path, dtype="bf16"),
        identify(other_path, dtype="bf16", kv="fp32"),
        identify(other_path, block_tokens=32),
    ]
    assert len({one.digest for one in [first, *others]}) == 10
    assert others[1].weights != first.weights
    assert replace(others[2], tokenizer=first.tokenizer) == first


def test_what_a_model_tells_of_itself(directory: Callable[[str], Path]) -> None:
    model = load_model(directory("llama"), block_tokens=32)
    assert (model.name, model.block_tokens, model.vocab_size, model.max_positions) == ("llama", 32, 264, 8192)
    assert model.layout.block_tokens == 32
    assert model.eos_ids == {257, 263}
    assert model.identity.layout == model.layout.fingerprint


# --- directories that are wrong ---------------------------------------------------------------------------------------


def damage_config(**changes: object) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        config = json.loads((path / "config.json").read_text()) | changes
        (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "gone"}))

    return damage


def damage_weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        weights = load_file(path / "model.safetensors")
        change(weights)
        save_file(weights, path / "model.safetensors")

    return damage


def write(name: str, content: str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_text(content)


def remove(name: str) -> Callable[[Path], object]:
    return lambda path: (path / name).unlink()


def truncate(path: Path) -> None:
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[:-10])


Q = "model.layers.1.self_attn.q_proj.weight"
INDEX = "model.safetensors.index.json"
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (remove("config.json"), r"config\.json is missing"),
    "config is no JSON": (write("config.json", "{"), r"config\.json cannot be read"),
    "config is no object": (write("config.json", "[]"), "must hold an object, not list"),
    "unknown architecture": (
        damage_config(architectures=["MambaForCausalLM"]),
        "MambaForCausalLM is not known; known are LlamaForCausalLM, Qwen2ForCausalLM, .*DeepseekV32ForCausalLM",
    ),
    "no architecture": (damage_config(architectures="gone"), "architectures is missing; known are"),
    "no hidden size": (damage_config(hidden_size="gone"), "hidden_size is missing; it must be a positive integer"),
    "hidden size of text": (damage_config(hidden_size="64"), "hidden_size must be a positive integer, not '64'"),
    "eps of text": (damage_config(rms_norm_eps="small"), "rms_norm_eps must be a number, not 'small'"),
    "heads that do not divide": (damage_config(num_key_value_heads=3), "4 attention heads cannot share 3 KV heads"),
    "another activation": (damage_config(hidden_act="gelu"), "hidden_act is 'gelu'"),
    "another rope": (damage_config(rope_scaling={"rope_type": "longrope"}), "rope type 'longrope' is not known"),
    "rope without a factor": (damage_config(rope_scaling={"rope_type": "llama3"}), "factor is missing"),
    "a sliding window": (damage_config(use_sliding_window=True), "use_sliding_window is True"),
    "quantised weights": (damage_config(quantization_config={"quant_method": "fp8"}), "the weights are quantised"),
    "another dtype": (damage_config(dtype="float64"), "dtype must be bf16, fp16 or fp32, not 'float64'"),
    "no weights": (remove("model.safetensors"), r"neither model\.safetensors nor model\.safetensors\.index\.json"),
    "truncated weights": (truncate, r"model\.safetensors is not a safetensors file"),
    "weights of nothing": (write("model.safetensors", ""), r"model\.safetensors is not a safetensors file"),
    "a missing tensor": (damage_weights(lambda w: w.pop(Q)), rf"has no tensor {Q}"),
    "many missing tensors": (damage_config(num_hidden_layers=9), "has no tensor .* and 49 more"),
    "a tensor too many": (
        damage_weights(lambda w: w.update(extra=torch.zeros(1))),
        "does not use: extra",
    ),
    "layers too many": (damage_config(num_hidden_layers=2), r"does not use: model\.layers\.2\.input_layernorm\.weight"),
    "a tensor of another shape": (
        damage_weights(lambda w: w.update({Q: w[Q][:-1].clone()})),
        rf"tensor {Q} has shape \(63, 64\), the config says \(64, 64\)",
    ),
    "a tensor of another dtype": (damage_weights(lambda w: w.update({Q: w[Q].to(torch.int32)})), rf"{Q} is I32"),
    "an index of nothing": (write(INDEX, "{}"), "is not an index of safetensors"),
    "an index of a missing file": (
        write(INDEX, '{"weight_map": {"a": "b.safetensors"}}'),
        r"b\.safetensors is missing",
    ),
    "an index that lies": (
        write(INDEX, '{"weight_map": {"a": "model.safetensors"}}'),
        r"model\.safetensors does not hold tensor a",
    ),
    "an index that leaves the directory": (
        write(INDEX, '{"weight_map": {"a": "../model.safetensors"}}'),
        "is not a file beside it",
    ),
    "an end that is no token": (write("generation_config.json", '{"eos_token_id": ["x"]}'), "eos_token_id must be"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_directory_is_named(case: str, tmp_path: Path, directory: Callable[[str], Path]) -> None:
    path = tmp_path / "model"
    shutil.copytree(directory("llama"), path)
    damage, says = WRONG[case]
    damage(path)
    with pytest.raises(InvalidInput, match=says):
        load_model(path)


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ("deepseek_v3", {"n_group": 3}, "cannot be picked from 2 of 3 groups"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace must be an integer"),
        ("deepseek_v32", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be 3 times dense or sparse"),
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank is missing; the indexer needs it"),
    ],
)
def test_a_config_that_cannot_be_built_is_named(
    family: str, changes: Mapping[str, object], says: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match=says):
        make_model(family, tmp_path / "model", overrides=changes)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("llama", {"kv": "int4"}, "kv must be auto, bf16, fp16, fp32 or fp8, not 'int4'"),
        ("llama", {"dtype": "int8"}, "dtype must be bf16, fp16 or fp32, not 'int8'"),
        ("llama", {"device": "tpu"}, "'tpu' is not a device"),
        ("llama", {"device": "meta"}, "run on cpu or cuda, not on meta"),
        ("llama", {"block_tokens": 0}, "block_tokens must be a positive integer, not 0"),
        ("deepseek_v3", {"kv": "fp8"}, "has no FP8 cache here"),
    ],
)
def test_options_that_cannot_work_are_named(
    name: str, options: dict[str, Any], says: str, directory: Callable[[str], Path]
) -> None:
    with pytest.raises(HeadwaterError, match=says):
        load_model(directory(name), **options)


def test_packed_rows_want_latents_of_whole_groups(tmp_path: Path) -> None:
    make_model("deepseek_v32", tmp_path / "model", overrides={"kv_lora_rank": 64})
    load_model(tmp_path / "model")
    with pytest.raises(InvalidInput, match="lora_rank must be a multiple of 128"):
        load_model(tmp_path / "model", kv="fp8")


def test_what_checkpoints_hold_and_models_do_not_use_is_ignored(
    tmp_path: Path, directory: Callable[[str], Path]
) -> None:
    path = copy_of(directory("qwen2"), tmp_path / "tied")
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] = torch.zeros(3)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(3)
    save_file(weights, path / "model.safetensors")
    assert identify(path) == identify(directory("qwen2"))
    path = copy_of(directory("deepseek_v3"), tmp_path / "mtp", num_nextn_predict_layers=1)
    weights = load_file(path / "model.safetensors")
    weights["model.layers.3.eh_proj.weight"] = torch.zeros(3)
    save_file(weights, path / "model.safetensors")
    assert identify(path).weights == identify(directory("deepseek_v3")).weights
