"""What the tests of the worker share: a rig of worker, device and ear; stores that wait, raise or answer nonsense."""

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

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
    Promote,
    Save,
    Stuck,
)
from headwater.core.keys import BlockKey
from headwater.core.page import PageName
from headwater.core.results import Reason, Status
from headwater.layout.frame import frame_bytes
from headwater.layout.spec import opaque_layout
from headwater.metrics import Metrics
from headwater.storage.base import SYSTEM_CLOCK, Clock, Deadline, Store
from headwater.storage.memory import MemoryStore
from headwater.storage.wrappers import OpaqueStore
from headwater.testing.clock import FakeClock
from headwater.testing.device import BytesStaging
from headwater.testing.pages import IDENTITY
from headwater.transfer.executor.worker import Worker

LAYOUT = opaque_layout((512, 100), 4)
FRAME_BYTES = frame_bytes(LAYOUT.plane_bytes)
TENANT = b"tenant of tests!"
PATIENCE_S = 30.0  # nothing here takes that long; a test that waits so long fails
End = JobDone | JobFailed


def key(chain: int, depth: int) -> BlockKey:
    return BlockKey(hashlib.sha256(b"root" if depth < 0 else b"%d/%d" % (chain, depth)).digest())


def keys(chain: int, num_blocks: int, start: int = 0) -> tuple[BlockKey, ...]:
    return tuple(key(chain, start + i) for i in range(num_blocks))


class Ear:
    """Hears events, and waits for them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.extra: Callable[[Event], None] | None = None
        self._heard = threading.Condition()

    def __call__(self, event: Event) -> None:
        with self._heard:
            self.events.append(event)
            self._heard.notify_all()
        if self.extra is not None:
            self.extra(event)

    def of(self, job: int) -> list[Event]:
        with self._heard:
            return [event for event in self.events if getattr(event, "job", None) == job]

    def ends(self, job: int) -> list[End]:
        return [event for event in self.of(job) if isinstance(event, JobDone | JobFailed)]

    def wait(self, found: Callable[[Event], bool]) -> Event:
        with self._heard:
            assert self._heard.wait_for(lambda: any(map(found, self.events)), PATIENCE_S), f"only {self.events}"
            return next(filter(found, self.events))

    def end(self, job: int) -> End:
        event = self.wait(lambda event: isinstance(event, JobDone | JobFailed) and event.job == job)
        assert isinstance(event, JobDone | JobFailed)
        return event

    def results(self, job: int) -> list[str]:
        end = self.end(job)
        assert isinstance(end, JobDone), end
        return list(end.results)

    def failure(self, job: int) -> Reason:
        end = self.end(job)
        assert isinstance(end, JobFailed), end
        return end.failure


class Gate:
    """A place where calls wait while it is shut."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._arrived = threading.Semaphore(0)

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def __call__(self, *_: object) -> None:
        if not self._open.is_set():
            self._arrived.release()
            assert self._open.wait(4 * PATIENCE_S), "nobody opened"  # longer than any test waits for what is behind it

    def wait_for_arrival(self) -> None:
        assert self._arrived.acquire(timeout=PATIENCE_S), "nobody came"


CALLS = ("put", "get_into", "contains", "delete")


class OddStore(OpaqueStore):
    """A store whose calls can be made to wait, to raise, and to answer something else. Knows what it was asked."""

    def __init__(self, store: Store | None = None) -> None:
        super().__init__(store or MemoryStore(64 << 20))
        self.gates = {call: Gate() for call in CALLS}
        self.raises: dict[str, BaseException] = {}
        self.answers: dict[str, Callable[[list[Any]], Any]] = {}
        self.asked: list[tuple[str, list[PageName]]] = []
        self.buffers: list[memoryview] = []  # of the latest get_into

    def _do(self, call: str, names: Iterable[PageName], real: Callable[[], list[Any]]) -> Any:
        self.asked.append((call, list(names)))
        self.gates[call]()
        if call in self.raises:
            raise self.raises[call]
        found = real()
        return self.answers[call](found) if call in self.answers else found

    def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        return self._do("put", [name for name, _ in pages], lambda: self.store.put(pages, deadline=deadline))  # type: ignore[no-any-return]

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        self.buffers = [buffer for _, buffer in pages]
        return self._do("get_into", [name for name, _ in pages], lambda: self.store.get_into(pages, deadline=deadline))  # type: ignore[no-any-return]

    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> list[bool]:
        return self._do("contains", names, lambda: self.store.contains(names, deadline=deadline))  # type: ignore[no-any-return]

    def delete(self, names: Sequence[PageName], *, deadline: Deadline) -> list[Status]:
        return self._do("delete", names, lambda: self.store.delete(names, deadline=deadline))  # type: ignore[no-any-return]

    def calls(self) -> list[str]:
        return [call for call, _ in self.asked]

    def open(self) -> None:
        for gate in self.gates.values():
            gate.open()


