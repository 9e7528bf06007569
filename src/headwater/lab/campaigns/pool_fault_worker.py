"""One process of the fault campaign on a pool (`pool_faults.py`): a writer or a reader.

A worker asks for chain after chain of a small world, as fast as it is answered, through `Calls`, and compares every
byte of every page that was verified with what its name says: at once, and again a while later, before the memory is
used for something else, because a transfer that was given up must not arrive there. What it saw it writes to a log, one
line of JSON for each fact, before anything else happens.

Memory goes back to its pool when the call that has it returned, and its reader is done; from then on nobody may write
there (rule 3), which is looked at when it is given out again.
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
from typing import Final, TypeVar

import numpy as np
import xxhash

from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.lab.campaigns.pool_fault_heart import BEAT_S, Heart, Log
from headwater.layout.frame import frame_bytes
from headwater.storage.base import Deadline
from headwater.storage.bounded import BoundedStore
from headwater.storage.calls import Calls
from headwater.storage.mooncake import MooncakeStore
from headwater.storage.pending import CallEnd, Pending
from headwater.storage.verified import VerifiedStore
from headwater.testing.pages import IDENTITY, SamplePage, sample_chain, sample_page

PLANES: Final = (60_000, 60_000, 5_000, 5_000)
FRAME_BYTES: Final = frame_bytes(PLANES)
NUM_CHAINS: Final = 24
DEPTH: Final = 8
CALL_S: Final = 1.0
_OVERRUN_S: Final = 1.2  # of a call that must be found
_NUM_SETS: Final = 8  # of memory for one chain each
_NUM_KEPT: Final = 2  # of them with pages that are compared again
_OFF_S: Final = 0.5  # after which a reader that switched itself off is switched on again, as a person would do

S = TypeVar("S")


def world(epoch: int, chain: int) -> list[SamplePage]:
    """A chain of the world that workers live in at an epoch."""
    return sample_chain(epoch * NUM_CHAINS + chain, DEPTH, plane_bytes=PLANES)


class _Sets:
    """Memory for chains, given out again only when nobody has it any more, and looked at whether that was so."""

    def __init__(self, store: MooncakeStore, log: Log) -> None:
        room = -(-FRAME_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = store.memory(_NUM_SETS * DEPTH * room)
        frames = [memory[i * room : i * room + FRAME_BYTES] for i in range(_NUM_SETS * DEPTH)]
        sets = [frames[i : i + DEPTH] for i in range(0, len(frames), DEPTH)]
        self._free = deque((one, _digests(one)) for one in sets)
        self._log = log

    def take(self, num_owners: int) -> "_Taken | None":
        if not self._free:
            return None
        frames, digests = self._free.popleft()
        if _digests(frames) != digests:
            self._log.say("wrong", 1, "somebody wrote into memory that was given back")
        return _Taken(self._free, frames, num_owners)


class _Taken:
    def __init__(self, free: deque[tuple[list[memoryview], list[int]]], frames: list[memoryview], owners: int) -> None:
        self.frames = frames
        self._free = free
        self._left = owners
        self._lock = threading.Lock()

    def give_back(self) -> None:
        """One owner is done."""
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._free.append((self.frames, _digests(self.frames)))


def _digests(frames: Sequence[memoryview]) -> list[int]:
    return [xxhash.xxh3_64_intdigest(frame) for frame in frames]


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
        self._sets = _Sets(self._store, self._log)
        self._calls = Calls(self._store, breaker_pause_s=0.25, breaker_max_pause_s=1.0)
        self._reader = VerifiedStore(BoundedStore(self._calls), identity=IDENTITY, plane_bytes=PLANES)
        self._kept: deque[tuple[_Taken, list[tuple[SamplePage, memoryview]]]] = deque()
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
        if not self._calls.close(20.0):
            self._log.say("call_not_back")
        self._store.close()
        self._log.say("ended")

    # --- the steps ----------------------------------------------------------------------------------------------------

    def write(self, pages: list[SamplePage]) -> None:
        """Put a chain. Some are now and then removed before, so that there is always something to store."""
        if pages[0].meta.key[0] % 3 == 0 and self._rng.random() < 0.5:
            names = [page.name for page in pages]
            self._timed(lambda deadline: self._calls.delete(names, deadline=deadline))
        taken = self._sets.take(1)
        if taken is None:
            self._wait("no_memory")
            return
        for page, frame in zip(pages, taken.frames, strict=True):
            np.copyto(np.frombuffer(frame, np.uint8), np.frombuffer(page.frame, np.uint8))
        items = [(page.name, frame) for page, frame in zip(pages, taken.frames, strict=True)]
        self._timed(lambda deadline: self._calls.put(items, deadline=deadline, on_return=taken.give_back))

    def read(self, pages: list[SamplePage]) -> None:
        """Get a chain, verify it, compare it."""
        if self._rng.random() < 0.3:
            names = [page.name for page in pages]
            self._timed(lambda deadline: self._calls.contains(names, deadline=deadline))
        if self._reader.switched_off:
            self._wait("switched_off", _OFF_S)
            self._reader.switch_on()
        if len(self._kept) >= _NUM_KEPT:
            self._look_again()
        taken = self._sets.take(2)
        if taken is None:
            self._wait("no_memory")
            return
        for frame in taken.frames:
            np.frombuffer(frame, np.uint8).fill(0xEE)
        items = [(page.name, frame) for page, frame in zip(pages, taken.frames, strict=True)]
        get = self._timed(
            lambda deadline: self._calls.get_into(items, deadline=deadline, on_return=taken.give_back), count=False
        )
        checked = self._check(items, get)
        hits = [
            (page, frame)
            for page, frame, status in zip(pages, taken.frames, checked, strict=True)
            if status is Status.HIT
        ]
        if hits and "wrong" in self._inject:
            self._inject.remove("wrong")
            hits[-1][1][-1] ^= 1
        self._kept.append((taken, self._compare("", hits)))

    def _check(self, items: Sequence[tuple[PageName, memoryview]], get: Pending[Status]) -> list[Status]:
        begin_s = time.monotonic()
        checked = self._reader.check(items, get.answers, deadline=get.deadline)
        statuses = Counter(status.value for status in checked)
        self._say_call("check", begin_s, get.deadline.at_s, checked.count(Status.HIT), statuses)
        return checked

    def _look_again(self) -> None:
        taken, hits = self._kept.popleft()
        self._compare(" some time later", hits)
        taken.give_back()

    def _compare(self, when: str, hits: Sequence[tuple[SamplePage, memoryview]]) -> list[tuple[SamplePage, memoryview]]:
        """Every byte. Returns those that are right."""
        right = []
        for page, frame in hits:
            wrong = int(np.count_nonzero(np.frombuffer(frame, np.uint8) != np.frombuffer(page.frame, np.uint8)))
            if not wrong:
                right.append((page, frame))
            else:
                self._log.say("wrong", wrong, f"{wrong} bytes of a verified page are wrong{when}: {page.name.hex()}")
        return right

    # --- the calls ----------------------------------------------------------------------------------------------------

    def _timed(self, ask: Callable[[Deadline], Pending[S]], *, count: bool = True) -> Pending[S]:
        """Make a call, wait for it, write down how long it took. `count`: its good pages count as work done."""
        begin_s, deadline = time.monotonic(), Deadline.after(CALL_S)
        call = ask(deadline)
        answers = call.wait()
        self._hold_up(deadline)
        good = sum(isinstance(one, Status) and one.held for one in answers) if count else 0
        statuses = Counter(str(one) for one in answers) if call.end is CallEnd.ANSWERED else Counter([f"{call.end}"])
        self._say_call(call.sort.name, begin_s, deadline.at_s, good, statuses)
        if call.end in (CallEnd.LEFT_ALONE, CallEnd.NO_THREAD):
            time.sleep(BEAT_S)
        return call

    def _say_call(self, kind: str, begin_s: float, deadline_s: float, good: int, statuses: Counter[str]) -> None:
        self._log.say("call", kind, begin_s, deadline_s, time.monotonic(), good, statuses)

    def _hold_up(self, deadline: Deadline) -> None:
        """What must be found: a call that overruns, and one held up by who keeps the interpreter's lock."""
        if "late" in self._inject:
            self._inject.remove("late")
            time.sleep(deadline.remaining_s + _OVERRUN_S)
        elif "held" in self._inject:
            self._inject.remove("held")
            ctypes.PyDLL(None).usleep(int((deadline.remaining_s + _OVERRUN_S) * 1e6))

    def _wait(self, why: str, seconds: float = BEAT_S) -> None:
        self._log.say(why)
        time.sleep(seconds)


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
