"""How pages are written into a slab: slots taken, frames written, pages published, some at a time.

Order of a write: unpublish the victim, wipe, payload, header, publish. So a crash at any point leaves no valid header
over other bytes, and no name for an incomplete page. One thread writes: file systems lock a file for one writer, and
what nobody waits for must not take readers' cores. Who gets which slot is `allocator.py`'s business.

Invariant: a slot that was taken is published or given back when the call ends, however it ends.
"""

from collections.abc import Sequence
from typing import Final

from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.layout.frame import Header, PageMeta, parse
from headwater.storage.base import Deadline
from headwater.storage.local.allocator import Allocator, Search
from headwater.storage.local.attachment import Attachment, IndexLocked
from headwater.storage.local.mirror import Slot

BATCH_PAGES: Final = 32  # slots taken in one transaction: bounds what a writer holds, and what a late one wasted


class PageWriting:
    """One call's writes."""

    def __init__(
        self,
        allocator: Allocator,
        pages: Sequence[tuple[PageName, memoryview]],
        results: list[Status],
        deadline: Deadline,
        *,
        synced: bool,
    ) -> None:
        """`results`, one per page, are set as they come. `synced`: pages before their records, records before all else.

        That is for a store that is to survive a power cut.
        """
        self._allocator = allocator
        self._pages = pages
        self._results = results
        self._deadline = deadline
        self._synced = synced

    def run(self, at: Attachment) -> None:
        """Write. Blocks. Raises StoreError."""
        pages, results = self._pages, self._results
        for start in range(0, len(pages), BATCH_PAGES):
            if self._deadline.expired:
                results[start:] = [Status.LATE] * (len(pages) - start)
                return
            batch: list[tuple[int, Header]] = []
            for i, (name, frame) in enumerate(pages[start : start + BATCH_PAGES], start):
                header = parse(frame)
                if isinstance(header, Status) or header.meta.name != name or len(frame) != header.frame_bytes:
                    results[i] = Status.REFUSED
                else:
                    batch.append((i, header))
            statuses = self._write_batch(at, [(pages[i][1], header) for i, header in batch])
            for (i, _), status in zip(batch, statuses, strict=True):
                results[i] = status

    def _write_batch(self, at: Attachment, pages: Sequence[tuple[memoryview, Header]]) -> list[Status]:
        if not pages:
            return []
        deadline = self._deadline
        search = Search([(header.meta, header.frame_bytes) for _, header in pages])
        written: list[tuple[int, Slot]] = []
        with at.taking(search):
            self._allocator.take(at, search, deadline)
            results = [Status.LATE if isinstance(one, Slot) else one for one in search.results]
            slots = [(i, one) for i, one in enumerate(search.results) if isinstance(one, Slot)]
            try:
                for i, slot in slots:
                    if deadline.expired:
                        break
                    frame, header = pages[i]
                    at.slab.write_frame(slot.offset, frame, header.header_bytes)
                    written.append((i, slot))
                self._sync(at, written)
                headers = [pages[i][1] for i, _ in written]
                ready = [(slot, one.meta, one.frame_bytes) for (_, slot), one in zip(written, headers, strict=True)]
                statuses = publish_slots(at, ready, deadline)
                self._sync(at, written)
            except BaseException:
                at.give_back([slot for _, slot in slots], deadline)
                raise
            at.give_back([slot for _, slot in slots[len(written) :]], deadline)
        for (i, _), status in zip(written, statuses, strict=True):
            results[i] = status
        return results

    def _sync(self, at: Attachment, written: Sequence[object]) -> None:
        if written and self._synced:
            at.slab.sync()


def publish_slots(at: Attachment, written: Sequence[tuple[Slot, PageMeta, int]], deadline: Deadline) -> list[Status]:
    """Make written frames visible; slots of those that are not to be seen are wiped and given back. Blocks."""
    if not written:
        return []

    def publish() -> list[Status]:
        statuses = at.catalog.publish(written, at.owner)
        unseen = [one[0] for one, status in zip(written, statuses, strict=True) if status is not Status.STORED]
        at.catalog.give_back(unseen, at.owner)
        return statuses

    try:
        return at.transact(publish, deadline)
    except IndexLocked:
        at.give_back([slot for slot, _, _ in written], deadline)
        return [Status.LATE] * len(written)
