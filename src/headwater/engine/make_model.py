"""Random models: tiny checkpoints of every family on disk, and any shape in memory. For tests, demonstrations, benches.

A checkpoint is what a downloaded one is: config.json, model.safetensors (or shards with an index), tokenizer.json with
one token per byte and a few special ones, a chat template. `transformers` and `load_model` read the same files. Weights
are scaled so that every layer matters to the logits, norms and biases included, and follow from the seed alone: each
tensor has its own stream, by its name.

Nobody can talk to such a model; it computes like a real one.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from headwater.core.errors import InvalidInput, NotInstalled
from headwater.engine.checkpoint import INDEX, SINGLE
from headwater.engine.identity import model_identity
from headwater.engine.loader import CONFIG, GENERATION, build_options, find_device
from headwater.engine.models.base import Model
from headwater.engine.models.decoder import Decoder
from headwater.engine.models.registry import find_architecture
from headwater.engine.models.settings import Settings
from headwater.engine.tokenizer import CONFIG as TOKENIZER_CONFIG
from headwater.engine.tokenizer import TOKENIZER

try:
    import tokenizers
    from safetensors.torch import save_file
except ModuleNotFoundError as error:
    raise NotInstalled(f"writing a model needs {error.name}: pip install 'headwater[engine]'") from error

SPECIAL: Final = ("<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
BOS, EOS, PAD, END = 256, 257, 258, 263

CHAT_TEMPLATE: Final = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_SHARED: Final[dict[str, object]] = {
    "vocab_size": 256 + len(SPECIAL),
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "initializer_range": 0.02,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "dtype": "float32",
}
_DEEPSEEK: Final[dict[str, object]] = {
    **_SHARED,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 128,  # a multiple of 128, as packed rows want it
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
_V3: Final[dict[str, object]] = {
    **_DEEPSEEK,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
_LLAMA3_ROPE: Final = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 2048,
}
FAMILIES: Final[dict[str, dict[str, object]]] = {
    "llama": {**_SHARED, "architectures": ["LlamaForCausalLM"], "rope_scaling": _LLAMA3_ROPE},
    "qwen2": {**_SHARED, "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {**_SHARED, "architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "rope_theta": 1000000.0},
    "deepseek_v2": {
        **_DEEPSEEK,
        "architectures": ["DeepseekV2ForCausalLM"],
        "scoring_func": "softmax",
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": False,
    },
    "deepseek_v3": {**_V3, "architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 0},
    "deepseek_v32": {
        **_V3,
        "architectures": ["DeepseekV32ForCausalLM"],
        "index_n_heads": 16,  # of so many some see a position at all; of few, scores of exactly 0 are common, and tie
        "index_head_dim": 128,
        "index_topk": 48,
    },
}


@dataclass(frozen=True)
class MadeModel:
    """What was written."""

    family: str
    directory: str
    seed: int
    num_parameters: int
    num_bytes: int


@dataclass
class RandomWeights:
    """Weights that follow from a seed; all that was taken is kept where `kept` is a dict."""

    seed: int
    dtype: torch.dtype
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    kept: dict[str, Tensor] | None = None

    def take(self, name: str, *shape: int, fp32: bool = False) -> Tensor:
        """A tensor of its own stream."""
        stream = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(stream[:7], "little"))
        dtype = torch.float32 if fp32 else self.dtype
        values = torch.randn(shape, generator=generator, device=self.device, dtype=dtype)
        if len(shape) > 1:
            # Embeddings have values of about 1; a matmul keeps the size of what it is given.
            values *= 1.0 if "embed" in name else 1 / math.sqrt(shape[-1])
        else:
            values *= 0.1
            if name.endswith("norm.weight"):
                values += 1
        if self.kept is not None:
            self.kept[name] = values
        return values


def make_model(
    family: str,
    directory: Path,
    *,
    seed: int = 0,
    overrides: Mapping[str, object] | None = None,
    num_shards: int = 1,
    device: str = "cpu",
) -> MadeModel:
    """Write a random checkpoint into a new or empty directory. Raises InvalidInput, OSError.

    `device`: where its numbers are drawn; another one draws others. A large model takes minutes on a CPU.
    """
    if family not in FAMILIES:
        raise InvalidInput(f"family {family!r} is not known; known are {', '.join(FAMILIES)}")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InvalidInput(f"{directory} is there and not an empty directory")
    config: dict[str, object] = {"model_type": family, **FAMILIES[family], **(overrides or {})}
    settings = Settings(config, CONFIG)
    options = build_options(settings.text("dtype"), "auto", block_tokens=16)
    kept: dict[str, Tensor] = {}
    find_architecture(settings)[1](settings, RandomWeights(seed, options.dtype, find_device(device), kept), options)
    directory.mkdir(parents=True, exist_ok=True)
    _write_weights(directory, kept, num_shards)
    _write_tokenizer(directory)
    special = {"bos_token_id": BOS, "eos_token_id": [EOS, END], "pad_token_id": PAD}
    _write_json(directory / GENERATION, special)
    _write_json(directory / CONFIG, config)
    return MadeModel(
        family=family,
        directory=str(directory),
        seed=seed,
        num_parameters=sum(tensor.numel() for tensor in kept.values()),
        num_bytes=sum(tensor.nbytes for tensor in kept.values()),
    )


def random_model(
    config: Mapping[str, object],
    *,
    name: str = "random",
    seed: int = 0,
    device: str = "cpu",
    dtype: str = "bf16",
    kv: str = "auto",
    block_tokens: int = 16,
) -> Model:
    """A model of any shape with random weights, made on the device: nothing is written or read. For measuring.

    Its identity names the seed and the device's kind instead of digesting the weights, which follow from them.
    """
    settings = Settings(config, "the config")
    architecture, build = find_architecture(settings)
    options = build_options(dtype, kv, block_tokens)
    where = find_device(device)
    network = build(settings, RandomWeights(seed, options.dtype, where), options)
    origin = f"headwater/random/1 {seed} {where.type} {options.dtype} {torch.__version__}"
    return Decoder(
        network,
        name=name,
        identity=model_identity(
            architecture=architecture,
            config=config,
            dtype=options.dtype,
            weights=hashlib.sha256(origin.encode()).digest(),
            attention=network.attention,
            tokenizer=b"",
        ),
        eos_ids=frozenset(),
        device=where,
    )


def _write_weights(directory: Path, tensors: dict[str, Tensor], num_shards: int) -> None:
    if num_shards == 1:
        save_file(tensors, directory / SINGLE, metadata={"format": "pt"})
        return
    names = sorted(tensors)
    where: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(part, directory / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def _write_tokenizer(directory: Path) -> None:
    """One token per byte, its id the byte; then the special ones."""
    vocabulary = {_letter(byte): byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    tokenizer.save(str(directory / TOKENIZER))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[2],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(directory / TOKENIZER_CONFIG, config)


def _letter(byte: int) -> str:
    """The character that byte-level tokenizers write for a byte: itself where it can be seen, or one from 256 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in seen:
        return chr(byte)
    return chr(256 + [other for other in range(256) if other not in seen].index(byte))


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
