"""Choosing tokens from logits: greedy or drawn, with per-request seeds, penalties, biases, and log-probabilities.

What is done to a row of logits, in this order, which is that of transformers:

    logit_bias, repetition_penalty, frequency_penalty and presence_penalty, tokens that may not come yet (min_tokens)
    temperature, top_k, top_p, min_p         each of what the one before has left
    a draw, or at temperature 0 the likeliest token

Log-probabilities are of the model's own logits, before all that.

A row without a finite maximum (NaN, infinity) has no token: `choose` says None, and never a token. A single logit of
minus infinity is a token that cannot come, and no fault.

A seeded request draws from a counter-based stream (seed, position): the same seed gives the same answer, whatever else
is in the batch, and also when the request was preempted, moved, or goes on in another process.
"""

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from headwater.engine.request import Request, Sampling, TokenLogprob

_LEAST: Final = -9999.0  # log-probability of what cannot come: neither JSON nor a ticket has an infinity


@dataclass(frozen=True, slots=True)
class Chosen:
    """A token, and how likely it was, where somebody asked."""

    token: int
    told: TokenLogprob | None = None


def choose(logits: torch.Tensor, requests: Sequence[Request], eos_ids: frozenset[int]) -> list[Chosen | None]:
    """The next token of each request, by its row of float32 logits [n, vocab]; None for a row that holds no numbers."""
    best, likeliest = (found.tolist() for found in logits.max(dim=-1))
    chosen: list[Chosen | None] = []
    for row, request in enumerate(requests):
        if not math.isfinite(best[row]):
            chosen.append(None)
            continue
        sampling, scores, token = request.sampling, logits[row], likeliest[row]
        if sampling.penalises or sampling.logit_bias or request.num_generated < sampling.min_tokens:
            scores = adjusted(scores, request, eos_ids)
            token = int(scores.argmax())
        if sampling.temperature > 0:
            token = draw(scores, sampling, _uniform(settle_seed(request), len(request.tokens)))
        told = None if sampling.logprobs is None else _logprobs(logits[row], token, sampling.logprobs)
        chosen.append(Chosen(token, told))
    return chosen


def adjusted(logits: torch.Tensor, request: Request, eos_ids: frozenset[int]) -> torch.Tensor:
    """Float64 logits with biases and penalties; minus infinity for tokens that may not come yet."""
    sampling, scores = request.sampling, logits.double()
    if sampling.logit_bias:
        tokens, biases = zip(*sampling.logit_bias, strict=True)
        scores = scores.index_add(0, scores.new_tensor(tokens, dtype=torch.long), scores.new_tensor(biases))
    if sampling.penalises:
        if request.tally is None:
            request.tally = Tally(len(request.prompt), logits)
        scores = request.tally.penalised(scores, request.tokens, sampling)
    if request.num_generated < sampling.min_tokens:
        barred = sorted(sampling.ends(eos_ids))
        scores = scores.index_fill(0, torch.tensor(barred, dtype=torch.long, device=scores.device), -math.inf)
    return scores


class Tally:
    """Which tokens a request has had, and how often it generated each. Follows its tokens, which only ever grow."""

    def __init__(self, num_prompt: int, like: torch.Tensor) -> None:
        """`like`: a row of logits."""
        self._num_prompt = num_prompt
        self._num_counted = 0
        self._seen = torch.zeros(len(like), dtype=torch.bool, device=like.device)  # in prompt or answer
        self._counts = torch.zeros(len(like), dtype=torch.float64, device=like.device)  # in the answer

    def penalised(self, scores: torch.Tensor, tokens: Sequence[int], sampling: Sampling) -> torch.Tensor:
        """Scores less penalties for `tokens`, prompt and answer so far."""
        new = torch.tensor(tokens[self._num_counted :], dtype=torch.long, device=scores.device)
        generated = new[max(0, self._num_prompt - self._num_counted) :]
        self._seen[new] = True
        self._counts.index_add_(0, generated, torch.ones_like(generated, dtype=torch.float64))
        self._num_counted = len(tokens)
        factor = sampling.repetition_penalty
        if factor != 1:
            scores = torch.where(self._seen, torch.where(scores < 0, scores * factor, scores / factor), scores)
        return scores - sampling.frequency_penalty * self._counts - sampling.presence_penalty * (self._counts > 0)


def kept(scores: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that may be drawn at a temperature, likeliest first, and their probabilities (unnormalised)."""
    ordered, tokens = torch.sort(scores.double(), descending=True, stable=True)
    # Less the largest before it is divided: however small a temperature is, nothing overflows.
    likely = torch.exp((ordered - ordered[0]) / sampling.temperature)
    num_kept = int(torch.count_nonzero(likely))
    if 0 < sampling.top_k < num_kept:  # those that tie with the last of them stay
        num_kept = min(num_kept, int(torch.count_nonzero(ordered >= ordered[sampling.top_k - 1])))
    if sampling.top_p < 1:
        total = torch.cumsum(likely[:num_kept], dim=-1)
        num_kept = min(num_kept, int(torch.searchsorted(total, sampling.top_p * total[-1])) + 1)
    if sampling.min_p > 0:
        num_kept = min(num_kept, int(torch.count_nonzero(likely >= sampling.min_p)))  # of the likeliest, which is 1
    return tokens[:num_kept], likely[:num_kept]


def draw(scores: torch.Tensor, sampling: Sampling, uniform: float) -> int:
    """The token at which the cumulative probability, most likely first, passes `uniform` of what is kept."""
    tokens, likely = kept(scores, sampling)
    total = torch.cumsum(likely, dim=-1)
    place = int(torch.searchsorted(total, uniform * total[-1], right=True))
    return int(tokens[min(place, len(tokens) - 1)])


def settle_seed(request: Request) -> int:
    """The seed of a request's draws. One that was given none has one of its own: its name is unique."""
    if request.seed is None:
        own = hash((request.name, request.arrived_s)) & 0x7FFFFFFFFFFFFFFF
        request.seed = request.sampling.seed if request.sampling.seed is not None else own
    return request.seed


def seed_of_choice(seed: int, number: int) -> int:
    """The seed of one of several answers to a prompt, each with a stream of its own; the first has the seed itself."""
    if number == 0:
        return seed
    digest = hashlib.sha256(b"headwater/choice/1" + struct.pack("<qq", seed, number)).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that follows from both."""
    digest = hashlib.sha256(struct.pack("<qq", seed, position)).digest()
    return int.from_bytes(digest[:7], "little") / (1 << 56)


def _logprobs(logits: torch.Tensor, token: int, num_top: int) -> TokenLogprob:
    likely = torch.log_softmax(logits.double(), dim=-1).clamp_(min=_LEAST)
    values, tokens = likely.topk(min(num_top, len(likely)))
    return TokenLogprob(token, float(likely[token]), tuple(zip(tokens.tolist(), values.tolist(), strict=True)))