class Rig:
    """A worker with a device in numpy, and an ear. Checks at the end that every job ended exactly once."""

    def __init__(
        self,
        stores: dict[str, Store],
        *,
        num_slots: int = 256,
        num_pages: int = 64,
        clock: Clock = SYSTEM_CLOCK,
        seed: int = 1,
        **options: Any,
    ) -> None:
        self.stores = stores
        self.clock = clock
        self.ear = Ear()
        self.metrics = Metrics()
        self.staging = BytesStaging(LAYOUT, num_slots=num_slots, num_pages=num_pages, seed=seed)
        self.scatter = Gate()
        self.gather = Gate()
        self.staging.on_scatter = self.scatter
        self.staging.on_gather = self.gather
        self.original = self.staging.device.copy()
        self.jobs: list[int] = []
        self.worker = Worker(
            stores,
            self.staging,
            **{
                "layout": LAYOUT,
                "identity": IDENTITY,
                "block_tokens": LAYOUT.block_tokens,
                "deliver": self.ear,
                "clock": clock,
                "metrics": self.metrics,
                **options,
            },
        )

    # --- instructions -------------------------------------------------------------------------------------------------

    def submit(self, *instructions: Instruction) -> None:
        self.worker.submit(instructions)
        self.jobs += [one.job for one in instructions if isinstance(one, Job)]

    def cancel(self, job: int) -> None:
        self.submit(Cancel(job=job))

    def probe(self, num_blocks: int = 1, *, chain: int = 1, store: str = "host", within_s: float = PATIENCE_S) -> int:
        return self._job(Probe, store, keys(chain, num_blocks), within_s)

    def load(
        self,
        slots: Sequence[int],
        *,
        chain: int = 1,
        start: int = 0,
        store: str = "host",
        within_s: float = PATIENCE_S,
    ) -> int:
        return self._job(Load, store, keys(chain, len(slots), start), within_s, slots=tuple(slots))

    def save(
        self,
        slots: Sequence[int],
        *,
        chain: int = 1,
        start: int = 0,
        store: str = "host",
        within_s: float = PATIENCE_S,
    ) -> int:
        facts = {"slots": tuple(slots), "parent": key(chain, start - 1), "depth": start, "tenant": TENANT}
        return self._job(Save, store, keys(chain, len(slots), start), within_s, **facts)

    def demote(
        self,
        num_blocks: int,
        target: str,
        *,
        chain: int = 1,
        start: int = 0,
        store: str = "host",
        after: int = 0,
        within_s: float = PATIENCE_S,
    ) -> int:
        facts = {"target": target, "parent": key(chain, start - 1), "after": after}
        return self._job(Demote, store, keys(chain, num_blocks, start), within_s, **facts)

    def promote(
        self,
        num_blocks: int,
        target: str,
        *,
        chain: int = 1,
        start: int = 0,
        store: str = "host",
        within_s: float = PATIENCE_S,
    ) -> int:
        return self._job(Promote, store, keys(chain, num_blocks, start), within_s, target=target)

    def _job(self, kind: type[Job], store: str, wanted: tuple[BlockKey, ...], within_s: float, **facts: Any) -> int:
        number = len(self.jobs) + 1
        deadline_s = self.clock.monotonic() + within_s
        self.submit(kind(job=number, store=store, keys=wanted, deadline_s=deadline_s, **facts))
        return number

    # --- what came of it ----------------------------------------------------------------------------------------------

    def saved(self, slots: Sequence[int], **where: Any) -> None:
        """Save blocks and insist that they are stored."""
        assert self.ear.results(self.save(slots, **where)) == ["stored"] * len(slots)

    def loaded(self, slots: Sequence[int], source: Sequence[int], **where: Any) -> None:
        """Load blocks and insist that they are those that were saved from `source`."""
        assert self.ear.results(self.load(slots, **where)) == ["hit"] * len(slots)
        assert [self.staging.block(slot) for slot in slots] == [bytes(self.original[slot]) for slot in source]

    def untouched(self, slots: Sequence[int]) -> bool:
        return all(self.staging.block(slot) == bytes(self.original[slot]) for slot in slots)

    def pass_time(self, seconds: float) -> None:
        """Move a FakeClock on, and have the watchdog look at it."""
        assert isinstance(self.clock, FakeClock)
        self.clock.advance(seconds)
        self.cancel(-1)

    def finish(self) -> None:
        """Let everything go, close, and check what holds at every end."""
        for store in self.stores.values():
            if isinstance(store, OddStore):
                store.open()
        self.scatter.open()
        self.gather.open()
        assert self.worker.close(PATIENCE_S)
        assert self.worker.num_held_pages == 0
        ends = Counter(event.job for event in self.ear.events if isinstance(event, JobDone | JobFailed))
        assert ends == Counter(self.jobs), "a job ended twice, or never"
        for job in self.jobs:
            *before, last = self.ear.of(job)
            assert isinstance(last, JobDone | JobFailed), "something was said of a job after its end"
            assert all(isinstance(event, Copied | Stuck) for event in before)
            assert len(before) <= 1
        times = [event.now_s for event in self.ear.events]
        assert times == sorted(times)
        for store in self.stores.values():
            store.close()


def make_late(worker: Worker) -> None:
    """The deadlines of all loads pass now: on a busy machine a short one would pass before they have begun."""
    now_s = time.monotonic()
    with worker._ledger.lock:
        for job in worker._ledger.live.values():
            if isinstance(job.order, Load):
                job.order = replace(job.order, deadline_s=now_s)
                job.deadline = Deadline(now_s)
                worker._watchdog.set_alarm(job, now_s)


def rigs() -> Iterator[Callable[..., Rig]]:
    """For a fixture: makes rigs, of one OddStore called host unless told otherwise, and finishes them."""
    made: list[Rig] = []

    def make(stores: dict[str, Store] | None = None, **options: Any) -> Rig:
        made.append(Rig(stores if stores is not None else {"host": OddStore()}, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.finish()


def odd(rig: Rig, store: str = "host") -> OddStore:
    found = rig.stores[store]
    assert isinstance(found, OddStore)
    return found


def slowly(clock: FakeClock) -> Callable[[list[Any]], list[Any]]:
    """A right answer that takes a second: a little more than a job of 0.9 s has, and less than the watch gives it."""

    def answer(found: list[Any]) -> list[Any]:
        clock.advance(1.0)
        return found

    return answer


def wait_until(true: Callable[[], bool]) -> None:
    """For what nobody tells."""
    until_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < until_s
        time.sleep(0.001)


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("headwater host")]


class Unheard(BaseException):
    """What no `except Exception` catches."""
