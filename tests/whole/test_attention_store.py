"""Blocks by their tokens: what is written is read bit by bit, counted from where one asked, and told as it is."""

import hashlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.attention_store import AttentionStore
from headwater.build import open_local
from headwater.config.environment import write_config
from headwater.config.residency import ResidencyConfig
from headwater.config.stores import LocalStoreConfig
from headwater.config.writes import WriteConfig
from headwater.core.errors import InvalidConfig, InvalidInput, ResourceClosed
from headwater.core.events import Move, Removed, Stored, TierLost
from headwater.core.identity import CacheIdentity
from headwater.core.keys import Extra, block_keys
from headwater.core.page import page_name
from headwater.core.results import Reason, Status
from headwater.lab.campaigns.hanging import HangingStore
from headwater.layout.frame import frame_bytes
from headwater.layout.reshard import part_number
from headwater.layout.shard import parts
from headwater.layout.spec import KVLayout
from headwater.metrics import Metrics
from headwater.residency.base import Holder
from headwater.residency.memory import MemoryResidency
from headwater.residency.publisher import Publisher
from headwater.storage.base import Deadline, Store
from headwater.storage.memory import MemoryStore
from headwater.storage.redis import RedisStore
from headwater.testing.clock import FakeClock
from headwater.testing.device import BytesStaging
from headwater.testing.faulty_stores import Faults, FaultyStore
from headwater.testing.layouts import randomise
from headwater.testing.samples import sample_layouts
from headwater.transfer.device.arena import create_host_cache, create_kv_cache
from headwater.transfer.executor.sliced import Reached
from headwater.transfer.executor.staging import TorchStaging
from test_redis import Server
from worker_kit import LAYOUT, PATIENCE_S, Gate, wait_until

SLACK_S = 0.5
TOKENS = list(range(1000, 1040))  # ten blocks of four
B = LAYOUT.block_tokens


def identity(layout: KVLayout = LAYOUT, **fields: Any) -> CacheIdentity:
    digests = {name: hashlib.sha256(name.encode()).digest() for name in ("weights", "config")}
    named = {"model": "test", "layout": layout.fingerprint, "block_tokens": layout.block_tokens, **digests}
    return CacheIdentity(**{**named, **fields})


class Ear:
    """Hears moves."""

    def __init__(self) -> None:
        self.moves: list[Stored | Removed] = []

    def offer(self, moves: Iterable[Move]) -> None:
        for move in moves:
            assert not isinstance(move, TierLost), "no tier is lost here"
            self.moves.append(move)


class Rig:
    """An attention store on a device in numpy."""

    def __init__(self, store: Store, *, num_pages: int = 32, **options: Any) -> None:
        self.store = store
        self.ear = Ear()
        self.metrics = Metrics()
        self.staging = BytesStaging(LAYOUT, num_slots=64, num_pages=num_pages, seed=5)
        self.original = self.staging.device.copy()
        self.attention = AttentionStore(
            store,
            self.staging,
            **{
                "identity": identity(),
                "layout": LAYOUT,
                "residency": self.ear,
                "config": WriteConfig(slice_blocks=3),
                "metrics": self.metrics,
                **options,
            },
        )

    def equal(self, slots: Iterable[int], source: Iterable[int]) -> bool:
        return [self.staging.block(slot) for slot in slots] == [bytes(self.original[slot]) for slot in source]

    def finish(self) -> None:
        if isinstance(self.store, HangingStore):
            self.store.release()
        assert self.attention.close(PATIENCE_S)
        assert self.attention.num_held_pages == 0
        self.store.close()


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(store: Store | None = None, **options: Any) -> Rig:
        made.append(Rig(store if store is not None else MemoryStore(8 << 20), **options))
        return made[-1]

    yield make
    for one in made:
        one.finish()


# --- bytes ------------------------------------------------------------------------------------------------------------


