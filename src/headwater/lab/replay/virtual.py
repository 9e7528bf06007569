"""An executor in virtual time, over stores that count: a store is a set of names with a limit, and no byte moves.

`CountingStore` keeps to what `storage.base` asks of a store: it takes no block without the one before it, evicts leaves
only, in the order of the production policy, and answers one status per block. `CountingExecutor` runs the brain's jobs
on such stores. Without a speed each job ends at the moment it is given. With one, the loads of a store follow each
other, and so do its saves (copies from another store among them), each by its bytes; a job that would end behind its
deadline fails there, as late.

Not here: bytes, verification (nothing is ever corrupt), and any decision but who leaves a full store.
Invariants: each job ends exactly once. Events come in the order of their time, those of one moment in the order given.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    StoreCopy,
)
from headwater.core.keys import BlockKey
from headwater.core.results import Reason, Status
from headwater.policy import BlockFacts, History, LeafOrder, policy_by_name


@dataclass(slots=True)
class _VirtualBlock:
    parent: BlockKey
    depth: int
    hits: int = 0


class CountingStore:
    """The names a store of `num_blocks` would hold."""

    def __init__(self, num_blocks: int, *, policy: str, block_bytes: int) -> None:
        self.num_blocks = num_blocks
        self.num_evicted = self.num_read = self.num_written = 0
        self._policy = policy_by_name(policy)
        self._block_bytes = block_bytes
        self._blocks: dict[BlockKey, _VirtualBlock] = {}
        self._order: LeafOrder[BlockKey] = LeafOrder()
        self._history: History[BlockKey] | None = History(lambda: self._order) if self._policy.looks_back else None

    def __len__(self) -> int:
        """Blocks held."""
        return len(self._blocks)

    def contains(self, keys: Sequence[BlockKey]) -> list[Status]:
        """Which blocks are there, as a Probe has it. Counts as no use."""
        return [Status.HELD if key in self._blocks else Status.ABSENT for key in keys]

    def get(self, keys: Sequence[BlockKey], *, now_s: float) -> list[Status]:
        """Read a row, up to the first block that is not there."""
        found = next((i for i, key in enumerate(keys) if key not in self._blocks), len(keys))
        for key in keys[:found]:
            self._use(key, self._blocks[key], now_s)
        self.num_read += found
        return [Status.HIT] * found + [Status.MISS] * (len(keys) - found)

    def put(self, keys: Sequence[BlockKey], *, parent: BlockKey, depth: int, now_s: float) -> list[Status]:
        """Write a row behind `parent`, which must be held unless the row is a sequence's first."""
        results = []
        for at, key in enumerate(keys, depth):
            results.append(self._put(key, parent, at, now_s))
            parent = key
        self.num_written += results.count(Status.STORED)
        return results

    def _put(self, key: BlockKey, parent: BlockKey, depth: int, now_s: float) -> Status:
        if key in self._blocks:
            return Status.EXISTS  # and no use: the production worker asks first, and leaves out what is there
        if depth and parent not in self._blocks:
            return Status.NO_PARENT
        if len(self._blocks) >= self.num_blocks:
            victim = self._order.pop(spare={parent})
            if victim is None:
                return Status.NO_ROOM
            del self._blocks[victim[0]]
            self.num_evicted += 1
            if self._history is not None:
                self._history.evicted(victim[0])
        self._blocks[key] = _VirtualBlock(parent, depth)
        facts = BlockFacts(used_s=now_s, hits=0, depth=depth, num_bytes=self._block_bytes)
        if self._history is not None:
            facts = self._history.inserted(key, parent, now_s, depth=depth, num_bytes=self._block_bytes)
        self._order.add(key, parent, self._policy.priority(facts))
        return Status.STORED

    def place(self, key: BlockKey) -> tuple[BlockKey, int]:
        """What a held block builds on, and how deep it lies."""
        block = self._blocks[key]
        return block.parent, block.depth

    def validate(self) -> None:
        """Raise AssertionError if the store contradicts itself. Reads everything."""
        self._order.validate()
        assert len(self._order) == len(self._blocks) <= self.num_blocks, "more blocks than there is room for"  # noqa: S101

    def _use(self, key: BlockKey, block: _VirtualBlock, now_s: float) -> None:
        block.hits += 1
        facts = BlockFacts(used_s=now_s, hits=block.hits, depth=block.depth, num_bytes=self._block_bytes)
        if self._history is not None:
            facts = self._history.hit(key, now_s, depth=block.depth, num_bytes=self._block_bytes)
        self._order.touch(key, self._policy.priority(facts))


