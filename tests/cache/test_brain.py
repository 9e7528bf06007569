"""The brain: what requests get, keep and give back. Every step in a world that checks bytes, slots and sums."""

import itertools
import json
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from brain_kit import ask, fill_store, finish, jobs, live, run, statuses, the, tier, tokens, told, total, world
from headwater.cache.match import BlockStatus, Match, MatchPart
from headwater.cache.state import Brain
from headwater.config.cache import SaveWhen
from headwater.core import encoding
from headwater.core import events as ev
from headwater.core.breaker import BreakerState
from headwater.core.errors import InvalidInput
from headwater.core.keys import BlockKey
from headwater.core.results import Reason, Status
from headwater.index.slots import SlotState
from machines.brain_machine import BrainMachine
from machines.brain_world import ROOTS, World
from machines.index_machine import path_keys


def test_anything_may_happen_to_a_brain() -> None:
    """Default: 100 examples of up to 40 steps, about 3,300 steps. Nightly: 1,000 of up to 100, about 80,000."""
    nightly = settings().max_examples > 100
    run_state_machine_as_test(
        BrainMachine,
        settings=settings(max_examples=1000 if nightly else 100, stateful_step_count=100 if nightly else 40),
    )


def owned(world: World) -> int:
    return world.brain.slots.counts()[SlotState.OWN]


# --- one block, one slot ----------------------------------------------------------------------------------------------


def test_two_that_compute_one_prompt_end_with_one_block() -> None:
    here = world(num_slots=8)
    first, second = ask(here, "first", "012"), ask(here, "second", "012")
    assert here.want(first, 3) == (0, 1, 2)
    assert here.want(second, 3) == (3, 4, 5)
    here.fill(first, 3)
    here.fill(second, 3)
    here.check()
    assert len(here.brain.blocks()) == 3
    assert total(here, "duplicate_blocks_total") == 3
    # The older node's end does not take the newer one's name away: a third finds all of it.
    here.leave(first)
    assert statuses(here, ask(here, "third", "012")) == ["device"] * 3
    here.close()


def test_the_slot_that_lost_stays_with_its_request() -> None:
    """FastDeploy recycles the duplicate block while its request decodes on."""
    here = world(num_slots=4)
    winner, loser = ask(here, "winner", "01"), ask(here, "loser", "01")
    here.want(winner, 2)
    table = here.want(loser, 2)
    here.fill(winner, 2)
    here.fill(loser, 2)
    here.leave(winner)
    other = ask(here, "other", "23")
    assert here.want(other, 1) is None, "the loser's two slots are not to be had, and the block is held"
    assert here.guests["loser"].table == table
    here.check()
    here.leave(loser)
    assert here.want(other, 4) is not None
    here.close()


def test_of_two_the_one_who_is_half_way_takes_the_rest_from_its_own() -> None:
    here = world(num_slots=10)
    first, second = ask(here, "first", "0123"), ask(here, "second", "0123")
    here.want(first, 4)
    here.want(second, 5)
    here.fill(first, 2)
    here.fill(second, 4)
    here.fill(first, 2)
    here.fill(second, 1, tokens("7"))
    here.check()
    assert len(here.brain.blocks()) == 5
    assert total(here, "duplicate_blocks_total") == 4
    here.close()


def test_one_that_lost_and_grows_keeps_its_own_slots() -> None:
    here = world(num_slots=8)
    winner, loser = ask(here, "winner", "01"), ask(here, "loser", "01")
    here.want(winner, 2)
    table = here.want(loser, 2)
    here.fill(winner, 2)
    here.fill(loser, 2)
    grown = here.want(loser, 4)
    assert table is not None
    assert grown is not None
    assert grown[:2] == table
    assert not set(table) & set(winner.table or ())
    here.close()


def test_a_wholly_cached_prompt_computes_into_a_slot_of_its_own() -> None:
    """FastDeploy computes the last block again, into the shared one."""
    here = world(num_slots=8)
    shared = run(here, "shared", "012").table
    assert shared is not None
    # To have logits, the last token is computed again: the prompt is asked for without its last block.
    again = ask(here, "again", "01")
    table = here.want(again, 4)
    assert table is not None
    assert table[:2] == shared[:2]
    assert not set(table[2:]) & set(shared)
    here.scribble(again)  # the world refuses to let it touch a known block
    here.fill(again, 1, tokens("2"))
    here.check()
    assert len(here.brain.blocks()) == 3
    # Or with it, and one slot more: what is shared is only read.
    whole = ask(here, "whole", "012")
    table = here.want(whole, 4)
    assert table is not None
    assert table[:3] == shared
    here.scribble(whole)
    here.close()


