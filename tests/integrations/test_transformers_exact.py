"""`HeadwaterCache` gives the bits that computing gives: every family, every split, after a restart, beside others."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import transformers_kit
from headwater.integrations.transformers import HeadwaterCache
from headwater.storage.memory import MemoryStore
from transformers_kit import FAMILIES, ask, digest, model_of, new_model, prompt

BLOCK = 16
SMALL_GIB = 0.05


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cold(model: Any, input_ids: torch.Tensor, *, block_tokens: int = BLOCK, **options: Any) -> str:
    """What is computed where nothing was ever stored."""
    with (
        MemoryStore(1 << 20) as store,
        HeadwaterCache(model, store, block_tokens=block_tokens, save="nothing") as headwater,
    ):
        found = digest(ask(headwater, input_ids, **options))
        assert headwater.usage is not None
        assert headwater.usage.computed_tokens == input_ids.shape[1]
        assert headwater.usage.saved_tokens == 0
        return found


def hits(headwater: HeadwaterCache) -> int:
    assert headwater.usage is not None
    assert headwater.usage.cached_tokens + headwater.usage.computed_tokens == headwater.usage.prompt_tokens
    return headwater.usage.cached_tokens


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hit_is_what_computing_gives(family: str, dtype: torch.dtype, attention: str, tmp_path: Path) -> None:
    model = model_of(family, dtype, attention)
    with HeadwaterCache.open(model, tmp_path / "store", limit_gib=SMALL_GIB, block_tokens=BLOCK) as headwater:
        for length, held in ((70, 0), (70, 64), (101, 64), (64, 48), (65, 64), (3, 0), (16, 0), (17, 16)):
            found = ask(headwater, prompt(length))
            assert hits(headwater) == held, length
            assert digest(found) == cold(model, prompt(length))
            if length == 70 and not held:
                whole = found.sequences
        ask(headwater, prompt(101, seed=2))
        assert hits(headwater) == 0
        found = ask(headwater, torch.cat([whole, prompt(9, seed=3)], 1))
        assert hits(headwater) == 80  # the answer's blocks too: a conversation goes on; 90 tokens fill five
        assert digest(found) == cold(model, torch.cat([whole, prompt(9, seed=3)], 1))


def test_the_answer_is_that_of_generate_alone_but_for_rounding(tmp_path: Path) -> None:
    model = model_of("llama")
    with HeadwaterCache.open(model, tmp_path / "store", limit_gib=SMALL_GIB, block_tokens=BLOCK) as headwater:
        plain = model.generate(prompt(100), attention_mask=torch.ones(1, 100), max_new_tokens=9, do_sample=False)
        for _ in range(2):
            assert torch.equal(headwater.generate(prompt(100), max_new_tokens=9, do_sample=False), plain)


def test_what_is_given_back_is_the_caller_s(tmp_path: Path) -> None:
    """The cache that generate hands out has all tokens but the last, and saving does not touch it."""
    model = model_of("llama")
    with HeadwaterCache.open(model, tmp_path / "store", limit_gib=SMALL_GIB, block_tokens=BLOCK) as headwater:
        first = ask(headwater, prompt(50))
        second = ask(headwater, prompt(50))
        assert first.past_key_values.get_seq_length() == 50 + 20 - 1
        for one, other in zip(first.past_key_values.layers, second.past_key_values.layers, strict=True):
            assert torch.equal(one.keys, other.keys)
            assert torch.equal(one.values, other.values)


def test_sampling_draws_the_same_from_a_hit(tmp_path: Path) -> None:
    found = []
    with HeadwaterCache.open(
        model_of("qwen3"), tmp_path / "store", limit_gib=SMALL_GIB, block_tokens=BLOCK
    ) as headwater:
        for _ in range(2):
            torch.manual_seed(3)
            found.append(headwater.generate(prompt(90), max_new_tokens=24, do_sample=True, top_k=50))
        assert hits(headwater) == 80
    assert torch.equal(*found)


@pytest.mark.parametrize(("save", "saved"), [("all", 80), ("prompt", 64), ("nothing", 0)])
def test_what_is_saved(save: Any, saved: int, place: Path) -> None:
    model = model_of("mistral")
    with HeadwaterCache.open(model, place / "store", limit_gib=SMALL_GIB, block_tokens=BLOCK, save=save) as headwater:
        ask(headwater, prompt(64))
        assert headwater.usage is not None
        assert headwater.usage.saved_tokens == saved
        assert not headwater.usage.not_saved
        ask(headwater, prompt(70))
        assert hits(headwater) == min(64, saved)
        tier = "host" if str(place).startswith("/dev/shm") else "disk"
        assert dict(headwater.usage.hit_tokens) == ({tier: 64} if saved else {})
        assert headwater.usage.missed == ("" if saved else "not in the store")


def test_in_a_new_process_it_is_the_same(tmp_path: Path) -> None:
    families = ("llama", "qwen3", "mistral", "gpt_neox")
    for family in families:
        made = HeadwaterCache.open(model_of(family), tmp_path / family, limit_gib=SMALL_GIB, block_tokens=BLOCK)
        made.close()
    first = finish(start(tmp_path, families, 100))
    second = finish(start(tmp_path, families, 100, 120, 40))
    for family in families:
        said = [one for one in first + second if one["family"] == family]
        assert [one["hit"] for one in said] == [{}, {"disk": 96}, {"disk": 96}, {"disk": 32}]
        right = [cold(model_of(family), prompt(length)) for length in (100, 120, 40)]
        assert [one["digest"] for one in said] == [right[0], *right]
        with HeadwaterCache.open(model_of(family), tmp_path / family, block_tokens=BLOCK) as headwater:
            assert digest(ask(headwater, prompt(100))) == right[0]
            assert hits(headwater) == 96


def test_two_processes_share_a_directory(tmp_path: Path) -> None:
    where = tmp_path / "llama"
    with HeadwaterCache.open(model_of("llama"), where, limit_gib=SMALL_GIB, block_tokens=BLOCK) as headwater:
        running = start(tmp_path, ["llama"], 40, 80, 120, 160, 80)
        mine = {length: digest(ask(headwater, prompt(length))) for length in (160, 120, 80, 40)}
        theirs = finish(running)
        ask(headwater, prompt(160))
        assert hits(headwater) == 144
    for length, one in zip((40, 80, 120, 160, 80), theirs, strict=True):
        assert one["digest"] == mine[length] == cold(model_of("llama"), prompt(length))


@settings(max_examples=15)
@given(data=st.data())
def test_any_row_of_prompts(data: st.DataObject) -> None:
    """Prompts that share beginnings, in any order, blocks of any size, in a store that is sometimes too small."""
    model = model_of("llama")
    block_tokens = data.draw(st.sampled_from([1, 5, 16, 33]), label="block_tokens")
    limit = data.draw(st.sampled_from([64 << 10, 16 << 20]), label="limit_bytes")
    with MemoryStore(limit) as store, HeadwaterCache(model, store, block_tokens=block_tokens) as headwater:
        for _ in range(data.draw(st.integers(1, 5), label="calls")):
            beginning = prompt(data.draw(st.integers(1, 80), label="shared"))
            asked = torch.cat([beginning, prompt(data.draw(st.integers(0, 30)), seed=data.draw(st.integers(2, 3)))], 1)
            answer = data.draw(st.integers(1, 12), label="answer")
            found = digest(ask(headwater, asked, answer))
            assert hits(headwater) % block_tokens == 0
            assert found == cold(model, asked, block_tokens=block_tokens, max_new_tokens=answer)


def test_keys_wider_than_values(tmp_path: Path) -> None:
    """Multi-head latent attention, which transformers keeps unfolded."""
    made = transformers.DeepseekV3Config(
        vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=96, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=24, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=16, max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(made).eval()
    with HeadwaterCache.open(model, tmp_path / "store", limit_gib=SMALL_GIB, block_tokens=BLOCK) as headwater:
        found = [digest(ask(headwater, prompt(70))) for _ in range(2)]
        assert hits(headwater) == 64
    assert {*found} == {cold(model, prompt(70))}


def test_another_model_misses(tmp_path: Path) -> None:
    where = tmp_path / "store"
    seen = set()
    one_weight = new_model("llama")
    with torch.no_grad():
        one_weight.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    rope = new_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 20000.0})
    models = [model_of("llama"), one_weight, rope, model_of("llama", attention="eager"),
              model_of("llama", torch.bfloat16), model_of("llama")]  # fmt: skip
    for number, model in enumerate(models):
        HeadwaterCache.open(
            model, where, limit_gib=SMALL_GIB if not number else None, block_tokens=BLOCK, save="nothing"
        ).close()
        with HeadwaterCache.open(model, where, block_tokens=BLOCK) as headwater:
            seen.add(headwater.identity.digest)
            found = digest(ask(headwater, prompt(70)))
            assert hits(headwater) == (64 if number == len(models) - 1 else 0), number
            assert found == cold(model, prompt(70))
    assert len(seen) == len(models) - 1
    for block_tokens, salt in ((32, b""), (BLOCK, b"another tenant")):
        with HeadwaterCache.open(model_of("llama"), where, block_tokens=block_tokens, salt=salt) as headwater:
            ask(headwater, prompt(70))
            assert hits(headwater) == 0


def start(where: Path, families: Sequence[str], *lengths: int) -> "subprocess.Popen[str]":
    """Another process, which asks these models with the stores in the directories of their names."""
    command = [sys.executable, str(Path(transformers_kit.__file__)), str(where), ",".join(families), str(BLOCK)]
    return subprocess.Popen([*command, *map(str, lengths)], stdout=subprocess.PIPE, text=True)


def finish(running: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    said, _ = running.communicate(timeout=300)
    assert running.returncode == 0
    return [json.loads(line) for line in said.splitlines()]
