"""The brain and its stores: what is asked, loaded, saved and brought nearer, and what is left alone, and why."""

from collections.abc import Callable

import pytest

from brain_kit import (
    BLOCK_BYTES,
    ask,
    fill_store,
    finish,
    jobs,
    live,
    run,
    statuses,
    the,
    tier,
    tokens,
    told,
    total,
    world,
)
from headwater.config.cache import SaveWhen
from headwater.core import events as ev
from headwater.core.breaker import BreakerState
from headwater.core.results import MISS_REASONS, Reason, Status
from machines.brain_world import ROOTS, TENANTS, World
from machines.index_machine import path_keys


def saved(world: World, store: str = "host") -> list[tuple[int, int]]:
    """The saves under way: depth of the first block, and how many."""
    return [
        (errand.order.depth, len(errand.order.keys))
        for errand in jobs(world, ev.Save, store=store)
        if isinstance(errand.order, ev.Save)
    ]


def demoted(world: World, target: str = "disk") -> list[tuple[str, int, int]]:
    """The demotions under way to a store: where from, depth of the first block, and how many."""
    return [
        (errand.order.store, errand.start, len(errand.order.keys))
        for errand in jobs(world, ev.Demote)
        if isinstance(errand.order, ev.Demote) and errand.order.target == target
    ]


def breaker(world: World, store: str = "host") -> BreakerState:
    return world.brain.tiers[store].state


# --- asking -----------------------------------------------------------------------------------------------------------


def test_all_stores_are_asked_at_once_and_once_for_what_is_not_on_the_device() -> None:
    here = world(tier("host", probe_timeout_s=0.2), tier("disk", probe_timeout_s=0.4))
    live(here, "before", "01")
    guest = ask(here, "guest", "0123", answered=False)
    probes = [probe.order for probe in jobs(here, ev.Probe)]
    assert [(probe.store, probe.keys) for probe in probes] == [
        (name, tuple(guest.keys[2:])) for name in ("host", "disk")
    ]
    assert [round(probe.deadline_s - here.now_s, 9) for probe in probes] == [0.2, 0.4]
    ask(here, "guest", "", answered=False)
    assert len(jobs(here, ev.Probe)) == 2
    here.close()


def test_a_prompt_that_is_on_the_device_asks_nobody() -> None:
    here = world(tier())
    live(here, "before", "0123")
    ask(here, "guest", "012", answered=False)
    assert jobs(here) == []
    here.close()


def test_what_comes_to_the_device_while_one_waits_needs_no_store() -> None:
    here = world(tier())
    guest = ask(here, "guest", "0123")
    run(here, "faster", "01")
    ask(here, "guest", "")
    assert statuses(here, guest) == ["device"] * 2 + ["miss"] * 2
    here.want(guest, 4)
    here.leave(guest)
    assert here.bills[-1].hit_tokens == (("device", 8),)
    here.close()


# --- loading ----------------------------------------------------------------------------------------------------------


def test_rows_come_from_the_fastest_store_that_has_them() -> None:
    here = world(tier("host", load_timeout_s=1.0), tier("disk", load_timeout_s=2.0), num_slots=12)
    fill_store(here, "host", "01")
    fill_store(here, "disk", "0123")
    guest = ask(here, "guest", "01234")
    table = here.want(guest, 6)
    assert table is not None
    loads = [load.order for load in jobs(here, ev.Load)]
    assert [(load.store, load.keys, load.slots) for load in loads if isinstance(load, ev.Load)] == [
        ("host", tuple(guest.keys[:2]), table[:2]),
        ("disk", tuple(guest.keys[2:4]), table[2:4]),
    ]
    assert [load.deadline_s - here.now_s for load in loads] == [1.0, 2.0]
    finish(here, ev.Load)
    here.leave(guest)
    assert here.bills[-1].hit_tokens == (("host", 8), ("disk", 8))
    assert here.bills[-1].loaded_bytes == 4 * BLOCK_BYTES
    here.close()


def test_loads_fill_the_slots_that_were_asked_for_and_no_more() -> None:
    here = world(tier())
    fill_store(here, "host", "0123")
    guest = ask(here, "guest", "0123")
    here.want(guest, 2)
    assert len(the(here, ev.Load).order.keys) == 2
    finish(here, ev.Load)
    here.want(guest, 4)
    assert jobs(here, ev.Load) == []  # loading is decided once
    here.fill(guest, 2)
    here.close()


def test_who_does_not_want_to_load_does_not() -> None:
    here = world(tier())
    fill_store(here, "host", "01")
    guest = ask(here, "guest", "01")
    here.want(guest, 2, load=False)
    assert guest.ready
    assert jobs(here) == []
    here.close()


def test_a_store_that_went_down_since_it_was_asked_is_passed_over() -> None:
    here = world(tier("host"), tier("disk"))
    fill_store(here, "host", "01")
    fill_store(here, "disk", "012")
    guest = ask(here, "guest", "0123")
    here.tell(ev.StoreOff(now_s=here.now_s, store="host", why=""))
    here.want(guest, 4)
    assert the(here, ev.Load).order.keys == tuple(guest.keys[:3])
    assert the(here, ev.Load).order.store == "disk"
    finish(here, ev.Load)
    here.leave(guest)
    assert here.bills[-1].hit_tokens == (("disk", 12),)
    assert here.bills[-1].miss_tokens == (("failed", 4),)
    here.close()


