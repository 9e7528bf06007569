"""A request as the engine sees it: its tokens, how to sample, where it is, and what came of it.

Values and counters only: what happens to a request is decided by the scheduler and done by the engine.
"""

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from headwater.core.errors import InvalidInput
from headwater.core.keys import BlockKey
from headwater.disagg.outcome import Missing, Unsent
from headwater.disagg.protocol import FirstToken, Ticket
from headwater.disagg.protocol import FirstTokenFinish as Over

if TYPE_CHECKING:
    from headwater.engine.sampler import Tally

MAX_LOGPROBS = 20
MAX_REPETITION_PENALTY = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What sampling is where nobody says. A model's generation_config.json may say otherwise."""

    temperature: float = 1.0  # 0: the most likely token
    top_p: float = 1.0  # the likeliest tokens that have so much of the probability together
    top_k: int = 0  # the so many likeliest tokens; 0: all
    min_p: float = 0.0  # tokens that are at least so likely, as a share of the likeliest one's probability
    repetition_penalty: float = 1.0  # of tokens of prompt and answer: above 0 divided by it, below multiplied

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        if not 0 <= self.temperature <= 10:
            raise InvalidInput(f"temperature must be between 0 and 10, not {self.temperature!r}")
        if not 0 < self.top_p <= 1:
            raise InvalidInput(f"top_p must be above 0 and at most 1, not {self.top_p!r}")
        if not (_is_int(self.top_k) and self.top_k >= 0):
            raise InvalidInput(f"top_k must be a number of tokens, or 0, not {self.top_k!r}")
        if not 0 <= self.min_p <= 1:
            raise InvalidInput(f"min_p must be between 0 and 1, not {self.min_p!r}")
        if not 0 < self.repetition_penalty <= MAX_REPETITION_PENALTY:
            most = MAX_REPETITION_PENALTY
            raise InvalidInput(
                f"repetition_penalty must be above 0 and at most {most:g}, not {self.repetition_penalty!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(Defaults):
    """How the next token is chosen (`sampler.py`), and when to stop. Checked here, at the door."""

    max_tokens: int = 16
    min_tokens: int = 0  # until there are so many, no token that would end the answer is chosen
    seed: int | None = None  # None: another answer each time
    stop_ids: frozenset[int] = frozenset()  # tokens that end the answer and are not part of it
    logprobs: int | None = None  # how many alternatives to tell of each token; None: none at all
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()  # token, what is added to its logit
    presence_penalty: float = 0.0  # taken from the logit of a token that was generated before
    frequency_penalty: float = 0.0  # the same, as often as it was

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        Defaults.__post_init__(self)
        if not (_is_int(self.max_tokens) and self.max_tokens >= 1):
            raise InvalidInput(f"max_tokens must be at least 1, not {self.max_tokens!r}")
        if not (_is_int(self.min_tokens) and 0 <= self.min_tokens <= self.max_tokens):
            raise InvalidInput(
                f"min_tokens must be between 0 and max_tokens ({self.max_tokens}), not {self.min_tokens!r}"
            )
        for value in (self.presence_penalty, self.frequency_penalty, *(bias for _, bias in self.logit_bias)):
            if not math.isfinite(value):
                raise InvalidInput(f"penalties and biases are finite numbers, not {value!r}")
        if self.seed is not None and not (_is_int(self.seed) and -(1 << 63) <= self.seed < 1 << 63):
            raise InvalidInput(f"seed must be a 64-bit integer, not {self.seed!r}")
        if self.logprobs is not None and not (_is_int(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS):
            raise InvalidInput(f"logprobs must be between 0 and {MAX_LOGPROBS}, not {self.logprobs!r}")

    @property
    def penalises(self) -> bool:
        """Whether it matters which tokens there were before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def ends(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """The tokens that end an answer."""
        return self.stop_ids if self.ignore_eos else self.stop_ids | eos_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """This engine computes the prompt and chooses the first token; another one goes on, with a ticket."""

    until_s: float  # on the monotonic clock: by then the pool has every block, or there is no ticket
    timeout_s: float = 30.0  # the same, from the first token on: a pool that hangs holds slots for no longer
    request: str = ""  # what it is called on the ticket: need not be unique. Empty: the request's name


@dataclass(frozen=True, slots=True, kw_only=True)
class Taking:
    """Another engine computed the prompt and chose the first token: go on from there."""

    ticket: Ticket
    until_s: float  # on the monotonic clock: by then every block was read, or what is missing is computed here
    recompute: bool = True  # whether it may be; else the request fails


class SaidOfTurn(NamedTuple):
    """What a client says of a request's turn: hints to the cache, which are in no block's name and change no answer."""

    session: str = ""  # whose turn it is; empty: nobody's, and the rest has no effect
    keep_s: float = 0.0  # for how long after it the session's blocks are wished for
    last: bool = False  # whether the session is over then


NOTHING_SAID = SaidOfTurn()


class RequestPhase(enum.StrEnum):
    """Where a request is in its life."""

    WAITING = "waiting"  # in the queue; stores are being asked
    LOADING = "loading"  # it has slots, and blocks are on their way into them
    FETCHING = "fetching"  # the same, and the rest of what its ticket names is on its way
    RUNNING = "running"
    SENDING = "sending"  # its prompt is computed, and on its way to the pool
    OVER = "over"


class Finish(enum.StrEnum):
    """Why a request is over."""

    STOP = "stop"  # end of sequence, or a stop token
    LENGTH = "length"
    SENT = "sent"  # it goes on elsewhere: there is a ticket
    REFUSED = "refused"  # there was no room for it, and nothing was begun
    CANCELLED = "cancelled"
    NOT_FINITE = "not_finite"  # the model computed NaN or infinity: there is no token to choose
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token that was chosen, how likely it was, and the most likely others."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request cost, and what the cache gave."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt, from whatever tier
    cached_by_tier: dict[str, int]
    computed_tokens: int  # of prompt and answer, preemptions included
    ttft_s: float | None  # from submit to the first token
    total_s: float
    preemptions: int = 0
    queue_s: float | None = None  # from submit to its slots
    pool_s: float | None = None  # of a handoff: from the first token to the ticket, or from slots to all blocks there
    num_pool_bytes: int = 0  # that the handoff itself moved; what the cache moved before is not in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a request's listener hears: tokens, and at the end why it ended and what it cost."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    usage: Usage | None = None
    error: str = ""
    ticket: Ticket | None = None  # of a request that was sent
    unmoved: Unsent | Missing | None = None  # why a handoff failed


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One request. Mutated by the engine's thread alone, except `cancelled`."""

    name: str  # no other request of the engine has it
    prompt: list[int]
    sampling: Sampling
    listen: Callable[[Output], None]  # called from the engine's thread; must not block or raise
    salt: bytes = b""
    said: SaidOfTurn = NOTHING_SAID
    handoff: Sending | Taking | None = None
    after: "Request | None" = None  # one with the same prompt: it starts when that one has computed it, and finds it
    arrived_s: float = 0.0
    round: int = 0  # its place in line: the scheduler's
    cancelled: bool = False  # set by anybody, heeded at the next step
    phase: RequestPhase = RequestPhase.WAITING
    tokens: list[int] = field(default_factory=list)  # prompt and answer
    num_computed: int = 0  # leading tokens whose KV is in the slots
    slots: tuple[int, ...] = ()
    whole: bool = False  # every token is cached: the last one is computed again, beside the shared block
    meets: bool = False  # what lies behind is being loaded while it computes: each step asks how far it may go
    keys: list[BlockKey] = field(default_factory=list)  # of its leading full blocks
    num_committed: int = 0  # blocks
    first_token_s: float | None = None
    asked_s: float = 0.0  # when the cache was asked
    num_recomputed: int = 0
    preemptions: int = 0
    computes_all: bool = False  # a load of it hung: what is not on the device is computed
    preempt_at: int | None = None  # computed tokens at which it gives way once, as if room were short: for verification
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    seed: int | None = None  # of its draws; None: not settled yet
    tally: "Tally | None" = None  # of its tokens, where penalties go by them; the sampler's
    pending_first_token: "Output | None" = (
        None  # the first token of one that was taken over: told when everything before it is there
    )
    kept: "tuple[FirstToken, Over] | None" = None  # the first token of one that is to be sent, until that begins
    admitted_s: float | None = None  # when it first had slots
    pool_s: float | None = None
    num_pool_bytes: int = 0

    def __post_init__(self) -> None:
        """The answer is appended to a copy of the prompt."""
        if not self.prompt:
            raise InvalidInput("a prompt needs at least one token")
        self.tokens = list(self.prompt)

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - len(self.prompt)

    def usage(self, now_s: float) -> Usage:
        """What it cost until now, on the monotonic clock."""
        return Usage(
            prompt_tokens=len(self.prompt),
            completion_tokens=self.num_generated,
            cached_tokens=sum(self.cached_by_tier.values()),
            cached_by_tier=dict(self.cached_by_tier),
            computed_tokens=self.num_recomputed,
            ttft_s=None if self.first_token_s is None else self.first_token_s - self.arrived_s,
            total_s=now_s - self.arrived_s,
            preemptions=self.preemptions,
            queue_s=None if self.admitted_s is None else self.admitted_s - self.arrived_s,
            pool_s=self.pool_s,
            num_pool_bytes=self.num_pool_bytes,
        )

    @property
    def waits(self) -> bool:
        """Whether the one it comes after has yet to compute their prompt."""
        first = self.after
        return first is not None and first.first_token_s is None and first.phase is not RequestPhase.OVER

    @property
    def moving(self) -> bool:
        """Whether threads read or write its slots, or are about to: it keeps them."""
        return self.phase in (RequestPhase.FETCHING, RequestPhase.SENDING) or (
            self.phase is RequestPhase.LOADING and isinstance(self.handoff, Taking)
        )

    @property
    def generating(self) -> bool:
        """Whether all but the newest token are computed: the next step gives a token."""
        return self.num_computed == len(self.tokens) - 1 and self.num_generated > 0


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
