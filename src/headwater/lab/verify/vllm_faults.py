"""What goes wrong on purpose in `verify --vllm`: stores that fail, hang or lie half-way, and damage behind all checks.

`sabotage` is put around the start of an engine, in the engine's process. It reaches into how the connector is put
together, on the worker's side alone: what the scheduler sees of the stores stays right, so it promises what is then not
given. No vLLM here.
"""

import enum
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final
from unittest.mock import patch

import torch

from headwater.core.errors import StoreDamaged
from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.integrations.vllm import build, opening
from headwater.lab.verify.spoiling import SpoilingStaging
from headwater.storage.base import Deadline, Store
from headwater.storage.local import directory
from headwater.storage.local.families import live_records
from headwater.storage.local.slab import Slab
from headwater.storage.local.slab_header import read_slab_header
from headwater.storage.local.table import Table
from headwater.storage.wrappers import OpaqueStore
from headwater.transfer.executor import staging

_SIGN: Final = 0x80  # of the last byte of a float32, little endian, and of every other bfloat16
_FLOAT_BYTES: Final = 4
_HANG_S: Final = 600.0
_FLIP_S: Final = 30.0


class VllmFault(enum.StrEnum):
    """What goes wrong."""

    FAIL = "fail"  # the store fails behind its first so many pages
    HANG = "hang"  # it never answers for them, whatever the deadline
    DAMAGE = "damage"  # it gives other bytes, which verification has to notice
    SPOIL = "spoil"  # bytes change on the device, behind all checks: nobody can notice but who compares


class VllmFaultyStore(OpaqueStore):
    """Gives so many pages as they are, then does as its fault says."""

    interruptible: ClassVar[bool] = False  # a hanging one heeds no deadline

    def __init__(self, store: Store, fault: VllmFault, num_good: int) -> None:
        super().__init__(store)
        self._fault = fault
        self._num_good = num_good
        self._over = threading.Event()

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """Give the first ones; the rest as the fault says."""
        num = min(self._num_good, len(pages))
        self._num_good -= num
        good = self.store.get_into(pages[:num], deadline=deadline) if num else []
        rest = pages[num:]
        if not rest:
            return good
        if self._fault is VllmFault.HANG:
            self._over.wait(_HANG_S)
        if self._fault is not VllmFault.DAMAGE:
            return good + [Status.FAILED] * len(rest)
        bad = self.store.get_into(rest, deadline=deadline)
        for _, frame in rest:
            frame[-1] ^= _SIGN
        return good + bad

    def let_go(self) -> None:
        """Answer what hangs."""
        self._over.set()


class SignTurningStaging(SpoilingStaging):
    """Turns the sign of every number of each block."""

    def spoil(self, rows: Sequence[torch.Tensor], slots: Sequence[int]) -> None:
        """Turn the signs of each."""
        for row in rows:
            for slot in slots:
                row[slot, _FLOAT_BYTES - 1 :: _FLOAT_BYTES] ^= _SIGN
            if row.is_cuda:  # vLLM computes on another stream
                torch.cuda.synchronize(row.device)


@contextmanager
def sabotage(fault: VllmFault | None, *, num_good: int = 0) -> Iterator[list[VllmFaultyStore]]:
    """An engine that is started in this block has its fault for good; others do not. Yields the stores that it gets."""
    made: list[VllmFaultyStore] = []
    if fault is None:
        yield made
        return
    if fault is VllmFault.SPOIL:
        with patch.object(staging, "TorchStaging", SignTurningStaging):
            yield made
        return
    open_tiers, opened = build.open_tiers, build.open_worker

    def tiers(*args: Any, **more: Any) -> dict[str, Store]:
        stores = {name: VllmFaultyStore(store, fault, num_good) for name, store in open_tiers(*args, **more).items()}
        made.extend(stores.values())
        return dict(stores)

    def open_worker(*args: Any, **more: Any) -> build.OpenWorker:
        with patch.object(build, "open_tiers", tiers):
            return opened(*args, **more)

    with patch.object(opening, "open_worker", open_worker):
        yield made


def flip_pages(where: Path) -> int:
    """Turn one bit in the middle of each page that a local store holds, beside whoever has it open. Returns how many.

    As a bad memory would: the index still says that all is well.
    """
    path = where / directory.SLAB
    fd = os.open(path, os.O_RDWR)
    header = read_slab_header(fd, path)
    if header is None:
        os.close(fd)
        raise StoreDamaged(f"{path} has no header")
    slab = Slab(path, fd, header, mapped=False)  # it closes the file
    try:
        table = Table(slab)
        num = 0
        for number, record in live_records(table, Deadline.after(_FLIP_S)):
            at = table.geometry.offset(number, record.slot_bytes) + record.num_bytes // 2
            os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1]), at)
            num += 1
        return num
    finally:
        slab.close()