def test_what_is_loaded_before_a_store_that_went_down_counts() -> None:
    """The first row was begun, and thrown away because a second one could not be."""
    here = world(tier("host"), tier("disk"))
    fill_store(here, "host", "01")
    fill_store(here, "disk", "0123")
    guest = ask(here, "guest", "0123")
    here.tell(ev.StoreOff(now_s=here.now_s, store="disk", why=""))
    here.want(guest, 4)
    finish(here, ev.Load)
    assert guest.num_done == 2
    here.leave(guest)
    assert here.bills[-1].hit_tokens == (("host", 8),)
    assert here.bills[-1].miss_tokens == (("failed", 8),)
    here.close()


def test_of_loaded_blocks_somebody_else_may_have_been_first() -> None:
    here = world(tier())
    fill_store(here, "host", "01")
    first, second = ask(here, "first", "01"), ask(here, "second", "01")
    here.want(first, 2)
    here.want(second, 2)
    finish(here, ev.Load)
    assert total(here, "duplicate_blocks_total") == 2
    here.close()


def test_loading_waits_for_nobody_when_it_does_not_pay() -> None:
    here = world(tier(), num_slots=16, compute_base_s=1.0)
    fill_store(here, "host", "0123")
    first = ask(here, "first", "01")
    here.want(first, 2)
    here.end(the(here, ev.Load), seconds=10.0)  # five seconds a block, where computing takes one
    second = ask(here, "second", "0123")
    here.want(second, 4)
    assert jobs(here, ev.Load) == []
    here.leave(second)
    assert here.bills[-1].miss_tokens == (("not_worth_it", 8),)
    # Computing became slower: now it pays again.
    here.tell(ev.Paced(now_s=here.now_s, base_s=1.0, slope_s=3.0))
    third = ask(here, "third", "0123")
    here.want(third, 4)
    assert len(the(here, ev.Load).order.keys) == 2
    here.close()


def test_what_is_queued_before_it_counts_in_what_a_load_takes() -> None:
    here = world(tier(), num_slots=16, compute_base_s=1.0)
    fill_store(here, "host", "0123")
    fill_store(here, "host", "4567")
    first = ask(here, "first", "0")
    here.want(first, 1)
    here.end(the(here, ev.Load), seconds=0.6)
    second, third = ask(here, "second", "4567"), ask(here, "third", "0123")
    here.want(second, 4)
    assert len(jobs(here, ev.Load)) == 1  # four blocks in 2.4 s, where computing takes 4
    here.want(third, 4)
    assert len(jobs(here, ev.Load)) == 1  # behind those, 4.2 s for three
    here.close()


def test_nothing_is_learned_of_speed_from_what_was_cut_short() -> None:
    here = world(tier(), num_slots=8)
    fill_store(here, "host", "01")
    guest = ask(here, "guest", "01")
    here.want(guest, 2)
    here.end(the(here, ev.Load), ["hit", "failed"], seconds=60.0)
    here.fill(guest, 1)
    here.end(the(here, ev.Save), ["failed"] * len(the(here, ev.Save).order.keys), seconds=60.0)
    host = here.brain.tiers["host"]
    assert (host.loading.seconds(100, here.now_s), host.saving.seconds(100, here.now_s)) == (0.0, 0.0)


def test_a_load_that_was_late_says_how_slow_its_store_is() -> None:
    here = world(tier(), num_slots=8)
    fill_store(here, "host", "01")
    guest = ask(here, "guest", "01")
    here.want(guest, 2)
    here.end(the(here, ev.Load), ["hit", "late"], seconds=6.0)
    host = here.brain.tiers["host"]
    assert host.loading.seconds(2 * here.config.block_bytes, here.now_s) == pytest.approx(12.0)
    assert not host.queued_load_bytes
    here.close()


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_a_measurement_that_is_none_is_not_remembered(seconds: float) -> None:
    here = world(tier(), compute_base_s=1.0)
    fill_store(here, "host", "01")
    here.want(ask(here, "guest", "01"), 2)
    job = the(here, ev.Load).order.job
    here.brain.handle(ev.JobDone(now_s=0.0, job=job, results=(Status.HIT, Status.HIT), num_bytes=20, seconds=seconds))
    assert here.brain.tiers["host"].loading.facts()[0] is None


# --- why a block had to be computed -----------------------------------------------------------------------------------


def never_stored(here: World) -> None:
    here.want(ask(here, "guest", "01"), 2)


def evicted_from_the_device(here: World) -> None:
    live(here, "before", "01")
    here.stores["host"].clear()
    live(here, "other", "67676767")
    here.stores["host"].clear()
    here.want(ask(here, "guest", "01"), 2)


def evicted_from_the_store_since(here: World) -> None:
    fill_store(here, "host", "01")
    here.want(ask(here, "guest", "01"), 2)
    here.evict("host", path_keys(tokens("0"))[0])
    here.end(the(here, ev.Load))


def store_was_down(here: World) -> None:
    here.tell(ev.StoreOff(now_s=0.0, store="host", why=""))
    here.want(ask(here, "guest", "01"), 2)


def probe_failed(here: World) -> None:
    guest = ask(here, "guest", "01", answered=False)
    here.fail(the(here, ev.Probe))
    here.want(guest, 2)


def load_failed(here: World) -> None:
    fill_store(here, "host", "01")
    here.want(ask(here, "guest", "01"), 2)
    here.fail(the(here, ev.Load))


def load_answered_what_nobody_knows(here: World) -> None:
    fill_store(here, "host", "01")
    here.want(ask(here, "guest", "01"), 2)
    here.end(the(here, ev.Load), ["stored", "hit"])  # no answer to a Load


