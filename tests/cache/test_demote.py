"""The device is read once: what goes to host, disk and pool is gathered once, and copied from store to store."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from brain_kit import BLOCK_BYTES, ask, finish, jobs, run, the, tier, tokens, total, world
from headwater import CacheIdentity, CacheTiers, DType, block_keys, config_digest, gqa_layout, open_tiered_cache
from headwater.build import open_local
from headwater.cache.records import JobKind
from headwater.config.cache import SaveWhen
from headwater.config.stores import LocalStoreConfig
from headwater.core import events as ev
from headwater.core.breaker import BreakerState
from headwater.core.page import PageName, page_name
from headwater.core.results import Reason, Status
from headwater.layout.frame import frame_bytes
from headwater.storage.base import Store
from headwater.storage.local import MappedStore
from headwater.storage.local.reading import PageReading
from headwater.storage.memory import MemoryStore
from headwater.testing.clock import FakeClock
from headwater.testing.faulty_stores import Faults, FaultyStore
from headwater.testing.layouts import randomise
from headwater.testing.stores import soon
from headwater.transfer.device.arena import create_kv_cache
from headwater.transfer.device.copy_engine import CopyEngine
from machines import brain_checks
from machines.brain_world import World
from rank_kit import Group, groups
from worker_kit import FRAME_BYTES, PATIENCE_S, OddStore, Rig, key, keys, odd, rigs, wait_until

LIMIT_BYTES = 16 << 20
THREE = (tier("host"), tier("disk"), tier("pool"))


def demotions(here: World) -> list[tuple[str, str, int, int, int]]:
    """Those under way: from where, to where, depth of the first block, how many, and after which job."""
    orders = [errand.order for errand in jobs(here, ev.Demote)]
    return [
        (one.store, one.target, here.origin[one.keys[0]][1], len(one.keys), one.after)
        for one in orders
        if isinstance(one, ev.Demote)
    ]


def saves(here: World) -> list[tuple[str, int, int]]:
    orders = [errand.order for errand in jobs(here, ev.Save)]
    return [(one.store, one.depth, len(one.keys)) for one in orders if isinstance(one, ev.Save)]


def state(here: World, store: str) -> BreakerState:
    return here.brain.tiers[store].state


def settle(here: World) -> None:
    """Everything goes well from now on."""
    while here.errands:
        finish(here)


# --- what the brain says ----------------------------------------------------------------------------------------------


def test_late_demotions_speak_against_the_store_that_was_late() -> None:
    """Three of them pause a store: the source that did not answer, not the target that was never asked."""
    here = world(tier("host"), tier("disk"), num_slots=64)
    for path in "123":
        run(here, path, path * 4)
        finish(here, ev.Save)
        here.fail(the(here, ev.Demote), Reason.LATE, elsewhere=True)
    assert here.brain.tiers["disk"].breakers[JobKind.SAVE].state is BreakerState.CLOSED
    assert here.brain.tiers["host"].breakers[JobKind.LOAD].state is BreakerState.OPEN
    here.check()


def test_a_demotion_that_waited_in_vain_speaks_against_nobody() -> None:
    here = world(tier("host"), tier("disk"), num_slots=64)
    for path in "1234":
        run(here, path, path * 4)
        here.fail(the(here, ev.Demote), Reason.LATE, elsewhere=True)
    for name in ("host", "disk"):
        assert state(here, name) is BreakerState.CLOSED
    here.check()


def test_a_block_is_read_once_and_goes_on_from_there() -> None:
    here = world(*THREE, num_slots=12)
    guest = run(here, "a", "0123", more=2)
    assert saves(here) == [("host", 0, 4)]
    save = the(here, ev.Save).order.job
    assert demotions(here) == [("host", "disk", 0, 4, save), ("host", "pool", 0, 4, save)]
    here.fill(guest, 1, tokens("5"))
    assert saves(here) == [("host", 0, 4), ("host", 4, 1)]
    here.leave(guest)  # nothing of it is lost
    settle(here)
    assert here.stores["host"] == here.stores["disk"] == here.stores["pool"] == set(guest.keys)
    assert total(here, "dropped_blocks_total") == 0
    here.close()


def test_the_device_has_its_slots_again_after_the_one_gather() -> None:
    here = world(*THREE, num_slots=2)
    here.leave(run(here, "a", "01"))
    other = ask(here, "b", "77")
    assert here.want(other, 2) is None
    here.copied(the(here, ev.Save))
    assert here.want(other, 2) is not None, "demotions keep nothing on the device"
    settle(here)
    assert len(here.stores["pool"]) == 2
    here.close()


def test_a_first_store_that_is_down_or_full_leaves_it_to_the_next() -> None:
    here = world(tier("host", max_queued_bytes=BLOCK_BYTES), tier("disk"), tier("pool"), num_slots=12)
    guest = run(here, "a", "01", more=4)
    here.fill(guest, 2, tokens("56"))  # behind what is queued for host there is no room
    demote = next(errand.order for errand in jobs(here, ev.Demote) if errand.order.job)
    second = jobs(here, ev.Save)[1].order
    assert isinstance(second, ev.Save)
    assert (second.store, second.depth, second.after) == ("disk", 2, demote.job), "its parents come first"
    assert demotions(here)[2] == ("disk", "pool", 2, 2, second.job)
    here.tell(ev.StoreOff(now_s=here.now_s, store="host", why="a test"))
    here.fill(guest, 1, tokens("7"))
    assert saves(here)[-1] == ("disk", 4, 1)
    settle(here)
    assert here.stores["disk"] == here.stores["pool"] == set(guest.keys)
    here.close()


def test_what_the_first_store_evicted_is_read_from_the_device_again() -> None:
    here = world(*THREE, num_slots=12)
    guest = run(here, "a", "0123", more=1)
    finish(here, ev.Save)
    here.evict("host", guest.keys[2])
    here.end(jobs(here, ev.Demote)[0])  # to disk: stored, stored, miss, miss
    assert saves(here) == [("disk", 2, 2)]
    settle(here)  # what pool lacks comes from disk
    assert here.stores["disk"] == here.stores["pool"] == set(guest.keys)
    assert total(here, "dropped_blocks_total") == 0
    here.fill(guest, 1, tokens("7"))
    assert saves(here) == [("host", 2, 3)], "host is not believed to have what it lost"
    here.close()


def test_what_neither_the_first_store_nor_the_device_has_is_counted() -> None:
    here = world(tier("host"), tier("disk"), num_slots=2)
    gone = run(here, "a", "01")
    here.leave(gone)
    finish(here, ev.Save)
    assert here.want(ask(here, "b", "77"), 2) is not None
    here.evict("host", gone.keys[1])
    here.end(the(here, ev.Demote))
    assert total(here, "dropped_blocks_total", tier="disk", reason="source_evicted") == 1
    assert here.stores["disk"] == set(gone.keys[:1])
    here.close()


def test_what_is_still_there_when_its_request_has_left_is_saved() -> None:
    here = world(tier("host"), tier("disk"), num_slots=4)
    gone = run(here, "a", "01")
    here.leave(gone)
    here.fail(the(here, ev.Save))
    here.end(the(here, ev.Demote))
    assert saves(here) == [("disk", 0, 2)]
    settle(here)
    assert here.stores["disk"] == set(gone.keys)
    here.close()


def test_a_demotion_that_was_overtaken_by_a_second_save_waits_for_that() -> None:
    """The first store lost the path: it gets all of it again, and the device is not read a third time."""
    here = world(tier("host"), tier("disk"), num_slots=12)
    guest = run(here, "a", "01", more=2)
    settle(here)
    here.evict("host", guest.keys[0])
    here.fill(guest, 1, tokens("5"))
    here.end(the(here, ev.Save))  # no_parent
    assert saves(here) == [("host", 0, 3)]
    here.end(the(here, ev.Demote))  # a miss
    assert demotions(here) == [("host", "disk", 2, 1, the(here, ev.Save).order.job)]
    settle(here)
    assert here.stores["disk"] == set(guest.keys)
    here.close()


def test_a_row_that_shares_its_first_blocks_brings_only_those() -> None:
    """What a demotion missed is not believed to be on its way because somebody writes the block before it."""
    here = world(tier("host"), tier("disk"), num_slots=12)
    first = run(here, "a", "01")
    here.fail(the(here, ev.Save))
    second = run(here, "b", "05")
    assert ("host", 0, 2) in saves(here)
    here.end(jobs(here, ev.Demote)[0], ["miss", "miss"])
    brain_checks.check(here)
    settle(here)
    assert here.stores["disk"] >= {*first.keys, *second.keys}
    here.close()


def test_saves_that_give_way_take_their_demotions_along() -> None:
    here = world(*THREE, num_slots=4)
    here.leave(run(here, "gone", "0123"))
    assert here.want(ask(here, "other", "888"), 3) is None
    assert [errand.cancelled for errand in here.errands.values()] == [True] * 3
    for errand in list(here.errands.values()):
        here.fail(errand, Reason.CANCELLED)
    assert not here.errands
    assert total(here, "dropped_blocks_total", reason="cancelled") == 12
    here.close()


def test_other_demotions_stay_when_room_is_short() -> None:
    here = world(tier("host"), tier("disk"), num_slots=4)
    here.leave(run(here, "gone", "0123"))
    finish(here, ev.Save)
    assert here.want(ask(here, "other", "888"), 3) is not None
    assert not the(here, ev.Demote).cancelled
    here.close()


def test_demotions_queue_by_bytes_and_what_does_not_fit_comes_with_the_next() -> None:
    here = world(tier("host"), tier("disk", max_queued_bytes=3 * BLOCK_BYTES), num_slots=12)
    guest = run(here, "a", "01", more=4)
    assert here.brain.tiers["disk"].queued_save_bytes == 2 * BLOCK_BYTES
    here.fill(guest, 2, tokens("56"))
    assert total(here, "dropped_blocks_total", tier="disk", reason="queue_full") == 2
    settle(here)
    here.fill(guest, 1, tokens("7"))
    assert [one[:4] for one in demotions(here)] == [("host", "disk", 2, 3)]
    here.close()


def test_a_target_that_fails_is_left_alone_and_a_source_that_gives_nothing_blames_nobody() -> None:
    here = world(tier("host"), tier("disk", breaker_failures=1), num_slots=12)
    guest = run(here, "a", "01", more=2)
    here.end(the(here, ev.Demote), ["miss", "miss"])
    assert state(here, "disk") is BreakerState.CLOSED
    settle(here)
    here.fill(guest, 1, tokens("5"))
    here.fail(the(here, ev.Demote), Reason.LATE)
    assert state(here, "disk") is BreakerState.OPEN
    assert state(here, "host") is BreakerState.CLOSED
    here.close()


def test_blocks_that_are_hit_or_leave_are_demoted_where_a_faster_store_has_them() -> None:
    here = world(tier("host"), tier("disk", save=SaveWhen.HITS), tier("pool", save=SaveWhen.EVICTION), num_slots=3)
    guest = run(here, "a", "012")
    settle(here)
    here.leave(guest)
    assert [one[:4] for one in demotions(here)] == [("host", "pool", 0, 3)]
    settle(here)
    assert not here.stores["disk"]
    ask(here, "b", "01")
    assert [one[:4] for one in demotions(here)] == [("host", "disk", 0, 2)]
    settle(here)
    assert [len(here.stores[name]) for name in ("host", "disk", "pool")] == [3, 2, 3]
    here.close()


# --- what the executor does -------------------------------------------------------------------------------------------


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    yield from rigs()


def slab(directory: Path) -> MappedStore:
    found = open_local(LocalStoreConfig(directory=directory, limit_bytes=LIMIT_BYTES))
    assert isinstance(found, MappedStore)
    return found


def frames(store: Store, num_blocks: int) -> list[bytes]:
    """What a store holds of the first chain."""
    pages = [(page_name(one), memoryview(bytearray(FRAME_BYTES))) for one in keys(1, num_blocks)]
    assert store.get_into(pages, deadline=soon()) == [Status.HIT] * num_blocks
    return [bytes(page) for _, page in pages]


def test_one_gather_for_three_stores_bit_for_bit(make: Callable[..., Rig], shm: Path, tmp_path: Path) -> None:
    disk = open_local(LocalStoreConfig(directory=tmp_path / "disk", limit_bytes=LIMIT_BYTES))
    rig = make({"host": slab(shm / "host"), "disk": disk, "pool": MemoryStore(LIMIT_BYTES)}, slice_pages=4)
    save = rig.save(range(10))
    for job in (save, *(rig.demote(10, target, after=save) for target in ("disk", "pool"))):
        assert rig.ear.results(job) == ["stored"] * 10
    assert sorted(slot for slot, _ in rig.staging.gathered) == list(range(10)), "the device was read more than once"
    assert frames(rig.stores["host"], 10) == frames(disk, 10) == frames(rig.stores["pool"], 10)
    for target in ("disk", "pool"):
        rig.loaded(range(100, 110), range(10), store=target)
    assert rig.ear.results(rig.demote(10, "disk")) == ["exists"] * 10


def test_a_demotion_begins_when_its_save_has_ended_however_it_ended(make: Callable[..., Rig]) -> None:
    rig = make({"host": OddStore(), "disk": OddStore()})
    rig.gather.shut()
    save = rig.save(range(4))
    rig.gather.wait_for_arrival()
    demote, behind = rig.demote(4, "disk", after=save), rig.save(range(4, 6), start=4, store="disk")
    time.sleep(0.05)
    assert odd(rig, "disk").calls() == ["contains"], "only the save that waits for nobody"
    rig.gather.open()
    assert [set(rig.ear.results(job)) for job in (save, demote)] == [{"stored"}, {"stored"}]
    assert rig.ear.results(behind) == ["no_parent"] * 2  # nobody told it to wait
    late = rig.demote(4, "disk", chain=2, after=rig.save(range(2), start=4, store="disk"))
    assert rig.ear.results(late) == ["miss"] * 4
    failed = rig.save(range(4), chain=3, within_s=-1.0)
    assert rig.ear.results(rig.demote(4, "disk", chain=3, after=failed)) == ["miss"] * 4


def test_a_demotion_that_waits_can_be_cancelled_and_has_its_deadline(make: Callable[..., Rig]) -> None:
    rig = make({"host": OddStore(), "disk": OddStore()})
    rig.gather.shut()
    save = rig.save(range(4))
    rig.gather.wait_for_arrival()
    waiting, late = rig.demote(4, "disk", after=save), rig.demote(4, "disk", after=save, within_s=0.05)
    rig.cancel(waiting)
    assert rig.ear.failure(waiting) is Reason.CANCELLED
    assert rig.ear.failure(late) is Reason.LATE
    left = rig.demote(4, "disk", after=save)
    rig.gather.open()
    assert set(rig.ear.results(left)) == {"stored"}
    assert len(frames(odd(rig, "disk"), 4)) == 4


def test_demotions_that_gave_up_waiting_are_forgotten_though_their_save_hangs(make: Callable[..., Rig]) -> None:
    rig = make({"host": OddStore(), "disk": OddStore()})
    rig.gather.shut()
    save = rig.save(range(4), within_s=0.05)
    rig.gather.wait_for_arrival()
    for _ in range(20):
        rig.cancel(rig.demote(4, "disk", after=save))
        rig.ear.end(rig.demote(4, "disk", after=save, within_s=0.01))
    assert not any(rig.worker._waiting.values()), "what has ended is kept while a copy hangs"
    assert rig.ear.results(rig.demote(4, "disk", after=len(rig.jobs) + 1)) == ["miss"] * 4, "nobody waits for himself"
    assert not rig.ear.ends(save)


def test_a_source_that_hangs_does_not_take_the_threads_of_its_target(make: Callable[..., Rig]) -> None:
    rig = make({"disk": OddStore(), "pool": OddStore()}, grace_s=0.05)
    rig.saved(range(4), store="disk")
    odd(rig, "disk").gates["get_into"].shut()
    assert rig.ear.failure(rig.demote(4, "pool", store="disk", within_s=0.2)) is Reason.LATE
    for _ in range(5):
        assert rig.ear.results(rig.demote(4, "pool", store="disk")) == ["miss"] * 4
    rig.saved(range(4, 8), chain=2, store="pool")
    odd(rig, "disk").gates["get_into"].open()
    wait_until(lambda: not rig.worker._ledger.stuck)
    assert rig.ear.results(rig.demote(4, "pool", store="disk")) == ["stored"] * 4


def test_late_is_whose_fault_it_is(make: Callable[..., Rig]) -> None:
    """A Demote whose source hangs, or whose Save does, has not reached its target; one whose target hangs has."""
    rig = make({"disk": OddStore(), "pool": OddStore()}, grace_s=0.05)
    rig.saved(range(4), store="disk")
    odd(rig, "disk").gates["get_into"].shut()
    source = rig.ear.end(rig.demote(4, "pool", store="disk", within_s=0.1))
    rig.gather.shut()
    save = rig.save(range(4, 8), chain=2, store="disk")
    rig.gather.wait_for_arrival()
    waited = rig.ear.end(rig.demote(4, "pool", store="disk", chain=2, after=save, within_s=0.1))
    odd(rig, "disk").open()
    rig.gather.open()
    rig.ear.end(save)
    wait_until(lambda: not rig.worker._ledger.stuck)
    odd(rig, "pool").gates["put"].shut()
    target = rig.ear.end(rig.demote(4, "pool", store="disk", within_s=0.3))
    ends = [end for end in (source, waited, target) if isinstance(end, ev.JobFailed)]
    assert [(end.failure, end.elsewhere) for end in ends] == [
        (Reason.LATE, True),
        (Reason.LATE, True),
        (Reason.LATE, False),
    ]


def test_a_source_that_is_slow_is_a_miss_and_not_a_late_target(make: Callable[..., Rig]) -> None:
    clock = FakeClock()
    rig = make({"disk": OddStore(), "pool": OddStore()}, clock=clock, grace_s=60.0)
    rig.saved(range(4), store="disk")

    def slowly(found: list[Status]) -> list[Status]:
        clock.advance(6)
        return found

    odd(rig, "disk").answers["get_into"] = slowly
    assert rig.ear.results(rig.demote(4, "pool", store="disk", within_s=5)) == ["miss"] * 4
    odd(rig, "disk").answers["get_into"] = lambda found: [Status.LATE] * len(found)
    assert rig.ear.results(rig.demote(4, "pool", store="disk", within_s=5)) == ["miss"] * 4
    assert "put" not in odd(rig, "pool").calls()


class Shifting(MappedStore):
    """A slab in which pages change places while they are read."""

    meanwhile: Callable[[PageName], None] | None = None

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have `meanwhile` called with each page that was found, and is to be read next."""
        read = PageReading._read_part

        def watched(reading: PageReading, part: Any, place: Any) -> Status | None:
            if self.meanwhile is not None:
                self.meanwhile(reading._pages[part.page][0])
            return read(reading, part, place)

        monkeypatch.setattr(PageReading, "_read_part", watched)


