"""A model that computes NaN or infinity: an honest error, no token, and no block of such numbers in any tier."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.keys import block_keys
from headwater.engine.loader import load_model
from headwater.engine.make_model import BOS, make_model
from headwater.engine.models.base import Model, Span
from headwater.index.slots import SlotState
from headwater.storage.base import Deadline
from headwater.transfer.device.arena import create_kv_cache
from headwater.transfer.executor.tier import Naming
from pd_kit import new_pool
from serve_kit import Served, directory, model, serving
from test_pd_serve import cluster

__all__ = ["directory", "model"]  # fixtures

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
EMBEDDING = "model.embed_tokens.weight"
Z = ord("Z")
CLEAN = [BOS, *b"A prompt of several blocks, with nothing wrong in it; it is as long as the other one is, or so."]


def damaged(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors")
    return target


def one_bad_token(weights: dict[str, torch.Tensor]) -> None:
    """Whoever reads a Z computes NaN; nobody else does."""
    weights[EMBEDDING][Z] = torch.nan


@pytest.fixture(scope="module")
def bad_directory(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return damaged(directory, tmp_path_factory.mktemp("bad") / "tiny", one_bad_token)


@pytest.fixture(scope="module")
def bad_model(bad_directory: Path) -> Model:
    return load_model(bad_directory)


def bad(at: int, length: int) -> list[int]:
    """A prompt whose token `at` is the bad one."""
    return [BOS, *(b"abcdefghij" * 50)[: at - 1], Z, *(b"klmnopqrst" * 50)[: length - at - 1]]


def error_of(found: Any, status: int = 500, code: str = "not_finite") -> str:
    assert found.status_code == status, found.text
    error = found.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("server_error", code)
    return str(error["message"])


# --- what a client hears ----------------------------------------------------------------------------------------------


@pytest.mark.fault("B7")
@pytest.mark.parametrize("stream", [False, True])
def test_weights_of_nan_are_an_error_and_not_a_token(directory: Path, tmp_path: Path, *, stream: bool) -> None:
    def spoil(weights: dict[str, torch.Tensor]) -> None:
        for tensor in weights.values():
            tensor.fill_(torch.nan)

    path = damaged(directory, tmp_path / "nan", spoil)
    with serving(path, load_model(path)) as served:
        for temperature in (0, 1):
            body = {"max_tokens": 5, "temperature": temperature, "stream": stream}
            assert "NaN or infinity" in error_of(served.post(COMPLETIONS, {"prompt": "hello", **body}))
            error_of(served.post(CHAT, {"messages": [{"role": "user", "content": "hello"}], **body}))
            error_of(served.post(COMPLETIONS, {"prompt": ["a", "b"], "n": 2, **body}))
        served.until_free()
        assert served.get("/health").status_code == 200
        assert served.running.metrics.value("not_finite_requests_total") >= 6


@pytest.mark.fault("B7")
def test_what_overflows_in_half_precision_is_an_error(directory: Path, tmp_path: Path) -> None:
    def amplify(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.1.mlp.down_proj.weight"] *= 1e5  # within fp32; in fp16 its products are not

    path = damaged(directory, tmp_path / "loud", amplify)
    with serving(path, load_model(path)) as served:
        served.complete("hello", max_tokens=3)
    with serving(path, load_model(path, dtype="fp16")) as served:
        error_of(served.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 3}))


@pytest.mark.fault("B7")
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_that_has_begun_ends_with_an_error(bad_directory: Path, bad_model: Model, path: str) -> None:
    prompt = {"prompt": "go"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "go"}]}
    body = {**prompt, "logit_bias": {str(Z): 100}, "max_tokens": 5, "temperature": 0}  # it says Z, and then reads it
    with serving(bad_directory, bad_model) as served:
        found = served.post(path, {**body, "stream": True})
        assert found.status_code == 200
        *said, last = [json.loads(line.removeprefix("data: ")) for line in found.text.split("\n\n") if line]
        assert last["error"]["code"] == "not_finite"
        assert [one["choices"][0]["finish_reason"] for one in said] == [None]
        choice = said[0]["choices"][0]
        assert (choice["text"] if path == COMPLETIONS else choice["delta"]["content"]) == "Z"
        assert "[DONE]" not in found.text
        error_of(served.post(path, body))


# --- what stays -------------------------------------------------------------------------------------------------------


def known_blocks_are_finite(served: Served) -> int:
    """Look at every block that the device's index knows; how many there are."""
    planes = served.running.engine.planes
    with served.running.cache.still() as brain:
        known = [slot for slot in range(planes.num_blocks) if brain.slots.state(slot) is SlotState.KNOWN]
        for tensor in planes.tensors.values():
            assert torch.isfinite(tensor[known]).all()
    return len(known)


def held(path: Path, model: Model, tokens: Sequence[int]) -> list[bool]:
    """Which blocks of a prompt a store has."""
    keys = block_keys(tokens, parent=model.identity.root, block_tokens=16)
    naming = Naming(identity=model.identity.digest, layout=model.layout)
    with open_local(LocalStoreConfig(directory=path)) as store:
        return store.contains([naming.name(key) for key in keys], deadline=Deadline.after(5))