def bad_page(fault: str) -> Callable[[World], None]:
    def step(here: World) -> None:
        fill_store(here, "host", "01")
        here.want(ask(here, "guest", "01"), 2)
        here.end(the(here, ev.Load), [fault, "miss"])

    return step


def answer_was_late(here: World) -> None:
    guest = ask(here, "guest", "01", answered=False)
    here.fail(the(here, ev.Probe), Reason.LATE)
    here.want(guest, 2)


def nobody_waited_for_the_answer(here: World) -> None:
    here.want(ask(here, "guest", "01", answered=False), 2)


def load_was_late(here: World) -> None:
    fill_store(here, "host", "01")
    here.want(ask(here, "guest", "01"), 2)
    here.fail(the(here, ev.Load), Reason.LATE)


def not_worth_it(here: World) -> None:
    fill_store(here, "host", "01")
    here.want(ask(here, "guest", "01"), 2, load=False)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (never_stored, "never_stored"),
        (evicted_from_the_device, "evicted"),
        (evicted_from_the_store_since, "evicted"),
        (store_was_down, "failed"),
        (probe_failed, "failed"),
        (load_failed, "failed"),
        (load_answered_what_nobody_knows, "failed"),
        *((bad_page(fault), "corrupt") for fault in ("corrupt", "foreign", "short", "stale", "unknown_version")),
        (answer_was_late, "too_late"),
        (nobody_waited_for_the_answer, "too_late"),
        (load_was_late, "too_late"),
        (not_worth_it, "not_worth_it"),
    ],
)
def test_every_miss_has_its_reason(step: Callable[[World], None], reason: str) -> None:
    here = world(tier())
    step(here)
    guest = here.guests["guest"]
    here.check()
    here.fill(guest, 2)
    here.leave(guest)
    assert here.bills[-1].miss_tokens == ((reason, 8),)
    assert total(here, "miss_tokens_total", reason=reason) >= 8
    here.close()


def test_every_reason_is_covered_above() -> None:
    covered = {"never_stored", "evicted", "failed", "corrupt", "too_late", "not_worth_it"}
    assert covered | {"computed_meanwhile"} == MISS_REASONS  # that one in test_meeting.py


def test_reasons_block_by_block() -> None:
    """What no store has is not blamed on a load, and what lies behind it is a miss for that block's reason."""
    here = world(tier(), num_slots=12)
    live(here, "before", "0123")
    live(here, "other", "6" * 12)
    here.stores["host"].clear()
    fill_store(here, "host", "0")
    keys = path_keys(tokens("012345"))
    here.register(keys, 0)
    here.stores["host"] |= {keys[0], keys[2]}  # a hole, by another's eviction
    guest = ask(here, "guest", "012345")
    here.want(guest, 6)
    here.end(the(here, ev.Load))
    here.leave(guest)
    assert here.bills[-1].hit_tokens == (("host", 4),)
    assert dict(here.bills[-1].miss_tokens) == {"evicted": 12, "never_stored": 8}
    here.close()


@pytest.mark.parametrize(("ghosts", "reason"), [(4, "evicted"), (1, "never_stored"), (0, "never_stored")])
def test_who_left_is_remembered_for_a_while(ghosts: int, reason: str) -> None:
    here = world(num_slots=2, ghosts=ghosts)
    live(here, "before", "01")
    live(here, "other", "23")
    assert live(here, "again", "01").miss_tokens == ((reason, 8),)
    index = here.brain.evicting
    assert index is not None
    assert len(index.ghosts) == min(ghosts, 2)
    here.close()


# --- saving -----------------------------------------------------------------------------------------------------------


def test_saved_on_commit_what_is_new_in_one_row() -> None:
    here = world(tier(save_timeout_s=7.0))
    guest = ask(here, "guest", "0123", tenant=1)
    here.want(guest, 6)
    here.fill(guest, 3)
    order = the(here, ev.Save).order
    assert isinstance(order, ev.Save)
    assert (order.keys, order.slots) == (tuple(guest.keys[:3]), (0, 1, 2))
    assert (order.parent, order.depth, order.tenant) == (ROOTS[1], 0, TENANTS[1])
    assert order.deadline_s == here.now_s + 7.0
    here.fill(guest, 2, tokens("9"))
    assert saved(here) == [(0, 3), (3, 2)]
    finish(here)
    assert here.stores["host"] == set(guest.keys)
    # Another tenant with the same tokens shares nothing.
    run(here, "another", "01")
    assert saved(here) == [(0, 2)]
    here.close()


def test_what_was_loaded_is_not_saved_where_it_came_from_but_elsewhere() -> None:
    here = world(tier("host"), tier("disk"), tier("pool", save=SaveWhen.NEVER))
    fill_store(here, "disk", "01")
    guest = ask(here, "guest", "012")
    here.want(guest, 3)
    finish(here, ev.Load)
    assert (saved(here, "host"), saved(here, "disk"), saved(here, "pool")) == ([(0, 2)], [], [])
    here.fill(guest, 1)
    assert (saved(here, "host"), saved(here, "disk"), saved(here, "pool")) == ([(0, 2), (2, 1)], [], [])
    assert (demoted(here, "disk"), demoted(here, "pool")) == ([("host", 2, 1)], [])
    here.close()


