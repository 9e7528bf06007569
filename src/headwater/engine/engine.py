"""The engine: a thread that plans a step, computes it, samples, commits, and tells; until there is nothing to do.

    submit -> waiting -> (stores are asked) -> slots -> (blocks are loaded) -> prompt in chunks -> tokens -> over

Commits come after the device has finished the step, so after its bytes are there (rule 1). A prompt that is wholly
cached computes its last token again, beside the shared block: that block is copied to the request's next slot, which is
its own, and the token is computed there, so nothing is ever written into a block that others read.

A step in which the model computed NaN or infinity for a request ends that request, before anything of the step is
committed or told: every token that was computed is looked at, those in the middle of a prompt too, so that no block of
such numbers is ever named, in any tier. Others in the same step go on.

A request whose blocks are still on their way may compute behind them, layer by layer, where nobody else has work. If a
block does not come, or is wrong, that step is thrown away: nothing of it is committed, and no token leaves.

A request may be handed over (`handoffs.py`). One that is to be sent computes its prompt, chooses the first token and
keeps its slots until the pool has every block; only then is it over, with a ticket. One that is taken over gets slots
at once or is refused; its cache loads what it can, the rest is fetched; when all is there it says the first token and
goes on. What does not come is computed, if that is allowed, and the first token said when it is.

Several answers to one prompt are requests that come after the first: they start when it has computed the prompt, and
find it in the cache.

Not here: HTTP, text, tokenizers. A listener is called from the engine's thread with each request's outputs.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from headwater.core.closing import Closing
from headwater.core.errors import InvalidInput, ResourceClosed
from headwater.disagg.outcome import Missing, Sent, Unsent
from headwater.engine.compute import LoadFailed, StepComputer
from headwater.engine.connector import Connector
from headwater.engine.handoffs import Handoffs, Outcome
from headwater.engine.handover import Handover
from headwater.engine.models.base import Model
from headwater.engine.pace import EnginePace
from headwater.engine.request import Finish, Output, Request, RequestPhase, Sending, Taking
from headwater.engine.sampler import Chosen, choose
from headwater.engine.scheduler import QueueFull, Scheduler, Work
from headwater.transfer.device.arena import DeviceCache

log = logging.getLogger("headwater")

_IDLE_S: Final = 0.02  # at most, between looks at what is under way; the cache wakes us before


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine runs."""

    max_running: int = 16
    max_waiting: int = 256
    step_tokens: int = 2048  # computed in one step, all requests together

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name in ("max_running", "max_waiting", "step_tokens"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} must be at least 1, not {getattr(self, name)!r}")


