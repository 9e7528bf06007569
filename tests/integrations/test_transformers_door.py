"""What `HeadwaterCache` does not take is refused by name, before anything is stored or computed."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from headwater.core.errors import InvalidConfig, InvalidInput, NotInstalled, ResourceClosed, StoreError
from headwater.integrations.transformers import HeadwaterCache
from headwater.storage.memory import MemoryStore
from transformers_kit import ask, model_of, new_model, prompt


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made(config: Any) -> Any:
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def few(**more: Any) -> dict[str, Any]:
    shape = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return shape | {"num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 16, "pad_token_id": 0} | more


class LoraLinear(torch.nn.Module):
    """Somebody's own layer."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.inner(states) * 1.5  # type: ignore[no-any-return]


def changed(how: Callable[[Any], object]) -> Any:
    model = new_model("llama")
    how(model)
    return model


def with_stranger(model: Any) -> None:
    model.model.layers[0].mlp.up_proj = LoraLinear(model.model.layers[0].mlp.up_proj)


def encoder_decoder() -> Any:
    config = transformers.T5Config(
        vocab_size=100, d_model=32, d_kv=16, d_ff=48, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def with_images() -> Any:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        ),
        text_config=transformers.LlamaConfig(**few()),
    )
    return transformers.LlavaForConditionalGeneration(config).eval()


def recurrent() -> Any:
    return made(transformers.MambaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, state_size=4))


