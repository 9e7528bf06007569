"""Headers of many pages at once: what `frame.py` does page by page, over arrays.

A store or executor that moves thousands of blocks shares its interpreter with an engine: page by page, headers alone
cost it tens of microseconds a block. The format is `frame.py`'s, byte for byte.

Checks here are narrower than those of `frame.py`, never wider: they know the header that this version writes, as it is.
What they do not recognise they do not judge. That one is shown to `frame.py`, which says what is wrong with it, if
anything is.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from headwater.core.errors import InvalidInput
from headwater.core.page import KEY_BYTES, PageName
from headwater.layout.digest import XXH3_64
from headwater.layout.frame import FIXED_BYTES, MAGIC, MAJOR, MAX_PLANES, MINOR, PageMeta, header_bytes

Headers: TypeAlias = npt.NDArray[np.uint8]  # [pages, header bytes]
Digests: TypeAlias = npt.NDArray[np.uint64]  # [pages, planes]

_FIELDS: Final = np.dtype(  # the table of `frame.py`; its first 16 bytes never change their meaning, and are one here
    [
        *(("start", "V16"), ("checksum", "<u8"), ("payload_bytes", "<u8"), ("key", "V32"), ("identity", "V32")),
        *(("tenant", "V16"), ("parent", "V32"), ("depth", "<u4"), ("shard", "V4"), ("valid_tokens", "<u4")),
        *(("num_planes", "<u4"), ("sealed_at_ms", "<u8"), ("expires_at_ms", "<u8"), ("part", "V4"), ("rest", "V12")),
    ]
)
_CHECKED_FROM: Final = 24  # what the checksum covers; and, as its seed, what lies before it
_WORD: Final = np.dtype("<u8")
assert _FIELDS.itemsize == FIXED_BYTES  # noqa: S101  the table there and the dtype here must agree


def write_headers(
    frames: Sequence[memoryview],
    metas: Sequence[PageMeta],
    plane_bytes: Sequence[int],
    digests: Digests,
    *,
    now_ms: int,
) -> None:
    """`write_header` of many. Mutates only the headers."""
    if digests.shape != (len(metas), len(plane_bytes)):
        raise InvalidInput(f"{len(metas)} pages of {len(plane_bytes)} planes but {digests.shape} digests")
    size = header_bytes(len(plane_bytes))
    if any(len(frame) < size for frame in frames):
        raise InvalidInput(f"a frame needs {size} bytes for its header alone")
    headers = _unsealed(metas, tuple(plane_bytes), size)
    fields = _fields(headers)
    fields["sealed_at_ms"] = now_ms
    _table(headers, len(plane_bytes))[:, :, 1] = digests
    fields["checksum"] = _checksums(headers, len(plane_bytes))
    flat = headers.reshape(-1).data
    for at, frame in zip(range(0, len(flat), size), frames, strict=True):
        frame[:size] = flat[at : at + size]


def are_of(frames: Sequence[memoryview], metas: Sequence[PageMeta]) -> list[bool]:
    """Which frames have an intact header that says of its page what is known, and of its length what it is.

    Looks at no payload. Of the others nothing is known.
    """
    none = [False] * len(frames)
    if not frames or len(frames[0]) < FIXED_BYTES:
        return none
    first = np.frombuffer(frames[0][:FIXED_BYTES], _FIELDS)[0]
    num_planes = int(first["num_planes"])
    if not 0 < num_planes <= MAX_PLANES:
        return none
    size, whole = header_bytes(num_planes), len(frames[0])
    if whole < size:
        return none
    used = FIXED_BYTES + 16 * num_planes  # the rest is padding, which the checksum covers
    headers = copies(frames, used)
    table, fields = _table(headers, num_planes), _fields(headers)
    plane_bytes = tuple(table[0, :, 0].tolist())
    if size + sum(plane_bytes) != whole or any(len(frame) != whole for frame in frames):
        return none
    seed = _seed(num_planes)
    checks = [xxh3_64_intdigest(frame[_CHECKED_FROM:size], seed=seed) for frame in frames]
    right: npt.NDArray[np.bool_] = fields["checksum"] == np.array(checks, np.uint64)
    fields["checksum"] = fields["sealed_at_ms"] = 0
    table[:, :, 1] = 0
    same: npt.NDArray[np.bool_] = (headers == _unsealed(metas, plane_bytes, used)).all(axis=1)
    return [bool(one) for one in right & same]


def vouched_all(
    headers: Headers, names: Sequence[PageName], *, now_ms: int, identity: bytes, plane_bytes: Sequence[int]
) -> tuple[Digests, list[bool]]:
    """`vouched` of many copies of headers: digests, and for which pages they are vouched for. Of others, ask `vouched`.

    Does not mutate.
    """
    fields, table = _fields(headers), _table(headers, len(plane_bytes))
    lengths = _lengths(tuple(plane_bytes))
    named = np.frombuffer(b"".join(names), np.uint8).reshape(len(names), -1)
    right: npt.NDArray[np.bool_] = fields["checksum"] == _checksums(headers, len(lengths))
    right &= fields["start"] == np.void(_start(len(lengths)))
    right &= fields["num_planes"] == len(lengths)
    right &= fields["payload_bytes"] == lengths.sum()
    right &= fields["identity"] == np.void(identity)
    right &= (headers[:, 32:64] == named[:, :KEY_BYTES]).all(axis=1)
    right &= (headers[:, 148:152] == named[:, 32:36]).all(axis=1) & (headers[:, 176:180] == named[:, 36:]).all(axis=1)
    right &= (table[:, :, 0] == lengths).all(axis=1)
    right &= (fields["expires_at_ms"] == 0) | (fields["expires_at_ms"] > now_ms)
    return table[:, :, 1].copy(), right.tolist()


def claim_all(prefixes: bytes, names: Sequence[PageName]) -> bool:
    """Whether each of these beginnings of frames, back to back, `claims` to be its page's: that proves nothing."""
    if not names:
        return True
    headers = np.frombuffer(prefixes, np.uint8).reshape(len(names), -1)
    claimed = np.concatenate([headers[:, 32:64], headers[:, 148:152], headers[:, 176:180]], axis=1)
    return claimed.tobytes() == b"".join(names)


