"""StepExecutor: the executor, as the brain in vLLM's scheduler sees them.

What moves bytes is done by the workers, in other processes: jobs wait here until the next step takes them along
(`take`), and what became of them comes with a step's output (`heard`). A job ends when every rank has said how, with
what all of them agree on (`transfer/ranks/group_result.py`). Nothing is timed here: each worker ends its jobs by
itself.

Probes are done here, by `prober`: a worker without pages that has the same stores open. The stores of a node are shared
by its processes, so nobody has to wait for a step to hear what is in them. A block whose load failed a moment ago is
*absent*, whatever a store says: otherwise a request would be told again and again of a hit that cannot be had.

Never blocks. Takes no decision about blocks.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from headwater.core.errors import InvalidInput, ResourceClosed
from headwater.core.events import (
    Cancel,
    Copied,
    Demote,
    Event,
    Instruction,
    Job,
    JobDone,
    JobFailed,
    Load,
    Probe,
    Save,
    StoreOff,
    Stuck,
)
from headwater.core.keys import BlockKey
from headwater.core.results import Reason, Status
from headwater.integrations.vllm.metadata import Report
from headwater.storage.base import SYSTEM_CLOCK, Clock
from headwater.transfer.ranks.group_result import RankAnswer, agree, num_good

if TYPE_CHECKING:
    from headwater.transfer.executor.worker import Worker
    from headwater.transfer.ranks.group import Ranks

DROPPED_S: Final = 10.0  # a block that could not be loaded is not believed to be there for so long
_CATCH_UP_S: Final = 5.0
_CATCH_UP_BLOCKS: Final = 128  # that were written since: less, who asks next takes in himself
_MOST_DROPPED: Final = 1 << 16


@dataclass(slots=True)
class _Errand:
    """A job that workers have, or will have."""

    order: Job
    ends: dict[int, JobDone | JobFailed] = field(default_factory=dict)  # by rank
    copied: set[int] = field(default_factory=set)
    said_copied: bool = False
    stuck: bool = False  # a Load that hangs on a rank


class StepExecutor:
    """Carries jobs to the workers and their answers back. `deliver` hears every event."""

    def __init__(
        self, prober: "Worker | Ranks", *, num_ranks: int, others_write: bool = False, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """Takes the prober over: `close` closes it. `others_write`: it hears of saves by looking at the stores."""
        self.deliver: Callable[[Event], None] | None = None
        self._prober = prober
        self._num_ranks = num_ranks
        self._others_write = others_write
        self._catching_up = 0  # numbers of our own probes, downwards from here
        self._num_unseen: dict[str, int] = {}  # blocks that were written since the last of them, by store
        self._clock = clock
        self._lock = threading.Lock()
        self._bag: list[Instruction] = []
        self._errands: dict[int, _Errand] = {}
        self._probes: dict[int, Probe] = {}
        self._off: set[str] = set()
        self._dropped: dict[BlockKey, float] = {}  # until when
        prober.deliver = self._seen

    # --- the face of a worker -----------------------------------------------------------------------------------------

    def submit(self, instructions: Sequence[Instruction]) -> None:
        """Take jobs and cancels. Does not block."""
        probes: list[Instruction] = []
        with self._lock:
            for one in instructions:
                if isinstance(one, Probe):
                    self._probes[one.job] = one
                    probes.append(one)
                elif isinstance(one, Cancel) and one.job in self._probes:
                    probes.append(one)
                elif isinstance(one, Load | Save | Demote):
                    self._errands[one.job] = _Errand(one)
                    self._bag.append(one)
                elif isinstance(one, Cancel):
                    self._bag.append(one)
                else:
                    raise InvalidInput(f"not for vLLM's workers: {one!r}")
        if probes:
            self._prober.submit(probes)

    def contains_cached(self, probe: Probe) -> tuple[Status, ...] | None:
        """What stores know from memory."""
        seen = self._prober.contains_cached(probe)
        return None if seen is None else self._believed(probe, seen)

    def throttle_saves(self, *, on: bool) -> None:
        """Nothing is done here that could be in the way."""

    def wait_layer(self, job: int, layer: int, timeout_s: float) -> bool:
        """Nobody in this process waits for a layer."""
        return False

    def drain(self, timeout_s: float) -> bool:
        """Wait for answers to probes; the workers' jobs end with their steps."""
        return self._prober.drain(timeout_s)

    def revive(self, store: str) -> bool:
        """Put a store right, as far as it is looked at."""
        self._off.discard(store)
        return self._prober.revive(store)

    def close(self, timeout_s: float) -> bool:
        """End probing; what workers have, they end themselves."""
        return self._prober.close(timeout_s)

    # --- steps --------------------------------------------------------------------------------------------------------

    def take(self) -> tuple[Instruction, ...]:
        """What the next step takes along."""
        with self._lock:
            bag, self._bag = self._bag, []
            return tuple(bag)

    def recall(self, jobs: Sequence[int]) -> tuple[int, ...]:
        """Jobs that are not to be begun any more. Returns those that the workers have already; the others end here."""
        with self._lock:
            kept = [one for one in self._bag if not (isinstance(one, Job) and one.job in jobs)]
            unsent = {one.job for one in self._bag if isinstance(one, Job)}.intersection(jobs)
            self._bag = kept
            for job in unsent:
                del self._errands[job]
            now_s = self._clock.monotonic()
        for job in unsent:
            why = "it was not begun, and nobody waits for it any more"
            self._tell(JobFailed(now_s=now_s, job=job, failure=Reason.CANCELLED, why=why))
        return tuple(job for job in jobs if job not in unsent)

    def heard(self, report: Report) -> None:
        """What a step's output says of jobs."""
        for rank, event in report.events:
            for said in self._answer(rank, event):
                if isinstance(said, Stuck):
                    self.drop(self._errands[said.job].order.keys)
                self._tell(said)

    def stuck_blocks(self) -> frozenset[int]:
        """Blocks that a copy which hangs may still write to: nobody may have them."""
        with self._lock:
            stuck = [one.order for one in self._errands.values() if one.stuck]
        return frozenset(slot for order in stuck if isinstance(order, Load) for slot in order.slots)

    def drop(self, keys: Sequence[BlockKey]) -> None:
        """Do not believe for a while that these blocks can be had."""
        with self._lock:
            now_s = self._clock.monotonic()
            if len(self._dropped) > _MOST_DROPPED:
                self._dropped = {key: until for key, until in self._dropped.items() if until > now_s}
            self._dropped.update(dict.fromkeys(keys, now_s + DROPPED_S))

    # --- inside -------------------------------------------------------------------------------------------------------

    def _answer(self, rank: int, event: Event) -> list[Event]:
        with self._lock:
            if isinstance(event, StoreOff):
                if event.store in self._off:
                    return []
                self._off.add(event.store)
                return [event]
            errand = self._errands.get(event.job) if isinstance(event, JobDone | JobFailed | Copied | Stuck) else None
            if errand is None:
                return []
            now_s = self._clock.monotonic()
            if isinstance(event, Stuck):
                if errand.stuck:
                    return []
                errand.stuck = True
                return [Stuck(now_s=now_s, job=errand.order.job)]
            if isinstance(event, Copied):
                errand.copied.add(rank)
            elif isinstance(event, JobDone | JobFailed):
                errand.ends.setdefault(rank, event)
                errand.copied.add(rank)
            out: list[Event] = []
            if isinstance(errand.order, Save) and len(errand.copied) >= self._num_ranks and not errand.said_copied:
                errand.said_copied = True
                out.append(Copied(now_s=now_s, job=errand.order.job))
            if len(errand.ends) < self._num_ranks:
                return out
            del self._errands[errand.order.job]
        return [*out, self._agreed(errand, now_s)]

    def _agreed(self, errand: _Errand, now_s: float) -> JobDone | JobFailed:
        """What all ranks say together. A block that was not to be had is dropped, one that was written is not."""
        order = errand.order
        agreed = agree(order, [RankAnswer(rank, rank, end) for rank, end in errand.ends.items()])
        done = agreed.end(order.job, now_s)
        if isinstance(done, JobFailed):
            if isinstance(order, Load) and done.failure is not Reason.CANCELLED:
                self.drop(order.keys)
        elif isinstance(order, Load):
            self.drop(order.keys[num_good(order, done) :])
        else:  # one that was there already is the one that could not be read
            with self._lock:
                for key, result in zip(order.keys, done.results, strict=True):
                    if result == Status.STORED:
                        self._dropped.pop(key, None)
            if self._others_write and Status.STORED in done.results:
                self._catch_up(order, order.target if isinstance(order, Demote) else order.store, now_s)
        return done

    def _catch_up(self, order: Job, store: str, now_s: float) -> None:
        """Have the prober take in what was written, before it is so much that nobody could answer from memory."""
        with self._lock:
            num = self._num_unseen.get(store, 0) + len(order.keys)
            self._num_unseen[store] = num if num < _CATCH_UP_BLOCKS else 0
            if num < _CATCH_UP_BLOCKS:
                return
            self._catching_up -= 1
            probe = Probe(job=self._catching_up, store=store, keys=order.keys[-1:], deadline_s=now_s + _CATCH_UP_S)
        with contextlib.suppress(ResourceClosed):
            self._prober.submit([probe])

    def _seen(self, event: Event) -> None:
        """An answer of the prober, in its thread."""
        if isinstance(event, JobDone | JobFailed):
            if event.job < 0:  # our own
                return
            with self._lock:
                probe = self._probes.pop(event.job, None)
            if probe is not None and isinstance(event, JobDone):
                results = self._believed(probe, event.results)
                event = JobDone(now_s=event.now_s, job=event.job, results=results, seconds=event.seconds)
        elif isinstance(event, StoreOff):
            with self._lock:
                if event.store in self._off:
                    return
                self._off.add(event.store)
        self._tell(event)

    def _believed(self, probe: Probe, seen: tuple[Status, ...]) -> tuple[Status, ...]:
        with self._lock:
            if not self._dropped or len(seen) != len(probe.keys):
                return seen
            now_s = self._clock.monotonic()
            return tuple(
                Status.ABSENT if self._dropped.get(key, 0.0) > now_s else one
                for key, one in zip(probe.keys, seen, strict=True)
            )

    def _tell(self, event: Event) -> None:
        if self.deliver is not None:
            self.deliver(event)
