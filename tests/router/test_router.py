"""The router: who is asked and why, and that every request ends, rightly or honestly, whatever nodes and clients do."""

import asyncio
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fleet_kit import Signed
from headwater.core.breaker import BreakerState
from headwater.core.errors import InvalidConfig, InvalidInput
from headwater.core.results import HANDOFF_REASONS, Reason
from headwater.core.role import Role
from headwater.disagg import events
from headwater.disagg.events import EventReader, NotEvents, event_of
from headwater.disagg.heartbeat import Heartbeat, NodeLoad, Rates
from headwater.metrics import Metrics
from headwater.residency.base import Found, Holder
from headwater.router.choice import Held, How, NodeChoice, NodeFacts, Size, choose_decode, choose_entry
from headwater.router.lookup import Ask, Looker, held_of
from headwater.router.nodes import HeartbeatKind, NodeRefused, NodeSlot, NodeTable
from headwater.router.routed_request import Call, NoAnswer
from headwater.router.router import Router
from headwater.router.settings import RouterConfig
from headwater.router.trouble import PREFILL_AGAIN, Trouble, judge, object_in
from headwater.router.wait_line import WaitLine
from headwater.router.whole import WholeNodeAnswer
from router_kit import (
    BEFORE,
    IDENTITY,
    IMPATIENT,
    LAYOUT,
    MIDDLE,
    WAIT_S,
    Asked,
    Fault,
    Node,
    Stalls,
    Tokens,
    World,
    world,
)

COMPLETIONS = "/v1/completions"


def beat(name: str = "n", role: Role = Role.MIXED, **changes: Any) -> Heartbeat:
    given: dict[str, Any] = {
        "node": name,
        "url": f"http://{name}:1",
        "role": role,
        "model": "m",
        "identity": IDENTITY,
        "layout": LAYOUT,
        "block_tokens": 16,
        "lease_s": 10.0,
        "load": NodeLoad(free_slots=4),
    }
    return Heartbeat(**{**given, **changes})


# --- the choice -------------------------------------------------------------------------------------------------------

RATES = st.none() | st.floats(0.1, 1e6)
FACTS = st.builds(
    NodeFacts,
    name=st.text("abcdefgh", min_size=1, max_size=3),
    role=st.sampled_from(list(Role)),
    free_slots=st.sampled_from([0, 1, 1, 2, 3]),
    num_requests=st.integers(0, 50),
    pending_tokens=st.integers(0, 100_000),
    rates=st.builds(Rates, prefill_tokens_per_s=RATES, decode_tokens_per_s=RATES, pool_tokens_per_s=RATES),
    draining=st.sampled_from([False] * 5 + [True]),
    resting=st.sampled_from([False] * 5 + [True]),
)
CLUSTERS = st.lists(FACTS, max_size=8, unique_by=lambda one: one.name)
SIZES = st.builds(Size, st.integers(1, 100_000), st.integers(1, 4096))


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[NodeFacts], Size, Held | None, int, set[str]]:
    nodes = draw(CLUSTERS)
    names = [one.name for one in nodes]
    by_node = st.dictionaries(st.sampled_from(names), st.integers(0, 200_000)) if names else st.just({})
    held = draw(st.none() | st.builds(Held, by_node=by_node, local=by_node, pool=st.integers(0, 100_000)))
    failed = set(draw(st.lists(st.sampled_from(names), unique=True))) if names else set()
    return nodes, draw(SIZES), held, draw(st.integers(0, 1000)), failed


def usable(one: NodeFacts) -> bool:
    return one.free_slots > 0 and not one.draining and not one.resting


def names(choice: NodeChoice) -> list[str]:
    return [one.node for one in choice.candidates]


@given(situations(), st.integers(0, 5), st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_everybody_is_in_the_order_or_left_out_with_a_reason(
    situation: tuple[list[NodeFacts], Size, Held | None, int, set[str]], promised: int, shuffler: random.Random
) -> None:
    nodes, size, held, turn, failed = situation
    entry = choose_entry(nodes, size, held, turn=turn, promised=promised, failed=failed)
    decode = choose_decode(nodes, size, held, turn=turn, failed=failed)
    room = sum(one.free_slots for one in nodes if one.role is Role.DECODE and usable(one)) > promised
    may_enter = {
        one.name for one in nodes if usable(one) and (one.role is Role.MIXED or (one.role is Role.PREFILL and room))
    }
    may_decode = {one.name for one in nodes if usable(one) and one.role is not Role.PREFILL}
    for choice, may, others in ((entry, may_enter, Role.DECODE), (decode, may_decode, Role.PREFILL)):
        everybody = names(choice) + [name for name, _ in choice.left_out]
        assert sorted(everybody) == sorted(one.name for one in nodes if one.role is not others)
        assert set(names(choice)) == may
        assert all(one.reason for one in choice.candidates)
        assert all(reason for _, reason in choice.left_out)
        assert choice.how is (How.ESTIMATE if held is not None else How.ROUND_ROBIN)
        assert all((one.seconds is None) is (held is None) for one in choice.candidates)
    for role in (Role.PREFILL, Role.DECODE, Role.MIXED):  # who failed comes last of its kind
        for choice in (entry, decode):
            order = [one.node in failed for one in choice.candidates if one.role is role]
            assert order == sorted(order)
    roles = [one.role for one in decode.candidates]
    assert roles == sorted(roles, key=[Role.DECODE, Role.MIXED].index)  # mixed nodes only where no decode node is
    shuffled = list(nodes)
    shuffler.shuffle(shuffled)
    assert choose_entry(shuffled, size, held, turn=turn, promised=promised, failed=failed) == entry
    assert choose_decode(shuffled, size, held, turn=turn, failed=failed) == decode


@given(
    CLUSTERS, SIZES, st.integers(0, 1000), st.sampled_from(list(Role)), st.data(),
    st.tuples(*[st.floats(0.1, 1e6)] * 3),
)  # fmt: skip
def test_who_is_better_in_everything_does_not_come_behind(
    nodes: list[NodeFacts], size: Size, turn: int, role: Role, data: st.DataObject, rates: tuple[float, float, float]
) -> None:
    """`good` is as `bad`, and in some things better."""
    bad = NodeFacts(
        name="bad",
        role=role,
        free_slots=1,
        num_requests=data.draw(st.integers(0, 50)),
        pending_tokens=data.draw(st.integers(0, 10_000)),
        rates=Rates(prefill_tokens_per_s=rates[0], decode_tokens_per_s=rates[1], pool_tokens_per_s=rates[2]),
    )
    faster = [rate * data.draw(st.floats(1, 10)) for rate in rates]
    good = replace(
        bad,
        name=data.draw(st.sampled_from(["aaaa", "good"])),
        free_slots=data.draw(st.integers(1, 9)),
        num_requests=data.draw(st.integers(0, bad.num_requests)),
        pending_tokens=data.draw(st.integers(0, bad.pending_tokens)),
        rates=Rates(prefill_tokens_per_s=faster[0], decode_tokens_per_s=faster[1], pool_tokens_per_s=faster[2]),
    )
    held_bad = data.draw(st.integers(0, size.prompt))
    lengths = {"bad": held_bad, good.name: data.draw(st.integers(held_bad, size.prompt))}
    held = Held(lengths, lengths, pool=data.draw(st.sampled_from([0, 100])))
    others = [one for one in nodes if one.name != "bad"]
    cluster = [*others, bad, good, replace(bad, name="zz", role=Role.DECODE)]
    choose = choose_decode if role is Role.DECODE else choose_entry
    choice = choose(cluster, size, held, turn=turn)
    seconds = {one.node: one.seconds for one in choice.candidates}
    assert seconds[good.name] <= seconds["bad"]  # type: ignore[operator]
    if seconds[good.name] != seconds["bad"]:
        order = names(choice)
        assert order.index(good.name) < order.index("bad")


@given(st.integers(1, 6), st.integers(0, 100), SIZES, st.booleans())
def test_equals_take_turns(num_nodes: int, turn: int, size: Size, silent: bool) -> None:
    nodes = [NodeFacts(name=f"n{i}", role=Role.MIXED, free_slots=1) for i in range(num_nodes)]
    held = None if silent else Held()
    firsts = [names(choose_entry(nodes, size, held, turn=turn + i))[0] for i in range(num_nodes)]
    assert sorted(firsts) == [one.name for one in nodes]


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=5, unique=True), st.sampled_from(list(Role)))
def test_with_equal_loads_the_longest_prefix_wins(lengths: list[int], role: Role) -> None:
    nodes = [NodeFacts(name=f"n{i}", role=role, free_slots=1) for i in range(len(lengths))]
    nodes.append(NodeFacts(name="d", role=Role.DECODE, free_slots=9))
    by_node = {f"n{i}": length for i, length in enumerate(lengths)}
    held = Held(local=by_node) if role is Role.DECODE else Held(by_node)
    choose = choose_decode if role is Role.DECODE else choose_entry
    found = [name for name in names(choose(nodes, Size(1000, 16), held, turn=0)) if name != "d"]
    assert found == [f"n{i}" for i in sorted(range(len(lengths)), key=lambda i: -lengths[i])]


