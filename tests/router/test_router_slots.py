"""A router counts slots by answers: one request that wants many is counted as many, and keeps nobody out.

And what else an attack on a router has shown: a large answer is not taken apart on its loop, and a node that answers is
there, however late its heartbeats are.
"""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.role import Role
from headwater.disagg.headers import ATTEMPT
from headwater.disagg.heartbeat import Heartbeat, NodeLoad
from headwater.disagg.width import num_choices, num_prompts
from headwater.metrics import Metrics
from headwater.router.choice import NodeFacts, Size, choose_decode, choose_entry
from headwater.router.nodes import NodeTable
from headwater.router.routed_request import Attempt, Call, RoutedRequest, RoutePhase
from headwater.router.router import Router
from headwater.router.settings import RouterConfig
from headwater.router.trouble import Trouble
from headwater.router.wait_line import WaitLine
from headwater.router.whole import PARSED_BYTES, WholeNodeAnswer
from headwater.serve.reading import large_routable
from router_kit import IDENTITY, LAYOUT, WAIT_S, world

COMPLETIONS = "/v1/completions"
LARGE = "x" * 70_000  # a body with it is read by another process


# --- how wide a request is --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "prompts", "choices"),
    [
        ({}, 1, 1),
        ({"prompt": "a"}, 1, 1),
        ({"prompt": ["a", "b", "c"]}, 3, 1),
        ({"prompt": [1, 2, 3], "n": 5}, 1, 5),
        ({"prompt": [[1], [2]], "n": 2}, 2, 2),
        ({"prompt": [], "n": 0}, 1, 1),
        ({"prompt": None, "n": "many"}, 1, 1),
        ({"n": True}, 1, 1),
        ({"n": 1 << 62}, 1, 1 << 31),
    ],
)
def test_how_wide_a_body_is(body: dict[str, Any], prompts: int, choices: int) -> None:
    assert (num_prompts(body), num_choices(body)) == (prompts, choices)
    read = large_routable(json.dumps({**body, "user": LARGE}).encode())
    assert (read.num_prompts, num_choices(read.body)) == (prompts, choices)


def test_a_large_body_for_too_many_answers_reaches_no_node() -> None:
    with world(request_timeout_s=4 * WAIT_S) as here:  # a process has to start
        nodes = [here.add("p", "prefill", max_answers=100), here.add("d", "decode", max_answers=4)]
        bodies: list[dict[str, Any]] = [{"prompt": ["a"] * 5}, {"prompt": "a", "n": 5}, {"prompt": ["a", "b"], "n": 3}]
        for body in bodies:
            found = here.client.post(COMPLETIONS, json={**body, "user": LARGE}, timeout=4 * WAIT_S)
            assert (found.status_code, found.json()["error"]["code"]) == (400, "invalid_value"), found.text
        assert not any(node.asked for node in nodes)


# --- slots ------------------------------------------------------------------------------------------------------------


def test_who_wants_many_answers_takes_as_many_slots() -> None:
    with world(queue_timeout_s=WAIT_S, request_timeout_s=WAIT_S) as here, ThreadPoolExecutor(2) as threads:
        prefill = here.add("p", "prefill", max_answers=100)
        decode = here.add("d", "decode", load={"free_slots": 4}, max_answers=4)
        decode.gate = asyncio.Event()
        wide = threads.submit(here.complete, n=4, timeout_s=WAIT_S)
        here.until(lambda: len(decode.asked) == 1)
        assert here.state()["nodes"][0]["believed_free_slots"] == 0
        narrow = threads.submit(here.complete, timeout_s=WAIT_S)
        here.until(lambda: here.state()["queues"]["waiting_for_entry"] == 1)
        assert len(prefill.asked) == 1
        here.loop.call_soon_threadsafe(decode.gate.set)
        assert (wide.result().status_code, narrow.result().status_code) == (200, 200)


def test_slots_are_promised_by_answers_while_the_prompt_is_computed() -> None:
    with world(queue_timeout_s=WAIT_S, request_timeout_s=WAIT_S) as here, ThreadPoolExecutor(2) as threads:
        prefill = here.add("p", "prefill", max_answers=100)
        here.add("d", "decode", load={"free_slots": 4}, max_answers=4)
        prefill.gate = asyncio.Event()
        wide = threads.submit(here.complete, n=3, timeout_s=WAIT_S)
        here.until(lambda: len(prefill.asked) == 1)
        assert here.state()["queues"]["promised_to_decode"] == 3
        other = threads.submit(here.complete, n=2, timeout_s=WAIT_S)
        here.until(lambda: here.state()["queues"]["waiting_for_entry"] == 1)
        assert len(prefill.asked) == 1
        here.loop.call_soon_threadsafe(prefill.gate.set)
        assert (wide.result().status_code, other.result().status_code) == (200, 200)