def test_saved_after_so_many_hits() -> None:
    here = world(tier(save=SaveWhen.HITS, save_after_hits=2))
    run(here, "first", "012")
    assert saved(here) == []
    ask(here, "second", "01")
    assert saved(here) == []
    third = ask(here, "third", "012")
    assert saved(here) == [(0, 2)]  # the last one had only one hit
    finish(here)
    fourth = ask(here, "fourth", "012")
    assert saved(here) == [(2, 1)]
    finish(here)
    for guest in (third, fourth):
        here.leave(guest)
    here.close()


def test_a_hit_of_one_who_waits_and_asks_again_is_saved_too() -> None:
    here = world(tier(save=SaveWhen.HITS))
    first = ask(here, "first", "01")
    ask(here, "second", "01")
    here.want(first, 2)
    here.fill(first, 2)
    assert saved(here) == []
    ask(here, "second", "")
    assert saved(here) == [(0, 2)]
    here.close()


def test_what_was_loaded_was_used_before() -> None:
    here = world(tier("host", save=SaveWhen.HITS, save_after_hits=2), tier("disk", save=SaveWhen.NEVER))
    fill_store(here, "disk", "01")
    run(here, "first", "01")
    ask(here, "second", "01")  # the second use here, and the third of all
    assert saved(here) == [(0, 2)]
    here.close()


def test_who_had_to_make_way_and_finds_it_all_again_has_not_hit_it_twice() -> None:
    here = world(tier("host", save=SaveWhen.HITS, save_after_hits=2), tier("disk"), num_slots=4)
    here.leave(run(here, "first", "01"))  # disk still reads it
    waiting = ask(here, "waiting", "01")
    assert here.want(ask(here, "other", "789"), 3) is None
    assert statuses(here, waiting) == ["miss"] * 2
    ask(here, "waiting", "")
    assert statuses(here, waiting) == ["device"] * 2
    assert saved(here) == []
    ask(here, "second", "01")
    assert saved(here) == [(0, 2)]
    here.close()


def test_hits_of_one_who_waits_and_asks_again_count_once() -> None:
    here = world(tier(save=SaveWhen.HITS, save_after_hits=2))
    first = ask(here, "first", "012")
    here.want(first, 3)
    here.fill(first, 2)
    ask(here, "second", "012")
    for _ in range(5):
        ask(here, "second", "")
    assert saved(here) == []
    here.fill(first, 1)
    ask(here, "second", "")
    ask(here, "third", "012")
    assert saved(here) == [(0, 3)]
    here.close()


def test_saved_before_eviction_when_room_is_short_the_coldest_first() -> None:
    here = world(tier(save=SaveWhen.EVICTION), num_slots=8)
    for at, path in enumerate(("01", "23", "45")):
        live(here, f"r{at}", path)
    assert saved(here) == []  # two slots in eight are free
    live(here, "r3", "6")
    assert saved(here) == []
    guest = ask(here, "r4", "7")
    here.want(guest, 1)
    assert saved(here) == [(0, 2), (0, 2), (0, 2), (0, 1)]
    saves = [errand.order.keys for errand in jobs(here, ev.Save)]
    assert saves[0] == tuple(path_keys(tokens("01")))
    finish(here)
    here.wait(1.0)
    assert saved(here) == []  # nothing is saved twice
    here.close()


def test_cleaning_follows_every_commit() -> None:
    here = world(tier(save=SaveWhen.EVICTION), num_slots=4)
    guest = ask(here, "guest", "0")
    here.want(guest, 3)
    here.tell(ev.StoreOff(now_s=0.0, store="host", why=""))
    here.leave(run(here, "other", "7"))
    here.tell(ev.StoreOn(now_s=0.0, store="host"))
    assert saved(here) == []
    here.fill(guest, 1)
    assert [errand.order.keys for errand in jobs(here, ev.Save)] == [tuple(path_keys(tokens("7")))]
    here.close()


@pytest.mark.fault("D6")
def test_cleaning_follows_who_leaves() -> None:
    """What nobody holds any more may be the next to go: it is written then, and not when room was taken from it."""
    here = world(tier(save=SaveWhen.EVICTION), num_slots=2)
    here.leave(run(here, "a", "01"))
    assert saved(here) == [(0, 2)]
    finish(here)
    live(here, "b", "23")
    assert total(here, "dropped_blocks_total") == 0
    here.close()


def nudge(here: World) -> None:
    """Somebody comes and goes, and wants nothing: that is when the brain looks who leaves next."""
    here.leave(ask(here, f"somebody {here.now_s}", "9999"))


def test_cleaning_does_a_little_at_a_time() -> None:
    here = world(tier(save=SaveWhen.EVICTION), num_slots=10)
    here.tell(ev.StoreOff(now_s=0.0, store="host", why=""))
    for at in range(10):
        live(here, f"r{at}", f"{at}")
    here.tell(ev.StoreOn(now_s=0.0, store="host"))
    assert saved(here) == []
    nudge(here)
    assert len(saved(here)) == 8
    nudge(here)
    assert len(saved(here)) == 8  # no more before some of them have read their blocks
    for job in list(jobs(here)):
        here.end(job)
    nudge(here)
    assert len(saved(here)) == 2  # the rest
    here.close()


def test_evicted_before_it_was_saved_is_counted() -> None:
    here = world(tier(save=SaveWhen.EVICTION), num_slots=2)
    here.tell(ev.StoreOff(now_s=0.0, store="host", why=""))
    live(here, "a", "01")
    here.wait(1.0)  # it cannot be saved now, and is not lost yet
    live(here, "b", "23")
    assert total(here, "dropped_blocks_total", tier="host", reason="evicted_unsaved") == 2
    assert total(here, "dropped_blocks_total") == 2
    here.tell(ev.StoreOn(now_s=0.0, store="host"))
    nudge(here)
    finish(here)
    live(here, "c", "45")
    assert total(here, "dropped_blocks_total") == 2, "the others had been saved"
    here.close()


