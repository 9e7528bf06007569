"""One process of the fault campaign on a pool (`pool_faults.py`): a writer or a reader.

A worker saves or loads chain after chain of a small world, as fast as it is answered, by jobs of an executor as an
engine has it, between the pool and a device in plain memory. It compares every byte of every block that was loaded with
what its name says: at once, and again a while later, before the slots are used for something else, because a transfer
that was given up must not arrive there. What it saw it writes to a log, one line of JSON for each fact, before anything
else happens.

Host pages go back to their pool when the call that has them returned; from then on nobody may write there (rule 3),
which is looked at when they are given out again.
"""

import argparse
import ctypes
import mmap
import random
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from headwater.core.errors import HeadwaterError
from headwater.core.events import Job, JobDone, JobFailed, Load, Probe, Save, Stuck
from headwater.core.keys import BlockKey
from headwater.core.page import PageName
from headwater.core.results import Reason, Status
from headwater.lab.campaigns.pool_fault_heart import BEAT_S, Heart, Log
from headwater.layout.frame import frame_bytes, header_bytes
from headwater.layout.spec import opaque_layout
from headwater.storage.base import Deadline
from headwater.storage.mooncake import MooncakeStore
from headwater.storage.wrappers import OpaqueStore
from headwater.testing.pages import IDENTITY, SamplePage, sample_chain, sample_page
from headwater.transfer.executor.caller import Caller, End
from headwater.transfer.executor.worker import Worker

PLANES: Final = (60_000, 60_000, 5_000, 5_000)
FRAME_BYTES: Final = frame_bytes(PLANES)
NUM_CHAINS: Final = 24
DEPTH: Final = 8
CALL_S: Final = 1.0
_LAYOUT: Final = opaque_layout(PLANES, 16)
_START: Final = header_bytes(len(PLANES))
_OVERRUN_S: Final = 1.2  # of a call that must be found
_NUM_PAGES: Final = 8 * DEPTH
_NUM_SETS: Final = 4  # of slots for one chain each
_NUM_KEPT: Final = 2  # of them with blocks that are compared again
_OFF_S: Final = 0.5  # after which a pool that was switched off is switched on again, as a person would do
_POOL: Final = "pool"
_GOOD: Final = frozenset({"stored", "exists"})


def world(epoch: int, chain: int) -> list[SamplePage]:
    """A chain of the world that workers live in at an epoch."""
    return sample_chain(epoch * NUM_CHAINS + chain, DEPTH, plane_bytes=PLANES)


