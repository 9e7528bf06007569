# ruff: noqa: FBT003, N803  what a kernel is compiled for is in capitals, and some of it is yes or no
"""Gather and scatter on the device, in Triton, with the XXH3-64 of each piece that passes.

    gather    rows[i, plane] <- plane of block slots[i]      scatter    plane of block slots[i] <- rows[i, plane]
    digest    the same as gather, and nothing is written but digests

A *task* is one (block, plane) and belongs to one warp; a program takes as many tasks at a time as it has warps, and
then the next ones. Planes of one launch may differ in length. How wide the accesses are (16 bytes, 8, 4, 1) follows
from what the planes, the rows and their lengths are all multiples of. A task copies whole stripes of 64 bytes first,
then looks at its last 64 bytes, and writes those that the stripes have left.

Only launches, on the current stream: nothing waits, nothing is allocated. So, unlike in `copy.py`, the oracle, ids are
on the device and *not* checked: they exist, and no destination is there twice. Where a source changes while it is
copied, the digest may fit no bytes. A kernel is compiled when it is first launched, which takes seconds.

Not here: staging, streams, the way to the host, and what a digest is compared with.
"""

import math
from typing import Any, Final

import torch

from headwater.core.errors import InvalidConfig, InvalidCopy
from headwater.layout.spec import KVLayout
from headwater.transfer.device.arena import DeviceCache
from headwater.transfer.device.copy import check_rows, find_planes
from headwater.transfer.device.xxh3 import (
    LAST_STRIPE,
    SCRAMBLE,
    SHORT,
    START,
    WORDS,
    absorb,
    finish,
    interpreted,
    jit,
    kernel,
    scramble,
    short,
    tl,
)

_MAX_PLANE_BYTES: Final = (1 << 31) - 1024  # offsets within a plane are 32 bits wide
_WARPS: Final = 16  # per program
_FEW_WARPS: Final = 4  # the same, where there are at most
_FEW_TASKS: Final = 512
_BLOCKS: Final = 4  # KiB that each warp has in flight
_ADDRESSES: Final = ("slots", "rows", "digests")
_NUMBERS: Final = ("first_plane", "start", "num_rows", "num_tasks", "row_stride", "digest_stride")


class PlaneTable:
    """Where a cache's planes are: base address, bytes of a block, offset in the page, way to the next; on the device.

    `layout` picks the planes, as in `copy.py`; all of the cache's by default. Holds the planes' memory as long as it
    lives, but a copy after the cache was closed is ResourceClosed.
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


def gather(
    table: PlaneTable,
    slots: torch.Tensor,
    rows: torch.Tensor,
    *,
    planes: range,
    digests: torch.Tensor | None = None,
    programs: int | None = None,
) -> None:
    """Copy planes of blocks into rows: block `slots[i]` into `rows[i]`, tightly packed, the first plane at column 0.

    `slots` are int64, [n], `rows` uint8, [n, width], both on the device. Bytes of a row behind the planes are not
    touched. `digests`, int64 [n, len(planes)], receives the XXH3-64 of each piece. At most `programs` programs run, as
    many as there is work for by default. Mutates `rows` and `digests`, in stream order. Raises InvalidCopy for what
    does not fit, before anything is launched.
    """
    _launch(table, slots, rows, planes, digests, programs, scatters=False)


def scatter(
    table: PlaneTable,
    slots: torch.Tensor,
    rows: torch.Tensor,
    *,
    planes: range,
    digests: torch.Tensor | None = None,
    programs: int | None = None,
) -> None:
    """Copy rows into planes of blocks: `gather` the other way. Mutates the cache's planes and `digests`."""
    _launch(table, slots, rows, planes, digests, programs, scatters=True)


def digest(
    table: PlaneTable,
    slots: torch.Tensor,
    digests: torch.Tensor,
    *,
    planes: range,
    programs: int | None = None,
) -> None:
    """Digest planes of blocks where they are. Mutates `digests` and nothing else; otherwise as `gather`."""
    rows = torch.empty(0, dtype=torch.uint8, device=slots.device).expand(len(slots), 0)
    _launch(table, slots, rows, planes, digests, programs, scatters=False, copies=False)


