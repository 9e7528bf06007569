"""One digest per plane of a page: XXH3-64, a standard function that a GPU kernel can compute while it gathers.

Made where the bytes are born and checked where they are used, so it covers PCIe, memory, disk and network. It stops
accidents, not attackers (rule 12). Not a key: keys are SHA-256 (`core/keys.py`).
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final

from xxhash import xxh3_64_intdigest

from headwater.core.errors import InvalidInput

XXH3_64: Final = 1  # algorithm id in a frame; a new function gets a new id, ids are never reused
ALONE_BYTES: Final = 100_000  # of a plane: from here on its digest lets other threads run meanwhile
_HOT_BYTES: Final = 128 << 10  # copied at a time: still in the core's own cache when it is digested


def plane_digest(plane: memoryview) -> int:
    """Digest of one plane. Reads every byte; does not mutate."""
    return xxh3_64_intdigest(plane)


def plane_digests(payload: memoryview, plane_bytes: Sequence[int]) -> list[int]:
    """Digest of each plane of a tightly packed payload. Reads every byte; does not mutate."""
    digests = []
    start = 0
    for length in plane_bytes:
        end = start + length
        digests.append(xxh3_64_intdigest(payload[start:end]))
        start = end
    return digests


def copy_digests(
    source: memoryview, target: memoryview, plane_bytes: Sequence[int], *, private: memoryview
) -> list[int]:
    """Copy a payload, and digest each plane while it is hot. Mutates `target`.

    `private` is the one of the two that nobody else can write to, and is what is digested (rule 4). A digest of shared
    memory would bless whatever another writer put there between the copy and the look.
    """
    if private is not source and private is not target:
        raise InvalidInput("the digests are made of one of the two ends of the copy")
    digests = []
    for start, end, lengths in plane_runs(tuple(plane_bytes), _HOT_BYTES):
        target[start:end] = source[start:end]
        plane = start
        for length in lengths:
            digests.append(xxh3_64_intdigest(private[plane : plane + length]))
            plane += length
    return digests


@lru_cache(maxsize=64)
def plane_runs(plane_bytes: tuple[int, ...], most_bytes: int) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """(start, end, plane lengths) of runs of planes of a payload, of `most_bytes` each or of one plane."""
    return tuple(_cut(plane_bytes, most_bytes))


def _cut(plane_bytes: tuple[int, ...], most_bytes: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    start = end = 0
    lengths: list[int] = []
    for length in plane_bytes:
        if lengths and end + length - start > most_bytes:
            yield start, end, tuple(lengths)
            start, lengths = end, []
        end += length
        lengths.append(length)
    if lengths:
        yield start, end, tuple(lengths)
