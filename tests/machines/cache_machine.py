"""A hypothesis machine over two TieredCaches on shared stores, in virtual time, against what each byte must be.

The model is the content of a key (`virtual.content`): whatever is done in whatever order, every block that a cache
calls ready holds exactly that, every answer adds up, and `validate()` holds after every step. At the end everybody
leaves, and nothing may be held; and a fresh brain that hears the same events ends in the same state.
"""

import json

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headwater.cache.state import Brain
from headwater.config.cache import SaveWhen, TierConfig
from headwater.core.encoding import decode, encode
from headwater.core.events import Event, StoreOff, StoreOn
from headwater.lab.campaigns.virtual import LAYOUT, EventList, SimulatedEngine, VirtualExecutor
from headwater.layout.frame import frame_bytes
from headwater.storage.base import Deadline
from headwater.storage.memory import MemoryStore
from headwater.testing.clock import FakeClock
from headwater.testing.device import BytesStaging
from headwater.testing.faulty_stores import Faults, FaultyStore

NUM_CACHES = 2
WHICH = st.integers(0, NUM_CACHES - 1)
ANY = st.integers(0, 1 << 16)
PATH = st.lists(st.integers(0, 2), min_size=0, max_size=8)
NO_FAULTS = Faults()
FAULTS = st.builds(
    lambda kind, often: Faults(**{kind: often}),
    st.sampled_from(["put_fails", "get_fails", "get_misses", "flips_byte", "cuts_tail", "swaps_page", "contains_lies"]),
    st.sampled_from([0.3, 1.0]),
)