def test_nothing_is_known_before_it_is_computed() -> None:
    """FastDeploy inserts when a step is scheduled; an abort then leaves names over rubbish."""
    here = world()
    early = ask(here, "early", "012")
    here.want(early, 3)
    here.fill(early, 1)
    other = ask(here, "other", "012")
    assert statuses(here, other) == ["device", "pending", "pending"]
    here.leave(early)
    assert statuses(here, other) == ["device", "miss", "miss"]
    assert len(here.brain.blocks()) == 1
    here.close()


def test_generated_blocks_are_known_too() -> None:
    here = world()
    guest = run(here, "first", "01", more=2)
    here.fill(guest, 2, tokens("89"))
    here.leave(guest)
    assert statuses(here, ask(here, "second turn", "01895")) == ["device"] * 4 + ["miss"]
    here.close()


def test_slots_are_added_and_never_moved() -> None:
    here = world(num_slots=6)
    guest = run(here, "guest", "01")
    first = guest.table
    other = run(here, "other", "5")
    grown = here.want(guest, 4)
    assert grown is not None
    assert grown[:2] == first
    assert here.want(guest, 3) == grown  # it has them already
    assert here.want(guest, 6) is None  # one is the other's
    assert guest.table == grown
    here.leave(other)
    assert here.want(guest, 6) is not None
    here.close()


def test_asking_for_fewer_slots_than_are_known() -> None:
    here = world()
    live(here, "before", "0123")
    guest = ask(here, "guest", "0123")
    table = here.want(guest, 1)
    assert table is not None
    assert len(table) == 4
    here.close()


def test_nothing_at_all() -> None:
    here = world(tier(), num_slots=2)
    guest = ask(here, "empty", "")
    assert jobs(here) == []
    assert here.want(guest, 0) == ()
    here.fill(guest, 3, tokens("12"))
    assert (match := here.brain.view("empty")).num_blocks == match.num_hit == match.num_on_device == 0
    assert match.settled
    here.leave(guest)
    assert here.bills[-1].num_tokens == 0
    here.close()


# --- no room ----------------------------------------------------------------------------------------------------------


def test_refused_for_want_of_room_nothing_leaks() -> None:
    """FastDeploy raises after it has counted references up."""
    here = world(num_slots=4)
    here.leave(run(here, "before", "01"))
    guest = ask(here, "guest", "0123456")
    for _ in range(5):
        assert here.want(guest, 7) is None
        here.check()
    assert owned(here) == 0
    here.leave(guest)
    assert here.brain.slots.num_evictable == 2
    all_of_it = ask(here, "all", "9999")
    assert here.want(all_of_it, 4) is not None
    here.close()


def test_only_leaves_are_evicted_and_the_coldest_first() -> None:
    here = world(num_slots=6)
    for name, path in (("a", "012"), ("b", "34"), ("c", "5")):
        here.leave(run(here, name, path))
        here.wait(1.0)
    assert here.want(ask(here, "d", "7"), 1) is not None
    probe = {path: here.num_known(path_keys(tokens(path))) for path in ("012", "34", "5")}
    assert probe == {"012": 2, "34": 2, "5": 1}
    assert total(here, "evicted_blocks_total", tier="device") == 1
    here.close()


def test_a_hit_saves_a_block_that_would_leave_next() -> None:
    here = world(num_slots=4)
    here.leave(run(here, "a", "01"))
    here.wait(1.0)
    here.leave(run(here, "b", "23"))
    again = ask(here, "again", "01")  # older than all, and held now
    assert here.want(ask(here, "c", "45"), 2) is not None
    assert here.num_known(path_keys(tokens("01"))) == 2
    assert here.num_known(path_keys(tokens("23"))) == 0
    assert statuses(here, again) == ["device"] * 2
    here.close()


