"""A hypothesis machine over the brain: requests, jobs and stores do anything, at any time, in any order.

The rules choose what happens; `brain_world.py` knows what must be true, checks every instruction as it is said and
everything after every step. With one store or several, or none, under all rules of when a block is saved; with little
room, short queues and nervous breakers, so that nothing is refused only in theory.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headwater.cache.breaker import BreakerState
from headwater.config import CacheConfig, SaveWhen, TierConfig
from headwater.core import events as ev
from headwater.testing.brain_world import ROOTS, Errand, Guest, World
from headwater.testing.index_machine import path_keys

BLOCK_BYTES: Final = 10
NAMES: Final = ("a", "b", "#c", "=d")  # two that a careless encoding would change
RESULTS: Final[dict[type[ev.Job], tuple[str, ...]]] = {
    ev.Look: ("held", "absent"),
    ev.Load: ("hit", "hit", "hit", "miss", "late", "failed", "corrupt", "stale"),
    ev.Save: ("stored", "exists", "no_parent", "no_room", "late", "failed", "refused"),
    ev.Promote: ("stored", "exists", "no_parent", "no_room", "late", "failed"),
}

WHICH = st.integers(0, 7)
NAME = st.integers(0, len(NAMES) - 1)
PATHS: Final = ("0000", "000000", "000100", "00100", "00", "010", "1000", "101", "1", "")  # they share, and part
PATH = st.sampled_from([tuple(map(int, path)) for path in PATHS])
TENANT = st.sampled_from((0, 0, 0, 1))
OTHERS = st.lists(st.tuples(st.integers(0, 8), WHICH), max_size=6)  # what happens meanwhile, and to whom
SECONDS = st.sampled_from((0.0, 0.1, 1.0, 3.0))

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
        policy=draw(st.sampled_from(("lru", "lru-2", "value"))),
        prefetch=draw(st.sampled_from((True, True, True, False))),
        ghosts=draw(st.sampled_from((None, 0, 2))),
        compute_base_s=draw(st.sampled_from((0.0, 0.0, 1.0))),
        compute_slope_s=draw(st.sampled_from((0.0, 0.5))),
    )


class BrainMachine(RuleBasedStateMachine):
    """Everything that may happen to a brain."""

    @initialize(config=configs(), paths=st.lists(PATH, max_size=6), room=st.sampled_from((3, 99, 1)))
    def begin(self, config: CacheConfig, paths: list[tuple[int, ...]], room: int) -> None:
        """An empty cache, over stores that others have filled; the fastest may be a small one."""
        self.world = World(config)
        if config.tiers:
            self.world.room[config.tiers[0].name] = room
        for which, tokens in enumerate(paths):
            if config.tiers:
                self.store_changes(which, tokens, tenant=0, what=None, share=2)

    # --- requests -----------------------------------------------------------------------------------------------------

    @rule(which=NAME, tokens=PATH, tenant=TENANT, answered=st.sampled_from((3, 1, 0)))
    def ask(self, which: int, tokens: tuple[int, ...], tenant: int, answered: int) -> None:
        """A request comes, or asks again, or is refused because it runs. Some stores answer at once."""
        guest = self.world.guests.get(NAMES[which])
        if guest is not None and guest.table is not None:
            self.world.refuse(self.world.arrival(guest))
            return
        guest = self.world.arrive(NAMES[which], tokens, tenant=tenant)
        stores = list(self.world.stores)[:answered]
        self.finish(lambda job: job.guest is guest and isinstance(job.order, ev.Look) and job.order.store in stores)

    @precondition(lambda self: self.world.guests)
    @rule(which=WHICH, stay=st.booleans())
    def squeeze(self, which: int, stay: bool) -> None:
        """A request wants all slots there are; all who wait ask again; it may leave, and they ask once more."""
        guest = self.guest(which)
        self.world.want(guest, self.world.config.num_slots)
        self.ask_again()
        if not stay:
            self.world.leave(guest)
            self.ask_again()

    def ask_again(self) -> None:
        """Everybody who waits asks again."""
        for guest in [guest for guest in self.world.guests.values() if guest.table is None]:
            self.world.check()
            self.world.arrive(guest.name, ())

    @rule(which=NAME, tokens=PATH, tenant=TENANT, until=st.integers(1, 7), more=st.integers(0, 2), others=OTHERS)
    def live(
        self, which: int, tokens: tuple[int, ...], tenant: int, until: int, more: int, others: list[tuple[int, int]]
    ) -> None:
        """A request goes on, from wherever it is, to a later stage of its life. Between two stages, others come in."""
        world, name, waiting = self.world, NAMES[which], iter(others)

        def stage(number: int) -> Guest | None:
            world.check()
            self.meanwhile(*next(waiting, (-1, 0)))
            return world.guests.get(name) if number <= until else None

        if name not in world.guests:
            world.arrive(name, tokens, tenant=tenant)
        if guest := stage(2):
            self.finish(lambda errand: errand.guest is guest and isinstance(errand.order, ev.Look))
        if (guest := stage(3)) and guest.table is None:
            world.want(guest, len(guest.keys) + more)
        if guest := stage(4):
            self.finish(lambda errand: errand.guest is guest and isinstance(errand.order, ev.Load))
        if (guest := stage(5)) and guest.ready:
            world.fill(guest, len(guest.table or ()), (1,) * more)
        if stage(6):
            self.finish(lambda errand: isinstance(errand.order, ev.Save))
        if guest := stage(7):
            world.leave(guest)

    @rule(which=NAME, tokens=PATH, until=st.integers(5, 7), others=OTHERS)
    def live_long(self, which: int, tokens: tuple[int, ...], until: int, others: list[tuple[int, int]]) -> None:
        """The same, most of it: there is little to find where little is known."""
        self.live(which, tokens, tenant=0, until=until, more=0, others=others)

    def meanwhile(self, what: int, which: int) -> None:
        """Something else happens, if it can."""
        world = self.world
        if what in (0, 1, 2) and world.guests:
            guest = self.guest(which)
            if what == 0 and guest.table is None:
                world.arrive(guest.name, ())
            elif what == 1:
                world.want(guest, world.config.num_slots)
            elif what == 2:
                world.leave(guest)
        elif what in (3, 4, 5) and world.errands:
            errand = self.errand(which)
            if what == 3:
                self.end_strangely(errand, [which, which + 1])
            elif what == 4:
                world.fail(errand, list(ev.Failure)[which % 3])
            else:
                world.copied(errand)
        elif what == 6 and world.stores:
            self.switch(which)
        elif what == 7 and world.stores:
            self.store_changes(which, (), tenant=0, what=0, share=0)
        elif what == 8:
            world.wait(1.0)

    @precondition(lambda self: self.world.guests)
    @rule(which=WHICH, more=st.integers(-2, 3) | st.just(99), load=st.sampled_from((True, True, True, False)))
    def reserve(self, which: int, more: int, load: bool) -> None:
        """A request wants slots: for its prompt, for less or for more; or all there are, or more than that."""
        guest = self.guest(which)
        num_slots = self.world.config.num_slots
        self.world.want(guest, max(0, min(len(guest.keys) + more, num_slots + which // 7)), load=load)

    @precondition(lambda self: any(guest.ready for guest in self.world.guests.values()))
    @rule(which=WHICH, num=st.integers(0, 6), tokens=PATH)
    def commit(self, which: int, num: int, tokens: tuple[int, ...]) -> None:
        """A request computed some of its blocks, of the prompt or generated."""
        self.world.fill(self.guest(which, lambda guest: guest.ready), num, tokens)

    @precondition(lambda self: self.world.guests)
    @rule(which=WHICH, gently=st.sampled_from((True, False, False, False)))
    def leave(self, which: int, gently: bool) -> None:
        """A request ends; or only waits no longer."""
        if gently:
            self.world.give_up(self.guest(which))
        else:
            self.world.leave(self.guest(which))

    # --- jobs ---------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.errands)
    @rule(which=WHICH, seconds=SECONDS)
    def go_well(self, which: int, seconds: float) -> None:
        """A job does what it can with what its store has."""
        self.world.end(self.errand(which), seconds=seconds)

    @precondition(lambda self: self.world.errands)
    @rule(which=WHICH, noise=st.lists(st.integers(0, 7), max_size=6), fits=st.sampled_from((True, True, True, False)))
    def go_strangely(self, which: int, noise: list[int], fits: bool) -> None:
        """A job ends with anything: holes, lies, too many or too few results."""
        self.end_strangely(self.errand(which), noise, fits=fits)

    def end_strangely(self, errand: Errand, noise: list[int], *, fits: bool = True) -> None:
        """The results begin with noise, and go on well; or are noise alone, however many there are."""
        words = RESULTS[type(errand.order)]
        num = len(errand.order.keys)
        drawn = [words[i % len(words)] for i in noise]
        self.world.end(errand, [*drawn, *([words[0]] * num)][:num] if fits else drawn)

    @precondition(lambda self: self.world.errands)
    @rule(which=WHICH, failure=st.sampled_from(ev.Failure))
    def go_wrong(self, which: int, failure: ev.Failure) -> None:
        """A job ends without a result."""
        self.world.fail(self.errand(which), failure)

    @precondition(lambda self: self.world.errands)
    @rule(which=WHICH)
    def go_on(self, which: int) -> None:
        """A load writes, long before it ends; another job has read its blocks, or says so and reads none."""
        errand = self.errand(which)
        if isinstance(errand.order, ev.Load):
            self.world.write(errand)
        else:
            self.world.copied(errand)

    # --- stores and time ----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.stores)
    @rule(which=WHICH, tokens=PATH, tenant=TENANT, what=st.none() | st.integers(0, 30), share=st.integers(0, 4))
    def store_changes(self, which: int, tokens: tuple[int, ...], tenant: int, what: int | None, share: int) -> None:
        """A store drops a block and what builds on it; or another node fills it, and the first one in part."""
        store = self.store(which)
        there = sorted(self.world.stores[store])
        if what is not None and there:
            self.world.evict(store, there[what % len(there)])
        else:
            keys = path_keys(tokens, ROOTS[tenant])
            self.world.register(keys, tenant)
            self.world.put(store, keys)
            self.world.put(self.store(0), keys[:share])

    @rule(which=WHICH, kind=st.integers(0, 5), base_s=SECONDS, seconds=st.sampled_from((0.5, 1.0, 70.0)))
    def weather(self, which: int, kind: int, base_s: float, seconds: float) -> None:
        """Time passes; computing was measured; a store is switched off, or on."""
        if kind == 5:
            self.world.tell(ev.Paced(now_s=self.world.now_s, base_s=base_s, slope_s=0.5))
        elif kind == 4 and self.world.stores:
            self.switch(which)
        else:
            self.world.wait(seconds)
            for store, tier in self.world.brain.tiers.items():  # by then somebody has put it right
                if tier.state is BreakerState.OFF:
                    self.world.tell(ev.StoreOn(now_s=self.world.now_s, store=store))

    def switch(self, which: int) -> None:
        """A store is switched off, or on again."""
        now_s, store = self.world.now_s, self.store(which)
        off = self.world.brain.tiers[store].state is BreakerState.OFF
        self.world.tell(ev.StoreOn(now_s=now_s, store=store) if off else ev.StoreOff(now_s=now_s, store=store, why="#"))

    @precondition(lambda self: self.world.stores)
    @rule(which=WHICH, num=st.integers(1, 3), failure=st.sampled_from((ev.Failure.FAILED, ev.Failure.LATE)))
    def falter(self, which: int, num: int, failure: ev.Failure) -> None:
        """A store fails several jobs in a row, and a while passes."""
        store = self.store(which)
        for errand in [errand for errand in self.world.errands.values() if errand.order.store == store][-num:]:
            self.world.check()
            self.world.fail(errand, failure)
        self.world.wait(1.5)

    # --- nonsense -----------------------------------------------------------------------------------------------------

    @rule(which=WHICH, job=st.integers(-1, 50), tokens=PATH)
    def talk_nonsense(self, which: int, job: int, tokens: tuple[int, ...]) -> None:
        """What makes no sense is refused, what comes too late is ignored; neither changes anything."""
        world, now_s = self.world, self.world.now_s
        world.refuse(ev.Wanted(now_s=now_s, request="nobody", num_blocks=1))
        world.refuse(ev.StoreOff(now_s=now_s, store="nowhere", why=""))
        world.refuse(ev.Paced(now_s=now_s, base_s=-1.0, slope_s=0.0))
        if job not in world.errands:
            world.ignore(ev.Copied(now_s=now_s, job=job))
            world.ignore(ev.JobDone(now_s=now_s, job=job, results=("hit", "stored"), num_bytes=20, seconds=1.0))
            world.ignore(ev.JobFailed(now_s=now_s, job=job, failure=ev.Failure.LATE))
        if not world.guests:
            return
        guest = self.guest(which)
        world.scribble(guest)
        keys = tuple(path_keys([7, *tokens]))
        world.refuse(ev.Arrived(now_s=now_s, request=guest.name, keys=keys, root=ROOTS[0]))
        if not guest.ready:
            world.refuse(ev.Filled(now_s=now_s, request=guest.name, keys=()))
        elif guest.num_done < guest.num_prompt:
            world.refuse(ev.Filled(now_s=now_s, request=guest.name, keys=keys))
        else:
            many = tuple(path_keys([8] * (len(guest.table or ()) - guest.num_done + 1)))
            world.refuse(ev.Filled(now_s=now_s, request=guest.name, keys=many))

    # --- helpers ------------------------------------------------------------------------------------------------------

    def guest(self, which: int, wanted: Callable[[Guest], bool] = lambda guest: True) -> Guest:
        """One of the requests."""
        guests = [guest for guest in self.world.guests.values() if wanted(guest)]
        return guests[which % len(guests)]

    def finish(self, wanted: Callable[[Errand], bool]) -> None:
        """Some jobs end well."""
        for errand in [errand for errand in self.world.errands.values() if wanted(errand)]:
            self.world.check()
            self.world.end(errand)

    def errand(self, which: int) -> Errand:
        """One of the jobs, oldest first."""
        return list(self.world.errands.values())[which % len(self.world.errands)]

    def store(self, which: int) -> str:
        """One of the stores."""
        return list(self.world.stores)[which % len(self.world.stores)]

    @invariant()
    def everything_is_right(self) -> None:
        """All that the world knows."""
        self.world.check()

    def teardown(self) -> None:
        """Everybody leaves, every job ends, and nothing is left behind."""
        if hasattr(self, "world"):
            self.world.close()
