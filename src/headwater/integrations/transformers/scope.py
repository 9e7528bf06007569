"""Which models are taken: those whose whole state is keys and values of full attention, and whose code is known.

All others are refused by name, before anything is stored: what is not in the identity (`identity.py`) must not change
a byte. So every module is torch's or transformers' own, nobody hooked into it or replaced its forward, and there is no
adapter, quantised weight or second device. Sliding windows, linear attention and other states wait for groups of
planes with rules of their own.

Not here: which calls of `generate` are taken (`arguments.py`). Nothing here changes the model, but `first_layers` runs
it on one token.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from headwater.core.errors import InvalidInput

ATTENTION: Final = ("eager", "sdpa")
_DEVICES: Final = ("cpu", "cuda")
_HOUSES: Final = ("torch", "transformers")  # whose code is known by its version
_CHANGING_ROPE: Final = ("dynamic", "longrope")


def require_known(model: Any) -> None:
    """Raise InvalidInput, with a sentence, for a model that is not taken. Cheap: asked before every call."""
    for refusal in _REFUSALS:
        why = refusal(model)
        if why:
            raise InvalidInput(f"{type(model).__name__} is not cached: {why}")


@torch.no_grad()
def first_layers(model: Any) -> list[Any]:
    """The layers of a cache after one token. Runs the model. Raises InvalidInput for any but full attention."""
    try:
        cache = DynamicCache(config=model.config)
    except (AttributeError, KeyError, ValueError) as error:
        raise InvalidInput(f"{type(model).__name__} is not cached: nobody knows its kind of layer ({error})") from error
    _require_full(model, cache)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    try:
        model.base_model(input_ids=token, past_key_values=cache, use_cache=True)
    except TypeError as error:
        raise InvalidInput(f"{type(model).__name__} is not cached: it takes no such cache ({error})") from error
    _require_full(model, cache)  # one that its configuration does not describe shows itself now
    if cache.get_seq_length() != 1 or any(not layer.is_initialized for layer in cache.layers):
        raise InvalidInput(f"{type(model).__name__} is not cached: it keeps its state somewhere else than in the cache")
    return list(cache.layers)


def _require_full(model: Any, cache: Any) -> None:
    for number, layer in enumerate(cache.layers):
        kind = type(layer).__name__
        if type(layer) is not DynamicLayer:
            what = next((name for word, name in _KINDS.items() if word in kind), "not full attention")
            raise InvalidInput(
                f"{type(model).__name__} is not cached: layer {number} is {what} ({kind}), and only layers of full "
                "attention are taken"
            )


_KINDS: Final = {
    "LinearAttention": "a recurrent state",
    "SlidingWindow": "a sliding window",
    "Indexed": "sparse attention with an indexer",
    "Static": "a static cache",
    "Quantized": "a quantised cache",
}


def _no_generator(model: Any) -> str:
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        return (
            "it is no transformers model that generates (AutoModelForCausalLM makes one; take a compiled or wrapped "
            "model's own)"
        )
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    if model.config.get_text_config() is not model.config:
        return "it has parts for images or sound, and keys are of text alone"
    if type(model).generate is not GenerationMixin.generate or not model._supports_default_dynamic_cache():
        return "it generates in a way of its own"
    return ""


def _unsettled(model: Any) -> str:
    if model.training:
        return "it is in training mode, and dropout is chance: call model.eval()"
    if getattr(model, "_hf_peft_config_loaded", False):
        return "it has an adapter (PEFT, LoRA): merge it into the weights first"
    if getattr(model, "hf_quantizer", None) is not None or getattr(model.config, "quantization_config", None):
        return "its weights are quantised"
    if getattr(model.config, "use_bidirectional_attention", None):
        return "its attention is not causal"
    rope = _changing_rope(model.config.to_dict())
    return f"its RoPE ({rope}) changes with the length of what was seen before" if rope else ""


def _changing_rope(config: Mapping[str, Any]) -> str:
    for name, value in config.items():
        if name in ("rope_type", "type") and value in _CHANGING_ROPE:
            return str(value)
        if isinstance(value, Mapping) and (found := _changing_rope(value)):
            return found
    return ""


def _stranger(model: Any) -> str:
    if getattr(model, "use_kernels", False):
        return "it computes with kernels from a hub (use_kernels)"
    for path, module in model.named_modules():
        name, kind = path or "itself", f"{type(module).__module__}.{type(module).__qualname__}"
        if kind.partition(".")[0] not in _HOUSES:
            return f"its module {name} is a {kind}: code that is in no digest"
        if "forward" in module.__dict__ or module._compiled_call_impl is not None:
            return f"the forward of its module {name} was replaced (compiled, offloaded, patched)"
        for hook in _hooks(module):
            if (getattr(hook, "__module__", None) or "").partition(".")[0] != "transformers":  # which only look
                return f"somebody hooked into its module {name}: what a hook does is in no digest"
    return ""


def _hooks(module: torch.nn.Module) -> Iterator[object]:
    yield from module._forward_hooks.values()
    yield from module._forward_pre_hooks.values()


def _misplaced(model: Any) -> str:
    tensors = [*model.parameters(), *model.buffers()]
    places = sorted({str(tensor.device) for tensor in tensors})
    if len(places) != 1:
        return f"its weights are on {', '.join(places)}, not on one device"
    if model.device.type not in _DEVICES:
        return f"its weights are on {places[0]}; taken are {' and '.join(_DEVICES)}"
    if model.config._attn_implementation not in ATTENTION:
        return f"its attention is {model.config._attn_implementation!r}; taken are {' and '.join(ATTENTION)}"
    return ""


_REFUSALS: Final[tuple[Callable[[Any], str], ...]] = (_no_generator, _unsettled, _stranger, _misplaced)
