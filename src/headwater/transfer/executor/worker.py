"""Worker: the executor's threads. Takes instructions, runs them beside the engine, and says what became of each.

Each store has a queue (`store_queue.py`) and a few threads of its own, so that a slow store holds up nobody else's
jobs; promotions, which touch two stores, have one of their own, and demotions are writes of their target's. A job that
names another to come `after` waits here until that one has ended, however it ended. One more thread, the watchdog
(`watchdog.py`), ends what is overdue. No torch here.

Takes no decision: what is to be moved where, and whether it pays, was decided by whoever gave the instruction. What a
job does is in `jobs.py`, how it ends in `ledger.py`, who gets which page in `pages.py`, which stores are off in
`stores_off.py`.

Invariants:
- Every job that `submit` took ends with exactly one JobDone or JobFailed, by its deadline + `grace_s`, whatever a store
  or the listener does, `close` included. One exception: a job that copies from or to slots then ends with its copy. If
  it is waited for, Stuck is said then, so that nobody waits for a copy that hangs.
- A queued job whose deadline passes is LATE and never begins. A job whose store call does not return is LATE; the
  pages that the call was given stay its own until it returns (rule 3), and then go back without being used.
- After the end of a job none of its slots is read or written any more (rule 2).
- A thread that is stuck in a call is replaced, up to `max_extra_threads` per store; when the call returns, the surplus
  ends.
- `submit` never blocks and never calls `deliver`.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Final

from headwater.core.errors import InvalidInput, ResourceClosed
from headwater.core.events import (
    Cancel,
    Demote,
    Event,
    Instruction,
    Job,
    Probe,
    PurgeBegan,
    Save,
    StoreCopy,
)
from headwater.core.keys import BlockKey
from headwater.core.results import Reason, Status, TierPurge
from headwater.layout.shard import WHOLE, Shard
from headwater.layout.spec import KVLayout
from headwater.metrics import Metrics
from headwater.storage.base import SYSTEM_CLOCK, Clock, Deadline, Store
from headwater.transfer.executor.jobs import JobRunner, checked, require_new
from headwater.transfer.executor.ledger import Delivers, JobState, Ledger
from headwater.transfer.executor.pages import PagePool
from headwater.transfer.executor.purger import StorePurger
from headwater.transfer.executor.save_throttle import SaveThrottle
from headwater.transfer.executor.staging import Staging
from headwater.transfer.executor.store_queue import PROMOTIONS, StoreQueue, queue_of
from headwater.transfer.executor.stores_off import StoresOff
from headwater.transfer.executor.tier import Naming, TierStore
from headwater.transfer.executor.tools import JobTools
from headwater.transfer.executor.trouble import JobTrouble, has_no_caller
from headwater.transfer.executor.watchdog import Watchdog

log: Final = logging.getLogger("headwater")


class Worker(Delivers):
    """Runs Probe, Load, Save, Demote, Promote and Cancel. Owns its threads; what it is given belongs to the caller.

    `deliver` is called with each event by one thread at a time, in the order things happened, without a lock held. It
    may `submit`, and must not `drain` or `close`. A worker belongs to one process: after fork() make another.
    """

    def __init__(
        self,
        stores: Mapping[str, Store],
        staging: Staging,
        *,
        layout: KVLayout,
        identity: bytes,
        block_tokens: int,
        shard: Shard = WHOLE,
        part: int = 0,
        deliver: Callable[[Event], None] | None = None,
        clock: Clock = SYSTEM_CLOCK,
        metrics: Metrics | None = None,
        threads_per_store: int = 2,
        max_extra_threads: int = 2,
        slice_pages: int = 32,
        in_place_pages: int = 128,
        overlaps: bool = False,
        grace_s: float = 0.25,
    ) -> None:
        """Start the threads. Raises InvalidInput, with none started.

        `stores`, by tier, are taken as they are: reading from them goes through verification here. `layout`, `shard`
        and `part` are those of a page: the whole block, or what one rank holds of it. Deadlines are on `clock`.
        `slice_pages` go together through staging, `in_place_pages` straight into a store's memory: there a slice holds
        no page, and costs the interpreter by the slice. With `overlaps` the store is called for one slice while the
        device is at another: faster for few long rows, and each takes twice the pages.
        """
        if not stores:
            raise InvalidInput("a worker needs at least one store")
        if PROMOTIONS in stores:
            raise InvalidInput(f"no store may be called {PROMOTIONS!r}")
        _at_least("threads_per_store", threads_per_store, 1)
        _at_least("max_extra_threads", max_extra_threads, 0)
        _at_least("slice_pages", slice_pages, 1)
        _at_least("in_place_pages", in_place_pages, 1)
        _at_least("grace_s", grace_s, 0)
        if block_tokens != layout.block_tokens:
            raise InvalidInput(f"a page of this layout holds {layout.block_tokens} tokens, not {block_tokens}")
        naming = Naming(identity=identity, layout=layout, shard=shard, part=part)
        self._clock = clock
        self._metrics = metrics if metrics is not None else Metrics()
        self._ledger = Ledger(clock=clock, metrics=self._metrics)
        self._ledger.deliver = deliver
        self._ledger.on_end = self._release
        self._layout = layout
        self._throttle = SaveThrottle()
        self._pool = PagePool(staging.num_pages, stores.keys(), self._ledger.changed)
        if len(staging.frame(0)) != naming.frame_bytes:
            raise InvalidInput(f"a frame has {naming.frame_bytes} bytes, a page of staging {len(staging.frame(0))}")
        tiers = {
            name: TierStore(name, store, naming, clock=clock, metrics=self._metrics) for name, store in stores.items()
        }
        tools = JobTools(
            tiers=tiers,
            staging=staging,
            pool=self._pool,
            ledger=self._ledger,
            naming=naming,
            throttle=self._throttle,
            clock=clock,
            metrics=self._metrics,
            slice_pages=slice_pages,
            in_place_pages=in_place_pages,
            overlaps=overlaps,
            grace_s=grace_s,
        )
        self._runner = JobRunner(tools)
        self._tiers = tiers
        queues = [*stores, PROMOTIONS] if len(stores) > 1 else list(stores)
        self._queues = {
            name: StoreQueue(
                name,
                self._ledger,
                num_threads=1 if name == PROMOTIONS else threads_per_store,
                frame_bytes=naming.frame_bytes,
                clock=clock,
                metrics=self._metrics,
            )
            for name in queues
        }
        self._waiting: dict[int, dict[int, JobState]] = {}  # jobs that are queued when another has ended, by its number
        self._purger = StorePurger(tiers, self._ledger, naming, clock=clock)
        self._off = StoresOff(self._ledger, clock=clock)
        self._numbers = count()
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._watchdog = Watchdog(
            self._queues,
            self._ledger,
            fail=self._fail,
            start_thread=self._start_thread,
            max_threads=threads_per_store + max_extra_threads,
            grace_s=grace_s,
            clock=clock,
            metrics=self._metrics,
        )
        self._ledger.on_news = self._watchdog.wake
        try:
            self._watchdog.thread.start()
            for queue in self._queues.values():
                queue.num_able = queue.num_threads
                for _ in range(queue.num_threads):
                    self._start_thread(queue)
        except RuntimeError:  # the machine has no more threads for us
            self.close()
            raise

    def remote(self) -> None:
        """None: it is part of this process, and ends with it."""
        return

    def on_first_layer(self, wake: Callable[[], None]) -> None:
        """Have `wake` called when the first layers of a load have arrived: somebody may begin with them."""
        self._ledger.on_first_layer = wake

    @property
    def num_held_pages(self) -> int:
        """Staging pages that jobs or calls that did not return hold now."""
        return self._pool.num_held

    def submit(self, instructions: Iterable[Instruction]) -> None:
        """Queue jobs, cancel jobs. Does not block. Raises InvalidInput, or ResourceClosed, with nothing taken.

        After it returned, a cancelled job begins no copy any more; its JobFailed follows. Cancelling a job that has
        ended, or was never here, changes nothing.
        """
        asked = checked(instructions, self._tiers)
        with self._ledger.lock:
            if self._closed:
                raise ResourceClosed("the worker is closed")
            if self._ledger.deliver is None:
                raise InvalidInput("nobody would hear what becomes of a job: set `deliver` first")
            require_new(asked, self._ledger.live)
            for instruction in asked:
                if isinstance(instruction, Job):
                    job, after = JobState(instruction, self._clock), _after(instruction)
                    waits = after in self._ledger.live
                    self._ledger.admit(job)
                    self._watchdog.set_alarm(job, instruction.deadline_s)
                    if waits:
                        self._waiting.setdefault(after, {})[instruction.job] = job
                    else:
                        self._queues[queue_of(instruction)].push(job)
                elif isinstance(instruction, Cancel) and instruction.job in self._ledger.live:
                    self._fail(self._ledger.live[instruction.job], Reason.CANCELLED, "nobody waits for it any more")
            if any(isinstance(one, Cancel) for one in asked):
                self._watchdog.wake()  # to tell what was cancelled

    def contains_cached(self, probe: Probe) -> tuple[Status, ...] | None:
        """The answer to a Probe, if the store has it in memory; None: submit it. Does not block. Raises nothing."""
        tier = self._tiers.get(probe.store)
        if tier is None or probe.store in self._off or tier.trouble is not None:
            return None
        return self._runner.contains_cached(probe)

    def throttle_saves(self, *, on: bool) -> None:
        """Have saves stand back for a moment, or go on: see `save_throttle.py`. Does not block."""
        self._throttle.set(on=on)

    def drain(self, timeout_s: float) -> bool:
        """Wait until every job has ended and every event was delivered. Blocks. False if that took too long."""
        self._require_other_thread()
        with self._ledger.changed:
            return self._ledger.changed.wait_for(lambda: self._ledger.quiet, timeout_s)

    def wait_layer(self, job: int, layer: int, timeout_s: float) -> bool:
        """Wait until all planes up to a layer's of all blocks of a Load are on the device, and right. Blocks.

        False: that took too long, or the job is over or stuck; what came of it is told by its event.
        """
        num_planes = sum(plane.layer <= layer for plane in self._layout.planes)
        with self._ledger.changed:
            state = self._ledger.live.get(job)
            if state is None:
                return False
            self._ledger.changed.wait_for(
                lambda: state.ended or state.stuck or state.num_planes_ready >= num_planes, timeout_s
            )
            return not (state.ended or state.stuck) and state.num_planes_ready >= num_planes

    def close(self, timeout_s: float = 10.0) -> bool:
        """Cancel every job and end the threads; idempotent. Blocks until they ended, or `timeout_s` passed: then False.

        Every job's event was delivered when it returns True. After False, a store's call has not returned: its pages,
        and so staging and the store, must stay as they are until another close() says True.
        """
        self._require_other_thread()
        until = Deadline.after(timeout_s)  # the clock that waiting goes by, whatever `clock` is
        with self._ledger.lock:
            self._closed = True
            for job in list(self._ledger.live.values()):
                self._fail(job, Reason.CANCELLED, "the worker was closed")
            for queue in self._queues.values():
                queue.close()
            self._watchdog.stop()
        if self._watchdog.thread.ident is not None:
            self._watchdog.thread.join(until.remaining_s)  # first, because it may be starting a thread
        threads = [*self._threads, self._watchdog.thread]
        for thread in threads:
            if thread.ident is not None:
                thread.join(until.remaining_s)
        left = [thread.name for thread in threads if thread.is_alive()]
        if left:
            log.warning("not back from a call %g s after close(), so its pages stay in use: %s", timeout_s, left)
        return not left

    def revive(self, store: str) -> bool:
        """Put a store right that was switched off, and say StoreOn. Blocks, seconds where it is rebuilt.

        False if it could not be put right. Raises InvalidInput for a store that is not here, ResourceClosed.
        """
        if store not in self._tiers:
            raise InvalidInput(f"there is no store {store!r} here; there are {', '.join(self._tiers)}")
        if self._closed:
            raise ResourceClosed("the worker is closed")
        if not self._tiers[store].revive():
            return False
        with self._ledger.lock:
            self._off.put_right(store)
            self._watchdog.wake()
        return True

    def purge(
        self, order: PurgeBegan, stores: Sequence[str], known: Sequence[BlockKey], timeout_s: float
    ) -> list[TierPurge]:
        """Remove blocks from stores, behind what is now being written: see `purger.py`. Blocks. Raises nothing."""
        return self._purger.purge(order, stores, known, timeout_s)

    # --- taking jobs in -----------------------------------------------------------------------------------------------

    def _release(self, number: int) -> None:
        """A job has ended: queue those that came after it. The lock is held."""
        for job in self._waiting.pop(number, {}).values():
            self._queues[queue_of(job.order)].push(job)

    def _fail(self, job: JobState, failure: Reason, why: str) -> None:
        """End a job, wherever it is. The lock is held."""
        self._queues[queue_of(job.order)].remove(job)
        waiting = self._waiting.get(_after(job.order), {})
        waits = waiting.pop(job.order.job, None) is not None  # and what it waits for may take for ever
        self._ledger.fail(job, failure, why, elsewhere=waits)

    # --- a store's threads --------------------------------------------------------------------------------------------

    def _start_thread(self, queue: StoreQueue) -> None:
        """Start a thread that its queue counts already. Raises RuntimeError where there is none to be had."""
        thread = threading.Thread(
            target=self._serve, args=(queue,), name=f"headwater {queue.name} {next(self._numbers)}", daemon=True
        )
        self._threads = [one for one in self._threads if one.is_alive()]
        thread.start()
        self._threads.append(thread)

    def _serve(self, queue: StoreQueue) -> None:
        has_no_caller()
        while (job := queue.take()) is not None:
            self._run(job)
            with self._ledger.lock:
                queue.leave(job)
                self._ledger.stuck.discard(job)
            self._ledger.flush()
        with self._ledger.lock:
            self._watchdog.wake()  # after close() it waits for the last of us

    def _run(self, job: JobState) -> None:
        """Do a job and end it. Raises nothing: a thread that dies would take its store's jobs with it."""
        order = job.order
        tiers = [self._tiers[name] for name in (order.store, *([order.target] if isinstance(order, StoreCopy) else []))]
        on_device = False
        try:
            self._off.notice(tiers)
            self._off.require_on(
                tiers[1:] if isinstance(order, Demote) else tiers
            )  # a source that is off gives nothing
            results = self._runner.way(order)(job)
        except JobTrouble as trouble:
            failure, why = trouble.failure, trouble.why
        except BaseException as error:  # staging is foreign code too
            log.exception("job %d, a %s of %s, failed", order.job, job.kind, order.store)
            failure, why, on_device = Reason.FAILED, f"{type(error).__name__}: {error}", True
        else:
            self._off.notice(tiers)
            self._ledger.done(job, results)
            return
        self._off.notice(tiers)
        with self._ledger.lock:
            self._ledger.fail(job, failure, why, on_device=on_device)

    # ------------------------------------------------------------------------------------------------------------------

    def _require_other_thread(self) -> None:
        if threading.current_thread() in (*self._threads, self._watchdog.thread):
            raise InvalidInput("the worker's own threads, in which `deliver` is called, cannot wait for themselves")


def _after(order: Job) -> int:
    """The job that has to end before this one begins; 0: none."""
    return order.after if isinstance(order, Save | Demote) else 0


def _at_least(what: str, value: float, least: int) -> None:
    if not value >= least:
        raise InvalidInput(f"{what} must be at least {least}, not {value}")
