"""An engine and its executor in virtual time: the production brain, jobs, stores and verification, without a thread.

`VirtualExecutor` runs the code of `transfer/executor/jobs.py` when it is told to, one job at a time, in any order, as
late as one likes; so any order of jobs that threads could bring can be chosen, and chosen again. `SimulatedEngine` is
what an engine does around a TieredCache: it computes blocks (writes bytes that follow from the key), and looks whether
the bytes that the cache gives it are those.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from headwater.cache.cache import TieredCache
from headwater.cache.state import Brain
from headwater.config.cache import CacheConfig, TierConfig
from headwater.core.errors import InvalidInput
from headwater.core.events import Cancel, Event, Finished, Instruction, Job, Probe
from headwater.core.keys import BlockKey
from headwater.core.results import Reason, Status
from headwater.layout.spec import opaque_layout
from headwater.metrics import Metrics
from headwater.storage.base import Clock, Store
from headwater.testing.clock import FakeClock
from headwater.testing.device import BytesStaging
from headwater.testing.pages import IDENTITY
from headwater.transfer.executor.jobs import JobRunner
from headwater.transfer.executor.ledger import JobState, Ledger
from headwater.transfer.executor.pages import PagePool
from headwater.transfer.executor.save_throttle import SaveThrottle
from headwater.transfer.executor.tier import Naming, TierStore
from headwater.transfer.executor.tools import JobTools
from headwater.transfer.executor.trouble import JobTrouble

BLOCK_TOKENS: Final = 16
LAYOUT: Final = opaque_layout((40, 24), BLOCK_TOKENS)
ROOT: Final = BlockKey(hashlib.sha256(b"headwater simulation").digest())


def path_keys(path: Sequence[int]) -> list[BlockKey]:
    """Keys of a sequence of blocks, each named by a number: equal prefixes have equal keys."""
    keys: list[BlockKey] = []
    key = ROOT
    for step in path:
        key = BlockKey(hashlib.sha256(key + step.to_bytes(8, "little")).digest())
        keys.append(key)
    return keys


def content(key: BlockKey) -> bytes:
    """What the block of a key holds, and nothing else ever may."""
    return (key + hashlib.sha256(key).digest())[: LAYOUT.page_bytes]


class EventList(list[Event]):
    """A recorder that keeps the events that a brain took in."""

    def began(self, brain: Brain) -> None:
        """Nothing to keep."""

    def heard(self, event: Event, said: Sequence[Instruction]) -> None:
        """Keep it."""
        self.append(event)

    def refused(self, event: Event) -> None:
        """It changed nothing."""

    def failed(self, event: Event, why: str) -> None:
        """A brain in a test does not fail unless it is told to."""

    def ended(self, digest: str) -> None:
        """Nothing to keep."""


class VirtualExecutor:
    """Holds jobs until `run` or `expire` is called. Events are delivered before those return."""

    def __init__(self, stores: Mapping[str, Store], staging: BytesStaging, *, clock: FakeClock) -> None:
        metrics = Metrics()
        naming = Naming(identity=IDENTITY, layout=LAYOUT)
        self.ledger = Ledger(clock=clock, metrics=metrics)
        self.queued: list[JobState] = []
        self._clock = clock
        self._tiers = {
            name: TierStore(name, store, naming, clock=clock, metrics=metrics) for name, store in stores.items()
        }
        self._pool = PagePool(staging.num_pages, list(stores), self.ledger.changed)
        tools = JobTools(
            tiers=self._tiers,
            staging=staging,
            pool=self._pool,
            ledger=self.ledger,
            naming=naming,
            throttle=SaveThrottle(),
            clock=clock,
            metrics=metrics,
            slice_pages=3,
            in_place_pages=3,
            overlaps=False,
            grace_s=0.25,
        )
        self._executor = JobRunner(tools)

    def submit(self, instructions: Sequence[Instruction]) -> None:
        """Queue jobs; cancel those that are still queued. What follows is told by the next `tell`, not from here."""
        with self.ledger.lock:
            for one in instructions:
                if isinstance(one, Cancel):
                    for job in [job for job in self.queued if job.order.job == one.job]:
                        self.queued.remove(job)
                        self.ledger.fail(job, Reason.CANCELLED, "cancelled")
                elif isinstance(one, Job):
                    job = JobState(one, self._clock)
                    self.ledger.admit(job)
                    self.queued.append(job)

    def contains_cached(self, probe: Probe) -> tuple[Status, ...] | None:
        """Everything takes its turn here."""
        return None

    def throttle_saves(self, *, on: bool) -> None:
        """Nothing happens beside the engine here."""

    def wait_layer(self, job: int, layer: int, timeout_s: float) -> bool:
        """A job is done at once or not at all."""
        return False

    def run(self, job: JobState, *, fail: bool = False) -> None:
        """Do one queued job now, or have it fail in the middle of nowhere."""
        self.queued.remove(job)
        if fail or job.deadline.expired:
            with self.ledger.lock:
                self.ledger.fail(job, Reason.FAILED if fail else Reason.LATE, "as the test wants it")
        else:
            job.started_s = self._clock.monotonic()
            try:
                self.ledger.done(job, self._executor.way(job.order)(job))
            except JobTrouble as trouble:
                with self.ledger.lock:
                    self.ledger.fail(job, trouble.failure, trouble.why)
        self.tell()

    def tell(self) -> None:
        """Tell what happened."""
        self.ledger.flush()

    def revive(self, store: str) -> bool:
        """Read a store again."""
        self._tiers[store].reader.switch_on()
        return True

    def switched_off(self) -> list[str]:
        """Stores that gave nothing but bad pages; they are read again after this."""
        off = [name for name, tier in self._tiers.items() if tier.reader.switched_off]
        for name in off:
            self._tiers[name].reader.switch_on()
        return off

    @property
    def num_held_pages(self) -> int:
        """Pages that somebody has now: none, between jobs."""
        return self._pool.num_held

    def drain(self, timeout_s: float) -> bool:
        """Run everything."""
        while self.queued:
            self.run(self.queued[0])
        self.tell()
        return True

    def close(self, timeout_s: float) -> bool:
        """Cancel everything."""
        with self.ledger.lock:
            for job in self.queued:
                self.ledger.fail(job, Reason.CANCELLED, "closed")
        self.queued.clear()
        self.tell()
        return True


@dataclass(slots=True)
class _Running:
    path: list[int]  # the prompt, and what was generated since
    num_prompt: int
    slots: tuple[int, ...] = ()
    num_computed: int = 0  # blocks whose bytes this request has seen to be right, or has written


@dataclass(slots=True)
class EngineTally:
    """What a simulated engine saw."""

    served: int = 0
    left_early: int = 0
    refused: int = 0
    hit_tokens: dict[str, int] = field(default_factory=dict)
    miss_tokens: dict[str, int] = field(default_factory=dict)

    def add(self, bill: Finished | None) -> None:
        """One more request is over."""
        self.served += bill is not None
        self.left_early += bill is None
        if bill is None:
            return
        total = sum(tokens for _, tokens in (*bill.hit_tokens, *bill.miss_tokens))
        assert total == bill.num_tokens, f"hits and misses do not add up: {bill}"
        for sums, parts in ((self.hit_tokens, bill.hit_tokens), (self.miss_tokens, bill.miss_tokens)):
            for name, tokens in parts:
                sums[name] = sums.get(name, 0) + tokens


class EngineExecutor(Protocol):
    """What a simulated engine needs of its executor."""

    def submit(self, instructions: Sequence[Instruction]) -> None:
        """Begin jobs, or cancel them."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Wait until no job is under way."""
        ...

    def close(self, timeout_s: float) -> bool:
        """End all jobs."""
        ...

    def revive(self, store: str) -> bool:
        """Put a store right."""
        ...

    def contains_cached(self, probe: Probe) -> tuple[Status, ...] | None:
        """An answer from memory."""
        ...

    def throttle_saves(self, *, on: bool) -> None:
        """Do what nobody waits for a little later."""
        ...

    def wait_layer(self, job: int, layer: int, timeout_s: float) -> bool:
        """Wait for a layer of a load."""
        ...

    @property
    def num_held_pages(self) -> int:
        """Staging pages that somebody has now."""
        ...