class _Staging:
    """Host pages in memory that the pool reaches, beside a device in plain memory."""

    def __init__(self, store: MooncakeStore) -> None:
        room = -(-FRAME_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = store.memory(_NUM_PAGES * room)
        self._frames = [memory[i * room : i * room + FRAME_BYTES] for i in range(_NUM_PAGES)]
        self.slots: npt.NDArray[np.uint8] = np.zeros((_NUM_SETS * DEPTH, _LAYOUT.page_bytes), np.uint8)
        self.watch: Callable[[memoryview], None] = lambda frame: None  # hears of pages that we write to ourselves

    @property
    def num_pages(self) -> int:
        return _NUM_PAGES

    def in_place(self, memory: memoryview | None = None) -> None:
        return None

    def frame(self, page: int) -> memoryview:
        return self._frames[page]

    def gather(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        for slot, page in zip(slots, pages, strict=True):
            self.watch(self._frames[page])
            np.copyto(np.frombuffer(self._frames[page], np.uint8)[_START:], self.slots[slot])

    def scatter(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        for slot, page in zip(slots, pages, strict=True):
            np.copyto(self.slots[slot], np.frombuffer(self._frames[page], np.uint8)[_START:])


class _Watched(OpaqueStore):
    """Looks whether memory that a call has given back is as it was then, when the next call is given it."""

    def __init__(self, store: MooncakeStore, log: Log) -> None:
        super().__init__(store)
        self._log = log
        self._digests: dict[int, int] = {}  # by address, of memory that nobody of ours has written to since

    def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """Put. Blocks."""
        try:
            return self.store.put(pages, deadline=deadline)
        finally:
            self._note(pages)

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """Get. Blocks."""
        for _, frame in pages:
            if self._digests.get(_address(frame), (digest := xxhash.xxh3_64_intdigest(frame))) != digest:
                self._log.say("wrong", 1, "somebody wrote into memory that was given back")
            np.frombuffer(frame, np.uint8).fill(0xEE)
        try:
            return self.store.get_into(pages, deadline=deadline)
        finally:
            self._note(pages)

    def forget(self, frame: memoryview) -> None:
        """We write to memory ourselves; so it is looked at before."""
        before = self._digests.pop(_address(frame), None)
        if before is not None and before != xxhash.xxh3_64_intdigest(frame):
            self._log.say("wrong", 1, "somebody wrote into memory that was given back")

    def _note(self, pages: Sequence[tuple[PageName, memoryview]]) -> None:
        for _, frame in pages:
            self._digests[_address(frame)] = xxhash.xxh3_64_intdigest(frame)


def _address(frame: memoryview) -> int:
    return int(np.frombuffer(frame, np.uint8).ctypes.data)


class PoolWorker:
    """A writer or a reader. Works until it is told to end."""

    def __init__(
        self, url: str, directory: Path, name: str, *, seed: int, pace: float, inject: Sequence[str] = ()
    ) -> None:
        """`pace`: how many chains it asks for in a second, at most; 0: as many as it gets."""
        self._log = Log(directory / f"{name}.log")
        self._rng = random.Random(seed)
        self._interval_s = 1 / pace if pace else 0.0
        self._inject = list(inject)
        with (directory / "epoch").open("rb") as file:
            self._shared_epoch = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
        self._epoch = 0
        self._told_to_end = False
        signal.signal(signal.SIGTERM, self._end)
        self._store = MooncakeStore(url)
        self._staging = _Staging(self._store)
        watched = _Watched(self._store, self._log)
        self._staging.watch = watched.forget
        self._worker = Worker(
            {_POOL: watched},
            self._staging,
            layout=_LAYOUT,
            identity=IDENTITY,
            block_tokens=_LAYOUT.block_tokens,
            threads_per_store=4,
            max_extra_threads=4,
        )
        self._caller = Caller(self._worker, [_POOL], identity=IDENTITY, breaker_pause_s=0.25, breaker_max_pause_s=1.0)
        self._worker.deliver = self._caller.deliver
        self._sets = deque(range(_NUM_SETS))  # of slots that nobody uses
        self._kept: deque[tuple[int, int, list[SamplePage]]] = deque()  # a set, its digest, what is in it
        self._deleting: threading.Thread | None = None
        self._heart = Heart(self._log)

    def _end(self, number: int, frame: object) -> None:
        self._told_to_end = True

    def work(self, step: Callable[["PoolWorker", list[SamplePage]], None]) -> None:
        """Until the end; then give everything back, and say so."""
        for chain in range(NUM_CHAINS):
            world(0, chain)  # made before anything counts
        self._heart.start()
        self._log.say("ready")
        chains: list[int] = []
        while not self._told_to_end:
            if not chains:
                chains = self._rng.sample(range(NUM_CHAINS), NUM_CHAINS)
            next_s = time.monotonic() + self._interval_s
            epoch = int.from_bytes(self._shared_epoch[:8], "little")
            if epoch != self._epoch:
                self._epoch = epoch
                sample_page.cache_clear()
            step(self, world(epoch, chains.pop()))
            time.sleep(max(0.0, next_s - time.monotonic()))  # what was missed is not made up for
        while self._kept:
            self._look_again()
        self._heart.stopped = True  # closing the engine may hold the interpreter's lock, and nobody waits for it
        if not self._worker.close(20.0):
            self._log.say("call_not_back")
        self._store.close()
        self._log.say("ended")

    # --- the steps ----------------------------------------------------------------------------------------------------

    def write(self, pages: list[SamplePage]) -> None:
        """Save a chain. Some are now and then removed before, so that there is always something to store."""
        if pages[0].meta.key[0] % 3 == 0 and self._rng.random() < 0.5:
            self._delete([page.name for page in pages])
        slots = range(DEPTH)
        for slot, page in zip(slots, pages, strict=True):
            np.copyto(self._staging.slots[slot], np.frombuffer(page.frame, np.uint8)[_START:])
        first = pages[0].meta
        save = Save(
            job=self._caller.number(),
            store=_POOL,
            keys=_keys(pages),
            deadline_s=time.monotonic() + CALL_S,
            slots=tuple(slots),
            parent=BlockKey(first.parent),
            depth=0,
            tenant=first.tenant,
        )
        self._timed("put", save)

    def read(self, pages: list[SamplePage]) -> None:
        """Load a chain, which verifies it, and compare it."""
        deadline_s = time.monotonic() + CALL_S
        if self._rng.random() < 0.3:
            look = Probe(job=self._caller.number(), store=_POOL, keys=_keys(pages), deadline_s=deadline_s)
            self._timed("contains", look)
        if len(self._kept) >= _NUM_KEPT:
            self._look_again()
        mine = self._sets.popleft()
        slots = range(mine * DEPTH, (mine + 1) * DEPTH)
        load = Load(
            job=self._caller.number(),
            store=_POOL,
            keys=_keys(pages),
            deadline_s=time.monotonic() + CALL_S,
            slots=tuple(slots),
        )
        end = self._timed("check", load)
        num_hits = end.results.count("hit") if isinstance(end, JobDone) else 0
        if num_hits and "wrong" in self._inject:
            self._inject.remove("wrong")
            self._staging.slots[slots[num_hits - 1], -1] ^= 1
        right = self._compare("", mine, pages[:num_hits])
        self._kept.append((mine, self._digest(mine), right))

    def _look_again(self) -> None:
        mine, digest, pages = self._kept.popleft()
        right = self._compare(" some time later", mine, pages)
        if len(right) == len(pages) and self._digest(mine) != digest:
            self._log.say("wrong", 1, "somebody wrote into slots of a load that was over")
        self._sets.append(mine)

    def _digest(self, mine: int) -> int:
        return xxhash.xxh3_64_intdigest(self._staging.slots[mine * DEPTH : (mine + 1) * DEPTH].data)

    def _compare(self, when: str, mine: int, pages: Sequence[SamplePage]) -> list[SamplePage]:
        """Every byte of the first blocks of a set. Returns those before the first that is wrong."""
        for depth, page in enumerate(pages):
            slot = self._staging.slots[mine * DEPTH + depth]
            wrong = int(np.count_nonzero(slot != np.frombuffer(page.frame, np.uint8)[_START:]))
            if wrong:
                self._log.say("wrong", wrong, f"{wrong} bytes of a verified page are wrong{when}: {page.name.hex()}")
                return list(pages[:depth])
        return list(pages)

    # --- the calls ----------------------------------------------------------------------------------------------------

    def _timed(self, kind: str, order: Job) -> End:
        """Have a job done, wait for it, write down how long it took. Its good pages count as work done."""
        begin_s = time.monotonic()
        end = self._caller.call(order)
        if isinstance(end, Stuck):
            raise HeadwaterError(
                f"a copy of job {order.job} hangs, and its slots are in use: pools cannot bring that about"
            )
        if not isinstance(order, Probe):
            self._hold_up(Deadline(order.deadline_s))
        if isinstance(end, JobFailed):
            good, statuses = 0, Counter([end.failure.value])
        else:
            good, statuses = sum(one in _GOOD or one == "hit" for one in end.results), Counter(end.results)
        self._log.say("call", kind, begin_s, order.deadline_s, time.monotonic(), good, statuses)
        if isinstance(end, JobFailed) and end.failure is Reason.DOWN:
            if " is off: " in end.why:
                self._log.say("switched_off")
                time.sleep(_OFF_S)
                self._worker.revive(_POOL)
            time.sleep(BEAT_S)
        return end

    def _delete(self, names: list[PageName]) -> None:
        """Have pages removed, in a thread that nobody waits for longer than for any other call. One at a time."""
        if self._deleting is not None and self._deleting.is_alive():
            return
        delete = lambda: self._store.delete(names, deadline=Deadline.after(CALL_S))  # noqa: E731
        self._deleting = threading.Thread(target=delete, name="headwater delete", daemon=True)
        self._deleting.start()
        self._deleting.join(CALL_S)

    def _hold_up(self, deadline: Deadline) -> None:
        """What must be found: a call that overruns, and one held up by who keeps the interpreter's lock."""
        if "late" in self._inject:
            self._inject.remove("late")
            time.sleep(deadline.remaining_s + _OVERRUN_S)
        elif "held" in self._inject:
            self._inject.remove("held")
            ctypes.PyDLL(None).usleep(int((deadline.remaining_s + _OVERRUN_S) * 1e6))


def _keys(pages: Sequence[SamplePage]) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(page.meta.key) for page in pages)


def main() -> None:
    """Be one of the processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["writer", "reader"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--inject", nargs="*", default=[])
    options = parser.parse_args()
    given = {"seed": options.seed, "pace": options.pace, "inject": options.inject}
    worker = PoolWorker(options.url, options.directory, options.name, **given)
    worker.work(PoolWorker.write if options.role == "writer" else PoolWorker.read)


if __name__ == "__main__":
    main()