def test_a_hit_on_what_is_being_cleaned_wins() -> None:
    """FastDeploy's re-hit during eviction: here nothing leaves before it was copied, and who is held does not leave."""
    here = world(tier(save=SaveWhen.EVICTION), num_slots=2)
    here.leave(run(here, "a", "01"))
    here.wait(0.0)
    save = the(here, ev.Save)
    assert here.want(ask(here, "b", "77"), 2) is None  # still being read
    here.leave(here.guests["b"])
    again = ask(here, "again", "01")
    here.want(again, 2)
    here.copied(save)
    assert here.want(ask(here, "b", "77"), 1) is None  # and held
    here.fail(save)
    here.check()
    here.leave(again)
    here.wait(1.0)  # the first save failed: it is tried again
    assert saved(here) == [(0, 2)]
    finish(here)
    assert len(here.stores["host"]) == 2
    here.close()


def test_a_source_is_kept_until_it_was_copied_and_not_longer() -> None:
    here = world(tier(), num_slots=2)
    here.leave(run(here, "a", "01"))
    save = the(here, ev.Save)
    other = ask(here, "b", "77")
    assert here.want(other, 1) is None
    here.copied(save)
    assert here.want(other, 2) is not None
    here.end(save)  # its blocks are gone from the device, and in the store
    here.check()
    assert len(here.stores["host"]) == 2
    here.close()


def test_a_copied_save_that_fails_is_tried_again_with_the_next_commit() -> None:
    here = world(tier())
    guest = run(here, "a", "01", more=2)
    save = the(here, ev.Save)
    here.copied(save)
    here.ignore(ev.Copied(now_s=here.now_s, job=save.order.job))  # twice
    here.fail(save)
    here.fill(guest, 1, tokens("5"))
    assert saved(here) == [(0, 3)]
    here.close()


def test_a_store_that_lost_the_path_gets_all_of_it_again() -> None:
    here = world(tier(), num_slots=12)
    guest = run(here, "a", "0123", more=4)
    finish(here)
    here.evict("host", guest.keys[0])
    here.fill(guest, 1, tokens("7"))
    assert saved(here) == [(4, 1)]
    here.end(the(here, ev.Save))  # no_parent
    assert saved(here) == [(0, 5)]
    assert total(here, "dropped_blocks_total", reason="no_parent") == 1
    finish(here)
    assert here.stores["host"] == set(guest.keys)
    here.close()


def test_a_path_that_was_lost_after_its_request_left_is_written_by_the_next() -> None:
    here = world(tier(), num_slots=12)
    guest = run(here, "a", "0123", more=1)
    finish(here)
    here.evict("host", guest.keys[0])
    here.fill(guest, 1, tokens("7"))
    here.leave(guest)
    here.end(the(here, ev.Save))
    assert saved(here) == []
    run(here, "b", "01239")
    assert saved(here) == [(0, 5)]
    here.close()


def test_no_parent_of_a_first_block_does_not_go_round_for_ever() -> None:
    here = world(tier())
    guest = run(here, "a", "01", more=2)
    for _ in range(3):
        here.end(the(here, ev.Save), ["no_parent"] * len(the(here, ev.Save).order.keys))
        assert saved(here) == []
        here.fill(guest, 1, tokens("5"))
        if not saved(here):
            break
        assert saved(here)[0][0] == 0
    here.close()


def test_a_save_that_fails_is_not_believed_in_though_its_request_had_to_make_way() -> None:
    here = world(tier(save=SaveWhen.HITS), num_slots=6)
    here.leave(run(here, "first", "01"))
    ask(here, "waits", "01")
    save = the(here, ev.Save)
    here.copied(save)
    runner = ask(here, "runner", "78978")
    assert here.want(runner, 5) is not None  # the one who waits lost its hold, and its second block
    here.fail(save)
    here.leave(runner)
    ask(here, "again", "01")
    assert saved(here) == [(0, 1)]
    here.close()


def test_no_more_saves_are_given_up_than_room_is_wanted() -> None:
    here = world(tier(), num_slots=6)
    for name, path in (("a", "01"), ("b", "23"), ("c", "45")):
        here.leave(run(here, name, path))
    assert here.want(ask(here, "other", "88"), 2) is None
    assert [save.cancelled for save in jobs(here, ev.Save)] == [False, False, True]
    here.close()


def test_what_was_saved_behind_a_save_that_failed_is_written_again() -> None:
    here = world(tier(), num_slots=12)
    guest = run(here, "a", "01", more=4)
    first = the(here, ev.Save)
    here.fill(guest, 2, tokens("56"))
    here.end(jobs(here, ev.Save)[1], ["stored", "stored"])  # a store that does not look at parents
    here.fail(first)
    here.fill(guest, 1, tokens("7"))
    assert saved(here) == [(0, 5)]
    here.close()


def test_a_store_that_was_off_may_have_lost_everything() -> None:
    here = world(tier())
    guest = run(here, "a", "01", more=1)
    finish(here)
    here.tell(ev.StoreOff(now_s=here.now_s, store="host", why=""))
    here.tell(ev.StoreOn(now_s=here.now_s, store="host"))
    here.fill(guest, 1, tokens("5"))
    assert saved(here) == [(0, 3)]
    here.close()


