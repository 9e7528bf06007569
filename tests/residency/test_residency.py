"""Residency: what nodes say, what the index makes of it, and the thread that never holds anybody up."""

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from brain_kit import finish, live, run, the, tier, tokens
from headwater.build import open_cache, open_local, open_publisher, open_residency
from headwater.cache.cache import TieredCache
from headwater.cache.executor import NoExecutor
from headwater.cache.state import Brain
from headwater.config.cache import CacheConfig, TierConfig
from headwater.config.environment import default_node, default_residency, index_only
from headwater.config.residency import ResidencyConfig, check_index_only
from headwater.config.stores import LocalStoreConfig
from headwater.core import events as ev
from headwater.core.errors import InvalidConfig, InvalidInput
from headwater.core.events import Removed, Stored, TierLost
from headwater.core.keys import BlockKey, block_keys
from headwater.core.page import page_name
from headwater.layout.spec import opaque_layout
from headwater.metrics import Metrics
from headwater.residency.base import Found, Holder, Node, Residency, lookup_tokens
from headwater.residency.book import Book
from headwater.residency.events import TIERS, Applied, Change, State, Update, UpdateKind, decode, encode
from headwater.residency.holdings import StoreHoldings
from headwater.residency.memory import MemoryResidency
from headwater.residency.publisher import Holdings, Publisher, Row
from headwater.residency.session import ResidencySession
from headwater.storage.base import SYSTEM_CLOCK, Deadline
from headwater.storage.memory import MemoryStore
from headwater.testing.clock import FakeClock
from headwater.testing.device import BytesStaging
from headwater.testing.pages import IDENTITY, sample_chain, sample_page
from headwater.testing.stores import put
from machines.brain_world import ROOTS
from machines.index_machine import path_keys
from machines.residency import ROOT, ResidencyTests, chain
from machines.residency_machine import ResidencyMachine, soon
from machines.residency_world import ListeningBrainMachine, ListeningCacheMachine, ListeningWorld

NIGHTLY = os.environ.get("HEADWATER_TEST_PROFILE") == "nightly"
DEVICE, HOST, DISK, POOL = TIERS.values()


# --- machines ---------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(3600 if NIGHTLY else 300)
@pytest.mark.parametrize(
    ("machine", "examples", "steps"),
    [(ResidencyMachine, 50, 12), (ListeningBrainMachine, 20, 15), (ListeningCacheMachine, 30, 30)],
)
def test_against_the_model(machine: Any, examples: int, steps: int) -> None:
    """Nightly: twenty times as many examples."""
    run_state_machine_as_test(
        machine, settings=settings(max_examples=20 * examples if NIGHTLY else examples, stateful_step_count=steps)
    )


class TestMemoryResidency(ResidencyTests):
    """What every index keeps to."""

    @pytest.fixture
    def index(self) -> Residency:
        return MemoryResidency()


# --- what the brain says ----------------------------------------------------------------------------------------------


def listening(*tiers: Any, num_slots: int = 8) -> ListeningWorld:
    config = CacheConfig(num_slots=num_slots, block_tokens=4, block_bytes=10, tiers=tiers, policy="lru", prefetch=False)
    return ListeningWorld(config)


def states_of(world: ListeningWorld, path: str) -> list[str]:
    book = world.ear.process.book
    return ["+".join(book.state(key).tiers) or "none" for key in path_keys(tokens(path), ROOTS[0])]


def test_a_request_that_ends_takes_nothing_with_it() -> None:
    world = listening(num_slots=8)
    one, two = run(world, "one", "0000"), run(world, "two", "00001")
    world.ear.heard.clear()
    world.leave(one)
    assert states_of(world, "00001") == ["device"] * 5
    world.leave(two)
    assert world.ear.heard == []
    assert states_of(world, "00001") == ["device"] * 5