@pytest.mark.parametrize("what", ["evicted", "torn", "torn and stamped"])
def test_a_page_that_changes_while_it_is_demoted_is_a_miss_and_takes_no_name(
    make: Callable[..., Rig], shm: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = slab(shm / "host")
    host.__class__ = Shifting
    assert isinstance(host, Shifting)
    host.watch(monkeypatch)
    rig = make({"host": host, "disk": MemoryStore(LIMIT_BYTES)}, slice_pages=8)
    rig.saved(range(8))
    torn = page_name(key(1, 5))

    def meanwhile(name: PageName) -> None:
        if name != torn:
            return
        at = host._attachment
        assert at is not None
        view = at.slab.view(at.catalog.mirror.places[torn].offset, FRAME_BYTES)
        if what == "evicted":
            host.meanwhile = None
            host.delete([torn], deadline=soon())
        else:  # another writer's bytes; or these alone, under a header that is still the old one's
            view[FRAME_BYTES // 2 :] = bytes(FRAME_BYTES - FRAME_BYTES // 2)
            if what == "torn":
                view[:8] = bytes(8)

    host.meanwhile = meanwhile
    assert rig.ear.results(rig.demote(8, "disk")) == ["stored"] * 5 + ["miss"] * 3
    host.meanwhile = None
    assert rig.ear.results(rig.probe(8, store="disk")) == ["held"] * 5 + ["absent"] * 3
    assert rig.ear.results(rig.save(range(8), store="disk")) == ["exists"] * 5 + ["stored"] * 3, "a name was wasted"
    rig.loaded(range(100, 108), range(8), store="disk")


def test_stores_that_fail_while_they_give_or_take(make: Callable[..., Rig]) -> None:
    rig = make({"host": OddStore(), "disk": OddStore(MemoryStore(6 * FRAME_BYTES))}, slice_pages=4)
    host, disk = odd(rig), odd(rig, "disk")
    rig.saved(range(8))
    host.raises["get_into"] = OSError("gone")
    assert rig.ear.results(rig.demote(8, "disk")) == ["miss"] * 8, "a source that raises is not the target's fault"
    host.raises.clear()
    disk.raises["put"] = OSError("no")
    assert rig.ear.failure(rig.demote(8, "disk")) is Reason.FAILED
    disk.raises.clear()
    results = rig.ear.results(rig.demote(8, "disk"))
    assert results[:6] == ["stored"] * 6
    assert results[6] in ("no_room", "refused"), "full"
    assert results[7] == "no_parent"
    rig.loaded(range(100, 106), range(6), store="disk")


def test_a_target_that_hangs_holds_up_no_load_and_is_late(make: Callable[..., Rig]) -> None:
    rig = make({"host": OddStore(), "disk": OddStore()})
    rig.saved(range(4))
    rig.saved(range(4, 8), store="disk", chain=2)
    odd(rig, "disk").gates["put"].shut()
    job = rig.demote(4, "disk", within_s=0.2)
    odd(rig, "disk").gates["put"].wait_for_arrival()
    rig.loaded(range(100, 104), range(4, 8), store="disk", chain=2)
    rig.loaded(range(104, 108), range(4))
    assert rig.ear.failure(job) is Reason.LATE


def test_a_source_that_is_switched_off_in_the_middle_gives_nothing(make: Callable[..., Rig], shm: Path) -> None:
    host = slab(shm / "host")
    rig = make({"host": host, "disk": MemoryStore(LIMIT_BYTES)}, slice_pages=2)
    rig.saved(range(6))
    rig.worker._tiers["host"].reader._bad._num_bad = 64  # nothing but bad pages came from it
    assert rig.ear.results(rig.demote(6, "disk")) == ["miss"] * 6
    assert any(isinstance(event, ev.StoreOff) and event.store == "host" for event in rig.ear.events)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_a_faulty_source_gives_only_right_frames_arrive(make: Callable[..., Rig], seed: int) -> None:
    faults = Faults(get_fails=0.1, get_misses=0.1, flips_byte=0.1, cuts_tail=0.1, swaps_page=0.1, contains_lies=0.1)
    disk = MemoryStore(LIMIT_BYTES)
    rig = make({"host": FaultyStore(MemoryStore(LIMIT_BYTES), faults, seed=seed), "disk": disk}, slice_pages=5)
    dice = random.Random(seed)
    rig.ear.results(rig.save(range(40)))
    for _ in range(20):
        rig.ear.results(rig.demote(dice.randint(1, 40), "disk"))
    there = rig.ear.results(rig.probe(40, store="disk")).count("held")
    rig.loaded(range(100, 100 + there), range(there), store="disk")


# --- several ranks ----------------------------------------------------------------------------------------------------


@pytest.fixture
def group() -> Iterator[Callable[..., Group]]:
    yield from groups()


@pytest.mark.parametrize("layout", ["gqa", "three sorts"])
def test_a_block_is_demoted_when_every_rank_has_demoted_it(group: Callable[..., Group], layout: str) -> None:
    inner, disk = MemoryStore(LIMIT_BYTES), MemoryStore(LIMIT_BYTES)
    host = [OddStore(inner) for _ in range(2)]
    here = group(layout, 2, lambda rank: {"host": host[rank], "disk": disk})
    here.fill(range(6))
    for one in host:
        one.gates["put"].shut()
    first = here.save(range(4))
    demoted = here.demote(4, "disk", after=first)
    second = here.save([4, 5], start=4)
    behind = here.demote(2, "disk", start=4, after=second)
    for one in host:
        one.gates["put"].open()
    for job in (first, demoted, second, behind):
        assert set(here.ear.results(job)) == {"stored"}
    here.loaded(list(range(10, 16)), store="disk")


def test_a_page_that_one_rank_s_source_lacks_ends_the_row_for_all(group: Callable[..., Group]) -> None:
    host, disk = [OddStore() for _ in range(2)], MemoryStore(LIMIT_BYTES)
    here = group("gqa", 2, lambda rank: {"host": host[rank], "disk": disk})
    here.saved(range(4))
    inner = host[1].store
    assert isinstance(inner, MemoryStore)
    lost = [name for name in inner.names() if name[:32] == key(1, 2)]
    host[1].delete(lost, deadline=soon())
    assert here.ear.results(here.demote(4, "disk")) == ["stored", "stored", "miss", "no_parent"]
    host[1].gates["get_into"].shut()
    assert here.ear.failure(here.demote(4, "disk", within_s=0.2)) is Reason.LATE
    host[1].gates["get_into"].open()


# --- the whole way ----------------------------------------------------------------------------------------------------


def test_bytes_are_read_from_the_device_once_for_host_disk_and_pool(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = gqa_layout(num_layers=2, num_kv_heads=2, head_dim=16, block_tokens=16, dtype=DType.BF16)
    identity = CacheIdentity(
        model="m", weights=bytes(32), config=config_digest({}), layout=layout.fingerprint, block_tokens=16
    )
    names = block_keys(range(16 * 24), parent=identity.root, block_tokens=16)
    gathered: list[int] = []
    gather = CopyEngine.gather

    def counted(self: CopyEngine, slots: Sequence[int], *args: Any, **more: Any) -> Any:
        gathered.extend(slots)
        return gather(self, slots, *args, **more)

    places = [shm / "host", tmp_path / "disk", tmp_path / "pool"]
    open_local(LocalStoreConfig(directory=places[2], limit_bytes=LIMIT_BYTES)).close()
    tiers = CacheTiers(
        host_directory=places[0],
        host_bytes=LIMIT_BYTES,
        disk_directory=places[1],
        disk_bytes=LIMIT_BYTES,
        pool=f"local:{places[2]}",
    )
    with create_kv_cache(layout, 32) as device, open_tiered_cache(device, tiers, identity=identity) as cache:
        monkeypatch.setattr(CopyEngine, "gather", counted)
        randomise(device, seed=1)
        cache.match("r", names, root=identity.root)
        cache.wait("r", timeout_s=PATIENCE_S)
        slots = cache.reserve("r", num_blocks=24)
        assert slots is not None
        cache.commit("r", names[:20])
        cache.commit("r", names[20:])
        wait_until(lambda: not cache.saving("r", "pool"))
        cache.release("r")
        assert cache.drain(PATIENCE_S)
        assert sorted(gathered) == sorted(slots), "the device was read more than once for a block"
        assert cache.metrics.value("dropped_blocks_total", tier="pool", reason="source_evicted") == 0
    size = frame_bytes(layout.plane_bytes)
    found: list[list[bytes]] = []
    for place in places:
        with open_local(LocalStoreConfig(directory=place, limit_bytes=None)) as store:
            pages = [(page_name(one), memoryview(bytearray(size))) for one in names]
            assert store.get_into(pages, deadline=soon()) == [Status.HIT] * len(names)
            found.append([bytes(page) for _, page in pages])
    assert found[0] == found[1] == found[2]


def test_a_demotion_is_no_use_of_what_it_reads(tmp_path: Path) -> None:
    """Otherwise each block would look as if it were used again a moment after it came."""
    with MemoryStore(4 * FRAME_BYTES) as host:
        rig = Rig({"host": host, "disk": MemoryStore(LIMIT_BYTES)})
        try:
            rig.saved(range(2))
            rig.saved(range(2, 4), chain=2)
            assert rig.ear.results(rig.demote(2, "disk")) == ["stored"] * 2  # of the first: it stays the oldest
            rig.saved(range(4, 5), chain=3)
            assert rig.ear.results(rig.probe(2)) == ["held", "absent"]
            assert rig.ear.results(rig.probe(2, chain=2)) == ["held", "held"]
        finally:
            rig.finish()


def test_demotions_wait_behind_looks_and_loads(make: Callable[..., Rig]) -> None:
    rig = make({"host": OddStore(), "disk": OddStore()}, threads_per_store=1)
    rig.saved(range(4))
    rig.saved(range(4, 6), chain=2, store="disk")
    odd(rig, "disk").gates["contains"].shut()
    look = rig.probe(1, chain=2, store="disk")
    odd(rig, "disk").gates["contains"].wait_for_arrival()
    demote, load = rig.demote(4, "disk"), rig.load(range(100, 102), chain=2, store="disk")
    odd(rig, "disk").gates["contains"].open()
    rig.ear.results(demote)
    wait_until(lambda: bool(rig.ear.ends(load)))
    order = [event.job for event in rig.ear.events if isinstance(event, ev.JobDone)]
    assert order.index(look) < order.index(load) < order.index(demote)