def test_saves_that_keep_room_are_given_up_for_one_who_would_run() -> None:
    here = world(tier(), num_slots=6)
    here.leave(run(here, "gone", "0123"))
    running = run(here, "running", "67")
    kept, useless = jobs(here, ev.Save)
    other = ask(here, "other", "888")
    assert here.want(other, 3) is None
    assert (kept.cancelled, useless.cancelled) == (True, False), "what runs keeps its blocks anyway"
    assert here.want(other, 3) is None  # told once
    here.fail(kept, Reason.CANCELLED)
    assert here.want(other, 3) is not None
    assert total(here, "dropped_blocks_total", reason="cancelled") == 4
    here.fill(running, 0)
    here.close()


def test_a_save_that_was_told_to_give_up_may_end_well_all_the_same() -> None:
    here = world(tier(), num_slots=4)
    here.leave(run(here, "gone", "0123"))
    other = ask(here, "other", "888")
    assert here.want(other, 3) is None
    here.end(the(here, ev.Save))
    assert here.want(other, 3) is not None
    assert len(here.stores["host"]) == 4
    here.close()


def test_two_saves_of_one_path_and_the_first_fails() -> None:
    here = world(tier(), num_slots=12)
    guest = run(here, "a", "01", more=4)
    first = the(here, ev.Save)
    here.fill(guest, 2, tokens("56"))
    assert saved(here) == [(0, 2), (2, 2)]
    here.fail(first)
    here.end(jobs(here, ev.Save)[0])  # no_parent: the store never got the first
    assert saved(here) == [(0, 4)]
    finish(here)
    assert here.stores["host"] == set(guest.keys)
    here.close()


def test_what_is_stored_behind_a_hole_is_not_called_dropped() -> None:
    here = world(tier())
    run(here, "a", "0123")
    here.end(the(here, ev.Save), ["stored", "no_room", "exists", "no_parent"])
    assert total(here, "dropped_blocks_total") == 2
    assert total(here, "dropped_blocks_total", reason="no_room") == 1
    assert total(here, "dropped_blocks_total", reason="no_parent") == 1
    here.fill(here.guests["a"], 0)
    assert saved(here) == [(1, 3)]
    here.close()


# --- what a store cannot keep up with ---------------------------------------------------------------------------------


def test_a_queue_that_is_full_takes_no_more() -> None:
    here = world(tier(max_queued_bytes=3 * BLOCK_BYTES), num_slots=12)
    guest = run(here, "a", "0123", more=4)  # what is queued alone may be more: something has to go first
    assert saved(here) == [(0, 4)]
    here.fill(guest, 1, tokens("5"))
    assert saved(here) == [(0, 4)]
    assert total(here, "dropped_blocks_total", tier="host", reason="queue_full") == 1
    finish(here)
    here.fill(guest, 1, tokens("6"))
    assert saved(here) == [(4, 2)]  # and what was dropped comes with the next
    assert here.brain.tiers["host"].queued_save_bytes == 2 * BLOCK_BYTES
    here.close()


def test_a_row_that_does_not_fit_behind_what_is_queued_is_dropped_whole() -> None:
    here = world(tier(max_queued_bytes=4 * BLOCK_BYTES), num_slots=12)
    guest = run(here, "a", "01", more=4)
    here.fill(guest, 3, tokens("567"))  # one more block would fit, three do not
    assert saved(here) == [(0, 2)]
    assert total(here, "dropped_blocks_total", tier="host", reason="queue_full") == 3
    here.close()


def test_a_store_that_is_too_slow_gets_one_thing_at_a_time() -> None:
    here = world(tier(max_queued_s=1.0), num_slots=12)
    guest = run(here, "a", "01", more=4)
    here.end(the(here, ev.Save), seconds=4.0)  # two seconds a block
    here.fill(guest, 1, tokens("5"))
    here.fill(guest, 1, tokens("6"))
    assert saved(here) == [(2, 1)]
    assert total(here, "dropped_blocks_total", tier="host", reason="too_slow") == 1
    here.close()


def test_a_store_that_is_down_gets_nothing() -> None:
    here = world(tier())
    here.tell(ev.StoreOff(now_s=0.0, store="host", why=""))
    guest = run(here, "a", "01")
    assert jobs(here) == []
    assert total(here, "dropped_blocks_total", tier="host", reason="store_down") == 2
    here.tell(ev.StoreOn(now_s=0.0, store="host"))
    here.fill(guest, 0)
    assert saved(here) == [(0, 2)]
    here.close()


# --- a store that fails -----------------------------------------------------------------------------------------------


def test_a_store_that_keeps_failing_is_left_alone_and_tried_with_one_call() -> None:
    here = world(tier("host", breaker_failures=2, breaker_pause_s=1.0), tier("disk"))
    fill_store(here, "disk", "01")
    for name in ("a", "b"):
        ask(here, name, "01", answered=False)
    first, second = jobs(here, ev.Probe, store="host")
    here.fail(first)
    assert breaker(here) is BreakerState.CLOSED
    out = here.brain.accounts.totals
    here.fail(second, Reason.LATE)
    assert breaker(here) is BreakerState.OPEN
    assert out is here.brain.accounts.totals
    guest = ask(here, "c", "01")
    assert jobs(here, store="host") == []
    assert statuses(here, guest) == ["disk", "disk"]
    here.now_s += 1.0
    ask(here, "d", "01", answered=False)
    assert breaker(here) is BreakerState.HALF_OPEN
    ask(here, "e", "01", answered=False)
    assert len(jobs(here, store="host")) == 1  # one probe
    here.fail(the(here, ev.Probe, store="host"))
    assert breaker(here) is BreakerState.OPEN
    here.now_s += 1.5
    ask(here, "f", "01", answered=False)
    assert jobs(here, store="host") == []  # twice as long now
    here.now_s += 0.5
    ask(here, "g", "01", answered=False)
    here.end(the(here, ev.Probe, store="host"))
    assert breaker(here) is BreakerState.CLOSED
    here.close()