def test_an_eviction_names_exactly_what_left_and_where_it_was() -> None:
    world = listening(num_slots=6)
    live(world, "one", "00001")
    live(world, "two", "000")  # the shared blocks were used later than the rest
    world.ear.tell()
    world.ear.heard.clear()
    run(world, "three", "111")
    keys = path_keys(tokens("00001"), ROOTS[0])
    gone = [key for move in world.ear.heard if isinstance(move, Removed) for key in move.keys]
    assert gone == [keys[4], keys[3]]
    update = world.ear.process.session.next(0.0)
    assert update is not None
    none = [change for change in update.changes if change.state is State.NONE]
    assert none == [Change(parent=keys[2], depth=3, keys=(keys[3], keys[4]), state=State.NONE)]
    assert states_of(world, "00001") == ["device"] * 3 + ["none"] * 2


def test_demotion_promotion_and_loss_are_states() -> None:
    world = listening(tier("host"), tier("pool", save="never"), num_slots=4)
    live(world, "one", "0000")
    assert states_of(world, "0000") == ["device+host"] * 4
    live(world, "two", "1111")  # needs all slots
    assert states_of(world, "0000") == ["host"] * 4
    live(world, "three", "00")
    assert states_of(world, "0000") == ["device+host"] * 2 + ["host"] * 2
    world.evict("host", path_keys(tokens("0000"), ROOTS[0])[2])  # tells nobody
    assert states_of(world, "0000") == ["device+host"] * 2 + ["host"] * 2
    live(world, "four", "0000")  # finds out, and saves again what it computed
    assert states_of(world, "0000") == ["device+host"] * 4
    world.tell(ev.StoreOff(now_s=world.now_s, store="host", why="a test"))
    assert states_of(world, "0000") == ["device"] * 4


def test_a_save_that_was_under_way_when_its_store_was_switched_off_is_not_claimed() -> None:
    world = listening(tier("host"))
    run(world, "one", "00")
    world.tell(ev.StoreOff(now_s=world.now_s, store="host", why="a test"))
    finish(world)
    assert states_of(world, "00") == ["device"] * 2


def test_a_store_that_lost_a_path_is_not_claimed_to_have_its_end() -> None:
    world = listening(tier("host"))
    one = run(world, "one", "00", more=1)
    finish(world)
    world.evict("host", path_keys(tokens("00"), ROOTS[0])[1])  # tells nobody
    world.fill(one, 1, (1,))
    world.end(the(world, ev.Save))
    assert states_of(world, "001") == ["device+host", "device", "device"]
    finish(world)  # the whole path is written again
    assert states_of(world, "001") == ["device+host"] * 3


def test_who_listens_must_be_there_from_the_start() -> None:
    class Listener:
        def offer(self, moves: Sequence[Stored | Removed | TierLost]) -> None:
            heard.extend(moves)

    heard: list[Stored | Removed | TierLost] = []
    config = CacheConfig(num_slots=4, block_tokens=16, block_bytes=10)
    keys = chain("a", 2)
    cache = TieredCache(Brain(config), NoExecutor(), clock=SYSTEM_CLOCK)
    cache.match("one", keys, root=ROOT)
    with pytest.raises(InvalidInput, match="before the first request"):
        cache.announce(Listener())
    assert cache.brain.moves.take() == []
    cache.release("one")
    cache.announce(Listener())
    cache.match("two", keys, root=ROOT)
    cache.reserve("two", 2)
    cache.commit("two", keys)
    cache.release("two")
    assert heard == [Stored(tier="device", keys=tuple(keys), parent=ROOT, depth=0)]


# --- the book ---------------------------------------------------------------------------------------------------------


def rows(changes: Sequence[Change]) -> list[tuple[BlockKey, int, int, State]]:
    return [(change.parent, change.depth, len(change.keys), change.state) for change in changes]


def test_changes_coalesce() -> None:
    book, keys = Book(), chain("a", 6)
    assert book.begin() == []
    book.came(DEVICE, keys, ROOT, 0)
    book.came(HOST, keys[:4], ROOT, 0)
    assert rows(book.take(100)) == [
        (ROOT, 0, 4, State.DEVICE | State.HOST),
        (keys[3], 4, 2, State.DEVICE),
    ]
    book.came(DISK, keys[2:3], keys[1], 2)
    book.went(DISK, keys[2:3])  # as it was said: nothing to say
    book.came(POOL, chain("b", 2), ROOT, 0)
    book.went(POOL, chain("b", 2))  # never said, and gone
    assert book.take(100) == []
    book.went(DEVICE, keys[::-1])  # leaves first, and yet one row
    assert rows(book.take(100)) == [(ROOT, 0, 4, State.HOST), (keys[3], 4, 2, State.NONE)]
    assert len(book) == 4
    book.came(POOL, keys[:1], ROOT, 0)
    assert rows(book.say(keys)) == [(ROOT, 0, 1, State.HOST | State.POOL), (keys[0], 1, 3, State.HOST)]
    assert book.num_unsaid == 0


