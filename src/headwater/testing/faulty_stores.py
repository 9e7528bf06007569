"""Stores that go wrong on purpose: late, slow, or with faults by a seed. Above them, that is a miss."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.layout.frame import PageMeta
from headwater.storage.base import Addressable, Borrow, CachedNames, Deadline, Piecewise, Reservation, Store
from headwater.storage.wrappers import OpaqueStore, WrapperStore


class DelayStore(WrapperStore):
    """Answers late: sleeps before each call, in place too, but never past the call's deadline."""

    def __init__(self, store: Store, delay_s: float, *, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(store)
        self.delay_s = delay_s
        self._sleep = sleep

    def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """Sleep, then put; LATE if the deadline came first."""
        return [Status.LATE] * len(pages) if self._late(deadline) else super().put(pages, deadline=deadline)

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """Sleep, then get; LATE if the deadline came first."""
        return [Status.LATE] * len(pages) if self._late(deadline) else super().get_into(pages, deadline=deadline)

    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> list[bool]:
        """Sleep, then look; False if the deadline came first."""
        return [False] * len(names) if self._late(deadline) else super().contains(names, deadline=deadline)

    def delete(self, names: Sequence[PageName], *, deadline: Deadline) -> list[Status]:
        """Sleep, then delete; LATE if the deadline came first."""
        return [Status.LATE] * len(names) if self._late(deadline) else super().delete(names, deadline=deadline)

    def addressable(self) -> Addressable | None:
        """The store inside, in place, and as late."""
        inner = self.store.addressable()
        return None if inner is None else _DelayedAddresses(inner, self._late)

    def piecewise(self) -> Piecewise | None:
        """None: pages come by here, whole, and as late."""
        return None

    def cached_names(self) -> CachedNames | None:
        """None: nothing is known at once."""
        return None

    def _late(self, deadline: Deadline) -> bool:
        self._sleep(min(self.delay_s, deadline.remaining_s))
        return deadline.expired


class _DelayedAddresses(Addressable):
    """Pages in place behind a delay; what is only looked at is as it is."""

    def __init__(self, inner: Addressable, late: Callable[[Deadline], bool]) -> None:
        self._inner = inner
        self._late = late

    def memory(self) -> memoryview | None:
        """Pass on."""
        return self._inner.memory()

    def reserve(self, pages: Sequence[tuple[PageMeta, int]], *, deadline: Deadline) -> list[Reservation | Status]:
        """Sleep, then reserve; LATE if the deadline came first."""
        if self._late(deadline):
            return [Status.LATE] * len(pages)
        return self._inner.reserve(pages, deadline=deadline)

    def publish(self, reservations: Sequence[Reservation], *, deadline: Deadline) -> list[Status]:
        """Sleep, then publish: the store inside says what is too late, and takes the slots back."""
        self._late(deadline)
        return self._inner.publish(reservations, deadline=deadline)

    def abandon(self, reservations: Sequence[Reservation], *, deadline: Deadline) -> None:
        """Sleep, then give the slots back."""
        self._late(deadline)
        self._inner.abandon(reservations, deadline=deadline)

    def borrow(self, names: Sequence[PageName], *, deadline: Deadline) -> list[Borrow | Status]:
        """Sleep, then borrow; LATE if the deadline came first."""
        return [Status.LATE] * len(names) if self._late(deadline) else self._inner.borrow(names, deadline=deadline)

    def still_valid(self, borrow: Borrow) -> bool:
        """Pass on."""
        return self._inner.still_valid(borrow)


class ThrottledStore(WrapperStore):
    """Gives pages no faster than one in `page_s`, which may be changed at any time; in place too, if it is to."""

    def __init__(self, store: Store, page_s: float, *, in_place: bool = False) -> None:
        super().__init__(store)
        self.page_s = page_s
        self._in_place = in_place

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """Sleep for each page, then get; LATE if the deadline came first."""
        late = self._late(len(pages), deadline)
        return [Status.LATE] * len(pages) if late else super().get_into(pages, deadline=deadline)

    def addressable(self) -> Addressable | None:
        """The store inside, in place, and as slow; None unless that was asked for."""
        inner = self.store.addressable() if self._in_place else None
        return None if inner is None else _ThrottledAddresses(inner, self._late)

    def piecewise(self) -> None:
        """None: pages are given whole."""
        return

    def cached_names(self) -> CachedNames | None:
        """As of the store inside: only reading is slow."""
        return self.store.cached_names()

    def _late(self, num_pages: int, deadline: Deadline) -> bool:
        time.sleep(max(0.0, min(self.page_s * num_pages, deadline.remaining_s)))
        return deadline.expired


class _ThrottledAddresses(_DelayedAddresses):
    """Pages in place that are slow to borrow; nothing else is slow."""

    def __init__(self, inner: Addressable, late: Callable[[int, Deadline], bool]) -> None:
        super().__init__(inner, lambda deadline: deadline.expired)
        self._sleep = late

    def borrow(self, names: Sequence[PageName], *, deadline: Deadline) -> list[Borrow | Status]:
        """Sleep for each page, then borrow; LATE if the deadline came first."""
        if self._sleep(len(names), deadline):
            return [Status.LATE] * len(names)
        return self._inner.borrow(names, deadline=deadline)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often things go wrong, each a probability per page."""

    put_fails: float = 0.0
    get_fails: float = 0.0
    get_misses: float = 0.0  # contains said yes, get says no
    flips_byte: float = 0.0  # one byte of what was read differs, and the store says HIT
    cuts_tail: float = 0.0  # the end of what was read is missing, and the store says HIT
    swaps_page: float = 0.0  # another page of the same batch, and the store says HIT
    contains_lies: float = 0.0


class FaultyStore(OpaqueStore):
    """Goes wrong on purpose, by a seed. Put it *under* a VerifiedStore: everything it does must come out as a miss.

    What it spoils are private copies: there is no way in place, or its faults would be passed by.
    """

    cheap_calls: ClassVar[bool] = False  # pages of one call are taken for each other

    def __init__(self, store: Store, faults: Faults, *, seed: int = 0) -> None:
        super().__init__(store)
        self.faults = faults
        self.num_injected = 0
        self._random = random.Random(seed)

    def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """Put those pages that are not chosen to fail."""
        fails = [self._hit(self.faults.put_fails) for _ in pages]
        passed = iter(
            self.store.put([page for page, bad in zip(pages, fails, strict=True) if not bad], deadline=deadline)
        )
        return [Status.FAILED if bad else next(passed) for bad in fails]

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """Get, then spoil what was chosen."""
        results = self.store.get_into(pages, deadline=deadline)
        hits = [i for i, status in enumerate(results) if status is Status.HIT]
        for i in hits:
            frame = pages[i][1]
            if self._hit(self.faults.get_fails):
                results[i] = Status.FAILED
            elif self._hit(self.faults.get_misses):
                results[i] = Status.MISS
            elif self._hit(self.faults.flips_byte):
                frame[self._random.randrange(len(frame))] ^= 1 << self._random.randrange(8)
            elif self._hit(self.faults.cuts_tail):
                cut = self._random.randrange(len(frame))
                frame[cut:] = bytes(b ^ 0xA5 for b in frame[cut:])  # whatever the buffer held before
            elif len(hits) > 1 and self._hit(self.faults.swaps_page):
                other = pages[self._random.choice([j for j in hits if j != i])][1]
                if len(other) == len(frame):
                    frame[:] = other
        return results

    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> list[bool]:
        """Answer, sometimes the opposite."""
        truth = self.store.contains(names, deadline=deadline)
        return [not held if self._hit(self.faults.contains_lies) else held for held in truth]

    def _hit(self, probability: float) -> bool:
        chosen = self._random.random() < probability
        self.num_injected += chosen
        return chosen
