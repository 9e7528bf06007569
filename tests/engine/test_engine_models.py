"""The models against transformers and against themselves: chunks, batches, slots, bytes; directories that are wrong."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headwater.core.errors import InvalidInput
from headwater.engine.loader import load_model
from headwater.engine.make_model import FAMILIES, make_model, random_model
from headwater.engine.models.base import Model, Span
from headwater.engine.models.layers import Routing, Scoring
from headwater.engine.models.rope import read_rope
from headwater.engine.models.settings import Settings
from headwater.engine.step import Group
from headwater.transfer.device.arena import DeviceCache, create_kv_cache

transformers.utils.logging.disable_progress_bar()  # it starts a thread

PROMPT, LENGTH = 70, 90  # the rest is decoded token by token; DSA chooses 48 positions
NUM_BLOCKS = 40
SLOTS = (9, 2, 30, 4, 31, 0, 17)
TOLERANCE = 1e-4
# A difference in the last bit of fp32 may round a cached value to the next bf16 or FP8 one; so much, and no more.
ROUNDED = {"auto": TOLERANCE, "bf16": 2e-3, "fp8": 3e-2}

# family -> what is changed of its tiny config: everything that a config can say and that is computed otherwise.
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "llama-biases-tied": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rope_scaling": None, "head_dim": 24},
    ),
    "llama-yarn-new-spelling": (
        "llama",
        {
            "rope_scaling": None,
            "rope_theta": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 2048,
            },
        },
    ),
    "llama-mqa": ("llama", {"num_key_value_heads": 1, "num_attention_heads": 8}),
    "qwen3-biases-tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "deepseek_v2-greedy-no-q-lora": ("deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy", "v_head_dim": 24}),
    "deepseek_v3-halves-biases": (
        "deepseek_v3",
        {"rope_interleave": False, "attention_bias": True, "norm_topk_prob": False, "q_lora_rank": None},
    ),
    "deepseek_v3-one-group": ("deepseek_v3", {"n_group": 1, "topk_group": 1, "rope_scaling": None}),
    "deepseek_v32-few-chosen": ("deepseek_v32", {"index_topk": 5, "attention_bias": True}),
}
KINDS = [(family, "auto") for family in FAMILIES] + [("llama", "fp8"), ("deepseek_v32", "fp8"), ("qwen3", "bf16")]


def tokens(count: int = LENGTH, seed: int = 1) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")

    @cache
    def find(name: str) -> Path:
        family, changes = VARIANTS[name]
        made = root / name
        make_model(family, made, seed=3, overrides=changes)  # null is as good as missing, to both readers
        return made

    return find


@pytest.fixture(scope="session")
def loaded(directory: Callable[[str], Path]) -> Callable[..., Model]:
    @cache
    def load(name: str, kv: str = "auto", dtype: str | None = None) -> Model:
        return load_model(directory(name), kv=kv, dtype=dtype)

    return load


@dataclass
class Run:
    """One request on planes of its own."""

    model: Model
    planes: DeviceCache
    slots: Sequence[int] = SLOTS
    done: int = 0

    def __call__(self, new: Sequence[int], num_logits: int | None = None) -> torch.Tensor:
        wanted = len(new) if num_logits is None else num_logits
        out = self.model.forward(self.planes, [Span(new, self.done, self.slots, wanted)])
        self.done += len(new)
        return out.logits


def start(model: Model, slots: Sequence[int] = SLOTS, *, dirt: int = 0) -> Run:
    planes = create_kv_cache(model.layout, NUM_BLOCKS)
    for rows in planes.rows:
        rows.fill_(dirt)
    return Run(model, planes, slots)


def chunked(run: Run, ids: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    ends = list(itertools.accumulate(sizes))
    assert ends[-1] == len(ids)
    return torch.cat([run(ids[end - size : end]) for size, end in zip(sizes, ends, strict=True)])


# --- the oracle -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers(
    name: str, directory: Callable[[str], Path], loaded: Callable[..., Model]
) -> None:
    ids = tokens()
    oracle: Any = transformers.AutoModelForCausalLM.from_pretrained(directory(name)).eval()
    with torch.no_grad():
        told = oracle(torch.tensor([ids[:PROMPT]]), use_cache=True)
        wanted = [told.logits[0]]
        for token in ids[PROMPT:]:
            told = oracle(torch.tensor([[token]]), past_key_values=told.past_key_values, use_cache=True)
            wanted.append(told.logits[0])
    run = start(loaded(name))
    found = [run(ids[:PROMPT]), *(run([token]) for token in ids[PROMPT:])]
    assert torch.cat(wanted).std() > 0.5, "logits that say nothing"
    for step, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert (ours - theirs).abs().max() < TOLERANCE, f"step {step}"
    assert torch.equal(torch.cat(found).argmax(-1), torch.cat(wanted).argmax(-1))


def test_bf16_models_say_about_what_fp32_models_say(loaded: Callable[..., Model]) -> None:
    ids = tokens()
    for family in ("llama", "deepseek_v3"):
        exact, rounded = (start(loaded(family, "auto", dtype))(ids) for dtype in ("fp32", "bf16"))
        assert loaded(family, "auto", "bf16").dtype == torch.bfloat16
        assert rounded.dtype == torch.float32
        assert (exact - rounded).abs().mean() < 0.1 * exact.std()


@pytest.mark.parametrize("family", ["llama", "deepseek_v32"])
def test_fp8_models_say_about_what_plain_ones_say(family: str, loaded: Callable[..., Model]) -> None:
    ids = tokens(40)
    plain, fp8 = (start(loaded(family, kv))(ids) for kv in ("auto", "fp8"))
    difference = (plain - fp8).abs().mean() / plain.std()
    assert 1e-4 < difference < 0.1  # it is quantised, and it is the same model


# --- against themselves -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kv"), KINDS)
def test_chunks_make_no_difference(name: str, kv: str, loaded: Callable[..., Model]) -> None:
    ids = tokens()
    model = loaded(name, kv)
    whole = start(model)(ids)
    for sizes in ((40, 50), (17, 16, 1, 20, 3, 33), (1,) * LENGTH):
        torch.testing.assert_close(chunked(start(model), ids, sizes), whole, atol=ROUNDED[kv], rtol=0)


@pytest.mark.parametrize(("name", "kv"), KINDS)
def test_slots_and_what_lay_in_them_make_not_one_bit_of_difference(
    name: str, kv: str, loaded: Callable[..., Model]
) -> None:
    ids, sizes = tokens(), (33, 20, 1, 5, 31)
    model = loaded(name, kv)
    once = chunked(start(model), ids, sizes)
    assert torch.equal(chunked(start(model), ids, sizes), once), "from run to run"
    for seed in range(3):
        slots = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(seed)).tolist()[: len(SLOTS)]
        # Bytes of 0xff are NaN in every float type: whoever looks at one more row than it should will show it.
        assert torch.equal(chunked(start(model, slots, dirt=0xFF), ids, sizes), once)


@pytest.mark.parametrize(("name", "kv"), KINDS)
def test_a_prompt_attends_to_exactly_what_it_wrote(
    name: str, kv: str, loaded: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt from position 0 uses what it wrote without reading it back: the bits must be those of reading it."""
    model = loaded(name, kv)
    direct = start(model)(tokens())
    monkeypatch.setattr(Group, "fresh", False)
    assert torch.equal(start(model)(tokens()), direct)


