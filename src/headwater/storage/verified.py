"""VerifiedStore: the only way bytes of a store reach their reader. Wraps any store; what is not proven is a miss.

Bound to what the bytes will be used as: one identity, one set of planes. Every page is checked on the reader's
private copy (rule 4): that it is the page asked for, of this identity and layout, alive, and that each plane fits its
digest. A page that fails is counted, told, and removed by force (rule 8), so that a first-writer-wins store cannot
serve it again.

Where pages have addresses, planes are copied and digested in turn while they are hot in the cache, and then the slot is
asked whether it still holds the page. Where a store reads with several threads, each digests what it has just read
(`arriving.py`). A copy engine that digests what it copies does that itself, once: `lend` gives it pages in place, and
`fetch` pages that were read, with what their digests must be; `settle` and `settle_fetched` hear what it found.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from headwater.core.errors import InvalidInput, ResourceClosed
from headwater.core.page import PageName
from headwater.core.results import BAD_PAGE, GET_ANSWERS, Status
from headwater.layout.digest import ALONE_BYTES, plane_digests
from headwater.layout.frame import header_bytes, vouched
from headwater.layout.headers import copies, vouched_all
from headwater.metrics import Metrics
from headwater.storage.arriving import ArrivingPages, FrameCut, copy_frame
from headwater.storage.bad_pages import BadPages
from headwater.storage.base import SYSTEM_CLOCK, Addressable, Borrow, Clock, Deadline, Piecewise, Store, portions


class Loan(NamedTuple):
    """A page in place, whose header was found right. Its bytes were not looked at: they must fit `digests`, copied."""

    borrow: Borrow
    digests: npt.NDArray[np.uint64]  # of each plane


class VerifiedStore(Store):
    """A store whose HIT means: these are the bytes that were sealed under this name, for this identity and layout."""

    def __init__(
        self,
        store: Store,
        *,
        identity: bytes,
        plane_bytes: Sequence[int],
        metrics: Metrics | None = None,
        clock: Clock = SYSTEM_CLOCK,
        max_bad: int = 64,
    ) -> None:
        """Does not own `store`: close() leaves it open, because other identities may read from it too.

        After `max_bad` bad pages without a good one between them, reading is switched off (rule 8): a tier that keeps
        failing costs time and proves nothing. `switch_on` tries again.
        """
        self.metrics = metrics if metrics is not None else Metrics()
        self._store = store
        self._identity = identity
        self._plane_bytes = tuple(plane_bytes)
        self._header_bytes = header_bytes(len(self._plane_bytes))
        self._frame_bytes = self._header_bytes + sum(self._plane_bytes)
        self._cut = FrameCut(self._header_bytes, self._plane_bytes)
        self._clock = clock
        self._bad = BadPages(store, max_bad=max_bad, metrics=self.metrics)
        self._closed = False

    @property
    def switched_off(self) -> bool:
        """Whether so many pages were bad that none is read any more."""
        return self._bad.too_many

    def switch_on(self) -> None:
        """Read again."""
        self._bad.forget()

    @property
    def frame_bytes(self) -> int:
        """Size of the buffers `get_into` wants."""
        return self._frame_bytes

    def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """Pass frames on; their writer sealed them."""
        self._require_open()
        return self._store.put(pages, deadline=deadline)

    def get_into(
        self,
        pages: Sequence[tuple[PageName, memoryview]],
        *,
        deadline: Deadline,
        judged: Callable[[Sequence[Status]], None] | None = None,
    ) -> list[Status]:
        """Copy frames into buffers and verify them there. A buffer whose result is not HIT holds rubbish.

        `judged` hears the results before bad pages are removed: a store may hang in that.
        """
        return self._get_into(pages, deadline, use=True, judged=judged)

    def peek_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """The same, and counts as no use. Never in place: nobody waits, and the store's own call leaves us the GIL."""
        return self._get_into(pages, deadline, use=False)

    def _get_into(
        self,
        pages: Sequence[tuple[PageName, memoryview]],
        deadline: Deadline,
        *,
        use: bool,
        judged: Callable[[Sequence[Status]], None] | None = None,
    ) -> list[Status]:
        self._require_open()
        if self.switched_off:
            return [Status.FAILED] * len(pages)
        self._require_frames(pages)
        in_place = self._store.addressable() if use else None
        if in_place is not None:
            results = self._get_in_place(in_place, pages, deadline)
        elif (piecewise := self._store.piecewise()) is not None:
            results = self._get_piecewise(piecewise, pages, deadline, use=use)
        elif use and self._store.portion_bytes and min(self._plane_bytes) > ALONE_BYTES:
            results = self._get_beside(pages, deadline)
        else:
            portion = 1 if self._store.cheap_calls else max(1, len(pages))
            read = self._store.get_into if use else self._store.peek_into
            results = []
            for start in range(0, len(pages), portion):
                asked = pages[start : start + portion]
                got = read(asked, deadline=deadline)
                results += self._judge_all(asked, got, yields=not use)
        if judged is not None:
            judged(results)
        self._learn(pages, results, deadline)
        return results

    def fetch(
        self,
        pages: Sequence[tuple[PageName, memoryview]],
        *,
        deadline: Deadline,
        judged: Callable[[Sequence[Status]], None] | None = None,
    ) -> list[npt.NDArray[np.uint64] | Status]:
        """Copy frames into buffers and check their headers: what the digests of their planes must be, or what is wrong.

        For who digests the bytes where they are used, and tells `settle_fetched`; until then they are not to be named.
        `judged` as in `get_into`.
        """
        self._require_open()
        if self.switched_off:
            return [Status.FAILED] * len(pages)
        self._require_frames(pages)
        got = self._store.get_into(pages, deadline=deadline)
        found = self._vouched_all(pages, got)
        results = [one if isinstance(one, Status) else Status.HIT for one in found]
        if judged is not None:
            judged(results)
        bad = [(name, status) for (name, _), status in zip(pages, results, strict=True) if status in BAD_PAGE]
        if bad:
            self._bad.throw_out(bad, deadline)
        return found

    def settle_fetched(
        self,
        pages: Sequence[tuple[PageName, memoryview]],
        num_good: int,
        *,
        deadline: Deadline,
        judged: Callable[[Status], None] | None = None,
    ) -> Status:
        """What the first page is whose digests were wrong, after the first `num_good` of those that were fetched.

        HIT: nothing is wrong with it, here; it was spoilt on its way to where it was digested, or all were good.
        Otherwise it is thrown out; `judged` hears it before.
        """
        if num_good:
            self._bad.forget()
        if num_good == len(pages):
            return Status.HIT
        name, frame = pages[num_good]
        status = self._judge(name, frame)
        if status is not Status.HIT:
            if judged is not None:
                judged(status)
            self._bad.throw_out([(name, status)], deadline)
        return status

    def refuse(self, name: PageName, *, deadline: Deadline) -> None:
        """Throw out a page that was read and verified, and is still not what its reader must get (rule 8)."""
        self._bad.throw_out([(name, Status.FOREIGN)], deadline)

    def lend(self, names: Sequence[PageName], *, deadline: Deadline) -> list[Loan | Status]:
        """Pages to be copied straight out of the store, up to the first that is not there or whose header is bad.

        Only for an Addressable store. The digests of the *copies* must be compared, and `settle` be told.
        """
        self._require_open()
        store = self._addressable()
        if self.switched_off:
            return [Status.FAILED] * len(names)
        borrowed = list(store.borrow(names, deadline=deadline))
        digests, is_right = self._look_at_all(borrowed)
        found: list[Loan | Status] = []
        for i, borrow in enumerate(borrowed):
            if i < len(is_right) and is_right[i]:
                found.append(Loan(borrow, digests[i]))  # type: ignore[arg-type]  # it was looked at
                continue
            loan = _a_miss(borrow) if isinstance(borrow, Status) else self._look_at(borrow)
            if isinstance(loan, Status) and isinstance(borrow, Borrow) and not store.still_valid(borrow):
                loan = Status.MISS  # a lost race, not damage
            found.append(loan)
            if isinstance(loan, Status):
                break
        last = found[-1] if found else None
        if isinstance(last, Status) and last in BAD_PAGE:
            self._bad.throw_out([(names[len(found) - 1], last)], deadline)
        return found + [Status.MISS] * (len(names) - len(found))

    def settle(self, loans: Sequence[Loan], num_good: int, *, deadline: Deadline) -> list[Status]:
        """What became of pages of which the first `num_good` were copied and had the right digests.

        The next one, if there is one, was wrong: it is thrown out, unless its slot was given to another page meanwhile.
        """
        if num_good:
            self._bad.forget()
        results = [Status.HIT] * num_good + [Status.MISS] * (len(loans) - num_good)
        if num_good < len(loans) and self._addressable().still_valid(loans[num_good].borrow):
            results[num_good] = Status.CORRUPT
            self._bad.throw_out([(loans[num_good].borrow.name, Status.CORRUPT)], deadline)
        return results

    def _addressable(self) -> Addressable:
        in_place = self._store.addressable()
        if in_place is None:
            raise InvalidInput(f"the pages of a {type(self._store).__name__} have no address")
        return in_place

    def _look_at_all(self, borrowed: Sequence[Borrow | Status]) -> tuple[npt.NDArray[np.uint64], list[bool]]:
        """`_look_at` the first pages that are there: their digests, and whether they need no second look."""
        size = self.frame_bytes
        first: list[Borrow] = []
        for one in borrowed:
            if not isinstance(one, Borrow) or len(one.view) != size:
                break
            first.append(one)
        views = [one.view for one in first]
        return self._look_at_headers(views, [one.name for one in first])

    def _look_at_headers(
        self, frames: Sequence[memoryview], names: Sequence[PageName]
    ) -> tuple[npt.NDArray[np.uint64], list[bool]]:
        """What copies of headers vouch for, and of which pages that is sure; of the others, ask `_vouched`."""
        if not frames:
            return np.empty((0, 0), np.uint64), []
        headers, now_ms = copies(frames, self._header_bytes), self._now_ms()
        return vouched_all(headers, names, now_ms=now_ms, identity=self._identity, plane_bytes=self._plane_bytes)

    def _look_at(self, borrow: Borrow) -> Loan | Status:
        """Check a page's header, in a private copy."""
        if len(borrow.view) != self.frame_bytes:
            return Status.SHORT
        found = self._vouched(borrow.name, memoryview(bytes(borrow.view[: self._header_bytes])))
        return found if isinstance(found, Status) else Loan(borrow, found)

    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> list[bool]:
        """Pass on: a hint."""
        self._require_open()
        return self._store.contains(names, deadline=deadline)

    def delete(self, names: Sequence[PageName], *, deadline: Deadline) -> list[Status]:
        """Pass on."""
        self._require_open()
        return self._store.delete(names, deadline=deadline)

    def close(self) -> None:
        """Stop reading; the store itself stays open."""
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise ResourceClosed("the store is closed")

    def _require_frames(self, pages: Sequence[tuple[PageName, memoryview]]) -> None:
        for _, buffer in pages:
            if len(buffer) != self.frame_bytes:
                raise InvalidInput(f"a page of this layout has a frame of {self.frame_bytes} bytes, not {len(buffer)}")

    def _judge_all(
        self, pages: Sequence[tuple[PageName, memoryview]], got: Sequence[Status], *, yields: bool = False
    ) -> list[Status]:
        results = []
        for (name, buffer), status in zip(pages, got, strict=True):
            results.append(self._judge(name, buffer) if status is Status.HIT else _a_miss(status))
            if yields:
                time.sleep(0)  # digests of small planes keep the GIL, and the store's next call would wait 5 ms for it
        return results

    def _learn(
        self, pages: Sequence[tuple[PageName, memoryview]], results: Sequence[Status], deadline: Deadline
    ) -> None:
        """Throw out what is bad, and remember how it goes."""
        if Status.HIT in results:
            self._bad.forget()
        bad = [(name, status) for (name, _), status in zip(pages, results, strict=True) if status in BAD_PAGE]
        if bad:
            self._bad.throw_out(bad, deadline)

    def _get_piecewise(
        self, store: Piecewise, pages: Sequence[tuple[PageName, memoryview]], deadline: Deadline, *, use: bool
    ) -> list[Status]:
        """Each thread of the store's digests what it has just read."""
        arriving = ArrivingPages(self._cut, [frame for _, frame in pages])
        got = store.read_pieces(pages, ends=self._cut.ends, arrived=arriving.digest_piece, use=use, deadline=deadline)
        results: list[Status] = []
        for digests, found in zip(arriving.digests, self._vouched_all(pages, got), strict=True):
            if isinstance(found, Status):
                results.append(found)
            else:
                results.append(Status.HIT if digests == found.tolist() else Status.CORRUPT)
        return results

    def _get_beside(self, pages: Sequence[tuple[PageName, memoryview]], deadline: Deadline) -> list[Status]:
        """Verify each portion, in a thread that lasts as long as this call, while the store fetches the next one."""
        judged: list[Future[list[Status]]] = []
        start = 0
        with ThreadPoolExecutor(1, "headwater verify") as beside:  # starts no thread before it is needed
            *first, last = reversed(portions(len(pages), self._store.portion_bytes // self.frame_bytes) or [0])
            for size in first:
                asked = pages[start : start + size]
                got = self._store.get_into(asked, deadline=deadline)
                judged.append(beside.submit(self._judge_all, asked, got, yields=True))
                start += size
            asked = pages[start : start + last]
            rest = self._judge_all(asked, self._store.get_into(asked, deadline=deadline))
            return [status for one in judged for status in one.result()] + rest

    def _judge(self, name: PageName, frame: memoryview) -> Status:
        """As `frame.verify` does, without making anything of what is only compared."""
        found = self._vouched(name, frame)
        if isinstance(found, Status):
            return found
        right = plane_digests(frame[self._header_bytes :], self._plane_bytes) == found.tolist()
        return Status.HIT if right else Status.CORRUPT

    def _vouched_all(
        self, pages: Sequence[tuple[PageName, memoryview]], got: Sequence[Status]
    ) -> list[npt.NDArray[np.uint64] | Status]:
        """`_vouched` of those pages that the store gave, and why it did not give the others."""
        there = [page for page, status in zip(pages, got, strict=True) if status is Status.HIT]
        digests, is_right = self._look_at_headers([frame for _, frame in there], [name for name, _ in there])
        seen = iter(zip(there, digests, is_right, strict=True))
        found: list[npt.NDArray[np.uint64] | Status] = []
        for status in got:
            if status is not Status.HIT:
                found.append(_a_miss(status))
                continue
            (name, frame), right, sure = next(seen)
            found.append(right if sure else self._vouched(name, frame))
        return found

    def _vouched(self, name: PageName, frame: memoryview) -> npt.NDArray[np.uint64] | Status:
        """What a frame's header says of its planes, if it is the page wanted."""
        header = frame[: self._header_bytes]
        return vouched(header, name, now_ms=self._now_ms(), identity=self._identity, plane_bytes=self._plane_bytes)

    def _get_in_place(
        self, store: Addressable, pages: Sequence[tuple[PageName, memoryview]], deadline: Deadline
    ) -> list[Status]:
        results = []
        borrowed = store.borrow([name for name, _ in pages], deadline=deadline)
        for (name, buffer), borrow in zip(pages, borrowed, strict=True):
            if isinstance(borrow, Status):
                results.append(_a_miss(borrow))
            elif deadline.expired:
                results.append(Status.LATE)
            else:
                now_ms, source = self._now_ms(), borrow.view
                status = copy_frame(
                    source, buffer, name, now_ms=now_ms, identity=self._identity, plane_bytes=self._plane_bytes
                )
                # A fault in a page that was replaced while we copied is a lost race, not damage.
                results.append(status if store.still_valid(borrow) else Status.MISS)
        return results

    def _now_ms(self) -> int:
        return int(self._clock.time() * 1000)


def _a_miss(status: object) -> Status:
    """What a store said of a page that it did not give. The plain word "hit" equals HIT, and is none."""
    return status if isinstance(status, Status) and status in _MISSES else Status.FAILED


_MISSES: Final = GET_ANSWERS - {Status.HIT}