def test_load_and_rates_outweigh_a_prefix() -> None:
    held, size = Held({"warm": 900}), Size(1000, 16)
    decode = NodeFacts(name="d", role=Role.DECODE, free_slots=9)
    warm = NodeFacts(name="warm", role=Role.PREFILL, free_slots=9, rates=Rates(prefill_tokens_per_s=100.0))
    cold = replace(warm, name="cold")
    assert names(choose_entry([warm, cold, decode], size, held, turn=0)) == ["warm", "cold"]
    busy = replace(warm, pending_tokens=5000)
    assert names(choose_entry([busy, cold, decode], size, held, turn=0)) == ["cold", "warm"]
    fast = replace(cold, rates=Rates(prefill_tokens_per_s=10_000.0))
    assert names(choose_entry([warm, fast, decode], size, held, turn=0)) == ["cold", "warm"]
    pooled = Held({"warm": 900}, pool=1000)  # everybody finds it in the pool: nobody is better
    (first, second) = choose_entry([warm, cold, decode], size, pooled, turn=0).candidates
    assert first.seconds == second.seconds


# --- the table --------------------------------------------------------------------------------------------------------


class TableMachine(RuleBasedStateMachine):
    """The table against a dict of what should be there."""

    def __init__(self) -> None:
        super().__init__()
        self.table = NodeTable(pause_s=2.0, max_pause_s=4.0, refusal_s=1.0)
        self.now_s = 0.0
        self.there: dict[str, Heartbeat] = {}
        self.until: dict[str, float] = {}
        self.drained: dict[str, int] = {}
        self.slots: list[tuple[NodeSlot, str]] = []
        self.free: dict[str, int] = {}

    @rule(
        name=st.sampled_from("abc"),
        role=st.sampled_from(list(Role)),
        epoch=st.integers(0, 2),
        kind=st.sampled_from([16, 16, 16, 32]),
        lease_s=st.sampled_from([0.0, 1.0, 5.0]),
        free=st.integers(0, 3),
    )
    def hear(self, name: str, role: Role, epoch: int, kind: int, lease_s: float, free: int) -> None:
        said = beat(name, role, epoch=epoch, block_tokens=kind, lease_s=lease_s, load=NodeLoad(free_slots=free))
        known = self.there.get(name)
        fits = all(one.block_tokens == kind for other, one in self.there.items() if other != name)
        if known is not None and (epoch < known.epoch or (epoch == known.epoch and role is not known.role)):
            fits = False
        elif lease_s == 0:
            fits = True
        if not fits:
            with pytest.raises(NodeRefused):
                self.table.heard(said, self.now_s)
            return
        came = self.table.heard(said, self.now_s)
        if lease_s == 0:
            assert came is HeartbeatKind.LEFT
            self.forget(name)
            return
        same = known is not None and known.epoch == epoch
        assert came is (HeartbeatKind.KNOWN if same else HeartbeatKind.NEW)
        if not same:
            self.slots = [(slot, "") if of == name else (slot, of) for slot, of in self.slots]
        self.there[name], self.until[name], self.free[name] = said, self.now_s + lease_s, free

    def forget(self, name: str) -> None:
        for known in (self.there, self.until, self.free):
            known.pop(name, None)
        self.slots = [(slot, "") if of == name else (slot, of) for slot, of in self.slots]

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        gone = {name for name, until_s in self.until.items() if until_s <= self.now_s}
        assert set(self.table.expire(self.now_s)) == gone
        for name in gone:
            self.forget(name)

    @precondition(lambda self: self.there)
    @rule(data=st.data(), draining=st.booleans())
    def drain(self, data: st.DataObject, draining: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.there)))
        self.table.drain(name, draining=draining)
        if draining:
            self.drained[name] = self.there[name].epoch
        else:
            self.drained.pop(name, None)

    @precondition(lambda self: self.there)
    @rule(data=st.data(), tokens=st.integers(0, 100))
    def take_slot(self, data: st.DataObject, tokens: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.there)))
        resting = next(one.resting for one in self.table.facts(self.now_s) if one.name == name)
        slot = self.table.take_slot(name, tokens=tokens, now_s=self.now_s)
        assert (slot is None) is resting
        if slot is not None:
            self.slots.append((slot, name))
            self.free[name] -= 1

    @precondition(lambda self: self.slots)
    @rule(data=st.data(), end=st.sampled_from(["well", "refused", "failed", "broken", "unproven"]))
    def end(self, data: st.DataObject, end: str) -> None:
        slot, name = self.slots.pop(data.draw(st.integers(0, len(self.slots) - 1)))
        if end == "well":
            self.table.went_well(slot)
        elif end == "refused":
            self.table.refused(slot, self.now_s)
        elif end == "unproven":
            self.table.unproven(slot, self.now_s)
        else:
            self.table.failed(slot, self.now_s, at_once=end == "broken")
        slot.end()
        facts = {one.name: one for one in self.table.facts(self.now_s)}
        if name:
            self.free[name] += 1
            entry = self.table.get(name)
            assert entry is not None
            # What began before the breaker opened does not make a pause longer that is over: a probe is due then.
            assert not (end == "broken" and entry.breaker.state is BreakerState.CLOSED)
            assert not (end == "refused" and facts[name].free_slots)

    @invariant()
    def who_is_there_is_there(self) -> None:
        facts = {one.name: one for one in self.table.facts(self.now_s)}
        assert set(facts) == set(self.there)
        assert len({one.block_tokens for one in self.there.values()}) <= 1
        for name, one in facts.items():
            mine = [slot for slot, of in self.slots if of == name]
            assert one.draining is (self.drained.get(name) == self.there[name].epoch)
            assert one.free_slots in (0, max(0, self.free[name]))
            assert one.num_requests == len(mine)
            assert one.pending_tokens == sum(slot._tokens for slot in mine)


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)


