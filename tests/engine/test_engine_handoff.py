"""Requests that one engine begins and another ends: through a pool, on real engines."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from brain_kit import fail_at
from headwater.build import open_pool, stores
from headwater.cache.jobs import Jobs
from headwater.core.errors import InvalidInput
from headwater.core.keys import BlockKey
from headwater.core.page import PageName
from headwater.core.results import Reason
from headwater.core.role import Role
from headwater.disagg.outcome import Missing, Unsent
from headwater.disagg.protocol import Tail, Ticket
from headwater.engine.connector import Connector
from headwater.engine.handoffs import Handoffs
from headwater.engine.loader import load_model
from headwater.engine.make_model import make_model
from headwater.engine.models.base import Computed, Model, Span
from headwater.engine.request import Finish, RequestPhase, Sending
from headwater.lab.campaigns.hanging import HangingStore
from headwater.layout.frame import frame_bytes
from headwater.storage.base import Deadline
from headwater.testing.faulty_stores import DelayStore
from headwater.transfer.device.arena import DeviceCache
from headwater.transfer.executor.staging import TorchStaging
from headwater.transfer.executor.tier import Naming
from pd_kit import WAIT_S, Heard, Node, new_pool, open_node, open_pair
from worker_kit import Gate

BLOCK = 16
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 7)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint."""
    found = tmp_path_factory.mktemp("model")
    make_model("llama", found)
    return found


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    """The same, loaded."""
    return load_model(path, block_tokens=BLOCK)


@pytest.fixture
def pool(tmp_path: Path) -> str:
    """A pool of its own."""
    return new_pool(tmp_path)


@pytest.fixture
def pair(model: Model, path: Path, pool: str) -> Iterator[tuple[Node, Node]]:
    """Both ends."""
    with open_pair(model, path, pool) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def alone(model: Model, path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """One that does all by itself."""
    with open_node(model, path, new_pool(tmp_path_factory.mktemp("own")), Role.MIXED) as node:
        yield node


def prompt_of(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(f"{length} {seed}")
    return [draw.randrange(200) for _ in range(length)]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "seed": 7}, {"temperature": 0.8, "logprobs": 2, "seed": -3}]
)
def test_both_ends_answer_as_one_engine(
    pair: tuple[Node, Node], alone: Node, length: int, sampling: dict[str, Any]
) -> None:
    prefill, decode = pair
    prompt = prompt_of(length, len(str(sampling)))  # which nobody has asked for yet
    expected = alone.ask(prompt, **sampling)
    assert expected.last.finish is Finish.LENGTH
    sent = prefill.send(prompt, **sampling)
    ticket = sent.ticket
    assert not sent.tokens, "the first token leaves with the ticket"
    before = decode.num_computed
    taken = decode.take(ticket, prompt, recompute=False, **sampling)
    assert taken.last.finish is Finish.LENGTH
    assert taken.tokens == expected.tokens
    assert [told for one in taken.outputs for told in one.logprobs] == [
        told for one in expected.outputs for told in one.logprobs
    ]
    assert decode.num_computed - before == 11, "it computes its own tokens, and none of the prompt"
    assert taken.last.usage is not None
    assert taken.last.usage.pool_s is not None
    prefill.until_free()
    decode.until_free()


def names_of(ticket: Ticket, model: Model) -> list[PageName]:
    naming = Naming(identity=model.identity.digest, layout=model.layout)
    tail = [ticket.tail.key] if ticket.tail is not None else []
    return [naming.name(key) for key in (*ticket.keys, *tail)]


@pytest.mark.parametrize("at", [0, 2, 5], ids=["first", "middle", "tail"])
@pytest.mark.parametrize("recompute", [True, False])
def test_what_is_missing_is_computed_or_an_error_before_any_token(
    pair: tuple[Node, Node], alone: Node, model: Model, pool: str, at: int, recompute: bool
) -> None:
    prefill, decode = pair
    prompt = prompt_of(5 * BLOCK + 7)
    expected = alone.ask(prompt)
    ticket = prefill.send(prompt).ticket
    with open_pool(pool) as store:
        store.delete(names_of(ticket, model)[at:], deadline=Deadline.after(WAIT_S))
    taken = decode.take(ticket, prompt, recompute=recompute)
    if recompute:
        assert taken.last.finish is Finish.LENGTH
        assert expected.last.finish is Finish.LENGTH
        assert taken.tokens == expected.tokens
        assert decode.num_computed == len(prompt) - at * BLOCK + 11
    else:
        assert taken.last.finish is Finish.FAILED
        assert not taken.tokens
        missing = taken.last.unmoved
        assert isinstance(missing, Missing)
        assert (missing.first_block, missing.reason) == (at, Reason.MISSING)
    decode.until_free()