class SimulatedEngine:
    """A cache and its device, driven by hand; `check` says whether every byte is right.

    Whoever makes it has the executor deliver to `cache.deliver`.
    """

    def __init__(
        self,
        name: str,
        staging: BytesStaging,
        executor: EngineExecutor,
        tiers: Sequence[TierConfig],
        *,
        clock: Clock,
        policy: str = "lru",
        record: "EventList | None" = None,
    ) -> None:
        self.name = name
        self.tally = EngineTally()
        self.running: dict[str, _Running] = {}
        self.staging = staging
        self._executor = executor
        config = CacheConfig(
            num_slots=len(staging.device),
            block_tokens=BLOCK_TOKENS,
            block_bytes=LAYOUT.page_bytes,
            tiers=tuple(tiers),
            policy=policy,
        )
        self.cache = TieredCache(Brain(config), executor, clock=clock, recorder=record)
        self._number = 0

    def arrive(self, path: Sequence[int]) -> str:
        """A request with this prompt asks what is there."""
        self._number += 1
        request = f"{self.name}/{self._number}"
        self.running[request] = _Running(list(path), len(path))
        self.ask(request)
        return request

    def ask(self, request: str) -> None:
        """It asks, or asks again; the answer must agree with itself."""
        one = self.running[request]
        match = self.cache.match(request, path_keys(one.path[: one.num_prompt]), root=ROOT)
        blocks = list(match)
        assert len(blocks) == match.num_blocks == one.num_prompt
        assert match.num_on_device <= match.num_hit

    def settled(self, request: str) -> bool:
        """Whether asking again would not tell more. One that a failed brain left over has nothing to wait for."""
        with self.cache.still() as brain:
            return request not in brain.requests or brain.view(request).settled

    def reserve(self, request: str, num_more: int = 1, *, load: bool = True, promised: str = "") -> bool:
        """It wants slots for its prompt and some more blocks. False: there is no room."""
        one = self.running[request]
        slots = self.cache.reserve(request, len(one.path) + num_more, load=load, promised=promised)
        if slots is None:
            self.tally.refused += 1
            return False
        assert slots[: len(one.slots)] == one.slots, "a running request's slots moved"
        one.slots = slots
        return True

    def compute(self, request: str, num_blocks: int) -> bool:
        """Compute and commit the next blocks, generated ones behind the prompt. False: it has to wait for its loads."""
        one = self.running[request]
        progress = self.cache.poll(request)
        if not one.slots or progress.loading:
            return False
        end = min(progress.num_ready + num_blocks, len(one.slots))
        while len(one.path) < end:
            one.path.append(1000 + len(one.path))  # deterministic sampling: the next turn can find it
        keys = path_keys(one.path[:end])
        for at in range(progress.num_ready, end):
            self.staging.device[one.slots[at]] = memoryview(content(keys[at]))
        assert self.cache.commit(request, keys[progress.num_ready :]) == max(end, progress.num_ready)
        one.num_computed = end
        return True

    def leave(self, request: str) -> None:
        """It is over."""
        del self.running[request]
        self.tally.add(self.cache.release(request))

    def check(self) -> None:
        """Every byte that anybody may read on this device is right, and the brain agrees with itself."""
        with self.cache.still() as brain:
            brain.validate()
            for key, _, slot in brain.blocks():
                assert self.staging.block(slot) == content(key), "a wrong byte in a known block"
        for request in self.running:
            self.check_request(request)

    def check_request(self, request: str) -> None:
        """Every byte that a running request may read is right."""
        one = self.running[request]
        if not one.slots:
            return
        num_ready = max(self.cache.poll(request).num_ready, one.num_computed)
        for key, slot in zip(path_keys(one.path[:num_ready]), one.slots, strict=False):
            assert self.staging.block(slot) == content(key), "a wrong byte under a running request"

    def finish(self, timeout_s: float = 0.0) -> None:
        """Everybody leaves and every job ends: then nothing may be held. Raises InvalidInput if something is."""
        for request in list(self.running):
            self.leave(request)
        until_s = time.monotonic() + timeout_s
        ended = self._executor.drain(timeout_s)
        while self._executor.num_held_pages and time.monotonic() < until_s:  # given back just after its job was told
            time.sleep(0.005)
        if not ended or self._executor.num_held_pages:
            raise InvalidInput("jobs that do not end, or pages that nobody gave back")
        self.check()
        counts = {state.name: num for state, num in self.cache.brain.slots.counts().items()}
        num_evictable = self.cache.brain.slots.num_evictable
        held = counts["OWN"] or counts["QUARANTINED"] or num_evictable != counts["KNOWN"]
        if held or self.cache.brain.pending:
            raise InvalidInput(f"something is still held: {counts}, {num_evictable} may leave")
