"""Slices: rows of blocks written to a store and read from it, slice by slice, each by its deadline.

A row is cut into slices of `slice_blocks`; slice [s, e) is the row's blocks s to e, and has `slice_timeout_s`, or what
is left of the total if that is less. A slice that needs more pages than there are is worked in smaller *pieces*. While
a piece is being put, the next one, of the same slice or of the next, is gathered and sealed; while a piece is verified
and scattered, the next one is on its way.

The store is called through `Calls`, so a call that blocks is given up at its deadline, and keeps its pages until it
returns (rule 3). Runs in the thread of whoever asks; decides nothing about what is worth writing, and keeps nothing
between calls. Which tokens the blocks are of is `attention_store.py`'s business.

Invariants:
- The result counts blocks from the row's first, without a gap: each was answered STORED or EXISTS, or was verified in
  the page that it was scattered from (rules 4, 7). It is never more than that, whatever went wrong.
- Nothing is put behind a block that is not known to be durable, but for pages of the same put. So a write leaves no
  hole in a store that knows parents. One that does not may keep the rest of that put: right pages, out of reach until
  the gap is filled.
- `write` and `read` return by the total deadline + the grace of one call + the copies of two pieces.
- After they returned no slot of the row is read or written any more (rule 2).
- Who waits for pages holds none.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, Final, TypeVar

from headwater.config import WriteConfig
from headwater.core.errors import InvalidInput
from headwater.core.events import NO_TENANT, Save
from headwater.core.keys import BlockKey
from headwater.core.results import Status
from headwater.metrics import Metrics
from headwater.storage.base import SYSTEM_CLOCK, Clock
from headwater.storage.bounded import BoundedStore
from headwater.storage.calls import Calls
from headwater.storage.pending import CallEnd, Pending
from headwater.storage.sealed import seal_pages
from headwater.storage.verified import VerifiedStore
from headwater.transfer.executor.pages import PagePool
from headwater.transfer.executor.row import Ended, Lease, Piece, Reached, Row, Why
from headwater.transfer.executor.staging import Staging
from headwater.transfer.executor.tier import Naming

log: Final = logging.getLogger("headwater")

T = TypeVar("T")

_SHARE: Final = 4  # a piece takes at most one of so many parts of the pool: two are in use, and others come too
_NO_PARENT: Final = BlockKey(bytes(32))  # of what is read: the pages say themselves where they belong


class Slices:
    """Sliced writes and reads of one device and one store. Several threads may use it at once; it owns nothing."""

    def __init__(
        self,
        calls: Calls,
        staging: Staging,
        pool: PagePool,
        *,
        naming: Naming,
        config: WriteConfig | None = None,
        clock: Clock = SYSTEM_CLOCK,
        metrics: Metrics | None = None,
    ) -> None:
        """`pool` counts `staging`'s pages, and knows the store as `calls.name`. Raises InvalidInput."""
        if len(staging.frame(0)) != naming.frame_bytes:
            raise InvalidInput(f"a frame has {naming.frame_bytes} bytes, a page of staging {len(staging.frame(0))}")
        self._calls = calls
        self._staging = staging
        self._pool = pool
        self._naming = naming
        self._config = config if config is not None else WriteConfig()
        self._clock = clock
        self._metrics = metrics if metrics is not None else Metrics()
        self._piece_blocks = max(1, pool.num_pages // _SHARE)
        #: Verifies; turns itself off where nothing but bad pages comes, and can be switched on again.
        self.reader = VerifiedStore(
            BoundedStore(calls),
            identity=naming.identity,
            plane_bytes=naming.layout.plane_bytes,
            clock=clock,
            metrics=self._metrics,
        )

    def write(
        self,
        keys: Sequence[BlockKey],
        slots: Sequence[int],
        *,
        parent: BlockKey,
        depth: int = 0,
        tenant: bytes = NO_TENANT,
        timeout_s: float | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Reached:
        """Write a row of full blocks from device slots. Blocks, by the deadlines; raises InvalidInput only.

        `parent` is the key before the first, which lies at `depth`. `timeout_s` is the total, the configuration's
        unless given. `stopped` is asked before each piece, and must not block. The slots must not change meanwhile.
        """
        row = self._row(keys, slots, parent, depth, tenant, timeout_s, stopped)
        return self._run("write", row, self._write)

    def read(
        self,
        keys: Sequence[BlockKey],
        slots: Sequence[int],
        *,
        depth: int = 0,
        timeout_s: float | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Reached:
        """Read a row of blocks into device slots, verified. Blocks, by the deadlines; raises InvalidInput only.

        Slots behind the result are as they were, but for one piece's where the device itself failed.
        """
        row = self._row(keys, slots, _NO_PARENT, depth, NO_TENANT, timeout_s, stopped)
        return self._run("read", row, self._read)

    def _row(
        self,
        keys: Sequence[BlockKey],
        slots: Sequence[int],
        parent: BlockKey,
        depth: int,
        tenant: bytes,
        timeout_s: float | None,
        stopped: Callable[[], bool],
    ) -> Row:
        if len(keys) != len(slots):
            raise InvalidInput(f"{len(keys)} blocks and {len(slots)} slots")
        timeout_s = self._config.total_timeout_s if timeout_s is None else timeout_s
        if not 0 < timeout_s < float("inf"):
            raise InvalidInput(f"a timeout is a positive number of seconds, not {timeout_s}")
        order = Save(
            job=0,
            store=self._calls.name,
            keys=tuple(keys),
            deadline_s=0.0,
            slots=tuple(slots),
            parent=parent,
            depth=depth,
            tenant=tenant,
        )
        return Row(order, config=self._config, timeout_s=timeout_s, clock=self._clock, stopped=stopped)

    def _run(self, call: str, row: Row, work: Callable[[Row], None]) -> Reached:
        """Do it, and say in the log and the counters what came of it: once."""
        why, detail, status = Why.WHOLE, "", ""
        try:
            work(row)
        except Ended as ended:
            why, detail, status = ended.why, ended.detail, ended.status
        self._metrics.count("sliced_total", tier=self._calls.name, call=call, why=why.value)
        log.log(
            logging.DEBUG if why is Why.WHOLE else logging.WARNING,
            "%s of %d blocks from block %d on, store %s: %d done, %s%s",
            *(call, row.num_blocks, row.order.depth, self._calls.name, row.num_done, why.value),
            f" ({detail})" if detail else "",
        )
        return Reached(row.num_done, why, detail, status)

    # --- writing ------------------------------------------------------------------------------------------------------

    def _write(self, row: Row) -> None:
        piece = self._gathered(row, 0)
        while piece is not None:
            # The call has the pages from here on: they come back when it returns, however late that is.
            call = self._calls.put(piece.items, deadline=row.deadline(piece.start), on_return=piece.lease.end)
            ahead = _ahead(partial(self._gathered, row, piece.end, wait=False))
            try:
                self._count_durable(row, call)
            except BaseException:
                if ahead is not None:
                    ahead.lease.end()
                raise
            piece = ahead if ahead is not None else self._gathered(row, row.num_done)

    def _gathered(self, row: Row, start: int, *, wait: bool = True) -> Piece | None:
        """The piece that begins there, gathered and sealed. None: that is the end, or it would have had to wait."""
        lease = self._lease(row, start, load=False, wait=wait)
        if lease is None:
            return None
        end = start + len(lease.pages)
        try:
            with _raising("the device"):
                digests = self._staging.gather(row.order.slots[start:end], lease.pages)
                frames = [self._staging.frame(page) for page in lease.pages]
                metas = [self._naming.meta(row.order, at) for at in range(start, end)]
                now_ms = int(self._clock.time() * 1000)
                seal_pages(list(zip(metas, frames, strict=True)), self._naming.layout, now_ms=now_ms, digests=digests)
        except BaseException:
            lease.end()
            raise
        return Piece(start, end, lease, [(meta.name, frame) for meta, frame in zip(metas, frames, strict=True)])

    def _count_durable(self, row: Row, call: Pending[Status]) -> None:
        statuses = call.wait()
        num_held = sum(1 for _ in takewhile(lambda status: status.held, statuses))
        row.num_done += num_held
        self._moved("in", statuses[:num_held].count(Status.STORED))
        if num_held < len(statuses):
            raise _why(row, call, statuses[num_held])

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read(self, row: Row) -> None:
        asked = self._asked(row, 0)
        while asked is not None:
            piece, call = asked
            ahead: tuple[Piece, Pending[Status]] | None = None
            try:
                got = call.wait()
                if all(status is Status.HIT for status in got):
                    ahead = _ahead(partial(self._asked, row, piece.end, wait=False))
                self._take_in(row, piece, call, got)
            except BaseException:
                if ahead is not None:
                    ahead[0].lease.end()  # its call has the pages still
                raise
            finally:
                piece.lease.end()
            asked = ahead if ahead is not None else self._asked(row, row.num_done)

    def _asked(self, row: Row, start: int, *, wait: bool = True) -> tuple[Piece, Pending[Status]] | None:
        """The piece that begins there, on its way. None: that is the end, or it would have had to wait."""
        if self.reader.switched_off:
            raise Ended(Why.STORE_DOWN, "nothing but bad pages came from it")
        lease = self._lease(row, start, load=True, wait=wait)
        if lease is None:
            return None
        end = start + len(lease.pages)
        names = [self._naming.name(key) for key in row.order.keys[start:end]]
        items = [(name, self._staging.frame(page)) for name, page in zip(names, lease.pages, strict=True)]
        call = self._calls.get_into(items, deadline=row.deadline(start), on_return=lease.lend())
        return Piece(start, end, lease, items), call

    def _take_in(self, row: Row, piece: Piece, call: Pending[Status], got: list[Status]) -> None:
        """Verify what came, in the pages it came into; scatter what is right up to the first that is not."""
        num_asked = _num_hits(got) + 1  # the first that did not come too: a store may know itself that it is cut
        with _raising("the store"):
            checked = self.reader.check(piece.items[:num_asked], got[:num_asked], deadline=row.total)
        num_good = _num_hits(checked)
        if num_good:
            with _raising("the device"):
                slots = row.order.slots[piece.start : piece.start + num_good]
                self._staging.scatter(piece.lease.pages[:num_good], slots)
        row.num_done += num_good
        self._moved("out", num_good)
        if num_good < len(got):
            raise _why(row, call, checked[num_good])

    # --- pages --------------------------------------------------------------------------------------------------------

    def _lease(self, row: Row, start: int, *, load: bool, wait: bool) -> Lease | None:
        """Pages for the next piece. None at the end of the row; or, where not told to wait, if none are to be had."""
        if start == row.num_blocks:
            return None
        row.check()
        if not self._calls.ready:
            raise self._down("it is left alone after failures, or does not return from its calls")
        account = (self._calls.name, load)
        number = min(self._piece_blocks, row.end_of_slice(start) - start)
        pages = self._pool.take_now(account, number)
        if not pages and wait:
            # Pages that stuck calls hold may never come: who is down costs nobody the time of a slice.
            hopeless = lambda: self._calls.num_stuck > 0 or row.stopped()  # noqa: E731
            pages = self._pool.take(account, number, deadline=row.deadline(start), stopped=hopeless)
            if not pages:
                row.check()
                raise self._down("its calls keep the pages") if self._calls.num_stuck else row.timeout("no free page")
        return Lease(self._pool, account, pages) if pages else None

    def _down(self, detail: str) -> Ended:
        return Ended(Why.CANCELLED, "it was closed") if self._calls.closed else Ended(Why.STORE_DOWN, detail)

    def _moved(self, direction: str, num_pages: int) -> None:
        num_bytes = num_pages * self._naming.frame_bytes
        self._metrics.count("moved_bytes_total", num_bytes, tier=self._calls.name, direction=direction)


def _ahead(work: Callable[[], T | None]) -> T | None:
    """What was begun ahead of time. If nothing more shall be, that counts only after what is under way: ask again."""
    with contextlib.suppress(Ended):
        return work()
    return None


def _why(row: Row, call: Pending[Any], first: Status) -> Ended:
    """Why a row ends with a call, of whose pages `first` was the first that did not do."""
    detail = call.why or f"block {row.order.depth + row.num_done}: {first.value}"
    if call.end is CallEnd.LATE or first.value == "late":
        return row.timeout(detail)
    ends = {CallEnd.RAISED: Why.ERROR, CallEnd.CLOSED: Why.CANCELLED, CallEnd.ANSWERED: Why.INCOMPLETE}
    return Ended(ends.get(call.end or CallEnd.ANSWERED, Why.STORE_DOWN), detail, first.value)


@contextlib.contextmanager
def _raising(what: str) -> Iterator[None]:
    """Foreign code: whatever it raises ends the row, and nothing else."""
    try:
        yield
    except Exception as error:
        raise Ended(Why.ERROR, f"{what} raised {type(error).__name__}: {error}") from error


def _num_hits(got: Sequence[Status]) -> int:
    return sum(1 for _ in takewhile(lambda status: status is Status.HIT, got))