@pytest.mark.fault("B7")
@pytest.mark.parametrize("at", [5, 40, 63, 64, 95])
def test_no_block_of_nan_is_kept_in_any_tier(bad_directory: Path, bad_model: Model, shm: Path, at: int) -> None:
    """A prompt in chunks of two blocks: those before the bad one may stay, of its own chunk on nothing does."""
    options: dict[str, Any] = {"step_tokens": 32, "host_directory": shm / "host", "host_bytes": 32 << 20}
    prompt = bad(at, 96)
    num_good = at // 32 * 2
    with serving(bad_directory, bad_model, **options) as served:
        for _ in range(2):
            error_of(served.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 4}))
            served.until_free()
            assert known_blocks_are_finite(served) == num_good
        other = [*prompt[:at], *CLEAN][:96]  # shares what was computed before the bad token
        usage = served.complete(other, max_tokens=2)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == num_good * 16
        assert known_blocks_are_finite(served) == 6
    found = held(shm / "host", bad_model, prompt)
    assert not any(found[at // 16 :]), "a block of NaN is in the host tier"


@pytest.mark.fault("B7")
def test_others_in_the_same_steps_are_not_harmed(bad_directory: Path, bad_model: Model) -> None:
    body = {"prompt": CLEAN, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "logit_bias": {str(Z): -100}}
    with serving(bad_directory, bad_model) as served:
        wanted = served.post(COMPLETIONS, body).json()["choices"]
    with serving(bad_directory, bad_model, num_blocks=64) as served:
        for at in (3, 17, 90):  # in slots that held NaN a moment ago
            error_of(served.post(COMPLETIONS, {"prompt": bad(at, 96), "max_tokens": 4}))
            assert served.post(COMPLETIONS, {**body, "cache_salt": str(at)}).json()["choices"] == wanted
        # Both begin in one step; one of several answers that fails ends them all.
        error_of(served.post(COMPLETIONS, {**body, "prompt": [CLEAN, bad(40, 96)]}))
        served.until_free()
        assert known_blocks_are_finite(served) > 0
        assert served.post(COMPLETIONS, body).json()["choices"] == wanted


@pytest.mark.fault("B7")
def test_a_prompt_of_nan_is_not_handed_over(bad_directory: Path, bad_model: Model, shm: Path) -> None:
    pool = new_pool(shm)
    prompt = bad(40, 96)
    with cluster(bad_directory, bad_model, pool) as pair:
        found = pair.ask({"prompt": prompt, "max_tokens": 4})
        assert "NaN or infinity" in error_of(found, 502, "upstream_failed")
        found = pair.ask({"prompt": prompt, "max_tokens": 4, "stream": True})
        error_of(found, 502, "upstream_failed")
        error_of(pair.prefill.post("/pd/prefill", {"endpoint": COMPLETIONS, "body": {"prompt": prompt}}))
        assert pair.ask({"prompt": CLEAN, "max_tokens": 4}).status_code == 200
    assert not any(held(shm / "pool", bad_model, prompt)[2:])


# --- what a model tells of a step -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "kv"),
    [
        *((family, "auto") for family in ("llama", "qwen2", "qwen3", "deepseek_v2", "deepseek_v3", "deepseek_v32")),
        *((family, "fp8") for family in ("llama", "deepseek_v32")),
    ],
)
def test_a_step_says_whose_tokens_came_to_nothing(family: str, kv: str, tmp_path: Path) -> None:
    make_model(family, tmp_path / "good", overrides={"tie_word_embeddings": False})
    found = load_model(damaged(tmp_path / "good", tmp_path / "bad", one_bad_token), kv=kv)
    planes = create_kv_cache(found.layout, 16)
    spans = [
        Span([1, 2, 3], 0, (0,)),
        Span([*range(40), Z, *range(40)], 0, range(1, 7), 0),  # in the middle of a chunk, and no logits are wanted
        Span([5], 0, (8,)),
        Span([*range(33)], 0, (9, 10, 11), 0),
        Span([Z], 0, (12,)),
    ]
    computed = found.forward(planes, spans)
    assert computed.finite() == [True, False, True, True, False]
    assert torch.isfinite(computed.logits).all(dim=-1).tolist() == [True, True, False]
    behind = found.forward(planes, [Span([7], 81, range(1, 7)), Span([7], 3, (0,))])
    sparse = (
        family == "deepseek_v32"
    )  # it need not look at the bad token again: so all are looked at, not only the last
    assert behind.finite() == [sparse, True]


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj", "o_proj"])
@pytest.mark.parametrize("layer", [0, 2])
def test_whatever_is_nan_in_attention_is_seen(part: str, layer: int, directory: Path, tmp_path: Path) -> None:
    name = f"model.layers.{layer}.self_attn.{part}.weight"

    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights[name][0, 0] = torch.nan

    found = load_model(damaged(directory, tmp_path / "bad", spoil))
    computed = found.forward(create_kv_cache(found.layout, 4), [Span([*range(50)], 0, range(4), 0)])
    assert computed.finite() == [False]
