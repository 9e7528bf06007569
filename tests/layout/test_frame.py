"""Frames: a golden header, a round trip for any planes, and a fault for everything that can be wrong with one."""

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from headwater.core.errors import InvalidInput, InvalidLayout
from headwater.core.page import NAME_BYTES, page_name
from headwater.core.results import Status
from headwater.layout.digest import copy_digests, plane_digests
from headwater.layout.frame import (
    ALIGNMENT,
    FIXED_BYTES,
    MAX_PLANES,
    Header,
    PageMeta,
    claims,
    frame_bytes,
    header_bytes,
    parse,
    seal,
    verify,
    write_header,
)
from headwater.layout.gqa import gqa_layout
from headwater.layout.spec import DType, opaque_layout

META = PageMeta(
    key=bytes(range(32)),
    identity=b"i" * 32,
    tenant=b"t" * 16,
    parent=b"p" * 32,
    depth=7,
    shard_index=1,
    shard_count=4,
    part=0xDEADBEEF,
    valid_tokens=16,
    expires_at_ms=99,
)
LAYOUT = opaque_layout((3, 1, 100), 16)


def sealed(plane_bytes: tuple[int, ...] = (3, 1, 100), meta: PageMeta = META) -> bytearray:
    frame = bytearray(frame_bytes(plane_bytes))
    start = header_bytes(len(plane_bytes))
    frame[start:] = hashlib.shake_128(b"payload").digest(sum(plane_bytes))
    seal(memoryview(frame), meta, opaque_layout(plane_bytes, meta.valid_tokens), now_ms=5)
    return frame


def check(frame: bytes | bytearray, **changes: object) -> Header | Status:
    wanted = {"now_ms": 50, "identity": META.identity, "plane_bytes": (3, 1, 100), **changes}
    return verify(memoryview(frame), META.name, **wanted)  # type: ignore[arg-type]


def test_the_header_is_the_documented_one() -> None:
    payload = hashlib.shake_128(b"payload").digest(104)
    body = struct.pack("<4sHHIHH", b"HWPG", 1, 0, 4096, 1, 192)
    named = struct.pack("<Q", 104) + META.key + META.identity + META.tenant + META.parent
    dated = struct.pack("<IHHIIQQI12x", 7, 1, 4, 16, 3, 5, 99, 0xDEADBEEF)
    table = b""
    for start, end in ((0, 3), (3, 4), (4, 104)):
        table += struct.pack("<QQ", end - start, xxh3_64_intdigest(payload[start:end]))
    rest = (named + dated + table).ljust(4096 - 24, b"\0")
    checksum = struct.pack("<Q", xxh3_64_intdigest(rest, seed=xxh3_64_intdigest(body)))
    assert sealed() == body + checksum + rest + payload
    assert hashlib.sha256(sealed()).hexdigest() == "0cb9db3b24b4987b64e2e45775246b3023a35de14ff694cfd7c6e7a3fa5e3739"


def test_digests_are_standard_xxh3() -> None:
    assert plane_digests(memoryview(b"abc"), [0, 3]) == [0x2D06800538D394C2, 0x78AF5F94892F3950]


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=12))
def test_copying_digests_the_copy(plane_bytes: list[int]) -> None:
    source = memoryview(hashlib.shake_128(repr(plane_bytes).encode()).digest(sum(plane_bytes)))
    target = memoryview(bytearray(len(source)))
    assert copy_digests(source, target, plane_bytes, private=source) == plane_digests(source, plane_bytes)
    assert target == source


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=40), st.integers(0, 2**32 - 1), st.integers(1, 9))
def test_what_is_sealed_verifies(plane_bytes: list[int], depth: int, count: int) -> None:
    meta = PageMeta(
        key=b"k" * 32,
        identity=b"i" * 32,
        parent=b"p" * 32,
        depth=depth,
        valid_tokens=3,
        shard_index=count - 1,
        shard_count=count,
    )
    frame = sealed(tuple(plane_bytes), meta)
    header = verify(memoryview(frame), meta.name, now_ms=0, identity=meta.identity, plane_bytes=plane_bytes)
    assert isinstance(header, Header)
    assert header.meta == meta
    assert header.plane_bytes == tuple(plane_bytes)
    assert header.frame_bytes == len(frame)
    assert header.header_bytes % ALIGNMENT == 0
    assert claims(memoryview(frame), meta.name)


@given(st.data())
def test_no_changed_byte_passes(data: st.DataObject) -> None:
    frame = sealed()
    where = data.draw(st.integers(0, len(frame) - 1))
    frame[where] ^= data.draw(st.integers(1, 255))
    assert isinstance(check(frame), Status)


@given(st.integers(0, 4096 + 103))
def test_no_cut_frame_passes(length: int) -> None:
    assert check(sealed()[:length]) in (Status.SHORT, Status.CORRUPT)


