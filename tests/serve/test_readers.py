"""Bodies that wait to be read, and who reads them: nobody waits for ever, or in everybody's way; little is kept."""

import asyncio
import json
import logging
import os
import pickle
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from headwater.engine.models.base import Model
from headwater.engine.tokenizer import Tokenizer
from headwater.serve import readers
from headwater.serve.errors import ApiError
from headwater.serve.readers import Readers, _Turns, spare_readers
from headwater.serve.reading import LargeBody, Reader, large_routable
from serve_kit import WAIT_S, Served, directory, model, serving
from test_door import COMPLETIONS, START, all_of, error_in, half_bodies, one_of, readers_of

__all__ = ["directory", "model"]  # fixtures

CHAT = "/v1/chat/completions"
LARGE = json.dumps({"prompt": "a", "max_tokens": 1, "user": " " * 66_000}).encode()


@contextmanager
def stopped_reader(served: Served) -> Iterator[list[int]]:
    """The reader of bodies of up to a megabyte is there, and does nothing meanwhile."""
    assert served.post(COMPLETIONS, content=LARGE, headers={"content-type": "application/json"}).status_code == 200
    pids = readers_of(os.getpid())
    assert len(pids) == 1
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield pids
    finally:
        for pid in set(pids) & set(readers_of(os.getpid())):
            os.kill(pid, signal.SIGCONT)


def num_waiting(served: Served) -> int:
    """Large bodies that wait for their turn."""
    return len(served.server._service.readers._lanes[0]._turns._waiting)


def send_large(served: Served, connection: socket.socket) -> None:
    connection.sendall(f"{START}Content-Length: {len(LARGE)}\r\n\r\n".encode() + LARGE)


# --- who waits --------------------------------------------------------------------------------------------------------


@pytest.mark.fault("S6")
def test_bodies_that_wait_to_be_read_lock_nobody_out(directory: Path, model: Model) -> None:
    with serving(directory, model, max_connections=8) as served, ExitStack() as all_:
        bodies = served.server._service.bodies
        with stopped_reader(served):
            first = [all_.enter_context(served.connect()) for _ in range(3)]
            for number, connection in enumerate(first):
                send_large(served, connection)
                served.until(lambda number=number: bodies.num_bytes == len(LARGE) * (number + 1))  # type: ignore[misc]  # bound now
            served.until(lambda: num_waiting(served) == 2)
            for _ in range(12):  # more than may wait, and than there are connections
                connection = all_.enter_context(served.connect())
                send_large(served, connection)
                error_in(one_of(connection), 503, "too_many_bodies")
            assert bodies.num_bytes == len(LARGE) * 3, "all of a large body counts"
            served.complete("small ones are read elsewhere", max_tokens=1)
        for connection in first:  # who waited is answered
            assert one_of(connection).startswith(b"HTTP/1.1 200 ")
        served.until(lambda: bodies.num_bytes == 0)


def order(turns: _Turns, sizes: list[int]) -> list[int]:
    """In which order bodies of these sizes, which wait, have their turns: as indices."""
    found: list[int] = []

    async def wait(number: int, size: int) -> None:
        await turns.take(size)
        found.append(number)
        await asyncio.sleep(0)
        turns.give_back()

    async def run() -> None:
        await turns.take(0)
        tasks = [asyncio.create_task(wait(*one)) for one in enumerate(sizes)]
        await asyncio.sleep(0)
        turns.give_back()
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*tasks)

    asyncio.run(run())
    return found


@pytest.mark.fault("S11")
def test_small_bodies_come_first_and_nobody_is_passed_over_for_ever() -> None:
    assert order(_Turns(1, 100), [5, 3, 4, 3]) == [1, 3, 2, 0]
    assert order(_Turns(1, 100), [9] + [1] * 20) == [*range(1, 9), 0, *range(9, 21)]