def test_what_a_breaker_does_is_told() -> None:
    here = world(tier(breaker_failures=1, breaker_pause_s=1.0))
    brain = here.brain
    keys = tuple(path_keys(tokens("0")))
    brain.handle(ev.Arrived(now_s=0.0, request="a", keys=keys, root=ROOTS[0]))
    out = brain.handle(ev.JobFailed(now_s=0.0, job=1, failure=Reason.LATE, why="no answer"))
    assert told(out, "tier_paused") == [{"tier": "host", "job": "probe", "why": "late"}]
    brain.handle(ev.Arrived(now_s=2.0, request="b", keys=keys, root=ROOTS[0]))
    out = brain.handle(ev.JobDone(now_s=2.0, job=2, results=(Status.ABSENT,)))
    assert told(out, "tier_resumed") == [{"tier": "host", "job": "probe"}]


@pytest.mark.parametrize(
    ("results", "state"),
    [
        (["failed", "failed"], BreakerState.OPEN),
        (["late", "failed"], BreakerState.OPEN),
        (["hit", "failed"], BreakerState.CLOSED),
        (["miss", "miss"], BreakerState.CLOSED),
        (["corrupt", "miss"], BreakerState.CLOSED),  # what does not verify is the verifier's business
    ],
)
def test_results_that_speak_against_a_store(results: list[str], state: BreakerState) -> None:
    here = world(tier(breaker_failures=1))
    fill_store(here, "host", "01")
    here.want(ask(here, "a", "01"), 2)
    here.end(the(here, ev.Load), results)
    assert breaker(here) is state
    here.close()


def test_a_cancelled_probe_proves_nothing_and_the_next_one_probes() -> None:
    here = world(tier(breaker_failures=1))
    guest = ask(here, "a", "0", answered=False)
    here.fail(the(here, ev.Probe))
    here.now_s += 2.0
    here.leave(guest)
    guest = ask(here, "b", "0", answered=False)
    assert breaker(here) is BreakerState.HALF_OPEN
    here.leave(guest)
    here.fail(the(here, ev.Probe), Reason.CANCELLED)
    ask(here, "c", "0", answered=False)
    assert breaker(here) is BreakerState.OPEN  # after a pause, or every request would be a probe
    here.now_s += 2.0
    ask(here, "d", "0", answered=False)
    assert breaker(here) is BreakerState.HALF_OPEN
    assert len(jobs(here)) == 1
    here.close()


@pytest.mark.parametrize(("patience_s", "state"), [(0.0, BreakerState.CLOSED), (0.2, BreakerState.OPEN)])
def test_an_answer_that_nobody_waited_for_speaks_against_a_store_that_was_given_time(
    patience_s: float, state: BreakerState
) -> None:
    here = world(tier(breaker_failures=1))
    guest = ask(here, "a", "0", answered=False)
    here.now_s += patience_s
    here.give_up(guest)
    here.fail(the(here, ev.Probe), Reason.CANCELLED)
    assert breaker(here) is state
    here.close()


def test_a_load_or_a_save_that_was_cancelled_says_nothing() -> None:
    here = world(tier(breaker_failures=1))
    fill_store(here, "host", "01")
    guest = ask(here, "a", "012")
    here.want(guest, 3)
    here.now_s += 1.0
    here.fail(the(here, ev.Load), Reason.CANCELLED)
    here.fill(guest, 3)
    here.now_s += 1.0
    here.fail(the(here, ev.Save), Reason.CANCELLED)
    assert breaker(here) is BreakerState.CLOSED
    here.close()


def test_what_can_be_asked_may_still_not_be_read() -> None:
    """Breakers are apart: answers that come do not close the one that bytes that never come have opened."""
    here = world(tier(breaker_failures=2), num_slots=12)
    fill_store(here, "host", "01")
    for name in ("a", "b"):
        here.want(ask(here, name, "01"), 2)
        here.fail(the(here, ev.Load), Reason.LATE)
    third = ask(here, "c", "01")
    assert statuses(here, third) == ["host"] * 2
    here.want(third, 2)
    assert jobs(here, ev.Load) == []
    here.leave(third)
    assert here.bills[-1].miss_tokens == (("failed", 8),)
    here.close()


def test_a_store_that_is_off_stays_off_whatever_ends() -> None:
    here = world(tier())
    ask(here, "a", "0", answered=False)
    here.tell(ev.StoreOff(now_s=0.0, store="host", why="bad pages"))
    here.end(the(here, ev.Probe))
    assert breaker(here) is BreakerState.OFF
    here.now_s += 1e6
    ask(here, "b", "1", answered=False)
    assert jobs(here) == []
    here.tell(ev.StoreOn(now_s=here.now_s, store="host"))
    ask(here, "c", "2", answered=False)
    assert len(jobs(here)) == 1
    here.close()


# --- bringing it nearer -----------------------------------------------------------------------------------------------


def nearer(**options: int) -> World:
    return world(tier("host", save=SaveWhen.NEVER, **options), tier("disk", save=SaveWhen.NEVER), prefetch=True)