LAYOUTS = list(sample_layouts())


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for at, name in enumerate(LAYOUTS) for kind in ("memory", "mapped" if at % 2 else "disk")],
)
def test_what_was_written_is_read_bit_by_bit(name: str, kind: str, shm: Path, tmp_path: Path) -> None:
    layout = sample_layouts()[name]
    num_blocks = 5
    tokens = list(range(num_blocks * layout.block_tokens + 3))
    local = LocalStoreConfig(directory=(shm if kind == "mapped" else tmp_path) / "store", limit_bytes=32 << 20)
    with ExitStack() as stack:
        store: Store = stack.enter_context(MemoryStore(16 << 20) if kind == "memory" else open_local(local))
        device = stack.enter_context(create_kv_cache(layout, 12))
        pages = stack.enter_context(create_host_cache(frame_bytes(layout.plane_bytes), num_pages=8))
        staging = stack.enter_context(TorchStaging(device, pages))
        attention = AttentionStore(
            store, staging, identity=identity(layout), layout=layout, config=WriteConfig(slice_blocks=3)
        )
        stack.enter_context(attention)
        randomise(device, seed=7)
        before = [row.clone() for row in device.rows]
        written, free = [7, 0, 3, 10, 1], [2, 4, 5, 6, 8]
        assert attention.match(tokens) == Reached(0, Reason.INCOMPLETE)
        assert attention.write(tokens, written) == Reached(num_blocks, Reason.WHOLE)
        assert attention.match(tokens) == Reached(num_blocks, Reason.WHOLE)
        assert attention.read(tokens, free[:3]) == Reached(3, Reason.WHOLE)
        assert attention.read(tokens, free[3:], start_block=3) == Reached(2, Reason.WHOLE)
        for row, old in zip(device.rows, before, strict=True):
            old[free] = old[written]
            assert torch.equal(row, old)


# --- counts -----------------------------------------------------------------------------------------------------------


def test_counts_are_from_the_start_block(rig: Callable[..., Rig]) -> None:
    one = rig()
    assert one.attention.write(TOKENS, [0, 1, 2, 3]) == Reached(4, Reason.WHOLE)
    assert one.attention.write(TOKENS, [4, 5, 6], start_block=4) == Reached(3, Reason.WHOLE)
    assert one.attention.match(TOKENS) == Reached(7, Reason.INCOMPLETE)
    assert one.attention.match(TOKENS, start_block=5) == Reached(2, Reason.INCOMPLETE)
    assert one.attention.match(TOKENS, start_block=7) == Reached(0, Reason.INCOMPLETE)
    assert one.attention.match(TOKENS[: 7 * B], start_block=5) == Reached(2, Reason.WHOLE)
    assert one.attention.match(TOKENS[: 7 * B + 3]) == Reached(7, Reason.WHOLE)  # a partial tail has no say
    assert one.attention.match(TOKENS, start_block=10) == Reached(0, Reason.WHOLE)
    found = one.attention.read(TOKENS, range(32, 36), start_block=5)
    assert (found.num_blocks, found.why, found.detail) == (2, Reason.INCOMPLETE, "block 7: miss")
    assert one.equal(range(32, 34), [5, 6])
    assert one.equal(range(34, 64), range(34, 64))
    assert one.attention.read(TOKENS, []) == one.attention.write(TOKENS, []) == Reached(0, Reason.WHOLE)


def test_a_match_ends_at_the_first_gap(rig: Callable[..., Rig]) -> None:
    """In a store that knows no parents, blocks may be there behind one that is not."""
    store = FaultyStore(MemoryStore(8 << 20), Faults())
    one = rig(store)
    assert one.attention.write(TOKENS, range(10)).why is Reason.WHOLE
    store.contains = lambda names, *, deadline: [at != 3 for at in range(len(names))]  # type: ignore[method-assign]
    assert one.attention.match(TOKENS) == Reached(3, Reason.INCOMPLETE)


def test_a_prefix_that_differs_shares_nothing(rig: Callable[..., Rig]) -> None:
    one = rig()
    assert one.attention.write(TOKENS, range(10)).why is Reason.WHOLE
    other = [*TOKENS[:9], 7, *TOKENS[10:]]
    assert one.attention.match(other) == Reached(2, Reason.INCOMPLETE)
    assert one.attention.match(other, start_block=3) == Reached(0, Reason.INCOMPLETE)


