"""From prefill's slots to decode's through a pool: every byte, or an honest word by the deadline."""

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.build import open_local, open_rank
from headwater.config.stores import LocalStoreConfig
from headwater.config.writes import WriteConfig
from headwater.core.errors import InvalidConfig, InvalidInput
from headwater.core.events import Move, Removed, Stored, StoreOff, TierLost
from headwater.core.identity import CacheIdentity
from headwater.core.page import PageName
from headwater.core.results import Reason, Status
from headwater.disagg.handoff import TAIL_GRACE_S, PoolReceiver, PoolSender
from headwater.disagg.machine import Tries
from headwater.disagg.outcome import Fetched, Missing, Sent, Unsent
from headwater.disagg.protocol import FirstToken, FirstTokenFinish, SamplerState, Tail, Ticket, decode
from headwater.lab.campaigns.hanging import HangingStore
from headwater.layout.frame import Header, frame_bytes, parse, seal, write_header
from headwater.layout.reshard import part_number
from headwater.layout.shard import parts
from headwater.layout.spec import KVLayout, opaque_layout
from headwater.metrics import Metrics
from headwater.storage.base import SYSTEM_CLOCK, Clock, Deadline, Store
from headwater.storage.memory import MemoryStore
from headwater.storage.redis import RedisStore
from headwater.storage.wrappers import OpaqueStore, WrapperStore
from headwater.testing.clock import FakeClock
from headwater.testing.device import BytesStaging
from headwater.testing.faulty_stores import DelayStore, Faults, FaultyStore
from headwater.testing.layouts import randomise
from headwater.testing.samples import sample_layouts
from headwater.transfer.device.arena import create_host_cache, create_kv_cache
from headwater.transfer.executor.caller import Caller
from headwater.transfer.executor.staging import Staging, TorchStaging
from headwater.transfer.executor.tier import BAD_PAGES, Naming
from headwater.transfer.executor.worker import Worker
from headwater.transfer.ranks.group import Ranks
from machines.ranks import cut, small_layouts
from test_redis import Server
from worker_kit import PATIENCE_S, Gate, wait_until

SLACK_S = 0.5
LAYOUT = small_layouts()["fp8 with scales"]
B = LAYOUT.block_tokens
FIRST = FirstToken(token=7)
SAMPLER = SamplerState(seed=1, position=2)


def identity(layout: KVLayout = LAYOUT, **fields: Any) -> CacheIdentity:
    digests = {name: hashlib.sha256(name.encode()).digest() for name in ("weights", "config")}
    named = {"model": "test", "layout": layout.fingerprint, "block_tokens": layout.block_tokens, **digests}
    return CacheIdentity(**{**named, **fields})


def tokens(number: int, seed: int = 0) -> list[int]:
    return [(31 * at + seed) % 5000 for at in range(number)]


def cut_off(layout: KVLayout, block: bytes, valid_tokens: int) -> bytes:
    """A block whose positions behind the valid ones are zero: by shapes alone, plane by plane."""
    found = b""
    for plane, offset in zip(layout.planes, layout.offsets, strict=True):
        assert plane.token_axis is not None
        shape = (*plane.shape, plane.dtype.itemsize)
        data = np.frombuffer(block, np.uint8)[offset : offset + plane.num_bytes].reshape(shape).copy()
        np.moveaxis(data, plane.token_axis, 0)[valid_tokens:] = 0
        found += data.tobytes()
    return found


def send(sender: PoolSender, *args: Any, **options: Any) -> Sent | Unsent:
    """Send, and wait for what comes of it."""
    found: queue.Queue[Sent | Unsent] = queue.Queue()
    sender.begin_send(*args, done=found.put, **options)
    return found.get(timeout=4 * PATIENCE_S)


def fetch(receiver: PoolReceiver, *args: Any, **options: Any) -> Fetched | Missing:
    """Fetch, and wait for what comes of it."""
    found: queue.Queue[Fetched | Missing] = queue.Queue()
    receiver.begin_fetch(*args, done=found.put, **options)
    return found.get(timeout=4 * PATIENCE_S)