def test_what_only_a_slower_store_has_is_brought_to_the_fastest_while_one_waits() -> None:
    here = nearer()
    fill_store(here, "host", "0")
    fill_store(here, "disk", "0123")
    guest = ask(here, "guest", "01234")
    order = the(here, ev.Promote).order
    assert isinstance(order, ev.Promote)
    assert (order.store, order.target, order.keys) == ("disk", "host", tuple(guest.keys[1:4]))
    assert order.deadline_s == here.now_s + 5.0
    assert statuses(here, guest) == ["host", "disk", "disk", "disk", "miss"]
    finish(here, ev.Promote)
    assert statuses(here, guest) == ["host"] * 4 + ["miss"]
    here.want(guest, 5)
    assert the(here, ev.Load).order.store == "host"
    here.close()


def test_in_part_if_only_a_part_came() -> None:
    here = nearer()
    here.room["host"] = 1
    fill_store(here, "disk", "012")
    guest = ask(here, "guest", "012")
    finish(here, ev.Promote)
    assert statuses(here, guest) == ["host", "disk", "disk"]
    here.close()


def test_nothing_is_brought_where_that_was_not_wanted_or_makes_no_sense() -> None:
    unwanted = world(tier("host"), tier("disk"), prefetch=False)
    fill_store(unwanted, "disk", "01")
    ask(unwanted, "guest", "01")
    assert jobs(unwanted) == []
    here = nearer()
    fill_store(here, "host", "01")
    ask(here, "all there", "01")
    ask(here, "nowhere", "7")
    fill_store(here, "disk", "55")
    here.fail(the(here, ev.Probe, store="host", guest=ask(here, "unanswered", "55", answered=False)))
    finish(here, ev.Probe)
    assert jobs(here) == []
    here.close()


def test_nothing_is_brought_behind_what_the_fastest_lacks() -> None:
    here = nearer()
    live(here, "before", "01")  # on the device, and nowhere else
    fill_store(here, "disk", "0123")
    ask(here, "guest", "0123")
    assert jobs(here) == []
    fill_store(here, "host", "01")  # it may be there: but nobody has said so
    ask(here, "another", "0123")
    assert jobs(here) == []
    here.close()


def test_what_is_brought_counts_in_the_queue_of_the_fastest() -> None:
    here = nearer(max_queued_bytes=BLOCK_BYTES)
    fill_store(here, "disk", "01")
    fill_store(here, "disk", "23")
    ask(here, "a", "01")
    assert here.brain.tiers["host"].queued_save_bytes == 2 * BLOCK_BYTES
    ask(here, "b", "23")
    assert len(jobs(here, ev.Promote)) == 1
    assert total(here, "dropped_blocks_total", tier="host", reason="queue_full") == 2
    here.close()


def test_what_is_on_its_way_is_not_brought_twice() -> None:
    here = nearer()
    fill_store(here, "disk", "01")
    ask(here, "a", "01")
    ask(here, "b", "01")
    assert len(jobs(here, ev.Promote)) == 1
    here.fail(the(here, ev.Promote))
    ask(here, "c", "01")
    assert len(jobs(here, ev.Promote)) == 1
    here.close()


def test_who_leaves_or_runs_does_not_stop_what_is_brought() -> None:
    here = nearer()
    fill_store(here, "disk", "01")
    guest = ask(here, "guest", "01")
    promote = the(here, ev.Promote)
    here.want(guest, 2)
    here.end(promote)  # it runs already
    here.check()
    other = ask(here, "other", "01")
    assert statuses(here, other) == ["host"] * 2
    here.close()


def test_what_was_brought_is_not_lost_on_one_who_asked_again() -> None:
    """The answers of the stores are forgotten when they are asked again; a promotion may be under way then."""
    here = world(tier("host"), tier("disk"), num_slots=4, prefetch=True)
    live(here, "before", "01")
    fill_store(here, "disk", "0123")
    waiting = ask(here, "waiting", "0123")
    promote = the(here, ev.Promote)
    assert here.want(ask(here, "runner", "777"), 4) is not None
    ask(here, "waiting", "", answered=False)
    assert len(jobs(here, ev.Probe, guest=waiting)) == 2
    here.end(promote)  # the fastest is just being asked
    here.check()
    finish(here, ev.Probe)
    assert statuses(here, waiting) == ["host"] * 4
    here.close()


def test_a_promotion_is_no_probe_and_blames_nobody() -> None:
    """A half-open breaker waits for its probe to be reported; a promotion reported to the other store only."""
    here = world(tier("host", breaker_failures=1), tier("disk", breaker_failures=1), prefetch=True)
    fill_store(here, "disk", "01")
    guest = ask(here, "guest", "01", answered=False)
    here.end(the(here, ev.Probe, store="host"))
    here.fail(the(here, ev.Probe, store="host", guest=ask(here, "other", "7", answered=False)))
    assert breaker(here) is BreakerState.OPEN
    here.now_s += 2.0
    here.end(the(here, ev.Probe, store="disk", guest=guest))
    assert jobs(here, ev.Promote) == []
    assert breaker(here) is BreakerState.OPEN
    ask(here, "probe", "8", answered=False)
    here.end(the(here, ev.Probe, store="host"))
    assert breaker(here) is BreakerState.CLOSED
    ask(here, "again", "01")
    here.fail(the(here, ev.Promote))
    assert (breaker(here, "host"), breaker(here, "disk")) == (BreakerState.CLOSED, BreakerState.CLOSED)
    here.close()
