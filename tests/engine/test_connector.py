"""The connector on a real cache, and under a whole engine with a model that says what it read: no wrong token, ever."""

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.build import open_cache
from headwater.cache.cache import TieredCache
from headwater.cache.placement import TierState, load_pays
from headwater.config.cache import CacheConfig, TierConfig
from headwater.core.identity import CacheIdentity, config_digest
from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.engine.connector import Connector
from headwater.engine.engine import Engine, EngineConfig
from headwater.engine.models.base import Computed, Model, Span
from headwater.engine.request import Finish, Output, Request, RequestPhase, Sampling
from headwater.index.slots import SlotState
from headwater.layout.frame import frame_bytes
from headwater.layout.gqa import gqa_layout
from headwater.layout.spec import DType
from headwater.storage.base import Deadline, Store
from headwater.storage.memory import MemoryStore
from headwater.storage.wrappers import OpaqueStore
from headwater.testing.faulty_stores import Faults, FaultyStore
from headwater.transfer.device.arena import DeviceCache, create_host_cache, create_kv_cache
from headwater.transfer.executor.staging import TorchStaging
from headwater.transfer.executor.worker import Worker

BLOCK = 4
VOCABULARY = 50
WAIT_S = 30.0  # until a test gives up; nothing is measured
LAYOUT = gqa_layout(num_layers=1, num_kv_heads=1, head_dim=2, block_tokens=BLOCK, dtype=DType.FP32)
IDENTITY = CacheIdentity(
    model="tape",
    weights=hashlib.sha256(b"no weights").digest(),
    config=config_digest({}),
    layout=LAYOUT.fingerprint,
    block_tokens=BLOCK,
)


