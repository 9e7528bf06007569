"""Requests that come from another engine, or go to one: what is done when, in the engine's thread.

    to be sent    prompt computed -> `keep` the first token -> (the cache writes) -> sent -> over, with a ticket
    taken over    slots, or refused -> (the cache loads) -> fetched -> `release_first_token` the first token -> runs

Decides and tells, and hears what came of it as it hears of the cache's loads; bytes are moved by the cache's executor.
Not here: steps and tokens (`engine.py`).

Invariants:
- The first token of a prompt that goes elsewhere leaves with the ticket, so when the pool has every block (rule 7).
- The first token of one that came is told when everything before it is in its slots, loaded, fetched or computed. What
  fails before that fails without a token.
- A request whose slots a job may touch is neither preempted nor released; a cancel waits for the job's end (rule 2).
  If the job's copy hangs, the request leaves without its slots, which are used again when the job has ended: a prompt
  that was taken over is computed in others, or refused; one that was to be sent fails.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from headwater.core.errors import InvalidInput
from headwater.core.results import Reason
from headwater.disagg.outcome import Fetched, Missing, Sent, Unsent
from headwater.disagg.protocol import FirstToken, SamplerState
from headwater.disagg.protocol import FirstTokenFinish as Over
from headwater.engine.connector import Connector
from headwater.engine.handoffs import Handoffs, Outcome
from headwater.engine.pace import EnginePace
from headwater.engine.request import Finish, Output, Request, RequestPhase, Sending, Taking, TokenLogprob
from headwater.engine.sampler import settle_seed
from headwater.engine.scheduler import Scheduler


class TellEnd(Protocol):
    """A request is over, and is told so."""

    def __call__(self, request: Request, finish: Finish, error: str = "", outcome: Outcome | None = None) -> None:
        """With what came of its handoff, if that ended it."""
        ...


class Handover:
    """Both directions, as far as this engine has them. Called from the engine's thread, but `check`."""

    def __init__(
        self,
        handoffs: Handoffs | None,
        connector: Connector,
        scheduler: Scheduler,
        *,
        pace: EnginePace,
        stops: Callable[[Request, int], bool],
        tell: Callable[[Request, Output], None],
        tell_end: TellEnd,
        wake: Callable[[], None],
    ) -> None:
        """Takes the handoffs over: `close` closes them. `stops`: whether a token ends an answer."""
        self._handoffs = handoffs
        self._connector = connector
        self._scheduler = scheduler
        self._pace = pace
        self._stops = stops
        self._tell = tell
        self._tell_end = tell_end
        self._lent: dict[Request, str] = {}  # whose slots a copy that hangs has, and their name in the cache
        self._num_news = 1  # how often the cache heard something,
        self._num_seen = 0  # and as it was when it was last asked who is being saved
        if handoffs is not None:
            handoffs.on_end = wake

    def check(self, request: Request, vocab_size: int) -> None:
        """Refuse what this engine cannot hand over. From any thread. Raises InvalidInput."""
        handoff = request.handoff
        if isinstance(handoff, Sending) and not (self._handoffs and self._handoffs.can_send):
            raise InvalidInput("this engine hands nothing over: start it with a pool, as a prefill node")
        if isinstance(handoff, Taking):
            if not (self._handoffs and self._handoffs.can_fetch):
                raise InvalidInput("this engine takes nothing over: start it with a pool, as a decode node")
            if handoff.ticket.num_prompt_tokens != len(request.prompt):
                raise InvalidInput("the ticket is of another prompt")
            if handoff.ticket.first.token >= vocab_size:
                raise InvalidInput(f"the first token is outside the vocabulary of {vocab_size}")

    def close(self) -> None:
        """Cancel what is under way. Blocks until nobody touches slots any more."""
        if self._handoffs is not None:
            self._handoffs.close()

    def noticed(self) -> None:
        """The cache heard something. From any thread, with one lock held. Does not block."""
        self._num_news += 1

    @property
    def active(self) -> bool:
        """Whether this engine hands anything over at all."""
        return self._handoffs is not None

    @property
    def has_freed(self) -> bool:
        """Whether slots that were lent to a copy that hung can be used again. From any thread."""
        return self._handoffs is not None and self._handoffs.has_freed

    def go_on(self) -> None:
        """Begin handoffs that are due, and take in those that have ended."""
        if self._handoffs is None:
            return
        num_news = self._num_news
        news, self._num_seen = num_news != self._num_seen, num_news
        for request in list(self._scheduler.running):
            if request.cancelled and self._handoffs.is_running(request):
                self._handoffs.cancel(request)
            elif isinstance(request.handoff, Sending) and request.phase is RequestPhase.SENDING:
                self._send(self._handoffs, request, request.handoff, news=news)
            elif isinstance(request.handoff, Taking) and request.phase is RequestPhase.LOADING:
                self._fetch(self._handoffs, request, request.handoff)
        for request, outcome in self._handoffs.take():
            self._pace.done_s = time.monotonic()
            request.num_pool_bytes = outcome.num_bytes if isinstance(outcome, Sent | Fetched) else 0
            self._count(outcome)
            if isinstance(outcome, Missing | Unsent) and outcome.stuck:
                if isinstance(outcome, Missing):  # what came before is right, and need not be computed again
                    self._connector.taken(request, outcome.first_block * self._connector.block_tokens)
                self._lent[request] = self._connector.lend(request)
            if isinstance(request.handoff, Sending):
                self._sent(request, outcome)
            elif isinstance(request.handoff, Taking):
                self._fetched(request, request.handoff, outcome)
        for request in self._handoffs.take_freed():
            if request in self._lent:
                self._connector.give_back(self._lent.pop(request))

    # --- to be sent ---------------------------------------------------------------------------------------------------

    def keep(self, request: Request, token: int, told: TokenLogprob | None) -> None:
        """The first token was chosen: it waits for its ticket."""
        over = Over.LENGTH if request.sampling.max_tokens == 1 else Over.GOES_ON
        if self._stops(request, token):
            over = Over.STOP
        logprob, top = (told.logprob, told.top) if told is not None else (None, ())
        request.kept = FirstToken(token=token, logprob=logprob, top=top), over
        request.phase = RequestPhase.SENDING
        self._num_seen = 0

    def _send(self, handoffs: Handoffs, request: Request, sending: Sending, *, news: bool) -> None:
        """Send a prompt, unless that has begun. What the cache is writing already is waited for, half of the time."""
        if request.kept is None or request.first_token_s is None:
            return
        if request.cancelled:
            self._end(request, Finish.CANCELLED)
            return
        until_s = min(sending.until_s, request.first_token_s + sending.timeout_s)
        has_time = bool(handoffs.tier) and time.monotonic() < (request.first_token_s + until_s) / 2
        if has_time and (not news or self._connector.saving(request, handoffs.tier)):
            return  # the end of what is being saved is news
        first, over = request.kept
        request.kept = None
        state = SamplerState(seed=settle_seed(request), position=len(request.prompt) + 1)
        handoffs.begin_send(request, first, state, over, until_s)

    def _sent(self, request: Request, outcome: Outcome) -> None:
        request.pool_s = time.monotonic() - (request.first_token_s or request.arrived_s)
        if request.cancelled:
            self._end(request, Finish.CANCELLED)
        elif isinstance(outcome, Sent):
            self._pace.pool.measured(len(request.prompt), request.pool_s)
            self._end(request, Finish.SENT, outcome=outcome)
        elif isinstance(outcome, Unsent):
            self._end(request, Finish.FAILED, f"the pool did not take the prompt: {outcome.detail}", outcome)

    # --- taken over ---------------------------------------------------------------------------------------------------

    def take_over(self, group: Sequence[Request]) -> bool:
        """Slots now for all with a ticket, or for none: False. One that is over with its first token needs none."""
        taken = [(request, request.handoff) for request in group if isinstance(request.handoff, Taking)]
        admitted: list[Request] = []
        for request, taking in taken:
            if taking.ticket.over:
                continue
            if not self._admit(request, taking):
                for one in admitted:
                    self._connector.release(one)
                    self._scheduler.remove(one)
                return False
            admitted.append(request)
        for request, taking in taken:
            self._begin(request, taking)
        return True

    def _begin(self, request: Request, taking: Taking) -> None:
        ticket, first = taking.ticket, taking.ticket.first
        request.seed = ticket.sampler.seed
        told = () if first.logprob is None else (TokenLogprob(first.token, first.logprob, first.top),)
        request.pending_first_token = Output(tokens=(first.token,), logprobs=told)
        if ticket.finish is Over.STOP:
            self._tell_end(request, Finish.STOP)
        elif ticket.finish is Over.LENGTH:
            request.tokens.append(first.token)
            request.num_computed = len(request.prompt)  # by who sent it
            self.release_first_token(request)
            self._tell_end(request, Finish.LENGTH)

    def _admit(self, request: Request, taking: Taking) -> bool:
        if not self._scheduler.has_room() or self._handoffs is None:
            return False
        self._connector.ask(request, time.monotonic())
        promised = self._handoffs.tier if self._handoffs.is_promised(taking.ticket) else ""
        if not self._connector.admit(request, promised=promised):
            self._connector.release(request)
            return False
        self._scheduler.enter(request)
        return True

    def _fetch(self, handoffs: Handoffs, request: Request, taking: Taking) -> None:
        """Fetch what the cache did not bring, when it brings no more."""
        num_ready = self._connector.num_ready(request)
        if num_ready is None:
            if self._connector.stuck(request):
                why, seconds = (
                    "a copy to the device hangs",
                    time.monotonic() - (request.admitted_s or request.arrived_s),
                )
                missing = Missing(first_block=0, reason=Reason.LATE, detail=why, num_tries=1, seconds=seconds)
                self._stuck(request, taking, missing)
            return
        if num_ready < taking.ticket.num_blocks:
            request.phase = RequestPhase.FETCHING
            handoffs.begin_fetch(request, taking.ticket, num_ready, taking.until_s)
        else:
            self._fetched(request, taking, Fetched(num_blocks=0, num_bytes=0, num_tries=0, seconds=0.0))

    def _stuck(self, request: Request, taking: Taking, missing: Missing) -> None:
        """What was being brought may never come: compute it, in other slots, if that is allowed."""
        if request.cancelled:
            self._end(request, Finish.CANCELLED)
        elif taking.recompute:
            request.handoff = None
            request.tokens.append(taking.ticket.first.token)
            self._scheduler.begin_anew(request)
        else:
            self._end(request, Finish.FAILED, f"the pool did not give the prompt back: {missing.detail}", missing)

    def _fetched(self, request: Request, taking: Taking, outcome: Outcome) -> None:
        request.pool_s = time.monotonic() - (request.admitted_s or request.arrived_s)
        if request.cancelled:
            self._end(request, Finish.CANCELLED)
            return
        if isinstance(outcome, Missing) and outcome.stuck:
            self._stuck(request, taking, outcome)
            return
        if isinstance(outcome, Missing):
            if not taking.recompute or outcome.reason is Reason.REFUSED:
                self._end(request, Finish.FAILED, f"the pool did not give the prompt back: {outcome.detail}", outcome)
                return
            num_tokens = min(outcome.first_block * self._connector.block_tokens, len(request.prompt))
        else:
            num_tokens = len(request.prompt)
            self._pace.pool.measured(num_tokens, request.pool_s)
        request.handoff = None
        self._connector.taken(request, num_tokens)
        request.tokens.append(taking.ticket.first.token)
        request.phase = RequestPhase.RUNNING
        self.release_first_token(request)

    def release_first_token(self, request: Request) -> None:
        """Say the first token of one that was taken over, if all that comes before it is there."""
        if request.pending_first_token is not None and request.num_computed >= len(request.prompt):
            request.first_token_s = time.monotonic()
            output, request.pending_first_token = request.pending_first_token, None
            self._tell(request, output)

    # ------------------------------------------------------------------------------------------------------------------

    def _end(self, request: Request, finish: Finish, error: str = "", outcome: Outcome | None = None) -> None:
        self._connector.release(request)
        self._scheduler.remove(request)
        self._tell_end(request, finish, error, outcome)

    def _count(self, outcome: Outcome) -> None:
        way = "out" if isinstance(outcome, Sent | Unsent) else "in"
        metrics = self._connector.cache.metrics
        reason = "ok" if isinstance(outcome, Sent | Fetched) else outcome.reason.value
        metrics.count("handoffs_total", way=way, outcome=reason)
        metrics.observe("handoff_seconds", outcome.seconds, way=way)
        if isinstance(outcome, Sent | Fetched):
            metrics.count("handoff_bytes_total", outcome.num_bytes, way=way)
