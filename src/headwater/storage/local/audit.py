"""What a person may ask of a store's directory: what is in it, remove some of it, is it intact.

Works on an open LocalStore, needs no layout and no model, and knows nothing of terminals: `cli/` draws what is
returned here. Invariants: an answer that could not be had in time is StoreBusy, never an empty one; pages are checked
on a private copy (rule 4); a page of an unknown version may be a newer process's good one, and `check` leaves it.
"""

import mmap
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from headwater.core.errors import InvalidInput, StoreUnavailable
from headwater.core.page import PageName
from headwater.core.results import BAD_PAGE, Status
from headwater.layout.frame import ALIGNMENT, verify
from headwater.storage.base import Deadline
from headwater.storage.local import directory
from headwater.storage.local.families import FamilyUse
from headwater.storage.local.records import RecordState
from headwater.storage.local.slab import Progress
from headwater.storage.local.store import LocalStore

NO_TENANT: Final = "-"
_BATCH_PAGES: Final = 256
_CALL_S: Final = 30.0  # for one look at the index, one batch removed, one page read


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSurvey:
    """What is in a directory. Slots count places, used or not; families are identities with one tenant each."""

    directory: Path
    limit_bytes: int
    num_free: int
    num_reserved: int
    num_live: int
    families: tuple[FamilyUse, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all pages."""
        return sum(family.num_bytes for family in self.families)

    def document(self) -> dict[str, Any]:
        """Return all of it as plain JSON values; no tenant is null."""
        families = [
            asdict(family) | {"identity": family.identity.hex(), "tenant": _tenant_hex(family.tenant)}
            for family in self.families
        ]
        counts = {"num_live": self.num_live, "num_reserved": self.num_reserved, "num_free": self.num_free}
        sizes = {"limit_bytes": self.limit_bytes, "num_bytes": self.num_bytes}
        return {"directory": str(self.directory), **sizes, **counts, "families": families}


@dataclass(frozen=True, slots=True, kw_only=True)
class Purged:
    """What a purge removed, and what it could not."""

    num_pages: int
    num_bytes: int
    num_left: int


@dataclass(frozen=True, slots=True)
class BadPage:
    """A page that would not be served, and why."""

    name: PageName
    fault: Status
    identity: bytes
    tenant: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a check found. `num_gone` left while the check ran, `num_expired` are intact but past their time."""

    directory: Path
    num_pages: int
    num_bytes: int
    num_gone: int
    num_expired: int
    num_unread: int
    num_removed: int
    bad: tuple[BadPage, ...]

    @property
    def faults(self) -> dict[Status, int]:
        """How many pages have each fault; every fault is there."""
        counts = Counter(page.fault for page in self.bad)
        return {fault: counts[fault] for fault in Status if fault in BAD_PAGE}

    @property
    def intact(self) -> bool:
        """Whether every page that is there was read and is right."""
        return not self.bad and not self.num_unread

    def document(self) -> dict[str, Any]:
        """Return all of it as plain JSON values."""
        named = asdict(self) | {"directory": str(self.directory), "intact": self.intact, "num_bad": len(self.bad)}
        faults = {fault.value: count for fault, count in self.faults.items()}
        bad = [
            {
                "name": page.name.hex(),
                "fault": page.fault.value,
                "identity": page.identity.hex(),
                "tenant": _tenant_hex(page.tenant),
            }
            for page in self.bad
        ]
        return named | {"faults": faults, "bad": bad}


def require_store(path: Path) -> None:
    """Raise StoreUnavailable where there is no store. Creates nothing."""
    if not directory.has_slab(path):
        raise StoreUnavailable(f"no store in {path}")


def survey(store: LocalStore) -> StoreSurvey:
    """Count what is in the store. Raises StoreBusy if that takes too long."""
    families = store.usage(deadline=Deadline.after(_CALL_S))
    slots = store.slots(deadline=Deadline.after(_CALL_S))
    return StoreSurvey(
        directory=store.config.directory,
        limit_bytes=store.limit_bytes,
        num_free=slots.get(RecordState.FREE, 0),
        num_reserved=slots.get(RecordState.RESERVED, 0),
        num_live=slots.get(RecordState.LIVE, 0),
        families=tuple(families),
    )


def select(families: Sequence[FamilyUse], *, identity_prefix: str | None, tenant_prefix: str | None) -> list[FamilyUse]:
    """Families whose identity and tenant begin with these hex digits; None is any, `-` the tenant without a salt.

    Pure. A prefix that fits nothing or more than one thing is InvalidInput: removing must never guess.
    """
    chosen = list(families)
    if identity_prefix is not None:
        identity = _resolve("identity", identity_prefix, {family.identity for family in chosen})
        chosen = [family for family in chosen if family.identity == identity]
    if tenant_prefix is not None:
        tenants = {family.tenant for family in chosen}
        if tenant_prefix == NO_TENANT:
            tenant_prefix = bytes(16).hex()
        tenant = _resolve("tenant", tenant_prefix, tenants)
        chosen = [family for family in chosen if family.tenant == tenant]
    return chosen


def purge(store: LocalStore, families: Sequence[FamilyUse], *, progress: Progress | None = None) -> Purged:
    """Remove and wipe every page of these families. Blocks; other processes may go on using the store."""
    names = [name for family in families for name in _names(store, family)]
    num_bytes = sum(store.frame_bytes(name) or 0 for name in names)  # before: a page takes with it what builds on it
    left = 0
    for start in range(0, len(names), _BATCH_PAGES):
        batch = names[start : start + _BATCH_PAGES]
        left += _delete(store, batch)
        if progress is not None:
            progress(start + len(batch), len(names))
    return Purged(num_pages=len(names) - left, num_bytes=num_bytes, num_left=left)


def check(store: LocalStore, *, remove: bool = False, progress: Progress | None = None) -> Checked:
    """Read every page and verify it; with `remove`, throw bad ones out with all that builds on them. Blocks."""
    families = store.usage(deadline=Deadline.after(_CALL_S))
    names = [(name, family) for family in families for name in _names(store, family)]
    bad: list[BadPage] = []
    found: Counter[str] = Counter()
    buffer = memoryview(b"")
    for done, (name, family) in enumerate(names, start=1):
        num_bytes = store.frame_bytes(name)
        if num_bytes is None:
            found["gone"] += 1
            continue
        if num_bytes > len(buffer):
            buffer = memoryview(mmap.mmap(-1, -(-num_bytes // ALIGNMENT) * ALIGNMENT))  # page aligned: kernel copies
        state = _check_page(store, name, family, buffer[:num_bytes])
        if isinstance(state, Status):
            bad.append(BadPage(name, state, family.identity, family.tenant))
        else:
            found[state] += 1
        found["bytes"] += num_bytes
        if progress is not None:
            progress(done, len(names))
    doomed = [page.name for page in bad if remove and page.fault is not Status.UNKNOWN_VERSION]
    left = sum(_delete(store, doomed[i : i + _BATCH_PAGES]) for i in range(0, len(doomed), _BATCH_PAGES))
    return Checked(
        directory=store.config.directory,
        num_pages=len(names),
        num_bytes=found["bytes"],
        num_gone=found["gone"],
        num_expired=found["expired"],
        num_unread=found["unread"],
        num_removed=len(doomed) - left,
        bad=tuple(bad),
    )


def _check_page(store: LocalStore, name: PageName, family: FamilyUse, frame: memoryview) -> Status | str:
    deadline = Deadline.after(_CALL_S)
    (status,) = store.peek_into([(name, frame)], deadline=deadline)
    if store.down is not None:
        raise store.down
    if status is Status.MISS:
        return "gone"
    if status in (Status.LATE, Status.FAILED):
        return "unread"
    if status is not Status.HIT:
        return status
    header = verify(frame, name, now_ms=0, identity=family.identity)  # the moment 0: expired pages are read as well
    if isinstance(header, Status):
        return header
    if header.frame_bytes != len(frame):
        return Status.SHORT  # the index promises bytes that are not the page's
    if header.meta.tenant != family.tenant:
        return Status.FOREIGN
    return "expired" if 0 < header.meta.expires_at_ms <= time.time() * 1000 else "intact"


def _names(store: LocalStore, family: FamilyUse) -> list[PageName]:
    return store.names(deadline=Deadline.after(_CALL_S), identity=family.identity, tenant=family.tenant)


def _delete(store: LocalStore, names: Sequence[PageName]) -> int:
    """Delete; return how many are still there. ABSENT is fine: the page went with its parent, or was evicted."""
    statuses = store.delete(names, deadline=Deadline.after(_CALL_S))
    if store.down is not None:
        raise store.down
    return sum(status in (Status.LATE, Status.FAILED) for status in statuses)


def _tenant_hex(tenant: bytes) -> str | None:
    return tenant.hex() if any(tenant) else None


def _resolve(what: str, prefix: str, known: set[bytes]) -> bytes:
    wanted = prefix.lower()
    if not wanted or set(wanted) - set("0123456789abcdef"):
        raise InvalidInput(f"{what} must be given as hex digits, not {prefix!r}")
    found = sorted(value for value in known if value.hex().startswith(wanted))
    if not found:
        raise InvalidInput(f"no pages of {what} {prefix} here")
    if len(found) > 1:
        several = ", ".join(value.hex()[:16] for value in found[:4]) + (", ..." if len(found) > 4 else "")
        raise InvalidInput(f"{what} {prefix} is ambiguous: {several}")
    return found[0]