def test_who_only_waits_makes_way_for_who_would_run_the_newest_first() -> None:
    here = world(num_slots=4)
    here.leave(run(here, "before", "01"))
    here.leave(run(here, "another", "23"))
    older, newer = ask(here, "older", "01"), ask(here, "newer", "23")
    runner = ask(here, "runner", "56")
    assert here.want(runner, 2) is not None
    assert statuses(here, older) == ["device"] * 2
    assert statuses(here, newer) == ["miss"] * 2
    assert len(here.brain.blocks()) == 2
    here.close()


def test_who_runs_never_makes_way() -> None:
    here = world(num_slots=4)
    running = run(here, "running", "01")
    waiting = ask(here, "waiting", "01")
    assert here.want(ask(here, "other", "567"), 3) is None
    here.check()
    assert running.num_done == here.num_known(running.keys) == 2
    ask(here, "waiting", "")  # what it had to let go is there still, for a runner holds it
    assert statuses(here, waiting) == ["device"] * 2
    here.close()


def test_who_would_need_more_than_there_is_takes_nothing_from_anybody() -> None:
    here = world(num_slots=4)
    here.leave(run(here, "before", "01"))
    waiting = ask(here, "waiting", "01")
    assert here.want(ask(here, "huge", "56789"), 5) is None
    assert statuses(here, waiting) == ["device"] * 2
    here.close()


def test_who_made_way_asks_the_stores_again() -> None:
    here = world(tier(), num_slots=4)
    live(here, "before", "0123")
    waiting = ask(here, "waiting", "0123")
    assert jobs(here) == []  # it is all on the device
    live(here, "runner", "6666")
    assert statuses(here, waiting) == ["miss"] * 4
    ask(here, "waiting", "")
    assert statuses(here, waiting) == ["host"] * 4
    assert here.want(waiting, 4) is not None
    finish(here, ev.Load)
    here.leave(waiting)
    assert here.bills[-1].hit_tokens == (("host", 16),)
    here.close()


def test_who_lost_the_beginning_does_not_load_the_rest() -> None:
    """What stores said was of the blocks behind those it had."""
    here = world(tier(), num_slots=4)
    live(here, "before", "01")
    fill_store(here, "host", "0123")
    waiting = ask(here, "waiting", "0123")
    assert statuses(here, waiting) == ["device", "device", "host", "host"]
    live(here, "runner", "6666")
    assert statuses(here, waiting) == ["miss"] * 4
    assert here.want(waiting, 4) is not None
    assert jobs(here, ev.Load) == []
    here.leave(waiting)
    assert here.bills[-1].miss_tokens == (("evicted", 16),)
    here.close()


def test_waiting_for_room_is_not_waiting_for_stores() -> None:
    here = world(tier(), num_slots=4)
    live(here, "before", "0123")
    waiting = ask(here, "waiting", "0123")
    live(here, "runner", "6666")
    here.now_s += 100.0
    ask(here, "waiting", "", answered=False)
    here.now_s += 0.5
    finish(here, ev.Probe)
    here.now_s += 50.0
    here.want(waiting, 4)
    here.now_s += 0.25
    finish(here, ev.Load)
    here.leave(waiting)
    assert here.bills[-1].waited_s == pytest.approx(0.75)
    here.close()


def test_who_made_way_and_does_not_ask_again_computes() -> None:
    here = world(tier(), num_slots=4)
    live(here, "before", "0123")
    waiting = ask(here, "waiting", "0123")
    live(here, "runner", "6666")
    assert here.want(waiting, 4) is not None
    here.leave(waiting)
    assert here.bills[-1].miss_tokens == (("evicted", 16),)
    here.close()


# --- leaving ----------------------------------------------------------------------------------------------------------


def test_what_a_load_may_still_write_to_is_nobodys() -> None:
    here = world(tier(), num_slots=4)
    fill_store(here, "host", "012")
    guest = ask(here, "guest", "012")
    here.want(guest, 4)
    load = the(here, ev.Load)
    here.leave(guest)
    assert here.brain.slots.counts() == {
        SlotState.FREE: 1, SlotState.OWN: 0, SlotState.KNOWN: 0, SlotState.QUARANTINED: 3,
        SlotState.LEAVING: 0,
    }  # fmt: skip
    other = ask(here, "other", "7777")
    assert here.want(other, 2) is None
    here.write(load)  # late, as loads are
    here.check()
    here.end(load)  # and successful: nobody wants it
    assert len(here.brain.blocks()) == 0
    assert here.want(other, 4) is not None
    here.close()