def test_nothing_is_kept_for_nobody() -> None:
    book, keys = Book(), chain("a", 4)
    book.came(DEVICE, keys, ROOT, 0)
    assert book.num_unsaid == 0
    book.went(DEVICE, keys[2:])
    assert len(book) == 2
    assert book.begin() == keys[:2]
    book.went(DEVICE, keys[:1])
    book.came(HOST, keys[:1], ROOT, 0)
    book.stop()
    assert (book.num_unsaid, len(book)) == (0, 2)
    assert book.state(keys[0]) is State.HOST


def test_a_full_book_still_knows_the_device() -> None:
    book, keys = Book(max_blocks=3), chain("a", 5)
    book.came(HOST, keys, ROOT, 0)
    assert (len(book), book.num_refused) == (3, 2)
    book.came(DEVICE, keys, ROOT, 0)
    assert len(book) == 5
    assert [book.state(key) for key in keys] == [State.DEVICE | State.HOST] * 3 + [State.DEVICE] * 2


def test_what_cannot_be_said_for_a_lease_is_dropped_and_said_anew() -> None:
    book, keys = Book(), chain("a", 10)
    session = ResidencySession(book, node="a", epoch=1, lease_s=9.0, round_every_s=100.0, slice_blocks=4)
    index = MemoryResidency(clock=FakeClock())

    def heard(now_s: float) -> list[UpdateKind]:
        kinds = []
        while (update := session.next(now_s)) is not None:
            kinds.append(update.kind)
            session.heard(index.apply(update, deadline=soon()), now_s)
        return kinds

    book.came(DEVICE, keys[:2], ROOT, 0)
    assert heard(0.0) == [UpdateKind.BEGIN, UpdateKind.END]
    assert heard(2.9) == []
    assert heard(3.0) == [UpdateKind.CHANGE]  # a sign of life
    book.went(DEVICE, keys[:2])
    book.came(HOST, keys[2:], keys[1], 2)
    for now_s in (3.1, 6.0, 12.0):
        assert session.next(now_s) is session.next(now_s)
        session.heard(Applied.FAILED, now_s)
    assert (session.num_dropped, book.num_unsaid, len(book)) == (0, 6, 8)
    again = session.next(12.2)
    assert again is not None
    assert (again.kind, again.round, session.num_dropped) == (UpdateKind.BEGIN, 2, 10)
    assert heard(12.2) == [UpdateKind.BEGIN, UpdateKind.END]
    assert [index.lookup([key], deadline=soon()).of("a").host for key in keys] == [0] * 2 + [1] * 8
    assert session.due_s() == pytest.approx(15.2)
    assert heard(112.2)[0] is UpdateKind.BEGIN  # a round is due again


MOVE = st.tuples(st.sampled_from(["came", "went", "take", "say", "stop"]), st.integers(0, 3), st.integers(0, 31))


@given(st.lists(MOVE, max_size=60))
def test_who_hears_all_changes_knows_the_book(moves: list[tuple[str, int, int]]) -> None:
    """Changes in portions, as a listener takes them in; a stop, and it has to hear everything again."""
    book, keys = Book(), chain("a", 5)
    listener: dict[BlockKey, State] = {}
    todo = book.begin()

    def hear(changes: list[Change]) -> None:
        for change in changes:
            assert change.parent == (keys[change.depth - 1] if change.depth else ROOT)
            assert list(change.keys) == keys[change.depth : change.depth + len(change.keys)]
            listener.update(dict.fromkeys(change.keys, change.state))

    for what, bit, number in moves:
        some = [key for i, key in enumerate(keys) if number >> i & 1]
        if what == "came":
            for key in some:
                book.came(1 << bit, [key], [ROOT, *keys][keys.index(key)], keys.index(key))
        elif what == "went":
            book.went(1 << bit, some)
        elif what == "take":
            hear(book.take(number % 4))
        elif what == "say":
            hear(book.say(todo[:2]))
            del todo[:2]
        elif number < 6:
            book.stop()
            listener, todo = {}, book.begin()
    hear(book.say(todo))
    hear(book.take(1000))
    assert {key: state for key, state in listener.items() if state} == {
        key: book.state(key) for key in keys if book.state(key)
    }
    assert len(book) == len([key for key in keys if book.state(key)])