def test_a_node_that_does_not_fit_is_told_what_to_change() -> None:
    table = NodeTable()
    table.heard(beat("a", Role.PREFILL), 0.0)
    for changes, words in (
        ({"block_tokens": 32}, "same block size"),
        ({"layout": "00" * 32}, "same KV dtype"),
        ({"identity": "00" * 32}, "same weights"),
        ({"model": "other"}, "same model name"),
    ):
        with pytest.raises(NodeRefused, match=words):
            table.heard(beat("b", Role.DECODE, **changes), 1.0)
    with pytest.raises(NodeRefused, match="name of its own"):
        table.heard(beat("a", Role.PREFILL, url="http://elsewhere:1"), 1.0)
    assert table.heard(beat("b", Role.DECODE, block_tokens=32), 10.0) is HeartbeatKind.NEW  # the other's lease is over


def test_a_heartbeat_is_what_it_was() -> None:
    rates = Rates(prefill_tokens_per_s=5.0)
    said = beat(
        "a", Role.DECODE, epoch=7, rates=rates, load=NodeLoad(running=1, waiting=2, free_slots=3), draining=True
    )
    assert Heartbeat.read(json.loads(json.dumps({**said.document(), "newer": 1}))) == said
    wrong: list[tuple[str, object]] = [
        ("node", ""), ("node", 5), ("url", "ftp://a:1"), ("url", "http://a:1/x"), ("url", "http://u:p@a:1"),
        ("url", "http://a:99999"), ("role", "router"), ("identity", "xyz"), ("block_tokens", 0), ("block_tokens", True),
        ("lease_s", -1), ("lease_s", 1e9), ("lease_s", "5"), ("epoch", -1), ("draining", 1), ("load", []),
        ("load", {"free_slots": -1}), ("rates", {"prefill_tokens_per_s": 0}), ("model", None), ("layout", None),
    ]  # fmt: skip
    for name, value in wrong:
        with pytest.raises(InvalidInput, match=name):
            Heartbeat.read({**said.document(), name: value})
    for bad in ({"silence_s": 0}, {"max_attempts": 0}, {"node_key": "a b"}, {"pause_s": "1"}):
        with pytest.raises(InvalidConfig, match=next(iter(bad))):
            RouterConfig(**bad)


# --- small parts ------------------------------------------------------------------------------------------------------


@given(st.lists(st.text(max_size=20), max_size=6), st.lists(st.integers(1, 30), max_size=40), st.booleans())
def test_events_are_whole_however_they_are_cut(texts: list[str], cuts: list[int], windows: bool) -> None:
    documents = [{"choices": [{"text": text}]} for text in texts]
    stream = b"".join(b": comment\n\n" + event_of(one) for one in documents) + b"data: [DONE]\n\n"
    sent = stream.replace(b"\n\n", b"\r\n\r\n") if windows else stream
    reader, found, at = EventReader(), [], 0
    for cut in [*cuts, len(sent)]:
        found += reader.feed(sent[at : at + cut])
        at += cut
    assert [said for _, said in found] == [*documents, {}]
    assert b"".join(event for event, _ in found) == stream.replace(b": comment\n\n", b"")


def test_what_is_no_event_is_refused() -> None:
    for data in (b"event: x\n\n", b"data: 5\n\n", b'data: {"a": 1}\n\n', b"data: {\n\n", b"data: 1\ndata: 2\n\n"):
        with pytest.raises(NotEvents):
            EventReader().feed(data)
    with pytest.raises(NotEvents, match="more than"):
        EventReader(limit_bytes=10).feed(b"data: " + b"x" * 20)


@pytest.mark.fault("X8")
def test_a_large_event_in_crumbs_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each crumb is searched, and not all that came before it: a node could keep a router's loop busy for minutes."""
    event = event_of({"choices": [{"text": "x" * 20_000}]})
    searched: list[int] = []

    class Counting:
        def search(self, data: bytearray, start: int) -> Any:
            searched.append(len(data) - start)
            return ends.search(data, start)

    ends = events._END
    monkeypatch.setattr(events, "_END", Counting())
    reader, found = EventReader(), []
    for at in range(0, len(event), 50):
        found += reader.feed(event[at : at + 50])
    assert [whole for whole, _ in found] == [event]
    assert max(searched) <= 52


@pytest.mark.fault("X10")
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
def test_numbers_that_could_not_be_sent_on_are_no_answer(number: str) -> None:
    """A client would get a 500, and the node no blame."""
    body = f'{{"choices":[],"usage":{{"a":{number}}}}}'.encode()
    assert WholeNodeAnswer.read(body) is None
    assert object_in(f'{{"error":{{"message":"m","param":{number}}}}}'.encode()) is None
    with pytest.raises(NotEvents):
        EventReader().feed(b"data: " + body + b"\n\n")


@pytest.mark.fault("X10")
@pytest.mark.parametrize(
    "number", [10**400, -(10**400), float("nan"), float("inf")], ids=["int", "minus", "nan", "inf"]
)
def test_a_number_that_is_too_large_is_no_heartbeat(number: float) -> None:
    for build in (lambda: beat(lease_s=number), lambda: Rates(prefill_tokens_per_s=number)):
        with pytest.raises(InvalidInput, match="must be a number"):
            build()


def test_what_an_answer_means() -> None:
    error = {"error": {"message": "m", "code": None}}
    for status, document, trouble in (
        (503, error, Trouble.REFUSED), (429, None, Trouble.REFUSED), (400, error, Trouble.REJECTED),
        (422, error, Trouble.REJECTED), (400, None, Trouble.FAILED), (404, error, Trouble.FAILED),
        (404, {"error": {"message": "m", "code": "model_not_found"}}, Trouble.REJECTED), (401, error, Trouble.FAILED),
        (500, error, Trouble.FAILED), (502, error, Trouble.FAILED), (302, None, Trouble.FAILED),
        (502, {**error, "kind": "missing", "first_missing_block": 5}, Trouble.MISSING),
        (502, {**error, "kind": "late"}, Trouble.FAILED), (502, {**error, "kind": ["missing"]}, Trouble.FAILED),
        (500, {**error, "kind": "missing"}, Trouble.FAILED),
        (999, {"error": {"message": "m", "code": "model_not_found"}}, Trouble.FAILED),
    ):  # fmt: skip
        assert judge("n", status, document).trouble is trouble, (status, document)
    assert "from block 5 on" in str(judge("n", 502, {**error, "kind": "missing", "first_missing_block": 5}))
    assert {Reason.MISSING, Reason.DAMAGED} <= PREFILL_AGAIN <= HANDOFF_REASONS