def test_a_name_may_come_again_while_jobs_for_the_first_are_under_way() -> None:
    here = world(tier(), num_slots=8)
    fill_store(here, "host", "01")
    first = ask(here, "name", "01")
    here.want(first, 2)
    load = the(here, ev.Load)
    here.leave(first)
    second = ask(here, "name", "01", answered=False)
    here.end(load)
    here.check()
    assert statuses(here, second) == ["pending"] * 2
    here.want(second, 2)
    assert second.ready
    here.close()


def test_leaving_early_has_no_bill() -> None:
    here = world(tier())
    fill_store(here, "host", "01")
    here.leave(ask(here, "asked only", "01"))
    loading = ask(here, "loading", "01")
    here.want(loading, 2)
    here.leave(loading)
    assert here.bills == []
    assert total(here, "requests_total", outcome="left_early") == 2
    finish(here)
    live(here, "stays", "01")
    assert total(here, "requests_total", outcome="served") == 1
    here.close()


# --- what a request is told, in every phase ---------------------------------------------------------------------------


def test_block_by_block_from_the_first_question_to_the_end() -> None:
    here = world(tier("host"), tier("disk"), num_slots=12)
    live(here, "before", "0")
    fill_store(here, "host", "012")
    fill_store(here, "disk", "01234")
    guest = ask(here, "guest", "0123456", answered=False)
    assert statuses(here, guest) == ["device"] + ["pending"] * 6
    here.end(the(here, ev.Probe, store="disk"))
    assert statuses(here, guest) == ["device", "disk", "disk", "disk", "disk", "pending", "pending"]
    here.end(the(here, ev.Probe, store="host"))
    assert statuses(here, guest) == ["device", "host", "host", "disk", "disk", "miss", "miss"]
    match = here.brain.view("guest")
    assert (match.num_on_device, match.num_hit, match.num_blocks, match.settled) == (1, 5, 7, True)
    here.want(guest, 7)
    assert statuses(here, guest) == ["device"] + ["pending"] * 4 + ["miss"] * 2
    assert not here.brain.view("guest").settled
    here.end(the(here, ev.Load, store="disk"))  # behind the other: it waits for it
    assert statuses(here, guest) == ["device"] + ["pending"] * 4 + ["miss"] * 2
    here.end(the(here, ev.Load, store="host"))
    assert statuses(here, guest) == ["device"] * 5 + ["miss"] * 2
    here.fill(guest, 2)
    assert statuses(here, guest) == ["device"] * 7
    here.close()


def test_what_another_is_about_to_have_is_pending() -> None:
    here = world()
    first = ask(here, "first", "0123")
    second = ask(here, "second", "01239")
    assert statuses(here, second) == ["miss"] * 5
    here.want(first, 3)
    assert statuses(here, second) == ["pending"] * 5
    here.fill(first, 3)
    ask(here, "second", "")
    assert statuses(here, second) == ["device"] * 3 + ["miss"] * 2
    here.close()


def test_a_match_counts_its_parts() -> None:
    hit = MatchPart(BlockStatus.HIT, "device", 0, 2)
    match = Match("m", 4, (hit, MatchPart(BlockStatus.HIT, "disk", 2, 3), MatchPart(BlockStatus.PENDING, None, 3, 4)))
    assert (match.num_on_device, match.num_hit, match.settled) == (2, 3, False)
    assert [status for status, _ in match] == ["hit", "hit", "hit", "pending"]
    assert Match("m", 2, (hit,)).num_hit == 2
    assert Match("m", 2, (MatchPart(BlockStatus.HIT, "disk", 0, 2),)).num_on_device == 0


# --- bills and sums ---------------------------------------------------------------------------------------------------


