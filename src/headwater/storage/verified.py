"""VerifiedStore: the only way bytes of a store reach their reader. Wraps any store; what is not proven is a miss.

Bound to what the bytes will be used as: one identity, one set of planes. Every page is checked on the reader's
private copy (rule 4): that it is the page asked for, of this identity and layout, alive, and that each plane fits its
digest. A page that fails is counted, told, and removed by force (rule 8), so that a first-writer-wins store cannot
serve it again.

Where pages have addresses, planes are copied and digested in turn while they are hot in the cache, and then the slot is
asked whether it still holds the page.
"""

from collections.abc import Sequence

from headwater.core.errors import InvalidInput, ResourceClosed
from headwater.core.page import PageName
from headwater.layout.digest import copy_digests
from headwater.layout.frame import Fault, expect, header_bytes, parse, verify
from headwater.metrics import Metrics
from headwater.storage.base import (
    SYSTEM_CLOCK,
    Addressable,
    Borrow,
    Clock,
    Deadline,
    DeleteStatus,
    GetStatus,
    PutStatus,
    Store,
)


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
        self._clock = clock
        self._max_bad = max_bad
        self._num_bad = 0
        self._closed = False

    @property
    def switched_off(self) -> bool:
        """Whether so many pages were bad that none is read any more."""
        return self._num_bad >= self._max_bad

    def switch_on(self) -> None:
        """Read again."""
        self._num_bad = 0

    @property
    def frame_bytes(self) -> int:
        """Size of the buffers `get_into` wants."""
        return self._header_bytes + sum(self._plane_bytes)

    def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[PutStatus]:
        """Pass frames on; their writer sealed them."""
        self._require_open()
        return self._store.put(pages, deadline=deadline)

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[GetStatus]:
        """Copy frames into buffers and verify them there. A buffer whose result is not HIT holds rubbish."""
        self._require_open()
        if self.switched_off:
            return [GetStatus.FAILED] * len(pages)
        for _, buffer in pages:
            if len(buffer) != self.frame_bytes:
                raise InvalidInput(f"a page of this layout has a frame of {self.frame_bytes} bytes, not {len(buffer)}")
        if isinstance(self._store, Addressable):
            results = self._get_in_place(self._store, pages, deadline)
        else:
            portion = 1 if self._store.cheap_calls else max(1, len(pages))
            results = []
            for start in range(0, len(pages), portion):
                asked = pages[start : start + portion]
                got = self._store.get_into(asked, deadline=deadline)
                results += [
                    self._judge(name, buffer) if status is GetStatus.HIT else _a_miss(status)
                    for (name, buffer), status in zip(asked, got, strict=True)
                ]
        bad = [i for i, status in enumerate(results) if status in _FAULTS]
        if GetStatus.HIT in results:
            self._num_bad = 0
        if bad:
            self._throw_out([(pages[i][0], results[i]) for i in bad], deadline)
        return results

    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> list[bool]:
        """Pass on: a hint."""
        self._require_open()
        return self._store.contains(names, deadline=deadline)

    def delete(self, names: Sequence[PageName], *, deadline: Deadline) -> list[DeleteStatus]:
        """Pass on."""
        self._require_open()
        return self._store.delete(names, deadline=deadline)

    def close(self) -> None:
        """Stop reading; the store itself stays open."""
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise ResourceClosed("the store is closed")

    def _judge(self, name: PageName, frame: memoryview) -> GetStatus:
        found = verify(frame, name, now_ms=self._now_ms(), identity=self._identity, plane_bytes=self._plane_bytes)
        return GetStatus(found.value) if isinstance(found, Fault) else GetStatus.HIT

    def _get_in_place(
        self, store: Addressable, pages: Sequence[tuple[PageName, memoryview]], deadline: Deadline
    ) -> list[GetStatus]:
        results = []
        borrowed = store.borrow([name for name, _ in pages], deadline=deadline)
        for (name, buffer), borrow in zip(pages, borrowed, strict=True):
            if isinstance(borrow, GetStatus):
                results.append(borrow)
            elif deadline.expired:
                results.append(GetStatus.LATE)
            else:
                status = self._copy(name, borrow, buffer)
                # A fault in a page that was replaced while we copied is a lost race, not damage.
                results.append(status if store.still_valid(borrow) else GetStatus.MISS)
        return results

    def _copy(self, name: PageName, borrow: Borrow, buffer: memoryview) -> GetStatus:
        source = borrow.view
        if len(source) != len(buffer):
            return GetStatus.SHORT
        start = self._header_bytes
        buffer[:start] = source[:start]
        header = parse(buffer[:start])
        if isinstance(header, Fault):
            return GetStatus(header.value)
        fault = expect(header, name, now_ms=self._now_ms(), identity=self._identity, plane_bytes=self._plane_bytes)
        if fault is not None:
            return GetStatus(fault.value)
        if copy_digests(source[start:], buffer[start:], header.plane_bytes) != list(header.digests):
            return GetStatus.CORRUPT
        return GetStatus.HIT

    def _throw_out(self, bad: Sequence[tuple[PageName, GetStatus]], deadline: Deadline) -> None:
        for name, status in bad:
            self.metrics.count("bad_pages_total", fault=status.value)
            self.metrics.event("bad_page", fault=status.value, name=name.hex())
        was_on = not self.switched_off
        self._num_bad += sum(status is not GetStatus.STALE for _, status in bad)  # expiry is no sign of trouble
        if was_on and self.switched_off:
            self.metrics.event("tier_switched_off", reason=f"{self._num_bad} bad pages and no good one")
        # A page of an unknown version may be a newer process's good one: a miss here, but not ours to remove.
        doomed = [name for name, status in bad if status is not GetStatus.UNKNOWN_VERSION]
        removed = self._store.delete(doomed, deadline=deadline) if doomed else []
        kept = sum(status in (DeleteStatus.LATE, DeleteStatus.FAILED) for status in removed)
        if kept:
            self.metrics.count("bad_pages_kept_total", kept)

    def _now_ms(self) -> int:
        return int(self._clock.time() * 1000)


def _a_miss(status: object) -> GetStatus:
    """What a store said of a page that it did not give. The plain word "hit" equals HIT, and is none."""
    return status if isinstance(status, GetStatus) and status is not GetStatus.HIT else GetStatus.FAILED


_FAULTS = frozenset(GetStatus(fault.value) for fault in Fault)
