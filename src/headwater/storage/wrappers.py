"""Stores that wrap stores: injected faults, delay, metering. Each adds one behaviour and passes the rest on.

Wrappers own nothing: closing one closes the store inside, as a caller expects of the thing it holds.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headwater.core.page import PageName
from headwater.metrics import Metrics
from headwater.storage.base import Deadline, DeleteStatus, GetStatus, PutStatus, Store


class WrapperStore(Store):
    """Passes everything on."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[PutStatus]:
        """Pass on."""
        return self.store.put(pages, deadline=deadline)

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[GetStatus]:
        """Pass on."""
        return self.store.get_into(pages, deadline=deadline)

    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> list[bool]:
        """Pass on."""
        return self.store.contains(names, deadline=deadline)

    def delete(self, names: Sequence[PageName], *, deadline: Deadline) -> list[DeleteStatus]:
        """Pass on."""
        return self.store.delete(names, deadline=deadline)

    def close(self) -> None:
        """Close the store inside."""
        self.store.close()


class DelayStore(WrapperStore):
    """Answers late: sleeps before each call, but never past the call's deadline."""

    def __init__(self, store: Store, delay_s: float, *, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(store)
        self.delay_s = delay_s
        self._sleep = sleep

    def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[PutStatus]:
        """Sleep, then put; LATE if the deadline came first."""
        return [PutStatus.LATE] * len(pages) if self._late(deadline) else super().put(pages, deadline=deadline)

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[GetStatus]:
        """Sleep, then get; LATE if the deadline came first."""
        return [GetStatus.LATE] * len(pages) if self._late(deadline) else super().get_into(pages, deadline=deadline)

    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> list[bool]:
        """Sleep, then look; False if the deadline came first."""
        return [False] * len(names) if self._late(deadline) else super().contains(names, deadline=deadline)

    def delete(self, names: Sequence[PageName], *, deadline: Deadline) -> list[DeleteStatus]:
        """Sleep, then delete; LATE if the deadline came first."""
        return [DeleteStatus.LATE] * len(names) if self._late(deadline) else super().delete(names, deadline=deadline)

    def _late(self, deadline: Deadline) -> bool:
        self._sleep(min(self.delay_s, deadline.remaining_s))
        return deadline.expired


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


class FaultyStore(WrapperStore):
    """Goes wrong on purpose, by a seed. Put it *under* a VerifiedStore: everything it does must come out as a miss."""

    def __init__(self, store: Store, faults: Faults, *, seed: int = 0) -> None:
        super().__init__(store)
        self.faults = faults
        self.num_injected = 0
        self._random = random.Random(seed)  # noqa: S311  faults, not secrets

    def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[PutStatus]:
        """Put those pages that are not chosen to fail."""
        fails = [self._hit(self.faults.put_fails) for _ in pages]
        passed = iter(
            self.store.put([page for page, bad in zip(pages, fails, strict=True) if not bad], deadline=deadline)
        )
        return [PutStatus.FAILED if bad else next(passed) for bad in fails]

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[GetStatus]:
        """Get, then spoil what was chosen."""
        results = self.store.get_into(pages, deadline=deadline)
        hits = [i for i, status in enumerate(results) if status is GetStatus.HIT]
        for i in hits:
            frame = pages[i][1]
            if self._hit(self.faults.get_fails):
                results[i] = GetStatus.FAILED
            elif self._hit(self.faults.get_misses):
                results[i] = GetStatus.MISS
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


class MeteredStore(WrapperStore):
    """Counts calls, bytes and seconds, and pages per outcome, under `name`."""

    def __init__(self, store: Store, name: str, metrics: Metrics) -> None:
        super().__init__(store)
        self.name = name
        self.metrics = metrics

    def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[PutStatus]:
        """Put, and count."""
        start_s = time.perf_counter()
        results = super().put(pages, deadline=deadline)
        done = sum(len(frame) for (_, frame), status in zip(pages, results, strict=True) if status is PutStatus.STORED)
        self._count("put", [status.value for status in results], done, start_s)
        return results

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[GetStatus]:
        """Get, and count."""
        start_s = time.perf_counter()
        results = super().get_into(pages, deadline=deadline)
        done = sum(len(frame) for (_, frame), status in zip(pages, results, strict=True) if status is GetStatus.HIT)
        self._count("get", [status.value for status in results], done, start_s)
        return results

    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> list[bool]:
        """Look, and count."""
        start_s = time.perf_counter()
        results = super().contains(names, deadline=deadline)
        self._count("contains", ["held" if held else "absent" for held in results], 0, start_s)
        return results

    def delete(self, names: Sequence[PageName], *, deadline: Deadline) -> list[DeleteStatus]:
        """Delete, and count."""
        start_s = time.perf_counter()
        results = super().delete(names, deadline=deadline)
        self._count("delete", [status.value for status in results], 0, start_s)
        return results

    def _count(self, call: str, outcomes: Sequence[str], num_bytes: int, start_s: float) -> None:
        took_s = time.perf_counter() - start_s
        self.metrics.count("store_calls_total", store=self.name, call=call)
        self.metrics.count("store_bytes_total", num_bytes, store=self.name, call=call)
        self.metrics.count("store_seconds_total", took_s, store=self.name, call=call)
        self.metrics.observe("store_call_seconds", took_s, store=self.name, call=call)
        for outcome, num_pages in Counter(outcomes).items():
            self.metrics.count("store_pages_total", num_pages, store=self.name, call=call, outcome=outcome)