def test_a_bill_says_what_was_worth_what() -> None:
    here = world(tier(), compute_base_s=1.0, compute_slope_s=0.5)
    live(here, "before", "0")
    fill_store(here, "host", "012")
    guest = ask(here, "guest", "01234")
    here.want(guest, 5)
    here.now_s += 2.0
    here.end(the(here, ev.Load), seconds=0.5)
    here.fill(guest, 2)
    here.now_s += 50.0  # decoding is not waiting
    here.leave(guest)
    bill = here.bills[-1]
    assert (bill.request, bill.num_tokens, bill.loaded_bytes) == ("guest", 20, 20)
    assert bill.hit_tokens == (("device", 4), ("host", 8))
    assert bill.miss_tokens == (("never_stored", 8),)
    assert (bill.waited_s, bill.saved_s) == (2.0, (1.0 + 1.5 + 2.0) - 2.0)
    assert total(here, "saved_seconds_total") == 2.5
    assert total(here, "waited_seconds_total") == 2.0
    assert total(here, "lost_seconds_total") == 0.0
    here.close()


def test_a_wait_that_did_not_pay_is_lost() -> None:
    here = world(tier(), compute_base_s=1.0)
    fill_store(here, "host", "0")
    guest = ask(here, "guest", "0")
    here.want(guest, 1)
    here.now_s += 5.0
    finish(here, ev.Load)
    here.leave(guest)
    assert here.bills[-1].saved_s == -4.0
    assert (total(here, "lost_seconds_total"), total(here, "saved_seconds_total")) == (4.0, 0.0)
    here.close()


def test_accounts_keep_totals_and_give_out_what_came_on_top() -> None:
    here = world()
    live(here, "a", "01")
    fresh = here.brain.accounts.take()
    assert fresh["requests_total", (("outcome", "served"),)] == 1
    assert fresh["miss_tokens_total", (("reason", "never_stored"),)] == 8
    assert here.brain.accounts.take() == {}
    live(here, "b", "01")
    assert here.brain.accounts.take()["hit_tokens_total", (("tier", "device"),)] == 8
    assert here.brain.accounts.totals["requests_total", (("outcome", "served"),)] == 2
    assert all(here.brain.accounts.totals.values()), "nothing is counted that did not happen"
    here.close()


# --- jobs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("broken", [None, 0, 1, 2])
def test_several_loads_of_one_request_end_in_any_order(order: tuple[int, ...], broken: int | None) -> None:
    here = world(tier("host"), tier("disk"), tier("pool"), num_slots=8)
    fill_store(here, "host", "0")
    fill_store(here, "disk", "012")
    fill_store(here, "pool", "01234")
    guest = ask(here, "guest", "01234")
    here.want(guest, 5)
    loads = jobs(here, ev.Load)
    assert [load.order.store for load in loads] == ["host", "disk", "pool"]
    for at in order:
        assert not guest.ready
        here.refuse(ev.Filled(now_s=here.now_s, request="guest", keys=()))
        if at == broken:
            here.end(loads[at], ["miss"] * len(loads[at].order.keys))
        else:
            here.end(loads[at])
        here.check()
    assert guest.ready
    assert guest.num_done == {None: 5, 0: 0, 1: 1, 2: 3}[broken]
    here.fill(guest, 5)
    here.close()


def test_a_hole_in_a_load_ends_it_there_and_cancels_the_rest() -> None:
    here = world(tier("host"), tier("disk"), num_slots=8)
    fill_store(here, "host", "012")
    fill_store(here, "disk", "01234")
    guest = ask(here, "guest", "01234")
    here.want(guest, 5)
    rest = the(here, ev.Load, store="disk")
    out = here.brain.handle(
        ev.JobDone(
            now_s=0.0, job=the(here, ev.Load, store="host").order.job, results=(Status.HIT, Status.CORRUPT, Status.HIT)
        )
    )
    assert out == [ev.Cancel(job=rest.order.job)]
    record = here.brain.requests["guest"]
    assert (record.hold.num_blocks, record.ready_s) == (1, None)
    here.brain.handle(ev.JobDone(now_s=1.0, job=rest.order.job, results=(Status.HIT, Status.HIT)))
    assert (record.hold.num_blocks, record.ready_s) == (1, 1.0), "loaded behind a hole, and computed again"
    assert record.misses == {Reason.CORRUPT: 4}
    here.brain.validate()


