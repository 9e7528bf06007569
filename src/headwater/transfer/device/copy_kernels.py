# ruff: noqa: FBT003, N803  what a kernel is compiled for is in capitals, and some of it is yes or no
"""The kernels of the copy engine, in Triton: one task, (block, plane), copied by a warp and digested as it passes.

Launched by `triton_copy.py`, which has checked what they are given. What is in capitals a kernel is compiled for.
"""

from typing import Final

from headwater.transfer.device.xxh3 import (
    LAST_STRIPE,
    SCRAMBLE,
    SHORT,
    START,
    absorb,
    finish,
    jit,
    kernel,
    scramble,
    short,
    tl,
)

ADDRESSES: Final = ("slots", "rows", "digests")
NUMBERS: Final = ("first_plane", "start", "num_rows", "num_tasks", "row_stride", "digest_stride")


@kernel(ADDRESSES + NUMBERS)
def copy_planes(
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
