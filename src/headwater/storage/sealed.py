"""The way in, as `verified.py` is the way out: seal pages and put them, by the shortest way the store has.

Where pages have addresses, each plane is copied straight into a reserved slot and digested while it is hot in the
cache; elsewhere the frame is sealed where it lies and put. What a copy engine does on a GPU, on a CPU.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from headwater.core.results import Status
from headwater.layout.digest import ALONE_BYTES
from headwater.layout.frame import PageMeta, frame_bytes, seal, seal_into, write_header
from headwater.layout.spec import KVLayout
from headwater.storage.base import Addressable, Deadline, Reservation, Store, portions


def put_sealed(
    store: Store,
    pages: Sequence[tuple[PageMeta, memoryview]],
    layout: KVLayout,
    *,
    now_ms: int,
    deadline: Deadline,
    digests: npt.NDArray[np.uint64] | None = None,
) -> list[Status]:
    """Seal and put frames whose payload is in place and whose header is not. Blocks; may mutate the frames' headers.

    `digests`, [pages, planes]: made by who copied the payloads, of whole blocks; the bytes are not read again then.
    Raises what `seal` raises, with nothing stored and nothing held.
    """
    if digests is None and (in_place := store.addressable()) is not None:
        return _put_in_place(in_place, pages, layout, now_ms=now_ms, deadline=deadline)
    if digests is None and _pays_beside(store, pages, layout):
        return _put_beside(store, pages, layout, now_ms=now_ms, deadline=deadline)
    seal_pages(pages, layout, now_ms=now_ms, digests=digests)
    return store.put([(meta.name, frame) for meta, frame in pages], deadline=deadline)


def seal_pages(
    pages: Sequence[tuple[PageMeta, memoryview]],
    layout: KVLayout,
    *,
    now_ms: int,
    digests: npt.NDArray[np.uint64] | None = None,
) -> None:
    """Seal frames where they lie, as `put_sealed` says. Mutates them; raises what `seal` does."""
    for i, (meta, frame) in enumerate(pages):
        if digests is None or meta.valid_tokens != layout.block_tokens:
            seal(frame, meta, layout, now_ms=now_ms)
        else:
            write_header(frame, meta, layout.plane_bytes, digests[i].tolist(), now_ms=now_ms)


def _pays_beside(store: Store, pages: Sequence[tuple[PageMeta, memoryview]], layout: KVLayout) -> bool:
    """Whether there are several portions, of whole blocks only: sealing those does not raise half-way."""
    size = frame_bytes(layout.plane_bytes)
    whole = all(meta.valid_tokens == layout.block_tokens and len(frame) == size for meta, frame in pages)
    alone = min(layout.plane_bytes) > ALONE_BYTES  # else threads would only wait for each other
    return whole and alone and 0 < 3 * store.portion_bytes <= size * len(pages)


def _put_beside(
    store: Store,
    pages: Sequence[tuple[PageMeta, memoryview]],
    layout: KVLayout,
    *,
    now_ms: int,
    deadline: Deadline,
) -> list[Status]:
    """Seal the next portion, in a thread that lasts as long as this call, while the store takes the one before."""
    ends = list(accumulate(portions(len(pages), store.portion_bytes // frame_bytes(layout.plane_bytes))))
    parts = [pages[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    results: list[Status] = []
    with ThreadPoolExecutor(1, "headwater seal") as beside:
        sealed = [beside.submit(_seal_and_yield, part, layout, now_ms) for part in parts]
        for part, one in zip(parts, sealed, strict=True):
            one.result()
            results += store.put([(meta.name, frame) for meta, frame in part], deadline=deadline)
    return results


def _seal_and_yield(pages: Sequence[tuple[PageMeta, memoryview]], layout: KVLayout, now_ms: int) -> None:
    for meta, frame in pages:
        seal(frame, meta, layout, now_ms=now_ms)
        time.sleep(0)  # digests of small planes keep the GIL, and the store's next call would wait 5 ms for it


def _put_in_place(
    store: Addressable,
    pages: Sequence[tuple[PageMeta, memoryview]],
    layout: KVLayout,
    *,
    now_ms: int,
    deadline: Deadline,
) -> list[Status]:
    size = frame_bytes(layout.plane_bytes)
    reserved = store.reserve([(meta, size) for meta, _ in pages], deadline=deadline)
    results = [Status.LATE if isinstance(one, Reservation) else one for one in reserved]
    slots = [(i, one) for i, one in enumerate(reserved) if isinstance(one, Reservation)]
    written: list[tuple[int, Reservation]] = []
    try:
        for i, slot in slots:
            if deadline.expired:
                break
            meta, frame = pages[i]
            seal_into(slot.view, frame, meta, layout, now_ms=now_ms)
            written.append((i, slot))
        published = store.publish([slot for _, slot in written], deadline=deadline)
    finally:
        store.abandon([slot for _, slot in slots], deadline=deadline)  # those that were published are not out any more
    for (i, _), status in zip(written, published, strict=True):
        results[i] = status
    return results
