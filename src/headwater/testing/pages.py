"""Sealed pages whose every byte follows from (chain, depth), so that any process can say what a page must hold."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from headwater.core.page import PageName
from headwater.layout.frame import PageMeta, frame_bytes, header_bytes, seal
from headwater.layout.spec import opaque_layout

IDENTITY: Final = hashlib.sha256(b"headwater test identity").digest()
PLANE_BYTES: Final = (4096, 4096, 1000, 1000)  # two tidy planes and two that are no multiple of anything
SEALED_AT_MS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class SamplePage:
    """A page and the frame that every store must give back for it, byte for byte."""

    meta: PageMeta
    frame: bytes

    @property
    def name(self) -> PageName:
        """The page's name."""
        return self.meta.name

    @property
    def item(self) -> tuple[PageName, memoryview]:
        """What `put` wants."""
        return self.meta.name, memoryview(self.frame)

    def buffer(self) -> memoryview:
        """A destination of the right size, full of other bytes."""
        return memoryview(bytearray(b"\xee" * len(self.frame)))


@lru_cache(maxsize=4096)
def sample_page(
    chain: int,
    depth: int = 0,
    *,
    plane_bytes: tuple[int, ...] = PLANE_BYTES,
    variant: int = 0,
    expires_at_ms: int = 0,
    identity: bytes = IDENTITY,
    tenant: bytes = bytes(16),
    shard: tuple[int, int] = (0, 1),
) -> SamplePage:
    """The page at `depth` of sequence `chain`. `variant` changes the bytes and not the name: a page gone wrong."""
    meta = PageMeta(
        key=_key(chain, depth),
        identity=identity,
        parent=_key(chain, depth - 1),
        depth=depth,
        valid_tokens=16,
        tenant=tenant,
        shard_index=shard[0],
        shard_count=shard[1],
        expires_at_ms=expires_at_ms,
    )
    frame = bytearray(frame_bytes(plane_bytes))
    start = header_bytes(len(plane_bytes))
    seed = meta.name + variant.to_bytes(8, "little")
    frame[start:] = hashlib.shake_128(seed).digest(len(frame) - start)
    seal(memoryview(frame), meta, opaque_layout(plane_bytes, meta.valid_tokens), now_ms=SEALED_AT_MS)
    return SamplePage(meta, bytes(frame))


def sample_chain(chain: int, length: int, *, plane_bytes: tuple[int, ...] = PLANE_BYTES) -> list[SamplePage]:
    """The first `length` pages of a sequence."""
    return [sample_page(chain, depth, plane_bytes=plane_bytes) for depth in range(length)]


def items(pages: Sequence[SamplePage]) -> list[tuple[PageName, memoryview]]:
    """What `put` wants, for several pages."""
    return [page.item for page in pages]


def _key(chain: int, depth: int) -> bytes:
    return hashlib.sha256(b"root" if depth < 0 else b"%d/%d" % (chain, depth)).digest()
