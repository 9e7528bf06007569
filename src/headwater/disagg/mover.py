"""A mover: one page of every block of a prompt, tail included, between device slots and the pool. A rank has a few.

What a rank holds of a block is one page, or several where its planes are cut in several ways (`layout/shard.py`). A
mover moves one of them, named by its `Naming`; all movers of an engine together move a handoff (`handoff.py`).

Writing asks first what the pool has: a prompt's prefix is mostly there, from other requests or because the cache has
saved it meanwhile. It writes the rest, then the tail, and then looks whether all of it is there (rule 7): a pool that
makes room page by page may have dropped the first block for the last. Reading goes on where it stopped, a few times.

Invariants:
- `Moved.num_blocks` counts from the prompt's first block, without a gap: seen durable, or verified and in its slot.
- Both return by the deadline + the grace of one call + the copies of two pieces, and touch no slot after that (rule 2).
- A request uses the pages of one lane, and shares them with nobody.
"""

import time
from collections.abc import Callable, Sequence

from headwater.config import WriteConfig
from headwater.core.errors import InvalidConfig, InvalidInput
from headwater.core.page import PageName
from headwater.core.results import Reason
from headwater.disagg.lanes import Lane, Lanes
from headwater.disagg.outcome import AGAIN_READ, AGAIN_WRITE, Moved, why_call, why_row
from headwater.disagg.prompt import NamedPrompt
from headwater.disagg.protocol import Tail
from headwater.disagg.tails import read_tail, require_tails, write_tail
from headwater.layout.frame import PageMeta
from headwater.metrics import Metrics
from headwater.storage.base import SYSTEM_CLOCK, Clock, Deadline, Store
from headwater.storage.bounded import BoundedStore
from headwater.storage.calls import Calls
from headwater.storage.verified import VerifiedStore
from headwater.transfer.executor.slices import Slices
from headwater.transfer.executor.staging import Staging
from headwater.transfer.executor.tier import Naming

_BACK_ON_S = 10.0  # a pool that gave nothing but bad pages is read again after so long


class _Source:
    """A store that is read or written: its calls, who verifies, and slices on each lane."""

    def __init__(
        self, calls: Calls, lanes: Lanes, *, naming: Naming, config: WriteConfig, clock: Clock, metrics: Metrics
    ) -> None:
        self.calls = calls
        self.reader = VerifiedStore(
            BoundedStore(calls),
            identity=naming.identity,
            plane_bytes=naming.layout.plane_bytes,
            clock=clock,
            metrics=metrics,
        )
        self.slices: dict[Lane, Slices] = {}
        for lane in lanes.lanes:
            slices = Slices(calls, lane.staging, lane.pool, naming=naming, config=config, clock=clock, metrics=metrics)
            slices.reader = self.reader  # one judges for all: whether a pool is bad is not a lane's affair
            self.slices[lane] = slices
        self._clock = clock
        self._off_since_s: float | None = None

    def wake(self) -> None:
        """Let a reader that turned itself off try again, after a while."""
        if not self.reader.switched_off:
            self._off_since_s = None
        elif self._off_since_s is None:
            self._off_since_s = self._clock.monotonic()
        elif self._clock.monotonic() - self._off_since_s >= _BACK_ON_S:
            self._off_since_s = None
            self.reader.switch_on()


