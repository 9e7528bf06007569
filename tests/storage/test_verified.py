"""VerifiedStore: every fault is a miss with its own counter and event; a tier that keeps failing is switched off."""

import struct
from collections.abc import Sequence

import pytest

from headwater.core.errors import InvalidInput, ResourceClosed
from headwater.core.page import PageName
from headwater.core.results import BAD_PAGE, Status
from headwater.metrics import Metrics
from headwater.storage.base import Deadline
from headwater.storage.memory import MemoryStore
from headwater.storage.verified import VerifiedStore
from headwater.storage.wrappers import OpaqueStore
from headwater.testing.faulty_stores import Faults, FaultyStore
from headwater.testing.pages import IDENTITY, PLANE_BYTES, SEALED_AT_MS, sample_page
from headwater.testing.stores import put, read, soon


class Tampering(OpaqueStore):
    """Gives pages back as a damaged, foreign, cut, old or newer store would."""

    def __init__(self, fault: Status) -> None:
        super().__init__(MemoryStore(1 << 20))
        self.fault = fault

    def get_into(self, pages: list[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:  # type: ignore[override]
        results = self.store.get_into(pages, deadline=deadline)
        for i, (_, frame) in enumerate(pages):
            if self.fault is Status.CORRUPT:
                frame[5000] ^= 1
            elif self.fault is Status.FOREIGN:
                frame[:] = sample_page(2).frame
            elif self.fault is Status.SHORT:
                results[i] = Status.SHORT
            elif self.fault is Status.UNKNOWN_VERSION:
                struct.pack_into("<H", frame, 4, 9)
        return results


@pytest.mark.parametrize("fault", sorted(BAD_PAGE))
def test_every_fault_is_a_miss_with_its_counter_and_event(fault: Status) -> None:
    page = sample_page(1, expires_at_ms=SEALED_AT_MS + 1 if fault is Status.STALE else 0)
    metrics = Metrics()
    with Tampering(fault) as store:
        put(store, [page])
        reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=PLANE_BYTES, metrics=metrics)
        assert read(reader, [page]) == [fault]
        assert metrics.counters() == {
            f'bad_pages_total{{fault="{fault.value}"}}': 1,
            'events_total{kind="bad_page"}': 1,
        }
        assert [event.facts for event in metrics.events("bad_page")] == [
            {"fault": fault.value, "name": page.name.hex()}
        ]
        kept = fault is Status.UNKNOWN_VERSION  # a newer process's good page is not ours to remove
        assert store.contains([page.name], deadline=soon()) == [kept]


@pytest.mark.parametrize("fault", sorted(BAD_PAGE))
def test_what_was_found_is_told_before_bad_pages_are_removed(fault: Status) -> None:
    """A store may hang in that, and who gives up waiting shall know what was found."""
    page = sample_page(1, expires_at_ms=SEALED_AT_MS + 1 if fault is Status.STALE else 0)
    with Tampering(fault) as store:
        put(store, [page])
        reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=PLANE_BYTES)
        heard: list[tuple[list[Status], list[bool]]] = []

        def judged(got: Sequence[Status]) -> None:
            heard.append((list(got), store.contains([page.name], deadline=soon())))

        found = reader.get_into([(page.name, page.buffer())], deadline=soon(), judged=judged)
        assert found == [fault]
        assert heard == [(found, [True])]
        assert store.contains([page.name], deadline=soon()) == [fault is Status.UNKNOWN_VERSION]


def test_a_tier_that_keeps_failing_is_switched_off_and_says_so() -> None:
    metrics = Metrics()
    page = sample_page(1)
    with FaultyStore(MemoryStore(1 << 20), Faults(flips_byte=1.0)) as store:
        reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=PLANE_BYTES, metrics=metrics, max_bad=5)
        for _ in range(5):
            put(store, [page])
            assert read(reader, [page])[0] is not Status.HIT
        assert reader.switched_off
        assert metrics.value("events_total", kind="tier_switched_off") == 1
        put(store, [page])
        assert read(reader, [page]) == [Status.FAILED]
        store.faults = Faults()
        reader.switch_on()
        assert read(reader, [page]) == [Status.HIT]


def test_one_good_page_shows_that_the_tier_works() -> None:
    page = sample_page(1)
    with FaultyStore(MemoryStore(1 << 20), Faults(flips_byte=0.5), seed=3) as store:
        reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=PLANE_BYTES, max_bad=12)
        for _ in range(100):
            put(store, [page])
            read(reader, [page])
        assert not reader.switched_off


def test_the_door() -> None:
    with MemoryStore(1 << 20) as store:
        reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=PLANE_BYTES)
        with pytest.raises(InvalidInput, match="a frame of"):
            reader.get_into([(sample_page(1).name, memoryview(bytearray(10)))], deadline=soon())
        reader.close()
        with pytest.raises(ResourceClosed):
            reader.contains([], deadline=soon())
        assert store.contains([], deadline=soon()) == []


def test_the_plain_word_hit_is_no_hit() -> None:
    """It compares equal to the status, and nobody verified the bytes."""

    class Careless(MemoryStore):
        def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
            return ["hit"] * len(pages)  # type: ignore[list-item]

    with Careless(1 << 20) as store:
        reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=PLANE_BYTES)
        assert read(reader, [sample_page(1)]) == [Status.FAILED]
