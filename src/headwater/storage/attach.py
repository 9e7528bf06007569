"""Coming into a LocalStore's directory: create it, check it, repair it, or say why not.

Whoever finds the directory empty of other processes holds it alone and may create, repair or rebuild. Whoever comes
to a directory in use only checks that it may come in. So an index is never rebuilt under a running process, and a
slot that a stopped writer still holds is never given to another (rules 3 and 10). Both sides hold `PresenceLock`.

The index is rebuilt from the frames in the slab, under a new epoch, when it is missing, damaged, older than the slab,
of another slab, or may have lost its order in a power cut. Rebuilt entries are hints like all others: a page is
believed when it is read and verified.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from headwater.config import Durability, LocalStoreConfig
from headwater.core.errors import (
    InvalidConfig,
    StoreBusy,
    StoreDamaged,
    StoreMismatch,
    StoreUnavailable,
)
from headwater.layout.frame import ALIGNMENT, MAX_PLANES, Fault, Header, header_bytes, parse
from headwater.metrics import Metrics
from headwater.policy import Lru, policy_by_name
from headwater.storage import directory
from headwater.storage.attachment import Attachment
from headwater.storage.base import Clock, Deadline
from headwater.storage.catalog import Catalog
from headwater.storage.database import VERSION, CatalogBusy, CatalogFull, Database
from headwater.storage.slab import SECTOR, Geometry, Progress, Slab, sectors

_MIN_INDEX_BYTES: Final = 4 << 20
_INDEX_BYTES_PER_SLOT: Final = 512  # room for a row, its place in the indexes and in the log


def index_share(limit_bytes: int) -> int:
    """How much of a directory's limit is kept for the index: half for its file, half for SQLite's log."""
    return max(_MIN_INDEX_BYTES, limit_bytes // 64)


def plan(limit_bytes: int) -> Geometry:
    """The slab for a directory of this limit."""
    share = index_share(limit_bytes)
    return Geometry.plan(limit_bytes, index_bytes=share, max_slots=share // 2 // _INDEX_BYTES_PER_SLOT)


def attach(
    config: LocalStoreConfig, *, metrics: Metrics, clock: Clock, deadline: Deadline, progress: Progress | None = None
) -> Attachment:
    """Open the directory, blocking until `deadline` at most for others (creating and rebuilding take what they take).

    Raises a StoreError that says what is wrong and what to do.
    """
    path = config.directory
    directory.prepare(path)
    with contextlib.ExitStack() as undo:
        try:
            presence = directory.PresenceLock(path)
            undo.callback(presence.close)
            alone = presence.come_in(deadline)
            if alone:
                directory.sweep_owners(path)
                slab, catalog = _open_alone(config, metrics=metrics, clock=clock, progress=progress)
                undo.callback(slab.close)
            else:
                slab = _open_slab(path)
                undo.callback(slab.close)
                _require_agreement(config, slab)
                catalog = _open_catalog(config, slab, deadline)
            undo.callback(catalog.close)
            _require_pair(config, slab, catalog)
            owner_lock = directory.OwnerLock(path)
            undo.callback(owner_lock.close)
            owner = _enrol(config, slab, catalog, owner_lock.token, alone=alone, deadline=deadline)
        except OSError as error:
            raise StoreUnavailable(f"cannot use {path} as a store: {error}") from error
        except CatalogBusy as error:
            raise StoreBusy(f"the index of {path} stays locked by another process; try again later") from error
        except CatalogFull as error:
            raise StoreUnavailable(f"the file system of {path} is full: the index cannot be written") from error
        presence.settle()
        undo.pop_all()
    attachment = Attachment(path, presence, owner_lock, slab=slab, catalog=catalog, owner=owner)
    if config.prefault:  # with the gate open: this may take long, and concerns nobody else
        try:
            slab.prefault(progress)
        except BaseException:
            attachment.retire()
            raise
    return attachment


def destroy(path: Path, *, deadline: Deadline) -> None:
    """Remove a directory's store, all its pages and its index. Raises StoreBusy while a process is inside."""
    presence = directory.PresenceLock(path)
    try:
        if not presence.come_in(deadline):
            raise StoreBusy(f"{path} is in use: stop the processes that have it open first")
        (path / directory.SLAB).unlink(missing_ok=True)  # first: without it no index brings anything back
        _remove_index(path)
        directory.sweep_owners(path)
    finally:
        presence.close()