class CountingExecutor:
    """Runs the brain's jobs. Nothing happens by itself: `next_s` says when something is due, `due` does it."""

    def __init__(
        self, stores: Mapping[str, CountingStore], *, block_bytes: int, gbs: Mapping[str, float | None]
    ) -> None:
        """`gbs`: how fast each store reads, and how fast it writes, in GB/s; None: at once."""
        self.num_saved = 0  # blocks that were copied from the device to be written
        self._stores = stores
        self._block_s = {name: 0.0 if fast is None else block_bytes / (fast * 1e9) for name, fast in gbs.items()}
        self._block_bytes = block_bytes
        self._jobs: dict[int, Job] = {}  # under way
        self._ends_s: dict[int, float] = {}  # when they end
        self._queue: list[tuple[float, int, int, bool]] = []  # when, in which order, which job, whether it fails then
        self._order = 0
        self._free_s: dict[tuple[str, bool], float] = {}  # by store and direction: when its last job ends

    @property
    def next_s(self) -> float | None:
        """When the next job ends; None if none is under way."""
        while self._queue and self._queue[0][2] not in self._jobs:
            heapq.heappop(self._queue)
        return self._queue[0][0] if self._queue else None

    def submit(self, instructions: Sequence[Instruction], *, now_s: float) -> list[Event]:
        """Begin jobs, or cancel them. Returns what there is to report at once."""
        events: list[Event] = []
        for one in instructions:
            if isinstance(one, Job):
                self._begin(one, now_s)
                if isinstance(one, Save):
                    self.num_saved += len(one.keys)
                    events.append(Copied(now_s=now_s, job=one.job))
            elif isinstance(one, Cancel) and self._jobs.pop(one.job, None) is not None:
                del self._ends_s[one.job]
                events.append(JobFailed(now_s=now_s, job=one.job, failure=Reason.CANCELLED))
        return events

    def due(self) -> Event:
        """End the next job, at its time. There must be one: see `next_s`."""
        now_s = self.next_s
        assert now_s is not None, "no job is under way"  # noqa: S101
        _, _, number, late = heapq.heappop(self._queue)
        job = self._jobs.pop(number)
        del self._ends_s[number]
        if late:
            return JobFailed(now_s=now_s, job=number, failure=Reason.LATE)
        results, num_moved = self._run(job, now_s)
        return JobDone(
            now_s=now_s,
            job=number,
            results=results,
            num_bytes=num_moved * self._block_bytes,
            seconds=num_moved * self._seconds(job),
        )

    def _begin(self, job: Job, now_s: float) -> None:
        end_s, late = now_s, False
        if not isinstance(job, Probe):
            lane = (job.target, False) if isinstance(job, StoreCopy) else (job.store, isinstance(job, Load))
            begin_s = self._ends_s.get(job.after, now_s) if isinstance(job, Save | Demote) else now_s
            end_s = max(begin_s, self._free_s.get(lane, now_s)) + self._seconds(job) * len(job.keys)
            late = end_s > job.deadline_s
            end_s = max(now_s, job.deadline_s) if late else end_s
            self._free_s[lane] = max(end_s, self._free_s.get(lane, end_s))
        self._jobs[job.job] = job
        self._ends_s[job.job] = end_s
        self._order += 1
        heapq.heappush(self._queue, (end_s, self._order, job.job, late))

    def _seconds(self, job: Job) -> float:
        """What a block takes: of a copy from store to store, by the slower of the two."""
        stores = (job.store, job.target) if isinstance(job, StoreCopy) else (job.store,)
        return max(self._block_s[store] for store in stores)

    def _run(self, job: Job, now_s: float) -> tuple[tuple[Status, ...], int]:
        """Do a job at the moment it ends: its results, and how many blocks it moved."""
        store = self._stores[job.store]
        if isinstance(job, Probe):
            return tuple(store.contains(job.keys)), 0
        if isinstance(job, Load):
            got = store.get(job.keys, now_s=now_s)
            return tuple(got), got.count(Status.HIT)
        put: list[Status] = []
        if isinstance(job, Save):
            put += store.put(job.keys, parent=job.parent, depth=job.depth, now_s=now_s)
        else:
            put += self._copy(job, now_s)
        return tuple(put), put.count(Status.STORED)

    def _copy(self, job: Job, now_s: float) -> list[Status]:
        assert isinstance(job, StoreCopy), "a job of no known sort"  # noqa: S101
        source, target = self._stores[job.store], self._stores[job.target]
        if isinstance(job, Demote):  # that counts as no use
            num_hit = next((i for i, one in enumerate(source.contains(job.keys)) if one != "held"), len(job.keys))
        else:
            num_hit = source.get(job.keys, now_s=now_s).count(Status.HIT)
        put: list[Status] = []
        if num_hit:
            parent, depth = source.place(job.keys[0])
            put += target.put(job.keys[:num_hit], parent=parent, depth=depth, now_s=now_s)
        lacking = Status.MISS if isinstance(job, Demote) else Status.FAILED
        return put + [lacking] * (len(job.keys) - num_hit)