def copies(frames: Sequence[memoryview], size: int) -> Headers:
    """The first `size` bytes of each frame, copied."""
    raw = bytearray().join([frame[:size] for frame in frames])
    return np.frombuffer(raw, np.uint8).reshape(len(frames), size)


def _unsealed(metas: Sequence[PageMeta], plane_bytes: tuple[int, ...], size: int) -> Headers:
    """The first `size` bytes of headers without digests, date and checksum."""
    lengths = _lengths(plane_bytes)
    headers = np.zeros((len(metas), size), np.uint8)
    fields = _fields(headers)
    fields["start"] = np.void(_start(len(plane_bytes)))
    fields["payload_bytes"] = lengths.sum()
    for field, values in (
        ("key", [meta.key for meta in metas]),
        ("identity", [meta.identity for meta in metas]),
        ("tenant", [meta.tenant for meta in metas]),
        ("parent", [meta.parent for meta in metas]),
        ("shard", [meta.name[32:36] for meta in metas]),
        ("part", [meta.name[36:] for meta in metas]),
    ):
        fields[field] = np.frombuffer(b"".join(values), fields[field].dtype)
    fields["depth"] = [meta.depth for meta in metas]
    fields["valid_tokens"] = [meta.valid_tokens for meta in metas]
    fields["expires_at_ms"] = [meta.expires_at_ms for meta in metas]
    fields["num_planes"] = len(plane_bytes)
    _table(headers, len(plane_bytes))[:, :, 0] = lengths
    return headers


def _fields(headers: Headers) -> npt.NDArray[np.void]:
    return headers[:, :FIXED_BYTES].view(_FIELDS)[:, 0]


def _table(headers: Headers, num_planes: int) -> npt.NDArray[np.uint64]:
    """[pages, planes, (length, digest)]."""
    return headers[:, FIXED_BYTES : FIXED_BYTES + 16 * num_planes].view(_WORD).reshape(len(headers), num_planes, 2)


def _checksums(headers: Headers, num_planes: int) -> npt.NDArray[np.uint64]:
    """What the checksums must be, of headers that begin as those that are written here."""
    seed, size, flat = _seed(num_planes), headers.shape[1], headers.reshape(-1).data
    ends = range(size, len(flat) + 1, size)
    return np.array([xxh3_64_intdigest(flat[end - size + _CHECKED_FROM : end], seed=seed) for end in ends], np.uint64)


@lru_cache(maxsize=64)
def _seed(num_planes: int) -> int:
    return xxh3_64_intdigest(_start(num_planes))


@lru_cache(maxsize=64)
def _start(num_planes: int) -> bytes:
    sizes = header_bytes(num_planes).to_bytes(4, "little"), XXH3_64.to_bytes(2, "little")
    versions = MAJOR.to_bytes(2, "little") + MINOR.to_bytes(2, "little")
    return MAGIC + versions + b"".join(sizes) + FIXED_BYTES.to_bytes(2, "little")


@lru_cache(maxsize=64)
def _lengths(plane_bytes: tuple[int, ...]) -> npt.NDArray[np.uint64]:
    return np.array(plane_bytes, np.uint64)
