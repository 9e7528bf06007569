"""Tiny models for a real vLLM on CPU, made here: random weights from a seed, a byte-level tokenizer.

`gqa` is a Llama with grouped heads, `mla` a dense DeepSeek-V2 with the latent that vLLM's CPU kernel takes.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = 1024
ATTENTION = 0.3


def _gqa() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=8192,
            initializer_range=0.2,
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=False,
        )
    )


def _mla() -> Any:
    return DeepseekV2ForCausalLM(
        DeepseekV2Config(
            vocab_size=VOCAB,
            hidden_size=256,
            intermediate_size=512,
            moe_intermediate_size=256,
            num_hidden_layers=3,
            first_k_dense_replace=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_rope_head_dim=64,
            qk_nope_head_dim=64,
            v_head_dim=64,
            n_routed_experts=2,  # of layers that are not there: all are dense
            max_position_embeddings=8192,
            initializer_range=0.05,
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=False,
        )
    )


def make(kind: str, directory: Path, *, seed: int = 0) -> Path:
    """A model directory; left alone if it is there."""
    if (directory / "done").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    model = {"gqa": _gqa, "mla": _mla}[kind]().float()
    if kind == "mla":
        # vLLM's CPU kernels for prefill and for decode agree to some percent only, with no connector anywhere. A model
        # whose attention says less than its tokens still depends on all of its KV, and has the margin for that.
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.mul_(ATTENTION)
    model.save_pretrained(directory, safe_serialization=True)
    _tokenizer().save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    config["torch_dtype"] = "float32"
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "done").write_text("")
    return directory


def _tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {letter: 3 + at for at, letter in enumerate(alphabet)}
    vocab |= {f"<extra_{at}>": at for at in range(len(vocab), VOCAB)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