def linear_hybrid() -> Any:
    config = transformers.Qwen3NextConfig(
        **few(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16),
        linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    return made(config)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sliding": (lambda: new_model("mistral", sliding_window=32), "layer 0 is a sliding window"),
    "mixed": (lambda: made(transformers.Gemma3TextConfig(**few(sliding_window=16))), "is a sliding window"),
    "recurrent": (recurrent, "MambaForCausalLM is not cached"),
    "linear": (linear_hybrid, "layer 0 is a recurrent state"),
    "encoder": (encoder_decoder, "encoder-decoder"),
    "images": (with_images, "images or sound"),
    "training": (lambda: changed(lambda model: model.train()), r"model\.eval\(\)"),
    "adapter": (lambda: changed(lambda model: setattr(model, "_hf_peft_config_loaded", True)), "adapter"),
    "quantised": (lambda: changed(lambda m: setattr(m.config, "quantization_config", {"bits": 4})), "quantised"),
    "hook": (
        lambda: changed(lambda m: m.model.norm.register_forward_hook(lambda *_: None)),
        "hooked into .* model.norm",
    ),
    "patched": (lambda: changed(lambda m: setattr(m.model, "forward", m.model.forward)), "forward .* was replaced"),
    "stranger": (lambda: changed(with_stranger), "LoraLinear"),
    "compiled": (lambda: changed(lambda m: setattr(m, "_compiled_call_impl", m._call_impl)), "itself was replaced"),
    "wrapped": (lambda: torch.nn.Sequential(new_model("llama")), "no transformers model that generates"),
    "name": (lambda: "gpt2", "no transformers model that generates"),
    "headless": (lambda: new_model("llama").model, "no transformers model that generates"),
    "dynamic": (
        lambda: new_model("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        r"RoPE \(dynamic\)",
    ),
    "flash": (
        lambda: changed(lambda m: setattr(m.config, "_attn_implementation", "flash_attention_2")),
        "'flash_attention_2'; taken are eager and sdpa",
    ),
    "offloaded": (lambda: changed(lambda m: m.model.norm.to("meta")), "not on one device"),
    "float64": (lambda: new_model("llama", dtype=torch.float64), "the cache holds torch.float64"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_are_refused(kind: str, tmp_path: Path) -> None:
    make, said = REFUSED[kind]
    with pytest.raises(InvalidInput, match=said):
        HeadwaterCache.open(make(), tmp_path / "store", limit_gib=0.05)


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "num_beams": ({"num_beams": 2}, "beam search"),
    "num_return_sequences": ({"num_return_sequences": 2, "do_sample": True}, "several sequences"),
    "prompt_lookup": ({"prompt_lookup_num_tokens": 3}, "guesses tokens"),
    "assistant": ({"assistant_model": "one"}, r"assistant_model=\.\.\."),
    "static": ({"cache_implementation": "static"}, "Headwater's own"),
    "quantised": ({"cache_implementation": "quantized"}, "Headwater's own"),
    "offloaded": ({"cache_implementation": "offloaded"}, "Headwater's own"),
    "own_cache": ({"past_key_values": transformers.DynamicCache()}, "past_key_values"),
    "no_cache": ({"use_cache": False}, "nothing to keep"),
    "chunks": ({"prefill_chunk_size": 8}, "block_tokens"),
    "embeddings": ({"inputs_embeds": torch.zeros(1, 3, 64)}, "inputs_embeds"),
    "positions": ({"position_ids": torch.arange(3)}, "position_ids"),
    "images": ({"pixel_values": torch.zeros(1)}, "pixel_values"),
    "healing": ({"token_healing": True}, "the prompt's end"),
    "guidance": ({"guidance_scale": 1.5}, "guidance"),
    "unknown": ({"nonsense": 1}, "nonsense"),
    "in_config": ({"generation_config": transformers.GenerationConfig(num_beams=3)}, "beam search"),
    "padding": ({"attention_mask": torch.tensor([[0] + [1] * 29])}, "padding"),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_calls_that_are_refused(kind: str) -> None:
    arguments, said = ARGUMENTS[kind]
    with MemoryStore(1 << 20) as store, HeadwaterCache(model_of("llama"), store, block_tokens=16) as headwater:
        with pytest.raises(InvalidInput, match=said):
            headwater.generate(prompt(30), **arguments)
        assert headwater.usage is None


@pytest.mark.parametrize(
    ("input_ids", "said"),
    [
        (torch.cat([prompt(30), prompt(30)]), "a batch of 2 prompts"),
        (prompt(30)[0], r"\[1, tokens\]"),
        (prompt(0), "no token"),
        (prompt(30).float(), "token ids"),
        ([[1, 2, 3]], "token ids"),
        (-prompt(30), "outside u32"),
    ],
)
def test_prompts_that_are_refused(input_ids: Any, said: str) -> None:
    with (
        MemoryStore(1 << 20) as store,
        HeadwaterCache(model_of("llama"), store, block_tokens=16) as headwater,
        pytest.raises(InvalidInput, match=said),
    ):
        headwater.generate(input_ids, max_new_tokens=1)


def test_the_model_s_own_defaults_are_looked_at_too() -> None:
    model = new_model("llama")
    model.generation_config.num_beams = 4
    with MemoryStore(1 << 20) as store, HeadwaterCache(model, store, block_tokens=16) as headwater:
        with pytest.raises(InvalidInput, match="num_beams=4"):
            headwater.generate(prompt(30))
        assert headwater.generate(prompt(30), num_beams=1, max_new_tokens=1).shape == (1, 31)


def test_under_autocast_nothing_is_cached() -> None:
    with (
        MemoryStore(1 << 20) as store,
        HeadwaterCache(model_of("llama"), store, block_tokens=16) as headwater,
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(InvalidInput, match="autocast"),
    ):
        ask(headwater, prompt(30))


def more_threads(model: Any) -> None:
    torch.set_num_threads(2)


def one_weight(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight[0, 0] += 1


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "weight": (one_weight, "open it again"),
    "dtype": (lambda model: model.to(torch.bfloat16), "open it again"),
    "threads": (more_threads, "open it again"),
    "attention": (lambda model: model.set_attn_implementation("eager"), "open it again"),
    "theta": (lambda model: model.config.rope_parameters.update(rope_theta=2e4), "open it again"),
    "hook": (lambda model: model.model.norm.register_forward_pre_hook(lambda *_: None), "hooked into"),
    "training": (lambda model: model.train(), "model.eval"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_model_that_changed_since_is_refused(kind: str) -> None:
    change, said = CHANGES[kind]
    model = new_model("llama")
    with MemoryStore(1 << 20) as store, HeadwaterCache(model, store, block_tokens=16) as headwater:
        ask(headwater, prompt(30))
        ask(headwater, prompt(30), output_hidden_states=True)  # transformers hooks in for that, and may
        ask(headwater, prompt(30))
        change(model)
        with pytest.raises(InvalidInput, match=said):
            ask(headwater, prompt(30))


def test_options_that_cannot_work(tmp_path: Path) -> None:
    model = model_of("llama")
    for options, said in (
        ({"block_tokens": 0}, "block_tokens"),
        ({"save": "some"}, "all, prompt, nothing"),
        ({"read_timeout_s": 0}, "read_timeout_s"),
        ({"limit_gib": -1}, "limit_gib"),
    ):
        with pytest.raises(InvalidConfig, match=said):
            HeadwaterCache.open(model, tmp_path / "store", **{"limit_gib": 0.05, **options})  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match="a pool has its own"):
        HeadwaterCache.open(model, "redis://127.0.0.1:1", limit_gib=1)
    with pytest.raises(InvalidConfig, match="a pool is at"):
        HeadwaterCache.open(model, "ftp://somewhere")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "file").write_text("not ours")
    with pytest.raises(StoreError, match="others"):
        HeadwaterCache.open(model, tmp_path / "others", limit_gib=0.05)
    HeadwaterCache.open(model, tmp_path / "made", limit_gib=0.05).close()
    with pytest.raises(StoreError, match="limit"):
        HeadwaterCache.open(model, tmp_path / "made", limit_gib=0.1)


def test_after_close_it_says_so() -> None:
    with MemoryStore(1 << 20) as store:
        headwater = HeadwaterCache(model_of("llama"), store, block_tokens=16)
        headwater.close()
        headwater.close()
        with pytest.raises(ResourceClosed):
            ask(headwater, prompt(30))


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from headwater.integrations import transformers as ours

    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in [name for name in sys.modules if name.startswith("headwater.integrations.transformers.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(ours, "headwater_cache", raising=False)
    with pytest.raises(NotInstalled, match=r"headwater\[transformers\]"):
        _ = ours.HeadwaterCache
    with pytest.raises(AttributeError, match="nonsense"):
        _ = ours.nonsense


def test_to_import_the_package_loads_nothing() -> None:
    script = "import sys, headwater.integrations.transformers; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