def test_a_ticket_that_is_over_needs_no_slots(pair: tuple[Node, Node], alone: Node) -> None:
    prefill, decode = pair
    prompt = prompt_of(3 * BLOCK + 2)
    first = alone.ask(prompt, max_tokens=1)
    assert first.last.finish is Finish.LENGTH
    ticket = prefill.send(prompt, max_tokens=1).ticket
    assert ticket.over
    taken = decode.take(ticket, prompt, max_tokens=1)
    assert (taken.last.finish, taken.tokens) == (Finish.LENGTH, first.tokens)
    stopped = prefill.send(prompt, stop_ids=frozenset(first.tokens)).ticket
    taken = decode.take(stopped, prompt, stop_ids=frozenset(first.tokens))
    assert (taken.last.finish, taken.tokens) == (Finish.STOP, [])
    assert taken.last.usage is not None
    assert taken.last.usage.completion_tokens == 0
    assert decode.running.engine.num_steps == 0


def test_who_finds_no_room_is_refused_at_once(model: Model, path: Path, pool: str) -> None:
    prompts = [prompt_of(5 * BLOCK + 7, seed) for seed in range(5)]  # which share nothing
    with open_pair(model, path, pool, num_blocks=14) as (prefill, decode):
        tickets = [prefill.send(prompt, max_tokens=100).ticket for prompt in prompts]
        long, *others = [
            decode.take(ticket, prompt, max_tokens=100) for ticket, prompt in zip(tickets, prompts, strict=True)
        ]
        ends = [one.last.finish for one in (long, *others)]
        assert ends[0] is Finish.LENGTH
        assert Finish.REFUSED in ends
        for one in (long, *others):
            assert (not one.tokens) == (one.last.finish is Finish.REFUSED)
        decode.until_free()


def test_an_unknown_ticket_fails_alone(pair: tuple[Node, Node], alone: Node) -> None:
    """One request's trouble is not another's."""
    prefill, decode = pair
    prompts = [prompt_of(3 * BLOCK + 5, seed) for seed in range(4)]
    tickets = [prefill.send(prompt).ticket for prompt in prompts]
    lost = replace(tickets[0], tail=Tail(BlockKey(bytes(31) + b"x"), 5))
    bad = decode.take(lost, prompts[0], recompute=False)
    good = [decode.take(ticket, prompt) for ticket, prompt in zip(tickets, prompts, strict=True)]
    assert bad.last.finish is Finish.FAILED
    assert not bad.tokens
    for one, prompt in zip(good, prompts, strict=True):
        expected = alone.ask(prompt)
        assert expected.last.finish is one.last.finish is Finish.LENGTH
        assert one.tokens == expected.tokens
    decode.until_free()


def test_a_pool_that_takes_nothing_gives_no_ticket(model: Model, path: Path, tmp_path: Path) -> None:
    """Full of something else, with no room for a whole prompt: an error, and not one token."""
    with open_node(model, path, new_pool(tmp_path, 8 << 20), Role.PREFILL, num_blocks=1024, step_tokens=512) as prefill:
        sent = prefill.send(prompt_of(500 * BLOCK + 3), timeout_s=20.0)
        assert sent.last.finish is Finish.FAILED
        assert isinstance(sent.last.unmoved, Unsent)
        assert not sent.tokens
        prefill.until_free()


