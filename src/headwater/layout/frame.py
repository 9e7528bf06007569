"""The sealed envelope of a page: a header that names the page and vouches for each of its planes.

    offset  size  field (little-endian)
         0     4  magic "HWPG"
         4     2  major version      a reader that does not know it sees a miss (UNKNOWN_VERSION)
         6     2  minor version      only appends fields behind those known here, before `table`; readers skip them
         8     4  header_bytes       a multiple of 4096: the payload starts there, page aligned
        12     2  digest algorithm   `layout/digest.py`
        14     2  table              offset of the digest table in the header
        16     8  checksum           XXH3-64 of header[24 : header_bytes], seeded with that of header[0:16]
        24     8  payload_bytes
        32    32  key                the block's chained key
        64    32  identity           digest of the cache identity
        96    16  tenant             tag of the tenant's salt, zero without one
       112    32  parent             key of the block before, or the identity's root
       144     4  depth              0 for the first block of a sequence
       148     4  shard index, count (u16, u16)
       152     4  valid_tokens       fewer than a block in a partial tail
       156     4  num_planes
       160     8  sealed_at_ms       wall clock
       168     8  expires_at_ms      0 = never
       176     4  part               which planes of the block, where the shard does not say (`core/page.py`)
       180    12  zero
     table  16*n  per plane: length in bytes (u64), digest (u64)

Upgrade rule: the first 16 bytes never change their meaning. A change that an old reader would misread gets a new major
version (old readers miss, they never guess); a mere addition gets a new minor version. The digest of a plane never
changes under one algorithm id.

The frame is made and checked here, on bytes; who holds the bytes and where is other rooms' business. Nothing here
trusts an index: a page is believed only for what its own header says and its own bytes prove.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from headwater.core.errors import InvalidInput
from headwater.core.page import KEY_BYTES, PageName, page_name
from headwater.core.results import Status
from headwater.layout.digest import XXH3_64, copy_digests, plane_digests
from headwater.layout.spec import KVLayout
from headwater.layout.tail import zero_tail

MAGIC: Final = b"HWPG"
MAJOR: Final = 1
MINOR: Final = 0
ALIGNMENT: Final = 4096
FIXED_BYTES: Final = 192
PREFIX_BYTES: Final = FIXED_BYTES  # enough of a slot to see which page is in it, and whether it changed
MAX_PLANES: Final = 1 << 16

_FIXED = struct.Struct("<4sHHIHHQQ32s32s16s32sIHHIIQQI12x")
_CHECKSUM = struct.Struct("<Q")
_WORD: Final = np.dtype("<u8")
_EXPIRY_AT: Final = 168
_CHECKSUM_AT: Final = 16
assert _FIXED.size == FIXED_BYTES  # noqa: S101  the table above and the struct must agree


@dataclass(frozen=True, slots=True, kw_only=True)
class PageMeta:
    """What a frame says of its page, without the bytes."""

    key: bytes
    identity: bytes
    parent: bytes
    depth: int
    valid_tokens: int
    tenant: bytes = bytes(16)
    shard_index: int = 0
    shard_count: int = 1
    part: int = 0
    expires_at_ms: int = 0
    name: PageName = field(init=False, repr=False, compare=False)  # in every store
    parent_name: PageName = field(init=False, repr=False, compare=False)  # same part and shard of the block before

    def __post_init__(self) -> None:
        """Refuse what cannot be encoded; make the names once."""
        for what, value in (("key", self.key), ("identity", self.identity), ("parent", self.parent)):
            if len(value) != KEY_BYTES:
                raise InvalidInput(f"{what} must have {KEY_BYTES} bytes, not {len(value)}")
        if self.parent == self.key:
            raise InvalidInput("a block cannot be its own parent")
        if len(self.tenant) != 16:
            raise InvalidInput(f"tenant must have 16 bytes, not {len(self.tenant)}")
        if not (0 <= self.depth < 1 << 32 and 0 < self.valid_tokens < 1 << 32 and 0 <= self.expires_at_ms < 1 << 63):
            raise InvalidInput(f"depth, valid_tokens or expires_at_ms out of range: {self}")
        for field_name, key in (("name", self.key), ("parent_name", self.parent)):
            name = page_name(key, self.shard_index, self.shard_count, part=self.part)
            object.__setattr__(self, field_name, name)

    def another(self, key: bytes, parent: bytes, depth: int) -> "PageMeta":
        """The same of another block: what it shares with this one was looked at, and is not made again."""
        if not (len(key) == len(parent) == KEY_BYTES and key != parent and 0 <= depth < 1 << 32):
            return replace(self, key=key, parent=parent, depth=depth)  # raises
        made, put, rest = object.__new__(PageMeta), object.__setattr__, self.name[KEY_BYTES:]
        put(made, "key", key)
        put(made, "identity", self.identity)
        put(made, "parent", parent)
        put(made, "depth", depth)
        put(made, "valid_tokens", self.valid_tokens)
        put(made, "tenant", self.tenant)
        put(made, "shard_index", self.shard_index)
        put(made, "shard_count", self.shard_count)
        put(made, "part", self.part)
        put(made, "expires_at_ms", self.expires_at_ms)
        put(made, "name", key + rest)
        put(made, "parent_name", parent + rest)
        return made


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed, checksummed frame header."""

    meta: PageMeta
    header_bytes: int
    payload_bytes: int
    plane_bytes: tuple[int, ...]
    digests: tuple[int, ...]
    sealed_at_ms: int

    @property
    def frame_bytes(self) -> int:
        """Header and payload together."""
        return self.header_bytes + self.payload_bytes