class Gate(OpaqueStore):
    """A store that answers when it is told to."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.looks = threading.Event()
        self.gives = threading.Event()

    def open(self) -> None:
        self.looks.set()
        self.gives.set()

    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> list[bool]:
        assert self.looks.wait(WAIT_S)
        return super().contains(names, deadline=deadline)

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        assert self.gives.wait(WAIT_S)
        return super().get_into(pages, deadline=deadline)


class Short(OpaqueStore):
    """A store that says it has everything it had, and gives the first so many pages."""

    def __init__(self, store: Store, num_good: int) -> None:
        super().__init__(store)
        self.num_good = num_good

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        found = super().get_into(pages[: self.num_good], deadline=deadline)
        self.num_good -= len(found)
        return found + [Status.FAILED] * (len(pages) - len(found))


@dataclass(frozen=True)
class Rig:
    """A connector, and what is under it."""

    connector: Connector
    cache: TieredCache
    planes: DeviceCache

    def settle(self, request: Request) -> None:
        """Ask for a request, and have the stores' answers."""
        self.connector.ask(request, 1.0)
        self.cache.wait(name(request), WAIT_S)
        assert self.connector.may_start(request, 1.0)

    def start(self, request: Request) -> None:
        """Have all that is there of it on the device."""
        self.settle(request)
        assert self.connector.admit(request)
        self.cache.wait(name(request), WAIT_S)
        assert self.connector.loaded(request)

    def compute(self, request: Request, num_answer: int = 0) -> None:
        """All of its tokens, and so many more; each one's KV is the token and where it stands."""
        for _ in range(num_answer):
            request.tokens.append(7)
            assert self.connector.grow(request, len(request.tokens))
        for at in range(request.num_computed, len(request.tokens)):
            self.planes.flat[0][request.slots[at // BLOCK], 0, at % BLOCK] = torch.tensor([request.tokens[at], at])
        request.num_computed = len(request.tokens)
        self.connector.commit(request)

    def run(self, request: Request, num_answer: int = 0) -> None:
        """A whole life."""
        self.start(request)
        self.compute(request, num_answer)
        self.connector.release(request)
        assert self.cache.drain(WAIT_S)

    def said(self, request: Request, num_tokens: int) -> list[list[float]]:
        """What the device has of its first tokens."""
        rows = [self.planes.flat[0][slot, 0] for slot in request.slots]
        found: list[list[float]] = torch.cat(rows)[:num_tokens].tolist()
        return found

    def states(self, request: Request) -> str:
        """Of its slots: O is its own, K is shared."""
        with self.cache.still() as brain:
            return "".join(brain.slots.state(slot).name[0] for slot in request.slots)

    def check_nothing_is_held(self) -> None:
        assert self.cache.drain(WAIT_S)
        with self.cache.still() as brain:
            brain.validate()
            counts = brain.slots.counts()
            assert (counts[SlotState.OWN], counts[SlotState.QUARANTINED]) == (0, 0)
            assert brain.slots.num_evictable == len(brain.blocks())  # no hold, no pin
            assert not [*brain.requests, *brain.jobs, *brain.pending]
        if isinstance(self.cache._executor, Worker):
            assert self.cache._executor.num_held_pages == 0


@contextmanager
def rig(store: Store | None = None, *, num_slots: int = 16, probe_s: float = WAIT_S) -> Iterator[Rig]:
    """One engine's worth, on a store that outlives it. At the end nothing may be held."""
    patient: dict[str, Any] = {"probe_timeout_s": WAIT_S, "load_timeout_s": WAIT_S, "save_timeout_s": WAIT_S}
    config = CacheConfig(
        num_slots=num_slots,
        block_tokens=BLOCK,
        block_bytes=LAYOUT.page_bytes,
        tiers=() if store is None else (TierConfig(name="memory", **patient),),
    )
    with (
        create_kv_cache(LAYOUT, num_slots) as planes,
        create_host_cache(frame_bytes(LAYOUT.plane_bytes), 8) as pages,
        TorchStaging(planes, pages) as staging,
        open_cache(
            config,
            {} if store is None else {"memory": store},
            staging,
            layout=LAYOUT,
            identity=IDENTITY.digest,
        ) as cache,
    ):
        one = Rig(Connector(cache, IDENTITY, probe_s=probe_s), cache, planes)
        yield one
        one.check_nothing_is_held()


def ask(prompt: Sequence[int], title: str = "one", *, salt: bytes = b"") -> Request:
    return Request(name=title, prompt=list(prompt), sampling=Sampling(), listen=lambda output: None, salt=salt)


def name(request: Request) -> str:
    return Connector._name(request)


def said(tokens: Sequence[int]) -> list[list[float]]:
    return [[token, at] for at, token in enumerate(tokens)]


# --- hits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [3, 4, 5, 7, 8, 9])
def test_what_is_on_the_device_is_not_computed_again(num_tokens: int) -> None:
    with rig() as one:
        first, second = ask(range(num_tokens)), ask(range(num_tokens), "two")
        one.start(first)
        assert (first.num_computed, first.whole, one.states(first)) == (0, False, "O" * (num_tokens // BLOCK + 1))
        one.compute(first)
        one.connector.release(first)
        one.start(second)
        full = num_tokens // BLOCK
        # The last token is computed in any case, and never in a slot that others read.
        assert second.num_computed == min(full * BLOCK, num_tokens - 1)
        assert second.whole == (num_tokens % BLOCK == 0)
        assert one.states(second) == "K" * full + "O"
        assert second.num_committed == full
        assert one.said(second, second.num_computed) == said(range(second.num_computed))
        bill = one.connector.release(second)
        assert bill is not None
        assert second.cached_by_tier == dict(bill.hit_tokens) == ({"device": full * BLOCK} if full else {})


def test_a_wholly_cached_prompt_goes_on_in_a_slot_of_its_own() -> None:
    with rig() as one:
        one.run(ask(range(8)))
        again = ask(range(8), "two")
        one.start(again)
        shared = one.said(again, 8)
        again.num_computed = 8  # the engine computed the last token, in a copy in the third slot
        one.connector.commit(again)
        assert one.states(again) == "KKO"  # nothing new: both blocks have their names
        one.compute(again, num_answer=5)
        assert one.states(again) == "KKKO"
        assert one.said(again, 8) == shared
        one.connector.release(again)


def test_an_answer_is_found_by_the_next_turn() -> None:
    with rig() as one:
        first = ask(range(6))
        one.run(first, num_answer=4)
        turn = ask([*range(6), 7, 7, 7, 7, 1], "two")
        one.start(turn)
        assert turn.num_computed == 8
        one.connector.release(turn)


def test_another_salt_finds_nothing() -> None:
    with rig(MemoryStore(1 << 20)) as one:
        one.run(ask(range(8), salt=b"a"))
        for salt in (b"", b"b"):
            other = ask(range(8), f"{salt!r}", salt=salt)
            one.start(other)
            assert other.num_computed == 0
            one.connector.release(other)
        same = ask(range(8), "same", salt=b"a")
        one.start(same)
        assert same.whole
        one.connector.release(same)


def test_what_another_engine_stored_is_loaded() -> None:
    store = MemoryStore(1 << 20)
    with rig(store) as one:
        one.run(ask(range(11)))
    with rig(store) as one:
        request = ask(range(11))
        one.start(request)
        assert (request.num_computed, one.states(request)) == (8, "KKO")
        assert one.said(request, 8) == said(range(8))
        one.connector.release(request)
        assert request.cached_by_tier == {"memory": 8}


# --- stores that are slow or fail -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_good", [0, 1, 2])
def test_a_load_that_fails_has_become_tokens_to_compute(num_good: int) -> None:
    store = MemoryStore(1 << 20)
    with rig(store) as one:
        one.run(ask(range(14)))
    with rig(Short(store, num_good)) as one:
        request = ask(range(14))
        one.start(request)
        assert request.num_computed == num_good * BLOCK
        assert request.num_committed == num_good
        assert one.states(request) == "K" * num_good + "O" * (4 - num_good)
        one.compute(request)
        assert one.states(request) == "KKKO"
        assert one.said(request, 14) == said(range(14))
        bill = one.connector.release(request)
        assert bill is not None
        assert dict(bill.miss_tokens) == {"failed": (3 - num_good) * BLOCK}


def test_a_store_that_says_nothing_is_waited_for_so_long_and_no_longer() -> None:
    store = MemoryStore(1 << 20)
    with rig(store) as one:
        one.run(ask(range(9)))
    gate = Gate(store)
    with rig(gate, probe_s=0.5) as one:
        request = ask(range(9))
        one.connector.ask(request, 100.0)
        assert not one.connector.may_start(request, 100.0)
        assert not one.connector.may_start(request, 100.25)
        assert one.connector.may_start(request, 100.5)
        assert one.connector.admit(request)
        assert one.connector.loaded(request)
        assert request.num_computed == 0
        gate.open()
        one.connector.release(request)


def test_nothing_is_computed_while_blocks_are_on_their_way() -> None:
    store = MemoryStore(1 << 20)
    with rig(store) as one:
        one.run(ask(range(9)))
    gate = Gate(store)
    gate.looks.set()
    with rig(gate) as one:
        request = ask(range(9))
        one.settle(request)
        assert one.connector.admit(request)
        assert request.phase is RequestPhase.LOADING
        assert not one.connector.loaded(request)
        gate.open()
        one.cache.wait(name(request), WAIT_S)
        assert one.connector.loaded(request)
        assert request.num_computed == 8
        one.connector.release(request)


# --- giving back ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["asked", "answered", "loading", "loaded", "computed", "never asked"])
def test_release_gives_everything_back_at_every_stage(stage: str) -> None:
    store = MemoryStore(1 << 20)
    with rig(store) as one:
        one.run(ask(range(9)))
    gate = Gate(store)
    with rig(gate) as one:
        request = ask(range(13))
        if stage != "never asked":
            one.connector.ask(request, 1.0)
        if stage != "asked":
            gate.looks.set()
        if stage in ("answered", "loading", "loaded", "computed"):
            one.settle(request)
        if stage in ("loading", "loaded", "computed"):
            assert one.connector.admit(request)
        if stage in ("loaded", "computed"):
            gate.open()
            one.cache.wait(name(request), WAIT_S)
            assert one.connector.loaded(request)
        if stage == "computed":
            one.compute(request, num_answer=9)
        bill = one.connector.release(request)
        assert (bill is not None) == (stage in ("loaded", "computed"))
        assert (request.slots, request.num_computed, request.num_committed) == ((), 0, 0)
        assert one.connector.release(request) is None  # once more changes nothing
        gate.open()


def test_one_that_gave_way_finds_its_blocks_and_that_is_no_hit() -> None:
    with rig() as one:
        request = ask(range(6))
        one.start(request)
        one.compute(request, num_answer=7)
        one.connector.release(request)  # as the scheduler preempts
        request.preemptions += 1
        one.start(request)
        assert (request.num_computed, request.num_committed, one.states(request)) == (12, 3, "KKKO")
        one.compute(request, num_answer=1)
        assert one.said(request, 14) == said(request.tokens)
        one.connector.release(request)
        assert request.cached_by_tier == {}


def test_one_that_gave_way_finds_its_blocks_in_a_store_when_they_were_evicted() -> None:
    with rig(MemoryStore(1 << 20), num_slots=4) as one:
        request = ask(range(11))
        one.start(request)
        one.compute(request)
        one.connector.release(request)
        request.preemptions += 1
        assert one.cache.drain(WAIT_S)
        one.run(ask(range(20, 33), "other"))
        one.start(request)
        assert one.said(request, 8) == said(range(8))
        assert request.num_computed == 8
        one.connector.release(request)


def test_no_room_changes_nothing() -> None:
    with rig(num_slots=4) as one:
        first, second = ask(range(9)), ask(range(20, 26), "two")
        one.start(first)
        one.settle(second)
        assert not one.connector.admit(second)
        assert (second.slots, second.phase) == ((), RequestPhase.WAITING)
        assert one.connector.grow(first, 12)
        slots = first.slots
        assert one.connector.grow(first, 13)
        assert first.slots[:3] == slots
        assert not one.connector.grow(first, 17)
        assert len(first.slots) == 4
        one.connector.release(first)
        assert one.connector.admit(second)
        one.connector.release(second)


# --- a whole engine ---------------------------------------------------------------------------------------------------


class Tape(Model):
    """Writes each token, and where it stands, where its KV belongs; what it says next follows from all it reads there.

    So one wrong byte, slot or position makes a wrong answer. It also looks whether it writes where others read.
    """

    name = "tape"
    layout = LAYOUT
    block_tokens = BLOCK
    vocab_size = VOCABULARY
    max_positions = 1000
    eos_ids = frozenset[int]()
    identity = IDENTITY
    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, cache: TieredCache) -> None:
        self._cache = cache
        self.trespasses: list[str] = []

    def forward(
        self, planes: DeviceCache, spans: Sequence[Span], *, before_layer: Callable[[int], None] | None = None
    ) -> Computed:
        if before_layer is not None:
            before_layer(0)
        said, written = [], []
        for span in spans:
            for at, token in enumerate(span.tokens, span.start):
                written.append(span.slots[at // BLOCK])
                planes.flat[0][written[-1], 0, at % BLOCK] = torch.tensor([token, at])
        with self._cache.still() as brain:
            states = {slot: brain.slots.state(slot) for slot in written}
        if any(span.tokens[0] for span in spans):  # an engine that warms up computes token 0, in any slot
            self.trespasses += [
                f"{slot} is {state.name}" for slot, state in states.items() if state is not SlotState.OWN
            ]
        for span in spans:
            end = span.start + len(span.tokens)
            rows = torch.cat([planes.flat[0][slot, 0] for slot in span.slots])[:end]
            said += [following(rows)] * span.num_logits
        logits = torch.nn.functional.one_hot(torch.tensor(said, dtype=torch.long), VOCABULARY).float()
        return Computed(logits, torch.zeros(len(spans)), [slice(i, i + 1) for i in range(len(spans))])


def following(rows: torch.Tensor) -> int:
    """The next token, from 1 on: depends on every value, and on where it stands."""
    weights = torch.arange(1, len(rows) + 1).unsqueeze(1) * torch.tensor([3, 5])
    return 1 + int((rows.long() * weights).sum()) % (VOCABULARY - 1)


def answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(following(torch.tensor(said(tokens))))
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class Wish:
    """What a client does."""

    stem: int  # which beginning it shares
    num_stem: int
    tail: tuple[int, ...]
    num_answer: int
    salt: bytes
    preempt_at: int | None
    cancel_at: int | None  # tokens after which it is cancelled

    @property
    def prompt(self) -> list[int]:
        return [(self.stem + 1) * (at % 9 + 1) for at in range(self.num_stem)] + list(self.tail)


WISHES = st.builds(
    Wish,
    stem=st.integers(0, 1),
    num_stem=st.sampled_from([1, 4, 8, 8, 12, 16]),
    tail=st.lists(st.integers(1, 3), max_size=5).map(tuple),
    num_answer=st.integers(1, 14),
    salt=st.sampled_from([b"", b"", b"a"]),
    preempt_at=st.none() | st.integers(0, 20),
    cancel_at=st.none() | st.none() | st.integers(0, 6),
)
FAULTS = st.sampled_from(
    [
        *(None, Faults(), Faults(get_fails=0.3, put_fails=0.1), Faults(flips_byte=0.3, swaps_page=0.2)),
        Faults(get_misses=0.3, contains_lies=0.2),
    ]
)


class Client:
    """Hears the answer to a wish."""

    def __init__(self, number: int, wish: Wish, ended: threading.Semaphore) -> None:
        self.wish = wish
        self.heard: list[int] = []
        self.finishes: list[Finish | None] = []
        self.engine: Engine | None = None
        self._ended = ended
        self.request = Request(
            name=f"{number}",
            prompt=wish.prompt,
            sampling=Sampling(max_tokens=wish.num_answer, temperature=0),
            listen=self._listen,
            salt=wish.salt,
            preempt_at=wish.preempt_at,
        )

    def submit(self, engine: Engine) -> None:
        self.engine = engine
        engine.submit(self.request)
        if self.wish.cancel_at == 0:
            engine.cancel(self.request)

    def _listen(self, output: Output) -> None:
        self.heard += output.tokens
        if output.finish is not None:
            self.finishes.append(output.finish)
            self._ended.release()
        elif len(self.heard) == self.wish.cancel_at and self.engine is not None:
            self.engine.cancel(self.request)

    def check(self) -> None:
        right = answer(self.wish.prompt, self.wish.num_answer)
        (finish,) = self.finishes
        if finish is Finish.LENGTH:
            assert self.heard == right
        else:
            assert finish is Finish.CANCELLED
            assert self.wish.cancel_at is not None
            assert self.heard == right[: len(self.heard)]


@given(st.lists(WISHES, min_size=1, max_size=10), FAULTS, st.integers(9, 20), st.integers(1, 9))
@settings(max_examples=60)
def test_whatever_is_asked_the_answers_are_right_and_nothing_is_left(
    wishes: list[Wish], faults: Faults | None, num_slots: int, step_tokens: int
) -> None:
    store = None if faults is None else FaultyStore(MemoryStore(1 << 20), faults)
    with rig(store, num_slots=num_slots, probe_s=0.05) as one:
        model = Tape(one.cache)
        limits = EngineConfig(max_running=4, max_waiting=len(wishes), step_tokens=step_tokens)
        ended = threading.Semaphore(0)
        clients = [Client(number, wish, ended) for number, wish in enumerate(wishes)]
        with Engine(model, one.planes, one.connector, limits) as engine:
            for client in clients:
                client.submit(engine)
            for _ in clients:
                assert ended.acquire(timeout=WAIT_S / 3)  # shorter, because hypothesis tries a failure again and again
            assert engine.num_requests == 0
            one.check_nothing_is_held()
        for client in clients:
            client.check()
        assert model.trespasses == []


def test_a_prompt_that_is_all_there_computes_its_last_token_beside_the_shared_block() -> None:
    with rig() as one:
        model = Tape(one.cache)
        ended = threading.Semaphore(0)
        wish = Wish(stem=0, num_stem=8, tail=(), num_answer=6, salt=b"", preempt_at=None, cancel_at=None)
        usages = []
        with Engine(model, one.planes, one.connector, EngineConfig()) as engine:
            before = None
            for number in range(3):
                client = Client(number, wish, ended)
                listen = client.request.listen

                def hear(output: Output, listen: object = listen) -> None:
                    assert callable(listen)
                    listen(output)
                    if output.usage is not None:
                        usages.append(output.usage)

                client.request.listen = hear
                client.submit(engine)
                assert ended.acquire(timeout=WAIT_S)
                client.check()
                with one.cache.still() as brain:
                    shared = {key: one.planes.flat[0][slot].tolist() for key, _, slot in brain.blocks()}
                assert before in (None, shared)
                before = shared
        assert model.trespasses == []
        assert [usage.computed_tokens for usage in usages] == [8 + 5, 1 + 5, 1 + 5]
        assert [usage.cached_by_tier for usage in usages] == [{}, {"device": 8}, {"device": 8}]


def test_the_tape_notices_one_wrong_value() -> None:
    """Or the tests above could not fail."""
    tokens = [1, 2, 3, 4, 5, 6]
    right = following(torch.tensor(said(tokens)))
    wrong = [replace_at(tokens, at) for at in range(len(tokens))]
    assert all(following(torch.tensor(said(one))) != right for one in wrong)
    assert following(torch.tensor(said([2, 1, *tokens[2:]]))) != right


def replace_at(tokens: list[int], at: int) -> list[int]:
    return [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]


# --- what loading saves -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt_s", "pays"),
    [(0.019, False), (0.021, False), (0.060, True)],
    ids=["faster than a small step", "hardly slower", "much slower"],
)
def test_what_every_step_costs_is_not_saved_by_loading(prompt_s: float, pays: bool) -> None:
    """A step of one token takes 20 ms here. Loading 32 blocks takes 10 ms: it pays where their tokens cost more."""
    with rig() as one:
        for seconds in (0.020, 0.300, 0.020, 0.019, 0.021):  # one of them was slow for another reason
            one.connector.measured(1, 0, seconds)
        one.connector.measured(32 * one.connector.block_tokens, 0, prompt_s)
        with one.cache.still() as brain:
            tier = TierState(TierConfig(name="host"), 1)
            tier.loading.measured(32, 0.010, 0.0)
            assert load_pays(tier, brain.cost, start=0, end=32, block_bytes=1, now_s=0.0) == pays


def test_few_tokens_say_nothing_of_what_a_token_costs() -> None:
    with rig() as one:
        with one.cache.still() as brain:
            before = brain.cost.base_s, brain.cost.slope_s
        for _ in range(50):
            one.connector.measured(20, 1000, 0.5)
        with one.cache.still() as brain:
            assert (brain.cost.base_s, brain.cost.slope_s) == before