def test_what_the_cache_writes_is_not_written_again(
    model: Model, path: Path, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full blocks go to the pool as the cache's own; the handoff waits for them, and moves the tail alone."""
    real = stores.open_pool
    monkeypatch.setattr(stores, "open_pool", lambda *args, **more: DelayStore(real(*args, **more), 0.05))
    with open_node(model, path, pool, Role.PREFILL) as prefill:
        whole, rest = prefill.send(prompt_of(5 * BLOCK)), prefill.send(prompt_of(5 * BLOCK + 7, 1))
        assert (whole.last.finish, rest.last.finish) == (Finish.SENT, Finish.SENT)
        assert whole.last.usage is not None
        assert rest.last.usage is not None
        assert whole.last.usage.num_pool_bytes == 0
        assert 0 < rest.last.usage.num_pool_bytes < 2 * frame_bytes(model.layout.plane_bytes)


def test_a_pool_that_hangs_holds_no_slot_for_long(
    model: Model, path: Path, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the pool's own deadline, however long the client waits; more prompts than lanes; and closing ends."""
    real, made = stores.open_pool, list[HangingStore]()

    def hanging(*args: Any, **more: Any) -> HangingStore:
        made.append(HangingStore(real(*args, **more)))
        return made[-1]

    monkeypatch.setattr(stores, "open_pool", hanging)
    with open_node(model, path, pool, Role.PREFILL, num_blocks=128) as prefill:
        try:
            made[0].hang("put", "contains")
            far = time.monotonic() + 1000
            prompts = [prompt_of(3 * BLOCK + 5, seed) for seed in range(8)]
            sent = [prefill.ask(prompt, Sending(until_s=far, timeout_s=0.5)) for prompt in prompts]
            for one in sent:
                assert one.last.finish is Finish.FAILED
                assert isinstance(one.last.unmoved, Unsent)
                assert not one.tokens
            prefill.until_free()
        finally:
            made[0].release()


@pytest.mark.parametrize("then", ["computes", "fails", "is cancelled"])
def test_a_fetch_whose_copy_hangs_is_computed_in_other_slots(
    pair: tuple[Node, Node], alone: Node, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """The tail comes by the handoff's own job. What hangs keeps its slots until it is over, and nobody waits for it."""
    prefill, decode = pair
    prompt = prompt_of(2 * BLOCK + 7)
    expected = alone.ask(prompt)
    ticket = prefill.send(prompt).ticket
    gate, real, hung = Gate(), TorchStaging.scatter, list[int]()

    def scatter(self: TorchStaging, pages: Sequence[int], slots: Sequence[int]) -> None:
        if len(slots) == 1 and not hung:  # the tail
            hung.extend(slots)
            gate()
        real(self, pages, slots)

    monkeypatch.setattr(TorchStaging, "scatter", scatter)
    gate.shut()
    taken = decode.take(ticket, prompt, recompute=then == "computes", timeout_s=2.0)
    gate.wait_for_arrival()
    try:
        if then == "is cancelled":
            assert taken.request is not None
            decode.running.engine.cancel(taken.request)
        assert taken.over.wait(WAIT_S / 2), "it waits for a copy that hangs"
        with decode.running.cache.still() as brain:
            brain.validate()
            assert len(brain.requests) == 1, "its slots are in nobody's hands"
            assert hung[0] in next(iter(brain.requests.values())).own
        if then == "computes":
            assert taken.last.finish is Finish.LENGTH
            assert expected.last.finish is Finish.LENGTH
            assert taken.tokens == expected.tokens
        elif then == "fails":
            assert (taken.last.finish, taken.tokens) == (Finish.FAILED, [])
            assert isinstance(taken.last.unmoved, Missing)
            assert (taken.last.unmoved.reason, taken.last.unmoved.first_block) == (Reason.LATE, 2)
        else:
            assert (taken.last.finish, taken.tokens) == (Finish.CANCELLED, [])
    finally:
        gate.open()
    decode.until_free()
    again = decode.ask(prompt)
    assert again.last.finish is Finish.LENGTH
    assert again.tokens == expected.tokens


def test_a_send_whose_copy_hangs_fails_and_keeps_its_slots(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, _ = pair
    gate, real = Gate(), TorchStaging.gather

    def gather(self: TorchStaging, slots: Sequence[int], pages: Sequence[int]) -> Any:
        gate()
        return real(self, slots, pages)

    monkeypatch.setattr(TorchStaging, "gather", gather)
    gate.shut()
    sent = prefill.send(prompt_of(7), timeout_s=2.0)  # a tail alone: the cache writes nothing of it
    gate.wait_for_arrival()
    try:
        assert sent.over.wait(WAIT_S / 2), "it waits for a copy that hangs"
        assert sent.last.finish is Finish.FAILED
        assert isinstance(sent.last.unmoved, Unsent)
        assert sent.last.unmoved.reason is Reason.LATE
        with prefill.running.cache.still() as brain:
            assert [len(one.own) for one in brain.requests.values()] == [1]
    finally:
        gate.open()
    prefill.until_free()


@pytest.mark.fault("D8")
@pytest.mark.parametrize("ends", ["saved", "cancelled", "closed"])
def test_who_waits_for_the_cache_s_writes_is_woken_and_does_not_look(
    model: Model, path: Path, pool: str, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """While a write of the cache hangs nobody reads the brain's books, and what ends the waiting ends it at once."""
    real, made = stores.open_pool, list[HangingStore]()
    looks: list[float] = []
    iterate = Jobs.__iter__

    def counted(jobs: Jobs) -> Any:
        looks.append(time.monotonic())
        return iterate(jobs)

    def hanging(*args: Any, **more: Any) -> HangingStore:
        made.append(HangingStore(real(*args, **more)))
        return made[-1]

    monkeypatch.setattr(stores, "open_pool", hanging)
    try:
        with open_node(model, path, pool, Role.PREFILL) as prefill:
            made[0].hang("put", times=1)
            sent = prefill.send(prompt_of(5 * BLOCK))
            made[0].wait_inside()
            assert sent.request is not None
            while sent.request.phase is not RequestPhase.SENDING:
                time.sleep(0.01)
            monkeypatch.setattr(Jobs, "__iter__", counted)
            before = len(looks)
            time.sleep(0.4)  # a time in which nothing happens
            assert len(looks) - before <= 4, "somebody looks and looks"
            begin_s = time.monotonic()
            if ends == "saved":
                made[0].release()
                assert sent.last.finish is Finish.SENT
                assert sent.last.usage is not None
                assert sent.last.usage.num_pool_bytes == 0, "what the cache wrote is not written again"
            elif ends == "cancelled":
                prefill.running.engine.cancel(sent.request)
                assert sent.last.finish is Finish.CANCELLED
            else:
                assert prefill.running.engine.close(WAIT_S / 4)
                assert sent.last.finish is Finish.CANCELLED
            assert time.monotonic() - begin_s < WAIT_S / 4, "half of its time was waited for"
            made[0].release()
    finally:
        made[0].release()


@pytest.mark.fault("D3")
@pytest.mark.parametrize("number", [0, 1, 2, 3, 5, 8, 13, 21])
def test_a_brain_that_fails_under_a_handoff(pair: tuple[Node, Node], alone: Node, number: int) -> None:
    """Whoever is being handed over ends rightly or with an error; what comes afterwards is right; nothing is left."""
    prefill, decode = pair
    asked = [prompt_of(5 * BLOCK + 7, seed) for seed in range(100 + 3 * number, 103 + 3 * number)]
    right = [alone.ask(prompt) for prompt in asked]
    warm = prefill.send(asked[0]).ticket
    decode.take(warm, asked[0])
    for node in pair:
        fail_at(node.running.cache.brain, number)
    sent = [prefill.send(prompt) for prompt in asked]
    for prompt, one, wanted in zip(asked, sent, right, strict=True):
        assert one.last.finish in (Finish.SENT, Finish.FAILED)
        if one.last.finish is Finish.SENT:
            taken = decode.take(one.ticket, prompt)
            if taken.last.finish is Finish.REFUSED:  # it failed when this one wanted slots: others may be asked
                taken = decode.take(one.ticket, prompt)
            assert taken.last.finish is Finish.LENGTH
            assert wanted.last.finish is Finish.LENGTH
            assert taken.tokens == wanted.tokens
    for node in pair:
        node.until_free()
        if node.running.cache.failed is not None:
            assert node.running.cache.revive_brain()
    ticket = prefill.send(asked[1]).ticket
    assert decode.take(ticket, asked[1]).last.finish is Finish.LENGTH
    for node in pair:
        node.until_free()


def cancelled(node: Node, begin: Callable[[], Heard]) -> Finish | None:
    """How a request ended that was cancelled as soon as it had begun."""
    heard = begin()
    assert heard.request is not None
    node.running.engine.cancel(heard.request)
    return heard.last.finish


def test_a_cancelled_handoff_gives_everything_back(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    prompt = prompt_of(5 * BLOCK + 7)
    ticket = prefill.send(prompt).ticket
    begins: tuple[tuple[Node, Callable[[], Heard]], ...] = (
        (prefill, lambda: prefill.send(prompt)),
        (decode, lambda: decode.take(ticket, prompt)),
    )
    for node, begin in begins:
        for _ in range(20):
            finish = cancelled(node, begin)
            if finish is Finish.REFUSED:  # pages are still on their way into the slots of those before it
                node.until_free()
                finish = cancelled(node, begin)
            assert finish in (Finish.CANCELLED, Finish.SENT, Finish.LENGTH)
        node.until_free()
        assert begin().last.finish in (Finish.SENT, Finish.LENGTH)
        node.until_free()


def test_closing_an_engine_ends_what_is_being_handed_over(model: Model, path: Path, pool: str) -> None:
    prompt = prompt_of(5 * BLOCK + 7)
    with open_pair(model, path, pool) as (prefill, decode):
        ticket = prefill.send(prompt).ticket
        late = [prefill.send(prompt_of(5 * BLOCK + 7, seed)) for seed in range(5)]
        late += [decode.take(ticket, prompt) for _ in range(5)]
    for one in late:
        assert one.last.finish in (Finish.CANCELLED, Finish.SENT, Finish.LENGTH)


def test_the_next_turn_finds_the_answer_of_the_last(pair: tuple[Node, Node], alone: Node) -> None:
    """Decode writes the blocks of its answer to the pool, where the next prefill finds them."""
    prefill, decode = pair
    prompt = prompt_of(2 * BLOCK + 3)
    taken = decode.take(prefill.send(prompt, max_tokens=40).ticket, prompt, max_tokens=40)
    assert taken.last.finish is Finish.LENGTH
    assert decode.running.cache.drain(WAIT_S)
    turn = [*prompt, *taken.tokens, *prompt_of(9, 1)]
    before = prefill.num_computed
    sent = prefill.send(turn)
    assert sent.last.finish is Finish.SENT
    num_found = (len(prompt) + len(taken.tokens) - 1) // BLOCK * BLOCK  # the last token has no KV
    assert prefill.num_computed - before == len(turn) - num_found
    again = decode.take(sent.ticket, turn)
    expected = alone.ask(turn)
    assert expected.last.finish is again.last.finish is Finish.LENGTH
    assert again.tokens == expected.tokens


@pytest.mark.fault("X27")
def test_what_is_fetched_does_not_meet_what_the_cache_loads(
    pair: tuple[Node, Node], alone: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """X27: a ticket of another tensor-parallel size is no promise, so the cache began to load from the end, slowly.

    The fetch went into the same slots, and what it brought was committed without a claim: the engine ended.
    """
    prefill, decode = pair
    prompt = prompt_of(12 * BLOCK + 3)
    expected = alone.ask(prompt)
    ticket = prefill.send(prompt).ticket
    monkeypatch.setattr(Handoffs, "is_promised", lambda *_: False)
    monkeypatch.setattr(Connector, "measured", lambda *_: None)
    decode.running.cache.pace(1.0, 0.0)
    with decode.running.cache.still() as brain:
        for tier in brain.tiers.values():
            tier.loading.measured(brain.config.block_bytes, 1.0, time.monotonic())
    taken = decode.take(ticket, prompt)
    assert taken.last.finish is expected.last.finish is Finish.LENGTH
    assert taken.tokens == expected.tokens
    decode.until_free()


def test_roles_are_kept(pair: tuple[Node, Node], alone: Node) -> None:
    prefill, decode = pair
    prompt = prompt_of(5)
    ticket = prefill.send(prompt).ticket
    with pytest.raises(InvalidInput, match="decode node"):
        prefill.take(ticket, prompt)
    with pytest.raises(InvalidInput, match="prefill node"):
        decode.send(prompt)
    with pytest.raises(InvalidInput, match="another prompt"):
        decode.take(ticket, prompt_of(6))
    for node in (prefill, alone):
        assert node.running.refusal(ticket) is not None
    assert decode.running.refusal(ticket) is None
    assert decode.running.engine.num_requests == 0


class Patient(Model):
    """A model that computes `slow` prompts for as long as it takes: it asks before its layers again and again."""

    def __init__(self, model: Model, slow: int, enough: Callable[[], bool]) -> None:
        for name in Model.__annotations__:
            setattr(self, name, getattr(model, name))
        self._model, self._slow, self._enough = model, slow, enough
        self.begun = threading.Event()
        self.saw_enough = False

    def forward(
        self, planes: DeviceCache, spans: Sequence[Span], *, before_layer: Callable[[int], None] | None = None
    ) -> Computed:
        """Compute."""
        if any(span.tokens[0] == self._slow and len(span.tokens) > 1 for span in spans):
            self.begun.set()
            until_s = time.monotonic() + 5
            while not self._enough() and time.monotonic() < until_s:
                if before_layer is not None:
                    before_layer(0)
                time.sleep(0.001)
            self.saw_enough = self._enough()
        return self._model.forward(planes, spans, before_layer=before_layer)


def test_a_ticket_does_not_wait_for_the_step_of_another_prompt(model: Model, path: Path, pool: str) -> None:
    told = threading.Event()
    patient = Patient(model, 211, told.is_set)
    with open_node(patient, path, pool, Role.PREFILL, step_tokens=4 * BLOCK) as node:
        first = node.send(prompt_of(4 * BLOCK))  # a step of its own
        second = node.send([211, *prompt_of(2 * BLOCK + 3)])
        assert patient.begun.wait(WAIT_S)
        assert first.ticket.num_blocks == 4
        told.set()
        assert second.ticket.num_blocks == 3
        assert patient.saw_enough, "the first ticket came when the second prompt's step was over"
        node.until_free()