class TieredCacheMachine(RuleBasedStateMachine):
    """Two caches, a host store and a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.engines: list[SimulatedEngine] = []
        self.executors: list[VirtualExecutor] = []
        self.records = [EventList() for _ in range(NUM_CACHES)]
        self.stores: dict[str, FaultyStore] = {}

    @initialize(
        saves=st.lists(st.sampled_from(list(SaveWhen)), min_size=2, max_size=2),
        num_slots=st.integers(4, 24),
        num_pages=st.integers(3, 30),
        policy=st.sampled_from(["lru", "lru-2", "value"]),
    )
    def build(self, saves: list[SaveWhen], num_slots: int, num_pages: int, policy: str) -> None:
        """Small devices, small stores."""
        size = frame_bytes(LAYOUT.plane_bytes)
        for name, num in (("host", num_pages), ("pool", 2 * num_pages)):
            self.stores[name] = FaultyStore(MemoryStore(num * size, clock=self.clock), NO_FAULTS)
        for i in range(NUM_CACHES):
            tiers = [TierConfig(name="host", save=saves[i]), TierConfig(name="pool", breaker_failures=2)]
            staging = BytesStaging(LAYOUT, num_slots=num_slots, num_pages=8)
            executor = VirtualExecutor(self.stores, staging, clock=self.clock)
            engine = SimulatedEngine(
                f"cache {i}", staging, executor, tiers, clock=self.clock, policy=policy, record=self.records[i]
            )
            executor.ledger.deliver = engine.cache.deliver
            self.executors.append(executor)
            self.engines.append(engine)

    def pick(self, which: int, any_: int) -> tuple[SimulatedEngine, str | None]:
        """A cache, and one of its requests if it has any."""
        engine = self.engines[which]
        requests = list(engine.running)
        return engine, requests[any_ % len(requests)] if requests else None

    # --- rules --------------------------------------------------------------------------------------------------------

    @rule(which=WHICH, path=PATH)
    def arrive(self, which: int, path: list[int]) -> None:
        """A new request."""
        if len(self.engines[which].running) < 4:
            self.engines[which].arrive(path)

    @rule(which=WHICH, any_=ANY)
    def ask_again(self, which: int, any_: int) -> None:
        """A waiting request polls."""
        engine, request = self.pick(which, any_)
        if (
            request is not None
            and not engine.running[request].slots
            and not engine.cache.brain.requests[request].reserved
        ):
            engine.ask(request)

    @rule(which=WHICH, any_=ANY, more=st.integers(0, 2), load=st.booleans(), promise=st.booleans())
    def reserve(self, which: int, any_: int, more: int, load: bool, promise: bool) -> None:
        """A request takes slots, or more slots; somebody may promise that the last store has its prompt."""
        engine, request = self.pick(which, any_)
        if request is not None:
            engine.reserve(request, more, load=load, promised=[*engine.cache.brain.tiers][-1] if promise else "")

    @rule(which=WHICH, any_=ANY, num_blocks=st.integers(1, 5))
    def compute(self, which: int, any_: int, num_blocks: int) -> None:
        """A request computes and commits, if it may."""
        engine, request = self.pick(which, any_)
        if request is not None:
            engine.compute(request, num_blocks)

    @rule(which=WHICH, any_=ANY)
    def give_up(self, which: int, any_: int) -> None:
        """A request stops waiting."""
        engine, request = self.pick(which, any_)
        if request is not None:
            engine.cache.give_up(request)

    @rule(which=WHICH, any_=ANY)
    def leave(self, which: int, any_: int) -> None:
        """A request is over."""
        engine, request = self.pick(which, any_)
        if request is not None:
            engine.leave(request)

    @rule(which=WHICH, any_=ANY, fail=st.sampled_from([False, False, False, True]))
    def work(self, which: int, any_: int, fail: bool) -> None:
        """One job runs, or fails."""
        executor = self.executors[which]
        if executor.queued:
            executor.run(executor.queued[any_ % len(executor.queued)], fail=fail)

    @rule(which=WHICH)
    def work_all(self, which: int) -> None:
        """All jobs run."""
        self.executors[which].drain(0)

    @rule(seconds=st.sampled_from([0.001, 0.3, 1.0, 40.0]))
    def wait(self, seconds: float) -> None:
        """Time passes; jobs may be late now."""
        self.clock.advance(seconds)

    @rule(name=st.sampled_from(["host", "pool"]), faults=st.one_of(st.just(NO_FAULTS), FAULTS))
    def spoil(self, name: str, faults: Faults) -> None:
        """A store goes wrong in some way, or is well again."""
        self.stores[name].faults = faults

    @rule(name=st.sampled_from(["host", "pool"]), any_=ANY)
    def lose(self, name: str, any_: int) -> None:
        """A store loses a page, and what builds on it."""
        store = self.stores[name].store
        assert isinstance(store, MemoryStore)
        names = sorted(store.names())
        if names:
            store.delete([names[any_ % len(names)]], deadline=Deadline.after(1, self.clock))

    @rule(which=WHICH, name=st.sampled_from(["host", "pool"]), off=st.booleans())
    def switch(self, which: int, name: str, off: bool) -> None:
        """The executor says that a store is not to be used, or is again."""
        now_s = self.clock.monotonic()
        event = StoreOff(now_s=now_s, store=name, why="a test") if off else StoreOn(now_s=now_s, store=name)
        self.engines[which].cache.deliver(event)

    # --- what must hold -----------------------------------------------------------------------------------------------

    @invariant()
    def every_byte_is_right(self) -> None:
        """Known blocks and what running requests may read."""
        for engine, executor in zip(self.engines, self.executors, strict=True):
            executor.tell()
            engine.check()
            assert executor.num_held_pages == 0

    @precondition(lambda self: bool(self.engines))
    @rule()
    def nothing(self) -> None:
        """Give the machine something to do when all else is impossible."""

    def teardown(self) -> None:
        """Everybody leaves; nothing is held; the recorded events lead to the same state again."""
        for engine, events in zip(self.engines, self.records, strict=True):
            engine.finish()
            again = Brain(engine.cache.brain.config)
            for event in events:
                decoded = decode(json.loads(json.dumps(encode(event))))
                assert isinstance(decoded, Event)
                again.handle(decoded)
            assert again.digest() == engine.cache.brain.digest()