def _launch(
    table: PlaneTable,
    slots: torch.Tensor,
    rows: torch.Tensor,
    planes: range,
    digests: torch.Tensor | None,
    programs: int | None,
    *,
    scatters: bool,
    copies: bool = True,
) -> None:
    start, num_bytes = table.span(planes)
    _check(table, slots, rows, planes, digests, num_bytes if copies else 0)
    if programs is not None and programs < 1:
        raise InvalidCopy(f"a copy needs at least one program, not {programs}")
    num_tasks = len(slots) * len(planes)
    if num_tasks == 0:
        return
    groups = -(-num_tasks // _WARPS)
    alignment = table._alignment(planes, rows.data_ptr(), rows.stride(0) if len(rows) > 1 else 0)
    with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]  # Triton launches on the current device
        _copy[(min(groups, programs or groups),)](
            table._entries,
            table._words,
            slots,
            rows,
            slots if digests is None else digests,
            planes.start,
            start,
            len(slots),
            num_tasks,
            rows.stride(0),
            0 if digests is None else digests.stride(0),
            SCATTERS=scatters,
            COPIES=copies,
            DIGESTS=digests is not None,
            ALIGNMENT=alignment,
            WARPS=_WARPS,
            BLOCKS=_BLOCKS if alignment == 16 else 1,
            num_warps=_WARPS,
        )


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
            compiled = _copy.warmup(
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


def _check(
    table: PlaneTable,
    slots: torch.Tensor,
    rows: torch.Tensor,
    planes: range,
    digests: torch.Tensor | None,
    num_bytes: int,
) -> None:
    _ = table._cache.rows  # ResourceClosed
    check_rows(rows, 0, num_bytes)
    if rows.stride(1) != 1:
        raise InvalidCopy(f"rows must be contiguous bytes, not strides of {rows.stride()}")
    if slots.dtype != torch.int64 or slots.shape != (len(rows),) or not slots.is_contiguous():
        raise InvalidCopy(f"{len(rows)} rows need as many int64 slots, not {slots.dtype} of shape {tuple(slots.shape)}")
    tensors = [slots, rows]
    if digests is not None:
        shape = (len(rows), len(planes))
        if digests.dtype != torch.int64 or digests.shape != shape or digests.stride(1) != 1:
            raise InvalidCopy(f"digests must be int64 of shape {shape}, not {digests.dtype} of {tuple(digests.shape)}")
        tensors.append(digests)
    for tensor in tensors:
        if tensor.device != table.device:
            raise InvalidCopy(f"a tensor on {tensor.device} cannot go with planes on {table.device}")


@kernel(_ADDRESSES + _NUMBERS)
def _copy(
    entries: tl.tensor,
    words: tl.tensor,
    slots: tl.tensor,
    rows: tl.tensor,
    digests: tl.tensor,
    first_plane: tl.tensor,
    start: tl.tensor,
    num_rows: tl.tensor,
    num_tasks: tl.tensor,
    row_stride: tl.tensor,
    digest_stride: tl.tensor,
    SCATTERS: tl.constexpr,
    COPIES: tl.constexpr,
    DIGESTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Words are [task, stripe of half a block, pair], a warp has one task: only the bounds of loops cross warps."""
    stripe = tl.arange(0, 8)[None, :, None]
    pair = 2 * tl.arange(0, 4)
    key = words + 8 * stripe + 8 * pair[None, None, :]
    keys = (tl.load(key), tl.load(key + 8), tl.load(key + 64), tl.load(key + 72))
    mixers = (tl.load(words + SCRAMBLE + 8 * pair)[None, :], tl.load(words + SCRAMBLE + 8 + 8 * pair)[None, :])
    for group in range(tl.program_id(0), tl.cdiv(num_tasks, WARPS), tl.num_programs(0)):
        task = group * WARPS + tl.arange(0, WARPS)
        real = task < num_tasks
        plane, row = task // num_rows, task % num_rows
        entry = entries + (first_plane + plane) * 4
        bytes_per_block = tl.load(entry + 1, mask=real, other=0)
        slot = tl.load(slots + row, mask=real, other=0)
        paged = tl.load(entry, mask=real, other=0) + slot * tl.load(entry + 3, mask=real, other=0)
        packed = rows.to(tl.int64) + row.to(tl.int64) * row_stride + tl.load(entry + 2, mask=real, other=0) - start
        source, target = (packed, paged) if SCATTERS else (paged, packed)
        length = bytes_per_block.to(tl.int32)
        stripes = tl.maximum(length - 1, 0) // 64  # all but the last, which may be a part of one
        blocks = stripes // 16
        even = tl.zeros((WARPS, 4), tl.uint64) + tl.load(words + START + pair)[None, :]
        odd = tl.zeros((WARPS, 4), tl.uint64) + tl.load(words + START + 1 + pair)[None, :]
        whole = 0
        piece = (source, target, stripes * 64)
        if ALIGNMENT == 16:  # narrow accesses are slow anyway, and costly to compile
            whole = tl.min(blocks) // BLOCKS
            for step in range(whole):
                even, odd = _step(piece, step, even, odd, keys, mixers, True, COPIES, DIGESTS, ALIGNMENT, BLOCKS)
        for step in range(whole, tl.cdiv(tl.max(stripes), 16 * BLOCKS)):
            even, odd = _step(piece, step, even, odd, keys, mixers, False, COPIES, DIGESTS, ALIGNMENT, BLOCKS)
        begin, end = 64 - length, tl.zeros_like(length) + 64  # of the piece, seen from its last 64 bytes
        last_even, last_odd = _load(source - begin, begin, end, True, ALIGNMENT)
        if COPIES:
            _store(target - begin, last_even, last_odd, begin + stripes * 64, end, True, ALIGNMENT)
        if DIGESTS:
            last_key = words + LAST_STRIPE + 8 * pair[None, None, :]
            last_even, last_odd = absorb(last_even, last_odd, tl.load(last_key), tl.load(last_key + 8))
            even += tl.sum(tl.where(stripe == 0, last_even, 0), axis=1)
            odd += tl.sum(tl.where(stripe == 0, last_odd, 0), axis=1)
            digest = finish(even, odd, length, words)
            if tl.min(length) <= SHORT:
                digest = tl.where(length <= SHORT, short(source, length, words), digest)
            tl.store(digests + row.to(tl.int64) * digest_stride + plane, digest.to(tl.int64, bitcast=True), mask=real)


@jit
def _step(
    piece: tl.tuple,
    step: tl.tensor,
    even: tl.tensor,
    odd: tl.tensor,
    keys: tl.tuple,
    mixers: tl.tuple,
    WHOLE: tl.constexpr,
    COPIES: tl.constexpr,
    DIGESTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> tl.tuple:
    """Copy the next BLOCKS KiB of each task: all loads before the first store. WHOLE: every task has them, and more."""
    offset = step * (BLOCKS * 1024)
    source, target, left = piece[0] + offset, piece[1] + offset, piece[2] - offset
    zero = tl.zeros_like(left)
    words = ()
    for half in tl.static_range(2 * BLOCKS):
        at = half * 512
        words = words + (_load(source + at, zero, left - at, not WHOLE, ALIGNMENT),)  # type: ignore[assignment]  # noqa: RUF005
    for half in tl.static_range(2 * BLOCKS if COPIES else 0):
        at = half * 512
        _store(target + at, words[half][0], words[half][1], zero, left - at, not WHOLE, ALIGNMENT)
    if DIGESTS:
        for block in tl.static_range(BLOCKS):
            first_even, first_odd = absorb(words[2 * block][0], words[2 * block][1], keys[0], keys[1])
            second_even, second_odd = absorb(words[2 * block + 1][0], words[2 * block + 1][1], keys[2], keys[3])
            if not WHOLE:
                stripe = tl.arange(0, 8)[None, :, None] * 64 + block * 1024
                first, second = stripe < left[:, None, None], stripe + 512 < left[:, None, None]
                first_even, first_odd = tl.where(first, first_even, 0), tl.where(first, first_odd, 0)
                second_even, second_odd = tl.where(second, second_even, 0), tl.where(second, second_odd, 0)
            even += tl.sum(first_even + second_even, axis=1)
            odd += tl.sum(first_odd + second_odd, axis=1)
            if WHOLE:
                even, odd = scramble(even, mixers[0]), scramble(odd, mixers[1])
            else:
                over = left[:, None] >= (block + 1) * 1024
                even = tl.where(over, scramble(even, mixers[0]), even)
                odd = tl.where(over, scramble(odd, mixers[1]), odd)
    return even, odd


@jit
def _load(
    address: tl.tensor, first: tl.tensor, end: tl.tensor, MASKED: tl.constexpr, ALIGNMENT: tl.constexpr
) -> tl.tuple:
    """512 bytes of each task as even and odd words, [task, stripe, pair]; zero what is not in [first, end)."""
    if ALIGNMENT == 16:
        at, mask = _vectors(address, first, end)
        both = tl.load(at, mask=mask, other=0) if MASKED else tl.load(at)
        even, odd = tl.split(tl.reshape(both, (address.shape[0], 8, 4, 2)))
    else:
        even = _load_words(address, 0, first, end, MASKED, ALIGNMENT)
        odd = _load_words(address, 8, first, end, MASKED, ALIGNMENT)
    return even, odd


@jit
def _store(
    address: tl.tensor,
    even: tl.tensor,
    odd: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    MASKED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
) -> None:
    """Write what `_load` read; nothing outside [first, end)."""
    if ALIGNMENT == 16:
        at, mask = _vectors(address, first, end)
        both = tl.reshape(tl.join(even, odd), (address.shape[0], 64))
        if MASKED:
            tl.store(at, both, mask=mask)
        else:
            tl.store(at, both)
    else:
        _store_words(address, 0, even, first, end, MASKED, ALIGNMENT)
        _store_words(address, 8, odd, first, end, MASKED, ALIGNMENT)


@jit
def _vectors(address: tl.tensor, first: tl.tensor, end: tl.tensor) -> tl.tuple:
    """Pointers to 64 words of each task, and which of them count; both said so that two words are one access."""
    word = tl.arange(0, 64)
    at = tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), 16)[:, None] + word[None, :]
    offset = (word // 2 * 16)[None, :]
    return at, (offset >= first[:, None]) & (offset < end[:, None])


@jit
def _load_words(
    address: tl.tensor, OFFSET: tl.constexpr, first: tl.tensor, end: tl.tensor, MASKED: tl.constexpr, UNIT: tl.constexpr
) -> tl.tensor:
    offset = tl.arange(0, 32)[:, None] * 16 + OFFSET
    at = _units(address[None, :] + offset, UNIT)
    words = tl.zeros(at.shape, tl.uint64)
    for unit in tl.static_range(8 // UNIT):
        if MASKED:
            here = offset + unit * UNIT
            part = tl.load(at + unit, mask=(here >= first[None, :]) & (here < end[None, :]), other=0)
        else:
            part = tl.load(at + unit)
        words |= part.to(tl.uint64) << (8 * UNIT * unit)
    return tl.reshape(tl.trans(words), (address.shape[0], 8, 4))


@jit
def _store_words(
    address: tl.tensor,
    OFFSET: tl.constexpr,
    words: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    MASKED: tl.constexpr,
    UNIT: tl.constexpr,
) -> None:
    offset = tl.arange(0, 32)[:, None] * 16 + OFFSET
    at = _units(address[None, :] + offset, UNIT)
    flat = tl.trans(tl.reshape(words, (address.shape[0], 32)))
    for unit in tl.static_range(8 // UNIT):
        part = (flat >> (8 * UNIT * unit)).to(at.dtype.element_ty)
        if MASKED:
            here = offset + unit * UNIT
            tl.store(at + unit, part, mask=(here >= first[None, :]) & (here < end[None, :]))
        else:
            tl.store(at + unit, part)


@jit
def _units(address: tl.tensor, UNIT: tl.constexpr) -> tl.tensor:
    if UNIT == 8:
        return address.to(tl.pointer_type(tl.uint64))
    elif UNIT == 4:  # noqa: RET505  both ends of the same branch: what follows a constant `if` is compiled as well
        return address.to(tl.pointer_type(tl.uint32))
    else:
        return address.to(tl.pointer_type(tl.uint8))
