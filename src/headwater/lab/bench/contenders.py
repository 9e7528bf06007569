"""What the store benchmark compares: LocalStore in several ways of use, and the plain ways to keep the same frames.

A contender keeps frames under names in a fixed amount of room: each put, once it is full, costs an old page its place.
All of them are given the same frames in the same batches; whether one makes and checks digests is its `digests`. Those
on a disk keep their pages in one file, which `sync` brings to the disk and `evict` puts out of the page cache.
"""

import contextlib
import ctypes
import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np

from headwater.core.errors import StoreError
from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.lab.bench.pools import IDENTITY, Page, Wanted, seal_all
from headwater.layout.frame import ALIGNMENT, frame_bytes, verify
from headwater.layout.spec import KVLayout
from headwater.storage.base import Deadline, Store
from headwater.storage.local import LocalStore
from headwater.storage.sealed import put_sealed
from headwater.storage.verified import VerifiedStore

CALL_S: Final = 120.0


class StoreContender(ABC):
    """Keeps frames under names. Raises StoreError if it does not do all of what it is told."""

    def __init__(self, layout: KVLayout, *, digests: bool = True, file: Path | None = None) -> None:
        self.layout = layout
        self.digests = digests
        self.file = file  # that all pages are in; None in memory

    @abstractmethod
    def put(self, pages: list[Page]) -> None:
        """Keep frames. They come sealed, and whoever makes digests makes them again."""

    @abstractmethod
    def get(self, pages: list[Wanted]) -> None:
        """Fill buffers."""

    @abstractmethod
    def held(self, names: Sequence[PageName]) -> list[bool]:
        """Which pages are still there."""


class Ours(StoreContender):
    """LocalStore as it is used, or (without digests) moving frames that a GPU kernel seals and verifies in passing."""

    def __init__(self, store: LocalStore, layout: KVLayout, *, digests: bool = True, file: Path | None = None) -> None:
        super().__init__(layout, digests=digests, file=file)
        self._store = store
        self._reader: Store = store
        if digests:
            self._reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=layout.plane_bytes)

    def put(self, pages: list[Page]) -> None:
        """Seal on the way in; without digests, put what is sealed."""
        deadline = Deadline.after(CALL_S)
        if self.digests:
            statuses = put_sealed(self._store, pages, self.layout, now_ms=int(time.time() * 1000), deadline=deadline)
        else:
            statuses = self._store.put([(meta.name, frame) for meta, frame in pages], deadline=deadline)
        require(statuses, Status.STORED)

    def get(self, pages: list[Wanted]) -> None:
        """Get, verified."""
        require(self._reader.get_into(pages, deadline=Deadline.after(CALL_S)), Status.HIT)

    def held(self, names: Sequence[PageName]) -> list[bool]:
        """Ask the store."""
        return self._store.contains(names, deadline=Deadline.after(CALL_S))


class SealThenPut(Ours):
    """LocalStore given whole batches that were sealed before: every page crosses the memory bus once more."""

    def put(self, pages: list[Page]) -> None:
        """Seal all, then put all."""
        seal_all(pages, self.layout)
        batch = [(meta.name, frame) for meta, frame in pages]
        require(self._store.put(batch, deadline=Deadline.after(CALL_S)), Status.STORED)