class Mover:
    """Moves one page of every block. Several threads may use it at once, as many as it has lanes; others wait."""

    def __init__(
        self,
        store: Store | Calls,
        staging: Staging,
        *,
        naming: Naming,
        view: Store | Calls | None = None,
        num_lanes: int = 4,
        num_tries: int = 3,
        pause_s: float = 0.02,
        config: WriteConfig | None = None,
        clock: Clock = SYSTEM_CLOCK,
        metrics: Metrics | None = None,
    ) -> None:
        """Owns neither stores nor staging, whose pages must be its alone. A Calls may be shared: it is not closed here.

        `view` has what groups of other tensor-parallel sizes wrote, as pages of ours (`storage/resharded.py`).
        Raises InvalidConfig.
        """
        require_tails(naming.layout)
        if num_tries < 1 or not 0 <= pause_s < float("inf"):
            raise InvalidConfig(f"at least one try and a pause of seconds, not {num_tries} and {pause_s}")
        self.naming = naming
        self._num_tries = num_tries
        self._pause_s = pause_s
        self._clock = clock
        self._metrics = metrics = metrics if metrics is not None else Metrics()
        self._own_calls: list[Calls] = []
        calls = self._calls(store, "pool")
        seen = self._calls(view, "pool_tp") if view is not None else None
        names = {calls.name} | ({seen.name} if seen is not None else set())
        self._lanes = Lanes(staging, num_lanes=num_lanes, stores=names)
        config = config if config is not None else WriteConfig()
        self._source = _Source(calls, self._lanes, naming=naming, config=config, clock=clock, metrics=metrics)
        self._view = (
            _Source(seen, self._lanes, naming=naming, config=config, clock=clock, metrics=metrics)
            if seen is not None
            else None
        )

    @property
    def has_view(self) -> bool:
        """Whether pages of other tensor-parallel sizes can be read."""
        return self._view is not None

    @property
    def tier(self) -> str:
        """What the pool is called."""
        return self._source.calls.name

    @property
    def num_held_pages(self) -> int:
        """Staging pages in use, those included that calls which do not return keep."""
        return self._lanes.num_held

    def write(
        self,
        prompt: NamedPrompt,
        slots: Sequence[int],
        *,
        expires_at_ms: int,
        deadline: Deadline,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Moved:
        """Have all blocks of a prompt in the pool, from slots whose every position of the prompt is computed (rule 1).

        `expires_at_ms` is the tail's. Blocks, until the deadline. Raises InvalidInput where slots and blocks differ.
        """
        self._require_slots(prompt, slots, 0, prompt.num_blocks)

        def once(lane: Lane, moved: Moved) -> Moved:
            return self._write_once(lane, prompt, slots, expires_at_ms, deadline, stopped)

        return self._repeat(once, AGAIN_WRITE, Moved(0), deadline, stopped)

    def read(
        self,
        prompt: NamedPrompt,
        slots: Sequence[int],
        *,
        start_block: int = 0,
        end_block: int | None = None,
        resharded: bool = False,
        deadline: Deadline,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Moved:
        """Read blocks `start_block` to `end_block` (None: all) into slots, verified; those before count as there.

        `resharded`: from the view. Blocks, until the deadline. Raises InvalidInput where slots and blocks differ.
        """
        end = prompt.num_blocks if end_block is None else end_block
        self._require_slots(prompt, slots, start_block, end)
        source = self._view if resharded else self._source
        if source is None:
            raise InvalidInput("there is no view of other tensor-parallel sizes to read from")
        source.wake()

        def once(lane: Lane, moved: Moved) -> Moved:
            rest = slots[moved.num_blocks - start_block :]
            return self._read_once(lane, source, prompt, rest, moved.num_blocks, end, deadline, stopped)

        return self._repeat(once, AGAIN_READ, Moved(start_block), deadline, stopped)

    def look(self, prompt: NamedPrompt, *, deadline: Deadline) -> Moved:
        """How many blocks of a prompt the pool has, the tail included, without a gap. Blocks, until the deadline."""
        tail = [prompt.tail.key] if prompt.tail is not None else []
        return self._seen([self.naming.name(key) for key in (*prompt.keys, *tail)], deadline)

    def close(self, timeout_s: float = 10.0) -> bool:
        """End the threads of its own; idempotent. False: a call has not returned, so store and staging must stay."""
        closed = [calls.close(timeout_s) for calls in self._own_calls]  # each, also after one that is stuck
        return all(closed)

    # ------------------------------------------------------------------------------------------------------------------

    def _calls(self, store: Store | Calls, name: str) -> Calls:
        if isinstance(store, Calls):
            return store
        self._own_calls.append(Calls(store, name=name, clock=self._clock, metrics=self._metrics))
        return self._own_calls[-1]

    @staticmethod
    def _require_slots(prompt: NamedPrompt, slots: Sequence[int], start: int, end: int) -> None:
        if not 0 <= start <= end <= prompt.num_blocks or len(slots) != end - start:
            raise InvalidInput(f"blocks {start} to {end} of {prompt.num_blocks}, and {len(slots)} slots")

    def _repeat(
        self,
        once: Callable[[Lane, Moved], Moved],
        again: frozenset[Reason],
        moved: Moved,
        deadline: Deadline,
        stopped: Callable[[], bool],
    ) -> Moved:
        """Try until it is done, of no use, or over. What was first wrong with the last block is the reason."""
        start, num_bytes, num_tries = moved.num_blocks, 0, 0
        reason, detail, at = None, "", -1
        with self._lanes.use(deadline, stopped) as lane:
            if isinstance(lane, Reason):
                return Moved(start, lane, _NO_LANE[lane])
            while True:
                num_tries += 1
                moved = once(lane, moved)
                num_bytes += moved.num_bytes
                if moved.reason is None:
                    return Moved(moved.num_blocks, None, "", num_bytes, num_tries)
                if not (moved.num_blocks == at and moved.reason is Reason.MISSING):  # a bad page was removed since
                    reason, detail = moved.reason, moved.detail
                at = moved.num_blocks
                over = num_tries >= self._num_tries or stopped() or deadline.remaining_s <= self._pause_s
                if over or moved.reason not in again:
                    return Moved(moved.num_blocks, reason, detail, num_bytes, num_tries)
                time.sleep(self._pause_s)

    # --- writing ------------------------------------------------------------------------------------------------------

    def _write_once(
        self,
        lane: Lane,
        prompt: NamedPrompt,
        slots: Sequence[int],
        expires_at_ms: int,
        deadline: Deadline,
        stopped: Callable[[], bool],
    ) -> Moved:
        keys, tail = prompt.keys, prompt.tail
        names = [self.naming.name(key) for key in keys]
        held = self._seen(names, deadline)
        if held.reason not in (None, Reason.MISSING):
            return held
        start, num_bytes = held.num_blocks, 0
        if start < len(keys):
            reached = self._source.slices[lane].write(
                keys[start:],
                slots[start : len(keys)],
                parent=keys[start - 1] if start else prompt.root,
                depth=start,
                tenant=prompt.tenant,
                timeout_s=max(deadline.remaining_s, _LEAST_S),
                stopped=stopped,
            )
            num_bytes = reached.num_blocks * self.naming.frame_bytes
            reason = why_row(reached)
            if reason is not None:
                return Moved(start + reached.num_blocks, reason, reached.detail, num_bytes)
        if tail is not None:
            meta = self._tail_meta(prompt, tail, expires_at_ms)
            now_ms = int(self._clock.time() * 1000)
            layout = self.naming.layout
            put = write_tail(lane, self._source.calls, meta, slots[-1], layout=layout, now_ms=now_ms, deadline=deadline)
            num_bytes += put.num_bytes
            self._moved("in", put.num_bytes)
            if put.reason is not None:
                return Moved(len(keys), put.reason, put.detail, num_bytes)
        seen = self.look(prompt, deadline=deadline)
        return Moved(seen.num_blocks, seen.reason, seen.detail, num_bytes)

    def _seen(self, names: Sequence[PageName], deadline: Deadline) -> Moved:
        """How many of a row of pages the pool has, from the first on. Whole only where it has all."""
        call = self._source.calls.contains(names, deadline=deadline)
        there = call.wait()
        reason = why_call(call)
        if reason is not None:
            return Moved(0, reason, call.why)
        if all(there):
            return Moved(len(names))
        at = there.index(False)
        if deadline.expired:  # in doubt a store says no
            return Moved(at, Reason.LATE, "no time was left to look")
        return Moved(at, Reason.MISSING, f"block {at} is not in the pool")

    def _moved(self, direction: str, num_bytes: int) -> None:
        """Count a tail's bytes; slices count those of full blocks."""
        if num_bytes:
            self._metrics.count("moved_bytes_total", num_bytes, tier=self.tier, direction=direction)

    def _tail_meta(self, prompt: NamedPrompt, tail: Tail, expires_at_ms: int) -> PageMeta:
        return PageMeta(
            key=tail.key,
            identity=self.naming.identity,
            parent=prompt.keys[-1] if prompt.keys else prompt.root,
            depth=len(prompt.keys),
            valid_tokens=tail.valid_tokens,
            tenant=prompt.tenant,
            shard_index=self.naming.shard.index,
            shard_count=self.naming.shard.count,
            part=self.naming.part,
            expires_at_ms=expires_at_ms,
        )

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read_once(
        self,
        lane: Lane,
        source: _Source,
        prompt: NamedPrompt,
        slots: Sequence[int],
        start: int,
        end: int,
        deadline: Deadline,
        stopped: Callable[[], bool],
    ) -> Moved:
        """Blocks `start` to `end` into their slots."""
        keys, num_bytes = prompt.keys[start:end], 0
        if keys:
            timeout_s = max(deadline.remaining_s, _LEAST_S)
            row = slots[: len(keys)]
            reached = source.slices[lane].read(keys, row, depth=start, timeout_s=timeout_s, stopped=stopped)
            num_bytes = reached.num_blocks * self.naming.frame_bytes
            reason = why_row(reached)
            if reason is not None:
                return Moved(start + reached.num_blocks, reason, reached.detail, num_bytes)
        if prompt.tail is None or start == end or end < prompt.num_blocks:
            return Moved(end, num_bytes=num_bytes)
        tail = read_tail(
            lane,
            source.calls,
            source.reader,
            self._tail_meta(prompt, prompt.tail, 0),
            slots[-1],
            layout=self.naming.layout,
            deadline=deadline,
            metrics=self._metrics,
        )
        self._moved("out", tail.num_bytes)
        return Moved(len(prompt.keys) + tail.num_blocks, tail.reason, tail.detail, num_bytes + tail.num_bytes)


_LEAST_S = 1e-6  # a deadline that has passed is told as such by who looks at it
_NO_LANE = {
    Reason.CANCELLED: "nobody wants it any more",
    Reason.LATE: "no lane was free in time",
    Reason.DOWN: "the pool's calls keep all pages",
}