def _remove_index(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        (path / (directory.INDEX + suffix)).unlink(missing_ok=True)


def _open_slab(path: Path) -> Slab:
    try:
        return Slab.open(path / directory.SLAB, mapped=directory.is_memory(path), repair=False)
    except FileNotFoundError as error:
        raise StoreDamaged(f"{path} is in use but has no slab; it can be rebuilt when its users are gone") from error


def _connect(config: LocalStoreConfig, deadline: Deadline) -> Database:
    while True:
        try:
            return Database(config.directory / directory.INDEX, power_safe=config.durability is Durability.POWER)
        except CatalogBusy:
            if deadline.expired:
                raise StoreBusy(f"the index of {config.directory} stays locked by another process") from None
            time.sleep(0.005)


def _open_catalog(config: LocalStoreConfig, slab: Slab, deadline: Deadline) -> Catalog:
    geometry = slab.geometry
    try:
        policy = policy_by_name(slab.policy)
    except InvalidConfig as error:
        raise StoreMismatch(f"{config.directory} was made by another version of Headwater: {error}") from error
    return Catalog(_connect(config, deadline), policy, log_kept=geometry.max_slots * geometry.num_extents)


def _enrol(
    config: LocalStoreConfig, slab: Slab, catalog: Catalog, token: str, *, alone: bool, deadline: Deadline
) -> int:
    """Sign in, and free what dead owners left behind."""

    def is_alive(other: str) -> bool:
        return not alone and directory.is_alive(config.directory, other)

    with catalog.transaction(deadline):
        owner = catalog.enrol(token)
        catalog.database.set_meta(boot_id=directory.boot_id(), clean=0)
        if config.durability is Durability.PROCESS:
            catalog.database.set_meta(weak=1)  # from now on a power cut may cost the index its order
        catalog.retire_dead(owner, is_alive, lambda slot: slab.wipe(slot.offset), idle=True)
    return owner


def _open_alone(
    config: LocalStoreConfig, *, metrics: Metrics, clock: Clock, progress: Progress | None
) -> tuple[Slab, Catalog]:
    path, mapped = config.directory, directory.is_memory(config.directory)
    try:
        slab = Slab.open(path / directory.SLAB, mapped=mapped, repair=True, progress=progress)
    except FileNotFoundError:
        return _create(config, mapped=mapped, progress=progress)
    except StoreDamaged as error:
        if config.limit_bytes is None:
            raise StoreDamaged(f"{error}: open it with a limit to start anew, or `headwater purge --all` it") from error
        metrics.event("local_slab_lost", directory=str(path), reason=str(error))
        return _create(config, mapped=mapped, progress=progress)
    try:
        _require_agreement(config, slab)
        catalog, reason = _trusted(config, slab)
        if catalog is None:
            metrics.event("local_rebuilt", directory=str(path), reason=reason)
            catalog = _rebuild(config, slab, clock=clock, progress=progress)
        return slab, catalog
    except BaseException:
        slab.close()
        raise


def _trusted(config: LocalStoreConfig, slab: Slab) -> tuple[Catalog | None, str]:
    """The index that is there, or why there is none to be used."""
    if not (config.directory / directory.INDEX).exists():
        return None, "it is missing"
    try:
        catalog = _open_catalog(config, slab, Deadline.after(config.open_timeout_s))
    except StoreDamaged as error:
        return None, str(error)
    try:
        reason = _doubt(catalog, slab, config)
    except StoreDamaged as error:
        reason = str(error)
    if not reason:
        return catalog, ""
    catalog.close()
    return None, reason


def _create(config: LocalStoreConfig, *, mapped: bool, progress: Progress | None) -> tuple[Slab, Catalog]:
    if config.limit_bytes is None:
        raise StoreUnavailable(f"{config.directory} holds no store yet: give limit_bytes to make one")
    path = config.directory / directory.SLAB
    policy = policy_by_name(config.policy or Lru.name)  # an unknown one is refused before anything is made
    slab = None
    try:
        slab = Slab.create(path, plan(config.limit_bytes), policy=policy.name, mapped=mapped, progress=progress)
        return slab, _new_catalog(config, slab, epoch=slab.epoch)
    except BaseException:
        if slab is not None:
            slab.close()
        path.unlink(missing_ok=True)  # no half-made store is left behind
        raise


def _new_catalog(config: LocalStoreConfig, slab: Slab, *, epoch: int) -> Catalog:
    _remove_index(config.directory)
    catalog = _open_catalog(config, slab, Deadline.after(config.open_timeout_s))
    try:
        catalog.database.create({"version": VERSION, "store_id": slab.store_id, "epoch": epoch})
    except BaseException:
        catalog.close()
        raise
    return catalog


def _doubt(catalog: Catalog, slab: Slab, config: LocalStoreConfig) -> str:
    """Why the index should not be used as it is; empty if it should."""
    if slab.repaired:
        return "the slab was cut"
    meta = catalog.database.meta()
    if meta.get("version") != VERSION:
        return f"it is of version {meta.get('version')}"
    if meta.get("store_id") != slab.store_id or meta.get("epoch") != slab.epoch:
        return "it belongs to another slab, or to an earlier epoch of this one"
    if meta.get("weak") and not meta.get("clean") and meta.get("boot_id") != directory.boot_id():
        return "the machine went down while the store was open"
    if not catalog.database.sound():
        return "it is damaged"
    with catalog.snapshot(Deadline.after(config.open_timeout_s)):
        if catalog.mirror.seq < slab.mark():
            return "it is older than the slab"
        if catalog.misplaced(slab.geometry):
            return "it names slots that do not exist"
        classes = catalog.slot_classes()
    for extent in range(slab.geometry.num_extents):  # a crash may come between the table and the commit: index wins
        if slab.extent_slot_bytes(extent) != classes.get(extent, 0):
            slab.set_extent_slot_bytes(extent, classes.get(extent, 0))
    return ""


def _rebuild(config: LocalStoreConfig, slab: Slab, *, clock: Clock, progress: Progress | None) -> Catalog:
    """A new index from the frames in the slab, under a new epoch, which it gets last: half an index is none."""
    slab.set_epoch(slab.epoch + 1)
    catalog = _new_catalog(config, slab, epoch=0)
    try:
        with catalog.transaction(Deadline.after(config.open_timeout_s)):
            found: list[tuple[int, Header]] = []
            for extent in range(slab.geometry.num_extents):
                slot_bytes = slab.extent_slot_bytes(extent)
                if slot_bytes % SECTOR or not slab.geometry.slots_in_extent(slot_bytes or SECTOR):
                    slot_bytes = 0
                slab.set_extent_slot_bytes(extent, slot_bytes)
                if slot_bytes:
                    catalog.cut(slab.geometry, extent, slot_bytes)
                    found += _pages_in(slab, extent, slot_bytes)
                if progress is not None:
                    progress(extent + 1, slab.geometry.num_extents)
            for offset, header in sorted(found, key=lambda page: page[1].meta.depth):  # parents before children
                used_s = min(clock.time(), header.sealed_at_ms / 1000)
                if not catalog.adopt(offset // SECTOR, header, used_s=used_s):
                    slab.wipe(offset)
            catalog.database.set_meta(epoch=slab.epoch)
    except BaseException:
        catalog.close()
        raise
    return catalog


def _pages_in(slab: Slab, extent: int, slot_bytes: int) -> Iterator[tuple[int, Header]]:
    start = slab.geometry.extent_offset(extent)
    for index in range(slab.geometry.slots_in_extent(slot_bytes)):
        offset = start + index * slot_bytes
        header = read_header(slab, offset)
        if isinstance(header, Header) and sectors(header.frame_bytes) == slot_bytes:
            yield offset, header


def read_header(slab: Slab, offset: int) -> Header | Fault:
    """The header of whatever is in a slot; a second read only for pages of very many planes."""
    raw = memoryview(bytearray(ALIGNMENT))
    if not slab.read_into(offset, raw):
        return Fault.SHORT
    header = parse(raw)
    size = int.from_bytes(raw[8:12], "little")
    if header is Fault.SHORT and size <= header_bytes(MAX_PLANES):
        raw = memoryview(bytearray(size))
        header = parse(raw) if slab.read_into(offset, raw) else Fault.SHORT
    return header


def _require_agreement(config: LocalStoreConfig, slab: Slab) -> None:
    """Refuse a process that wants other settings than the directory has."""
    limit = slab.geometry.limit_bytes
    if config.limit_bytes not in (None, limit):
        raise StoreMismatch(
            f"{config.directory} has a limit of {limit} bytes, {config.limit_bytes} was asked for: use its limit, "
            "another directory, or empty it with `headwater purge --all` and make it anew"
        )
    if config.policy not in (None, slab.policy):
        raise StoreMismatch(
            f"{config.directory} evicts by {slab.policy!r}, {config.policy!r} was asked for: all its users share one"
        )


def _require_pair(config: LocalStoreConfig, slab: Slab, catalog: Catalog) -> None:
    meta = catalog.database.meta()
    if meta.get("store_id") != slab.store_id or meta.get("epoch") != slab.epoch:
        raise StoreDamaged(f"index and slab of {config.directory} do not belong together")
