"""What a brain says of blocks that come and go, against what must be so: the machines of the brain and of the cache.

`ListeningBrainMachine` is everything that may happen to a brain; beside it stand plain sets of what the device holds
and what each store was seen to hold, and an index that hears what the brain says. `ListeningCacheMachine` is two caches
over faulty stores, each announced to one index; at the end the index must hold what is there.
"""

from hypothesis import strategies as st
from hypothesis.stateful import initialize

from headwater.config.cache import CacheConfig, SaveWhen
from headwater.core import events as ev
from headwater.core.breaker import BreakerState
from headwater.core.keys import BlockKey
from headwater.core.page import page_name
from headwater.core.results import Status
from headwater.residency.events import TIERS
from headwater.residency.memory import MemoryResidency
from headwater.storage.memory import MemoryStore
from headwater.testing.clock import FakeClock
from machines.brain_machine import PATHS, BrainMachine, configs
from machines.brain_world import Errand, World, WorldRequest
from machines.cache_machine import TieredCacheMachine
from machines.residency_machine import Ear, soon, states

GOOD = (Status.STORED, Status.EXISTS, Status.HIT)
NOT_THERE = (
    Status.NO_PARENT,
    Status.NO_ROOM,
    Status.REFUSED,
    Status.MISS,
    Status.CORRUPT,
    Status.FOREIGN,
    Status.SHORT,
    Status.STALE,
    Status.UNKNOWN_VERSION,
)


class ListeningWorld(World):
    """A world in which the cluster hears what the brain holds."""

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self.ear = Ear(MemoryResidency(clock=(clock := FakeClock())), clock)
        self.seen: dict[str, set[BlockKey]] = {tier.name: set() for tier in config.tiers}
        for brain in (self.brain, self.twin):
            brain.moves.watched = True

    def _ended(self, errand: Errand, results: tuple[Status, ...] | None, event: ev.Event) -> None:
        """What a job showed of a store, block by block, up to the first of which nobody knows more."""
        order = errand.order
        name = order.target if isinstance(order, ev.StoreCopy) else order.store
        off = self.brain.tiers[name].state is BreakerState.OFF
        for key, result in zip(order.keys, results or (), strict=False):
            if result == Status.ABSENT:
                self.seen[name].discard(key)
            elif result in GOOD and not off:
                self.seen[name].add(key)
        first = next((i for i, result in enumerate(results or ()) if result not in GOOD), None)
        if results is not None and first is not None and isinstance(order, ev.Demote) and results[first] == "miss":
            self.seen[order.store].discard(order.keys[first])
        elif results is not None and first is not None and results[first] in NOT_THERE:
            self.seen[name].discard(order.keys[first])
            if results[first] == Status.NO_PARENT:
                self.seen[name].discard(self.origin[order.keys[first]][0])
        super()._ended(errand, results, event)

    def tell(self, event: ev.Event, guest: WorldRequest | None = None, *, asked: int = 0) -> list[ev.Instruction]:
        """Let something happen, and listen."""
        if isinstance(event, ev.StoreOff):
            self.seen[event.store].clear()
        out = super().tell(event, guest, asked=asked)
        moves = self.brain.moves.take()
        assert moves == self.twin.moves.take(), "a second brain said something else to the cluster"
        for move in moves:
            if isinstance(move, ev.Stored):
                parent, depth, _ = self.origin[move.keys[0]]
                assert (move.parent, move.depth) == (parent, depth), "blocks that came to another place"
        self.ear.offer(moves)
        self.check_said()
        return out

    def check_said(self) -> None:
        """The book says of each block exactly where it is, as far as anybody can know."""
        book = self.ear.process.book
        for key in self.origin:
            there = TIERS["device"] if key in self.known else 0
            there |= sum(TIERS[name] for name, keys in self.seen.items() if key in keys)
            assert book.state(key) == there, "said to be elsewhere than it is"

    def close(self) -> None:
        """At the end the index has heard it all."""
        super().close()
        self.ear.tell()
        book = self.ear.process.book
        heard = states(self.ear.residency, list(self.origin))
        assert {key: bits for (_, key), bits in heard.items()} == {
            key: int(book.state(key)) for key in self.origin if book.state(key)
        }


class ListeningBrainMachine(BrainMachine):
    """Everything that may happen to a brain, and what the cluster hears of it."""

    @initialize(config=configs(), paths=st.lists(st.sampled_from(PATHS), max_size=6), room=st.sampled_from((3, 99, 1)))
    def begin(self, config: CacheConfig, paths: list[str], room: int) -> None:
        """As in the brain's machine."""
        self.world = ListeningWorld(config)
        if config.tiers:
            self.world.room[config.tiers[0].name] = room
            for which, path in enumerate(paths):
                self.fill_store(self.store(which), path, tenant=0, share=2)


class ListeningCacheMachine(TieredCacheMachine):
    """Two caches over faulty stores, and one index that hears both."""

    @initialize(
        saves=st.lists(st.sampled_from(list(SaveWhen)), min_size=2, max_size=2),
        num_slots=st.integers(4, 24),
        num_pages=st.integers(3, 30),
        policy=st.sampled_from(["lru", "lru-2", "value"]),
    )
    def build(self, saves: list[SaveWhen], num_slots: int, num_pages: int, policy: str) -> None:
        """As in the cache's machine, announced."""
        super().build(saves, num_slots, num_pages, policy)
        index = MemoryResidency(clock=self.clock)
        self.ears = [Ear(index, self.clock, f"cache {i}") for i in range(len(self.engines))]
        for engine, ear in zip(self.engines, self.ears, strict=True):
            engine.cache.announce(ear)

    def teardown(self) -> None:
        """Everybody leaves; the index holds the devices' blocks, and of the stores' none that was never said."""
        super().teardown()
        for engine, ear in zip(self.engines, self.ears, strict=True):
            on_device = {key for key, _, _ in engine.cache.brain.blocks()}
            book = ear.process.book
            for name, faulty in self.stores.items():  # what a store dropped by itself it says when it is asked
                assert isinstance(faulty.store, MemoryStore)
                there = set(faulty.store.names())
                book.went(TIERS[name], [key for key in book.blocks() if page_name(key) not in there])
            ear.tell()
            keys = [*on_device, *book.blocks()]
            heard = {key: bits for (node, key), bits in states(ear.residency, keys).items() if node == engine.name}
            assert {key for key, bits in heard.items() if bits & TIERS["device"]} == on_device
            assert heard == {key: int(book.state(key)) for key in keys}
            for name, faulty in self.stores.items():
                said = {page_name(key) for key, bits in heard.items() if bits & TIERS[name]}
                held = faulty.store.contains(sorted(said), deadline=soon())
                assert all(held), "a block that is not there"
