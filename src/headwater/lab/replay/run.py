"""One replay: every request of a trace through the production brain, in virtual time, and the bill.

A request says Arrived at its timestamp, waits until the stores have answered, says Wanted for all its blocks, waits for
what is being loaded, says Filled for the rest, and Left. Computing takes no virtual time, so without a store's speed
requests never overlap; with one they do, as far as they wait for loads. With `step_blocks` computing takes its time,
step by step, and as many requests compute at once as there are: a trace does not say how many engines it was for.

How it is counted:
- The hit ratio is hit blocks over requested blocks. The last block of a prompt counts like any other, full or not (in
  published figures too); a trace read with `full_blocks_only` leaves out one that is not, as production does.
- Only leading blocks are hits: what lies behind the first block that is not to be had is computed.
- A request of more blocks than the device has cannot run there: it is cut to as many, and the rest counts as requested
  and missed, as `too_long`.
- What a request generates is not in a trace, and takes no slots.

Hits and misses are the brain's own, from the `Finished` of each request. Not here: reading traces, and what to run.
"""

import heapq
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

from headwater.cache.match import DEVICE
from headwater.cache.state import Brain
from headwater.core import events as ev
from headwater.core.errors import HeadwaterError
from headwater.core.keys import BlockKey
from headwater.lab.replay.bill import ReplayOutcome, ReplaySetup, TierUse
from headwater.lab.replay.trace import ROOT, Tell, Trace, TraceRequest, TraceSurvey
from headwater.lab.replay.virtual import CountingExecutor, CountingStore

TOO_LONG: Final = "too_long"
_EVERY: Final = 64  # requests between two reports of progress


@dataclass(slots=True)
class _Live:
    """A request on its way."""

    keys: tuple[BlockKey, ...]
    filled: int | None = None  # blocks that are there; None: the request does not compute yet
    until_s: float = 0.0  # when the step ends that is computed