class FilePerBlock(StoreContender):
    """One file per block, written beside and renamed; the oldest is unlinked when there is no room."""

    def __init__(self, path: Path, layout: KVLayout, *, max_pages: int) -> None:
        super().__init__(layout)
        path.mkdir()
        self._path = path
        self._max_pages = max_pages
        self._names: dict[PageName, Path] = {}

    def put(self, pages: list[Page]) -> None:
        """Seal, write a temporary file, rename."""
        seal_all(pages, self.layout)
        for meta, frame in pages:
            while len(self._names) >= self._max_pages:
                oldest = next(iter(self._names))
                self._names.pop(oldest).unlink()
            target = self._path / meta.name.hex()
            temporary = target.with_suffix(".tmp")
            with _opened(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
                _write_all(fd, frame, 0)
            os.rename(temporary, target)
            self._names[meta.name] = target

    def get(self, pages: list[Wanted]) -> None:
        """Open, read, verify."""
        for name, buffer in pages:
            with _opened(self._names[name], os.O_RDONLY) as fd:
                _read_all(fd, buffer, 0)
        _verify_all(pages, self.layout)

    def held(self, names: Sequence[PageName]) -> list[bool]:
        """Own bookkeeping."""
        return [name in self._names for name in names]


class PlainFile(StoreContender):
    """One preallocated file and nothing else: pwrite around it in a ring, pread from anywhere in it."""

    def __init__(self, path: Path, layout: KVLayout, *, max_pages: int, digests: bool) -> None:
        super().__init__(layout, digests=digests, file=path)
        self._stride = -(-frame_bytes(layout.plane_bytes) // ALIGNMENT) * ALIGNMENT
        self._ring: list[PageName | None] = [None] * max_pages
        self._places: dict[PageName, int] = {}
        self._next = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def __enter__(self) -> Self:
        """Allocate the file, which closes itself at the end of the block."""
        os.posix_fallocate(self._fd, 0, self._stride * len(self._ring))
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        """Close the file."""
        os.close(self._fd)

    def put(self, pages: list[Page]) -> None:
        """Write whole frames, each over the oldest."""
        if self.digests:
            seal_all(pages, self.layout)
        for meta, frame in pages:
            place = self._next
            self._next = (place + 1) % len(self._ring)
            gone = self._ring[place]
            if gone is not None:
                del self._places[gone]
            _write_all(self._fd, frame, place * self._stride)
            self._ring[place] = meta.name
            self._places[meta.name] = place

    def get(self, pages: list[Wanted]) -> None:
        """Read whole frames."""
        for name, buffer in pages:
            _read_all(self._fd, buffer, self._places[name] * self._stride)
        if self.digests:
            _verify_all(pages, self.layout)

    def held(self, names: Sequence[PageName]) -> list[bool]:
        """Own bookkeeping."""
        return [name in self._places for name in names]


def require(statuses: Sequence[Status] | Sequence[Status], wanted: Status) -> None:
    """Raise StoreError unless all went well: a benchmark of misses is no benchmark."""
    others = {status for status in statuses if status is not wanted}
    if others:
        raise StoreError(f"the store answered {', '.join(sorted(others))} where {wanted} was expected")


def sync(file: Path) -> None:
    """Block until every byte of a file is on the disk, whoever wrote it."""
    with _opened(file, os.O_RDWR) as fd:
        os.fdatasync(fd)


def evict(file: Path) -> float:
    """Put a file out of the page cache; return the share of it that stayed, which on tmpfs is all."""
    with _opened(file, os.O_RDWR) as fd:
        os.fdatasync(fd)  # what is not written yet would stay
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:  # to ask about: not one byte is touched
            memory = np.frombuffer(mapping, dtype=np.uint8)
            resident = np.zeros(-(-len(memory) // mmap.PAGESIZE), dtype=np.uint8)
            failed = ctypes.CDLL(None).mincore(
                ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(len(memory)), ctypes.c_void_p(resident.ctypes.data)
            )
            del memory  # or the mapping could not be closed
    if failed:
        raise StoreError(f"the kernel does not say what of {file} is in its page cache")
    return float(np.mean(resident & 1))


def _verify_all(pages: list[Wanted], layout: KVLayout) -> None:
    """Check what was read, every byte."""
    now_ms = int(time.time() * 1000)
    for name, frame in pages:
        found = verify(frame, name, now_ms=now_ms, identity=IDENTITY, plane_bytes=layout.plane_bytes)
        if isinstance(found, Status):
            raise StoreError("a baseline gave back other bytes than it was given")


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def _read_all(fd: int, buffer: memoryview, offset: int) -> None:
    done = 0
    while done < len(buffer):
        got = os.preadv(fd, [buffer[done:]], offset + done)
        if not got:
            raise StoreError("a baseline's file ended early")
        done += got
