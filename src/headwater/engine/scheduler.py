"""Who computes what in the next step: continuous batching with chunked prefill under a budget of tokens.

Decides over requests, and asks the connector for slots; computes nothing. First everybody who generates gets one token,
then prompts are filled up, oldest first, as far as the budget goes. A request that cannot get its next slot preempts
the youngest: that one gives its slots back and waits at the head of the queue; its finished blocks stay in the cache,
so coming back costs little. A request that comes after another one with the same prompt is passed over until that one
has computed it; nothing is asked or taken for it before. A request whose load hangs begins anew in the same way, and
loads no more.

Requests that were submitted together take turns with others, one of each submission in a round: the first is in the
round after the one that is being let in when they come, the second in the next, and so on. So whoever asks for one
answer is not behind all of somebody's two hundred, and no stream of newcomers keeps those out.

Invariants: a request is in one place (`waiting` or `running`) until it is over. The queue is bounded. Nothing waits for
a store longer than the connector says. Who is being handed over keeps its slots.
"""

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from headwater.core.errors import HeadwaterError
from headwater.engine.request import Request, RequestPhase


class QueueFull(HeadwaterError):
    """The waiting queue is full: try again later."""


class Slots(Protocol):
    """What the scheduler needs of the connector."""

    def ask(self, request: Request, now_s: float) -> None:
        """Ask what is there of a request's tokens."""
        ...

    def may_start(self, request: Request, now_s: float) -> bool:
        """Whether a request need not wait for stores any longer."""
        ...

    def admit(self, request: Request) -> bool:
        """Take slots and begin to load; False: no room."""
        ...

    def loaded(self, request: Request) -> bool:
        """Whether nothing is being loaded any more."""
        ...

    def stuck(self, request: Request) -> bool:
        """Whether what is being loaded may never end."""
        ...

    def coming(self, request: Request) -> bool:
        """Whether a request that loads may begin to compute, layer by layer behind its bytes."""
        ...

    def reach(self, request: Request, num_tokens: int) -> int:
        """Up to which token the next step of a request that `meets` may go; it moves on over what was loaded."""
        ...

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Slots for so many tokens; False: no room."""
        ...

    def release(self, request: Request) -> object:
        """Give back all that a request holds."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens [start, end) of a request are to be computed; with `samples` the step gives its next token."""

    request: Request
    start: int
    end: int
    early: bool = False  # its blocks are still being loaded: each layer waits for its own bytes

    @property
    def samples(self) -> bool:
        """Whether the last of them is the last there is."""
        return self.end == len(self.request.tokens)


class Scheduler:
    """The queue and the running requests of one engine."""

    def __init__(self, slots: Slots, *, max_running: int, max_waiting: int, step_tokens: int) -> None:
        self.waiting: deque[Request] = deque()  # in the order in which they are let in
        self.running: list[Request] = []  # oldest first; those that load are among them
        self._slots = slots
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._step_tokens = step_tokens
        self._round = 0  # of who was let in last

    def add(self, request: Request, now_s: float, *, turn: int = 0) -> None:
        """Queue a request, and have the stores asked. `turn`: so many of its submission are before it.

        Raises QueueFull.
        """
        if len(self.waiting) >= self._max_waiting:
            raise QueueFull(f"{len(self.waiting)} requests are waiting: try again later")
        request.round = self._round + 1 + turn
        at = len(self.waiting)
        while at and self.waiting[at - 1].round > request.round:
            at -= 1
        self.waiting.insert(at, request)
        if not request.waits:
            self._slots.ask(request, now_s)

    def has_room(self) -> bool:
        """Whether one more could run at once: nobody waits, and not too many are here."""
        return not self.waiting and len(self.running) < self._max_running

    def enter(self, request: Request) -> None:
        """A request that has slots runs, and never waited."""
        self.running.append(request)

    def remove(self, request: Request) -> None:
        """A request is over."""
        request.phase = RequestPhase.OVER
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def plan(self, now_s: float) -> list[Work]:
        """The next step. May preempt requests."""
        self._admit(now_s)
        budget = self._step_tokens
        work: dict[Request, Work] = {}
        for request in list(self.running):
            if request.phase is RequestPhase.WAITING:  # it has just given way to an older one
                continue
            if request.preempt_at is not None and request.num_computed >= request.preempt_at:
                request.preempt_at = None
                self._preempt(request)
            elif request.phase is RequestPhase.RUNNING and _generates(request) and self._grow(request):
                work[request] = Work(request, request.num_computed, len(request.tokens))
                budget -= 1
        for request in list(self.running):
            if request.phase is RequestPhase.RUNNING and not _generates(request) and budget > 0:
                end = self._prompt_end(request, budget)
                if end > request.num_computed:
                    work[request] = Work(request, request.num_computed, end)
                    budget -= end - request.num_computed
        planned = [one for request, one in work.items() if request.phase is RequestPhase.RUNNING]  # some were preempted
        return planned or self._plan_early()

    def _prompt_end(self, request: Request, budget: int) -> int:
        """How far a prompt is computed in this step. One whose loads hang begins anew when it has come to them."""
        if not request.meets:
            return min(len(request.tokens), request.num_computed + budget)
        end = self._slots.reach(request, budget)
        if end <= request.num_computed and self._slots.stuck(request):
            self.begin_anew(request)
        return end

    def _plan_early(self) -> list[Work]:
        """Nobody else has work: who loads may compute behind its bytes. Alone, because others would wait with it."""
        for request in self.running:
            if request.phase is RequestPhase.LOADING and not request.moving and self._slots.coming(request):
                end = min(len(request.tokens), request.num_computed + self._step_tokens)
                return [Work(request, request.num_computed, end, early=True)]
        return []

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.running and not self.waiting

    def _admit(self, now_s: float) -> None:
        for request in list(self.running):
            if request.phase is not RequestPhase.LOADING or request.moving:
                continue
            if self._slots.loaded(request):
                request.phase = RequestPhase.RUNNING
            elif self._slots.stuck(request):
                self.begin_anew(request)
        at = 0
        while at < len(self.waiting) and len(self.running) < self._max_running:
            request = self.waiting[at]
            if request.waits:
                at += 1
                continue
            if not self._slots.may_start(request, now_s) or not self._slots.admit(request):
                return
            del self.waiting[at]
            self._round = max(self._round, request.round)
            self.running.append(request)
            if self._slots.loaded(request):
                request.phase = RequestPhase.RUNNING

    def _grow(self, request: Request) -> bool:
        """A slot for the next token, if need be by preempting the youngest. False: it was preempted itself."""
        while request.phase is RequestPhase.RUNNING:
            if self._slots.grow(request, len(request.tokens) + 1):
                return True
            self._preempt(next(one for one in reversed(self.running) if not one.moving))  # itself at the latest
        return False

    def restart(self) -> None:
        """Have all who run begin anew, but those that are being handed over: what they were told does not hold."""
        for request in [one for one in reversed(self.running) if not one.moving]:
            self._preempt(request)

    def begin_anew(self, request: Request) -> None:
        """A load of a request hangs: it gives back what it has, and what is not on the device is computed."""
        request.computes_all = True
        self._preempt(request)

    def _preempt(self, request: Request) -> None:
        self._slots.release(request)
        self.running.remove(request)
        request.phase = RequestPhase.WAITING
        request.preemptions += 1
        self.waiting.appendleft(request)


def _generates(request: Request) -> bool:
    """Whether the next step gives a token, whatever is on its way: one that `meets` has to ask first."""
    return request.generating and not request.meets
