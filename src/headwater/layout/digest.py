"""One digest per plane of a page: XXH3-64, a standard function that a GPU kernel can compute while it gathers.

Made where the bytes are born and checked where they are used, so it covers PCIe, memory, disk and network. It stops
accidents, not attackers (rule 12). Not a key: keys are SHA-256 (`core/keys.py`).
"""

from collections.abc import Sequence
from typing import Final

from xxhash import xxh3_64_intdigest

XXH3_64: Final = 1  # algorithm id in a frame; a new function gets a new id, ids are never reused


def plane_digests(payload: memoryview, plane_bytes: Sequence[int]) -> list[int]:
    """Digest of each plane of a tightly packed payload. Reads every byte; does not mutate."""
    digests = []
    start = 0
    for length in plane_bytes:
        end = start + length
        digests.append(xxh3_64_intdigest(payload[start:end]))
        start = end
    return digests
