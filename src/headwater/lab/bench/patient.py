"""What benchmarks of whole caches share: names of blocks, and a tier with so much time that nothing is dropped."""

import hashlib

from headwater.config.cache import TierConfig
from headwater.core.keys import BlockKey


def chain(seed: bytes, length: int) -> list[BlockKey]:
    """Names of the blocks of a prompt: another seed is another prompt."""
    keys: list[BlockKey] = []
    key = seed
    for _ in range(length):
        key = hashlib.sha256(key).digest()
        keys.append(BlockKey(key))
    return keys


def patient_tier(name: str, wait_s: float) -> TierConfig:
    """A tier whose calls have so many seconds, and whose queue takes everything."""
    return TierConfig(
        name=name,
        probe_timeout_s=wait_s,
        load_timeout_s=wait_s,
        save_timeout_s=wait_s,
        max_queued_bytes=1 << 40,
        max_queued_s=wait_s,
    )