def test_results_of_jobs_that_ended_or_never_were_are_ignored() -> None:
    """FastDeploy keeps results that nobody fetches."""
    here = world(tier())
    fill_store(here, "host", "01")
    guest = ask(here, "guest", "01", answered=False)
    probe = the(here, ev.Probe)
    here.end(probe)
    here.want(guest, 2)
    load = the(here, ev.Load)
    here.end(load)
    for job in (probe.order.job, load.order.job, 0, -1, 99, 1 << 70):
        here.ignore(ev.JobDone(now_s=here.now_s, job=job, results=(Status.HIT, Status.HIT)))
        here.ignore(ev.JobDone(now_s=here.now_s, job=job, results=()))
        here.ignore(ev.JobFailed(now_s=here.now_s, job=job, failure=Reason.FAILED))
        here.ignore(ev.Copied(now_s=here.now_s, job=job))
    here.close()


@pytest.mark.parametrize("results", [(), ("hit",), ("hit", "hit", "hit")])
def test_a_job_with_another_number_of_results_failed(results: tuple[str, ...]) -> None:
    here = world(tier(breaker_failures=1))
    fill_store(here, "host", "01")
    guest = ask(here, "guest", "01")
    here.want(guest, 2)
    here.end(the(here, ev.Load), results, seconds=1.0)
    assert (guest.ready, guest.num_done) == (True, 0)
    assert here.brain.tiers["host"].state is BreakerState.OPEN
    assert here.brain.tiers["host"].loading.facts()[0] is None, "nothing is learned from nonsense"
    here.leave(guest)
    assert here.bills[-1].miss_tokens == (("failed", 8),)
    here.close()


def test_giving_up_cancels_and_the_slots_wait_for_the_end() -> None:
    here = world(tier("host"), tier("disk"))
    fill_store(here, "host", "01")
    guest = ask(here, "guest", "012", answered=False)
    here.end(the(here, ev.Probe, store="host"))
    late = the(here, ev.Probe, store="disk")
    here.give_up(guest)
    assert late.guest is None
    here.end(late, ["held"] * 3)  # too late to count
    assert statuses(here, guest) == ["host", "host", "miss"]
    here.want(guest, 3)
    here.give_up(guest)
    here.give_up(guest)  # again: no harm
    here.refuse(ev.Filled(now_s=here.now_s, request="guest", keys=tuple(guest.keys)))
    here.fail(the(here, ev.Load), Reason.CANCELLED)
    here.fill(guest, 3)
    here.leave(guest)
    assert here.bills[-1].miss_tokens == (("too_late", 12),)
    here.close()


def test_a_load_that_comes_after_giving_up_still_counts() -> None:
    here = world(tier())
    fill_store(here, "host", "01")
    guest = ask(here, "guest", "01")
    here.want(guest, 2)
    here.give_up(guest)
    here.end(the(here, ev.Load))
    here.leave(guest)
    assert here.bills[-1].hit_tokens == (("host", 8),)
    here.close()


def test_job_numbers_never_come_twice() -> None:
    here = world(tier("host"), tier("disk"), num_slots=4)
    for at in range(30):
        live(here, "same name", f"{at % 7}{at % 5}")
    assert here.num_jobs > 60
    here.close()


# --- nonsense ---------------------------------------------------------------------------------------------------------


