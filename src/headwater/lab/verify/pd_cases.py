"""The cases of `verify --pd`, for one family on one pool. How one request is compared is in `pd_request.py`.

A case also has to be what it says: a fresh prompt is computed by one node, all of it, and goes through the pool, all of
it; a second turn is found there; chance is not the most likely token; two requests at once are at once.

What depends on luck is tried again, with other prompts, a few times: a look at the pool that was too late is a miss, by
design, and two requests at once are a race. A difference is never tried again.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from headwater.build import POOL_TIER
from headwater.engine.request import Sampling
from headwater.lab.verify.cases import BLOCK_TOKENS
from headwater.lab.verify.pd_nodes import PdNode
from headwater.lab.verify.pd_ranks import TP_SIZE
from headwater.lab.verify.pd_request import ComparedTurn, Comparison, Different, Talk, Unlucky

_ANSWER: Final = 8
_TALK: Final = 3 * BLOCK_TOKENS - 3  # tokens of a conversation's first prompt,
_LONG_ANSWER: Final = BLOCK_TOKENS + 4  # which ends the prompt's last block, and fills one of its own
_MANY: Final = 5 * BLOCK_TOKENS + 7
_LENGTHS: Final = (1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, _MANY)
_RANK_LENGTHS: Final = (1, BLOCK_TOKENS, _MANY)
_TRIES: Final = 5
_VOCABULARY: Final = range(3, 250)

_GREEDY: Final = Sampling(max_tokens=_ANSWER, temperature=0, logprobs=5, ignore_eos=True)
_SEEDED: Final = Sampling(max_tokens=_ANSWER, temperature=1.0, seed=7, logprobs=5, ignore_eos=True)
_TOP_P: Final = Sampling(max_tokens=_ANSWER, temperature=0.8, top_p=0.9, seed=-3, logprobs=0, ignore_eos=True)
_UNSEEDED: Final = Sampling(max_tokens=_ANSWER, temperature=1.0, logprobs=2, ignore_eos=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PdCase:
    """One comparison. `problem` is empty where everything was equal, and the case was what it says."""

    pool: str
    family: str
    case: str
    problem: str
    num_requests: int = 0  # that were compared
    found_tokens: dict[str, int] = field(default_factory=dict)  # by the last prefill, of its prompt, by tier
    read_blocks: int = 0  # by decode, from the pool
    computed_tokens: int = 0  # by decode, of answers
    tries: int = 1

    @property
    def equal(self) -> bool:
        """Whether what two nodes answered equals what one does."""
        return not self.problem


class Suite:
    """All cases of one family on one pool."""

    def __init__(self, family: str, pool: str, compare: Comparison) -> None:
        self._family = family
        self._pool = pool
        self._compare = compare
        self._nodes = compare.nodes

    def cases(self) -> dict[str, Callable[[], PdCase]]:
        """The cases by name, in order."""
        prefill, other, ranks = self._nodes.prefill, self._nodes.other, self._nodes.ranks
        runs: dict[str, Callable[[random.Random], list[ComparedTurn]]] = {
            _tokens(length): partial(self._run_length, prefill, length, _GREEDY) for length in _LENGTHS
        }
        runs |= {
            "seeded": partial(self._run_sampled, _SEEDED),
            "seeded, top-p": partial(self._run_sampled, _TOP_P),
            "no seed of the client's": partial(self._run_sampled, _UNSEEDED),
            "over with its first token": self._run_over,
            "stopped by a token": self._run_stopped,
            "second turn": partial(self._run_turns, [prefill, prefill]),
            "turns at two prefill nodes": partial(self._run_turns, [prefill, other, prefill]),
            "one prompt at two prefill nodes": self._run_at_once,
        }
        runs |= {
            f"TP {TP_SIZE} to 1, {_tokens(length)}": partial(self._run_length, ranks, length, _SEEDED)
            for length in _RANK_LENGTHS
        }
        return {case: partial(self._run, case, run) for case, run in runs.items()}

    def _run(self, case: str, run: Callable[[random.Random], list[ComparedTurn]]) -> PdCase:
        found = PdCase(pool=self._pool, family=self._family, case=case, problem="it was not run")
        for tries in range(1, _TRIES + 1):
            try:
                done = run(random.Random(f"{case} {tries}"))  # noqa: S311  the same prompts each time
            except Unlucky as error:
                found = replace(found, problem=str(error), tries=tries)
            except Different as error:
                return replace(found, problem=str(error), tries=tries)
            else:
                return replace(
                    found,
                    problem="",
                    num_requests=len(done),
                    found_tokens=done[-1].found,
                    read_blocks=sum(turn.read_blocks for turn in done),
                    computed_tokens=sum(turn.computed for turn in done),
                    tries=tries,
                )
        return found

    def _run_length(self, node: PdNode, length: int, sampling: Sampling, draw: random.Random) -> list[ComparedTurn]:
        turn = self._fresh(node, _prompt(draw, length), sampling, Talk())
        if turn.ticket.tp_size != (TP_SIZE if node is self._nodes.ranks else 1):
            raise Different(f"the ticket is of {turn.ticket.tp_size} ranks")
        return [turn]

    def _run_sampled(self, sampling: Sampling, draw: random.Random) -> list[ComparedTurn]:
        prompt = _prompt(draw, 2 * BLOCK_TOKENS + 5)
        turn = self._fresh(self._nodes.prefill, prompt, sampling, Talk())
        if turn.tokens == self._compare.alone(prompt, _GREEDY, Talk()).tokens:
            raise Unlucky("chance chose the most likely tokens")
        return [turn]

    def _run_over(self, draw: random.Random) -> list[ComparedTurn]:
        """It was to have one token, or the first one ends it: nothing is to be read, and nothing is."""
        prompt = _prompt(draw, BLOCK_TOKENS + 3)
        one = replace(_GREEDY, max_tokens=1, logprobs=None)
        done = [self._compare.request(self._nodes.prefill, prompt, one, Talk())]
        ends = replace(_GREEDY, stop_ids=frozenset(done[0].tokens))
        done.append(self._compare.request(self._nodes.prefill, prompt, ends, Talk()))
        if [len(turn.tokens) for turn in done] != [1, 0]:
            raise Different(f"answers of {[len(turn.tokens) for turn in done]} tokens, not of 1 and none")
        if not all(turn.ticket.over for turn in done) or any(turn.read_blocks for turn in done):
            raise Different("an answer that was over was read from the pool")
        return done

    def _run_stopped(self, draw: random.Random) -> list[ComparedTurn]:
        """A token of the answer that decode chooses ends it."""
        prompt = _prompt(draw, 2 * BLOCK_TOKENS + 5)
        last = self._compare.alone(prompt, _GREEDY, Talk()).tokens[-2]
        turn = self._fresh(self._nodes.prefill, prompt, replace(_GREEDY, stop_ids=frozenset([last])), Talk())
        if not 0 < len(turn.tokens) < _ANSWER - 1:
            raise Unlucky(f"an answer of {len(turn.tokens)} tokens was not stopped on its way")
        return [turn]

    def _run_turns(self, nodes: Sequence[PdNode], draw: random.Random) -> list[ComparedTurn]:
        """A conversation: what decode answered is found by the next prefill, wherever that is."""
        sampling = replace(_GREEDY, max_tokens=_LONG_ANSWER)
        prompt, talk = _prompt(draw, _TALK), Talk()
        done = [self._fresh(nodes[0], prompt, sampling, talk)]
        for node in nodes[1:]:
            self._nodes.decode.rest()  # what it answered is in the pool
            mine = len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS if node is nodes[0] else 0  # at most, on its device
            prompt = [*prompt, *done[-1].tokens]
            there = talk.num_there = (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS  # the last token has no KV
            prompt += _prompt(draw, 9)
            before = node.num_computed
            sent = node.send(prompt, sampling)
            ticket, found = self._compare.ticket(sent, prompt), sent.usage.cached_by_tier
            computed = node.num_computed - before
            if sum(found.values()) < there:
                raise Unlucky(f"prefill found {found} of {there} tokens")
            if found.get(POOL_TIER, 0) < there - mine or computed != len(prompt) - there:
                raise Different(f"prefill found {found}, and computed {computed} of {len(prompt)} tokens")
            turn = self._compare.taken(sent, ticket, prompt, sampling, talk)
            done.append(turn)
        return done

    def _run_at_once(self, draw: random.Random) -> list[ComparedTurn]:
        prompt = _prompt(draw, _MANY)
        both = [node.send(prompt, _SEEDED) for node in (self._nodes.prefill, self._nodes.other)]
        at_once = not both[0].over.is_set()
        tickets = [self._compare.ticket(sent, prompt) for sent in both]
        if tickets[0].keys != tickets[1].keys or tickets[0].tail == tickets[1].tail:
            raise Different("blocks have two names, or two tickets one tail")
        done = [
            self._compare.taken(sent, ticket, prompt, _SEEDED, Talk())
            for sent, ticket in zip(both, tickets, strict=True)
        ]
        if not at_once:
            raise Unlucky("one was done before the other began")
        return done

    def _fresh(self, node: PdNode, prompt: list[int], sampling: Sampling, talk: Talk) -> ComparedTurn:
        """A prompt that nobody has seen: all of it is computed by one node, all of it goes through the pool."""
        before = node.num_computed
        turn = self._compare.request(node, prompt, sampling, talk)
        computed = node.num_computed - before
        if turn.found or computed != len(prompt):
            raise Different(f"prefill found {turn.found}, and computed {computed} of {len(prompt)} tokens")
        if turn.read_blocks != turn.ticket.num_blocks:
            raise Different(f"{turn.read_blocks} of {turn.ticket.num_blocks} blocks came through the pool")
        return turn


def _prompt(draw: random.Random, length: int) -> list[int]:
    return [draw.choice(_VOCABULARY) for _ in range(length)]


def _tokens(length: int) -> str:
    return "1 token" if length == 1 else f"{length} tokens"