def test_the_line_is_kept_and_nobody_waits_for_ever() -> None:
    async def main() -> None:
        gate, room, passed = WaitLine(), [0], []
        loop = asyncio.get_running_loop()

        def take() -> bool | None:
            if room[0] <= 0:
                return None
            room[0] -= 1
            return True

        async def come(name: int, wait_s: float, *, in_front: bool = False) -> None:
            found = await gate.wait(take, until_s=loop.time() + wait_s, in_front=in_front)
            passed.append(name if found else -name)

        waiting = [asyncio.create_task(come(name, WAIT_S)) for name in (1, 2, 3)]
        await asyncio.sleep(0)
        waiting.append(asyncio.create_task(come(4, 0.01)))
        await waiting[3]
        assert passed == [-4]
        waiting.append(asyncio.create_task(come(5, WAIT_S, in_front=True)))
        await asyncio.sleep(0)
        waiting[0].cancel()
        for _ in range(3):
            room[0] += 1
            gate.changed()
            await asyncio.sleep(0.01)
        await asyncio.wait(waiting)
        assert passed == [-4, 5, 2, 3]
        assert gate.num_waiting == 0

    asyncio.run(main())


def join_threads() -> None:
    """Those that read and ask end by themselves."""
    for thread in threading.enumerate():
        if thread.name.startswith(("headwater router lookup", "headwater router reading")):
            thread.join(WAIT_S)


def test_an_index_that_is_silent_is_not_waited_for() -> None:
    release = threading.Event()

    def slow(timeout_s: float) -> Held | None:
        release.wait(WAIT_S)
        return Held()

    def fails(timeout_s: float) -> Held | None:
        raise RuntimeError("down")

    async def main() -> None:
        assert await Looker(None, timeout_s=1).look("/", {}) is None
        for ask in (slow, fails, lambda timeout_s: None):
            looker = Looker(lambda *_, ask=ask: ask, timeout_s=0.01)
            for _ in range(6):
                assert await looker.look("/", {}) is None
            assert looker.state == "open"  # left alone: nothing more is asked
            looker.close()
        looker = Looker(lambda *_: lambda timeout_s: Held(pool=3), timeout_s=WAIT_S)
        assert await looker.look("/", {}) == Held(pool=3)
        looker.close()

    try:
        asyncio.run(main())
    finally:
        release.set()
        join_threads()


@pytest.mark.fault("S13")
def test_prompts_that_take_long_to_read_are_no_fault_of_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    release, reads = threading.Event(), 0

    def lookup(endpoint: str, body: Mapping[str, object]) -> Ask | None:
        nonlocal reads
        reads += 1
        if body.get("long"):
            release.wait(WAIT_S)
        if body.get("broken"):
            raise RuntimeError("cannot be read")
        return None if body.get("unread") else lambda timeout_s: Held(pool=3)

    async def main() -> None:
        monkeypatch.setattr("headwater.router.lookup._READ_S", WAIT_S)
        looker = Looker(lookup, timeout_s=WAIT_S)
        for _ in range(3):
            assert await looker.look("/", {"broken": True}) is None
        monkeypatch.setattr("headwater.router.lookup._READ_S", 0.01)
        for _ in range(3):
            assert await looker.look("/", {"long": True}) is None  # not waited for
        assert looker.state == "closed"
        monkeypatch.setattr("headwater.router.lookup._READ_S", WAIT_S)
        assert await looker.look("/", {}) == Held(pool=3)
        assert await looker.look("/", {"unread": True}) == Held()  # nobody is known to hold it
        task = asyncio.create_task(looker.look("/", {"long": True}))
        await asyncio.sleep(0)
        before = reads
        assert await looker.look("/", {}) is None  # all are busy with others' prompts
        assert (reads, looker.state) == (before, "closed")
        release.set()
        assert await task == Held(pool=3)
        assert await looker.look("/", {}) == Held(pool=3)
        looker.close()

    try:
        asyncio.run(main())
    finally:
        release.set()
        join_threads()


