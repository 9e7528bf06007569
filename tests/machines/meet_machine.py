"""The machine of `brain_machine.py` where loading is slow: requests compute from the front while their end is loaded.

Long prompts that stores have, paces that are known and change, and room for some of them. Moves are those of any brain,
and more of those that go on with a meeting: claims, commits, rows that come, fail, hang or are cut short.
"""

import random
from collections import Counter
from dataclasses import replace
from typing import ClassVar, Final

from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from headwater.config.cache import CacheConfig
from headwater.core import events as ev
from headwater.core.results import Reason, Status
from machines.brain_machine import BLOCK_BYTES, MOVES, BrainMachine, as_tokens, tiers
from machines.brain_world import World, WorldRequest

LONG: Final = (
    *("000000000000", "000000001111", "00001111111111111", "1" * 24),
    *("2" * 16, "2" * 8 + "3" * 8, "3" * 12, "34" * 8, "4" * 16, "43" * 6),
)
MEETING: Final = ("meet",) * 6 + ("step",) * 10 + ("row",) * 8 + ("late",) * 3 + ("spoil", "spoil", "paces")
meeting_moves = st.lists(
    st.tuples(
        st.sampled_from((*MEETING, *MEETING, *MOVES)), st.integers(0, 7), st.sampled_from(LONG), st.integers(0, 255)
    ),
    min_size=4,
    max_size=16,
)

slow = st.sampled_from((0.4, 1.0, 1.0, 2.0, 3.0))  # seconds a block
fast_or_slow = st.one_of(st.just(0.1), slow)


@st.composite
def slow_configs(draw: st.DrawFn) -> CacheConfig:
    """Caches with room for a long prompt or two, and one to three stores."""
    num_tiers = draw(st.sampled_from((2, 3, 1)))
    return CacheConfig(
        num_slots=draw(st.sampled_from((26, 40, 18))),
        block_tokens=4,
        block_bytes=BLOCK_BYTES,
        tiers=tuple(replace(draw(tiers), name=name) for name in ("host", "disk", "pool")[:num_tiers]),
        prefetch=draw(st.booleans()),
        compute_base_s=draw(st.sampled_from((1.0, 0.5, 2.0))),
        compute_slope_s=draw(st.sampled_from((0.0, 0.1))),
    )


