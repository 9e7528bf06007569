"""Choosing tokens from logits: greedy, temperature, top-p, per-request seeds, log-probabilities.

A seeded request draws from a counter-based stream (seed, position): the same seed gives the same answer, whatever else
is in the batch, and also when the request was preempted, moved, or goes on in another process.
"""

import hashlib
import math
import struct
from collections.abc import Sequence

import torch

from headwater.engine.request import Request, Sampling, TokenLogprob


def choose(
    logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int], seeds: Sequence[int]
) -> list[tuple[int, TokenLogprob | None]]:
    """One token per row of float32 logits [n, vocab]. `positions` and `seeds` say where each row draws its chance."""
    greedy = logits.argmax(dim=-1).tolist()
    chosen: list[tuple[int, TokenLogprob | None]] = []
    for row, sampling in enumerate(samplings):
        token = greedy[row]
        if sampling.temperature > 0:
            token = _draw(logits[row], sampling, _uniform(seeds[row], positions[row]))
        told = _logprobs(logits[row], token, sampling.logprobs) if sampling.logprobs is not None else None
        chosen.append((token, told))
    return chosen


def settle_seed(request: Request) -> int:
    """The seed of a request's draws. One that was given none has one of its own: its name is unique."""
    if request.seed is None:
        own = hash((request.name, request.arrived_s)) & 0x7FFFFFFFFFFFFFFF
        request.seed = request.sampling.seed if request.sampling.seed is not None else own
    return request.seed


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that follows from both."""
    digest = hashlib.sha256(struct.pack("<qq", seed, position)).digest()
    return int.from_bytes(digest[:7], "little") / (1 << 56)


def _draw(logits: torch.Tensor, sampling: Sampling, uniform: float) -> int:
    """The token at which the cumulative probability, most likely first, passes `uniform` of the kept mass."""
    probabilities = torch.softmax(logits.double() / sampling.temperature, dim=-1)
    ordered, tokens = torch.sort(probabilities, descending=True, stable=True)
    total = torch.cumsum(ordered, dim=-1)
    kept = int(torch.searchsorted(total, sampling.top_p).item()) + 1 if sampling.top_p < 1 else len(total)
    kept = min(kept, len(total))
    target = uniform * float(total[kept - 1])
    place = int(torch.searchsorted(total[:kept], target, right=True).item())
    return int(tokens[min(place, kept - 1)].item())


def _logprobs(logits: torch.Tensor, token: int, num_top: int) -> TokenLogprob:
    likely = torch.log_softmax(logits.double(), dim=-1)
    values, tokens = likely.topk(min(num_top, len(likely)))
    top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    value = float(likely[token])
    return TokenLogprob(token, value if math.isfinite(value) else -9999.0, top)