class Replay:
    """A brain, its executor, and requests on their way. `feed` requests in order of time, then `finish`."""

    def __init__(self, setup: ReplaySetup, *, block_tokens: int, most_blocks: int | None = None) -> None:
        """`most_blocks`: all blocks that will be requested; a device of more is as good as one of so many."""
        config = setup.cache_config(block_tokens, most_blocks=most_blocks)
        block_bytes = config.block_bytes
        self.setup = setup
        self.brain = Brain(config)
        self.stores = {
            store.name: CountingStore(store.blocks, policy=setup.policy, block_bytes=block_bytes)
            for store in setup.stores
        }
        gbs = {store.name: store.gbs for store in setup.stores}
        self._executor = CountingExecutor(self.stores, block_bytes=block_bytes, gbs=gbs)
        self._outcome = ReplayOutcome(setup=setup)
        self._hits: Counter[str] = Counter()
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._now_s = 0.0
        self._live: dict[str, _Live] = {}
        self._ready: deque[str] = deque()  # requests that may be able to go on
        self._waits: dict[int, str] = {}  # jobs that a request waits for
        self._refused: list[str] = []  # requests that found no room, in order
        self._steps: list[tuple[float, int, str]] = []  # ends of computing: when, in which order, whose
        self._order = 0

    def feed(self, request: TraceRequest) -> None:
        """The next request comes, after all that ends until then."""
        self._advance(request.at_s)
        self._now_s = max(self._now_s, request.at_s)
        outcome, num_slots = self._outcome, self.brain.config.num_slots
        name = str(outcome.num_requests)
        outcome.num_requests += 1
        outcome.requested_blocks += len(request.keys)
        keys = request.keys
        if len(keys) > num_slots:
            outcome.cut_requests += 1
            outcome.missed_blocks[TOO_LONG] += len(keys) - num_slots
            keys = keys[:num_slots]
        self._live[name] = _Live(keys)
        session = ev.session_of(request.session)
        self._say(ev.Arrived(now_s=self._now_s, request=name, keys=keys, root=ROOT, session=session), name)
        self._ready.append(name)
        self._advance(self._now_s)

    def finish(self) -> ReplayOutcome:
        """Let everything under way end. Returns the bill; the replay is over."""
        self._advance(float("inf"))
        if self._live:
            raise HeadwaterError(f"{len(self._live)} requests never ended: the replay or the brain is wrong")
        outcome, totals = self._outcome, self.brain.accounts.totals
        device = TierUse(name=DEVICE, blocks=self.setup.blocks, hit_blocks=self._hits[DEVICE])
        device.evicted_blocks = int(totals.get(("evicted_blocks_total", (("tier", DEVICE),)), 0))
        device.read_bytes = self._executor.num_saved * self._block_bytes
        outcome.tiers = [device]
        for name, store in self.stores.items():
            use = TierUse(name=name, blocks=store.num_blocks, hit_blocks=self._hits[name])
            use.evicted_blocks = store.num_evicted
            use.read_bytes, use.written_bytes = (num * self._block_bytes for num in (store.num_read, store.num_written))
            device.written_bytes += use.read_bytes
            outcome.tiers.append(use)
        for (name, labels), amount in totals.items():
            if name == "dropped_blocks_total":
                outcome.dropped_blocks[dict(labels)["reason"]] += int(amount)
        return outcome

    # --- inside -------------------------------------------------------------------------------------------------------

    def _advance(self, until_s: float) -> None:
        """Let happen what happens by then: jobs that end now, then requests that may go on, then time."""
        while True:
            next_s, step_s = self._executor.next_s, self._steps[0][0] if self._steps else None
            if self._ready and (next_s is None or next_s > self._now_s):
                self._go_on(self._ready.popleft())
            elif step_s is not None and step_s <= until_s and (next_s is None or step_s < next_s):
                self._now_s = max(self._now_s, step_s)
                self._ready.append(heapq.heappop(self._steps)[2])
            elif next_s is not None and next_s <= until_s:
                self._now_s = max(self._now_s, next_s)
                event = self._executor.due()
                self._say(event, self._waiter(event))
            else:
                return

    def _say(self, event: ev.Event, name: str | None) -> bool:
        """Tell the brain, on behalf of a request, and let the executor begin what it says. True if it granted slots."""
        granted = False
        told: deque[tuple[ev.Event, str | None]] = deque([(event, name)])
        while told:
            event, name = told.popleft()
            out = self.brain.handle(event)
            for one in out:
                if isinstance(one, ev.Probe | ev.Load) and name is not None:
                    self._waits[one.job] = name
                elif isinstance(one, ev.Finished):
                    self._bill(one)
                granted |= isinstance(one, ev.Granted)
            told.extend((report, self._waiter(report)) for report in self._executor.submit(out, now_s=self._now_s))
        return granted

    def _waiter(self, event: ev.Event) -> str | None:
        """Whose job has ended. It may go on."""
        name = self._waits.pop(event.job, None) if isinstance(event, ev.JobDone | ev.JobFailed) else None
        if name is not None:
            self._ready.append(name)
        return name

    def _go_on(self, name: str) -> None:
        """Take a request one step further, if nothing is missing for it."""
        live = self._live.get(name)
        if live is None:
            return
        record = self.brain.requests[name]
        if record.probes or (record.reserved and record.ready_s is None):
            return  # the end of a job wakes it
        if not record.reserved:
            if not self._say(ev.Wanted(now_s=self._now_s, request=name, num_blocks=len(live.keys)), name):
                self._refused.append(name)
                return
        elif live.filled is None or live.filled < len(live.keys):
            if not self._compute(name, live, record.hold.num_blocks):
                return
        else:
            del self._live[name]
            self._say(ev.Left(now_s=self._now_s, request=name), name)
            self._ready.extend(self._refused)
            self._refused.clear()
            return
        self._ready.append(name)

    def _compute(self, name: str, live: _Live, num_held: int) -> bool:
        """Compute the next step, or all that is left. False: that takes time, and its end wakes the request."""
        size = self.setup.step_blocks
        if live.filled is None:
            live.filled = num_held
        elif size and self._now_s < live.until_s:
            return False
        else:
            self._fill(name, live, size)
        left = len(live.keys) - live.filled
        if not size:
            self._fill(name, live, left)
            return True
        if left:
            live.until_s = self._now_s + self.setup.cost.row_s(live.filled, live.filled + min(size, left))
            self._order += 1
            heapq.heappush(self._steps, (live.until_s, self._order, name))
        return not left

    def _fill(self, name: str, live: _Live, num_blocks: int) -> None:
        """Blocks were computed."""
        assert live.filled is not None, "it does not compute"  # noqa: S101
        if keys := live.keys[live.filled : live.filled + num_blocks]:
            self._say(ev.Filled(now_s=self._now_s, request=name, keys=keys), name)
            live.filled += len(keys)

    def _bill(self, finished: ev.Finished) -> None:
        for tier, tokens in finished.hit_tokens:
            self._hits[tier] += tokens // self._block_tokens
        for reason, tokens in finished.miss_tokens:
            self._outcome.missed_blocks[reason] += tokens // self._block_tokens
        self._outcome.saved_s += finished.saved_s
        self._outcome.waited_s += finished.waited_s


def replay(trace: Trace, setup: ReplaySetup, *, survey: TraceSurvey, tell: Tell | None = None) -> ReplayOutcome:
    """Replay a whole trace. Blocks for as long as the brain thinks; raises InvalidInput for a bad line."""
    begin_s = time.perf_counter()
    run = Replay(setup, block_tokens=trace.block_tokens, most_blocks=survey.num_blocks)
    stage = f"{setup.policy}, {setup.blocks:,} blocks"
    for done, request in enumerate(trace):
        if tell is not None and not done % _EVERY:
            tell(stage, done, survey.num_requests)
        run.feed(request)
    outcome = run.finish()
    outcome.elapsed_s = time.perf_counter() - begin_s
    return outcome