def test_a_request_goes_where_there_is_room_for_all_of_it() -> None:
    wide = Size(10, 10, num_prompts=2, num_answers=6)

    def node(name: str, role: Role, free: int, most: int | None) -> NodeFacts:
        return NodeFacts(name=name, role=role, free_slots=free, max_answers=most)

    prefill, few = node("p", Role.PREFILL, 2, 9), node("few", Role.DECODE, 5, 9)
    some, small = node("some", Role.DECODE, 6, 9), node("small", Role.DECODE, 9, 5)
    plain = node("plain", Role.DECODE, 1, None)  # counts requests
    decode = choose_decode([few, some, small, plain], wide, None, turn=0)
    assert sorted(one.node for one in decode.candidates) == ["plain", "some"]
    assert {one.node: one.num_slots for one in decode.candidates} == {"plain": 1, "some": 6}
    assert dict(decode.left_out) == {
        "few": "has room for 5 of 6 answers",
        "small": "gives at most 5 answers at once",
    }
    assert [one.num_slots for one in choose_entry([prefill, some], wide, None, turn=0).candidates] == [2]
    assert not choose_entry([node("p", Role.PREFILL, 1, 9), some], wide, None, turn=0).candidates
    assert not choose_entry([prefill, few], wide, None, turn=0).candidates  # six in all, but not at one node
    assert not choose_entry([prefill, some], wide, None, turn=0, promised=1).candidates
    assert choose_entry([prefill, some, few], wide, None, turn=0, promised=5).candidates


# --- in line ----------------------------------------------------------------------------------------------------------


class Slots:
    """Slots that are taken and given back, and a gate before them."""

    def __init__(self, number: int) -> None:
        self.free = number
        self.gate = WaitLine()
        self.passed: list[str] = []

    async def come(self, name: str, wanted: int) -> None:
        def take() -> bool | None:
            if self.free < wanted:
                return None
            self.free -= wanted
            return True

        until_s = asyncio.get_running_loop().time() + WAIT_S
        assert await self.gate.wait(take, until_s=until_s, num_slots=wanted)
        self.passed.append(name)

    def give_back(self, number: int) -> None:
        self.free += number
        self.gate.changed()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_wide_one_lets_as_many_pass_as_it_wants_and_then_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.router.wait_line._MOST_HELD_S", WAIT_S)

    async def main() -> None:
        slots = Slots(0)
        waiting = [asyncio.create_task(slots.come(f"wide{i}", 3)) for i in range(2)]
        await settled()
        waiting += [asyncio.create_task(slots.come(str(i), 1)) for i in range(7)]
        await settled()
        assert slots.gate.num_waiting == 9
        slots.gate._narrow_since_s -= WAIT_S  # the turn of the others has lasted: so may this one
        for _ in range(3):
            slots.give_back(1)
            await settled()
        assert slots.passed == ["0", "1", "2"]
        slots.give_back(1)
        slots.give_back(1)
        await settled()
        assert slots.free == 2  # the others wait now
        slots.give_back(1)
        await settled()
        assert slots.passed == ["0", "1", "2", "wide0"]
        for _ in range(3):
            slots.give_back(1)
            await settled()
        assert slots.passed == ["0", "1", "2", "wide0", "3", "4", "5"]
        slots.give_back(5)
        await asyncio.wait(waiting)
        assert set(slots.passed[7:]) == {"wide1", "6"}
        assert (slots.gate.num_waiting, slots.free) == (0, 1)

    asyncio.run(main())


