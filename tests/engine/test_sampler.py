"""What is drawn from logits, against transformers' processors, by counting, and by formula."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headwater.core.errors import InvalidInput
from headwater.engine.loader import load_defaults
from headwater.engine.make_model import make_model
from headwater.engine.request import Defaults, Request, Sampling
from headwater.engine.sampler import Chosen, adjusted, choose, draw, kept, seed_of_choice

VOCABULARY = 24
EOS = frozenset((3, 5))


def ask(prompt: Sequence[int] = (1,), answer: Sequence[int] = (), name: str = "one", **sampling: Any) -> Request:
    request = Request(
        name=name,
        prompt=list(prompt),
        sampling=Sampling(**{"max_tokens": 64, **sampling}),
        listen=lambda output: None,
    )
    request.tokens += answer
    return request


def ours(logits: torch.Tensor, request: Request) -> torch.Tensor:
    """The probability of each token."""
    tokens, likely = kept(adjusted(logits, request, EOS), request.sampling)
    return torch.zeros(len(logits), dtype=torch.float64).index_put((tokens,), likely / likely.sum())


def theirs(logits: torch.Tensor, request: Request) -> torch.Tensor:
    """The same by transformers, whose order of processors is that of its own `generate`."""
    sampling, processors = request.sampling, LogitsProcessorList()
    if sampling.logit_bias:
        processors.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in sampling.logit_bias}))
    processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    ends = sorted(sampling.ends(EOS))
    processors.append(MinNewTokensLengthLogitsProcessor(len(request.prompt), sampling.min_tokens, ends))
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    processors.append(TopPLogitsWarper(sampling.top_p))
    processors.append(MinPLogitsWarper(sampling.min_p))
    scores = processors(torch.tensor([request.tokens]), logits.double()[None])
    return torch.softmax(scores[0], dim=-1)


logits_of = st.lists(st.floats(-20, 20, width=32), min_size=VOCABULARY, max_size=VOCABULARY, unique=True).map(
    torch.tensor
)
tokens_of = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40)
samplings = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0.05, 2).map(float),
        "top_k": st.integers(0, VOCABULARY + 3),
        "top_p": st.floats(0.01, 1),
        "min_p": st.floats(0, 1),
        "repetition_penalty": st.floats(0.5, 3),
        "min_tokens": st.integers(0, 8),
        "logit_bias": st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100, width=32), max_size=4).map(
            lambda found: tuple((token, bias) for token, bias in found.items() if bias)
        ),
    },
)


@given(logits_of, tokens_of, tokens_of, samplings)
def test_the_distribution_is_that_of_transformers(
    logits: torch.Tensor, prompt: list[int], answer: list[int], sampling: dict[str, Any]
) -> None:
    request = ask(prompt, answer, **sampling)
    found, wanted = ours(logits, request), theirs(logits, request)
    # At the edge of top_p and min_p the last bit of a sum decides, and ties are broken by a sort: not ours to compare.
    finite = [score for score in adjusted(logits, request, EOS).tolist() if math.isfinite(score)]
    tied = len(set(finite)) < len(finite) and request.sampling.top_p < 1
    assume(not (tied or _on_edge(logits, request)))
    torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-9)


def _on_edge(logits: torch.Tensor, request: Request) -> bool:
    """Whether a little more or less top_p or min_p keeps other tokens."""
    scores, sampling = adjusted(logits, request, EOS), request.sampling
    counts = set()
    for change in (1 - 1e-9, 1, 1 + 1e-9):
        top_p = 1.0 if sampling.top_p == 1 else min(1.0, sampling.top_p * change)
        near = replace(sampling, top_p=top_p, min_p=min(1.0, sampling.min_p * change))
        counts.add(len(kept(scores, near)[0]))
    return len(counts) > 1


@pytest.mark.fault("B12")
@pytest.mark.parametrize(
    "sampling",
    [
        {"top_k": 3},
        {"min_p": 0.2},
        {"repetition_penalty": 1.7},
        {"temperature": 0.3, "top_p": 0.6},
        {"temperature": 1.9, "top_p": 0.6},
        {"temperature": 0.7, "top_k": 6, "top_p": 0.8, "min_p": 0.1},
        {"logit_bias": ((2, 5.0), (7, -100.0))},
        {"logit_bias": ((2, 5.0),), "repetition_penalty": 2.0},
        {"min_tokens": 6},
    ],
    ids=str,
)
def test_each_field_changes_the_distribution_as_transformers_does(sampling: dict[str, Any]) -> None:
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1)) * 3
    request = ask([2, 4, 4], [7, 7, 2], **sampling)
    found = ours(logits, request)
    torch.testing.assert_close(found, theirs(logits, request), atol=1e-12, rtol=1e-9)
    assert not torch.allclose(found, torch.softmax(logits.double(), dim=-1)), "it changes nothing"


def test_penalties_go_by_what_was_generated() -> None:
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(2))
    prompt, answer = [2, 2, 4], [7, 7, 2, 9]
    request = ask(prompt, answer, presence_penalty=0.5, frequency_penalty=-0.25, repetition_penalty=1.5)
    counts, wanted = Counter(answer), []
    for token, logit in enumerate(logits.double().tolist()):
        if token in {*prompt, *answer}:
            logit = logit * 1.5 if logit < 0 else logit / 1.5
        wanted.append(logit + 0.25 * counts[token] - 0.5 * (token in counts))
    torch.testing.assert_close(adjusted(logits, request, EOS), torch.tensor(wanted, dtype=torch.float64))
    one_by_one = ask(prompt, presence_penalty=0.5, frequency_penalty=-0.25, repetition_penalty=1.5)
    for token in answer:  # the tally follows; a request that was preempted keeps its own
        adjusted(logits, one_by_one, EOS)
        one_by_one.tokens.append(token)
    assert torch.equal(adjusted(logits, one_by_one, EOS), adjusted(logits, request, EOS))


def test_a_draw_has_the_probability_that_it_should_have() -> None:
    logits = torch.tensor([1.0, 0.0, 2.5, -1.0, 0.5, 2.5])
    for more in ({}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.3}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}):
        sampling = Sampling(temperature=0.8, **more)
        num = 5_000  # of uniforms, evenly spread: a share of them is a probability, but for one at each end
        drawn = Counter(draw(logits, sampling, (i + 0.5) / num) for i in range(num))
        tokens, likely = kept(logits, sampling)
        for token, share in zip(tokens.tolist(), (likely / likely.sum()).tolist(), strict=True):
            assert abs(drawn[token] - share * num) <= 1, (more, token)
        assert set(drawn) <= set(tokens.tolist())


def test_draws_of_many_seeds_and_positions_are_as_likely_as_told() -> None:
    logits = torch.tensor([[0.3, 1.2, -0.7, 2.0]])
    wanted = torch.softmax(logits[0].double(), dim=-1) * 4000
    for vary in ("seed", "position", "choice"):
        counts = torch.zeros(4, dtype=torch.float64)
        for i in range(4000):
            seed = {"seed": i, "position": 7, "choice": seed_of_choice(7, i)}[vary]
            request = ask([1] * (1 + i if vary == "position" else 1), seed=seed)
            (chosen,) = choose(logits, [request], EOS)
            assert isinstance(chosen, Chosen)
            counts[chosen.token] += 1
        chi_square = float(((counts - wanted) ** 2 / wanted).sum())
        assert chi_square < 22.5, vary  # three degrees of freedom: one in 20,000; and the seeds never change


def test_a_seed_says_what_is_drawn_and_choices_have_streams_of_their_own() -> None:
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(3))

    def answer(seed: int) -> list[int]:
        request = ask(seed=seed)
        for _ in range(20):
            (chosen,) = choose(logits, [request], EOS)
            assert chosen is not None
            request.tokens.append(chosen.token)
        return request.tokens[1:]

    assert answer(11) == answer(11)
    assert seed_of_choice(11, 0) == 11
    seeds = [seed_of_choice(seed, number) for seed in (11, 12) for number in range(4)]
    assert seeds == [seed_of_choice(seed, number) for seed in (11, 12) for number in range(4)]
    assert len(set(seeds)) == len({tuple(answer(seed)) for seed in seeds}) == 8


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-300, 1e-3])
def test_however_small_a_temperature_is_the_likeliest_token_comes(temperature: float) -> None:
    logits = torch.tensor([[-30.0, 30.0, 29.0, -3e38]])
    (chosen,) = choose(logits, [ask(temperature=temperature, seed=1)], EOS)
    assert chosen == Chosen(1)


def test_greedy_heeds_bias_penalties_and_what_may_not_come_yet() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 3], logits[0, 9], logits[0, 8] = 5.0, 4.0, 3.0  # 3 ends an answer
    for sampling, answer, wanted in (
        ({}, [], 3),
        ({"min_tokens": 1}, [], 9),
        ({"min_tokens": 1}, [9], 3),
        ({"min_tokens": 1, "ignore_eos": True}, [], 3),
        ({"min_tokens": 1, "ignore_eos": True, "stop_ids": frozenset((3, 9))}, [], 8),
        ({"logit_bias": ((8, 2.5),)}, [], 8),
        ({"presence_penalty": 1.5}, [3], 9),
        ({"frequency_penalty": 1.5}, [3, 3, 9], 8),
        ({"repetition_penalty": 2.0}, [3], 9),
    ):
        (chosen,) = choose(logits, [ask(answer=answer, temperature=0, **sampling)], EOS)
        assert chosen == Chosen(wanted), sampling


@pytest.mark.fault("B7")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_numbers_has_no_token(temperature: float) -> None:
    rows = torch.zeros(6, 4)
    rows[0, 2] = math.nan
    rows[1, :] = math.nan
    rows[2, 1] = math.inf
    rows[3, :] = -math.inf
    rows[4, :3] = -math.inf  # one token is left
    requests = [ask(temperature=temperature, name=str(i), logprobs=3) for i in range(6)]
    found = choose(rows, requests, EOS)
    assert found[:4] == [None] * 4
    assert found[4] is not None
    assert found[4].token == 3
    assert found[4].told is not None
    assert [value for _, value in found[4].told.top] == [0.0, -9999.0, -9999.0]
    assert found[5] is not None


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": -1},
        {"top_k": 1.5},
        {"min_p": 1.5},
        {"min_p": math.nan},
        {"repetition_penalty": 0},
        {"repetition_penalty": math.inf},
        {"presence_penalty": math.nan},
        {"frequency_penalty": math.inf},
        {"logit_bias": ((1, math.nan),)},
        {"min_tokens": 65},
        {"min_tokens": -1},
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(InvalidInput, match=f"{name}|penalties and biases"):
        ask(**wrong)


def test_the_generation_config_says_what_sampling_is(tmp_path: Path) -> None:
    path = tmp_path / "model"
    make_model("llama", path)
    assert load_defaults(path) == Defaults()  # it says only what ends an answer
    said = {"temperature": 0, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "do_sample": True, "min_p": None}
    (path / "generation_config.json").write_text(json.dumps(said))
    assert load_defaults(path) == Defaults(temperature=0.0, top_p=0.9, top_k=20, repetition_penalty=1.05)
    (path / "generation_config.json").unlink()
    assert load_defaults(path) == Defaults()
    for wrong in ({"temperature": "hot"}, {"top_k": 1.5}, {"top_k": -1}, {"top_p": 0}, {"repetition_penalty": -1}):
        (path / "generation_config.json").write_text(json.dumps(wrong))
        with pytest.raises(InvalidInput, match=rf"generation_config\.json: {next(iter(wrong))} must be"):
            load_defaults(path)
