"""RedisStore against servers that spoil what they say: a status per page by the deadline, and never a wrong page."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.core.errors import StoreUnavailable
from headwater.core.results import Status
from headwater.storage.base import Deadline, Store
from headwater.storage.redis import RedisStore
from headwater.storage.redis.lines import LineDown, _Resolver
from headwater.storage.verified import VerifiedStore
from headwater.testing.pages import IDENTITY, PLANE_BYTES, items, sample_chain
from headwater.testing.stores import put, read, soon
from redis_kit import Command, FakeRedis, Said, SilentHost, honest

DEADLINE_S = 0.15
LATE_S = 0.25  # that a call may come back behind its deadline
PAGES = sample_chain(1, 4)
NAMES = [page.name for page in PAGES]


def on_time(work: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    """Do something that must have ended by a deadline. A machine may stand still once, not three times in a row."""
    for left in (2, 1, 0):
        begin_s = time.monotonic()
        found = work()
        took_s = time.monotonic() - begin_s
        if took_s <= deadline_s + LATE_S:
            return found
        assert left, f"it took {took_s:.2f} s"
    return None


def call_all(store: Store) -> dict[str, list[Any]]:
    """Every call, each with a deadline, and one status per page whatever is said."""
    buffers = [page.buffer() for page in PAGES]
    wanted = [(page.name, buffer) for page, buffer in zip(PAGES, buffers, strict=True)]
    reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=PLANE_BYTES)
    found: dict[str, list[Any]] = {
        "contains": on_time(lambda: store.contains(NAMES, deadline=Deadline.after(DEADLINE_S))),
        "put": on_time(lambda: store.put(items(PAGES), deadline=Deadline.after(DEADLINE_S))),
        "get": on_time(lambda: reader.get_into(wanted, deadline=Deadline.after(DEADLINE_S))),
        "delete": on_time(lambda: store.delete(NAMES[2:], deadline=Deadline.after(DEADLINE_S))),
    }
    kinds = {"contains": bool, "put": Status, "get": Status, "delete": Status}
    for call, answers in found.items():
        assert len(answers) == (2 if call == "delete" else 4)
        assert all(isinstance(answer, kinds[call]) for answer in answers), (call, answers)
    for page, buffer, status in zip(PAGES, buffers, found["get"], strict=True):
        assert status is not Status.HIT or buffer == page.frame, "a wrong page was accepted"
    return found


# --- one fault at a time ----------------------------------------------------------------------------------------------

NESTED = b"*1\r\n" * 20_000
WORDS = [
    *(b":abc\r\n", b":7\r\n", b":-1\r\n", b":99999999999999999999\r\n", b":" + b"9" * 5000 + b"\r\n", b":\r\n"),
    *(b"+OK\r\n", b"+\r\n", b"-ERR no\r\n", b"-NOAUTH who\r\n", b"-LOADING\r\n", b"-OOM full\r\n", b"-\r\n"),
    *(b"$-1\r\n", b"$-2\r\n", b"$0\r\n\r\n", b"$3\r\nabc\r\n", b"$3\r\nabcdefg\r\n", b"$x\r\n", b"$1e3\r\n"),
    *(b"$536870912\r\n", b"$99999999999\r\n", b"$100000000\r\nabc", b"$\r\n"),
    *(b"*-1\r\n", b"*0\r\n", b"*2\r\n:1\r\n$1\r\nx\r\n", b"*2147483647\r\n", b"*x\r\n", b"*1\r\n*1\r\n*1\r\n:1\r\n"),
    *(NESTED, NESTED + b":1\r\n", b"\x00\xff\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\r\n", b"\n", b"%2\r\n"),
    *(b"x" * 100_000, b"_\r\n", b">1\r\n+x\r\n", b"#t\r\n", b"," * 70_000 + b"\r\n"),
]


def replacing(at: int, word: bytes) -> Callable[[Sequence[Command], Sequence[bytes]], Said]:
    """One answer of every exchange is something else."""

    def spoil(commands: Sequence[Command], answers: Sequence[bytes]) -> Said:
        said = list(answers)
        said[at % len(said)] = word
        return Said([b"".join(said)])

    return spoil


@pytest.mark.fault("A12")
@pytest.mark.parametrize("at", [0, 1, 3, -1])
@pytest.mark.parametrize("word", WORDS, ids=lambda word: repr(word[:14]))
def test_whatever_stands_for_an_answer(word: bytes, at: int) -> None:
    with FakeRedis() as server, RedisStore(server.url) as store:
        put(store, PAGES)
        server.spoil = replacing(at, word)
        call_all(store)
        server.recover()
        assert all(status in (Status.REMOVED, Status.ABSENT) for status in store.delete(NAMES, deadline=soon()))
        assert put(store, PAGES) == [Status.STORED] * 4
        assert read(store, PAGES) == [Status.HIT] * 4


@pytest.mark.fault("A12")
@pytest.mark.parametrize("word", WORDS, ids=lambda word: repr(word[:14]))
@pytest.mark.parametrize("path", ["", "/3"])
def test_whatever_is_said_first_is_no_server_or_one(word: bytes, path: str) -> None:
    """At the door there is one error, with what to do; nothing else comes out."""
    with FakeRedis(replacing(0, word)) as server:

        def connect() -> None:
            with contextlib.suppress(StoreUnavailable):
                RedisStore(server.url + path, open_timeout_s=DEADLINE_S).close()

        on_time(connect)


@pytest.mark.fault("A12")
@pytest.mark.parametrize("answer", [b":7\r\n", b":-1\r\n", b"$1\r\n1\r\n", b"*1\r\n:1\r\n"])
def test_a_delete_that_removed_what_nobody_can_say(answer: bytes) -> None:
    def spoil(commands: Sequence[Command], answers: Sequence[bytes]) -> Said:
        pairs = zip(commands, answers, strict=True)
        return Said([b"".join(answer if command[0] == b"UNLINK" else right for command, right in pairs)])

    with FakeRedis() as server, RedisStore(server.url) as store:
        put(store, PAGES)
        server.spoil = spoil
        assert store.delete(NAMES, deadline=soon()) == [Status.FAILED] * 4


@pytest.mark.fault("A12")
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_an_answer_that_comes_twice_is_not_taken_for_the_next(at: int) -> None:
    """Each page is there or not, in turns: who is one answer behind says the opposite of all of them."""
    done = threading.Event()

    def spoil(commands: Sequence[Command], answers: Sequence[bytes]) -> Said:
        if done.is_set() or len(answers) < 4:
            return honest(commands, answers)
        done.set()
        said = [*answers[: at + 1], *answers[at:]]
        return Said([b"".join(said)], out_of_step=True)

    chain = sample_chain(7, 8)
    with FakeRedis() as server, RedisStore(server.url) as store:
        put(store, chain)
        store.delete([page.name for page in chain[1::2]], deadline=soon())
        server.spoil = spoil
        for _ in range(5):
            held = store.contains([page.name for page in chain], deadline=soon())
            assert held in ([True, False] * 4, [False] * 8)
            got = read(VerifiedStore(store, identity=IDENTITY, plane_bytes=PLANE_BYTES), chain)
            assert got in ([Status.HIT, Status.MISS] * 4, [Status.FAILED] * 8)
        assert done.is_set()
        assert held == [True, False] * 4
        assert not server.reused, "a connection that was out of step was used again"


@pytest.mark.fault("A12")
def test_a_doubled_answer_that_comes_late_is_nobodys() -> None:
    """The second copy arrives after the exchange is over, when the connection waits for the next."""
    doubled = threading.Event()

    def spoil(commands: Sequence[Command], answers: Sequence[bytes]) -> Said:
        if doubled.is_set():
            return honest(commands, answers)
        doubled.set()
        return Said([b"".join(answers), answers[-1]], pause_s=0.02, out_of_step=True)

    chain = sample_chain(7, 8)
    with FakeRedis() as server, RedisStore(server.url) as store:
        put(store, chain[:1])
        server.spoil = spoil
        for _ in range(20):
            held = store.contains([page.name for page in chain], deadline=soon())
            assert held == [True] + [False] * 7


@pytest.mark.fault("A12")
def test_two_silent_addresses_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with SilentHost() as one, SilentHost() as two:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", host.address) for host in (one, two)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

        def connect() -> None:
            with pytest.raises(StoreUnavailable, match="no Redis server answers"):
                RedisStore("redis://two.addresses:6379", open_timeout_s=1.0)

        on_time(connect, 1.0)


@pytest.mark.fault("A12")
def test_a_silent_address_leaves_time_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    with SilentHost() as silent, FakeRedis() as server:
        there = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in (silent.address, there)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        with RedisStore("redis://two.addresses:6379", open_timeout_s=5.0) as store:
            assert put(store, PAGES) == [Status.STORED] * 4


@pytest.mark.fault("A12")
def test_a_resolver_that_hangs_costs_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    numeric = socket.getaddrinfo

    def hang(host: str, *more: Any, **options: Any) -> Any:
        if host == "nowhere.invalid" and (more[-1:] != (socket.AI_NUMERICHOST,)):
            go_on.wait(60)
            raise socket.gaierror("no such name")
        return numeric(host, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hang)

    def connect() -> None:
        with pytest.raises(StoreUnavailable, match="no Redis server answers"):
            RedisStore("redis://nowhere.invalid:6379", open_timeout_s=DEADLINE_S)

    try:
        on_time(connect)
        assert sum(thread.name == "headwater redis address" for thread in threading.enumerate()) == 1
    finally:
        go_on.set()
    while any(thread.name == "headwater redis address" for thread in threading.enumerate()):
        time.sleep(0.01)


@pytest.mark.fault("X24")
@pytest.mark.parametrize("host", ["a..b", "a" * 64, "\udce9"])
def test_a_name_that_cannot_be_one_is_no_server(host: str) -> None:
    """X24: UnicodeError."""
    with pytest.raises(StoreUnavailable, match="no Redis server answers"):
        RedisStore(f"redis://{host}:6379", open_timeout_s=DEADLINE_S)


@pytest.mark.fault("X25")
def test_a_resolver_without_a_thread_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """X25: a RuntimeError, and from then on everybody waited for an answer that nobody was looking for."""

    def nobody(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    resolver = _Resolver("localhost", 6379)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", nobody)
        with pytest.raises(LineDown, match="no address"):
            resolver.find(soon())
    assert resolver.find(soon())


def test_a_value_that_is_too_long_is_read_past_and_not_kept() -> None:
    with FakeRedis() as server, RedisStore(server.url) as store:
        put(store, PAGES)
        server.values[b"headwater:" + NAMES[1]] = bytes(5 << 20)
        before = server.num_connections
        assert read(store, PAGES) == [Status.HIT, Status.SHORT, Status.HIT, Status.HIT]
        assert server.num_connections == before, "the connection is in step, and goes on"


# --- any stream of answers --------------------------------------------------------------------------------------------


@st.composite
def spoils(draw: st.DrawFn) -> Callable[[Sequence[Command], Sequence[bytes]], Said]:
    """What happens to the answers of one exchange."""
    kind = draw(st.sampled_from(["honest", "cut", "double", "lose", "swap", "word", "noise", "drip", "gone", "silent"]))
    at, other = draw(st.integers(0, 7)), draw(st.integers(0, 7))
    word = draw(st.sampled_from(WORDS) | st.binary(max_size=40))
    hangs_up = draw(st.booleans())

    def spoil(commands: Sequence[Command], answers: Sequence[bytes]) -> Said:
        said, i, j = list(answers), at % len(answers), other % len(answers)
        whole = b"".join(answers)
        match kind:
            case "cut":
                return Said([whole[: len(whole) * at // 8]], hangs_up=hangs_up, silent=not hangs_up, out_of_step=True)
            case "double":
                said.insert(j, said[i])
                last = len(answers) - 1  # a copy of the very last may come when the line waits for the next exchange
                return Said([b"".join(said)], out_of_step=(i, j) != (last, last))
            case "lose":
                del said[i]
                return Said([b"".join(said)], hangs_up=hangs_up, silent=not hangs_up, out_of_step=True)
            case "swap":
                said[i], said[j] = said[j], said[i]
                return Said([b"".join(said)])
            case "word":
                said[i] = word
                return Said([b"".join(said)], silent=not hangs_up, hangs_up=hangs_up)
            case "noise":
                return Said([word + whole], hangs_up=hangs_up)
            case "drip":
                return Said([whole[at : at + 1] for at in range(len(whole))], pause_s=0.01)
            case "gone":
                return Said([], hangs_up=True)
            case "silent":
                return Said([], silent=True)
        return honest(commands, answers)

    return spoil


@pytest.mark.fault("A12")
@settings(max_examples=60)
@given(st.lists(spoils(), min_size=1, max_size=12))
def test_any_stream_of_answers(spoilt: list[Callable[[Sequence[Command], Sequence[bytes]], Said]]) -> None:
    with FakeRedis() as server, RedisStore(server.url) as store:
        put(store, PAGES)
        turns: Iterator[Any] = iter(spoilt)
        lock = threading.Lock()

        def spoil(commands: Sequence[Command], answers: Sequence[bytes]) -> Said:
            with lock:
                turn = next(turns, honest)
            return turn(commands, answers)

        server.spoil = spoil
        call_all(store)
        server.recover()
        assert all(status in (Status.REMOVED, Status.ABSENT) for status in store.delete(NAMES, deadline=soon()))
        assert put(store, PAGES) == [Status.STORED] * 4
        assert read(store, PAGES) == [Status.HIT] * 4
        assert store.contains(NAMES, deadline=soon()) == [True] * 4
        assert not server.reused, "a connection that was out of step was used again"
