"""The header of a slab: which store a file belongs to, its settings and its epoch. Two copies, each with a checksum."""

import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from xxhash import xxh3_64_intdigest

from headwater.core.errors import StoreUnavailable
from headwater.storage.local.geometry import SECTOR, Geometry

MAGIC: Final = b"HWSLAB\0\0"
VERSION: Final = 2
_HEADER: Final = struct.Struct("<8sI4x16sQ16sQ")  # magic, version, id, epoch, policy, limit
_U64: Final = struct.Struct("<Q")
_SEALED: Final = struct.Struct("<QQ")  # a number, and the same with what only this store knows
SEALED_BYTES: Final = _SEALED.size


@dataclass(frozen=True, slots=True)
class SlabHeader:
    """What both header copies say: which store this is, its settings, its epoch."""

    store_id: bytes
    epoch: int
    policy: str  # the eviction policy, by name; an ASCII word of at most 16 letters
    limit_bytes: int
    _key: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """What seals numbers: another store's, or another epoch's, do not fit."""
        object.__setattr__(self, "_key", self.epoch ^ int.from_bytes(self.store_id[:8], "little"))

    def encode(self) -> bytes:
        """One sector."""
        name = self.policy.encode("ascii").ljust(16, b"\0")
        body = _HEADER.pack(MAGIC, VERSION, self.store_id, self.epoch, name, self.limit_bytes)
        body = body.ljust(SECTOR - _U64.size, b"\0")  # checksummed to the end: a later version may say more
        return body + _U64.pack(xxh3_64_intdigest(body))

    def seal(self, number: int) -> bytes:
        """A number, as only this store writes it."""
        return _SEALED.pack(number, number ^ self._key)

    def unseal(self, raw: bytes) -> int | None:
        """The number; None if this store did not write it."""
        number, check = _SEALED.unpack(raw)
        return number if number ^ self._key == check else None


def read_slab_header(fd: int, path: Path) -> SlabHeader | None:
    """What the first copy that can be believed says; None if neither can. Raises StoreUnavailable: another version."""
    for at in (0, SECTOR):
        raw = os.pread(fd, SECTOR, at)
        end = SECTOR - _U64.size
        if len(raw) < SECTOR or _U64.unpack_from(raw, end)[0] != xxh3_64_intdigest(raw[:end]):
            continue
        magic, version, store_id, epoch, policy, limit_bytes = _HEADER.unpack_from(raw)
        if magic != MAGIC:
            continue
        if version != VERSION:
            raise StoreUnavailable(
                f"{path} was written in format {version}, this version reads {VERSION}: use another directory, or "
                "remove this one with all that is in it"
            )
        try:
            Geometry.plan(limit_bytes)
            return SlabHeader(store_id, epoch, policy.rstrip(b"\0").decode("ascii"), limit_bytes)
        except (StoreUnavailable, UnicodeDecodeError):
            continue
    return None
