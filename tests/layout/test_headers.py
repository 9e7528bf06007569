"""Headers of many pages: byte for byte those of `frame.py`, and never believed where `frame.py` would not."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headwater.core.results import Status
from headwater.layout.frame import (
    FIXED_BYTES,
    PREFIX_BYTES,
    PageMeta,
    claims,
    frame_bytes,
    header_bytes,
    parse,
    vouched,
    write_header,
)
from headwater.layout.headers import are_of, claim_all, copies, vouched_all, write_headers

IDENTITY = b"i" * 32
PLANE_BYTES = (64, 100, 33)
SIZE = header_bytes(len(PLANE_BYTES))
FRAME_BYTES = frame_bytes(PLANE_BYTES)


def metas_of(rng: random.Random, number: int) -> list[PageMeta]:
    first = PageMeta(
        key=rng.randbytes(32),
        identity=IDENTITY,
        parent=rng.randbytes(32),
        depth=rng.randrange(1 << 32),
        valid_tokens=rng.randrange(1, 64),
        tenant=rng.randbytes(16),
        shard_index=rng.randrange(4),
        shard_count=4,
        part=rng.randrange(1 << 32),
        expires_at_ms=rng.choice([0, 1 << 40]),
    )
    others = [first.another(rng.randbytes(32), rng.randbytes(32), rng.randrange(1 << 32)) for _ in range(number - 1)]
    return [first, *others]


def sealed(rng: random.Random, number: int) -> tuple[list[PageMeta], list[bytearray], npt.NDArray[np.uint64]]:
    metas = metas_of(rng, number)
    frames = [bytearray(rng.randbytes(FRAME_BYTES)) for _ in metas]
    digests = np.array([[rng.getrandbits(64) for _ in PLANE_BYTES] for _ in metas], np.uint64)
    write_headers([memoryview(frame) for frame in frames], metas, PLANE_BYTES, digests, now_ms=12345)
    return metas, frames, digests


def test_another_is_what_a_new_one_would_be() -> None:
    rng = random.Random(1)
    first, second = metas_of(rng, 2)
    made = replace(first, key=second.key, parent=second.parent, depth=second.depth)
    assert (second, second.name, second.parent_name) == (made, made.name, made.parent_name)


def test_many_headers_are_written_as_one_is() -> None:
    metas, frames, digests = sealed(random.Random(2), 7)
    for meta, frame, digest in zip(metas, frames, digests, strict=True):
        alone = bytearray(frame)
        alone[:SIZE] = bytes(SIZE)
        write_header(memoryview(alone), meta, PLANE_BYTES, digest, now_ms=12345)
        assert alone == frame


def test_what_many_are_believed_for_each_alone_would_be() -> None:
    """One flipped bit anywhere in a header, another page's header, another version: as `frame.py` judges it."""
    rng = random.Random(3)
    num_right = 0
    for _ in range(300):
        metas, frames, _ = sealed(rng, 4)
        asked = list(metas)
        for _ in range(rng.randrange(3)):
            frame = rng.choice(frames)
            used = FIXED_BYTES + 16 * len(PLANE_BYTES)
            frame[rng.choice([rng.randrange(used), rng.randrange(SIZE)])] ^= 1 << rng.randrange(8)
        if rng.random() < 0.2:
            rng.shuffle(asked)
        views, names = [memoryview(frame) for frame in frames], [meta.name for meta in asked]
        now_ms = rng.choice([1, 1 << 41])
        like: dict[str, Any] = {"now_ms": now_ms, "identity": IDENTITY, "plane_bytes": PLANE_BYTES}
        found, is_right = vouched_all(copies(views, SIZE), names, **like)
        alone = [vouched(view, name, **like) for view, name in zip(views, names, strict=True)]
        assert is_right == [not isinstance(one, Status) for one in alone]
        for right, one, many in zip(is_right, alone, found, strict=True):
            assert not right or np.array_equal(one, many)
        for fits, view, meta in zip(are_of(views, asked), views, asked, strict=True):
            header = parse(view, known=meta)
            if fits:
                assert not isinstance(header, Status)
                assert (header.meta, header.frame_bytes) == (meta, FRAME_BYTES)
            num_right += fits
        prefixes = b"".join(bytes(view[:PREFIX_BYTES]) for view in views)
        assert claim_all(prefixes, names) == all(map(claims, views, names))
    assert num_right > 100


def test_frames_of_another_length_are_not_known() -> None:
    metas, frames, _ = sealed(random.Random(4), 3)
    assert are_of([memoryview(frame) for frame in frames], metas) == [True] * 3
    assert are_of([memoryview(frame)[:-1] for frame in frames], metas) == [False] * 3
    assert are_of([memoryview(frame)[:100] for frame in frames], metas) == [False] * 3
    assert are_of([], []) == []
