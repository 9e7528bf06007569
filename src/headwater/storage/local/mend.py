"""Whether a LocalStore's index agrees with itself, and how it is made to.

For who comes in (`attach.py`) and for who finds that somebody died while he changed something (`catalog.py`). A page
without the one before it goes; of two pages of one name one stays; a record that cannot be believed is made anew from
the frame in its slot, where who asks is alone in the directory.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress

import numpy as np

from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.layout.frame import Header
from headwater.storage.local.catalog import Catalog
from headwater.storage.local.geometry import sectors
from headwater.storage.local.mirror import PageRow, Place, Slot
from headwater.storage.local.records import Record, RecordState, record_rows


def mend(catalog: Catalog, read_header: Callable[[int], Header | None] | None = None, *, trusted: bool = True) -> int:
    """Read everything, and make it agree with itself: no page without the one before it, no name twice.

    `read_header` (offset): only for who is alone in the directory; then what dead owners had reserved is free, and
    slots whose record cannot be believed hold what their header says. Without `trusted` no record is believed.
    Returns how many were not.
    """
    found = catalog.follower.survey()
    pages = [page for one in found.values() for page in one.pages]
    lost = [(number, one.slot_bytes, 0) for one in found.values() for number in one.lost]
    if not trusted:
        lost += [(place.number, size, place.generation) for _, _, place, size, *_ in pages]
        lost += [(number, one.slot_bytes, generation) for one in found.values() for number, generation in one.free]
        found, pages = {extent: replace(one, pages=[], free=[]) for extent, one in found.items()}, []
    catalog.follower.adopt(catalog.follower.drafted(found))
    if read_header is not None:
        for one in found.values():
            catalog.free([(number, generation, one.slot_bytes) for number, generation in one.reserved])
        pages += _adopt(catalog, lost, read_header)
    catalog.drop_misfits(pages)
    return len(lost)


def _adopt(
    catalog: Catalog, lost: Sequence[tuple[int, int, int]], read_header: Callable[[int], Header | None]
) -> list[PageRow]:
    """Make pages LIVE again that are found in slots of which nothing is known. The rest is wiped, and free.

    `lost`: (number, slot size, generation). Returns the pages.
    """
    found: list[tuple[Header, Slot]] = []
    empty: list[tuple[int, int, int]] = []
    for number, slot_bytes, generation in lost:
        offset = catalog.geometry.offset(number, slot_bytes)
        header = read_header(offset)
        if header is None or sectors(header.frame_bytes) != slot_bytes:
            empty.append((number, generation + 1, slot_bytes))
        else:
            found.append((header, Slot(number, generation + 1, offset)))
    catalog.free(empty)
    if not found:
        return []
    found.sort(key=lambda one: one[0].meta.depth)
    numbers = [slot.number for _, slot in found]
    rows = record_rows(RecordState.RESERVED, len(found))
    rows["generation"] = np.array([slot.generation for _, slot in found], np.uint64)
    rows["slot_bytes"] = [sectors(header.frame_bytes) for header, _ in found]
    catalog.write(numbers, rows)
    statuses = catalog.publish(
        [(slot, header.meta, header.frame_bytes) for header, slot in found],
        0,
        used_s=[min(catalog.recency.seen_s, header.sealed_at_ms / 1000) for header, _ in found],
    )
    stored = [status is Status.STORED for status in statuses]
    held = list(compress(numbers, stored))
    catalog.free(
        [
            (slot.number, slot.generation, sectors(header.frame_bytes))
            for (header, slot), is_stored in zip(found, stored, strict=True)
            if not is_stored
        ]
    )
    table = catalog.table
    return table.pages(held, table.rows(held)[0], table.priorities(held, catalog.recency.seen_s))


def problems(catalog: Catalog) -> list[str]:
    """What contradicts itself in the index; nothing, in a sound one. Reads all of it."""
    found: list[str] = []
    live: dict[PageName, Record] = {}
    enrolled = set(catalog.table.owners())
    places: dict[PageName, Place] = {}
    for extent, slot_bytes in catalog.table.classes().items():
        for number, record in catalog.table.records(catalog.geometry.numbers(extent, slot_bytes)):
            if record is None or record.slot_bytes != slot_bytes or record.num_bytes > slot_bytes:
                found.append(f"slot {number} has a record that makes no sense")
            elif record.state == RecordState.LIVE:
                if record.name in live:
                    found.append(f"a page is in slot {number} and in another one")
                live[record.name] = record
                offset = catalog.geometry.offset(number, slot_bytes)
                places[record.name] = Place(number, record.generation, offset, record.num_bytes)
            elif record.state == RecordState.RESERVED and record.owner not in enrolled:
                found.append(f"slot {number} is reserved, and nobody holds it")
    orphans = sum(record.depth > 0 and record.parent not in live for record in live.values())
    if orphans:
        found.append(f"{orphans} pages without the one before them")
    if places != catalog.mirror.places:
        found.append("the mirror differs from the index")
    order = catalog.mirror.order
    if len(order) != len(live) or any(name not in order for name in live):
        found.append("the order of pages differs from the index")
    order.validate()
    if catalog.table.classes() != catalog.mirror.classes:
        found.append("the mirror has other extents than the slab")
    return found
