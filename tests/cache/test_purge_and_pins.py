"""Purges and pins as the brain does them: one case each. The machine of `test_brain.py` does them in any order."""

import pytest

from brain_kit import ask, finish, jobs, live, run, statuses, the, tier, tokens, world
from headwater.cache.lent import LentBrain
from headwater.config.cache import CacheConfig
from headwater.core import events as ev
from headwater.core.errors import InvalidConfig, InvalidInput
from headwater.core.keys import BlockKey
from headwater.index.slots import SlotState
from machines.brain_world import ROOTS, World
from machines.index_machine import path_keys


def keys_of(path: str, tenant: int = 0) -> list[BlockKey]:
    return path_keys(tokens(path), ROOTS[tenant])


def leaving(here: World) -> int:
    return here.brain.slots.counts()[SlotState.LEAVING]


def test_what_nobody_holds_goes_at_once_and_the_rest_with_its_holder() -> None:
    here = world(num_slots=12)
    live(here, "a", "1234")
    live(here, "b", "1299")
    holder = run(here, "c", "1234", more=1)
    said = here.begin_purge(keys_of("123"), 0)
    assert (len(said.keys), said.num_held, leaving(here)) == (2, 2, 2)
    here.end_purge()
    here.check()
    assert statuses(here, ask(here, "d", "1234")) == ["device", "device", "miss", "miss"]
    assert statuses(here, ask(here, "e", "1299")) == ["device"] * 4
    here.fill(holder, 1, [7])
    assert leaving(here) == 3, "what it goes on to compute is nobody else's"
    here.leave(holder)
    here.check()
    assert leaving(here) == 0


def test_who_only_waits_starts_anew() -> None:
    here = world(tier(), num_slots=12)
    live(here, "a", "1234")
    waiting = ask(here, "b", "1234")
    here.begin_purge(keys_of("12"), 0)
    assert ask(here, "b", "1234") is waiting
    assert statuses(here, waiting) == ["device", "miss", "miss", "miss"]
    here.end_purge()
    assert here.want(waiting, 4) is not None
    assert waiting.base == 1
    here.check()


def test_nothing_of_it_is_read_or_written_while_it_is_open() -> None:
    here = world(tier(), num_slots=12)
    live(here, "a", "1234")
    here.begin_purge(keys_of("1"), 0)
    newcomer = run(here, "b", "1234")
    assert newcomer.base == 0
    assert not jobs(here, ev.Load)
    assert not jobs(here, ev.Save)
    here.end_purge()
    here.leave(newcomer)
    assert statuses(here, ask(here, "c", "1234")) == ["miss"] * 4
    here.check()


def test_a_save_from_before_ends_and_a_demotion_of_it_is_not_begun_anew() -> None:
    here = world(tier("host"), tier("disk"), num_slots=12)
    guest = run(here, "a", "12")
    save, demote = the(here, ev.Save), the(here, ev.Demote)
    here.begin_purge(keys_of("1"), 0)
    here.end(save)
    here.stores["host"].clear()
    here.end(demote, ["miss", "miss"])
    assert not jobs(here), "it is not brought from the device instead"
    here.end_purge()
    here.leave(guest)
    here.check()
    assert not here.stores["disk"]


def test_a_tenant_goes_and_the_other_stays() -> None:
    here = world(num_slots=12)
    live(here, "a", "12")
    live(here, "b", "12", tenant=1)
    said = here.begin_purge([], 1)
    assert len(said.keys) == 2
    here.end_purge()
    assert statuses(here, ask(here, "c", "12")) == ["device"] * 2
    assert statuses(here, ask(here, "d", "12", tenant=1)) == ["miss"] * 2
    here.check()


def test_a_pin_stays_under_pressure_until_it_is_unpinned() -> None:
    here = world(num_slots=8, pin_share=0.5)
    live(here, "a", "1234")
    here.pin("system", keys_of("12"), 0, None)
    for number, path in enumerate(("555555", "666666", "777777")):
        live(here, f"x{number}", path)
        here.check()
    assert statuses(here, ask(here, "b", "1234")) == ["device", "device", "miss", "miss"]
    here.leave(here.guests["b"])
    here.unpin("system")
    live(here, "y", "88888888")
    assert statuses(here, ask(here, "c", "12")) == ["miss"] * 2
    here.check()


