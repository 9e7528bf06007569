"""Coming into a LocalStore's directory: make it, check it, repair it, or say why not.

Whoever comes in passes the gate, one at a time. Who finds nobody inside holds the slab alone and may repair it; who
comes to a slab in use only checks that it may come in. So nothing is repaired under a running process, and a slot that
a stopped writer still holds is never given to another (rules 3 and 10).

Records are believed if their checksum fits, and otherwise made anew from the frames in the slab; all of them are, where
the machine went down while somebody wrote without syncing. Entries are hints, whatever they come from: a page is
believed when it is read and verified.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from headwater.config.stores import Durability, LocalStoreConfig
from headwater.core.errors import (
    InvalidConfig,
    StoreBusy,
    StoreDamaged,
    StoreMismatch,
    StoreUnavailable,
)
from headwater.core.results import Status
from headwater.layout.frame import ALIGNMENT, MAX_PLANES, Header, header_bytes, parse
from headwater.metrics import Metrics
from headwater.policy import Lru, Policy, policy_by_name
from headwater.storage.base import Clock, Deadline
from headwater.storage.local import directory
from headwater.storage.local.attachment import Attachment, IndexLocked
from headwater.storage.local.catalog import Catalog
from headwater.storage.local.directory import Gate
from headwater.storage.local.mend import mend
from headwater.storage.local.slab import Progress, Slab
from headwater.storage.local.slab_file import Remains, create_slab, open_slab, repair_slab
from headwater.storage.local.table import LeftBehind, Table


def attach(
    config: LocalStoreConfig,
    *,
    metrics: Metrics,
    clock: Clock,
    deadline: Deadline,
    progress: Progress | None = None,
    known: Remains | None = None,
) -> Attachment:
    """Open the directory, blocking until `deadline` at most for others (making and repairing take what they take).

    `known`: what this store had open before. Raises a StoreError that says what is wrong and what to do.
    """
    path = config.directory
    try:
        if config.limit_bytes is None and not path.is_symlink() and not path.exists():
            raise StoreUnavailable(f"{path} holds no store yet: give limit_bytes to make one")
        with contextlib.ExitStack() as undo, Gate(path, deadline, create=config.limit_bytes is not None) as gate:
            slab, alone = _open_slab(config, gate, known=known, progress=progress)
            undo.callback(slab.close)
            _require_agreement(config, slab)
            catalog = Catalog(Table(slab), _policy_of(slab), clock)
            if alone:
                _repair(config, slab, catalog, metrics=metrics, progress=progress)
            elif not slab.whole:
                raise StoreDamaged(f"{slab.path} was cut or grown; it can be repaired when its users are gone")
            else:
                slab.map()
            attachment = Attachment(slab, catalog)
            attachment.refresh(deadline)  # before the lock is ours: it may take long, and others want it
            attachment.enrol(_left_by(config), deadline)
            slab.locks.settle()
            if not slab.mapped:
                slab.sync()  # that it is in use: what is not synced after this is not believed after a power cut
            undo.pop_all()
    except OSError as error:
        raise StoreUnavailable(f"cannot use {path} as a store: {error.strerror or error}") from error
    except IndexLocked as error:
        raise StoreBusy(f"the index of {path} stays locked by another process; try again later") from error
    if config.prefault:  # with the gate open: this may take long, and concerns nobody else
        try:
            slab.prefault(progress)
        except BaseException:
            attachment.retire()
            raise
    return attachment


def destroy(path: Path, *, deadline: Deadline) -> None:
    """Remove a directory's store. Raises StoreBusy while a process is inside, and as `attach` for what is no store."""
    with Gate(path, deadline, create=False) as gate:
        try:
            slab = open_slab(gate, mapped=False)
        except FileNotFoundError:
            raise StoreUnavailable(f"no store in {path}") from None
        try:
            if not slab.locks.come_in():
                raise StoreBusy(f"{path} is in use: stop the processes that have it open first")
            os.unlink(directory.SLAB, dir_fd=gate.fd)
        finally:
            slab.close()


