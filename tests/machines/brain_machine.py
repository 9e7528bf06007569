"""A hypothesis machine over the brain: requests, jobs and stores do anything, at any time, in any order.

The moves choose what happens; `brain_world.py` knows what must be true, checks every instruction as it is said and
everything after every step. With one store or several, or none, under all rules of when a block is saved; with little
room, short queues and nervous breakers, so that nothing is refused only in theory.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from headwater.config.cache import CacheConfig, SaveWhen, TierConfig
from headwater.core import events as ev
from headwater.core.breaker import BreakerState
from headwater.core.results import JOB_FAILURES, Reason, Status
from machines.brain_world import ROOTS, Errand, World, WorldRequest, into
from machines.index_machine import path_keys

BLOCK_BYTES: Final = 10
NAMES: Final = ("a", "b", "#c", "=d")  # two that a careless encoding would change
RESULTS: Final[dict[type[ev.Job], tuple[str, ...]]] = {
    ev.Probe: (Status.HELD, Status.ABSENT),
    ev.Load: (
        Status.HIT,
        Status.HIT,
        Status.HIT,
        Status.MISS,
        Status.LATE,
        Status.FAILED,
        Status.CORRUPT,
        Status.STALE,
    ),
    ev.Save: (
        Status.STORED,
        Status.EXISTS,
        Status.NO_PARENT,
        Status.NO_ROOM,
        Status.LATE,
        Status.FAILED,
        Status.REFUSED,
    ),
    ev.Demote: (
        Status.STORED,
        Status.EXISTS,
        Status.MISS,
        Status.MISS,
        Status.NO_PARENT,
        Status.NO_ROOM,
        Status.LATE,
        Status.FAILED,
        Status.REFUSED,
    ),
    ev.Promote: (Status.STORED, Status.EXISTS, Status.NO_PARENT, Status.NO_ROOM, Status.LATE, Status.FAILED),
}

PATHS: Final = ("0000", "000000", "000100", "00100", "00", "010", "1000", "101", "1", "")  # they share, and part
MOVES: Final = (
    *("ask", "ask", "ask", "live", "live", "live", "live_long", "live_long", "reserve", "reserve", "reserve"),
    *("commit", "commit", "leave", "leave", "give_up", "squeeze", "squeeze"),
    *("go_well", "go_well", "go_well", "go_well", "go_strangely", "go_strangely", "go_wrong", "go_on", "falter"),
    *("choose_policy", "pin", "pin", "unpin", "purge", "purge"),
    *("store_changes", "store_changes", "switch", "measure", "wait", "talk_nonsense"),
)
moves = st.lists(
    st.tuples(st.sampled_from(MOVES), st.integers(0, 7), st.sampled_from(PATHS), st.integers(0, 255)),
    min_size=4,
    max_size=10,
)

tiers = st.builds(
    TierConfig,
    name=st.just("tier"),
    save=st.sampled_from(SaveWhen),
    save_after_hits=st.integers(1, 2),
    max_queued_bytes=st.sampled_from((BLOCK_BYTES, 4 * BLOCK_BYTES, 1 << 30)),
    max_queued_s=st.sampled_from((0.5, 10.0)),
    breaker_failures=st.sampled_from((1, 3, 3)),
)


@st.composite
def configs(draw: st.DrawFn) -> CacheConfig:
    """Small caches of all sorts."""
    num_tiers = draw(st.sampled_from((2, 1, 3, 0)))
    return CacheConfig(
        num_slots=draw(st.sampled_from((8, 5, 6, 3, 10, 14, 1))),
        block_tokens=4,
        block_bytes=BLOCK_BYTES,
        tiers=tuple(replace(draw(tiers), name=name) for name in ("host", "disk", "pool")[:num_tiers]),
        policy=draw(st.sampled_from(("lru", "lru-2", "value", "session"))),
        prefetch=draw(st.sampled_from((True, True, True, False))),
        pin_share=draw(st.sampled_from((0.5, 0.1, 0.9))),
        ghosts=draw(st.sampled_from((None, 0, 2))),
        compute_base_s=draw(st.sampled_from((0.0, 0.0, 1.0))),
        compute_slope_s=draw(st.sampled_from((0.0, 0.5))),
    )


class BrainMachine(RuleBasedStateMachine):
    """Everything that may happen to a brain."""

    @initialize(config=configs(), paths=st.lists(st.sampled_from(PATHS), max_size=6), room=st.sampled_from((3, 99, 1)))
    def begin(self, config: CacheConfig, paths: list[str], room: int) -> None:
        """An empty cache, over stores that others have filled; the fastest may be a small one."""
        self.world = World(config)
        if config.tiers:
            self.world.room[config.tiers[0].name] = room
            for which, path in enumerate(paths):
                self.fill_store(self.store(which), path, tenant=0, share=2)

    @rule(moves=moves)
    def bustle(self, moves: list[tuple[str, int, str, int]]) -> None:
        """Several moves, each by somebody, on some path; the dice decide the rest. Everything is checked in between.

        One rule of many moves, and not a rule for each: hypothesis would leave out half of the rules in every example,
        and the states worth seeing need most of them.
        """
        for name, which, path, number in moves:
            getattr(self, name)(which, path, random.Random(number))
            self.world.check()

    # --- requests -----------------------------------------------------------------------------------------------------

    def ask(self, which: int, path: str, dice: random.Random) -> None:
        """A request comes, or asks again, or is refused because it runs. Some stores answer at once."""
        name = NAMES[which % len(NAMES)]
        guest = self.world.guests.get(name)
        if guest is not None and guest.table is not None:
            self.world.refuse(self.world.arrival(guest))
            return
        guest = self.world.arrive(name, as_tokens(path), tenant=dice.choice((0, 0, 0, 1)))
        stores = list(self.world.stores)[: dice.choice((3, 3, 1, 0))]
        self.finish(lambda job: job.guest is guest and isinstance(job.order, ev.Probe) and job.order.store in stores)

    def live(self, which: int, path: str, dice: random.Random) -> None:
        """A request goes on, from wherever it is, to a later stage of its life. Between two stages, others come in."""
        self.live_until(dice.randint(1, 7), which, path, dice)

    def live_long(self, which: int, path: str, dice: random.Random) -> None:
        """The same, most of it: there is little to find where little is known."""
        self.live_until(dice.randint(5, 7), which, path, dice)

    def live_until(self, until: int, which: int, path: str, dice: random.Random) -> None:
        """Ask, have answers, reserve, load, compute, save, leave: so many of them."""
        world, name, more = self.world, NAMES[which % len(NAMES)], dice.choice((0, 0, 1, 2))

        def stage(number: int) -> WorldRequest | None:
            world.check()
            if dice.random() < 0.3:
                self.meanwhile(dice)
            return world.guests.get(name) if number <= until else None

        if name not in world.guests:
            world.arrive(name, as_tokens(path), tenant=dice.choice((0, 0, 0, 1)))
        if guest := stage(2):
            self.finish(lambda errand: errand.guest is guest and isinstance(errand.order, ev.Probe))
        if (guest := stage(3)) and guest.table is None:
            world.want(guest, len(guest.keys) + more, meet=dice.random() < 0.7)
        if guest := stage(4):
            self.finish(lambda errand: errand.guest is guest and isinstance(errand.order, ev.Load))
        if (guest := stage(5)) and guest.ready:
            world.fill(guest, len(guest.table or ()), (1,) * more)
        if stage(6):
            self.finish(lambda errand: isinstance(errand.order, ev.Save))
            if dice.random() < 0.7:
                self.finish(lambda errand: isinstance(errand.order, ev.Demote))
        if guest := stage(7):
            world.leave(guest)

    def meanwhile(self, dice: random.Random) -> None:
        """Something else happens."""
        others = (self.ask_again, self.reserve, self.leave, self.go_strangely, self.go_wrong, self.go_on)
        dice.choice((*others, self.purge, self.switch, self.store_changes, self.wait))(dice.randint(0, 7), "", dice)

    def ask_again(self, which: int, path: str, dice: random.Random) -> None:
        """Everybody who waits asks again."""
        for guest in [guest for guest in self.world.guests.values() if guest.table is None]:
            self.world.check()
            self.world.arrive(guest.name, ())

    def reserve(self, which: int, path: str, dice: random.Random) -> None:
        """A request wants slots: for its prompt, for less or for more; or all there are, or more than that."""
        if guest := self.guest(which):
            num_slots = self.world.config.num_slots
            most = num_slots + (dice.random() < 0.1)
            num_blocks = max(0, min(len(guest.keys) + dice.choice((-2, -1, 0, 0, 0, 1, 2, 3, 99)), most))
            promised = dice.choice(list(self.world.stores)) if self.world.stores and dice.random() < 0.15 else ""
            self.world.want(guest, num_blocks, load=dice.random() < 0.8, promised=promised, meet=dice.random() < 0.7)

    def squeeze(self, which: int, path: str, dice: random.Random) -> None:
        """A request wants all slots there are; all who wait ask again; it may leave, and they ask once more."""
        if guest := self.guest(which):
            self.world.want(guest, self.world.config.num_slots)
            self.ask_again(which, path, dice)
            if dice.random() < 0.7:
                self.world.leave(guest)
                self.ask_again(which, path, dice)

    def commit(self, which: int, path: str, dice: random.Random) -> None:
        """A request computed some of its blocks, of the prompt or generated; or is about to."""
        if guest := self.guest(which, lambda guest: guest.ready):
            self.world.scribble(guest)
            self.world.fill(guest, dice.randint(0, 6), as_tokens(path))

    def give_up(self, which: int, path: str, dice: random.Random) -> None:
        """A request waits no longer."""
        if guest := self.guest(which):
            self.world.give_up(guest)

    def leave(self, which: int, path: str, dice: random.Random) -> None:
        """A request ends."""
        if guest := self.guest(which):
            self.world.leave(guest)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def go_well(self, which: int, path: str, dice: random.Random) -> None:
        """A job does what it can with what its store has."""
        if errand := self.errand(which):
            self.world.end(errand, seconds=dice.choice((0.0, 0.1, 1.0, 3.0)))

    def go_strangely(self, which: int, path: str, dice: random.Random) -> None:
        """A job ends with anything: holes, lies, too many or too few results."""
        if errand := self.errand(which):
            words, num = RESULTS[type(errand.order)], len(errand.order.keys)
            noise = [dice.choice(words) for _ in range(dice.randint(0, 6))]
            fits = dice.random() < 0.8
            self.world.end(errand, [*noise, *([words[0]] * num)][:num] if fits else noise)

    def go_wrong(self, which: int, path: str, dice: random.Random) -> None:
        """A job ends without a result."""
        if errand := self.errand(which):
            self.world.fail(errand, dice.choice(sorted(JOB_FAILURES)))

    def go_on(self, which: int, path: str, dice: random.Random) -> None:
        """A load writes, long before it ends, and may be stuck; another job has read its blocks, or says so."""
        if errand := self.errand(which):
            if isinstance(errand.order, ev.Load):
                self.world.write(errand)
                if dice.random() < 0.5:
                    self.world.tell(ev.Stuck(now_s=self.world.now_s, job=errand.order.job))
            else:
                self.world.copied(errand)

    def falter(self, which: int, path: str, dice: random.Random) -> None:
        """A store fails several jobs in a row, and a while passes."""
        if self.world.stores:
            store, failure = self.store(which), dice.choice((Reason.FAILED, Reason.LATE))
            errands = [errand for errand in self.world.errands.values() if into(errand.order) == store]
            for errand in errands[-dice.randint(1, 3) :]:
                self.world.check()
                self.world.fail(errand, failure)
            self.world.wait(1.5)

    # --- stores and time ----------------------------------------------------------------------------------------------

    def store_changes(self, which: int, path: str, dice: random.Random) -> None:
        """A store drops a block and what builds on it; or another node fills it, and the first one in part."""
        if self.world.stores:
            store = self.store(which)
            there = sorted(self.world.stores[store])
            if there and dice.random() < 0.5:
                self.world.evict(store, dice.choice(there))
            else:
                self.fill_store(store, path, tenant=dice.choice((0, 0, 0, 1)), share=dice.randint(0, 4))

    def fill_store(self, store: str, path: str, *, tenant: int, share: int) -> None:
        """Another node stores a sequence, and its beginning in the fastest store."""
        keys = path_keys(as_tokens(path), ROOTS[tenant])
        self.world.register(keys, tenant)
        self.world.gone.difference_update(keys)
        self.world.put(store, keys)
        self.world.put(self.store(0), keys[:share])

    def switch(self, which: int, path: str, dice: random.Random) -> None:
        """A store is switched off, or on again."""
        if self.world.stores:
            now_s, store = self.world.now_s, self.store(which)
            off = self.world.brain.tiers[store].state is BreakerState.OFF
            change = ev.StoreOn(now_s=now_s, store=store) if off else ev.StoreOff(now_s=now_s, store=store, why="#")
            self.world.tell(change)

    def wait(self, which: int, path: str, dice: random.Random) -> None:
        """Time passes; somebody has put right what was switched off."""
        self.world.wait(dice.choice((0.5, 1.0, 1.0, 70.0)))
        for store, tier in self.world.brain.tiers.items():
            if tier.state is BreakerState.OFF:
                self.world.tell(ev.StoreOn(now_s=self.world.now_s, store=store))

    def measure(self, which: int, path: str, dice: random.Random) -> None:
        """Computing was measured."""
        cost = {"base_s": dice.choice((0.0, 0.1, 3.0)), "slope_s": dice.choice((0.0, 0.5))}
        self.world.tell(ev.Paced(now_s=self.world.now_s, **cost))

    def pin(self, which: int, path: str, dice: random.Random) -> None:
        """Somebody wants a prefix to stay."""
        tenant = dice.choice((0, 0, 0, 1))
        keys = path_keys(as_tokens(path), ROOTS[tenant])
        self.world.register(keys, tenant)
        self.world.pin(NAMES[which % len(NAMES)], keys, tenant, dice.choice((None, None, 1.0)))

    def choose_policy(self, which: int, path: str, dice: random.Random) -> None:
        """Blocks leave in another order from now on."""
        policy = dice.choice(("lru", "lru-2", "value"))
        assert self.world.tell(ev.PolicyChosen(now_s=self.world.now_s, policy=policy)) == []
        self.world.refuse(ev.PolicyChosen(now_s=self.world.now_s, policy="nobody's"))

    def unpin(self, which: int, path: str, dice: random.Random) -> None:
        """It may go again."""
        self.world.unpin(NAMES[which % len(NAMES)])

    def purge(self, which: int, path: str, dice: random.Random) -> None:
        """Somebody wants a path gone, or a tenant; or that is done, or others come in between."""
        world, tenant = self.world, dice.choice((0, 0, 0, 1))
        if world.purge is None:
            keys = path_keys(as_tokens(path), ROOTS[tenant])[: dice.randint(1, 4)]
            world.register(keys, tenant)
            world.begin_purge(keys, tenant)
        else:
            world.refuse(ev.PurgeBegan(now_s=world.now_s))
        world.check()
        if dice.random() < 0.4:
            self.meanwhile(dice)
        if world.purge is not None and dice.random() < 0.7:
            world.end_purge()
            world.refuse(ev.PurgeEnded(now_s=world.now_s))

    # --- nonsense -----------------------------------------------------------------------------------------------------

    def talk_nonsense(self, which: int, path: str, dice: random.Random) -> None:
        """What makes no sense is refused, what comes too late is ignored; neither changes anything."""
        world, now_s, job = self.world, self.world.now_s, dice.randint(-1, self.world.num_jobs + 1)
        world.refuse(ev.Wanted(now_s=now_s, request="nobody", num_blocks=1))
        world.refuse(ev.StoreOff(now_s=now_s, store="nowhere", why=""))
        world.refuse(ev.Paced(now_s=now_s, base_s=-1.0, slope_s=0.0))
        world.refuse(ev.Claimed(now_s=now_s, request="nobody", num_blocks=1))
        if job not in world.errands:
            world.ignore(ev.Copied(now_s=now_s, job=job))
            world.ignore(ev.Stuck(now_s=now_s, job=job))
            world.ignore(
                ev.JobDone(now_s=now_s, job=job, results=(Status.HIT, Status.STORED), num_bytes=20, seconds=1.0)
            )
            world.ignore(ev.JobFailed(now_s=now_s, job=job, failure=Reason.LATE))
        if guest := self.guest(which):
            keys = tuple(path_keys([7, *as_tokens(path)]))
            world.refuse(ev.Arrived(now_s=now_s, request=guest.name, keys=keys, root=ROOTS[0]))
            if guest.ready and guest.num_done >= guest.num_prompt:
                keys = tuple(path_keys([8] * (len(guest.table or ()) - guest.num_done + 1)))
            world.refuse(ev.Filled(now_s=now_s, request=guest.name, keys=keys))
            if not guest.ready:
                world.refuse(ev.Claimed(now_s=now_s, request=guest.name, num_blocks=1))

    # --- helpers ------------------------------------------------------------------------------------------------------

    def guest(self, which: int, wanted: Callable[[WorldRequest], bool] = lambda guest: True) -> WorldRequest | None:
        """One of the requests."""
        guests = [guest for guest in self.world.guests.values() if wanted(guest)]
        return guests[which % len(guests)] if guests else None

    def finish(self, wanted: Callable[[Errand], bool]) -> None:
        """Some jobs end well."""
        for errand in [errand for errand in self.world.errands.values() if wanted(errand)]:
            self.world.check()
            self.world.end(errand)

    def errand(self, which: int) -> Errand | None:
        """One of the jobs, oldest first."""
        errands = list(self.world.errands.values())
        return errands[which % len(errands)] if errands else None

    def store(self, which: int) -> str:
        """One of the stores."""
        return list(self.world.stores)[which % len(self.world.stores)]

    def teardown(self) -> None:
        """Everybody leaves, every job ends, and nothing is left behind."""
        if hasattr(self, "world"):
            self.world.close()


def as_tokens(path: str) -> list[int]:
    """A sequence of blocks, each a digit."""
    return [int(token) for token in path]