def test_a_machine_that_stood_still_past_a_deadline_begins_nothing_more() -> None:
    """Room and the deadline come in one turn of the loop, and the room is heard of first."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        router = Router(RouterConfig(), metrics=Metrics())
        router.membership.heard(beat("n", url="http://127.0.0.1:1", load=NodeLoad(free_slots=0)))
        call = Call(endpoint=COMPLETIONS, body={}, content=b"{}", request_id="one", until_s=loop.time() + 0.2)
        nobody: Any = None
        asking = asyncio.create_task(router.route(call, nobody))
        await asyncio.sleep(0.05)
        assert router.state()["queues"]["waiting_for_entry"] == 1
        time.sleep(0.3)  # the machine stands still
        router.membership.heard(beat("n", url="http://127.0.0.1:1", load=NodeLoad(free_slots=1)))
        with pytest.raises(NoAnswer) as raised:
            await asking
        assert raised.value.status == 504
        assert router.state()["decisions"][0]["attempts"] == []  # and nobody is blamed
        await router.aclose()

    asyncio.run(main())


# --- one request ------------------------------------------------------------------------------------------------------


def test_a_request_goes_through_prefill_and_decode() -> None:
    with world() as here:
        prefill, decode = here.add("p1", "prefill"), here.add("d1", "decode")
        for stream in (False, True):
            body: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            found = here.complete(request_id="abc", max_tokens=5, **body)
            assert found.headers["x-request-id"] == "abc"
            tokens = here.tokens(found)
            tokens.check("abc")
            assert tokens.done
            assert tokens.texts[0].startswith("d1|")
            assert "|p1|" in tokens.texts[0]
            assert tokens.usage is not None
            way = tokens.usage["headwater"]["router"]
            assert tokens.usage["headwater"]["computed_tokens"] == 7
            assert (way["request_id"], way["nodes"]) == ("abc", {"prefill": "p1", "decode": "d1"})
            assert way["pool_s"] == pytest.approx(0.003)
            assert 0 < way["decode_s"] <= way["ttft_s"] <= way["total_s"]
            assert 0 < way["prefill_s"] < way["ttft_s"]
        made = here.client.post(COMPLETIONS, json={"prompt": "x"}, headers={b"x-request-id": b"not valid \xe9"})
        assert made.headers["x-request-id"].startswith("req-")
        assert [one.request_id for one in decode.asked] == ["abc", "abc", made.headers["x-request-id"]]
        assert prefill.asked[0].body == {"endpoint": COMPLETIONS, "body": {"prompt": "once", "max_tokens": 5}}
        assert len({one.attempt for one in prefill.asked + decode.asked}) == 6
        here.until_idle()
        metrics = here.client.get("/metrics").text
        assert 'headwater_router_phase_seconds_count{phase="prefill"} 3.0' in metrics
        assert 'headwater_router_phase_seconds_count{phase="pool"} 3.0' in metrics
        assert 'headwater_router_requests_total{outcome="answered"} 3.0' in metrics
        assert 'headwater_router_nodes{role="decode",state="usable"} 1.0' in metrics
        (decision, *_) = here.state()["decisions"]
        assert [one["node"] for one in decision["attempts"]] == ["p1", "d1"]
        assert all(one["why"] and one["how"] == "round_robin" for one in decision["decisions"])
        assert "once" not in json.dumps(here.state())
        models = here.client.get("/v1/models").json()["data"]
        assert [(one["id"], one["max_model_len"]) for one in models] == [("tiny", 4096)]
        assert here.client.get("/v1/models/tiny").status_code == 200
        assert here.client.get("/v1/models/other").status_code == 404


def test_mixed_nodes_answer_alone_and_step_in() -> None:
    with world() as here:
        here.add("m1", "mixed")
        found = here.client.post("/v1/chat/completions", json={"messages": []})
        assert found.status_code == 200
        assert here.nodes["m1"].asked[0].path == "/v1/chat/completions"
        assert here.nodes["m1"].asked[0].body == {"messages": []}
        here.add("p1", "prefill")
        here.add("d1", "decode", fault=Fault.ERROR)
        for _ in range(4):  # a prefill whose ticket no decode node takes is no loss
            tokens = here.tokens(here.complete())
            assert (tokens.status, tokens.node) == (200, "m1")


@pytest.mark.parametrize("where", ["prefill", "decode", "mixed"])
def test_whatever_goes_wrong_before_a_token_another_node_answers(where: str) -> None:
    faults = [one for one in BEFORE if (one is not Fault.FOREIGN) or where == "prefill"]
    if where == "decode":
        faults.append(Fault.SLOW)
    with world(**IMPATIENT, max_attempts=8) as here:
        here.add("good", where)
        bad = here.add("worse", where)
        for name, role in (("p", "prefill"), ("d", "decode")):
            if where != "mixed" and role != where:
                here.add(name, role)
        cases = [(fault, i % 2 == 0) for i, fault in enumerate(faults)]
        cases += [(fault, not stream) for fault, stream in cases if fault in (Fault.NONSENSE, Fault.EMPTY, Fault.HALF)]
        for epoch, (fault, stream) in enumerate(cases):
            bad.script = lambda asked, fault=fault: fault  # type: ignore[misc]
            bad.asked.clear()
            assert here.join(bad, epoch=epoch + 1).json()["came"] == "new"  # afresh: whatever it did is forgotten
            for attempt in range(2):  # one of two goes there first
                name = f"{fault}-{attempt}"
                tokens = here.tokens(here.complete(request_id=name, stream=stream))
                assert tokens.status == 200, (fault, tokens)
                tokens.check(name)
                assert tokens.done
                assert not any("worse|" in text for text in tokens.texts) or fault is Fault.SLOW
            assert bad.asked, fault


@pytest.mark.parametrize("where", ["prefill", "decode", "mixed"])
def test_alone_it_is_an_honest_error_and_no_token(where: str) -> None:
    with world(**IMPATIENT, max_attempts=2, queue_timeout_s=0.2, pause_s=0.02, max_pause_s=0.04) as here:
        bad = here.add("worse", where)
        for name, role in (("p", "prefill"), ("d", "decode")):
            if where != "mixed" and role != where:
                here.add(name, role)
        for fault in (Fault.REJECT, Fault.ERROR, Fault.DIE, Fault.HANG, Fault.MISSING, Fault.REFUSE):
            bad.script = lambda asked, fault=fault: fault  # type: ignore[misc]
            tokens = here.tokens(here.complete(request_id=fault, stream=True))
            tokens.check(fault)
            assert tokens.error is not None
            assert tokens.status == {Fault.REFUSE: 503, Fault.REJECT: 400}.get(fault, 502), (fault, tokens)
            if fault is Fault.REJECT:
                assert tokens.error["message"] == "prompt is wrong"
                assert tokens.error["code"] == "scripted"


@pytest.mark.fault("B7")
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_comes_to_nothing_leaves_no_node_alone(*, stream: bool) -> None:
    with world(pause_s=60.0, max_pause_s=60.0) as here:
        nodes = [here.add(name, "mixed", fault=Fault.ERROR) for name in ("a", "b")]
        for node in nodes:
            node.error_code = "not_finite"
        for _ in range(6):
            assert here.tokens(here.complete(stream=stream)).status == 502
        assert sum(len(node.asked) for node in nodes) == 12  # a second opinion, and no third
        nodes[0].script = lambda asked: Fault.NONE
        for i in range(12):
            assert here.tokens(here.complete(request_id=f"r{i}", stream=stream)).node == "a"
        here.until_idle()
        assert {one["node"]: one["breaker"] for one in here.state()["nodes"]} == {"a": "closed", "b": "open"}


def test_in_the_middle_of_a_stream_an_event_says_so_and_nobody_else_goes_on() -> None:
    with world(**IMPATIENT, pause_s=0.01, max_pause_s=0.01) as here:
        bad, good = here.add("bad", "decode"), here.add("good", "decode")
        here.add("p", "prefill")
        for fault in MIDDLE:
            bad.script = lambda asked, fault=fault: fault  # type: ignore[misc]
            bad.asked.clear()
            while not bad.asked:
                tokens = here.tokens(here.complete(request_id=fault, stream=True))
                tokens.check(fault)
            assert tokens.node == "bad"
            assert (tokens.done, len(tokens.texts)) == (False, 2)
            assert tokens.error is not None
            whole = here.tokens(here.complete(request_id="whole"))  # where nothing is sent before all of it is there
            whole.check("whole")
            assert whole.done
        assert good.asked


def test_a_node_that_hangs_is_left_alone_and_a_slow_one_is_waited_for() -> None:
    with world(pause_s=30.0, max_pause_s=30.0, silence_s=0.1, probe_timeout_s=2.0) as here:  # so long is nobody busy
        hung, slow = here.add("a", "mixed", fault=Fault.HANG), here.add("b", "mixed", fault=Fault.SLOW)
        for i in range(2):
            tokens = here.tokens(here.complete(request_id=f"r{i}"))
            assert tokens.node == "b"
        assert len(hung.asked) == 1
        assert hung.probes == 1
        assert slow.probes >= 2
        here.until_idle()
        states = {one["node"]: one["breaker"] for one in here.state()["nodes"]}
        assert states == {"a": "open", "b": "closed"}
        here.join(hung, epoch=1)  # a new process has the name: it starts afresh
        assert {one["node"]: one["breaker"] for one in here.state()["nodes"]}["a"] == "closed"


@pytest.mark.fault("X9")
def test_what_a_silent_node_says_when_it_is_asked_is_read_up_to_a_limit() -> None:
    with world(silence_s=0.1) as here:
        large, good = here.add("a", "mixed", fault=Fault.SLOW), here.add("b", "mixed")
        large.slow_s, large.probe_pad = WAIT_S, 1 << 20
        for i in range(2):
            assert here.tokens(here.complete(request_id=f"r{i}")).node == "b"
        assert (len(large.asked), large.probes) == (1, 1)
        assert good.asked


@pytest.mark.fault("S9")
def test_a_probe_that_nobody_waits_for_is_made_again_and_being_late_counts() -> None:
    with world(pause_s=0.05, max_pause_s=0.05, max_attempts=1, silence_s=60.0) as here:
        node = here.add("m", "mixed", fault=Fault.DIE)

        def breaker() -> str:
            found: str = here.state()["nodes"][0]["breaker"]
            return found

        assert here.complete().status_code == 502
        node.script = lambda asked: Fault.HANG
        with pytest.raises(httpx2.ReadTimeout):
            httpx2.post(here.url + COMPLETIONS, json={"prompt": "x"}, timeout=0.3, trust_env=False, verify=False)
        assert len(node.asked) == 2  # the second was the probe
        here.until(lambda: breaker() == "open")
        node.script = lambda asked: Fault.NONE
        assert here.complete().status_code == 200
        here.until(lambda: breaker() == "closed")
        node.script = lambda asked: Fault.HANG
        for _ in range(4):  # clients in a hurry say nothing about a node
            assert here.complete(timeout_s=0.05).status_code == 504
            here.until_idle()
            assert breaker() == "closed"
    with world(pause_s=60.0, max_pause_s=60.0, max_attempts=1, silence_s=60.0, request_timeout_s=0.2) as here:
        here.add("m", "mixed", fault=Fault.HANG)
        for i in range(3):
            assert breaker() == "closed", i
            assert here.complete().status_code == 504
            here.until_idle()
        assert breaker() == "open"


def test_the_deadline_holds_whatever_a_node_does() -> None:
    with world(silence_s=60.0) as here, Stalls() as stalls:
        for fault in (Fault.HANG, Fault.MID_HANG):
            here.add(f"m-{fault}", "mixed", fault=fault)
            for stream in (False, True):
                began_s = time.monotonic()
                tokens = here.tokens(here.complete(timeout_s=0.2, stream=stream))
                assert time.monotonic() < began_s + 0.2 + 0.5 + stalls.most_s
                tokens.check("one")
                middle = fault is Fault.MID_HANG and stream
                assert tokens.status == (200 if middle else 504)
                assert tokens.error is not None
                assert tokens.error["code"] == "timeout"
            here.join(here.nodes[f"m-{fault}"], lease_s=0)


class StandsStill(Metrics):
    """Holds up the router's loop for a while just when a prefill was counted: a machine that stands still there."""

    def count(self, name: str, /, amount: float = 1, **labels: str) -> None:
        super().count(name, amount, **labels)
        if name == "router_attempts_total" and labels["phase"] == "prefill":
            time.sleep(0.4)