def _open_slab(
    config: LocalStoreConfig, gate: Gate, *, known: Remains | None, progress: Progress | None
) -> tuple[Slab, bool]:
    """The slab, and whether nobody else is inside."""
    mapped = directory.is_memory(gate.path)
    try:
        slab = open_slab(gate, mapped=mapped, known=known)
    except FileNotFoundError:
        if config.limit_bytes is None:
            raise StoreUnavailable(f"{config.directory} holds no store yet: give limit_bytes to make one") from None
        policy = policy_by_name(config.policy or Lru.name)  # an unknown one is refused before anything is made
        slab = create_slab(gate, limit_bytes=config.limit_bytes, policy=policy.name, mapped=mapped, progress=progress)
    return slab, slab.locks.come_in()


def _policy_of(slab: Slab) -> Policy:
    try:
        return policy_by_name(slab.header.policy)
    except InvalidConfig as error:
        raise StoreMismatch(f"{slab.path} was made by another version of Headwater: {error}") from error


def _repair(
    config: LocalStoreConfig, slab: Slab, catalog: Catalog, *, metrics: Metrics, progress: Progress | None
) -> None:
    """Put everything in order, alone: sizes, records, what dead owners left."""
    cut = repair_slab(slab, progress)
    slab.map()
    table = catalog.table
    left = table.left()
    down = not slab.is_new and left.weak and not left.clean and left.boot_id != directory.boot_id()
    if cut or down:
        slab.begin_epoch()
    table.set_busy(0)
    table.forget_owners()
    _complete_extents(catalog)
    num_lost = mend(catalog, _header_reader(slab), trusted=not down)
    table.set_newest(0)
    catalog.mirror.seen = 0
    if cut or down or num_lost:
        reason = "the slab was cut" if cut else "the machine went down while the store was open" if down else "damage"
        metrics.event("local_rebuilt", directory=str(config.directory), reason=reason, num_slots=num_lost)


def _left_by(config: LocalStoreConfig) -> LeftBehind:
    """How the directory is left if nobody signs out. Without syncing, a power cut may cost the records their order."""
    return LeftBehind(directory.boot_id(), clean=False, weak=config.durability is Durability.PROCESS)


def _complete_extents(catalog: Catalog) -> None:
    """Find out how extents are cut whose entry cannot be believed: as their records say, or not at all."""
    table = catalog.table
    for extent in range(catalog.geometry.num_extents):
        if table.extent(extent) is not None:
            continue
        first = extent * catalog.geometry.max_slots
        sizes = [record.slot_bytes for _, record in table.records(range(first, first + 8)) if record is not None]
        usable = [size for size in sizes if catalog.geometry.slots_in_extent(size)]
        table.set_extent(extent, max(usable, key=usable.count, default=0))


def _header_reader(slab: Slab) -> Callable[[int], Header | None]:
    def read(offset: int) -> Header | None:
        found = read_header(slab, offset)
        return found if isinstance(found, Header) else None

    return read


def read_header(slab: Slab, offset: int) -> Header | Status:
    """The header of whatever is in a slot; a second read only for pages of very many planes."""
    raw = memoryview(bytearray(ALIGNMENT))
    if not slab.read_into(offset, raw):
        return Status.SHORT
    header = parse(raw)
    size = int.from_bytes(raw[8:12], "little")
    if header is Status.SHORT and size <= header_bytes(MAX_PLANES):
        raw = memoryview(bytearray(size))
        header = parse(raw) if slab.read_into(offset, raw) else Status.SHORT
    return header


def _require_agreement(config: LocalStoreConfig, slab: Slab) -> None:
    """Refuse a process that wants other settings than the directory has."""
    limit = slab.header.limit_bytes
    if config.limit_bytes not in (None, limit):
        raise StoreMismatch(
            f"{config.directory} has a limit of {limit} bytes, {config.limit_bytes} was asked for: use its limit, "
            "another directory, or empty it with `headwater purge --all` and make it anew"
        )
    if config.policy not in (None, slab.header.policy):
        raise StoreMismatch(
            f"{config.directory} evicts by {slab.header.policy!r}, {config.policy!r} was asked for: "
            "all its users share one"
        )