def test_turns_are_neither_lost_nor_given_twice() -> None:
    async def run() -> None:
        turns = _Turns(1, 2)
        await turns.take(1)
        waiting = [asyncio.create_task(turns.take(size)) for size in (2, 1)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await turns.take(1)
        assert (refused.value.status, refused.value.code) == (503, "too_many_bodies")
        turns.give_back()  # it is the second's, who leaves before it hears so
        waiting[1].cancel()
        async with asyncio.timeout(WAIT_S):
            await waiting[0]
        left = asyncio.create_task(turns.take(1))
        await asyncio.sleep(0)
        left.cancel()
        turns.give_back()  # nobody waits
        await turns.take(1)
        last = asyncio.create_task(turns.take(1))
        await asyncio.sleep(0)
        turns.stop()
        for one in (last, asyncio.create_task(turns.take(1))):
            with pytest.raises(ApiError) as refused:
                await one
            assert refused.value.code == "shutting_down"

    asyncio.run(run())


@pytest.mark.fault("S10")
def test_slow_bodies_make_room_for_one_that_comes(directory: Path, model: Model) -> None:
    with serving(directory, model, door={"bodies_bytes": 1_000_000}) as served:
        bodies = served.server._service.bodies
        with half_bodies(served, 3, length=400_000, sent=300_000) as slow:
            served.until(lambda: bodies.num_bytes == 900_000)
            honest = {"prompt": "a", "max_tokens": 1, "user": " " * 900_000}
            assert served.post(COMPLETIONS, honest).status_code == 200
            for connection in slow:
                error_in(one_of(connection), 503, "too_many_bytes")
        served.until(lambda: bodies.num_bytes == 0)


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.fault("S16")
def test_a_server_that_ends_tells_those_who_are_still_sending(
    directory: Path, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.ERROR),
        serving(directory, model) as served,
        half_bodies(served, 3) as half,
        served.connect() as reading,
        served.connect() as waiting,
        stopped_reader(served),
    ):
        for connection in (reading, waiting):
            send_large(served, connection)
        served.until(lambda: num_waiting(served) == 1)
        served.until(lambda: served.server._service.num_inside == 5)
        stopping = threading.Thread(target=served.stop)
        stopping.start()
        for connection in (*half, reading, waiting):
            error_in(all_of(connection), 503, "shutting_down")
        stopping.join()
    assert not caplog.records


@pytest.mark.fault("S17")
def test_a_reader_that_was_killed_costs_nobody_an_answer(directory: Path, model: Model) -> None:
    with serving(directory, model) as served, served.connect() as connection, stopped_reader(served) as pids:
        send_large(served, connection)
        served.until(lambda: served.server._service.bodies.num_bytes > 0)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert one_of(connection).startswith(b"HTTP/1.1 200 ")


@pytest.mark.fault("S17")
def test_readers_that_always_end_are_no_fault_of_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_MODULE", "headwater.there_is_no_such_module")

    async def run() -> None:
        one, until_s = Readers(max_body_bytes=1), asyncio.get_running_loop().time() + WAIT_S
        try:
            with pytest.raises(ApiError) as refused:
                await one.read("routable", b"{}", num_bytes=1, until_s=until_s)
            assert (refused.value.status, refused.value.code) == (503, "not_read")
        finally:
            one.close()

    asyncio.run(run())


# --- what is kept -----------------------------------------------------------------------------------------------------


def reader(directory: Path) -> Reader:
    return Reader(
        Tokenizer.load(directory), model="tiny", max_tokens=1000, max_chars=100_000, max_answers=100, vocab_size=1000
    )


@pytest.mark.fault("S4")
def test_a_question_is_no_larger_than_its_tokens(directory: Path) -> None:
    read = reader(directory)
    small = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"a": ["b"]}}
    chat = read.question(CHAT, json.dumps(small).encode())
    assert chat.asked.prompts == ()
    assert b"chat_template_kwargs" not in pickle.dumps(chat)
    text = read.question(COMPLETIONS, json.dumps({"prompt": ["some text", "more text"], "n": 3}).encode())
    assert b"text" not in pickle.dumps((text.asked, text.prompts, text.echoes))
    assert text.num_answers == 6


