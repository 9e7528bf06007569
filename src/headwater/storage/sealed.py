"""The way in, as `verified.py` is the way out: seal pages and put them, by the shortest way the store has.

Where pages have addresses, each plane is copied straight into a reserved slot and digested while it is hot in the
cache; elsewhere the frame is sealed where it lies and put. What a copy engine does on a GPU, on a CPU.
"""

from collections.abc import Sequence

from headwater.core.page import PageName
from headwater.layout.frame import PageMeta, frame_bytes, seal, seal_into
from headwater.layout.spec import KVLayout
from headwater.storage.base import Addressable, Deadline, PutStatus, Reservation, Store


def put_sealed(
    store: Store,
    pages: Sequence[tuple[PageMeta, memoryview]],
    layout: KVLayout,
    *,
    now_ms: int,
    deadline: Deadline,
) -> list[PutStatus]:
    """Seal and put frames whose payload is in place and whose header is not. Blocks; may mutate the frames' headers.

    Pages are taken in order, and one whose predecessor in the same call is not held is not stored: no holes.
    """
    if isinstance(store, Addressable):
        return _put_in_place(store, pages, layout, now_ms=now_ms, deadline=deadline)
    for meta, frame in pages:
        seal(frame, meta, layout, now_ms=now_ms)
    return store.put([(meta.name, frame) for meta, frame in pages], deadline=deadline)


def _put_in_place(
    store: Addressable,
    pages: Sequence[tuple[PageMeta, memoryview]],
    layout: KVLayout,
    *,
    now_ms: int,
    deadline: Deadline,
) -> list[PutStatus]:
    size = frame_bytes(layout.plane_bytes)
    reserved = store.reserve([(meta, size) for meta, _ in pages], deadline=deadline)
    results = [PutStatus.LATE if isinstance(one, Reservation) else one for one in reserved]
    broken: set[PageName] = set()
    written: list[tuple[int, Reservation]] = []
    unused: list[Reservation] = []
    for i, ((meta, frame), slot) in enumerate(zip(pages, reserved, strict=True)):
        if isinstance(slot, Reservation):
            unused.append(slot)
            if meta.parent_name in broken:
                results[i] = PutStatus.NO_ROOM
            elif not deadline.expired:
                seal_into(slot.view, frame, meta, layout, now_ms=now_ms)
                written.append((i, unused.pop()))
                continue
        if not results[i].held:
            broken.add(meta.name)
    published = store.publish([slot for _, slot in written], deadline=deadline)
    for (i, _), status in zip(written, published, strict=True):
        results[i] = status
    store.abandon(unused, deadline=deadline)
    return results
