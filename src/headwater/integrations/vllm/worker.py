"""The worker's side: the executor on vLLM's KV tensors. Gets its orders with each step, reports with each output.

Loads land in blocks that vLLM keeps for them; a request that waits hears when all its loads have *ended*, well or not,
and which blocks failed. Each job ends by its deadline, whatever a store does (`transfer/executor/worker.py`): vLLM
itself never gives up waiting. A load whose copy hangs is stuck: its request is given back as failed as a whole
(`take_failed`), and the scheduler keeps the blocks from vLLM until the copy has ended. A step that waits for such a
load itself cannot go on, since vLLM would compute into the same blocks: it raises, and the engine stops with a
sentence.

Otherwise a step waits for nothing, with one exception: while loads are all that the engine has to do (the scheduler
says so, `Orders.idle`) it would ask again at once, and take the interpreter from threads that copy; then a step waits
until one has ended, a millisecond at most. Not where another process copies: each wait would only make a hit later.

Saves read blocks of requests that run, or of ended ones that vLLM keeps until `finished` lets them go: when everything
was read, or at a deadline, after what still reads was cancelled. Blocks that vLLM takes away from a preempted request
are waited for a moment; then their saves are cancelled. A cancelled save publishes nothing (rule 3): executors of this
process know that at once, those of another must have said so before vLLM writes to the blocks, or they are killed.

No vLLM here, no torch.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from headwater.core.errors import CopyStuck, HeadwaterError, ResourceClosed
from headwater.core.events import Cancel, Copied, Demote, Event, Instruction, Job, JobDone, JobFailed, Load, Save, Stuck
from headwater.core.results import Reason
from headwater.integrations.vllm.metadata import Orders, Report
from headwater.storage.base import SYSTEM_CLOCK, Clock
from headwater.transfer.ranks.group_result import num_good
from headwater.transfer.ranks.members import JobExecutor

log: Final = logging.getLogger("headwater")

_FLUSH_S: Final = 0.2  # for saves to read blocks that are wanted by others
_CANCEL_S: Final = 2.0  # for another process to say that it has heard so
_IDLE_S: Final = 0.001  # at most, for loads, in a step while nothing is computed: who spins takes their interpreter
_REMARK_S: Final = 10.0  # between complaints about a load that does not end


class WorkerSide:
    """Carries a rank's orders out. Called from the worker's thread; what becomes of jobs is heard from others."""

    def __init__(
        self,
        executor: JobExecutor,
        *,
        rank: int = 0,
        overlapping: int = 1,
        kill: Callable[[], bool] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`overlapping`: so many steps are begun before the scheduler has heard what the first of them said.

        `kill`: the executor is another process's, and this ends it. True: nothing is read or written there any more.
        """
        self._executor = executor
        self._kill = kill
        self._overlapping = overlapping
        self._rank = rank
        self._clock = clock
        self._changed = threading.Condition()
        self._orders = Orders()
        self._live: dict[int, Job] = {}  # jobs that have not ended
        self._stuck: set[int] = set()  # loads among them whose copies hang
        self._given_up: set[int] = set()  # those of them whose requests were said to have failed
        self._failed: set[str] = set()  # requests that waited for such, to be reported
        self._reading: set[int] = set()  # saves that have not read their blocks
        self._cancelled_s: dict[int, float] = {}  # those of them that were told to leave it, and when
        self._idle = False  # nothing is computed, and loads are waited for
        self._num_silent = 0  # steps since anything was said that the scheduler can go on with
        self._events: list[Event] = []
        self._bad: set[int] = set()  # blocks that failed to load, to be reported
        self._loading: dict[str, set[int]] = {}  # requests that wait: jobs that have not ended
        self._leaving: dict[str, tuple[set[int], float]] = {}  # ended requests: saves that read them, until when
        executor.deliver = self.heard

    # --- a step -------------------------------------------------------------------------------------------------------

    def begin(self, orders: Orders) -> None:
        """A step begins, and with it blocks may get other owners. Blocks a moment if they are still being read."""
        self._orders = orders.on_clock(self._clock.monotonic())
        self._executor.throttle_saves(on=not orders.idle)  # the step is launched now, and the device waits for it
        vacated = set(orders.vacated)
        if not vacated:
            return
        self._executor.throttle_saves(on=False)
        with self._changed:
            self._changed.wait_for(lambda: self._reading.isdisjoint(vacated), _FLUSH_S)
            late = self._reading & vacated
        self._cancel(late)
        if late and self._kill is not None:
            with self._changed:
                heard = self._changed.wait_for(lambda: self._reading.isdisjoint(late), _CANCEL_S)
            if not heard and not self._kill():
                raise CopyStuck(
                    "a process that reads blocks which vLLM needs does not answer, and cannot be killed: vLLM must not "
                    "write to them, so the engine has to stop"
                )

    @property
    def step_waits(self) -> bool:
        """Whether the step that began waits for loads."""
        return bool(self._orders.waiting)

    @property
    def step_saves(self) -> bool:
        """Whether saves begin with it."""
        return any(isinstance(one, Save) for one in self._orders.jobs)

    def load(self) -> None:
        """Begin the step's loads. Blocks until those have ended that the step waits for. Raises CopyStuck."""
        orders = self._orders
        loads = [one for one in orders.jobs if isinstance(one, Load)]
        self._idle = orders.idle
        with self._changed:
            for request, jobs in orders.loading:
                self._loading[request] = set(jobs)
            for _, blocks in orders.missing:
                self._bad.update(blocks)
        self._submit(loads)
        self._submit([one for one in orders.jobs if isinstance(one, Cancel)])
        waiting = set(orders.waiting)

        def over() -> bool:
            return waiting.isdisjoint(self._live) or not waiting.isdisjoint(self._stuck)

        with self._changed:
            while not self._changed.wait_for(over, _REMARK_S):
                log.warning("a step waits for loads that do not end: %s", sorted(waiting.intersection(self._live)))
            if not waiting.isdisjoint(self._stuck):
                raise CopyStuck(
                    "a copy into blocks of a request that runs has not ended by its deadline, so they cannot be "
                    "computed either: the engine has to stop. With load=async only that request would begin anew"
                )

    def save(self) -> None:
        """Begin the step's saves: what they read was computed in steps before; and what is to follow them.

        Does not block.
        """
        self._executor.throttle_saves(on=False)
        saves = [one for one in self._orders.jobs if isinstance(one, Save | Demote)]
        self._submit(saves)
        with self._changed:
            for request, jobs, until_s in self._orders.leaving:
                self._leaving[request] = (set(jobs), until_s)
            for request in self._orders.released:
                if request in self._leaving:
                    self._leaving[request] = (self._leaving[request][0], 0.0)
        self._orders = Orders()

    def finished(self) -> tuple[set[str], set[str]]:
        """Ended requests whose blocks are read no more, and requests whose loads have all ended. Says each once.

        Blocks, for `_IDLE_S` at most, where the engine has nothing to do but to wait for loads of threads beside it.
        """
        with self._changed:
            is_beside = self._kill is None  # in this process
            if is_beside and self._idle and self._loading and self._num_silent >= self._overlapping:
                self._changed.wait_for(lambda: self._loaded() or self._left(), _IDLE_S)
        now_s = self._clock.monotonic()
        overdue: set[int] = set()
        with self._changed:
            loaded = self._loaded()
            left = self._left()
            for name in loaded:
                stuck = self._stuck & self._loading.pop(name)
                if stuck:
                    self._failed.add(name)
                    self._given_up |= stuck
            for name in left:
                del self._leaving[name]
            for jobs, until_s in self._leaving.values():
                if now_s >= until_s:
                    overdue |= jobs & self._reading
        self._cancel(overdue)
        if self._kill is not None and any(now_s - self._cancelled_s.get(job, now_s) > _CANCEL_S for job in overdue):
            self._kill()  # or vLLM would not have its blocks before the save's own deadline
        self._num_silent = 0 if left or loaded else self._num_silent + 1
        return left, loaded

    def take_failed(self) -> set[str]:
        """Requests among those whose loads are over that must begin anew in other blocks. Each is said once.

        To be asked after `finished`, and reported with it.
        """
        with self._changed:
            failed, self._failed = self._failed, set()
            return failed

    def take_bad(self) -> set[int]:
        """Blocks that failed to load, each said once."""
        with self._changed:
            bad, self._bad = self._bad, set()
            return bad

    def report(self) -> Report | None:
        """What became of jobs since the last call; None: nothing."""
        with self._changed:
            events, self._events = self._events, []
        return Report(events=tuple((self._rank, event) for event in events)) if events else None

    # --- inside -------------------------------------------------------------------------------------------------------

    def _loaded(self) -> set[str]:
        """Requests whose loads have all ended, or hang. The lock is held."""
        awaited = self._live.keys() - self._stuck
        return {name for name, jobs in self._loading.items() if jobs.isdisjoint(awaited)}

    def _left(self) -> set[str]:
        """Ended requests of which nothing is read any more. The lock is held."""
        return {name for name, (jobs, _) in self._leaving.items() if jobs.isdisjoint(self._reading)}

    def _submit(self, instructions: Sequence[Instruction]) -> None:
        if not instructions:
            return
        with self._changed:
            for one in instructions:
                if isinstance(one, Job):
                    self._live[one.job] = one
                if isinstance(one, Save):
                    self._reading.add(one.job)
        try:
            self._executor.submit(instructions)
        except HeadwaterError as error:  # closed: they still have to end, or somebody waits for ever
            now_s = self._clock.monotonic()
            for one in instructions:
                if isinstance(one, Job):
                    self.heard(JobFailed(now_s=now_s, job=one.job, failure=Reason.FAILED, why=str(error)))

    def _cancel(self, jobs: Iterable[int]) -> None:
        now_s = self._clock.monotonic()
        cancels = [Cancel(job=job) for job in jobs]
        for one in cancels:
            self._cancelled_s.setdefault(one.job, now_s)
        if cancels:
            with contextlib.suppress(ResourceClosed):  # then everything is cancelled
                self._executor.submit(cancels)

    def heard(self, event: Event) -> None:
        """Hear what becomes of jobs, and of stores. Does not block."""
        with self._changed:
            self._events.append(event)
            if isinstance(event, Copied):
                self._reading.discard(event.job)
            elif isinstance(event, Stuck):
                self._stuck.add(event.job)
            elif isinstance(event, JobDone | JobFailed):
                order = self._live.pop(event.job, None)
                self._cancelled_s.pop(event.job, None)
                self._reading.discard(event.job)
                self._stuck.discard(event.job)
                if event.job in self._given_up:  # nobody has its blocks any more
                    self._given_up.remove(event.job)
                elif isinstance(order, Load):
                    self._bad.update(order.slots[num_good(order, event) :])
            self._changed.notify_all()