class MeetMachine(BrainMachine):
    """Everything that may happen to a brain, and much that happens in meetings."""

    num_blocks: ClassVar[Counter[str]] = Counter()  # loaded and computed in meetings, of all runs; and late meetings: that there were any

    @initialize(
        config=slow_configs(),
        share=st.sampled_from((4, 3, 5, 0, 0, 1, 8, 10)),
        seconds=st.tuples(fast_or_slow, slow, slow),
        first=st.lists(st.sampled_from(LONG), min_size=2, max_size=3),
    )
    def begin(self, config: CacheConfig, share: int, seconds: tuple[float, ...], first: list[str]) -> None:
        """An empty cache over stores that have long prompts, and whose pace is known."""
        self.world = World(config)
        for path in LONG:
            self.fill_store(list(self.world.stores)[-1], path, tenant=0, share=share)
        for token, store in enumerate(self.world.stores, 5):
            self.fill_store(store, str(token), tenant=0, share=0)
            self.measure_store(store, token, seconds[token - 5])
        for number, path in enumerate(first):
            self.meet(number, path, random.Random(0))

    def measure_store(self, store: str, token: int, seconds: float) -> None:
        """A request loads one block that only this store has: so its pace is known."""
        world = self.world
        guest = world.arrive(f"first of {store}", [token])
        self.finish(lambda errand: errand.guest is guest and isinstance(errand.order, ev.Probe))
        world.want(guest, 1)
        for errand in [errand for errand in world.errands.values() if isinstance(errand.order, ev.Load)]:
            world.end(errand, seconds=seconds)
        world.leave(guest)
        self.finish(lambda errand: True)

    @rule(moves=meeting_moves)
    def bustle(self, moves: list[tuple[str, int, str, int]]) -> None:
        """Several moves, as in any brain."""
        for name, which, path, number in moves:
            getattr(self, name)(which, path, random.Random(number))
            self.world.check()

    def meeting(self, which: int) -> WorldRequest | None:
        """One of the requests that meet."""
        return self.guest(which, lambda guest: guest.table is not None and self.world.meets(guest))

    def meet(self, which: int, path: str, dice: random.Random) -> None:
        """A request comes, has its answers and reserves."""
        name = f"long {which % 3}"
        if (old := self.world.guests.get(name)) is not None:
            if old.table is not None and self.world.meets(old):
                return
            self.world.leave(old)
        guest = self.world.arrive(name, as_tokens(path))
        self.world.check()
        self.finish(lambda errand: errand.guest is guest and isinstance(errand.order, ev.Probe))
        self.world.want(guest, len(guest.keys) + dice.choice((0, 0, 1, -1)), meet=True)

    def step(self, which: int, path: str, dice: random.Random) -> None:
        """A request claims, writes into what it has claimed, and commits some of it; time passes meanwhile."""
        guest = self.meeting(which) or self.guest(which, lambda guest: guest.ready)
        if guest is not None and guest.ready:
            if self.world.meets(guest):
                self.world.claim(guest, guest.num_done + dice.choice((1, 2, 8)))
                self.world.scribble(guest)
                self.world.wait(dice.choice((0.0, 0.5, 2.0)))
            self.world.fill(guest, dice.choice((1, 2, 8)))

    def row(self, which: int, path: str, dice: random.Random) -> None:
        """A row comes."""
        guest = self.meeting(which)
        for row in [row for row in guest.rows if row.results is None] if guest is not None else []:
            self.world.end(row, seconds=dice.choice((0.1, 1.0, 1.0, 3.0)) * len(row.order.keys))

    def spoil(self, which: int, path: str, dice: random.Random) -> None:
        """A row comes in part, or not at all."""
        guest = self.meeting(which)
        for row in [row for row in guest.rows if row.results is None] if guest is not None else []:
            num = len(row.order.keys)
            good = dice.randint(0, num - 1)
            bad = dice.choice((Status.CORRUPT, Status.MISS, Status.LATE, Status.FAILED))
            self.world.end(row, [Status.HIT] * good + [bad] + [Status.MISS] * (num - good - 1))

    def late(self, which: int, path: str, dice: random.Random) -> None:
        """What was to be loaded before a request computes is late, in part or all of it."""
        waiting = [guest for guest in self.world.guests.values() if guest.table is not None and not guest.ready]
        guest = min(waiting, key=lambda guest: not self.world.meets(guest), default=None)
        errands = [load for load in guest.loads if load.results is None] if guest is not None else []
        if guest is None or not errands:
            return
        errand, met = errands[0], self.world.meets(guest)
        num = len(errand.order.keys)
        self.world.wait(dice.choice((0.5, 5.0)))
        if dice.random() < 0.2:
            self.world.fail(errand, Reason.LATE)
        else:
            good = dice.randint(0, num - 1)
            words = [Status.HIT] * good + [Status.LATE] * (num - good)
            self.world.end(errand, words, seconds=dice.choice((0.1, 1.0, 5.0)) * max(good, 1))
        MeetMachine.num_blocks["late"] += self.world.meets(guest) and not met

    def paces(self, which: int, path: str, dice: random.Random) -> None:
        """Computing becomes faster or slower; stores do with every row."""
        base_s = dice.choice((0.2, 1.0, 5.0))
        self.world.tell(ev.Paced(now_s=self.world.now_s, base_s=base_s, slope_s=dice.choice((0.0, 0.1))))

    def teardown(self) -> None:
        """The end of any brain; and what there was to see."""
        super().teardown()
        for (series, labels), amount in self.world.brain.accounts.totals.items() if hasattr(self, "world") else ():
            if series.startswith("split_"):
                MeetMachine.num_blocks[dict(labels).get("how", "meetings")] += int(amount)