def header_bytes(num_planes: int) -> int:
    """Bytes before the payload, a multiple of 4096."""
    if not 0 < num_planes <= MAX_PLANES:
        raise InvalidInput(f"a page has 1 to {MAX_PLANES} planes, not {num_planes}")
    return -(-(FIXED_BYTES + 16 * num_planes) // ALIGNMENT) * ALIGNMENT


def frame_bytes(plane_bytes: Sequence[int]) -> int:
    """Size of a whole frame for planes of these sizes."""
    return header_bytes(len(plane_bytes)) + sum(plane_bytes)


def seal(frame: memoryview, meta: PageMeta, layout: KVLayout, *, now_ms: int) -> None:
    """Zero a partial tail's unused positions, digest the payload, write the header before it. Mutates `frame`.

    Raises InvalidInput for a buffer that is too small or more valid tokens than a block has, InvalidLayout for a
    partial block of planes that do not say where their tokens are (rule 9).
    """
    start = header_bytes(len(layout.planes))
    _require_size(frame, start + layout.page_bytes)
    payload = frame[start:]
    zero_tail(payload, layout, meta.valid_tokens)
    write_header(frame, meta, layout.plane_bytes, plane_digests(payload, layout.plane_bytes), now_ms=now_ms)


def seal_into(slot: memoryview, frame: memoryview, meta: PageMeta, layout: KVLayout, *, now_ms: int) -> None:
    """Copy the payload in `frame`, which is the caller's alone, to `slot`, and seal it there, the header last.

    The digests are of `frame`: in `slot` another process may be writing, wrongly, and must not be blessed. Mutates
    `slot`, and of `frame` what lies behind a partial block's tokens. Raises as `seal` does.
    """
    start = header_bytes(len(layout.planes))
    for buffer in (slot, frame):
        _require_size(buffer, start + layout.page_bytes)
    source, target = frame[start:], slot[start:]
    zero_tail(source, layout, meta.valid_tokens)
    digests = copy_digests(source, target, layout.plane_bytes, private=source)
    write_header(slot, meta, layout.plane_bytes, digests, now_ms=now_ms)


def write_header(
    frame: memoryview,
    meta: PageMeta,
    plane_bytes: Sequence[int],
    digests: Sequence[int] | npt.NDArray[np.uint64],
    *,
    now_ms: int,
) -> None:
    """Write the header for digests made elsewhere (a gather kernel, another copy). Mutates only the header."""
    size = header_bytes(len(plane_bytes))
    if len(digests) != len(plane_bytes):
        raise InvalidInput(f"{len(plane_bytes)} planes but {len(digests)} digests")
    _require_size(frame, size)
    lengths = _lengths(tuple(plane_bytes))
    fixed = (MAGIC, MAJOR, MINOR, size, XXH3_64, FIXED_BYTES, 0, int(lengths.sum()))
    named = (meta.key, meta.identity, meta.tenant, meta.parent, meta.depth, meta.shard_index, meta.shard_count)
    dated = (meta.valid_tokens, len(plane_bytes), now_ms, meta.expires_at_ms, meta.part)
    header = bytearray(size)
    _FIXED.pack_into(header, 0, *fixed, *named, *dated)
    table = np.frombuffer(header, _WORD, 2 * len(plane_bytes), FIXED_BYTES).reshape(-1, 2)
    table[:, 0] = lengths
    table[:, 1] = digests
    _CHECKSUM.pack_into(header, _CHECKSUM_AT, _checksum(memoryview(header)))
    frame[:size] = header


def expiry_ms(frame: memoryview) -> int:
    """When a frame says it expires, 0 for never. Whether it is a frame at all is not looked at: a hint."""
    return int.from_bytes(frame[_EXPIRY_AT : _EXPIRY_AT + 8], "little") if len(frame) >= FIXED_BYTES else 0


def parse(frame: memoryview, *, known: PageMeta | None = None) -> Header | Status:
    """Read a header and check its checksum. Looks at no byte of the payload; never raises on bad bytes.

    `known`: what it probably says; if it does, that is what is returned, and no new one is made.
    """
    found = _open(frame)
    if isinstance(found, Status):
        return found
    fields, table = found
    size, payload_bytes = fields[3], fields[7]
    key, identity, tenant, parent, depth, index, count, valid_tokens, _, sealed_at, expires_at, part = fields[8:]
    lengths, digests = tuple(table[:, 0].tolist()), tuple(table[:, 1].tolist())
    if known is not None and fields[8:16] + fields[18:] == _said(known):
        return Header(known, size, payload_bytes, lengths, digests, sealed_at)
    try:
        meta = PageMeta(
            key=key,
            identity=identity,
            tenant=tenant,
            parent=parent,
            depth=depth,
            shard_index=index,
            shard_count=count,
            part=part,
            valid_tokens=valid_tokens,
            expires_at_ms=expires_at,
        )
    except InvalidInput:
        return Status.CORRUPT
    return Header(meta, size, payload_bytes, lengths, digests, sealed_at)


def vouched(
    frame: memoryview, name: PageName, *, now_ms: int, identity: bytes, plane_bytes: Sequence[int]
) -> npt.NDArray[np.uint64] | Status:
    """The digests that a page's header vouches for, if it is intact and the one wanted. Looks at no payload.

    The checks of `parse` and `expect`, for readers of many pages: nothing is made of what is only compared.
    """
    found = _open(frame)
    if isinstance(found, Status):
        return found
    fields, table = found
    if fields[8] != name[:KEY_BYTES] or not claims(frame, name) or fields[9] != identity:
        return Status.FOREIGN
    lengths = _lengths(tuple(plane_bytes))
    if len(table) != len(lengths) or not (table[:, 0] == lengths).all():
        return Status.FOREIGN
    if 0 < fields[18] <= now_ms:
        return Status.STALE
    return table[:, 1].copy()


def promised(frame: memoryview) -> npt.NDArray[np.uint64] | Status:
    """The digests in a page's header, whosever page it is: for one that was verified before. Looks at no payload."""
    found = _open(frame)
    return found if isinstance(found, Status) else found[1][:, 1].copy()


def _open(frame: memoryview) -> tuple[tuple[Any, ...], npt.NDArray[np.uint64]] | Status:
    """The fields of a header as they stand, and its table: it is whole, of a version we know, and its checksum fits."""
    if len(frame) < FIXED_BYTES:
        return Status.SHORT
    fields = _FIXED.unpack_from(frame, 0)
    magic, major, _minor, size, algorithm, table, checksum, payload_bytes = fields[:8]
    num_planes = fields[16]
    if magic != MAGIC:
        return Status.CORRUPT
    if major != MAJOR or algorithm != XXH3_64:
        return Status.UNKNOWN_VERSION
    if table < FIXED_BYTES or size % ALIGNMENT or not 0 < num_planes <= MAX_PLANES or table + 16 * num_planes > size:
        return Status.CORRUPT
    if len(frame) < size:
        return Status.SHORT
    if _checksum(frame[:size]) != checksum:
        return Status.CORRUPT
    words = np.frombuffer(frame, _WORD, 2 * num_planes, table).reshape(-1, 2)
    if int(words[:, 0].sum()) != payload_bytes:
        return Status.CORRUPT
    return fields, words


def _said(meta: PageMeta) -> tuple[Any, ...]:
    """What a header says of a page, as the fields stand in it, but for the number of planes and the date."""
    return (
        *(meta.key, meta.identity, meta.tenant, meta.parent, meta.depth, meta.shard_index, meta.shard_count),
        *(meta.valid_tokens, meta.expires_at_ms, meta.part),
    )


@lru_cache(maxsize=64)
def _lengths(plane_bytes: tuple[int, ...]) -> npt.NDArray[np.uint64]:
    return np.array(plane_bytes, np.uint64)


def verify(
    frame: memoryview,
    name: PageName,
    *,
    now_ms: int,
    identity: bytes | None = None,
    plane_bytes: Sequence[int] | None = None,
) -> Header | Status:
    """Check a private copy of a whole frame: is it this page, intact, alive? Never raises on bad bytes.

    `identity` and `plane_bytes` are what the reader is going to use the bytes as; leave them out only where the page is
    not used (a checker that walks a directory).
    """
    header = parse(frame)
    if isinstance(header, Status):
        return header
    fault = expect(header, name, now_ms=now_ms, identity=identity, plane_bytes=plane_bytes)
    if fault is not None:
        return fault
    if len(frame) < header.frame_bytes:
        return Status.SHORT
    if plane_digests(frame[header.header_bytes :], header.plane_bytes) != list(header.digests):
        return Status.CORRUPT
    return header


def claims(frame: memoryview, name: PageName) -> bool:
    """Whether a header claims to be this page's. Proves nothing; a cheap look before a costly one."""
    return frame[32:64] == name[:32] and frame[148:152] == name[32:36] and frame[176:180] == name[36:]


def expect(
    header: Header,
    name: PageName,
    *,
    now_ms: int,
    identity: bytes | None = None,
    plane_bytes: Sequence[int] | None = None,
) -> Status | None:
    """Whether an intact header is the one the reader wants. Looks at no payload."""
    if header.meta.name != name or (identity is not None and header.meta.identity != identity):
        return Status.FOREIGN
    if plane_bytes is not None and header.plane_bytes != tuple(plane_bytes):
        return Status.FOREIGN
    if 0 < header.meta.expires_at_ms <= now_ms:
        return Status.STALE
    return None


def _checksum(header: memoryview) -> int:
    # Two digests mixed, because one over a joined copy would cost an allocation of the whole header.
    return xxh3_64_intdigest(header[24:], seed=xxh3_64_intdigest(header[:_CHECKSUM_AT]))


def _require_size(frame: memoryview, size: int) -> None:
    if len(frame) < size:
        raise InvalidInput(f"the frame needs {size} bytes, the buffer has {len(frame)}")
