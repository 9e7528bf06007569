"""Tiny transformers models of several families, and calls of `generate` that can be compared bit for bit.

As a program it is another process: `python transformers_kit.py WHERE FAMILY,... BLOCK_TOKENS LENGTH ...` asks each
model, with the store WHERE/FAMILY, for prompts of these lengths, and prints a digest of all logits and tokens of each,
with what came from the store.
"""

import hashlib
import json
import sys
from functools import cache
from typing import Any

import torch
import transformers

from headwater.integrations.transformers import HeadwaterCache

FAMILIES = ("llama", "qwen3", "mistral", "gemma", "gpt_neox", "gpt2")
VOCABULARY = 300


def config(family: str, **changed: Any) -> Any:
    """A small model's configuration; what is changed goes into it."""
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "max_position_embeddings": 1024,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    few = shape | {"num_key_value_heads": 2}
    made: dict[str, Any] = {
        "llama": lambda: transformers.LlamaConfig(**few | changed),
        "qwen3": lambda: transformers.Qwen3Config(**few | {"head_dim": 24} | changed),
        "mistral": lambda: transformers.MistralConfig(**few | {"sliding_window": None} | changed),
        "gemma": lambda: transformers.GemmaConfig(**few | {"num_key_value_heads": 1, "head_dim": 32} | changed),
        "gpt_neox": lambda: transformers.GPTNeoXConfig(**shape | changed),
        "gpt2": lambda: transformers.GPT2Config(
            **{name: shape[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
            | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024}
            | changed
        ),
    }
    return made[family]()


def new_model(family: str, *, dtype: torch.dtype = torch.float32, attention: str = "sdpa", **changed: Any) -> Any:
    """A model with random weights, the same in every process."""
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config(family, **changed), attn_implementation=attention)
    return model.eval().to(dtype)


@cache
def model_of(family: str, dtype: torch.dtype = torch.float32, attention: str = "sdpa") -> Any:
    """The same, made once."""
    return new_model(family, dtype=dtype, attention=attention)


def prompt(length: int, *, seed: int = 1) -> torch.Tensor:
    """Random tokens, [1, length]; a shorter prompt of the same seed is the beginning of a longer one."""
    numbers = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (1, 1024), generator=numbers)[:, :length]


def ask(headwater: HeadwaterCache, input_ids: torch.Tensor, max_new_tokens: int = 20, **options: Any) -> Any:
    """An answer of a fixed length with all its logits."""
    return headwater.generate(
        input_ids,
        max_new_tokens=max_new_tokens,
        min_new_tokens=max_new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


def digest(output: Any) -> str:
    """Of all tokens and all bits of all logits."""
    found = hashlib.sha256(output.sequences.numpy().tobytes())
    for logits in output.logits:
        found.update(logits.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    """See above."""
    torch.set_num_threads(1)
    where, families, block_tokens, *lengths = sys.argv[1:]
    for family in families.split(","):
        made = model_of(family)
        with HeadwaterCache.open(made, f"{where}/{family}", block_tokens=int(block_tokens)) as headwater:
            for length in map(int, lengths):
                output = ask(headwater, prompt(length))
                usage = headwater.usage
                assert usage is not None
                found = {"family": family, "digest": digest(output), "hit": dict(usage.hit_tokens)}
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