def test_no_attempt_begins_after_the_deadline_however_late_the_loop_wakes() -> None:
    with world(metrics=StandsStill()) as here:
        here.add("p", "prefill")
        decode = here.add("d", "decode")
        assert here.complete(timeout_s=0.3).status_code == 504
        here.until_idle()
        assert [one["phase"] for one in here.state()["decisions"][0]["attempts"]] == ["prefill"]
        assert not decode.asked


def test_what_was_lost_in_the_pool_is_prefilled_again_elsewhere_and_not_for_ever() -> None:
    with world() as here:
        here.add("p1", "prefill")
        here.add("p2", "prefill")
        decode = here.add("d", "decode")
        missing = {"p1", "p2"}
        decode.script = lambda asked: (
            Fault.MISSING if asked.body["ticket"]["by"].split("|")[0] in missing else Fault.NONE
        )
        tokens = here.tokens(here.complete())
        assert tokens.status == 502
        assert tokens.error is not None
        assert "from block 3 on" in tokens.error["message"]
        assert len(decode.asked) == 3  # max_prefills
        assert len({one.body["ticket"]["by"].split("|")[0] for one in decode.asked}) == 2
        missing.discard("p2")
        for i in range(2):
            here.tokens(here.complete(request_id=f"r{i}", stream=True)).check(f"r{i}")
        here.until_idle()
        assert here.router.metrics.value("router_requests_total", outcome="answered") == 2


# --- clients that leave -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["prefill", "decode", "stream", "line"])
def test_a_client_that_leaves_is_passed_on(phase: str) -> None:
    with world(queue_timeout_s=30.0) as here:
        prefill, decode = here.add("p", "prefill"), here.add("d", "decode")
        where = prefill if phase == "prefill" else decode
        if phase == "stream":
            decode.script = lambda asked: Fault.MID_HANG
        elif phase == "line":
            here.join(decode, load={"free_slots": 0})
        else:
            where.gate = asyncio.Event()
        client = httpx2.Client(base_url=here.url, timeout=WAIT_S, trust_env=False, verify=False)
        body = {"prompt": "once", "stream": True}
        if phase == "stream":
            with client.stream("POST", COMPLETIONS, json=body) as response:
                next(response.iter_bytes())
        else:
            host, _, port = here.url.removeprefix("http://").partition(":")
            data = json.dumps(body).encode()
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
                connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
                if phase == "line":
                    here.until(lambda: here.state()["queues"]["waiting_for_entry"] == 1)
                else:
                    here.until(lambda: where.asked)
        client.close()
        if phase != "line":
            here.until(lambda: where.left == [where.asked[0].attempt])
        here.until_idle()
        here.until(lambda: here.router.metrics.value("router_requests_total", outcome="gone") == 1)
        assert here.state()["decisions"][0]["outcome"] == "gone"
        assert {one["breaker"] for one in here.state()["nodes"]} == {"closed"}


# --- nodes that come and go -------------------------------------------------------------------------------------------


def test_leases_run_out_and_nodes_are_found_again() -> None:
    with world(queue_timeout_s=0.05) as here:
        assert here.client.get("/health").status_code == 503
        found = here.complete()
        assert (found.status_code, found.json()["error"]["code"]) == (503, "no_node")
        assert found.headers["retry-after"]
        prefill = here.add("p", "prefill")
        assert here.client.get("/health").status_code == 503
        decode = here.add("d", "decode", lease_s=0.3)
        assert here.client.get("/health").status_code == 200
        assert here.complete().status_code == 200
        here.until(lambda: here.client.get("/health").status_code == 503)
        assert [one["node"] for one in here.state()["nodes"]] == ["p"]
        found = here.complete()
        assert (found.status_code, found.json()["error"]["code"]) == (503, "no_room")
        assert "no decode node" in found.json()["error"]["message"]
        assert here.join(decode).json()["came"] == "new"
        assert here.complete().status_code == 200
        for changes in ({"identity": "00" * 32}, {"block_tokens": 32}):
            refused = here.join(here.add("x", "decode", join=False), **changes)
            assert refused.status_code == 409
            assert "same" in refused.json()["error"]["message"]
            here.inside(here.nodes.pop("x").kill())
        assert here.client.post("/pd/nodes", json={"node": "y"}).status_code == 400
        assert here.join(prefill, lease_s=0).json()["came"] == "left"
        assert here.client.get("/health").status_code == 503
        kinds = Counter(event.kind for event in here.router.metrics.events())
        assert kinds["node_joined"] == 3
        assert (kinds["node_expired"], kinds["node_left"], kinds["node_refused"]) == (1, 1, 2)