def test_a_wide_one_for_which_there_is_never_room_keeps_nobody_out() -> None:
    async def main() -> None:
        slots = Slots(3)
        wide = [asyncio.create_task(slots.come("wide", 4)) for _ in range(50)]
        await settled()
        for i in range(40):
            await asyncio.wait_for(slots.come(str(i), 1), WAIT_S)
            slots.give_back(1)
        assert slots.passed == [str(i) for i in range(40)]
        for one in wide:
            one.cancel()
        await asyncio.wait(wide)
        assert slots.gate.num_waiting == 0

    asyncio.run(main())


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=20))
def test_everybody_gets_through_in_the_order_of_its_line(guests: list[tuple[int, int]]) -> None:
    """Each wants some slots of four, and others are given back meanwhile."""

    async def main() -> None:
        slots, tasks, given = Slots(0), [], 0
        for i, (wanted, more) in enumerate(guests):
            tasks.append(asyncio.create_task(slots.come(f"{i} {wanted}", wanted)))
            await settled()
            slots.give_back(more)
            given += more
            await settled()
        while len(slots.passed) < len(tasks):
            slots.give_back(1)
            given += 1
            assert given <= 10 * (len(guests) + 1), "somebody is never let in"
            await asyncio.sleep(0)
            await settled()
        taken = [name.split(" ") for name in slots.passed]
        for line in (
            [int(i) for i, wanted in taken if wanted == "1"],
            [int(i) for i, wanted in taken if wanted != "1"],
        ):
            assert line == sorted(line)
        assert given - slots.free == sum(wanted for wanted, _ in guests)

    asyncio.run(main())


# --- who is there -----------------------------------------------------------------------------------------------------


BEAT = Heartbeat(
    node="n", url="http://127.0.0.1:1", role=Role.MIXED, model="m", identity=IDENTITY, block_tokens=16, layout=LAYOUT,
    lease_s=6.0, load=NodeLoad(free_slots=4),
)  # fmt: skip


def test_a_node_that_answers_is_there_however_late_its_heartbeat_is() -> None:
    table = NodeTable()
    table.heard(BEAT, 0.0)
    slot = table.take_slot("n", tokens=1, now_s=1.0)
    assert slot is not None
    table.lives(slot, 5.0)
    assert table.expire(10.0) == []
    assert table.expire(11.0) == ["n"]
    table.lives(slot, 11.0)  # it has gone: it must come again
    assert table.facts(11.0) == []


def test_an_answer_makes_a_lease_longer() -> None:
    with world() as here:
        nodes = [here.add("p", "prefill"), here.add("d", "decode")]
        before = {node.name: here.router.nodes.get(node.name).until_s for node in nodes}  # type: ignore[union-attr]
        assert here.complete().status_code == 200
        here.until_idle()
        for node in nodes:
            entry = here.router.nodes.get(node.name)
            assert entry is not None
            assert entry.until_s > before[node.name]


@pytest.mark.parametrize("lived", [False, True])
def test_a_connection_that_does_not_come_in_time_is_not_held_against_a_node_that_answers(
    monkeypatch: pytest.MonkeyPatch, *, lived: bool
) -> None:
    """As where the router, or the machine, stood still: then nobody would be left to be asked."""
    tried: list[str] = []

    with world() as here:
        node = here.add("m", "mixed")
        assert here.complete().status_code == 200
        send, entry = httpx2.AsyncClient.send, here.router.nodes.get("m")
        assert entry is not None

        async def late(client: httpx2.AsyncClient, request: httpx2.Request, **more: Any) -> Any:
            if ATTEMPT in request.headers:
                tried.append(request.headers[ATTEMPT])
                if len(tried) == 1:
                    if lived:  # somebody else was answered meanwhile
                        entry.lived_s = asyncio.get_running_loop().time()
                    raise httpx2.ConnectTimeout("as if")
            return await send(client, request, **more)

        monkeypatch.setattr(httpx2.AsyncClient, "send", late)
        assert here.complete(request_id="two").status_code == 200
        here.until_idle()
        attempts = here.state()["decisions"][0]["attempts"]
        assert [one["outcome"] for one in attempts] == ["unreached", "ok"]
        assert here.router.metrics.value("events_total", kind="node_resting") == (0 if lived else 1)
        assert len(node.asked) == 2


@pytest.mark.parametrize(
    ("trouble", "heard_s", "rests"),
    [
        (Trouble.HUNG, 19.5, False),  # it has answered somebody else within the second that a probe may take
        (Trouble.HUNG, 18.0, True),
        (Trouble.UNREACHED, 10.0, False),
        (Trouble.UNREACHED, 9.0, True),
        (Trouble.BROKEN, 20.0, True),
    ],
)
def test_what_a_node_is_left_alone_for(trouble: Trouble, heard_s: float, *, rests: bool) -> None:
    async def main() -> None:
        router = Router(RouterConfig(probe_timeout_s=1.0), metrics=Metrics())
        router.nodes.heard(BEAT, 0.0)
        asked, other = (router.nodes.take_slot("n", tokens=1, now_s=0.0) for _ in range(2))
        assert asked is not None
        assert other is not None
        router.nodes.lives(other, heard_s)
        way = routed()
        way.attempts.append(Attempt(phase=RoutePhase.MIXED, node="n", began_s=10.0))
        router._asker._blame(way, asked, trouble, 20.0)
        assert asked.entry.facts(20.0).resting is rests
        await router.aclose()

    asyncio.run(main())