def test_tenants_and_images_are_apart(rig: Callable[..., Rig]) -> None:
    one = rig()
    image = Extra("image", hashlib.sha256(b"cat").digest(), 8, 2)
    assert one.attention.write(TOKENS, range(10), salt=b"tenant").why is Reason.WHOLE
    assert one.attention.match(TOKENS).num_blocks == 0
    assert one.attention.match(TOKENS, salt=b"other").num_blocks == 0
    assert one.attention.match(TOKENS, salt=b"tenant").num_blocks == 10
    assert one.attention.match(TOKENS, salt=b"tenant", extras=[image]).num_blocks == 2
    assert one.attention.read(TOKENS, [40], start_block=9, salt=b"tenant").why is Reason.WHOLE
    assert one.equal([40], [9])
    salted = identity(salt=b"tenant")
    (first,) = block_keys(TOKENS[:B], parent=salted.root, block_tokens=B)
    frame = memoryview(bytearray(frame_bytes(LAYOUT.plane_bytes)))
    assert one.store.get_into([(page_name(first), frame)], deadline=Deadline.after(5.0)) == [Status.HIT]
    assert bytes(frame[96:112]) == salted.tenant


def test_ranks_have_pages_of_their_own(rig: Callable[..., Rig]) -> None:
    """Two ranks write what they hold of a block under one key; each reads its own back."""
    layout = sample_layouts()["gqa-int8"]
    tokens = list(range(3 * layout.block_tokens))
    with MemoryStore(8 << 20) as store:
        ranks = []
        for rank in range(2):
            (part,) = parts(layout, rank, 2)
            staging = BytesStaging(part.layout, num_slots=8, num_pages=8, seed=rank)
            options = {"layout": part.layout, "shard": part.shard, "part": part_number(part, layout)}
            ranks.append((staging, AttentionStore(store, staging, identity=identity(layout), **options)))  # type: ignore[arg-type]
        assert ranks[0][1].write(tokens, [0, 1, 2]).why is Reason.WHOLE
        assert ranks[1][1].match(tokens).num_blocks == 0
        assert ranks[1][1].write(tokens, [0, 1, 2]).why is Reason.WHOLE
        assert len(store.names()) == 6
        for staging, attention in ranks:
            assert attention.read(tokens, [3, 4, 5]).why is Reason.WHOLE
            assert [staging.block(3 + at) for at in range(3)] == [staging.block(at) for at in range(3)]
            assert attention.close()
        assert ranks[0][0].block(3) != ranks[1][0].block(3)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda a: a.write(TOKENS, range(11)), "40 tokens fill 10 blocks; block 10 is asked about"),
        (lambda a: a.read(TOKENS[:15], [0, 1], start_block=2), "15 tokens fill 3 blocks; block 3 is asked about"),
        (lambda a: a.match(TOKENS, start_block=11), "40 tokens fill 10 blocks; block 10 is asked about"),
        (lambda a: a.match(TOKENS, start_block=-1), "start_block must be a whole number of at least 0, not -1"),
        (lambda a: a.match(TOKENS, start_block=1.0), "start_block must be a whole number of at least 0, not 1.0"),
        (lambda a: a.match(b"tokens"), "tokens must be a sequence"),
        (lambda a: a.flush_index(TOKENS, tier="attic", held=True), "a tier is one of device, host, disk, pool"),
        (lambda a: a.flush_index(TOKENS, tier="device", held=None), "held, or they are not: None is neither"),
        (lambda a: a.flush_index(TOKENS, tier="device", held=True, num_blocks=-1), "num_blocks must be"),
        (lambda a: a.flush_index(TOKENS, tier="device", held=True, num_blocks=11), "block 10 is asked about"),
    ],
)
def test_what_cannot_be_asked(rig: Callable[..., Rig], ask: Callable[[AttentionStore], Any], words: str) -> None:
    one = rig()
    with pytest.raises(InvalidInput, match=words):
        ask(one.attention)
    assert one.ear.moves == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"identity": identity(block_tokens=8)}, "the identity's blocks have 8 tokens, not 4"),
        ({"identity": identity(layout=sample_layouts()["mla-bf16"], block_tokens=4)}, "not the identity's"),
        ({"store": None}, "needs a store and staging, unless it is index-only"),
        ({"staging": None}, "needs a store and staging"),
        ({"index_only": True}, "leave the store out, or the mode"),
        ({"index_only": True, "store": None, "residency": None}, "without a residency index there is nothing to do"),
        ({"match_timeout_s": 0}, "match_timeout_s must be a positive number of seconds, not 0"),
    ],
)
def test_what_makes_no_sense_is_refused_at_start(options: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {
        "store": MemoryStore(1 << 20),
        "staging": BytesStaging(LAYOUT, num_slots=1, num_pages=1),
        "identity": identity(),
        "layout": LAYOUT,
        "residency": Ear(),
        **options,
    }
    with pytest.raises(InvalidInput, match=words):
        AttentionStore(given.pop("store"), given.pop("staging"), **given)


def test_after_the_end_nothing_is_asked(rig: Callable[..., Rig]) -> None:
    one = rig()
    with one.attention:
        pass
    for ask in (lambda: one.attention.match(TOKENS), lambda: one.attention.flush_index([], tier="pool", held=True)):
        with pytest.raises(ResourceClosed):
            ask()


# --- the index --------------------------------------------------------------------------------------------------------


def test_a_flush_of_deep_blocks_carries_the_whole_path(rig: Callable[..., Rig]) -> None:
    one = rig()
    keys = block_keys(TOKENS, parent=identity().root, block_tokens=B)
    assert one.attention.flush_index(TOKENS, tier="device", held=True) == 10
    assert one.attention.flush_index(TOKENS, tier="device", held=False, start_block=7) == 3
    assert one.attention.flush_index(TOKENS, tier="host", held=True, start_block=3, num_blocks=2) == 2
    assert one.attention.flush_index(TOKENS[:3], tier="host", held=True) == 0  # no full block
    assert one.attention.flush_index(TOKENS, tier="host", held=True, num_blocks=0) == 0
    assert one.ear.moves == [
        Stored(tier="device", keys=tuple(keys), parent=identity().root, depth=0),
        Removed(tier="device", keys=tuple(keys[7:])),
        Stored(tier="host", keys=tuple(keys[3:5]), parent=keys[2], depth=3),
    ]


def test_only_what_is_durable_or_verified_is_told(rig: Callable[..., Rig]) -> None:
    hanging = HangingStore(MemoryStore(8 << 20))
    one = rig(hanging)
    keys = block_keys(TOKENS, parent=identity().root, block_tokens=B)
    assert one.attention.write(TOKENS[: 5 * B], range(5)).why is Reason.WHOLE
    assert one.attention.read(TOKENS, range(32, 40), start_block=2).num_blocks == 3
    hanging.dead = True
    assert one.attention.read(TOKENS, range(40, 44)).num_blocks == 0
    assert one.attention.write(TOKENS, range(5, 10), start_block=5).num_blocks == 0
    assert one.ear.moves == [
        Stored(tier="pool", keys=tuple(keys[:5]), parent=identity().root, depth=0),
        Stored(tier="pool", keys=tuple(keys[2:5]), parent=keys[1], depth=2),
    ]


def test_the_cluster_finds_what_was_flushed() -> None:
    """With the real publisher and index: what a lookup says is what was told, block by block."""
    index = MemoryResidency()
    config = ResidencyConfig(url="memory:", node="here", linger_s=0.0)
    with Publisher(index, config) as publisher:
        store = AttentionStore(None, None, identity=identity(), layout=LAYOUT, residency=publisher, index_only=True)
        keys = block_keys(TOKENS, parent=identity().root, block_tokens=B)
        store.flush_index(TOKENS, tier="device", held=True)
        store.flush_index(TOKENS, tier="host", held=True, num_blocks=4)
        store.flush_index(TOKENS, tier="device", held=False, start_block=6)
        assert publisher.drain(PATIENCE_S)
        (holder,) = index.lookup(keys, deadline=Deadline.after(5.0)).holders
        assert holder == Holder("here", 6, device=6, host=4, disk=0, pool=0)
        assert store.close()


def test_index_only_moves_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    ear = Ear()
    staging = BytesStaging(LAYOUT, num_slots=4, num_pages=4)
    with AttentionStore(None, staging, identity=identity(), layout=LAYOUT, residency=ear, index_only=True) as store:
        assert store.index_only
        for reached in (store.match(TOKENS), store.read(TOKENS, [0, 1]), store.write(TOKENS, [0, 1])):
            assert (reached.num_blocks, reached.why) == (0, Reason.INDEX_ONLY)
        assert (staging.gathered, staging.scattered, staging.touched) == ([], [], [])
        assert ear.moves == []
        assert store.flush_index(TOKENS, tier="device", held=True) == 10
        assert len(ear.moves) == 1
    assert caplog.records == []


def test_without_an_index_there_is_nobody_to_tell(rig: Callable[..., Rig]) -> None:
    one = rig(residency=None)
    assert one.attention.write(TOKENS, range(10)).why is Reason.WHOLE
    with pytest.raises(InvalidConfig, match="no residency index"):
        one.attention.flush_index(TOKENS, tier="device", held=True)


# --- a store in trouble -----------------------------------------------------------------------------------------------


def test_a_store_that_hangs_costs_each_call_its_deadline(rig: Callable[..., Rig]) -> None:
    hanging = HangingStore(MemoryStore(8 << 20))
    one = rig(hanging, config=WriteConfig(slice_blocks=3, slice_timeout_s=0.15), match_timeout_s=0.1)
    assert one.attention.write(TOKENS, range(10)).why is Reason.WHOLE
    hanging.hang()
    asks: list[tuple[float, Callable[[], Reached], Reason]] = [
        (0.1, lambda: one.attention.match(TOKENS), Reason.TOTAL_TIMEOUT),
        (0.15, lambda: one.attention.read(TOKENS, range(32, 42)), Reason.SLICE_TIMEOUT),
        (0.05, lambda: one.attention.write(TOKENS, range(10), timeout_s=0.05), Reason.TOTAL_TIMEOUT),
        (0.0, lambda: one.attention.read(TOKENS, range(32, 42)), Reason.DOWN),  # three in a row: left alone
        (0.0, lambda: one.attention.match(TOKENS), Reason.DOWN),
    ]
    for limit_s, ask, why in asks:
        until_s = time.monotonic() + limit_s + SLACK_S
        found = ask()
        assert (found.num_blocks, found.why) == (0, why)
        assert time.monotonic() <= until_s
    assert one.equal(range(64), range(64))
    hanging.release()
    wait_until(lambda: one.attention.num_held_pages == 0)
    assert one.equal(range(64), range(64))  # late bytes reach no slot


@pytest.mark.parametrize("call", ["read", "write"])
def test_a_copy_that_hangs_costs_a_call_its_deadline_and_keeps_its_slots(rig: Callable[..., Rig], call: str) -> None:
    """The second slice's copy hangs: the call says so in time, and nobody gets those slots before it has ended."""
    one = rig()
    there = TOKENS[: 6 * B]
    assert one.attention.write(there, range(6)).why is Reason.WHOLE
    gate = Gate()
    slots = list(range(40, 46)) if call == "read" else list(range(6))
    hook = "on_scatter" if call == "read" else "on_gather"
    setattr(one.staging, hook, lambda slot, page: gate() if slot == slots[4] else None)
    gate.shut()
    said: list[Reached] = []
    asked = there if call == "read" else there[::-1]
    ask = getattr(one.attention, call)
    thread = threading.Thread(target=lambda: said.append(ask(asked, slots, timeout_s=0.5)), daemon=True)
    thread.start()
    gate.wait_for_arrival()
    thread.join(PATIENCE_S / 2)
    hung = thread.is_alive()
    lent = frozenset() if hung else one.attention.lent_slots
    if not hung:
        with pytest.raises(InvalidInput, match="a copy that hangs"):
            one.attention.read(there[:B], slots[5:])
        assert one.attention.close(0.1) is False, "staging must stay as long as the copy goes on"
    gate.open()
    thread.join(PATIENCE_S)
    assert not hung, "the call did not return by its deadline"
    assert (said[0].num_blocks, said[0].why) == (3, Reason.STUCK)
    assert lent == set(slots[3:])
    wait_until(lambda: not one.attention.lent_slots)
    if call == "read":
        assert one.equal(slots[:3], range(3))
    else:
        assert len(one.ear.moves) == 2, "what was written late was told as being there"
        assert len(one.ear.moves[1].keys) == 3


def test_a_dead_store_costs_a_request_one_probe_and_then_all_is_well(
    rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    hanging = HangingStore(MemoryStore(8 << 20, clock=clock))
    one = rig(hanging, clock=clock, breaker_failures=3, breaker_pause_s=1.0)

    def request() -> list[tuple[int, Reason]]:
        found = [
            one.attention.match(TOKENS),
            one.attention.read(TOKENS, range(32, 42)),
            one.attention.write(TOKENS, range(10)),
        ]
        return [(reached.num_blocks, reached.why) for reached in found]

    assert one.attention.write(TOKENS, range(10)).why is Reason.WHOLE
    assert request() == [(10, Reason.WHOLE)] * 3
    hanging.dead = True
    assert request() == [(0, Reason.FAILED)] * 3
    pause_s = 1.0
    for _ in range(4):
        before = hanging.num_asked()
        assert request() == [(0, Reason.DOWN)] * 3
        assert hanging.num_asked() == before
        clock.advance(pause_s)
        assert request() == [(0, Reason.FAILED), (0, Reason.DOWN), (0, Reason.DOWN)]
        assert hanging.num_asked() == before + 1
        pause_s *= 2
    hanging.dead = False
    clock.advance(pause_s)
    caplog.clear()
    for _ in range(3):
        assert request() == [(10, Reason.WHOLE)] * 3
    assert caplog.records == []  # at the level of warnings: whole writes say nothing
    assert one.equal(range(32, 42), range(10))


def test_a_real_server_that_stops_and_goes_on(rig: Callable[..., Rig], tmp_path: Path) -> None:
    """SIGSTOP to a redis-server: calls end by their deadlines, then it is left alone; SIGCONT: all is well again."""
    server = Server(tmp_path)
    server.start()
    try:
        one = rig(
            RedisStore(server.url),
            config=WriteConfig(slice_blocks=3, slice_timeout_s=0.3, total_timeout_s=5.0),
            match_timeout_s=0.2,
            breaker_pause_s=0.2,
            breaker_max_pause_s=0.2,
        )
        assert one.attention.write(TOKENS, range(10)) == Reached(10, Reason.WHOLE)
        assert one.attention.read(TOKENS, range(32, 42)) == Reached(10, Reason.WHOLE)
        server.signal(signal.SIGSTOP)
        ends = []
        asks: list[Callable[[], Reached]] = [
            lambda: one.attention.match(TOKENS),
            lambda: one.attention.read(TOKENS, range(42, 52)),
            lambda: one.attention.write([7, *TOKENS[1:]], range(10)),
        ]
        for _ in range(3):
            for ask in asks:
                until_s = time.monotonic() + 0.3 + SLACK_S
                ends.append(ask())
                assert time.monotonic() <= until_s
        assert {reached.num_blocks for reached in ends} == {0}
        assert Reason.DOWN in {reached.why for reached in ends}
        server.signal(signal.SIGCONT)
        wait_until(lambda: one.attention.read(TOKENS, range(42, 52)).why is Reason.WHOLE)
        assert one.equal(range(32, 52), [*range(10), *range(10)])
        assert one.attention.write([7, *TOKENS[1:]], range(10)).why is Reason.WHOLE
        assert one.attention.match([7, *TOKENS[1:]]).num_blocks == 10
        one.store.close()
    finally:
        server.kill()


def test_one_warning_per_write_or_read_that_is_not_whole(
    rig: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    one = rig()
    with caplog.at_level(logging.DEBUG, logger="headwater"):
        one.attention.write(TOKENS, range(4))
        one.attention.match(TOKENS)
        one.attention.read(TOKENS, range(32, 42))
        one.attention.write(TOKENS, range(6, 10), start_block=6)
    levels = [(record.levelname, record.message.split(" of ")[0]) for record in caplog.records]
    assert levels == [("DEBUG", "write"), ("WARNING", "read"), ("WARNING", "write")]


def test_many_requests_at_once(rig: Callable[..., Rig]) -> None:
    one = rig(num_pages=9)
    wrong: list[object] = []

    def work(number: int) -> None:
        tokens = [number, *TOKENS[1:]]
        for _ in range(10):
            written = one.attention.write(tokens, range(number * 4, number * 4 + 4))
            found = one.attention.match(tokens[: 4 * B])
            read = one.attention.read(tokens, range(32 + number * 4, 36 + number * 4))
            if [reached.num_blocks for reached in (written, found, read)] != [4, 4, 4]:
                wrong.append((number, written, found, read))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert one.equal(range(32, 56), range(24))


# --- configuration ----------------------------------------------------------------------------------------------------

OURS = ("HEADWATER_WRITE_SLICE_BLOCKS", "HEADWATER_WRITE_SLICE_TIMEOUT_S", "HEADWATER_WRITE_TOTAL_TIMEOUT_S")
ALIASES = ("AS_WRITE_SLICE_BLOCK_NUM", "AS_WRITE_SLICE_TIMEOUT", "AS_WRITE_TOTAL_TIMEOUT")


def test_slices_by_default_by_the_environment_and_by_option(caplog: pytest.LogCaptureFixture) -> None:
    assert write_config({}) == WriteConfig(slice_blocks=500, slice_timeout_s=10.0, total_timeout_s=30.0)
    expected = WriteConfig(slice_blocks=7, slice_timeout_s=0.5, total_timeout_s=20.0)
    for names in (OURS, ALIASES):
        environ = dict(zip(names, ("7", "0.5", "2e1"), strict=True))
        assert write_config(environ) == expected
        assert write_config(environ, slice_blocks=9, total_timeout_s=1) == WriteConfig(
            slice_blocks=9, slice_timeout_s=0.5, total_timeout_s=1
        )
    assert write_config(dict.fromkeys((*OURS, *ALIASES), "")) == WriteConfig()
    both = dict(zip((*OURS, *ALIASES), ("7", "0.5", "20", "7", "0.5", "20"), strict=True))
    assert write_config(both) == expected
    assert caplog.records == []
    assert write_config({**both, ALIASES[0]: "100"}) == expected  # ours win, and it is said
    assert [record.message for record in caplog.records] == [f"{OURS[0]}=7 counts, and {ALIASES[0]}=100 does not"]


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "-inf", "many", "0.0", "1_0", "0x10", "1e999", "."])
def test_nonsense_is_refused_with_the_variable_s_name(text: str) -> None:
    for name in (*OURS, *ALIASES):
        with pytest.raises(InvalidConfig, match=f"^{name} must be a positive .*, not {text!r}$"):
            write_config({name: text})


@pytest.mark.parametrize("text", ["1.5", "1e3", "9" * 30])
def test_blocks_are_whole(text: str) -> None:
    with pytest.raises(InvalidConfig, match="HEADWATER_WRITE_SLICE_BLOCKS must be a positive whole number"):
        write_config({OURS[0]: text})


@pytest.mark.parametrize(
    "options",
    [{"slice_blocks": 0}, {"slice_blocks": 1.5}, {"slice_timeout_s": 0}, {"total_timeout_s": float("nan")}],
)
def test_options_that_cannot_work(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(options))):
        WriteConfig(**options)
    with pytest.raises(InvalidConfig, match=next(iter(options))):
        write_config({}, **options)