def test_every_fault_has_its_name() -> None:
    assert isinstance(check(sealed()), Header)
    assert check(sealed(), now_ms=99) is Status.STALE
    assert check(sealed(), identity=b"j" * 32) is Status.FOREIGN
    assert check(sealed(), plane_bytes=(3, 100, 1)) is Status.FOREIGN
    assert verify(memoryview(sealed()), page_name(META.key, 0, 4), now_ms=50) is Status.FOREIGN
    assert verify(memoryview(sealed()), page_name(META.key, 1, 4), now_ms=50) is Status.FOREIGN  # another part
    assert check(sealed()[:-1]) is Status.SHORT
    assert check(b"") is Status.SHORT
    assert check(bytes(5000)) is Status.CORRUPT
    for offset, value in ((4, 2), (12, 7)):  # a later major version, an unknown digest
        frame = sealed()
        struct.pack_into("<H", frame, offset, value)
        assert check(frame) is Status.UNKNOWN_VERSION


def test_a_later_minor_version_is_read() -> None:
    """The upgrade rule: fields may be added before the table, and an old reader skips them."""
    frame = bytearray(sealed())
    table = frame[FIXED_BYTES : FIXED_BYTES + 48]
    struct.pack_into("<H", frame, 6, 1)
    struct.pack_into("<H", frame, 14, FIXED_BYTES + 64)
    frame[FIXED_BYTES : FIXED_BYTES + 64] = b"n" * 64
    frame[FIXED_BYTES + 64 : FIXED_BYTES + 112] = table
    checksum = xxh3_64_intdigest(bytes(frame[24:4096]), seed=xxh3_64_intdigest(bytes(frame[:16])))
    struct.pack_into("<Q", frame, 16, checksum)
    header = check(frame)
    assert isinstance(header, Header)
    assert header.meta == META


def test_a_partial_tail_is_sealed_without_what_lay_behind_it() -> None:
    layout = gqa_layout(num_layers=2, num_kv_heads=2, head_dim=4, block_tokens=8, dtype=DType.BF16)
    meta = PageMeta(key=b"k" * 32, identity=b"i" * 32, parent=b"p" * 32, depth=0, valid_tokens=5)
    frames = []
    for rubbish in (b"\x11", b"\x22"):
        frame = bytearray(frame_bytes(layout.plane_bytes))
        start = header_bytes(len(layout.planes))
        frame[start:] = rubbish * layout.page_bytes
        for plane, offset in zip(layout.planes, layout.offsets, strict=True):
            for head in range(2):  # the five computed positions, equal in both
                at = start + offset + head * 8 * 8
                frame[at : at + 5 * 8] = bytes([plane.layer + head + 1]) * 40
        seal(memoryview(frame), meta, layout, now_ms=1)
        frames.append(bytes(frame))
    assert frames[0] == frames[1]
    with pytest.raises(InvalidLayout, match="no partial blocks"):
        seal(memoryview(bytearray(5000)), meta, opaque_layout((64,), 8), now_ms=1)
    with pytest.raises(InvalidInput, match="cannot hold 5"):
        seal(memoryview(bytearray(5000)), meta, opaque_layout((64,), 4), now_ms=1)


def test_bad_input_is_refused_at_the_door() -> None:
    with pytest.raises(InvalidInput, match="key must have 32 bytes"):
        PageMeta(key=b"", identity=b"i" * 32, parent=b"p" * 32, depth=0, valid_tokens=1)
    with pytest.raises(InvalidInput, match="out of range"):
        PageMeta(key=b"k" * 32, identity=b"i" * 32, parent=b"p" * 32, depth=-1, valid_tokens=1)
    with pytest.raises(InvalidInput, match="does not exist"):
        page_name(b"k" * 32, 4, 4)
    with pytest.raises(InvalidInput, match="u32"):
        page_name(b"k" * 32, part=-1)
    with pytest.raises(InvalidInput, match="32 bytes"):
        page_name(b"k")
    with pytest.raises(InvalidInput, match="needs"):
        seal(memoryview(bytearray(100)), META, LAYOUT, now_ms=0)
    with pytest.raises(InvalidInput, match="3 planes but 1 digests"):
        write_header(memoryview(bytearray(5000)), META, (3, 1, 100), [1], now_ms=0)
    for count in (0, MAX_PLANES + 1):
        with pytest.raises(InvalidInput, match="planes"):
            header_bytes(count)
    assert len(page_name(b"k" * 32)) == NAME_BYTES


def test_a_page_of_very_many_planes() -> None:
    planes = (1,) * 5000
    frame = sealed(planes)
    assert header_bytes(5000) > ALIGNMENT
    assert isinstance(verify(memoryview(frame), META.name, now_ms=0, plane_bytes=planes), Header)
    assert parse(memoryview(frame)[:ALIGNMENT]) is Status.SHORT