def test_a_node_that_drains_gets_nothing_new_and_finishes_what_it_has() -> None:
    with world() as here, ThreadPoolExecutor(1) as thread:
        one, two = here.add("a", "mixed"), here.add("b", "mixed")
        one.gate = asyncio.Event()
        here.client.post("/pd/drain", json={"node": "b"})
        under_way = thread.submit(here.complete, request_id="first")
        here.until(lambda: one.asked)
        drained = here.client.post("/pd/drain", json={"node": "a"}).json()
        assert drained == {"node": "a", "draining": True, "requests": 1}
        assert here.client.get("/health").status_code == 503
        here.client.post("/pd/drain", json={"node": "b", "draining": False})
        here.join(one)  # its heartbeats do not take that back
        for i in range(4):
            assert here.tokens(here.complete(request_id=f"r{i}")).node == "b"
        here.loop.call_soon_threadsafe(one.gate.set)
        tokens = here.tokens(under_way.result())
        assert (tokens.node, tokens.done) == ("a", True)
        assert len(one.asked) == 1
        assert len(two.asked) == 4
        assert here.client.post("/pd/drain", json={"node": "c"}).status_code == 404
        here.client.post("/pd/drain", json={"node": "a", "draining": False})
        here.join(two, draining=True)  # by its own word
        assert here.tokens(here.complete(request_id="last")).node == "a"


def test_requests_wait_in_line_for_a_slot() -> None:
    with world(queue_timeout_s=30.0) as here, ThreadPoolExecutor(6) as threads:
        here.add("p", "prefill")
        decode = here.add("d", "decode", load={"free_slots": 2})
        decode.gate = asyncio.Event()
        asked = [threads.submit(here.complete, request_id=f"r{i}") for i in range(6)]
        here.until(lambda: len(decode.asked) == 2)
        here.until(lambda: here.state()["queues"]["waiting_for_entry"] == 4)
        assert len(here.nodes["p"].asked) == 2  # nothing is prefilled for which there is no slot
        here.loop.call_soon_threadsafe(decode.gate.set)
        for i, one in enumerate(asked):
            tokens = here.tokens(one.result())
            tokens.check(f"r{i}")
            assert tokens.done


def test_the_index_decides_and_where_it_is_silent_nodes_take_turns() -> None:
    answers: list[Held | None] = []

    def lookup(endpoint: str, body: Any) -> Ask | None:
        assert (endpoint, body["prompt"]) == (COMPLETIONS, "once")
        return lambda timeout_s: answers[0]

    with world(lookup=lookup, lookup_timeout_s=5.0) as here:
        nodes = [here.add(f"{role[0]}{i}", role) for role in ("prefill", "decode") for i in range(3)]
        found = Found(
            4, (Holder("p1", 4, 4, 0, 0, 4), Holder("d0", 4, 0, 0, 0, 4), Holder("d2", 4, 1, 4, 0, 0)), pool=0
        )
        answers[:] = [held_of(found, block_tokens=250, num_tokens=1000)]
        assert held_of(replace(found, answered=False), block_tokens=250, num_tokens=1000) is None
        for i in range(4):
            here.tokens(here.complete(request_id=f"r{i}")).check(f"r{i}")
        here.until_idle()
        assert {node.name: len(node.asked) for node in nodes if node.asked} == {"p1": 4, "d2": 4}
        assert "1000 of 1000 tokens" in here.state()["decisions"][0]["decisions"][0]["why"]
        answers[:] = [None]
        for i in range(6):
            here.complete(request_id=f"s{i}")
        assert [len(node.asked) for node in nodes] == [2, 6, 2, 2, 2, 6]
        assert here.router.metrics.value("router_choices_total", how="estimate") == 8
        assert here.router.metrics.value("router_choices_total", how="round_robin") == 12


# --- whose fault it is ------------------------------------------------------------------------------------------------


@pytest.mark.fault("S3")
@pytest.mark.parametrize("role", ["decode", "mixed"])
def test_an_answer_that_is_too_large_is_its_clients_own_fault(role: str) -> None:
    with world(max_answer_bytes=600, max_attempts=4) as here:
        nodes = [here.add("m", "mixed")] if role == "mixed" else [here.add("p", "prefill"), here.add("d", "decode")]
        for i in range(4):
            found = here.complete(request_id="r" * 100)
            assert (found.status_code, found.json()["error"]["code"]) == (400, "answer_too_large"), found.text
            assert len(nodes[-1].asked) == i + 1  # once, and nobody else is tried
        here.until_idle()
        state = here.state()
        assert {one["breaker"] for one in state["nodes"]} == {"closed"}
        assert state["decisions"][0]["attempts"][-1]["outcome"] == "rejected"
        here.tokens(here.complete(request_id="r")).check("r")


@pytest.mark.fault("S3")
def test_more_answers_than_any_node_gives_are_refused_at_the_door() -> None:
    with world() as here:
        nodes = [here.add("p", "prefill"), here.add("d", "decode", join=False), here.add("e", "decode", join=False)]
        here.join(nodes[1], max_answers=3)
        here.join(nodes[2], max_answers=4)
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"n": 5}, "n"), ({"prompt": ["a"] * 5}, "prompt"), ({"prompt": [[1], [2]], "n": 3}, "n"),
        ]  # fmt: skip
        for body, param in wrong:
            found = here.complete(**{"prompt": "a", **body})
            assert (found.status_code, found.json()["error"]["param"]) == (400, param), found.text
        assert not nodes[0].asked
        right: list[dict[str, Any]] = [{"n": 4}, {"prompt": [1, 2, 3, 4, 5, 6]}, {"n": "many"}]
        for body in right:
            assert here.complete(**body).status_code == 200
        here.join(here.add("f", "decode", join=False))  # which does not say
        assert here.complete("a", n=5).status_code == 200


@pytest.mark.fault("S8")
def test_a_client_that_reads_too_slowly_makes_no_node_rest() -> None:
    with world() as here:
        node = here.add("m", "mixed", fault=Fault.MID_ERROR)
        for code, breaker in (("read_too_slowly", "closed"), ("scripted", "open")):
            node.error_code = code
            for _ in range(4):
                tokens = here.tokens(here.complete(stream=True))
                assert tokens.error is not None
                assert tokens.error["code"] == code
                here.until_idle()
                if here.state()["nodes"][0]["breaker"] == "open":
                    break
            assert here.state()["nodes"][0]["breaker"] == breaker
            assert here.state()["decisions"][0]["outcome"] == "broken"


@pytest.mark.fault("S20")
def test_what_is_shown_holds_nothing_that_a_client_wrote() -> None:
    document = {"error": {"message": "temprature: 'my secret' is no number", "code": "invalid_value"}}
    judged = judge("n", 400, document)
    assert (str(judged), judged.document) == ("invalid_value", document)
    for code in (None, 7, "my secret", "x" * 65):
        assert str(judge("n", 400, {"error": {"message": "m", "code": code}})) == "no code"
    with world() as here:
        here.add("m", "mixed", fault=Fault.REJECT)
        found = here.complete("my secret")
        assert (found.status_code, found.json()["error"]["message"]) == (400, "prompt is wrong")
        here.until_idle()
        (attempt,) = here.state()["decisions"][0]["attempts"]
        assert (attempt["outcome"], attempt["why"]) == ("rejected", "scripted")


# --- the face ---------------------------------------------------------------------------------------------------------