def test_the_environment_is_read_once_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = BytesStaging(LAYOUT, num_slots=16, num_pages=64)
    with MemoryStore(8 << 20) as inner:
        store = HangingStore(inner)
        monkeypatch.setenv(ALIASES[0], "2")
        with AttentionStore(store, staging, identity=identity(), layout=LAYOUT) as attention:
            monkeypatch.setenv(ALIASES[0], "nonsense")
            assert attention.write(TOKENS, range(5)).why is Reason.WHOLE
            assert [len(names) for call, names in store.asked if call == "put"] == [2, 2, 1]
        with pytest.raises(InvalidConfig, match=ALIASES[0]):
            AttentionStore(store, staging, identity=identity(), layout=LAYOUT)


def test_a_salt_is_a_tenant_s(rig: Callable[..., Rig]) -> None:
    """A store made for a tenant, and one told the tenant with each call, are one."""
    one = rig()
    salted = AttentionStore(one.store, one.staging, identity=replace(identity(), salt=b"t"), layout=LAYOUT)
    assert salted.write(TOKENS, range(3)).why is Reason.WHOLE
    assert one.attention.match(TOKENS, salt=b"t").num_blocks == 3
    assert salted.match(TOKENS, salt=b"").num_blocks == 0
    assert salted.close()