# --- what goes over a link --------------------------------------------------------------------------------------------


def update(**fields: Any) -> Update:
    change = Change(parent=ROOT, depth=3, keys=tuple(chain("a", 2)), state=State.DEVICE | State.POOL)
    usual = {"node": "a", "epoch": 1, "sequence": 2, "round": 3, "kind": UpdateKind.CHANGE, "lease_s": 1.5}
    return Update(**{**usual, "changes": (change,), **fields})


def test_an_update_survives_json() -> None:
    for kind in UpdateKind:
        one = update(kind=kind)
        assert decode(json.loads(json.dumps(encode(one)))) == one
    assert encode(update())["changes"][0][3] == ["device", "pool"]


@pytest.mark.parametrize(
    "spoil",
    [
        {"is": "headwater/residency/2"},
        {"node": ""},
        {"node": "two\nlines"},
        {"node": None},
        {"epoch": -1},
        {"epoch": 1 << 53},
        {"sequence": "2"},
        {"sequence": True},
        {"kind": "stop"},
        {"lease_s": 0},
        {"lease_s": float("nan")},
        {"changes": None},
        {"changes": [["00" * 32, 0, "00" * 31, []]]},
        {"changes": [["00" * 31, 0, "00" * 32, []]]},
        {"changes": [["00" * 32, -1, "00" * 32, []]]},
        {"changes": [["00" * 32, 0, "", []]]},
        {"changes": [["00" * 32, 0, "00" * 32, ["attic"]]]},
        {"changes": [["00" * 32, 0, "00" * 32]]},
    ],
)
def test_what_no_node_says_is_refused(spoil: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        decode({**encode(update()), **spoil})
    with pytest.raises(InvalidInput):
        decode({})


def test_tokens_are_looked_up_by_the_one_key_function() -> None:
    ids = list(range(70))
    keys = block_keys(ids, parent=ROOT, block_tokens=16)
    index = MemoryResidency()
    row = Change(parent=ROOT, depth=0, keys=tuple(keys[:3]), state=State.HOST)
    assert index.apply(update(kind=UpdateKind.BEGIN, changes=(row,)), deadline=soon()) is Applied.APPLIED
    found = lookup_tokens(index, ids, root=ROOT, block_tokens=16, deadline=soon())
    assert found == Found(4, (Holder("a", 3, 0, 3, 0, 0),))
    assert found.of("a").host == 3
    assert found.of("b").num_blocks == 0


# --- the publisher ----------------------------------------------------------------------------------------------------


def config(**options: Any) -> ResidencyConfig:
    return ResidencyConfig(**{"url": "memory:", "node": "here", "linger_s": 0.0, **options})


def came(keys: Sequence[BlockKey], tier: str = "device") -> list[Stored]:
    return [Stored(tier=tier, keys=tuple(keys), parent=ROOT, depth=0)]


class Outer(Residency):
    """An index whose calls go through a test."""

    def __init__(self) -> None:
        self.inner = MemoryResidency()
        self.on_apply: Callable[[Update], Applied | None] = lambda update: None
        self.heard: list[Update] = []

    def apply(self, update: Update, *, deadline: Deadline) -> Applied:
        answer = self.on_apply(update)
        if answer is not None:
            return answer
        self.heard.append(update)
        return self.inner.apply(update, deadline=deadline)

    def lookup(self, keys: Sequence[BlockKey], *, deadline: Deadline) -> Found:
        return self.inner.lookup(keys, deadline=deadline)

    def nodes(self, *, deadline: Deadline) -> tuple[Node, ...] | None:
        return self.inner.nodes(deadline=deadline)

    def last_epoch(self, node: str, *, deadline: Deadline) -> int | None:
        return self.inner.last_epoch(node, deadline=deadline)

    def close(self) -> None:
        """Keep it, to look at it."""


@pytest.fixture
def index() -> Outer:
    return Outer()


def test_what_is_offered_is_heard_and_leaves_with_the_node(index: Outer) -> None:
    keys, metrics = chain("a", 1500), Metrics()
    with Publisher(index, config(), metrics=metrics) as publisher:
        publisher.offer(came(keys))
        publisher.offer(came(keys[:700], "host"))
        assert publisher.drain(20)
        assert index.lookup(keys, deadline=soon()).of("here") == Holder("here", 1500, 1500, 700, 0, 0)
        publisher.offer([Removed(tier="device", keys=tuple(keys[600:]))])
        assert publisher.state(keys[650]) is State.HOST
        assert publisher.drain(20)
        assert index.lookup(keys, deadline=soon()).of("here") == Holder("here", 700, 600, 700, 0, 0)
    assert index.heard[-1].kind is UpdateKind.LEAVE
    assert index.nodes(deadline=soon()) == ()
    assert index.lookup(keys, deadline=soon()).holders == ()
    assert [one.sequence for one in index.heard] == list(range(1, len(index.heard) + 1))
    assert metrics.value("residency_updates_total", outcome="applied") == len(index.heard)


def test_nobody_waits_for_an_index_that_hangs(index: Outer) -> None:
    """Everything here returns while the index sits in a call: otherwise this test would not end."""
    go_on, entered = threading.Event(), threading.Event()

    def hang(update: Update) -> None:
        entered.set()
        go_on.wait()

    index.on_apply = hang
    publisher = Publisher(index, config())
    try:
        assert entered.wait(20)
        keys = chain("a", 500)
        for _ in range(50):
            publisher.offer(came(keys))
            publisher.offer([Removed(tier="device", keys=tuple(keys[100:]))])
        publisher.offer([TierLost(tier="pool")])
        assert publisher.state(keys[0]) is State.DEVICE
        assert not publisher.drain(0.01)
        assert not publisher.close(0.01)
    finally:
        go_on.set()
        assert publisher.close(20)
    assert publisher.close()


def test_an_index_that_fails_and_raises_is_tried_again(index: Outer) -> None:
    troubles: list[Applied | Exception] = [Applied.FAILED, RuntimeError("as it happens"), Applied.UNKNOWN]
    seen: list[Update] = []

    def trouble(update: Update) -> Applied | None:
        seen.append(update)
        if not troubles:
            return None
        one = troubles.pop(0)
        if isinstance(one, Exception):
            raise one
        return one

    index.on_apply = trouble
    keys = chain("a", 3)
    with Publisher(index, config()) as publisher:
        publisher.offer(came(keys))
        assert publisher.drain(20)
        assert index.lookup(keys, deadline=soon()).of("here").device == 3
    assert seen[0] is seen[1] is seen[2]  # the same again, until somebody has heard it
    assert [one.kind for one in seen[3:5]] == [UpdateKind.BEGIN, UpdateKind.END]  # of a new round


def test_an_index_that_never_knows_us_is_not_flooded(index: Outer) -> None:
    seen: list[UpdateKind] = []

    def forgetful(update: Update) -> Applied:
        seen.append(update.kind)
        return Applied.APPLIED if update.kind is UpdateKind.BEGIN else Applied.UNKNOWN

    index.on_apply = forgetful
    with Publisher(index, config()) as publisher:
        publisher.offer(came(chain("a", 3)))
        assert not publisher.drain(0.5)
    assert 1 <= seen.count(UpdateKind.BEGIN) < 20
    assert seen[-1] is UpdateKind.LEAVE


def test_a_lost_index_hears_everything_again(index: Outer) -> None:
    keys = chain("a", 1000)
    with Publisher(index, config()) as publisher:
        publisher.offer(came(keys))
        assert publisher.drain(20)
        index.inner = MemoryResidency()  # restarted
        publisher.offer(came(chain("b", 1)))
        assert publisher.drain(20)
        assert index.lookup(keys, deadline=soon()).of("here").device == 1000


def test_a_restarted_process_takes_over_even_with_its_clock_behind(index: Outer) -> None:
    keys = chain("a", 2)
    ahead = int((SYSTEM_CLOCK.time() + 3600) * 1000)
    row = Change(parent=ROOT, depth=0, keys=tuple(keys), state=State.DEVICE)
    index.inner.apply(update(node="here", epoch=ahead, kind=UpdateKind.BEGIN, changes=(row,)), deadline=soon())
    with Publisher(index, config()) as publisher:
        assert publisher.drain(20)
        assert index.last_epoch("here", deadline=soon()) == ahead + 1
        assert index.lookup(keys, deadline=soon()).holders == ()
        publisher.offer(came(keys[:1]))
        assert publisher.drain(20)
        assert index.lookup(keys, deadline=soon()).of("here").device == 1


def test_a_process_whose_name_was_taken_over_is_silent(index: Outer) -> None:
    metrics = Metrics()
    with Publisher(index, config(), metrics=metrics) as publisher:
        assert publisher.drain(20)
        epoch = (index.last_epoch("here", deadline=soon()) or 0) + 1
        index.inner.apply(update(node="here", epoch=epoch, kind=UpdateKind.BEGIN, changes=()), deadline=soon())
        publisher.offer(came(chain("a", 1)))
        assert not publisher.drain(0.2)
        num_heard = len(index.heard)
        publisher.offer(came(chain("b", 1)))
        assert not publisher.drain(0.2)
        assert len(index.heard) == num_heard
        assert index.lookup(chain("a", 1), deadline=soon()).holders == ()
    assert metrics.events("residency_fenced")
    assert index.last_epoch("here", deadline=soon()) == epoch  # and it does not sign the other one off


def test_a_tier_that_nobody_knows_is_told_and_not_claimed(index: Outer) -> None:
    metrics = Metrics()
    with Publisher(index, config(), metrics=metrics) as publisher:
        publisher.offer(came(chain("a", 1), "attic"))
        publisher.offer(came(chain("b", 1)))
        assert publisher.drain(20)
        assert index.lookup(chain("a", 1), deadline=soon()).holders == ()
    assert [event.facts["tier"] for event in metrics.events("residency_unknown_tier")] == ["attic"]


# --- what the stores hold ---------------------------------------------------------------------------------------------


class Shelf:
    """Holdings that a test fills."""

    def __init__(self, held: set[BlockKey]) -> None:
        self.there = held
        self.on_ask: Callable[[], None] = lambda: None
        self.on_list: Callable[[], None] = lambda: None
        self.trouble: Exception | None = None

    def held(self, keys: Sequence[BlockKey]) -> list[bool] | None:
        if self.trouble is not None:
            raise self.trouble
        answer = [key in self.there for key in keys]
        self.on_ask()
        return answer

    def listed(self) -> Iterator[list[Row]]:
        rows = [(key, ROOT, 0) for key in sorted(self.there)]
        self.on_list()
        yield rows


def audited(index: Outer, shelf: Holdings) -> Publisher:
    return Publisher(index, config(audit_every_s=3600.0), holdings={"host": shelf})


def test_the_stores_are_asked(index: Outer) -> None:
    keys, old = chain("a", 700), chain("old", 1)[0]
    shelf = Shelf({*keys, old})
    with audited(index, shelf) as publisher:
        assert publisher.drain(20)
        assert publisher.state(old) is State.HOST  # from before a restart
        publisher.offer(came(keys))
        publisher.offer(came(keys, "host"))
        shelf.there = set(keys[:500])  # it evicted, and told nobody
        publisher.resync()
        assert publisher.drain(20)
        assert index.lookup(keys, deadline=soon()).of("here") == Holder("here", 700, 700, 500, 0, 0)
        assert publisher.state(old) is State.NONE
        publisher.offer([TierLost(tier="host")])
        assert publisher.drain(20)
        assert index.lookup(keys, deadline=soon()).of("here") == Holder("here", 700, 700, 0, 0, 0)


def test_what_happens_while_a_store_is_asked_counts_more_than_its_answer(index: Outer) -> None:
    keys = chain("a", 2)
    shelf = Shelf(set())
    with audited(index, shelf) as publisher:
        publisher.offer(came(keys, "host"))
        assert publisher.drain(20)
        publisher.offer(came(keys, "host"))
        shelf.on_ask = lambda: publisher.offer(came(keys[:1], "host"))  # saved just now, again
        publisher.resync()
        assert publisher.drain(20)
        assert [publisher.state(key) for key in keys] == [State.HOST, State.NONE]
        shelf.there, shelf.on_ask = set(keys), lambda: None
        shelf.on_list = lambda: publisher.offer([Removed(tier="host", keys=(keys[0],))])  # evicted behind its back
        publisher.resync()
        assert publisher.drain(20)
        assert [publisher.state(key) for key in keys] == [State.NONE, State.HOST]


def test_a_store_that_cannot_be_asked_changes_nothing(index: Outer) -> None:
    keys = chain("a", 2)
    shelf = Shelf(set(keys))
    with audited(index, shelf) as publisher:
        assert publisher.drain(20)
        shelf.trouble = RuntimeError("as it happens")
        publisher.resync()
        assert publisher.drain(20)
        assert publisher.state(keys[0]) is State.HOST


def test_a_node_that_starts_again_claims_what_its_disk_kept(tmp_path: Path) -> None:
    pages = sample_chain(1, 1100, plane_bytes=(8,))
    keys = [BlockKey(page.name[:32]) for page in pages]
    store_config = LocalStoreConfig(directory=tmp_path / "store", limit_bytes=32 << 20)
    cache_config = CacheConfig(num_slots=4, block_tokens=pages[0].meta.valid_tokens, block_bytes=8)
    with open_local(store_config) as store:
        put(store, pages)
        put(store, [sample_page(2, identity=bytes(32)), sample_page(3, expires_at_ms=1 << 50)])
    for wanted in (1100, 600):
        cache = TieredCache(Brain(cache_config), NoExecutor(), clock=SYSTEM_CLOCK)
        index = Outer()
        with (
            open_local(store_config) as store,
            open_publisher(cache, config(), {"disk": store}, identity=IDENTITY, residency=index) as publisher,
        ):
            assert publisher.drain(30)
            assert index.lookup(keys, deadline=soon()).of("here") == Holder("here", wanted, 0, 0, wanted, 0)
            others = [one for one in store.names(deadline=soon()) if BlockKey(one[:32]) not in keys]
            assert len(others) == 2  # another model's, and one that is not to stay
            assert all(publisher.state(BlockKey(one[:32])) is State.NONE for one in others)
            store.delete([pages[600].name], deadline=soon())
            publisher.resync()
            assert publisher.drain(30)
            assert index.lookup(keys, deadline=soon()).of("here").disk == 600


def test_a_cache_with_threads_and_stores_says_what_it_holds(shm: Path, index: Outer) -> None:
    layout = opaque_layout((40, 24), 16)
    paths = {name: block_keys([seed] * 96, parent=ROOT, block_tokens=16) for seed, name in enumerate("abc")}
    cache_config = CacheConfig(
        num_slots=8, block_tokens=16, block_bytes=layout.page_bytes, tiers=(TierConfig(name="host"),), policy="lru"
    )
    with (
        open_local(LocalStoreConfig(directory=shm / "store", limit_bytes=16 << 20)) as store,
        open_cache(
            cache_config,
            {"host": store},
            BytesStaging(layout, num_slots=8, num_pages=4),
            layout=layout,
            identity=IDENTITY,
        ) as cache,
        open_publisher(cache, config(), {"host": store}, identity=IDENTITY, residency=index) as publisher,
    ):
        for name in "abac":  # six blocks each, and room for eight
            cache.match(name, paths[name], root=ROOT)
            cache.wait(name, 20)
            assert cache.reserve(name, 6) is not None
            cache.commit(name, paths[name][cache.wait(name, 20).num_ready :])
            cache.release(name)
            assert cache.drain(20)
        assert publisher.drain(20)
        with cache.still() as brain:
            on_device = {key for key, _, _ in brain.blocks()}
        for path in paths.values():
            num = next((i for i, key in enumerate(path) if key not in on_device), len(path))
            assert index.lookup(path, deadline=soon()).holders == (Holder("here", 6, num, 6, 0, 0),)
        assert [index.lookup(paths[name], deadline=soon()).of("here").device for name in "abc"] == [2, 0, 6]
        store.delete([page_name(paths["b"][3])], deadline=soon())  # by another process, say
        publisher.resync()
        assert publisher.drain(20)
        assert index.lookup(paths["b"], deadline=soon()).of("here").host == 3


def test_a_block_is_held_when_all_its_pages_are() -> None:
    with MemoryStore(1 << 20) as store:
        both = StoreHoldings(store, identity=IDENTITY, block_tokens=4, pages=((0, 2, 0), (1, 2, 0)))
        first = [[sample_page(1, depth, shard=(shard, 2)) for depth in range(2)] for shard in range(2)]
        put(store, first[0])
        keys = [BlockKey(page.name[:32]) for page in first[0]]
        assert both.held(keys) == [False, False]
        put(store, first[1][:1])
        assert both.held(keys) == [True, False]
        assert list(both.listed()) == []
    assert both.held(keys) is None


def test_tiers_that_the_index_cannot_name_are_refused() -> None:
    cache = TieredCache(
        Brain(CacheConfig(num_slots=1, block_tokens=1, block_bytes=1)), NoExecutor(), clock=SYSTEM_CLOCK
    )
    with MemoryStore(1 << 20) as store, pytest.raises(InvalidConfig, match="device, host, disk, pool, not attic"):
        open_publisher(cache, config(), {"attic": store}, identity=IDENTITY)


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "http://here"}, "redis://, rediss://, unix:// or memory:, not 'http:'"),
        ({"url": None}, "redis://, rediss://, unix:// or memory:"),
        ({"node": "two words"}, "printable ASCII without spaces, not 'two words'"),
        ({"node": ""}, "printable ASCII without spaces"),
        ({"lease_s": 0}, "lease_s must be a positive number"),
        ({"lease_s": 3.0}, "a lease of 3.0 s needs room for three updates of 2.0 s"),
        ({"linger_s": -0.1}, "linger_s must be at most a second"),
        ({"round_every_s": 1.0}, "round_every_s must be at least the lease"),
        ({"max_blocks": 0}, "max_blocks must be a whole number of at least 1"),
        ({"prefix": ""}, "prefix must be text"),
    ],
)
def test_a_residency_that_cannot_work(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig, match=words):
        config(**options)


