"""The scheduler's side: what vLLM's scheduler asks, answered by the brain. No vLLM here, no bytes, no waiting.

    matched     what stores have of a prompt behind what vLLM has: so many tokens, or "ask later"
    allocated   vLLM's blocks for a request: they are lent to the brain, and loads begin with the next step
    orders      before each step: blocks that were computed since are committed, and what is to be done is handed out
    heard       after each step: what became of jobs
    finished    a request ended: its blocks stay until what is being saved from them was read

A block is named only when the step that computed it is known to have ended well (rule 1): vLLM counts computed tokens
in advance, less those of steps in flight; where a load failed it has taken them back by the time the brain hears of it,
and until then the brain takes no commits. What a request was told it can load and what is loaded is decided once, by
the brain; if a store is lost in between, the difference is reported as failed.

Saves wait in vLLM's own blocks and nowhere else. While nobody lacks blocks, those of ended requests are kept until they
were read; while vLLM has none to give, each has a moment from its end on (`_PATIENCE_S`), and then its saves give up.

A load whose copy hangs may write to its blocks until it ends, which may be never. Its request is given back to vLLM as
failed, and begins anew in other blocks; until the copy has ended, vLLM is kept from giving the old ones to anybody
(`BlockPins`).

A request that is preempted, or begins anew after a failed load, is another one for the brain, by its `epoch`. After a
failed load it is computed: it is never told of a hit a second time.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from headwater.cache.lent_cache import LentCache
from headwater.core.errors import Contradiction, InvalidInput
from headwater.core.keys import BlockKey
from headwater.integrations.vllm.kv_events import Teller
from headwater.integrations.vllm.metadata import Orders, Report
from headwater.integrations.vllm.naming import Namer
from headwater.integrations.vllm.settings import ConnectorConfig, LoadMode
from headwater.integrations.vllm.step_executor import StepExecutor
from headwater.integrations.vllm.tracked import BlockPins, NextStep, Tracked
from headwater.storage.base import SYSTEM_CLOCK, Clock

log: Final = logging.getLogger("headwater")

_PATIENCE_S: Final = 0.25  # that an ended request is kept for its saves while another waits for blocks,
_RUNNING_S: Final = 0.05  # or one that runs, and cannot go on
_TOGETHER: Final = 4  # decoded blocks of a request that runs are saved at once: each save costs a message


class SchedulerSide:
    """The brain in vLLM's scheduler. Called from one thread."""

    def __init__(
        self,
        cache: LentCache,
        executor: StepExecutor,
        namer: Namer,
        config: ConnectorConfig,
        *,
        block_tokens: int,
        loads: bool = True,
        saves: bool = True,
        teller: Teller | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`loads`, `saves`: a producer only saves, a consumer only loads what it has not."""
        self.teller = teller
        self.pins: BlockPins | None = None  # to be set before the first step
        self.cache = cache
        self._executor = executor
        self._namer = namer
        self._config = config
        self._size = block_tokens
        self._loads = loads
        self._saves = saves
        self._clock = clock
        self._tracked: dict[str, Tracked] = {}
        self._pinned: frozenset[int] = frozenset()  # blocks that copies which hang may write to
        self._next = NextStep()
        self._leaving: dict[str, float] = {}  # ended requests whose blocks vLLM keeps for us, since when
        self._disowned: set[str] = set()  # requests that ran when everything was named anew: they are not cached
        self._in_need: set[str] = set()  # requests that could have blocks since the last step, and did not get any
        self._starves = False  # one that runs did not get any

    # --- a request comes ----------------------------------------------------------------------------------------------

    def matched(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens behind the computed ones can be loaded, and whether beside other steps. None: ask later."""
        one = self._track(request)
        if one is None:
            return 0, False
        num_local = num_computed_tokens // self._size
        if one.lent:
            self._vacate(one)  # it begins anew: vLLM has taken its blocks
        elif one.asked_s is not None and one.num_local != num_local:
            self._forget(one)
        if not self._ask(one, num_local):
            return None, False
        num, one.sources = self.cache.promise(one.name)
        if num and one.num_unnamed:  # it came between two looks
            self._forget(one)
            if not self._ask(one, num_local, all_named=True):
                return None, False
            num, one.sources = self.cache.promise(one.name)
        one.promised = num if num >= self._config.min_load_blocks else 0
        self._in_need.add(request.request_id)
        return one.promised * self._size, one.promised > 0 and self._config.load is LoadMode.ASYNC

    def _track(self, request: Any) -> Tracked | None:
        one = self._tracked.get(request.request_id)
        if one is None:
            if request.request_id in self._disowned:
                return None
            prompt = self._namer.prompt(request)
            if prompt is None:
                return None
            one = self._tracked[request.request_id] = Tracked(request, prompt)
        return one

    def _ask(self, one: Tracked, num_local: int, *, all_named: bool = False) -> bool:
        """Ask the brain, or ask again. False: stores have not answered, and may still do so in time."""
        now_s = self._clock.monotonic()
        request, prompt, num_keys = one.request, one.prompt, num_local
        if self._loads and not one.barred and not getattr(request, "skip_reading_prefix_cache", False):
            num_keys = max(num_local, (request.num_tokens - 1) // self._size)  # one token at least is computed
        if one.asked_s is None or one.num_asked < num_keys:
            num_asked = num_keys
            if num_keys > num_local + 1 and not all_named:
                first = prompt.extend(request.all_token_ids, num_local + 1)[num_local]
                if self.cache.lacks(first):  # names of the others would take longer than all the rest of this
                    num_asked = num_local + 1
            if one.asked_s is not None and one.num_asked != num_asked:
                self._forget(one)  # it has come since
            one.num_asked = num_asked
        one.num_unnamed = num_keys - one.num_asked
        if one.asked_s is None:
            one.asked_s, one.num_local = now_s, num_local
        self.cache.ask(
            one.name,
            prompt.extend(request.all_token_ids, one.num_asked),
            num_local=num_local,
            root=prompt.root,
            tenant=prompt.tenant,
            resumed=request.num_preemptions > 0,
            num_unnamed=one.num_unnamed,
        )
        if not self.cache.probing(one.name):
            return True
        if now_s - one.asked_s < self._config.probe_timeout_s:
            return False
        self.cache.give_up(one.name)
        return True

    def allocated(self, request: Any, blocks: Sequence[int], num_external_tokens: int) -> None:
        """A request got blocks of vLLM, which counts so many tokens as loaded."""
        self._in_need.discard(request.request_id)
        one = self._tracked.get(request.request_id)
        if one is None or one.lent or one.asked_s is None:
            return  # the rest of one that was loaded beside steps
        num_load = num_external_tokens // self._size
        end = one.num_local + num_load
        loading = 0
        jobs: tuple[int, ...] = ()
        try:
            loading = self.cache.lend(one.name, blocks[:end], num_load=num_load)
            jobs = self.cache.loading(one.name)
            one.lent = True
            one.preemptions = request.num_preemptions
        except InvalidInput:
            log.exception("blocks of %s could not be taken over: it is not cached", request.request_id)
            self._forget(one)
            del self._tracked[request.request_id]
        if not num_load:
            return
        if self._config.load is LoadMode.ASYNC:
            self._next.loading[request.request_id] = jobs
        else:
            self._next.waiting += jobs
        if loading < num_load:
            self._next.missing[request.request_id] = tuple(blocks[one.num_local + loading : end])
            one.barred = True

    def sources(self, request_id: str) -> tuple[tuple[str, int], ...]:
        """Where the blocks are that a request was told of: stores, and how many of each."""
        one = self._tracked.get(request_id)
        return one.sources if one is not None and one.promised else ()

    # --- steps --------------------------------------------------------------------------------------------------------

    def orders(self, blocks_of: Callable[[str], Sequence[int]]) -> Orders:
        """What the step that begins takes along. `blocks_of`: vLLM's blocks of a request that runs."""
        for one in list(self._tracked.values()):
            if not one.lent:
                continue
            if one.request.num_preemptions > one.preemptions:
                self._vacate(one)
            else:
                self._commit(one, blocks_of, _TOGETHER)
                self._tell(one)
        if self.teller is not None:
            self.teller.watch()
        news, self._next = self._next, NextStep()
        return Orders(
            sent_s=self._clock.monotonic(),
            jobs=self._executor.take(),
            loading=tuple(news.loading.items()),
            waiting=tuple(news.waiting),
            missing=tuple(news.missing.items()),
            leaving=tuple((name, jobs, until_s) for name, (jobs, until_s) in news.leaving.items()),
            vacated=tuple(news.vacated),
            released=self._released(),
        )

    def _released(self) -> tuple[str, ...]:
        """Ended requests that had their time to be saved, if vLLM lacks blocks."""
        starves, in_need = self._starves, self._starves or bool(self._in_need)
        self._starves, self._in_need = False, set()
        if not (in_need and self._leaving):
            return ()
        ended_s = self._clock.monotonic() - (_RUNNING_S if starves else _PATIENCE_S)
        return tuple(name for name, left_s in self._leaving.items() if left_s <= ended_s)

    def heard(self, report: Report | None, sent: Sequence[str] = (), failed: Sequence[str] = ()) -> None:
        """What a step's output says. `sent`: ended requests whose blocks vLLM has freed; `failed`: loading ones."""
        for name in sent:
            self._leaving.pop(name, None)
        if report is not None:
            self._executor.heard(report)
            self._pin()
            for one in self._tracked.values():
                if one.promised and one.lent and not one.barred:
                    one.barred = self.cache.broken(one.name)
        for name in failed:  # vLLM takes all blocks from them, also those that were loaded well
            tracked = self._tracked.get(name)
            if tracked is not None and tracked.lent:
                tracked.barred = True
                self._vacate(tracked)

    def _pin(self) -> None:
        """Keep blocks from vLLM that copies may still write to. It frees those of a failed load after this step."""
        stuck = self._executor.stuck_blocks()
        if stuck == self._pinned:
            return
        if self.pins is None:
            raise Contradiction("a copy hangs, and nobody can keep its blocks from vLLM")
        self.pins.hold(sorted(stuck - self._pinned))
        self.pins.let_go(sorted(self._pinned - stuck))
        log.warning("copies that hang keep %d blocks from use", len(stuck))
        self._pinned = stuck

    def _commit(self, one: Tracked, blocks_of: Callable[[str], Sequence[int]], least: int = 1) -> None:
        """Name blocks whose steps have ended, and save them, if there are so many, or the prompt's last among them."""
        request, size = one.request, self._size
        num_tokens = min(request.num_computed_tokens - request.num_in_flight_tokens, len(request.all_token_ids))
        num_full, num_known = num_tokens // size, max(one.num_local, one.num_named)
        if num_known < request.num_prompt_tokens // size <= num_full:
            least = 1  # who is preempted, or asks the same, wants it before four are decoded
        if not self._saves or num_full - num_known < least:  # as in nearly every step
            return
        progress = self.cache.poll(one.name)
        if progress.loading:
            return
        one.num_named = num_named = progress.num_ready
        if num_full - num_named < least:
            return
        try:
            self.cache.lend(one.name, tuple(blocks_of(request.request_id)[:num_full]))
            keys = one.prompt.extend(request.all_token_ids, num_full)
            self.cache.commit(one.name, keys[num_named:num_full])
            one.num_named = num_full
        except InvalidInput:
            log.exception("blocks of %s could not be named: it is not cached any more", request.request_id)
            self._vacate(one)
            del self._tracked[request.request_id]

    def _tell(self, one: Tracked) -> None:
        """Blocks of a request that have names since: others may hear of them."""
        if self.teller is None or one.asked_s is None or self.cache.poll(one.name).loading:
            return
        num_named, start = self.cache.num_named(one.name), one.num_told
        if num_named > start:
            keys = one.prompt.keys
            parent = keys[start - 1] if start else one.prompt.root
            self.teller.computed(keys[start:num_named], one.request, start=start, parent=parent, size=self._size)
            one.num_told = num_named

    def _vacate(self, one: Tracked) -> None:
        """A request's blocks may be another's with this step: nothing of them is read any more."""
        jobs = self._executor.recall(self.cache.reading(one.name))
        self._next.vacated += jobs
        self._forget(one)

    def _forget(self, one: Tracked) -> None:
        """The brain's request ends; vLLM's may come again."""
        if one.asked_s is not None:
            self.cache.release(one.name)
        one.epoch += 1
        one.asked_s = None
        one.lent = False
        one.promised, one.sources, one.num_told, one.num_named = 0, (), 0, 0

    # --- a request goes -----------------------------------------------------------------------------------------------

    def prompt_keys(self, request: Any) -> list[BlockKey]:
        """Keys of the full blocks of a request's prompt; none if it is not cached."""
        one = self._tracked.get(request.request_id)
        if one is None or not self._saves:
            return []
        return one.prompt.extend(request.all_token_ids, request.num_prompt_tokens // self._size)

    def finished(self, request: Any, blocks: Sequence[int]) -> bool:
        """A request ended, in whatever way. True: its blocks are being read, and stay until a worker says so."""
        self._disowned.discard(request.request_id)
        one = self._tracked.get(request.request_id)
        if one is None or one.asked_s is None:
            self._tracked.pop(request.request_id, None)
            return False
        reading: tuple[int, ...] = ()
        if one.lent and not self.cache.poll(one.name).loading:  # vLLM waits for loads by itself
            if request.num_preemptions > one.preemptions:
                self._vacate(one)
            else:
                self._commit(one, lambda _: blocks)
                self._tell(one)
                reading = self.cache.reading(one.name)
        self._tracked.pop(request.request_id, None)
        self._in_need.discard(request.request_id)
        if one.asked_s is not None:
            self.cache.release(one.name)
        if not reading:
            return False
        now_s = self._clock.monotonic()
        self._next.leaving[request.request_id] = (reading, now_s + self._config.free_timeout_s)
        self._leaving[request.request_id] = now_s
        return True

    def is_freeing(self) -> bool:
        """Whether blocks will be free soon that are not now. VLLM asks when a running request cannot have any."""
        self._starves = True
        return bool(self._leaving)

    def reset(self) -> None:
        """Nothing that was computed by now is to be used any more, nor what comes of it. O(1), but for who is here.

        Who has blocks may have computed some of them before and some after: they are not cached, and what is being
        loaded for them has failed. What is being saved of ended requests has its old name.
        """
        self._namer.renew()
        for name, one in list(self._tracked.items()):
            if one.lent:
                self._disowned.add(name)
                self._vacate(one)
            else:
                self._forget(one)
            del self._tracked[name]

    def close(self, timeout_s: float = 5.0) -> bool:
        """End; idempotent. False: a store did not let go."""
        return self.cache.close(timeout_s)