def test_over_the_budget_it_says_how_much_there_is() -> None:
    here = world(num_slots=8, pin_share=0.25)
    live(here, "a", "123456")
    here.pin("one", keys_of("12"), 0, None)
    event = ev.Pinned(now_s=here.now_s, name="two", keys=tuple(keys_of("123")))
    said = here.refuse(event)
    assert "these are 3 blocks, pins keep 2, and may keep 2 of 8" in said
    here.pin("two", keys_of("12"), 0, None)  # the same blocks count once
    assert list(here.pins) == ["one", "two"]
    assert "on the device" in here.refuse(ev.Pinned(now_s=here.now_s, name="x", keys=tuple(keys_of("9"))))
    assert "no pin 'x'" in here.refuse(ev.Unpinned(now_s=here.now_s, name="x"))


def test_a_pin_ends_with_its_time_and_with_a_purge() -> None:
    here = world(num_slots=8, pin_share=0.5)
    live(here, "a", "1234")
    here.pin("short", keys_of("12"), 0, 5.0)
    here.pin("long", keys_of("1"), 0, None)
    here.wait(5.0)
    live(here, "b", "9")
    assert list(here.pins) == ["long"]
    here.begin_purge(keys_of("1"), 0)
    here.end_purge()
    assert not here.pins
    here.check()


def test_a_pin_gives_way_to_a_request_that_would_wait_for_ever() -> None:
    here = world(num_slots=8, pin_share=0.5)
    live(here, "a", "1234")
    here.pin("old", keys_of("12"), 0, None)
    here.pin("new", keys_of("1234"), 0, None)
    assert here.want(ask(here, "b", "555555"), 6) is not None
    assert list(here.pins) == ["old"], "the newest, and no more than needed"
    here.check()


def test_where_the_engine_evicts_nothing_can_be_pinned() -> None:
    brain = LentBrain(CacheConfig(num_slots=8, block_tokens=4, block_bytes=10))
    with pytest.raises(InvalidInput, match="evicts by itself"):
        brain.handle(ev.Pinned(now_s=0.0, name="x", keys=tuple(keys_of("1"))))
    out = brain.handle(ev.PurgeBegan(now_s=0.0, keys=tuple(keys_of("1"))))
    assert out == [ev.Purged(keys=(), num_held=0)]
    brain.handle(ev.PurgeEnded(now_s=0.0))
    with pytest.raises(InvalidConfig, match="pin_share"):
        CacheConfig(num_slots=8, block_tokens=4, block_bytes=10, pin_share=1.0)


def test_no_other_purge_and_no_nonsense_meanwhile() -> None:
    here = world()
    here.begin_purge(keys_of("1"), 0)
    assert "one at a time" in here.refuse(ev.PurgeBegan(now_s=0.0))
    here.end_purge()
    assert "16 bytes" in here.refuse(ev.PurgeBegan(now_s=0.0, tenant=b"x"))
    assert "no purge" in here.refuse(ev.PurgeEnded(now_s=0.0))
    finish(here)


def test_who_was_barred_is_barred_from_further_up_by_the_next_purge() -> None:
    here = world(tier(), num_slots=12)
    live(here, "a", "1234")
    holder = run(here, "b", "1234", more=1)
    here.begin_purge(keys_of("1234"), 0)
    here.end_purge()
    here.begin_purge(keys_of("12"), 0)
    assert holder.barred == 1
    here.fill(holder, 1, [7])
    assert not jobs(here, ev.Save), "what was saved before is not written again"
    here.end_purge()
    here.leave(holder)
    here.check()
    assert statuses(here, ask(here, "c", "1234")) == ["device", "miss", "miss", "miss"]


def test_to_commit_nothing_behind_what_was_purged_is_nothing() -> None:
    here = world(num_slots=12)
    holder = run(here, "a", "12", more=1)
    here.begin_purge(keys_of("1"), 0)
    here.fill(holder, 0)
    here.check()
    here.end_purge()
    here.leave(holder)
    here.check()