@pytest.mark.fault("S4")
def test_what_a_template_hears_besides_is_small(directory: Path) -> None:
    deep: Any = "x"
    for _ in range(500):
        deep = [deep]
    large: list[dict[str, Any]] = [{"a": [{}] * 3000}, {"a": "b" * 9000}, {"b" * 9000: 1}]
    for variables in large:
        body = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": variables}
        with pytest.raises(ApiError) as refused:
            reader(directory).question(CHAT, json.dumps(body).encode())
        assert (refused.value.status, refused.value.param) == (400, "chat_template_kwargs")
        assert len(str(refused.value)) < 1000
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"a": deep}}
    assert reader(directory).question(CHAT, json.dumps(body).encode()).prompts


@pytest.mark.fault("S23")
def test_the_models_own_words_are_not_a_clients(directory: Path) -> None:
    for name in ("bos_token", "eos_token", "pad_token", "messages", "_token" * 1000):
        body = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {name: "x"}}
        with pytest.raises(ApiError) as refused:
            reader(directory).question(CHAT, json.dumps(body).encode())
        assert (refused.value.status, refused.value.param) == (400, "chat_template_kwargs")
        assert len(str(refused.value)) < 1000


@pytest.mark.fault("S15")
def test_a_prompt_that_is_sent_back_is_made_text_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[list[int]] = []
    decode = Tokenizer.decode

    def counting(self: Tokenizer, ids: list[int], **options: Any) -> str:
        decoded.append(list(ids))
        return decode(self, ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    body = {"prompt": [[5, 6, 7], [8, 9]], "n": 20, "echo": True}
    found = reader(directory).question(COMPLETIONS, json.dumps(body).encode())
    assert decoded == [[5, 6, 7], [8, 9]]
    assert found.echoes == [decode(Tokenizer.load(directory), ids) for ids in decoded]
    silent = reader(directory).question(COMPLETIONS, json.dumps({**body, "echo": False}).encode())
    assert silent.echoes == []
    assert len(decoded) == 2


@pytest.mark.fault("S12")
def test_a_router_keeps_small_things_of_a_large_body() -> None:
    bomb: list[object] = [{}] * 10_000
    body = {"model": bomb, "stream": {"a": bomb}, "max_tokens": 10**30, "max_completion_tokens": "9" * 10_000}
    found = large_routable(json.dumps({**body, "prompt": [1] * 300_000}).encode())
    assert found.body == {}
    assert isinstance(found.body, LargeBody)
    assert found.body.asking is None
    assert json.loads(found.content)["model"] == bomb, "a node says what is wrong with it"
    fine = {"model": "m", "stream": True, "max_tokens": 7}
    salts: list[object] = [{}, "\ud800", "s" * 2000]
    for salt in salts:
        found = large_routable(json.dumps({**fine, "prompt": [1, 2], "cache_salt": salt}).encode())
        assert found.body == fine


@pytest.mark.parametrize("dead", [False, True])
def test_spare_readers_are_taken_and_others_end(dead: bool) -> None:
    """They load what they need before anybody knows what they will read."""

    async def run() -> None:
        with spare_readers() as spares:
            assert all(os.getpgid(one._process.pid) != os.getpgid(0) for one in spares), "Ctrl-C is not for them"
            before = list(spares)
            assert len(before) == 2
            for spare in before if dead else []:
                spare._process.kill()
                spare._process.wait(WAIT_S)
            one = Readers(max_body_bytes=1)
            try:
                one.start(spares)
                assert not spares
                lanes = [lane._process for lane in one._lanes]
                assert (set(lanes) == set(before)) is not dead
                until_s = asyncio.get_running_loop().time() + WAIT_S
                body = json.dumps({"model": "m", "prompt": "a", "user": " " * (2 << 20)}).encode()
                found = await one.read("routable", body, num_bytes=len(body), until_s=until_s)
                assert found is not None
            finally:
                one.close()
            assert all(spare.is_gone() for spare in before)
        with spare_readers() as spares:
            before = list(spares)
        assert all(spare.is_gone() for spare in before)

    asyncio.run(run())