def test_nonsense_is_refused_and_changes_nothing() -> None:
    here = world(tier())
    guest = run(here, "runs", "01", more=1)
    fill_store(here, "host", "55")
    loading = ask(here, "loads", "55")
    here.want(loading, 2)
    ask(here, "waits", "7")
    keys = tuple(guest.keys)
    other = tuple(path_keys(tokens("99")))
    short = BlockKey(b"short")

    def arrived(**changes: object) -> ev.Arrived:
        fields = {"request": "waits", "keys": tuple(path_keys(tokens("7"))), "root": ROOTS[0], **changes}
        return ev.Arrived(now_s=0.0, **fields)  # type: ignore[arg-type]

    refused: dict[ev.Event, str] = {
        arrived(request="runs", keys=keys): "request 'runs' is here already, and is another or has reserved",
        arrived(keys=other): "request 'waits' is here already",
        arrived(keys=()): "request 'waits' is here already",
        arrived(root=ROOTS[1]): "request 'waits' is here already",
        arrived(tenant=bytes(range(16))): "request 'waits' is here already",
        arrived(request="new", keys=(*other, short)): "a block key has 32 bytes",
        arrived(request="new", root=short): "a block key has 32 bytes",
        arrived(request="new", tenant=b"me"): "a tenant is 16 bytes",
        ev.Wanted(now_s=0.0, request="nobody", num_blocks=1): "there is no request 'nobody'",
        ev.Wanted(now_s=0.0, request="waits", num_blocks=1, promised="disk"): "there is no store 'disk' to load from",
        ev.GaveUp(now_s=0.0, request="nobody"): "there is no request 'nobody': it has not asked, or has left",
        ev.Left(now_s=0.0, request="nobody"): "there is no request 'nobody'",
        ev.Filled(now_s=0.0, request="nobody", keys=()): "there is no request 'nobody'",
        ev.Filled(now_s=0.0, request="waits", keys=()): "request 'waits' has no slots yet",
        ev.Filled(now_s=0.0, request="loads", keys=()): "or some are still being loaded",
        ev.Filled(now_s=0.0, request="runs", keys=other): "request 'runs' filled block 3, and has 3 slots",
        ev.Filled(now_s=0.0, request="runs", keys=(short,)): "a block key has 32 bytes",
        ev.StoreOff(now_s=0.0, store="disk", why=""): "there is no tier 'disk'; there are: host",
        ev.StoreOn(now_s=0.0, store="device"): "there is no tier 'device'; there are: host",
        ev.Paced(now_s=0.0, base_s=-1.0, slope_s=0.0): "computing a block cannot cost -1.0 and 0.0 seconds",
        ev.Paced(now_s=0.0, base_s=0.0, slope_s=float("nan")): "cannot cost",
        ev.Paced(now_s=0.0, base_s=float("inf"), slope_s=0.0): "cannot cost",
    }
    for event, words in refused.items():
        assert words in here.refuse(event)
    fresh = ask(here, "fresh", "34")
    here.want(fresh, 2)
    finish(here, ev.Load, guest=fresh)
    for wrong in (other, tuple(fresh.keys[::-1]), tuple(fresh.keys[:1] + list(other[:1]))):
        assert "other keys than it commits" in here.refuse(ev.Filled(now_s=0.0, request="fresh", keys=wrong))
    here.check()
    here.close()


def test_without_tiers_the_list_of_tiers_is_empty() -> None:
    assert "there are: none" in world().refuse(ev.StoreOff(now_s=0.0, store="host", why=""))


def test_a_brain_hears_events_only() -> None:
    here = world(tier())
    probe = the(here, ev.Probe, guest=ask(here, "guest", "0", answered=False)).order
    for wrong in (probe, ev.Cancel(job=1), ev.Event(now_s=0.0), None):
        with pytest.raises(InvalidInput, match="a brain hears events, not"):
            here.brain.handle(wrong)  # type: ignore[arg-type]
    here.close()


# --- the same again ---------------------------------------------------------------------------------------------------


def test_an_incident_is_a_file_of_events() -> None:
    here = world(tier("host", save=SaveWhen.EVICTION), tier("disk"), num_slots=5, prefetch=True)
    for at, path in enumerate(("0123", "01", "4567", "0129", "89")):
        live(here, f"r{at}", path)
    record = "\n".join(here.recorded)
    again = Brain(here.config)
    out = []
    for line in record.splitlines():
        event = encoding.decode(json.loads(line))
        assert isinstance(event, ev.Event)
        out += again.handle(event)
    assert again.digest() == here.brain.digest()
    assert [one for one in out if isinstance(one, ev.Finished)] == here.bills
    again.handle(ev.Paced(now_s=0.0, base_s=1.0, slope_s=0.0))
    assert again.digest() != here.brain.digest()