# --- answers in one piece ---------------------------------------------------------------------------------------------


def routed() -> RoutedRequest:
    return RoutedRequest(Call(endpoint=COMPLETIONS, body={}, content=b"{}", request_id="r", until_s=1.0), 0.0)


TEXTS = st.sampled_from(
    ['","usage":{}}', '\\","usage":{"a":1}}', '"usage"', '{"usage":1}', "\u00e9\U0001f600", "", "\\"]
)
USAGES = st.fixed_dictionaries(
    {"total_tokens": st.integers(0, 9)},
    optional={"usage": st.just({"usage": 1}), "headwater": st.just({"phases": {"decode_s": 1.0}})},
)


@given(st.lists(TEXTS, min_size=1), USAGES, st.booleans(), st.booleans(), st.sampled_from([None, (",", ":")]), TEXTS)
def test_a_large_answer_is_what_a_small_one_would_be(
    texts: list[str],
    usage: dict[str, Any],
    ascii_only: bool,
    last: bool,
    separators: tuple[str, str] | None,
    after: str,
) -> None:
    choices = [{"text": text, "index": i, "usage": {"own": 1}} for i, text in enumerate(texts)]
    document: dict[str, Any] = {"id": "r", "choices": choices, "pad": "x" * PARSED_BYTES, "usage": usage}
    if not last:
        document |= {"kv_transfer_params": None, "more": [after]}
    body = json.dumps(document, ensure_ascii=ascii_only, separators=separators).encode()
    read = WholeNodeAnswer.read(body)
    assert read is not None
    found = json.loads(read.content(routed()))
    told = found["usage"].pop("headwater", None)
    own = usage.pop("headwater", None)
    assert found == document
    if told == own:  # it went on as it came, because something else is called so, too
        assert "usage" in usage or (not last and "usage" in after)
    else:
        assert told["router"]["request_id"] == "r"
        assert told["phases"].get("decode_s") == (1.0 if own else None)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b'{"choices": {}}',
        b"x" * 100_000,
        b"[" + b" " * 100_000 + b"]",
        b'{"choices": [1]' + b" " * 100_000,
        b'{"other": [1]' + b" " * 100_000 + b"}",
    ],
)
def test_what_is_no_answer(body: bytes) -> None:
    assert WholeNodeAnswer.read(body) is None


def test_a_large_answer_without_a_usage_goes_on_as_it_came() -> None:
    for end in (
        b'"usage": null}',
        b'"a": "usage"}',
        b'"a": {"b": 1, "usage": {"c": 1}}}',
        b'"a": "\\"usage"}',
        b'"b": 1}',
    ):
        body = b'{"choices": [' + b"1," * 100_000 + b"1], " + end
        read = WholeNodeAnswer.read(body)
        assert read is not None
        assert json.loads(read.content(routed())) == json.loads(body)


def test_a_routers_loop_takes_no_large_answer_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    loads, dumps = json.loads, json.dumps

    def watched_loads(data: Any, *args: Any, **more: Any) -> Any:
        if threading.current_thread().name == "test router":
            seen.append(len(data))
        return loads(data, *args, **more)

    def watched_dumps(*args: Any, **more: Any) -> str:
        made = dumps(*args, **more)
        if threading.current_thread().name == "test router":
            seen.append(len(made))
        return made

    text = "token " * 100_000
    with world() as here:
        nodes = [here.add("p", "prefill"), here.add("d", "decode")]
        nodes[1]._texts = lambda asked: [text]  # type: ignore[method-assign]
        monkeypatch.setattr(json, "loads", watched_loads)
        monkeypatch.setattr(json, "dumps", watched_dumps)
        found = here.complete()
        assert found.status_code == 200
        here.until_idle()
        monkeypatch.undo()
        document = found.json()
        assert document["choices"][0]["text"] == text
        assert document["usage"]["headwater"]["router"]["nodes"] == {"prefill": "p", "decode": "d"}
    assert seen
    assert max(seen) <= PARSED_BYTES