def test_keys_bodies_and_limits() -> None:
    with world(api_key="sesame", max_body_bytes=2000) as here:
        node = here.add("m", "mixed", join=False)
        assert here.client.get("/health").status_code == 503
        for path in ("/state", "/metrics", "/v1/models", "/nowhere"):
            assert here.client.get(path).status_code == 401
        sesame = {"authorization": "Bearer sesame"}
        assert here.client.post("/pd/nodes", json=node.beat(), headers=sesame, auth=httpx2.Auth()).status_code == 401
        assert here.client.post("/pd/nodes", json=node.beat()).status_code == 200
        here.client.headers.update(sesame)
        assert here.complete().status_code == 200
        as_json = {"content-type": "application/json"}
        for content in (b"", b"[]", b"{", b'{"prompt": 1e999}', b'{"prompt": NaN}'):
            found = here.client.post(COMPLETIONS, content=content, headers=as_json)
            assert (found.status_code, found.json()["error"]["code"]) == (400, "invalid_json")
        assert here.complete("x" * 3000).status_code == 413
        assert here.client.post(COMPLETIONS, content=b"{}").status_code == 415
        assert here.client.get(COMPLETIONS).status_code == 405
        assert here.client.get("/nowhere").status_code == 404
        for timeout in ("0", "-1", "nan", "soon"):
            found = here.client.post(COMPLETIONS, json={}, headers={"x-headwater-timeout-s": timeout})
            assert found.status_code == 400
        assert len(node.asked) == 1


def test_too_many_at_a_time_are_told_to_come_back() -> None:
    with world(max_requests=1) as here, ThreadPoolExecutor(1) as thread:
        node = here.add("m", "mixed")
        node.gate = asyncio.Event()
        first = thread.submit(here.complete)
        here.until(lambda: node.asked)
        found = here.complete()
        assert (found.status_code, found.json()["error"]["code"]) == (429, "queue_full")
        here.loop.call_soon_threadsafe(node.gate.set)
        assert first.result().status_code == 200


def test_the_end_of_the_router_is_told_and_leaves_nothing() -> None:
    with world(silence_s=60.0) as here, ThreadPoolExecutor(2) as threads:
        silent, midst = here.add("a", "mixed", fault=Fault.HANG), here.add("b", "mixed", fault=Fault.MID_HANG)
        asked = [threads.submit(here.complete, request_id=f"r{i}", stream=True) for i in range(2)]
        here.until(lambda: silent.asked and midst.asked and here.state()["under_way"])
        here.until(lambda: any("b" in one["nodes"].values() for one in here.state()["under_way"]))
        here.server.should_exit = True
        found = [here.tokens(one.result()) for one in asked]
        assert sorted(one.status for one in found) == [200, 503]
        assert all(one.error is not None and one.error["code"] == "shutting_down" for one in found)
        here.until(lambda: silent.left and midst.left)
        here.thread.join(WAIT_S)


def test_a_router_loads_no_engine() -> None:
    code = "import sys, headwater.router.server; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- everything at once -----------------------------------------------------------------------------------------------


class Chaos:
    """Nodes that do anything, clients that leave, nodes that are killed, come back and drain; all from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.faults: Counter[Fault] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.limits_s: dict[str, float] = {}
        self._deck: list[Fault] = []
        self.stop = threading.Event()

    def script(self, asked: Asked) -> Fault:
        self._deck = self._deck or self.random.sample(list(Fault), len(Fault))  # dealt: each comes soon, and often
        fault = Fault.NONE if self.random.random() < 0.6 else self._deck.pop()
        self.faults[fault] += 1
        return fault

    def meddle(self, here: World, nodes: Sequence[Node]) -> None:
        options: dict[str, Any] = {"auth": Signed(), "timeout": WAIT_S, "trust_env": False, "verify": False}
        with httpx2.Client(base_url=here.url, **options) as client:
            while not self.stop.wait(0.03):
                node, what = self.random.choice(nodes), self.random.choice(["kill", "beat", "drain", "short"])
                if what == "kill":
                    here.inside(node.kill())
                    here.inside(node.open())
                elif what == "drain":
                    client.post("/pd/drain", json={"node": node.name, "draining": self.random.random() < 0.3})
                else:
                    lease_s = 0.05 if what == "short" else 60
                    client.post("/pd/nodes", json=node.beat(lease_s=lease_s, load={"free_slots": 30}))

    async def request(self, client: httpx2.AsyncClient, name: str) -> None:
        timeout_s = self.limits_s[name] = self.random.choice([0.3, 1.0, 3.0])
        stream, leaves = self.random.random() < 0.7, self.random.random() < 0.1
        headers = {"x-request-id": name, "x-headwater-timeout-s": str(timeout_s)}
        body = {"prompt": name, "stream": stream}
        try:
            async with asyncio.timeout(self.random.random() * 0.2 if leaves else WAIT_S):
                found = await client.post(COMPLETIONS, json=body, headers=headers)
        except TimeoutError:
            assert leaves, "a request did not end"
            self.outcomes["left"] += 1
            return
        tokens = Tokens.of(found.status_code, found.headers.get("content-type", ""), found.content)
        tokens.check(name)
        self.outcomes["answered" if tokens.done else f"{tokens.status}{' in a stream' * bool(tokens.texts)}"] += 1

    async def requests(self, url: str, num_requests: int, num_at_a_time: int, first: int = 0) -> None:
        turn = asyncio.Semaphore(num_at_a_time)
        async with httpx2.AsyncClient(base_url=url, timeout=WAIT_S, trust_env=False, verify=False) as client:

            async def one(name: str) -> None:
                async with turn:
                    await self.request(client, name)

            async with asyncio.TaskGroup() as group:
                for i in range(first, first + num_requests):
                    group.create_task(one(f"r{i}"))


def test_hundreds_of_requests_while_everything_goes_wrong() -> None:
    chaos = Chaos(seed=1)
    with world(**IMPATIENT, num_decisions=1000, max_attempts=3) as here, Stalls() as stalls:
        for name, role in (("p1", "prefill"), ("p2", "prefill"), ("d1", "decode"), ("d2", "decode"), ("m", "mixed")):
            here.add(name, role, load={"free_slots": 30}).script = chaos.script
        meddler = threading.Thread(target=chaos.meddle, args=(here, list(here.nodes.values())), name="test meddler")
        meddler.start()
        rounds = 0
        try:
            while rounds < 5 and chaos.outcomes["answered"] <= 60:  # a slow machine is late for many of them
                asyncio.run(chaos.requests(here.url, 200, 12, first=200 * rounds))
                rounds += 1
        finally:
            chaos.stop.set()
            meddler.join(WAIT_S)
        here.until_idle()
        trips = here.state()["decisions"]
        assert 200 * rounds - chaos.outcomes["left"] <= len(trips) <= 200 * rounds  # who left at once was never seen
        for routed in trips:
            assert routed["total_s"] < chaos.limits_s[routed["request_id"]] + 0.5 + stalls.most_s, routed
        assert chaos.outcomes["answered"] > 60, chaos.outcomes
        assert {"left", "200 in a stream"} <= set(chaos.outcomes), chaos.outcomes
        assert {"502", "503", "504"} & set(chaos.outcomes), chaos.outcomes
        assert len(chaos.faults) == len(Fault), chaos.faults