@pytest.mark.parametrize(("name", "kv"), KINDS)
def test_bytes_that_another_run_wrote_are_as_good_as_ones_own(name: str, kv: str, loaded: Callable[..., Model]) -> None:
    model, ids = loaded(name, kv), tokens()
    cold = start(model)
    cold(ids[:48], 0)
    other = start(model, [20, 21, 22, 23, 24, 25], dirt=0xFF)
    for mine, theirs in zip(other.planes.rows, cold.planes.rows, strict=True):
        mine[[20, 21, 22]] = theirs[list(SLOTS[:3])]
    other.done = 48
    for size in (30, 1, 5):
        new = ids[cold.done : cold.done + size]
        assert torch.equal(other(new), cold(new))
    for mine, theirs in zip(other.planes.rows, cold.planes.rows, strict=True):
        assert torch.equal(mine[20:25], theirs[list(SLOTS[:5])]), "and it leaves the same bytes"


@pytest.mark.parametrize(("name", "kv"), KINDS)
def test_only_the_new_positions_are_written(name: str, kv: str, loaded: Callable[..., Model]) -> None:
    model = loaded(name, kv)
    run = start(model)
    run(tokens(21))  # into the middle of block 1
    generator = torch.Generator().manual_seed(5)
    for rows in run.planes.rows:
        noise = torch.randint(0, 256, rows.shape, dtype=torch.uint8, generator=generator)
        rows[[i for i in range(NUM_BLOCKS) if i not in SLOTS]] = noise[[i for i in range(NUM_BLOCKS) if i not in SLOTS]]
    before = [flat.clone() for flat in run.planes.flat]
    run(tokens(25, seed=9))  # positions 21 .. 45
    block = model.block_tokens
    for plane, now, then in zip(model.layout.planes, run.planes.flat, before, strict=True):
        assert plane.token_axis is not None
        changed = (now.view(torch.uint8) != then.view(torch.uint8)).view(*now.shape, -1).any(-1)
        changed = changed.movedim(plane.token_axis + 1, 1).flatten(2).any(-1) if changed.dim() > 2 else changed
        touched = {(slot, offset) for slot, offset in changed.nonzero().tolist()}
        assert touched == {(SLOTS[position // block], position % block) for position in range(21, 46)}


@pytest.mark.parametrize(("name", "kv"), KINDS)
def test_spans_in_one_batch_do_not_know_of_each_other(name: str, kv: str, loaded: Callable[..., Model]) -> None:
    model = loaded(name, kv)
    # (positions computed before, new tokens, logits wanted): decodes of unlike length, a fresh prompt, chunks, a tail.
    parts = [(50, 1, 1), (0, 30, 2), (63, 1, 1), (20, 33, 33), (5, 1, 0), (51, 4, 4), (40, 1, 1), (7, 3, 2), (0, 1, 1)]
    ids = [tokens(before + new, seed=index) for index, (before, new, _) in enumerate(parts)]
    alone = []
    shared = start(model, dirt=0xFF).planes  # whatever padding reads must be the span's own
    free = iter((1 + torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(2))).tolist())
    spans = []
    for (before, new, wanted), one in zip(parts, ids, strict=True):
        run = start(model)
        slots = [next(free) for _ in range(-(-(before + new) // model.block_tokens))]
        if before:
            run(one[:before], 0)
            model.forward(shared, [Span(one[:before], 0, slots, 0)])
        alone.append(run(one[before:], wanted))
        spans.append(Span(one[before:], before, slots, wanted))
    together = model.forward(shared, spans).logits
    assert together.shape == (sum(wanted for _, _, wanted in parts), model.vocab_size)
    torch.testing.assert_close(together, torch.cat(alone), atol=ROUNDED[kv], rtol=0)
    backwards = model.forward(shared, spans[::-1]).logits
    torch.testing.assert_close(backwards, torch.cat(alone[::-1]), atol=ROUNDED[kv], rtol=0)


def test_no_spans_give_no_logits_and_bad_ones_an_error(loaded: Callable[..., Model]) -> None:
    model = loaded("llama")
    planes = create_kv_cache(model.layout, 4)
    assert model.forward(planes, []).logits.shape == (0, model.vocab_size)
    with pytest.raises(InvalidInput, match="slot 4 does not exist"):
        model.forward(planes, [Span([1], 0, [4])])
    with pytest.raises(InvalidInput, match="another layout"):
        model.forward(create_kv_cache(loaded("llama", "fp8").layout, 4), [Span([1], 0, [0])])
    assert not any(rows.any() for rows in planes.rows)


def test_a_random_model_computes_without_a_directory() -> None:
    config = FAMILIES["qwen3"]
    models = [random_model(config, dtype="fp32", seed=seed) for seed in (1, 1, 2)]
    one, same, other = (start(model)(tokens(30)) for model in models)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert models[0].identity == models[1].identity
    assert models[0].identity.digest != models[2].identity.digest


# --- parts ------------------------------------------------------------------------------------------------------------

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn-deepseek": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
    },
    "yarn-options": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 65536,
        "attention_factor": 1.25,
        "truncate": False,
    },
}


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("name", ROPES)
def test_rope_frequencies_are_those_of_transformers(name: str, theta: float) -> None:
    scaling = {**ROPES[name], "rope_theta": theta}
    config = {"max_position_embeddings": 131072, "hidden_size": 512, "num_attention_heads": 4, "head_dim": 128}
    theirs: Any = transformers.LlamaConfig(**config, rope_parameters=dict(scaling))
    if name == "default":
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        wanted, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(theirs)
    else:
        wanted, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs)
    new = read_rope(Settings({**config, "rope_parameters": scaling}), 128)
    plain = {key: value for key, value in scaling.items() if key not in ("rope_theta", "rope_type")}
    old = read_rope(
        Settings({**config, "rope_theta": theta, "rope_scaling": {**plain, "type": scaling["rope_type"]}}), 128
    )
    for ours in (new, old):
        torch.testing.assert_close(ours.frequencies, wanted, rtol=1e-6, atol=0)
        assert ours.factor == pytest.approx(factor)


def test_routing_picks_from_the_best_groups_only() -> None:
    logits = torch.tensor([[4.0, -9, -9, -9, 3.0, 2.9, -9, -9, -9, -9, 2.0, 2.0]])
    softmax = Routing(  # a group counts by its best: the first
        num_experts=12, num_picked=3, num_groups=3, num_groups_picked=1, scoring=Scoring.SOFTMAX, scale=2.0
    )
    weights, experts = softmax.pick(logits, None)
    assert experts[0, 0] == 0
    assert set(experts[0].tolist()) < {0, 1, 2, 3}
    torch.testing.assert_close(weights, 2 * logits.softmax(-1).gather(1, experts))
    sigmoid = replace(softmax, scoring=Scoring.SIGMOID, normalise=True, scale=1.0)  # by its best two: the second
    weights, experts = sigmoid.pick(logits, torch.zeros(12))
    assert set(experts[0, :2].tolist()) == {4, 5}
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0))
    correction = torch.zeros(12)
    correction[8:] = 10  # picks, but does not weigh
    weights, experts = sigmoid.pick(logits, correction)
    assert set(experts[0].tolist()) < {8, 9, 10, 11}
    torch.testing.assert_close(weights[0, 0], weights[0, 1])