def test_a_digest_sees_every_difference() -> None:
    """Each pair of histories ends in states that would behave differently."""

    def state(*steps: str) -> str:
        here = world(tier("host", breaker_failures=2), num_slots=6)
        fill_store(here, "host", "01")
        guest = ask(here, "g", "012", answered=False)
        for step in steps:
            probe = jobs(here, ev.Probe)
            if step == "probe":
                here.end(probe[0])
            elif step == "fail":
                here.fail(probe[0])
            elif step == "want":
                here.want(guest, 3)
            elif step == "load":
                here.end(the(here, ev.Load))
            elif step == "give up":
                here.give_up(guest)
            elif step == "leave":
                here.leave(guest)
            elif step == "off":
                here.tell(ev.StoreOff(now_s=here.now_s, store="host", why=""))
        return here.brain.digest()

    histories = [
        (), ("probe",), ("fail",), ("give up",), ("want",), ("probe", "want"), ("probe", "want", "load"), ("off",),
        ("leave",), ("leave", "probe"), ("probe", "want", "leave"), ("probe", "want", "load", "leave"),
        ("want", "leave"),
    ]  # fmt: skip
    digests = [state(*history) for history in histories]
    assert len(set(digests)) == len(digests)


def test_a_digest_sees_which_slot_is_next() -> None:
    def state(*order: str) -> str:
        here = world()
        for name in "ab":
            here.want(ask(here, name, ""), 1)
        for name in order:
            here.leave(here.guests[name])
        return here.brain.digest()

    assert state("a", "b") != state("b", "a")


def test_tells_are_for_people() -> None:
    here = world(tier())
    out = here.tell(ev.StoreOff(now_s=0.0, store="host", why="too many bad pages"))
    assert told(out, "tier_switched_off") == [{"tier": "host", "why": "too many bad pages"}]
    assert told(here.tell(ev.StoreOn(now_s=0.0, store="host")), "tier_switched_on") == [{"tier": "host"}]


# --- what `validate` is for -------------------------------------------------------------------------------------------


def contradiction(complaint: str) -> Callable[[Callable[[World], None]], Callable[[World], None]]:
    def remember(change: Callable[[World], None]) -> Callable[[World], None]:
        CONTRADICTIONS.append((change, complaint))
        return change

    return remember


CONTRADICTIONS: list[tuple[Callable[[World], None], str]] = []


@contradiction("a request under another's name")
def renamed(here: World) -> None:
    here.brain.requests["runs"].request = "walks"


@contradiction("a hold on other blocks")
def other_keys(here: World) -> None:
    here.brain.requests["runs"].keys[0] = path_keys(tokens("9"))[0]


@contradiction("a hold without its slots")
def longer_hold(here: World) -> None:
    here.brain.requests["runs"].hold.num_blocks += 1


@contradiction("slots before they were reserved")
def early_slots(here: World) -> None:
    here.brain.requests["waits"].own.append(7)


@contradiction("one slot for two blocks")
def slot_twice(here: World) -> None:
    own = here.brain.requests["runs"].own
    own[2] = own[1]


@contradiction("slots that are nobody's, or two requests'")
def lost_slot(here: World) -> None:
    here.brain.requests["runs"].own.pop()


@contradiction("a request that waits for nothing")
def never_ready(here: World) -> None:
    here.brain.requests["runs"].ready_s = None


@contradiction("a lost load")
def lost_load(here: World) -> None:
    here.brain.requests["loads"].loads.clear()
    here.brain.requests["loads"].ready_s = 0.0


@contradiction("slots that nobody will free")
def locked_slot(here: World) -> None:
    here.brain.slots.quarantine([here.brain.requests["runs"].own.pop()])


@contradiction("a block that nobody is about to have")
def nobody_has(here: World) -> None:
    here.brain.pending[path_keys(tokens("9"))[0]] = "runs"


@contradiction("a job of nobody")
def job_of_nobody(here: World) -> None:
    del here.brain.requests["waits"]


@contradiction("loads do not add up")
def wrong_loads(here: World) -> None:
    here.brain.tiers["host"].queued_load_bytes += 1


@contradiction("saves do not add up")
def wrong_saves(here: World) -> None:
    here.brain.tiers["host"].queued_save_bytes += 1


@pytest.mark.parametrize(("change", "complaint"), CONTRADICTIONS)
def test_validate_sees_what_contradicts_itself(change: Callable[[World], None], complaint: str) -> None:
    here = world(tier(), num_slots=10)
    run(here, "runs", "01", more=1)
    fill_store(here, "host", "55")
    here.want(ask(here, "loads", "55"), 2)
    ask(here, "waits", "7", answered=False)
    here.check()
    change(here)
    with pytest.raises(AssertionError, match=complaint):
        here.brain.validate()
