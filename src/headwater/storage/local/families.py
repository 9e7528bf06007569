"""Whose pages a LocalStore holds, as people ask: identities and tenants.

Reads the whole index, without a lock. An answer that could not be had in time is StoreBusy, never half of one.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from headwater.core.errors import StoreBusy
from headwater.core.page import PageName
from headwater.storage.base import Deadline, PagePath
from headwater.storage.local.records import Record, RecordState
from headwater.storage.local.table import Table


@dataclass(frozen=True, slots=True)
class FamilyUse:
    """What one identity and tenant keep in the store."""

    identity: bytes
    tenant: bytes
    label: str
    num_pages: int
    num_bytes: int
    num_tokens: int
    max_depth: int
    last_used_s: float


def usage(table: Table, deadline: Deadline) -> list[FamilyUse]:
    """What each identity and tenant keep, largest first."""
    found: dict[tuple[bytes, bytes], list[tuple[Record, float]]] = {}
    for number, record in live_records(table, deadline):
        use = table.use(number)
        found.setdefault((record.identity, record.tenant), []).append((record, 0.0 if use is None else use.used_s))
    labels = table.labels()
    families = [
        FamilyUse(
            identity=identity,
            tenant=tenant,
            label=labels.get((identity, tenant), ""),
            num_pages=len(pages),
            num_bytes=sum(record.num_bytes for record, _ in pages),
            num_tokens=sum(record.valid_tokens for record, _ in pages),
            max_depth=max(record.depth for record, _ in pages),
            last_used_s=max(used_s for _, used_s in pages),
        )
        for (identity, tenant), pages in found.items()
    ]
    return sorted(families, key=lambda family: -family.num_bytes)


def names(table: Table, identity: bytes | None, tenant: bytes | None, deadline: Deadline) -> list[PageName]:
    """All pages of an identity, a tenant, both, or the whole store."""
    return [
        record.name
        for _, record in live_records(table, deadline)
        if identity in (None, record.identity) and tenant in (None, record.tenant)
    ]


def paths(
    table: Table, identity: bytes, num_tokens: int, *, after: int, limit: int, deadline: Deadline
) -> list[PagePath]:
    """Pages of an identity's blocks of so many tokens that do not expire, by slot, from behind a slot on."""
    found: list[PagePath] = []
    for number, record in live_records(table, deadline, after=after):
        if record.identity == identity and record.valid_tokens == num_tokens and not record.expires_ms:
            found.append(PagePath(number, record.name, record.parent, record.depth))
            if len(found) == limit:
                break
    return found


def counts(table: Table, deadline: Deadline) -> dict[int, int]:
    """How many slots are in each state."""
    found: dict[int, int] = {}
    for extent, slot_bytes in table.classes().items():
        _require_time(table, deadline)
        for _, record in table.records(table.geometry.numbers(extent, slot_bytes)):
            if record is not None:
                found[record.state] = found.get(record.state, 0) + 1
    return found


def live_records(table: Table, deadline: Deadline, *, after: int = -1) -> Iterator[tuple[int, Record]]:
    """Pages and the numbers of their slots, from behind a slot on. Raises StoreBusy at the deadline."""
    for extent, slot_bytes in sorted(table.classes().items()):
        _require_time(table, deadline)
        numbers = table.geometry.numbers(extent, slot_bytes)
        for number, record in table.records(range(max(numbers.start, after + 1), max(numbers.stop, after + 1))):
            if record is not None and record.state == RecordState.LIVE:
                yield number, record


def _require_time(table: Table, deadline: Deadline) -> None:
    if deadline.expired:
        raise StoreBusy(f"reading the index of {table.slab.path} took too long; try again with more time")
