"""A store as the executor uses it, and what the pages it moves are called.

No threads, no decisions: whether a store is used is decided in `worker.py` and above, from what is said here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from headwater.core.errors import InvalidInput
from headwater.core.events import Save
from headwater.core.page import KEY_BYTES, PageName, page_name
from headwater.core.results import GET_ANSWERS, PUT_ANSWERS, Status
from headwater.layout.frame import PageMeta, frame_bytes, parse
from headwater.layout.shard import WHOLE, Shard
from headwater.layout.spec import KVLayout
from headwater.layout.tail import is_zero_behind
from headwater.metrics import Metrics
from headwater.storage.base import Clock, Deadline, Store
from headwater.storage.verified import VerifiedStore
from headwater.transfer.executor.trouble import calling, require

Item: TypeAlias = tuple[PageName, memoryview]  # a page, and a buffer of a frame's size

BAD_PAGES: Final = "nothing but bad pages came from it"  # why a store was switched off that is not damaged


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """What a page's name and frame say besides the block: whose bytes they are, and which of a block's."""

    identity: bytes
    layout: KVLayout
    shard: Shard = WHOLE
    part: int = 0
    _suffix: bytes = field(init=False, repr=False)  # of all names

    def __post_init__(self) -> None:
        """Make once what every name ends with."""
        name = page_name(bytes(KEY_BYTES), self.shard.index, self.shard.count, part=self.part)
        object.__setattr__(self, "_suffix", name[KEY_BYTES:])

    @property
    def frame_bytes(self) -> int:
        """Size of a frame of this layout."""
        return frame_bytes(self.layout.plane_bytes)

    def name(self, key: bytes) -> PageName:
        """How a block's page is called in every store."""
        if len(key) != KEY_BYTES:
            raise InvalidInput(f"a block key has {KEY_BYTES} bytes, this one has {len(key)}")
        return PageName(key + self._suffix)

    def names(self, keys: Sequence[bytes]) -> list[PageName]:
        """How blocks' pages are called: `name` of many."""
        if keys and set(map(len, keys)) != {KEY_BYTES}:
            raise InvalidInput(f"a block key has {KEY_BYTES} bytes")
        suffix = self._suffix
        return [key + suffix for key in keys]  # type: ignore[misc]  # a NewType's call costs more than the name

    def meta(self, order: Save, at: int) -> PageMeta:
        """What the frame of one block of a row says."""
        return PageMeta(
            key=order.keys[at],
            identity=self.identity,
            parent=order.keys[at - 1] if at else order.parent,
            depth=order.depth + at,
            valid_tokens=order.valid_tokens or self.layout.block_tokens,
            tenant=order.tenant,
            shard_index=self.shard.index,
            shard_count=self.shard.count,
            part=self.part,
            expires_at_ms=order.expires_at_ms,
        )

    def metas(self, order: Save, places: Sequence[int]) -> list[PageMeta]:
        """`meta` of many: what is the same in all of them is checked once."""
        if not places:
            return []
        keys, depth, first = order.keys, order.depth, self.meta(order, places[0])
        return [first, *(first.another(keys[at], keys[at - 1], depth + at) for at in places[1:])]

    def is_tail(self, frame: memoryview, valid_tokens: int) -> bool:
        """Whether a verified frame is of a block of so many tokens, and nothing is behind them (rule 9). Pure."""
        header = parse(frame)
        if isinstance(header, Status) or header.meta.valid_tokens != valid_tokens:
            return False
        return is_zero_behind(frame[header.header_bytes : header.frame_bytes], self.layout, valid_tokens)


class TierStore:
    """A store as the executor uses it: written to as it is, read only through verification."""

    def __init__(self, name: str, store: Store, naming: Naming, *, clock: Clock, metrics: Metrics) -> None:
        self.name = name
        self.store = store
        self.reader = VerifiedStore(
            store, identity=naming.identity, plane_bytes=naming.layout.plane_bytes, clock=clock, metrics=metrics
        )
        self.damageable = store.damageable()

    # --- foreign code, whose answers are looked at before they are believed: each raises StoreTrouble -----------------

    def contains(self, names: Sequence[PageName], deadline: Deadline) -> list[bool]:
        """Whether each page seems to be there. Blocks."""
        with calling(self.name):
            held = list(self.store.contains(names, deadline=deadline))
        require(self.name, held, len(names), None, bool)
        return held

    def contains_cached(self, names: Sequence[PageName]) -> list[bool] | None:
        """The same from memory; None: the store has to be asked. Does not block."""
        store = self.store.cached_names()
        with calling(self.name):
            found = store.contains_cached(names) if store is not None else None
            if found is None:
                return None
            held = list(found)
        require(self.name, held, len(names), None, bool)
        return held

    def missing(
        self, names: Sequence[PageName], deadline: Deadline, *, ask: bool = True
    ) -> tuple[list[Status], list[int]]:
        """What is known of pages before they are put, and which are to be put. Blocks, unless it does not `ask`."""
        there = self.contains(names, deadline) if ask else [False] * len(names)
        results = [Status.EXISTS if one else Status.LATE for one in there]
        return results, [i for i, one in enumerate(there) if not one]

    def read(
        self,
        items: Sequence[Item],
        deadline: Deadline,
        judged: Callable[[Sequence[Status]], None] | None = None,
    ) -> list[Status]:
        """Pages, verified; `judged` as in `VerifiedStore.get_into`. Blocks."""
        with calling(self.name):
            got = list(self.reader.get_into(items, deadline=deadline, judged=judged))
        require(self.name, got, len(items), GET_ANSWERS)
        return got

    def fetch(
        self, items: Sequence[Item], deadline: Deadline, judged: Callable[[Sequence[Status]], None] | None = None
    ) -> "list[npt.NDArray[np.uint64] | Status]":
        """Pages with their headers verified, and what the digests of their planes must be. Blocks."""
        with calling(self.name):
            found = list(self.reader.fetch(items, deadline=deadline, judged=judged))
        require(self.name, found, len(items), GET_ANSWERS, np.ndarray)
        return found

    def peek(self, items: Sequence[Item], deadline: Deadline) -> list[Status]:
        """The same, and counts as no use. Blocks."""
        with calling(self.name):
            got = list(self.reader.peek_into(items, deadline=deadline))
        require(self.name, got, len(items), GET_ANSWERS)
        return got

    def put(self, items: Sequence[Item], deadline: Deadline) -> list[Status]:
        """Sealed frames. Blocks."""
        if not items:
            return []
        with calling(self.name):
            statuses = list(self.store.put(items, deadline=deadline))
        require(self.name, statuses, len(items), PUT_ANSWERS)
        return statuses

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def reads_ahead(self) -> bool:
        """Whether several threads read: then the next slice of a load is read while one is copied."""
        return self.store.piecewise() is not None

    @property
    def trouble(self) -> str | None:
        """Why the store is not to be used now (rule 8), as far as it knows itself. Looks at memory only."""
        if self.damageable is not None and self.damageable.down is not None:
            return str(self.damageable.down)
        return BAD_PAGES if self.reader.switched_off else None

    def revive(self) -> bool:
        """Try to put the store right. Blocks, seconds where it rebuilds. True if it may be used."""
        self.reader.switch_on()
        return self.damageable is None or self.damageable.revive()