def test_where_the_index_is_comes_from_the_environment() -> None:
    assert default_residency({}) is None
    assert default_residency({"HEADWATER_RESIDENCY": "redis://there"}) == "redis://there"
    assert default_node({"HEADWATER_NODE": "me"}) == "me"
    assert default_node({}).endswith(f":{os.getpid()}")
    assert isinstance(open_residency(config()), MemoryResidency)


@pytest.mark.parametrize("name", ["HEADWATER_INDEX_ONLY", "FD_AS_ONLY_FLUSH"])
def test_index_only_is_a_variable_with_an_alias(name: str) -> None:
    assert not index_only({})
    assert not index_only({name: ""})
    assert not index_only({name: "0"})
    assert index_only({name: "1"})
    for nonsense in ("2", "yes", "-1", "true", "1.0"):
        with pytest.raises(InvalidConfig, match=f"{name} must be 0 or 1, not '{nonsense}'"):
            index_only({name: nonsense})


def test_index_only_said_twice_must_be_said_alike() -> None:
    assert index_only({"HEADWATER_INDEX_ONLY": "1", "FD_AS_ONLY_FLUSH": "1"})
    with pytest.raises(InvalidConfig, match="HEADWATER_INDEX_ONLY=1 and FD_AS_ONLY_FLUSH=0: which of them"):
        index_only({"HEADWATER_INDEX_ONLY": "1", "FD_AS_ONLY_FLUSH": "0"})


def test_index_only_needs_somebody_to_tell_and_no_pool() -> None:
    there = "redis://there"
    check_index_only(residency=there, pool=None)
    for options, words in (
        ({"residency": None, "pool": None}, "say where that is"),
        ({"residency": "memory:", "pool": None}, "for others to read"),
        ({"residency": there, "pool": "mooncake://there"}, "leave the pool out, or the mode"),
        ({"residency": there, "pool": None, "cache": False}, "needs a cache"),
    ):
        with pytest.raises(InvalidConfig, match=words):
            check_index_only(**options)
