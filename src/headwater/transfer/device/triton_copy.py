"""Gather and scatter on the device, in Triton, with the XXH3-64 of each piece that passes.

    gather    rows[i, plane] <- plane of block slots[i]      scatter    plane of block slots[i] <- rows[i, plane]
    digest    the same as gather, and nothing is written but digests

A *task* is one (block, plane) and belongs to one warp; a program takes as many tasks at a time as it has warps, and
then the next ones. Planes of one launch may differ in length. How wide the accesses are (16 bytes, 8, 4, 1) follows
from what the planes, the rows and their lengths are all multiples of. A task copies whole stripes of 64 bytes first,
then looks at its last 64 bytes, and writes those that the stripes have left.

Only launches: nothing waits, nothing is allocated. So, unlike in `testing/copy.py`, the oracle, ids are on the device
and *not* checked: they exist, and no destination is there twice. Where a source changes while it is copied, the digest
may fit no bytes.

Not here: the kernels (`copy_kernels.py`), staging, streams, the way to the host, and what a digest is compared with.
"""

import math
from typing import Any, Final

import torch

from headwater.core.errors import InvalidConfig, InvalidCopy
from headwater.layout.spec import KVLayout
from headwater.transfer.device.arena import DeviceCache, find_planes
from headwater.transfer.device.copy_kernels import copy_planes
from headwater.transfer.device.xxh3 import WORDS, interpreted

_MAX_PLANE_BYTES: Final = (1 << 31) - 1024  # offsets within a plane are 32 bits wide
_WARPS: Final = 16  # per program
_FEW_WARPS: Final = 4  # the same, where there are at most
_FEW_TASKS: Final = 512
_BLOCKS: Final = 4  # KiB that each warp has in flight


class PlaneTable:
    """Where a cache's planes are: base address, bytes of a block, offset in the page, way to the next; on the device.

    `layout` picks the planes; all of the cache's by default. Holds the planes' memory as long as it lives.
    """

    def __init__(self, cache: DeviceCache, layout: KVLayout | None = None) -> None:
        self.layout = layout or cache.layout
        if cache.device.type != ("cpu" if interpreted() else "cuda"):
            how = "interpreted (TRITON_INTERPRET), and reach cpu" if interpreted() else "compiled, and reach cuda"
            raise InvalidConfig(f"the copy kernels are {how} memory; the cache is on {cache.device}")
        self._cache = cache
        self._rows = find_planes(cache, self.layout)
        if max(self.layout.plane_bytes) > _MAX_PLANE_BYTES:
            raise InvalidCopy(
                f"a plane has {max(self.layout.plane_bytes)} bytes per block; the kernels take less than 2 GiB"
            )
        places = [(row.data_ptr(), row.stride(0)) for row in self._rows]
        sizes = zip(places, self.layout.plane_bytes, self.layout.offsets, strict=True)
        entries = [(base, length, offset, stride) for (base, stride), length, offset in sizes]
        self._alignments = [math.gcd(base, length, stride) for base, length, _, stride in entries]
        self._ends = (*self.layout.offsets, self.layout.page_bytes)
        self._entries = torch.tensor(entries, dtype=torch.int64).to(cache.device)
        self._words = torch.tensor(WORDS, dtype=torch.uint64).to(cache.device)
        self.device = self._entries.device

    def span(self, planes: range) -> tuple[int, int]:
        """Byte offset of these planes in a payload, and how many bytes they have together."""
        count = len(self.layout.planes)
        if planes.step != 1 or not 0 <= planes.start <= planes.stop <= count:
            raise InvalidCopy(f"{planes} is not a run of planes; there are {count}")
        start = self._ends[planes.start]
        return start, self._ends[planes.stop] - start

    def close(self) -> None:
        """Let go of the planes and free the table. Idempotent; nothing can be copied with it any more."""
        self._rows = []
        self._entries = self._words = torch.empty(0)

    def _alignment(self, planes: range, rows: int, row_stride: int) -> int:
        """What every piece begins and ends at a multiple of, here and there."""
        common = math.gcd(16, rows, row_stride, *self._alignments[planes.start : planes.stop])
        return common if common != 2 else 1


class Launcher:
    """One of the kernels, launched by addresses on any stream: nothing is checked, and it costs a third.

    For who launches thousands a second over memory of its own. Rows may be host memory that is registered with CUDA:
    then the kernel itself copies over the bus. Few tasks are spread over more programs, of fewer warps: they are over
    sooner. Only where kernels are compiled.
    """

    def __init__(
        self, table: PlaneTable, *, scatters: bool, digests: bool, copies: bool = True, programs: int | None = None
    ) -> None:
        """Compiles, which takes seconds the first time on a machine. `copies`: or it only digests, and has no rows."""
        self._table = table
        self._programs = programs
        self._constants = scatters, copies, digests
        self._addresses = table._entries.data_ptr(), table._words.data_ptr()
        self._compiled: dict[tuple[int, int], Any] = {}  # by alignment and warps
        self._plane_alignments: dict[range, int] = {}
        for warps in (_WARPS, _FEW_WARPS):
            self._compile(self._alignment(range(len(table.layout.planes)), 0, 0), warps)

    def __call__(
        self,
        stream: int,
        planes: range,
        *,
        slots: int,
        num_rows: int,
        digests: int,
        rows: int = 0,
        row_stride: int = 0,
    ) -> None:
        """Copy or digest `planes` of `num_rows` blocks. `slots` and `digests`: dense tables that the device reaches."""
        num_tasks = num_rows * len(planes)
        alignment = self._alignment(planes, rows, row_stride)
        most = self._programs
        warps = _WARPS
        if num_tasks <= _FEW_TASKS:
            warps, most = _FEW_WARPS, None
        compiled = self._compiled.get((alignment, warps)) or self._compile(alignment, warps)
        groups = -(-num_tasks // warps)
        numbers = planes.start, self._table._ends[planes.start], num_rows, num_tasks, row_stride, len(planes)
        constants = *self._constants, alignment, warps, _BLOCKS if alignment == 16 else 1
        grid = min(groups, most or groups), 1, 1
        compiled[grid](*self._addresses, slots, rows, digests, *numbers, *constants, stream=stream)

    def _alignment(self, planes: range, rows: int, row_stride: int) -> int:
        known = self._plane_alignments.get(planes)
        if known is None:
            known = self._plane_alignments[planes] = self._table._alignment(planes, 0, 0)
        common = math.gcd(known, rows, row_stride)
        return common if common != 2 else 1

    def _compile(self, alignment: int, warps: int) -> Any:
        table = self._table
        scatters, copies, digests = self._constants
        word = table._entries
        with torch.cuda.device(table.device):
            compiled = copy_planes.warmup(
                *(word, table._words, word, word.view(torch.uint8), word, 0, 0, 2, 2, 32, 2),
                SCATTERS=scatters,
                COPIES=copies,
                DIGESTS=digests,
                ALIGNMENT=alignment,
                WARPS=warps,
                BLOCKS=_BLOCKS if alignment == 16 else 1,
                num_warps=warps,
                grid=(1,),
            )
        self._compiled[alignment, warps] = compiled
        return compiled
