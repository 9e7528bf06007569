"""Which calls of `generate` are taken: one prompt, one answer, one token after another.

What an argument does to the cache must be known. So what is not listed is refused by name: an input that the keys do
not name (embeddings, images, positions), another cache, several answers, tokens that are guessed and taken back.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
from transformers import GenerationConfig

from headwater.core.errors import InvalidInput

_TAKEN: Final = frozenset(
    {"generation_config", "logits_processor", "prefix_allowed_tokens_fn", "stopping_criteria", "streamer", "tokenizer"}
)
_SEVERAL: Final = "it makes several sequences of one prompt (beam search); one is taken"
_GUESSED: Final = "it guesses tokens and takes them back (assisted decoding)"
_OTHER_CACHE: Final = "the cache is Headwater's own: leave it out"
_REFUSED: Final[
    Mapping[str, tuple[tuple[object, ...], str]]
] = {  # the values that are taken, and what to say of others
    "num_beams": ((None, 1), _SEVERAL),
    "num_beam_groups": ((None, 1), _SEVERAL),
    "num_return_sequences": ((None, 1), _SEVERAL),
    "constraints": ((None,), _SEVERAL),
    "force_words_ids": ((None,), _SEVERAL),
    "prompt_lookup_num_tokens": ((None,), _GUESSED),
    "assistant_early_exit": ((None,), _GUESSED),
    "speculation_type": ((None,), _GUESSED),
    "use_mtp": ((None, False), _GUESSED),
    "is_assistant": ((None, False), _GUESSED),
    "penalty_alpha": ((None, 0), "it looks ahead (contrastive search)"),
    "dola_layers": ((None,), "it compares layers (DoLa)"),
    "guidance_scale": ((None, 1), "it computes a second prompt beside (guidance)"),
    "token_healing": ((None, False), "it changes the prompt's end"),
    "use_cache": ((None, True), "without a cache there is nothing to keep"),
    "cache_implementation": ((None,), _OTHER_CACHE),
    "cache_config": ((None,), _OTHER_CACHE),
    "prefill_chunk_size": ((None,), "prompts are computed in blocks: see block_tokens"),
}


def require_taken(model: Any, arguments: Mapping[str, Any]) -> None:
    """Raise InvalidInput for an argument that is not taken, whoever set it: the caller or the model's own defaults."""
    given = arguments.get("generation_config")
    if torch.is_autocast_enabled(model.device.type):
        raise InvalidInput("generate under autocast is not cached: load the model in the dtype to compute in")
    known = vars(GenerationConfig()).keys() | _TAKEN
    for name in arguments:
        if name not in known or name.startswith("_"):
            raise InvalidInput(
                f"generate({name}=...) is not cached: it is another input than the prompt's tokens, or unknown here"
            )
    for name, (taken, why) in _REFUSED.items():
        value = arguments.get(name)
        value = value if value is not None else getattr(given, name, None)
        value = value if value is not None else getattr(model.generation_config, name, None)
        if value not in taken:
            raise InvalidInput(f"generate({name}={value!r}) is not cached: {why}")


def prompt_of(input_ids: Any, attention_mask: Any) -> torch.Tensor:
    """The prompt, [1, tokens]. Raises InvalidInput for several prompts, padding, or what is no prompt."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or input_ids.is_floating_point():
        raise InvalidInput("input_ids must be a tensor of token ids, [1, tokens]: tokenizer(text, return_tensors='pt')")
    if len(input_ids) != 1:
        raise InvalidInput(f"a batch of {len(input_ids)} prompts is not cached: give one prompt at a time")
    if not input_ids.shape[1]:
        raise InvalidInput("the prompt has no token")
    if attention_mask is not None and (
        attention_mask.shape != input_ids.shape or not bool((attention_mask == 1).all())
    ):
        raise InvalidInput("a prompt with padding is not cached: leave the padding out")
    return input_ids