class End:
    """The executor of one end, and who calls it."""

    def __init__(self, store: Store, staging: Staging, naming: Naming, **options: Any) -> None:
        self.worker = Worker(
            {"pool": store},
            staging,
            layout=naming.layout,
            identity=naming.identity,
            block_tokens=naming.layout.block_tokens,
            slice_pages=max(1, staging.num_pages // 4),
            threads_per_store=4,
            **options,
        )
        self.caller = Caller(self.worker, ["pool"], identity=naming.identity, **options)
        self.worker.deliver = self.caller.deliver

    def close(self) -> None:
        assert self.worker.close(PATIENCE_S)
        assert self.worker.num_held_pages == 0, "pages were not given back"


class Ear:
    """Hears moves."""

    def __init__(self) -> None:
        self.moves: list[Stored | Removed] = []

    def offer(self, moves: Iterable[Move]) -> None:
        for move in moves:
            assert not isinstance(move, TierLost), "no tier is lost here"
            self.moves.append(move)


class Ends:
    """A prefill end and a decode end on devices in numpy, and a pool between them."""

    def __init__(
        self,
        store: Store,
        layout: KVLayout = LAYOUT,
        *,
        clock: Clock = SYSTEM_CLOCK,
        num_pages: int = 16,
        num_slots: int = 40,
        receiver: dict[str, Any] | None = None,
        **tries: Any,
    ) -> None:
        self.store = store
        self.layout = layout
        self.identity = identity(layout)
        self.metrics = Metrics()
        self.here = BytesStaging(layout, num_slots=num_slots, num_pages=num_pages, seed=1)
        self.there = BytesStaging(layout, num_slots=num_slots, num_pages=num_pages, seed=2)
        self.original = self.there.device.copy()
        self.ears = Ear(), Ear()
        naming = Naming(identity=self.identity.digest, layout=layout)
        options: dict[str, Any] = {"clock": clock, "metrics": self.metrics}
        self.ends = [End(store, staging, naming, **options) for staging in (self.here, self.there)]
        how = Tries(slices=WriteConfig(slice_blocks=3), **tries)
        ends: dict[str, Any] = {"identity": self.identity, "layout": layout, "pool": "local", "clock": clock}
        self.sender = PoolSender(self.ends[0].caller, **ends, tries=how, residency=self.ears[0])
        more = {"tries": how, "residency": self.ears[1], **(receiver or {})}
        self.receiver = PoolReceiver(self.ends[1].caller, **ends, **more)
        self.naming = naming

    def send(self, num_tokens: int, *, seed: int = 0, timeout_s: float = 20.0, **options: Any) -> Sent | Unsent:
        """Send a prompt from the slots of the same numbers."""
        given = {"first": FIRST, "sampler": SAMPLER, **options}
        slots = range(-(-num_tokens // self.layout.block_tokens))
        return send(self.sender, "r", tokens(num_tokens, seed), slots, deadline=Deadline.after(timeout_s), **given)

    def ticket(self, num_tokens: int, **options: Any) -> Ticket:
        sent = self.send(num_tokens, **options)
        assert isinstance(sent, Sent), sent
        return decode(sent.ticket.encode())

    def fetch(self, ticket: Ticket, *, at: int = 0, timeout_s: float = 20.0, **options: Any) -> Fetched | Missing:
        """Fetch into slots from `at` on."""
        first = at + options.get("start_block", 0)
        slots = range(first, at + ticket.num_blocks)
        return fetch(self.receiver, ticket, slots, deadline=Deadline.after(timeout_s), **options)

    def arrived(self, ticket: Ticket, num_blocks: int | None = None, *, at: int = 0, start: int = 0) -> bool:
        """Whether exactly the first blocks of a prompt are there, and all other slots are as they were."""
        expected = self.original.copy()
        for block in range(start, ticket.num_blocks if num_blocks is None else num_blocks):
            data = self.here.block(block)
            if block == len(ticket.keys):
                assert ticket.tail is not None
                data = cut_off(self.layout, data, ticket.tail.valid_tokens)
            expected[at + block] = np.frombuffer(data, np.uint8)
        return bool((self.there.device == expected).all())

    def name(self, ticket: Ticket, block: int) -> PageName:
        return self.naming.name((*ticket.keys, *([ticket.tail.key] if ticket.tail else []))[block])

    def frame(self, ticket: Ticket, block: int) -> bytearray:
        frame = bytearray(self.naming.frame_bytes)
        items = [(self.name(ticket, block), memoryview(frame))]
        assert self.store.get_into(items, deadline=Deadline.after(5.0)) == [Status.HIT]
        return frame

    def holds(self, ticket: Ticket, block: int) -> bool:
        return self.store.contains([self.name(ticket, block)], deadline=Deadline.after(5.0)) == [True]

    def finish(self) -> None:
        inner: Store | None = self.store
        while inner is not None:
            if isinstance(inner, HangingStore):
                inner.release()
            inner = inner.store if isinstance(inner, WrapperStore) else None
        for end in self.ends:
            end.close()
        if isinstance(self.store, HangingStore):
            assert self.store.spoiled == []
        self.store.close()

    def __enter__(self) -> "Ends":
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()


@pytest.fixture
def ends() -> Iterator[Callable[..., Ends]]:
    made: list[Ends] = []

    def make(store: Store | None = None, *args: Any, **options: Any) -> Ends:
        made.append(Ends(store if store is not None else MemoryStore(64 << 20), *args, **options))
        return made[-1]

    yield make
    for one in made:
        one.finish()


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
def redis(redis_server: Server) -> Server:
    with redis_server.client() as client:
        client.flushall()
        client.config_set("maxmemory", 0)
    return redis_server


def sizes(block_tokens: int) -> list[int]:
    return [1, block_tokens - 1, block_tokens, block_tokens + 1, 5 * block_tokens + block_tokens // 2]


# --- bytes ------------------------------------------------------------------------------------------------------------

LAYOUTS = list(sample_layouts())


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for at, name in enumerate(LAYOUTS) for kind in ("memory", "mapped" if at % 2 else "disk")],
)
def test_what_was_sent_is_fetched_bit_by_bit(
    name: str, kind: str, shm: Path, tmp_path: Path, ends: Callable[..., Ends]
) -> None:
    layout = sample_layouts()[name]
    config = LocalStoreConfig(directory=(shm if kind == "mapped" else tmp_path) / "store", limit_bytes=64 << 20)
    one = ends(MemoryStore(64 << 20) if kind == "memory" else open_local(config), layout, num_slots=12)
    for seed, num_tokens in enumerate(sizes(layout.block_tokens)):
        one.there.device[:] = one.original
        ticket = one.ticket(num_tokens, seed=seed)
        assert ticket.num_blocks == -(-num_tokens // layout.block_tokens)
        fetched = one.fetch(ticket, at=5)
        assert isinstance(fetched, Fetched), fetched
        num_bytes = ticket.num_blocks * one.naming.frame_bytes
        assert (fetched.num_blocks, fetched.num_bytes, fetched.num_tries) == (ticket.num_blocks, num_bytes, 1)
        assert one.arrived(ticket, at=5)


@pytest.mark.parametrize("name", ["gqa-bf16", "gqa-fp8-scales", "mla-bf16", "dsa"])
def test_through_a_redis_server(name: str, redis: Server, ends: Callable[..., Ends]) -> None:
    layout = sample_layouts()[name]
    one = ends(RedisStore(redis.url), layout, num_slots=6)
    for seed, num_tokens in enumerate(sizes(layout.block_tokens)):
        one.there.device[:] = one.original
        ticket = one.ticket(num_tokens, seed=seed)
        assert isinstance(one.fetch(ticket), Fetched)
        assert one.arrived(ticket)


@pytest.mark.parametrize("kind", ["memory", "mapped"])
@pytest.mark.parametrize("name", ["gqa-fp8-scales", "mixed-gqa-mla", "odd"])
def test_from_tensors_to_tensors(name: str, kind: str, shm: Path) -> None:
    """Also where full blocks are copied in place, and the tail through a page."""
    layout = sample_layouts()[name]
    who = identity(layout)
    num_tokens = 4 * layout.block_tokens + 3
    with ExitStack() as stack:
        mapped = LocalStoreConfig(directory=shm / "store", limit_bytes=64 << 20)
        store: Store = stack.enter_context(MemoryStore(64 << 20) if kind == "memory" else open_local(mapped))
        devices, ends = [], []
        for seed in (1, 2):
            devices.append(stack.enter_context(create_kv_cache(layout, 12)))
            randomise(devices[-1], seed)
            pages = stack.enter_context(create_host_cache(frame_bytes(layout.plane_bytes), num_pages=8))
            staging = stack.enter_context(TorchStaging(devices[-1], pages))
            ends.append(End(store, staging, Naming(identity=who.digest, layout=layout)))
            stack.callback(ends[-1].close)
        facts: dict[str, Any] = {"identity": who, "layout": layout, "pool": "local"}
        source, target = [7, 0, 3, 10, 1], [2, 11, 5, 6, 8]
        sender, receiver = PoolSender(ends[0].caller, **facts), PoolReceiver(ends[1].caller, **facts)
        sent = send(
            sender, "r", tokens(num_tokens), source, first=FIRST, sampler=SAMPLER, deadline=Deadline.after(20.0)
        )
        assert isinstance(sent, Sent)
        before = [row.clone() for row in devices[1].rows]
        fetched = fetch(receiver, sent.ticket, target, deadline=Deadline.after(20.0))
        assert isinstance(fetched, Fetched)
        for plane, theirs, ours, old in zip(layout.planes, devices[0].rows, devices[1].rows, before, strict=True):
            old[target] = theirs[source]
            assert plane.token_axis is not None
            shape = (*plane.shape, plane.dtype.itemsize)
            tail = old[target[-1]].view(-1).reshape(shape)
            tail.movedim(plane.token_axis, 0)[3:] = 0
            assert torch.equal(ours, old)


def test_what_an_engine_left_behind_the_last_token_goes_nowhere(ends: Callable[..., Ends]) -> None:
    one = ends()
    ticket = one.ticket(2 * B + 1)
    frame = one.frame(ticket, 2)
    header = parse(memoryview(frame))
    assert isinstance(header, Header)
    assert header.meta.valid_tokens == 1
    assert bytes(frame[header.header_bytes :]) == cut_off(LAYOUT, one.here.block(2), 1)
    assert one.here.block(2) != cut_off(LAYOUT, one.here.block(2), 1)  # it is the page that was zeroed


def test_prefixes_that_are_there_already(ends: Callable[..., Ends]) -> None:
    """What the pool has is not written again; what decode has is not read again."""
    one = ends()
    first = one.send(8 * B)
    again = one.send(8 * B)
    longer = one.send(10 * B + 1)
    assert isinstance(first, Sent)
    assert isinstance(again, Sent)
    assert isinstance(longer, Sent)
    assert [sent.num_bytes // one.naming.frame_bytes for sent in (first, again, longer)] == [8, 0, 3]
    fetched = one.fetch(longer.ticket, start_block=9)
    assert isinstance(fetched, Fetched)
    assert fetched.num_blocks == 2
    assert one.arrived(longer.ticket, start=9)
    assert isinstance(one.fetch(longer.ticket, start_block=10), Fetched)
    nothing = one.fetch(longer.ticket, start_block=11)
    assert isinstance(nothing, Fetched)
    assert (nothing.num_blocks, nothing.num_bytes) == (0, 0)
    for slots, start in ((range(3), 0), (range(11), 1), (range(12), -1)):
        with pytest.raises(InvalidInput, match="11 blocks"):
            fetch(one.receiver, longer.ticket, slots, start_block=start, deadline=Deadline.after(1.0))
    with pytest.raises(InvalidInput, match="slots"):
        send(one.sender, "r", tokens(9), range(2), first=FIRST, sampler=SAMPLER, deadline=Deadline.after(1.0))


def test_tenants_do_not_meet(ends: Callable[..., Ends]) -> None:
    one = ends()
    mine, plain = one.ticket(2 * B + 1, salt=b"tenant"), one.ticket(2 * B + 1)
    assert not set(mine.keys) & set(plain.keys)
    header = parse(memoryview(one.frame(mine, 2)))
    assert isinstance(header, Header)
    assert header.meta.tenant == identity(salt=b"tenant").tenant
    assert isinstance(one.fetch(mine), Fetched)


def test_a_request_that_is_over_touches_no_pool(ends: Callable[..., Ends]) -> None:
    hanging = HangingStore(MemoryStore(8 << 20))
    one = ends(hanging)
    ticket = one.ticket(2 * B + 1, finish=FirstTokenFinish.STOP)
    assert ticket.over
    assert isinstance(one.fetch(ticket), Fetched)
    assert hanging.num_asked() == 0


# --- tails ------------------------------------------------------------------------------------------------------------


def test_a_tail_is_its_tickets_alone(ends: Callable[..., Ends]) -> None:
    """Two prefills of one prompt at once: blocks are shared, tails are not, and what happens to one is its own."""
    one = ends()
    found: list[Ticket] = []
    threads = [threading.Thread(target=lambda: found.append(one.ticket(5 * B + 3))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({ticket.keys for ticket in found}) == 1
    assert len({ticket.tail for ticket in found}) == 4
    one.store.delete([one.name(found[0], 5)], deadline=Deadline.after(5.0))
    gone = one.fetch(found[0])
    assert isinstance(gone, Missing)
    assert (gone.first_block, gone.reason) == (5, Reason.MISSING)
    for ticket in found[1:]:
        one.there.device[:] = one.original
        assert isinstance(one.fetch(ticket), Fetched)
        assert one.arrived(ticket)


def test_the_index_hears_of_full_blocks_only(ends: Callable[..., Ends]) -> None:
    one = ends()
    ticket = one.ticket(3 * B + 2)
    came = Stored(tier="pool", keys=ticket.keys, parent=ticket.root, depth=0)
    assert one.ears[0].moves == [came]
    assert isinstance(one.fetch(ticket, start_block=1), Fetched)
    assert one.ears[1].moves == [replace(came, keys=ticket.keys[1:], parent=ticket.keys[0], depth=1)]
    for ear in one.ears:
        ear.moves.clear()
    assert isinstance(one.fetch(one.ticket(2)), Fetched)
    assert one.ears[0].moves == one.ears[1].moves == []


def test_a_tail_expires_and_not_before_its_ticket(ends: Callable[..., Ends]) -> None:
    clock = FakeClock()
    one = ends(MemoryStore(8 << 20, clock=clock), clock=clock)
    ticket = one.ticket(2 * B + 3)
    header = parse(memoryview(one.frame(ticket, 2)))
    assert isinstance(header, Header)
    assert header.meta.expires_at_ms == ticket.expires_at_ms + TAIL_GRACE_S * 1000
    full = parse(memoryview(one.frame(ticket, 1)))
    assert isinstance(full, Header)
    assert full.meta.expires_at_ms == 0
    clock.advance(ticket.expires_at_ms / 1000 - clock.time() - 0.001)
    assert isinstance(one.fetch(ticket), Fetched)
    clock.advance(0.002)
    refused = one.fetch(ticket)
    assert isinstance(refused, Missing)
    assert (refused.first_block, refused.reason) == (0, Reason.REFUSED)
    assert "expired 0.0 s ago" in refused.detail
    prolonged = replace(ticket, expires_at_ms=ticket.expires_at_ms + 10**6)
    clock.advance(5.0)
    assert isinstance(one.fetch(prolonged), Fetched)  # who began in time finishes
    clock.advance(TAIL_GRACE_S)
    kept = one.fetch(prolonged)
    assert isinstance(kept, Missing)
    assert (kept.first_block, kept.reason, kept.num_tries) == (2, Reason.EXPIRED, 1)


@pytest.mark.parametrize("lie", ["other length", "dirty rest"])
def test_a_tail_that_breaks_the_rules_is_not_used(lie: str, ends: Callable[..., Ends]) -> None:
    """Sealed as it should be, every digest right: but not zero behind its tokens, or of another number of them."""
    one = ends()
    ticket = one.ticket(2 * B + 3)
    frame = one.frame(ticket, 2)
    header = parse(memoryview(frame))
    assert isinstance(header, Header)
    meta = header.meta
    if lie == "other length":
        seal(memoryview(frame), replace(meta, valid_tokens=2), LAYOUT, now_ms=1)
    else:
        frame[-1] = 1  # the last byte of the last plane belongs to the last position
        seal(memoryview(frame), replace(meta, valid_tokens=B), LAYOUT, now_ms=1)
        seen = parse(memoryview(frame))
        assert isinstance(seen, Header)
        write_header(memoryview(frame), meta, seen.plane_bytes, seen.digests, now_ms=1)
    soon = Deadline.after(5.0)
    one.store.delete([meta.name], deadline=soon)
    assert one.store.put([(meta.name, memoryview(frame))], deadline=soon) == [Status.STORED]
    missing = one.fetch(ticket)
    assert isinstance(missing, Missing)
    assert (missing.first_block, missing.reason) == (2, Reason.FOREIGN)
    assert one.arrived(ticket, 2)
    assert not one.holds(ticket, 2)
    assert one.metrics.value("bad_pages_total", fault="foreign") == 1


def test_blocks_that_cannot_be_cut_have_no_handoff() -> None:
    layout = opaque_layout((64, 32), B)
    staging = BytesStaging(layout, num_slots=2, num_pages=2)
    who = identity(layout)
    with MemoryStore(1 << 20) as store:
        end = End(store, staging, Naming(identity=who.digest, layout=layout))
        for kind in (PoolSender, PoolReceiver):
            words = r"plane key\.0 does not say which axis .* give its Plane a token_axis"
            with pytest.raises(InvalidConfig, match=words):
                kind(end.caller, identity=who, layout=layout, pool="local")
        end.close()


# --- an object is missing, cut, damaged, of another request -----------------------------------------------------------

KINDS = {
    "missing": Reason.MISSING,
    "cut": Reason.DAMAGED,
    "flipped": Reason.DAMAGED,
    "another's": Reason.FOREIGN,
    "newer": Reason.UNKNOWN_VERSION,
}


def spoil(kind: str, frame: bytearray, other: bytearray) -> bytes | None:
    if kind == "missing":
        return None
    if kind == "cut":
        return bytes(frame[:-5])
    if kind == "another's":
        return bytes(other)
    frame[4 if kind == "newer" else -1] ^= 0xFF
    return bytes(frame)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_wrong_at_rest_is_missing(kind: str, redis: Server, ends: Callable[..., Ends]) -> None:
    """In a real server, at every block: the first bad one is named, what is before it is there, the rest untouched."""
    one = ends(RedisStore(redis.url))
    other = one.ticket(5 * B + 2, seed=9)
    with redis.client() as client:
        for block in (0, 1, 3, 4, 5):
            ticket = one.ticket(5 * B + 2)
            one.there.device[:] = one.original
            name = b"headwater:" + one.name(ticket, block)
            value = spoil(kind, one.frame(ticket, block), one.frame(other, block))
            client.delete(name) if value is None else client.set(name, value)
            missing = one.fetch(ticket, at=3)
            assert isinstance(missing, Missing)
            assert (missing.first_block, missing.reason) == (block, KINDS[kind]), (block, missing)
            assert missing.num_tries == (1 if kind == "newer" else 3)
            assert one.arrived(ticket, block, at=3)
            assert client.exists(name) == (kind == "newer")  # bad ones are removed by force, but a newer one's is not
            if kind == "newer":
                client.delete(name)
            again = one.ticket(5 * B + 2)  # computed anew, from where it broke off
            assert isinstance(one.fetch(again, at=3), Fetched)
            assert one.arrived(again, at=3)


class Forgetful(OpaqueStore):
    """Has nothing, the first few times."""

    def __init__(self, store: Store, times: int) -> None:
        super().__init__(store)
        self.times = times
        self.num_asked = 0

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        self.num_asked += 1
        if self.num_asked <= self.times:
            return [Status.MISS] * len(pages)
        return super().get_into(pages, deadline=deadline)


def test_what_is_missing_is_asked_for_again_a_few_times(ends: Callable[..., Ends]) -> None:
    store = Forgetful(MemoryStore(8 << 20), 2)
    one = ends(store, num_tries=3)
    ticket = one.ticket(2 * B + 2)
    fetched = one.fetch(ticket)
    assert isinstance(fetched, Fetched)
    assert fetched.num_tries == 3
    assert one.arrived(ticket)
    store.num_asked, store.times = 0, 1000
    missing = one.fetch(ticket)
    assert isinstance(missing, Missing)
    assert (missing.num_tries, store.num_asked) == (3, 3)


@settings(max_examples=40)
@given(
    st.integers(1, 40),
    st.integers(0, 1000),
    st.sampled_from(["get_fails", "get_misses", "flips_byte", "cuts_tail", "swaps_page", "contains_lies", "put_fails"]),
    st.sampled_from([0.02, 0.2, 1.0]),
)
def test_whatever_a_pool_does_only_right_bytes_arrive(num_tokens: int, seed: int, fault: str, rate: float) -> None:
    faulty = FaultyStore(MemoryStore(8 << 20), Faults(), seed=seed)
    with Ends(faulty, pause_s=0.0) as one:
        if fault in ("put_fails", "contains_lies"):
            faulty.faults = Faults(**{fault: rate})
        sent = one.send(num_tokens)
        if isinstance(sent, Unsent):
            assert fault in ("put_fails", "contains_lies")
            assert sent.num_blocks <= -(-num_tokens // B)
            return
        faulty.faults = Faults(**{fault: rate})
        got = one.fetch(sent.ticket)
        if isinstance(got, Fetched):
            assert one.arrived(sent.ticket)
        else:
            assert got.first_block < sent.ticket.num_blocks
            assert one.arrived(sent.ticket, got.first_block)


# --- a ticket for somebody else ---------------------------------------------------------------------------------------


def test_a_ticket_of_another_identity_is_refused(ends: Callable[..., Ends]) -> None:
    hanging = HangingStore(MemoryStore(8 << 20))
    one = ends(hanging)
    ticket = one.ticket(2 * B + 2)
    asked = hanging.num_asked()
    for other, words in (
        (replace(ticket, identity=bytes(32)), "same weights, configuration, adapter and quantisation"),
        (replace(ticket, layout=bytes(32)), "same model and the same KV dtype"),
        (replace(ticket, pool="redis"), "give both ends the same pool"),
        (replace(ticket, tp_size=2), "give it a view of other sizes, or start both ends with the same tensor-parallel"),
    ):
        missing = one.fetch(other)
        assert isinstance(missing, Missing)
        assert (missing.first_block, missing.reason, missing.num_tries) == (0, Reason.REFUSED, 0)
        assert words in missing.detail
        assert one.receiver.refusal(other) == missing.detail
    larger = replace(ticket, block_tokens=2 * B, keys=ticket.keys[:1], tail=Tail(ticket.keys[1], 2))
    refused = one.fetch(larger)
    assert isinstance(refused, Missing)
    assert "start prefill and decode with the same block size" in refused.detail
    assert hanging.num_asked() == asked
    assert one.arrived(ticket, 0)


def test_what_makes_no_sense_is_refused_at_start(ends: Callable[..., Ends]) -> None:
    one = ends()
    given: dict[str, Any] = {"identity": one.identity, "layout": LAYOUT, "pool": "local"}
    for end in (PoolSender, PoolReceiver):
        with pytest.raises(InvalidConfig, match="needs a pool: say which"):
            end(None, **given)
        with pytest.raises(InvalidConfig, match="not the identity's"):
            end(one.ends[0].caller, **{**given, "layout": sample_layouts()["mla-bf16"]})
        with pytest.raises(InvalidConfig, match="another identity"):
            end(one.ends[0].caller, **{**given, "identity": identity(model="other")})
        with pytest.raises(InvalidConfig, match="at least 1, not 0"):
            end(one.ends[0].caller, **given, tp_size=0)
    for ttl_s in (0.0, float("nan"), float("inf")):
        with pytest.raises(InvalidConfig, match="positive number of seconds"):
            PoolSender(one.ends[0].caller, **given, ttl_s=ttl_s)
    with pytest.raises(InvalidConfig, match="at least one try"):
        Tries(num_tries=0)


# --- pools that are full, slow, hanging, gone -------------------------------------------------------------------------


def test_a_full_pool_gives_no_ticket(ends: Callable[..., Ends]) -> None:
    size = Naming(identity=identity().digest, layout=LAYOUT).frame_bytes
    for limit, num_blocks in ((3, 3), (5, 5)):
        one = ends(MemoryStore(limit * size))
        unsent = one.send(5 * B + 2)
        assert isinstance(unsent, Unsent)
        assert (unsent.num_blocks, unsent.reason) == (num_blocks, Reason.FULL)
        assert sum(len(move.keys) for move in one.ears[0].moves) == num_blocks
    assert isinstance(ends(MemoryStore(6 * size)).send(5 * B + 2), Sent)


@pytest.mark.parametrize(("policy", "reasons"), [("noeviction", {Reason.FULL}), ("allkeys-lru", {Reason.MISSING})])
def test_a_full_redis_gives_no_ticket(
    policy: str, reasons: set[Reason], redis: Server, ends: Callable[..., Ends]
) -> None:
    """Also one that says STORED to every page and drops the first for the last."""
    layout = sample_layouts()["gqa-bf16"]
    one = ends(RedisStore(redis.url), layout, num_slots=31)
    with redis.client() as client:
        client.config_set("maxmemory-policy", policy)
        client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + 12 * one.naming.frame_bytes)
    unsent = one.send(30 * layout.block_tokens + 5)
    assert isinstance(unsent, Unsent)
    assert unsent.reason in reasons
    assert unsent.num_blocks < 16


def test_a_pool_that_drops_a_block_meanwhile_is_written_again(ends: Callable[..., Ends]) -> None:
    """It said that it has the prefix, and then had it not."""
    inner = MemoryStore(8 << 20)

    class Dropping(OpaqueStore):
        num_drops = 0

        def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
            if self.num_drops < 1 and len(inner.names()) == 4:
                self.num_drops += 1
                inner.delete(inner.names()[:1], deadline=deadline)
            return super().put(pages, deadline=deadline)

    one = ends(Dropping(inner))
    one.ticket(4 * B)
    sent = one.send(7 * B + 1)
    assert isinstance(sent, Sent)
    assert sent.num_tries == 2
    assert isinstance(one.fetch(sent.ticket), Fetched)
    assert one.arrived(sent.ticket)


@pytest.mark.parametrize("num_tokens", [2, 6 * B + 1])
def test_a_slow_pool_is_late_by_the_deadline(num_tokens: int, ends: Callable[..., Ends]) -> None:
    slow = DelayStore(MemoryStore(8 << 20), 0.0)
    one = ends(slow)
    ticket = one.ticket(num_tokens)
    slow.delay_s = 2.0
    began_s = time.monotonic()
    missing = one.fetch(ticket, timeout_s=0.3)
    assert isinstance(missing, Missing)
    assert time.monotonic() - began_s < 0.3 + SLACK_S
    assert (missing.first_block, missing.reason) == (0, Reason.LATE)
    assert one.arrived(ticket, 0)
    began_s = time.monotonic()
    unsent = one.send(num_tokens, seed=1, timeout_s=0.3)
    assert isinstance(unsent, Unsent)
    assert time.monotonic() - began_s < 0.3 + SLACK_S
    assert (unsent.num_blocks, unsent.reason) == (0, Reason.LATE)


@pytest.mark.parametrize("call", ["put", "contains"])
@pytest.mark.parametrize("num_tokens", [2, 6 * B + 1])
def test_a_pool_that_hangs_gives_no_ticket(call: str, num_tokens: int, ends: Callable[..., Ends]) -> None:
    hanging = HangingStore(MemoryStore(8 << 20))
    one = ends(hanging)
    hanging.hang(call)
    began_s = time.monotonic()
    unsent = one.send(num_tokens, timeout_s=0.2)
    assert time.monotonic() - began_s < 0.2 + SLACK_S
    assert isinstance(unsent, Unsent)
    assert (unsent.num_blocks, unsent.reason) == (0, Reason.LATE)
    assert one.ears[0].moves == []
    hanging.release()
    wait_until(lambda: one.ends[0].worker.num_held_pages == 0)
    assert isinstance(one.send(num_tokens), Sent)


@pytest.mark.parametrize(("num_tokens", "held_back"), [(2, 0), (6 * B + 1, 0), (6 * B + 1, 2)])
def test_bytes_that_come_late_hit_nobody(num_tokens: int, held_back: int, ends: Callable[..., Ends]) -> None:
    """Rule 2: once it has said Missing, the slots are somebody else's."""
    hanging = HangingStore(MemoryStore(8 << 20))
    one = ends(hanging, num_pages=16)
    ticket = one.ticket(num_tokens)
    passed = hanging.num_asked("get_into")

    def hang_later(slot: int, page: int) -> None:
        if hanging.num_asked("get_into") - passed >= held_back:
            hanging.hang("get_into")

    if held_back:
        one.there.on_scatter = hang_later
    else:
        hanging.hang("get_into")
    began_s = time.monotonic()
    missing = one.fetch(ticket, timeout_s=0.3)
    assert time.monotonic() - began_s < 0.3 + SLACK_S
    assert isinstance(missing, Missing)
    assert missing.reason is Reason.LATE
    assert one.arrived(ticket, missing.first_block)
    assert (missing.first_block > 0) == bool(held_back)
    num_scattered = len(one.there.scattered)
    one.there.device[:] = 0
    hanging.release()
    wait_until(lambda: one.ends[1].worker.num_held_pages == 0)
    assert not one.there.device.any()
    assert len(one.there.scattered) == num_scattered


@pytest.mark.parametrize("way", ["in", "out"])
def test_a_copy_that_hangs_ends_the_handoff_and_keeps_its_slots(way: str, ends: Callable[..., Ends]) -> None:
    """By the deadline, with what came before; its slots are free when the copy is over, which is told once."""
    one = ends(MemoryStore(8 << 20))
    num_tokens = 5 * B + 3
    ticket = one.ticket(num_tokens)
    gate, freed = Gate(), list[float]()
    gate.shut()

    def hang_later(slot: int, page: int) -> None:
        if slot >= 3:
            gate()

    found: queue.Queue[Any] = queue.Queue()
    options: dict[str, Any] = {"deadline": Deadline.after(0.6), "done": found.put}
    options["freed"] = lambda: freed.append(time.monotonic())
    if way == "in":
        one.there.on_scatter = hang_later
        one.receiver.begin_fetch(ticket, range(6), **options)
    else:
        one.here.on_gather = hang_later
        given = {"first": FIRST, "sampler": SAMPLER, **options}
        one.sender.begin_send("r", tokens(num_tokens, 7), range(6), **given)
    gate.wait_for_arrival()
    try:
        outcome = found.get(timeout=PATIENCE_S / 2)
        assert isinstance(outcome, Missing | Unsent)
        assert (outcome.reason, outcome.stuck) == (Reason.LATE, True)
        assert (outcome.first_block if isinstance(outcome, Missing) else outcome.num_blocks) == 3
        assert not freed, "it was said that nobody touches the slots while a copy does"
    finally:
        gate.open()
    wait_until(lambda: bool(freed))
    for end in one.ends:
        assert end.worker.drain(PATIENCE_S)
    assert len(freed) == 1
    assert found.empty()
    if way == "in":
        assert [one.there.block(at) for at in range(3)] == [one.here.block(at) for at in range(3)]


def test_a_bad_page_whose_removal_hangs_is_told_by_the_deadline(ends: Callable[..., Ends]) -> None:
    inner = FaultyStore(MemoryStore(8 << 20), Faults())
    hanging = HangingStore(inner)
    one = ends(hanging)
    ticket = one.ticket(3)
    inner.faults = Faults(flips_byte=1.0)
    hanging.hang("delete")
    began_s = time.monotonic()
    missing = one.fetch(ticket, timeout_s=0.3)
    assert time.monotonic() - began_s < 0.3 + SLACK_S
    assert isinstance(missing, Missing)
    assert missing.reason is Reason.DAMAGED


def test_a_pool_that_is_down_is_told_at_once(ends: Callable[..., Ends]) -> None:
    hanging = HangingStore(MemoryStore(8 << 20))
    one = ends(hanging, pause_s=0.0)
    ticket = one.ticket(2 * B + 1)
    hanging.dead = True
    reasons = [one.fetch(ticket) for _ in range(3)]
    assert all(isinstance(missing, Missing) for missing in reasons)
    assert [getattr(missing, "reason", None) for missing in reasons][-1] is Reason.DOWN
    assert isinstance(failed := one.send(B), Unsent)
    assert failed.reason in (Reason.FAILED, Reason.DOWN)


class Stubborn(FaultyStore):
    """Keeps what it has."""

    def delete(self, names: Sequence[PageName], *, deadline: Deadline) -> list[Status]:
        return [Status.FAILED] * len(names)


def test_a_pool_of_nothing_but_bad_pages_is_left_alone_for_a_while(ends: Callable[..., Ends]) -> None:
    clock = FakeClock()
    store = Stubborn(MemoryStore(8 << 20), Faults())
    one = ends(store, clock=clock, pause_s=0.0)
    ticket, short = one.ticket(B + 1), one.ticket(1)
    store.faults = Faults(flips_byte=1.0)
    reasons = [getattr(one.fetch(ticket), "reason", None) for _ in range(30)]
    assert reasons[0] is Reason.DAMAGED
    assert reasons[-1] is Reason.DOWN
    store.faults = Faults()
    for left_alone in (ticket, short):
        down = one.fetch(left_alone)
        assert isinstance(down, Missing)
        assert down.reason is Reason.DOWN
    clock.advance(60.0)
    assert isinstance(one.fetch(ticket), Fetched)
    assert one.arrived(ticket)


def test_who_is_not_wanted_stops(ends: Callable[..., Ends]) -> None:
    one = ends()
    unsent = one.send(6 * B + 1, stopped=lambda: True)
    assert isinstance(unsent, Unsent)
    assert unsent.reason is Reason.CANCELLED
    ticket = one.ticket(6 * B + 1)
    missing = one.fetch(ticket, stopped=lambda: bool(one.there.scattered))
    assert isinstance(missing, Missing)
    assert missing.reason is Reason.CANCELLED
    assert 0 < missing.first_block < ticket.num_blocks
    assert one.arrived(ticket, missing.first_block)


def test_a_device_that_raises_ends_its_own_handoff_only(ends: Callable[..., Ends]) -> None:
    one = ends()
    good = one.ticket(3 * B)

    def fail(slot: int, page: int) -> None:
        if slot == 3:
            raise RuntimeError("no such luck")

    one.here.on_gather = one.there.on_scatter = fail
    unsent = one.send(3 * B + 2)
    assert isinstance(unsent, Unsent)
    assert (unsent.num_blocks, unsent.reason) == (3, Reason.FAILED)
    assert "RuntimeError: no such luck" in unsent.detail
    one.here.on_gather = None
    ticket = one.ticket(3 * B + 2)
    missing = one.fetch(ticket)
    assert isinstance(missing, Missing)
    assert (missing.first_block, missing.reason) == (3, Reason.FAILED)
    assert isinstance(one.fetch(good), Fetched)


# --- several at once --------------------------------------------------------------------------------------------------


def test_one_that_hangs_does_not_hold_up_the_others(ends: Callable[..., Ends]) -> None:
    hanging = HangingStore(MemoryStore(8 << 20))
    one = ends(hanging, num_pages=12)
    tickets = [one.ticket(6 * B + 1, seed=seed) for seed in range(4)]
    hanging.hang("get_into", times=1)
    results: dict[int, Fetched | Missing] = {}
    stuck = threading.Thread(target=lambda: results.__setitem__(0, one.fetch(tickets[0], timeout_s=PATIENCE_S)))
    stuck.start()
    hanging.wait_inside()
    for at in range(1, 4):
        one.there.device[:] = one.original
        results[at] = one.fetch(tickets[at], at=10)
        assert isinstance(results[at], Fetched)
        assert one.arrived(tickets[at], at=10)
    assert 0 not in results
    hanging.release()
    stuck.join(PATIENCE_S)
    assert isinstance(results[0], Fetched)


def test_pages_that_hanging_calls_keep_are_not_given_out(ends: Callable[..., Ends]) -> None:
    """As many as there are pages hang; the next is told at once, and all is well when they are back."""
    hanging = HangingStore(MemoryStore(8 << 20))
    one = ends(hanging, num_pages=2)
    ticket = one.ticket(3 * B + 1)
    hanging.hang("get_into")
    for _ in range(2):
        missing = one.fetch(ticket, timeout_s=0.1)
        assert isinstance(missing, Missing)
        assert missing.reason is Reason.LATE
    assert one.ends[1].worker.num_held_pages == 2
    down = one.fetch(ticket, timeout_s=PATIENCE_S)
    assert isinstance(down, Missing)
    assert (down.reason, down.detail) == (Reason.DOWN, "the pool's calls keep all pages")
    hanging.release()
    wait_until(lambda: one.ends[1].worker.num_held_pages == 0)
    assert isinstance(one.fetch(ticket), Fetched)
    assert one.arrived(ticket)


def test_who_comes_while_others_hang_waits_by_its_deadline(ends: Callable[..., Ends]) -> None:
    hanging = HangingStore(MemoryStore(8 << 20))
    one = ends(hanging, num_pages=4)
    ticket = one.ticket(2 * B + 1)
    hanging.hang("get_into")
    first: list[Fetched | Missing] = []
    thread = threading.Thread(target=lambda: first.append(one.fetch(ticket, timeout_s=PATIENCE_S)))
    thread.start()
    hanging.wait_inside()
    began_s = time.monotonic()
    missing = one.fetch(ticket, at=10, timeout_s=0.2)
    assert time.monotonic() - began_s < 0.2 + SLACK_S
    assert isinstance(missing, Missing)
    assert missing.reason is Reason.LATE
    assert isinstance(gone := one.fetch(ticket, at=10, stopped=lambda: True), Missing)
    assert gone.reason is Reason.CANCELLED
    hanging.release()
    thread.join(PATIENCE_S)
    assert isinstance(first[0], Fetched)


def test_many_at_once_with_faults(ends: Callable[..., Ends]) -> None:
    faulty = FaultyStore(MemoryStore(32 << 20), Faults())
    one = ends(faulty, num_pages=8, pause_s=0.001)
    tickets = [one.ticket(4 * B + 1 + at % 4, seed=at) for at in range(6)]
    faulty.faults = Faults(get_misses=0.05, get_fails=0.02)
    outcomes: dict[int, list[Fetched | Missing]] = {at: [] for at in range(6)}

    def work(at: int) -> None:
        for _ in range(15):
            outcomes[at].append(one.fetch(tickets[at], at=6 * at))

    threads = [threading.Thread(target=work, args=(at,)) for at in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [len(found) for found in outcomes.values()] == [15] * 6
    faulty.faults = Faults()
    for at, ticket in enumerate(tickets):
        assert any(isinstance(found, Fetched) for found in outcomes[at])
        assert isinstance(one.fetch(ticket, at=6 * at), Fetched)
        for block in range(ticket.num_blocks):
            expected = one.here.block(block)
            if block == len(ticket.keys):
                assert ticket.tail is not None
                expected = cut_off(LAYOUT, expected, ticket.tail.valid_tokens)
            assert one.there.block(6 * at + block) == expected


# --- ranks ------------------------------------------------------------------------------------------------------------


class Group:
    """All ranks of one tensor-parallel size, in one process: an executor of them all."""

    def __init__(self, stack: ExitStack, store: Store, layout: KVLayout, tp_size: int) -> None:
        self.layout = layout
        self.who = identity(layout)
        self.ranks: list[tuple[Any, BytesStaging]] = []
        self.namings: list[Naming] = []
        members = []
        for rank in range(tp_size):
            mine = [
                (part, BytesStaging(part.layout, num_slots=16, num_pages=8, seed=rank))
                for part in parts(layout, rank, tp_size)
            ]
            members += open_rank(
                rank,
                tp_size,
                {"pool": store},
                [staging for _, staging in mine],
                layout=layout,
                identity=self.who.digest,
                views={"pool_tp": "pool"},
            )
            self.ranks += mine
            for part, _ in mine:
                number = part_number(part, layout)
                naming = Naming(identity=self.who.digest, layout=part.layout, shard=part.shard, part=number)
                self.namings.append(naming)
        executor = Ranks(members, stores=["pool", "pool_tp"])
        stack.callback(_close, executor)
        self.caller = Caller(executor, ["pool", "pool_tp"], identity=self.who.digest)
        executor.deliver = self.caller.deliver
        self.options: dict[str, Any] = {"identity": self.who, "layout": layout, "pool": "local", "tp_size": tp_size}

    def fill(self, blocks: Sequence[bytes]) -> None:
        for part, staging in self.ranks:
            for slot, block in enumerate(blocks):
                staging.device[slot] = np.frombuffer(cut(self.layout, part, block), np.uint8)

    def has(self, blocks: Sequence[bytes], *, at: int) -> bool:
        return all(
            staging.block(at + slot) == cut(self.layout, part, block)
            for part, staging in self.ranks
            for slot, block in enumerate(blocks)
        )


def _close(executor: Ranks) -> None:
    assert executor.close(PATIENCE_S)


@pytest.mark.parametrize("name", list(small_layouts()))
@pytest.mark.parametrize(("written", "read"), [(2, 1), (1, 2), (2, 4), (2, 2)])
def test_other_tensor_parallel_sizes(name: str, written: int, read: int) -> None:
    layout = small_layouts()[name]
    with ExitStack() as stack:
        store = stack.enter_context(MemoryStore(8 << 20))
        prefill, decode_ = (Group(stack, store, layout, size) for size in (written, read))
        sender = PoolSender(prefill.caller, **prefill.options)
        ear = Ear()
        receiver = PoolReceiver(decode_.caller, **decode_.options, view="pool_tp", residency=ear)
        for seed, num_tokens in enumerate(sizes(layout.block_tokens)):
            num_blocks = -(-num_tokens // layout.block_tokens)
            blocks = [np.random.default_rng([seed, at]).bytes(layout.page_bytes) for at in range(num_blocks)]
            prefill.fill(blocks)
            sent = send(
                sender,
                "r",
                tokens(num_tokens, seed),
                range(num_blocks),
                first=FIRST,
                sampler=SAMPLER,
                deadline=Deadline.after(20.0),
            )
            assert isinstance(sent, Sent), sent
            fetched = fetch(receiver, sent.ticket, range(3, 3 + num_blocks), deadline=Deadline.after(20.0))
            assert isinstance(fetched, Fetched), fetched
            if num_tokens % layout.block_tokens:
                blocks[-1] = cut_off(layout, blocks[-1], num_tokens % layout.block_tokens)
            assert decode_.has(blocks, at=3)
        is_divided = any(plane.split is not None for plane in layout.planes)
        assert bool(ear.moves) == (written == read or not is_divided)  # others look for pages of our size


@pytest.mark.parametrize("which", [1, 3])
def test_what_one_rank_misses_is_missing(which: int) -> None:
    """Every rank counts: blocks are there up to the shortest, and the others are not read beyond it."""
    layout = small_layouts()["mixed"]
    with ExitStack() as stack:
        store = stack.enter_context(MemoryStore(8 << 20))
        prefill, decode_ = (Group(stack, store, layout, 2) for _ in range(2))
        num_tokens = 5 * layout.block_tokens + 1
        blocks = [np.random.default_rng(at).bytes(layout.page_bytes) for at in range(6)]
        prefill.fill(blocks)
        sender = PoolSender(prefill.caller, **prefill.options)
        sent = send(
            sender, "r", tokens(num_tokens), range(6), first=FIRST, sampler=SAMPLER, deadline=Deadline.after(20.0)
        )
        assert isinstance(sent, Sent)
        doomed = decode_.namings[which].name(sent.ticket.keys[2])
        store.delete([doomed], deadline=Deadline.after(5.0))
        ear = Ear()
        receiver = PoolReceiver(decode_.caller, **decode_.options, view="pool_tp", residency=ear)
        missing = fetch(receiver, sent.ticket, range(6, 12), deadline=Deadline.after(20.0))
        assert isinstance(missing, Missing)
        assert (missing.first_block, missing.reason) == (2, Reason.MISSING)
        assert decode_.has(blocks[:2], at=6)
        assert [move.keys for move in ear.moves] == [sent.ticket.keys[:2]]


@pytest.mark.parametrize("num_pages", [1, 4, 7, 10, 11])
def test_blocks_count_as_sent_only_with_every_page(num_pages: int) -> None:
    """Whoever's page the pool has no room for: what is said to be there is there, on all ranks."""
    layout = small_layouts()["gqa"]
    with ExitStack() as stack:
        size = frame_bytes(parts(layout, 0, 2)[0].layout.plane_bytes)
        store = stack.enter_context(MemoryStore(num_pages * size))
        group = Group(stack, store, layout, 2)
        ear = Ear()
        unsent = send(
            PoolSender(group.caller, **group.options, residency=ear),
            "r",
            tokens(5 * layout.block_tokens + 1),
            range(6),
            first=FIRST,
            sampler=SAMPLER,
            deadline=Deadline.after(20.0),
        )
        assert isinstance(unsent, Unsent)
        assert unsent.reason in (Reason.FULL, Reason.MISSING)
        keys = [key for move in ear.moves for key in move.keys]
        assert len(keys) == min(unsent.num_blocks, 5)
        held = set(store.names())
        assert all(naming.name(key) in held for naming in group.namings for key in keys)


def test_latent_planes_need_no_view(ends: Callable[..., Ends]) -> None:
    """What every rank holds whole is the same page at every size."""
    layout = small_layouts()["mla"]
    one = ends(None, layout, receiver={"tp_size": 2})
    ticket = one.ticket(2 * layout.block_tokens + 1)
    assert ticket.tp_size == 1
    assert isinstance(one.fetch(ticket), Fetched)
    assert one.arrived(ticket)


def test_a_pause_for_which_there_is_no_thread_is_left_out(
    ends: Callable[..., Ends], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = ends()
    ticket = here.ticket(5 * B)
    here.store.delete([here.name(ticket, 2)], deadline=Deadline.after(5.0))

    def start(_: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", start)
    found = here.fetch(ticket)
    assert isinstance(found, Missing)
    assert (found.first_block, found.reason, found.num_tries) == (2, Reason.MISSING, 3)


def test_a_handoff_on_an_executor_that_was_closed_while_its_store_was_off_is_over(ends: Callable[..., Ends]) -> None:
    here = ends()
    ticket = here.ticket(5 * B)
    end = here.ends[1]
    end.caller.hears(StoreOff(now_s=time.monotonic() - 60.0, store="pool", why=BAD_PAGES))
    end.close()
    found = here.fetch(ticket)
    assert isinstance(found, Missing)
    assert found.reason is Reason.CANCELLED