class Engine(Closing):
    """One model on one device with one cache. `submit` and `cancel` may come from any thread."""

    def __init__(
        self,
        model: Model,
        planes: DeviceCache,
        connector: Connector,
        config: EngineConfig,
        *,
        handoffs: Handoffs | None = None,
        watch: Callable[[Request, torch.Tensor], None] | None = None,
    ) -> None:
        """Owns none of them; close them after it. `watch` sees the logits of every token that is about to be chosen."""
        self.model = model
        self.config = config
        self.connector = connector
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.planes = planes
        self._computer = StepComputer(model, planes, connector)
        self._watch = watch
        self._pace = EnginePace()
        self._scheduler = Scheduler(
            connector,
            max_running=config.max_running,
            max_waiting=self.max_requests,  # `submit` keeps the bound; a burst all waits at first
            step_tokens=config.step_tokens,
        )
        self._lock = threading.Condition()
        self._inbox: deque[tuple[Request, ...]] = deque()  # as they were submitted
        self._num_inside = 0  # submitted and not over
        self._closing = False
        self._in_hurry = False
        self._news = False  # the cache heard something since it was last looked at
        self._generation = connector.cache.generation
        self._handover = Handover(
            handoffs,
            connector,
            self._scheduler,
            pace=self._pace,
            stops=self._stops,
            tell=self._tell,
            tell_end=self._tell_end,
            wake=self._wake,
        )
        connector.cache.on_change = self._wake
        self._warm = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="headwater engine", daemon=True)
        self._thread.start()

    @property
    def max_tokens(self) -> int:
        """Tokens that one request may have, prompt and answer."""
        return min(self.model.max_positions, self.planes.num_blocks * self.model.block_tokens)

    @property
    def num_requests(self) -> int:
        """Requests that are not over."""
        return self._num_inside

    @property
    def alive(self) -> bool:
        """Whether requests are taken and answered."""
        return not self._closing and self._thread.is_alive()

    @property
    def load(self) -> tuple[int, int, int]:
        """Requests that run, those that wait, and how many more would be taken."""
        running = min(len(self._scheduler.running), self._num_inside)
        return running, self._num_inside - running, max(0, self.max_requests - self._num_inside)

    @property
    def rates(self) -> tuple[float | None, float | None, float | None]:
        """Tokens a second, as measured: of prompts, of answers (all requests together), of handoffs."""
        return self._pace.prompt.rate, self._pace.answer.rate, self._pace.pool.rate

    @property
    def idle_s(self) -> float:
        """Seconds since something was last got done; 0 where there is nothing to do."""
        return time.monotonic() - self._pace.done_s if self._num_inside else 0.0

    @property
    def max_requests(self) -> int:
        """Requests that may be here at once."""
        return self.config.max_running + self.config.max_waiting

    def submit(self, *requests: Request) -> None:
        """Take requests in, all or none. Does not block.

        Raises InvalidInput, QueueFull, ResourceClosed; then nothing was taken.
        """
        for request in requests:
            self._computer.check(request, self.max_tokens)
            self._handover.check(request, self.model.vocab_size)
        with self._lock:
            if self._closing:
                raise ResourceClosed("the engine is closed")
            if self._num_inside + len(requests) > self.max_requests:
                raise QueueFull(f"{self._num_inside} requests are here: try again later")
            now_s = time.monotonic()
            for request in requests:
                request.arrived_s = now_s
            if not self._num_inside:
                self._pace.done_s = now_s
            self._num_inside += len(requests)
            self._inbox.append(requests)
            self._lock.notify()

    def cancel(self, request: Request) -> None:
        """Nobody wants the answer any more: it ends at the next step, and hears so. Does not block."""
        with self._lock:
            request.cancelled = True
            self._news = True
            self._lock.notify()

    def wait_warm(self, timeout_s: float) -> bool:
        """Wait until a first request is as fast as later ones. Blocks. False: it is not yet, and works all the same."""
        return self._warm.wait(timeout_s)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Cancel what is here and end the thread. Blocks, until the time is over at most; then False."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _wake(self) -> None:
        """A store answered, or blocks came: look again."""
        with self._lock:
            self._handover.noticed()
            self._news = True
            self._lock.notify()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            self._run()
        except Exception:  # a fault of ours: nobody is to wait for an engine that has stopped
            log.exception("the engine stops")
            with self._lock:
                self._closing = True
                arrived = [request for group in self._inbox for request in group]
                left = dict.fromkeys([*self._scheduler.running, *self._scheduler.waiting, *arrived])
            for request in left:
                request.cancelled = True  # for those that are being handed over
                self._tell_end(request, Finish.FAILED, "the engine stopped")
            self._handover.close()

    def _run(self) -> None:
        self._computer.warm_up(self.config.step_tokens)
        self._warm.set()
        while True:
            if self._scheduler.idle:
                self._hurry(on=False)
            with self._lock:
                while self._scheduler.idle and not (self._inbox or self._closing or self._handover.has_freed):
                    self._lock.wait()
                num_arrived = len(self._inbox)
                closing = self._closing
            for _ in range(num_arrived):
                self._take_in(self._inbox[0])
                self._inbox.popleft()  # after it was taken in: whoever is in neither place is told nothing
            if closing:
                self._finish_all()
                return
            self._handover.go_on()
            for request in [*self._scheduler.running, *self._scheduler.waiting]:
                if request.cancelled and request.phase not in (RequestPhase.FETCHING, RequestPhase.SENDING):
                    self._end(request, Finish.CANCELLED)
            if self._generation != self.connector.cache.generation:  # its brain failed, or was revived
                self._generation = self.connector.cache.generation
                self._scheduler.restart()
            work = self._scheduler.plan(time.monotonic())
            if self._generation != self.connector.cache.generation:
                continue
            if work:
                self._step(work)
            else:
                self._hurry(on=False)
                with self._lock:
                    if not (self._inbox or self._news):
                        self._lock.wait(_IDLE_S)
                    self._news = False

    def _hurry(self, *, on: bool) -> None:
        """Have the cache's writers stand back while a device stands still and waits for us. A CPU does not wait."""
        if self._in_hurry != on and self.planes.device.type == "cuda":
            self._in_hurry = on
            self.connector.throttle_saves(on=on)

    def _finish_all(self) -> None:
        for request in [*self._scheduler.running, *self._scheduler.waiting]:
            request.cancelled = True
        self._handover.close()  # nobody reads or writes slots any more
        for request in [*self._scheduler.running, *self._scheduler.waiting]:
            self._end(request, Finish.CANCELLED)

    def _take_in(self, group: tuple[Request, ...]) -> None:
        if not self._handover.take_over(group):
            for request in group:
                self._tell_end(request, Finish.REFUSED, "there is no room for this request now")
            return
        waiting = [request for request in group if not isinstance(request.handoff, Taking)]
        waiting.sort(key=lambda request: request.after is not None)  # every prompt's first answer before all others
        for turn, request in enumerate(waiting):
            try:
                self._scheduler.add(request, time.monotonic(), turn=turn)
            except QueueFull as error:
                self._tell_end(request, Finish.FAILED, str(error))

    def _step(self, work: list[Work]) -> None:
        begin_s = time.perf_counter()
        try:
            spans = [self._computer.span(one) for one in work]
            early = work[0].early
            self._hurry(on=not early)  # a gate waits for layers while the step is launched
            gate = self._computer.gate(work[0]) if early else self._between if self._handover.active else None
            computed = self.model.forward(self.planes, spans, before_layer=gate)
            self._hurry(on=False)  # the device is busy, and we wait for it: time for the cache
            if work[0].early and not self.connector.arrived(work[0].request):
                raise LoadFailed
            sampling = [one.request for one in work if one.samples]
            if self._watch is not None:
                for row, request in enumerate(sampling):
                    self._watch(request, computed.logits[row])
            found = zip(sampling, choose(computed.logits, sampling, self.model.eos_ids), strict=True)
            chosen = {request: one for request, one in found if one is not None}
            finite = computed.finite()
            self._computer.wait_for_device()
        except LoadFailed:
            self._computer.wait_for_device()
            return  # it goes on with what is there
        except Exception as error:
            log.exception("a step failed")
            self._computer.wait_for_device()  # what was launched still writes to its slots; raises: the engine stops
            for one in work:  # nothing of it is committed: what it wrote is nobody's
                self._end(one.request, Finish.FAILED, f"{type(error).__name__}: {error}")
            return
        self._hurry(on=True)  # the device stands still until the next step is launched
        if work[0].early:
            work[0].request.phase = RequestPhase.RUNNING
        else:
            self._measure(work, time.perf_counter() - begin_s)
        self._pace.done_s = time.monotonic()
        self.num_steps += 1
        work = self._sound(work, finite, chosen)
        for one in work:
            one.request.num_computed = one.end
            one.request.num_recomputed += one.end - one.start
            one.request.whole = False
            self.num_computed_tokens += one.end - one.start
        for one in work:
            self._handover.release_first_token(one.request)
        ends = {one.request: self._give(one.request, chosen[one.request]) for one in work if one.request in chosen}
        for one in work:  # who waits for a token has it; now there is time for the cache
            self.connector.commit(one.request)
        for request, end in ends.items():
            if end is not None:
                self._end(request, end)

    def _sound(self, work: list[Work], finite: list[bool], chosen: Mapping[Request, Chosen]) -> list[Work]:
        """Those for whom the model computed numbers. The others are over, and nothing of the step stays of them."""
        sound = [
            one for one, good in zip(work, finite, strict=True) if good and (not one.samples or one.request in chosen)
        ]
        for one in work if len(sound) < len(work) else ():
            if one not in sound:
                where = f"tokens {one.start} to {one.end - 1}"
                log.error("request %s: the model computed NaN or infinity at %s", one.request.name, where)
                self.connector.cache.metrics.count("not_finite_requests_total")
                self._end(one.request, Finish.NOT_FINITE, f"the model computed NaN or infinity at {where}")
        return sound

    def _between(self, layer: int) -> None:
        """Go on with handoffs between two layers: nothing of theirs is in the step, which may take a second."""
        if self._news:  # before the layer; what comes later is looked at before the next
            self._news = False
            self._handover.go_on()

    def _measure(self, work: list[Work], seconds: float) -> None:
        num_tokens = sum(one.end - one.start for one in work)
        contexts = sum((one.end - one.start) * (one.start + one.end) // 2 for one in work)
        self.connector.measured(num_tokens, contexts, seconds)
        prompts = [one for one in work if one.end <= len(one.request.prompt)]
        if prompts:
            self._pace.prompt.measured(sum(one.end - one.start for one in prompts), seconds)
        else:
            self._pace.answer.measured(len(work), seconds)

    def _give(self, request: Request, chosen: Chosen) -> Finish | None:
        """Hand a token out. Returns why it was the last, if it was."""
        token, told = chosen.token, chosen.told
        if request.first_token_s is None:
            request.first_token_s = time.monotonic()
        if isinstance(request.handoff, Sending):
            self._handover.keep(request, token, told)
            return None
        if self._stops(request, token):
            return Finish.STOP
        request.tokens.append(token)
        self._tell(request, Output(tokens=(token,), logprobs=(told,) if told is not None else ()))
        return Finish.LENGTH if request.num_generated >= request.sampling.max_tokens else None

    def _stops(self, request: Request, token: int) -> bool:
        return token in request.sampling.stop_ids or (token in self.model.eos_ids and not request.sampling.ignore_eos)

    def _end(self, request: Request, finish: Finish, error: str = "") -> None:
        self.connector.release(request)
        self._scheduler.remove(request)
        self._tell_end(request, finish, error)

    def _tell_end(self, request: Request, finish: Finish, error: str = "", outcome: Outcome | None = None) -> None:
        request.phase = RequestPhase.OVER
        with self._lock:
            self._num_inside -= 1
        ticket = outcome.ticket if isinstance(outcome, Sent) else None
        unmoved = outcome if isinstance(outcome, Unsent | Missing) else None
        self._tell(
            request,
            Output(finish=finish, usage=request.usage(time.monotonic()), error=error, ticket=ticket, unmoved=unmoved),
        )

    def _tell(self, request: Request, output: Output) -> None:
        try:
            request.listen(output)
        except Exception:
            log.exception("the listener of request %s raised", request.name)
