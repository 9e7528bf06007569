"""The residency index in a real Redis server: against the model, and when the server hangs, dies, fills up or lies."""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from headwater.config.residency import ResidencyConfig
from headwater.core.errors import InvalidConfig, ResourceClosed, StoreForked, StoreUnavailable
from headwater.core.events import Removed, Stored
from headwater.lab.bench.residency import bench_lookups
from headwater.metrics import Metrics
from headwater.residency.base import Found, Holder, Residency
from headwater.residency.events import Applied, State, UpdateKind
from headwater.residency.publisher import Publisher
from headwater.residency.redis import RedisResidency
from headwater.storage.base import Deadline
from headwater.storage.redis.lines import Command, RedisLines
from machines.residency import ROOT, ResidencyTests, chain, held, said
from machines.residency_machine import Backend, ResidencyMachine, soon
from test_redis import Server

NIGHTLY = os.environ.get("HEADWATER_TEST_PROFILE") == "nightly"
PREFIX = b"headwater:residency:"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that leave it as it was."""
    server = Server(tmp_path_factory.mktemp("redis"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
def server(shared: Server) -> Server:
    with shared.client() as client:
        client.flushall()
    return shared


@pytest.fixture
def index(server: Server) -> Iterator[RedisResidency]:
    with RedisResidency(server.url) as residency:
        yield residency


class TestRedisResidency(ResidencyTests):
    """What every index keeps to."""

    @pytest.fixture
    def index(self, server: Server) -> Iterator[Residency]:
        with RedisResidency(server.url) as residency:
            yield residency


# --- against the model ------------------------------------------------------------------------------------------------


@pytest.mark.timeout(3600 if NIGHTLY else 300)
def test_the_index_against_what_nodes_hold(server: Server) -> None:
    """Nightly: 200 examples."""

    class RedisBackend(Backend):
        slowed = 1000.0

        def __init__(self) -> None:
            with server.client() as client:
                client.flushall()
            self.residency = RedisResidency(server.url)

        def advance(self, seconds: float) -> None:
            """The server's clock cannot be moved: leases end so much earlier instead."""
            with server.client() as client:
                for table, at in ((PREFIX + b"nodes", 2), (PREFIX + b"terms", 0)):
                    for name, text in client.hgetall(table).items():
                        words = text.split(b" ")
                        words[at] = b"%d" % max(0, int(words[at]) - int(seconds * self.slowed * 1000))
                        client.hset(table, name, b" ".join(words))

        def forget(self) -> None:
            with server.client() as client:
                client.flushall()

    examples, steps = (200, 12) if NIGHTLY else (8, 8)

    class Machine(ResidencyMachine):
        def __init__(self) -> None:
            super().__init__(RedisBackend)

    run_state_machine_as_test(Machine, settings=settings(max_examples=examples, stateful_step_count=steps))


# --- what lies in the server ------------------------------------------------------------------------------------------


def test_blocks_carry_a_time_to_live_that_saying_renews(index: RedisResidency, server: Server) -> None:
    keys = chain("a", 3)
    with server.client() as client:
        for sequence, kind in enumerate((UpdateKind.BEGIN, UpdateKind.CHANGE), 1):
            index.apply(said(kind, sequence, keys), deadline=soon())
            assert all(5_000_000 < int(client.pttl(PREFIX + key)) <= 5_400_000 for key in keys)
            for key in keys:
                client.pexpire(PREFIX + key, 60_000)
        index.apply(said(UpdateKind.BEGIN, 1, keys, node="b"), deadline=soon())
        for key in keys:
            client.pexpire(PREFIX + key, 60_000)
        index.apply(said(UpdateKind.CHANGE, 2, keys, State.NONE, node="b"), deadline=soon())
        assert all(0 < int(client.pttl(PREFIX + key)) <= 60_000 for key in keys)  # who goes renews nothing


def test_a_look_up_and_an_update_are_one_round_trip_each(
    index: RedisResidency, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = chain("a", 3000)
    index.apply(said(UpdateKind.BEGIN, 1, keys[:1]), deadline=soon())
    index.lookup(keys[:1], deadline=soon())  # now the server knows the scripts
    asked: list[int] = []
    ask = RedisLines.ask

    def counting(lines: RedisLines, commands: Sequence[Command], deadline: Deadline) -> list[Any]:
        asked.append(len(commands))
        return ask(lines, commands, deadline)

    monkeypatch.setattr(RedisLines, "ask", counting)
    assert index.apply(said(UpdateKind.CHANGE, 2, keys), deadline=soon()) is Applied.APPLIED
    assert held(index, keys) == {"a": (3000, 3000, 0, 0, 0)}
    assert asked == [1, 1]


def test_what_the_dead_said_is_cleared_away_by_the_living(index: RedisResidency, server: Server) -> None:
    keys = chain("a", 3)
    for epoch in range(1, 6):  # five lives of a node, four of which ended without a word
        index.apply(said(UpdateKind.BEGIN, 1, keys, epoch=epoch), deadline=soon())
    index.apply(said(UpdateKind.BEGIN, 1, keys, node="b", lease_s=0.001), deadline=soon())
    while any(node.name == "b" for node in index.nodes(deadline=soon()) or ()):
        pass
    assert held(index, keys) == {"a": (3, 3, 0, 0, 0)}
    index.apply(said(UpdateKind.BEGIN, 1, keys[:2], node="c"), deadline=soon())
    with server.client() as client:
        assert [client.strlen(PREFIX + key) for key in keys] == [18, 18, 18]  # a and c; a and b, which is dead
        assert client.hlen(PREFIX + b"terms") == 3
    index.apply(said(UpdateKind.CHANGE, 2, keys, State.NONE, epoch=5), deadline=soon())
    with server.client() as client:
        assert [client.strlen(PREFIX + key) for key in keys] == [9, 9, 0]


def test_what_others_left_under_our_names_is_no_claim(index: RedisResidency, server: Server) -> None:
    keys = chain("a", 5)
    with server.client() as client:
        client.set(PREFIX + keys[0], b"x" * 13)
        client.rpush(PREFIX + keys[1], b"a list")
        client.hset(PREFIX + b"nodes", b"strange", b"no record")
        client.hset(PREFIX + b"terms", b"x" * 8, b"no term")
    assert held(index, keys) == {}
    assert index.nodes(deadline=soon()) == ()
    assert index.apply(said(UpdateKind.BEGIN, 1, keys), deadline=soon()) is Applied.APPLIED
    assert held(index, keys) == {"a": (5, 5, 0, 0, 0)}
    with server.client() as client:
        client.delete(PREFIX + b"nodes")
        client.set(PREFIX + b"nodes", b"not even a hash")
    assert index.apply(said(UpdateKind.CHANGE, 2, keys), deadline=soon()) is Applied.FAILED
    assert index.nodes(deadline=soon()) is None
    assert index.last_epoch("a", deadline=soon()) is None


# --- trouble ----------------------------------------------------------------------------------------------------------


def test_a_server_that_hangs_holds_nobody_up(server: Server) -> None:
    """Offers return while the server is stopped, look-ups end by their deadline, and afterwards all is right."""
    keys, more, metrics = chain("a", 600), chain("b", 600), Metrics()
    config = ResidencyConfig(url=server.url, node="here", linger_s=0.0, apply_timeout_s=0.3)
    with (
        RedisResidency(server.url, metrics=metrics) as index,
        Publisher(RedisResidency(server.url), config, metrics=metrics) as publisher,
    ):
        publisher.offer([Stored(tier="device", keys=tuple(keys), parent=ROOT, depth=0)])
        assert publisher.drain(20)
        assert held(index, keys) == {"here": (600, 600, 0, 0, 0)}
        server.signal(signal.SIGSTOP)
        try:
            for at in range(600):
                publisher.offer([Stored(tier="host", keys=(more[at],), parent=ROOT, depth=0)])
                publisher.offer([Removed(tier="device", keys=(keys[599 - at],))])
            for _ in range(2):
                deadline = Deadline.after(0.2)
                assert index.lookup(keys, deadline=deadline) == Found(600, answered=False)
                assert not Deadline(deadline.at_s + 0.5).expired
            while not metrics.value("residency_lookups_total", outcome="paused"):  # then it is not even asked
                assert not index.lookup(keys, deadline=Deadline.after(0.2)).answered
            while not metrics.value("residency_updates_total", outcome="failed"):
                assert not publisher.drain(0.1)
        finally:
            server.signal(signal.SIGCONT)
        assert publisher.drain(30)
        found = Found(1, answered=False)
        while not found.answered:  # after a second's pause somebody asks again
            found = index.lookup(more, deadline=soon())
        assert found.of("here") == Holder("here", 600, 0, 600, 0, 0)
        assert held(index, keys) == {}


def test_a_server_that_is_restarted_hears_everything_again(tmp_path: Path) -> None:
    server = Server(tmp_path)
    keys = chain("a", 1200)
    config = ResidencyConfig(url=server.url, node="here", linger_s=0.0, lease_s=1.5, apply_timeout_s=0.5)
    try:
        server.start()
        with RedisResidency(server.url) as index, Publisher(RedisResidency(server.url), config) as publisher:
            publisher.offer([Stored(tier="device", keys=tuple(keys), parent=ROOT, depth=0)])
            assert publisher.drain(20)
            server.kill()
            publisher.offer([Removed(tier="device", keys=tuple(keys[1000:]))])
            assert not publisher.drain(0.2)
            server.start()
            assert publisher.drain(30)
            assert held(index, keys) == {"here": (1000, 1000, 0, 0, 0)}
            with server.client() as client:
                client.flushall()
                client.script_flush()
            found: dict[str, tuple[int, ...]] = {}
            while not found:  # the next sign of life finds out
                found = held(index, keys[:1])
            assert publisher.drain(30)
            assert held(index, keys) == {"here": (1000, 1000, 0, 0, 0)}
        server.kill()
        with RedisResidency(server.url) as index:  # that nobody is there is found at once, and costs nothing
            assert index.apply(said(UpdateKind.BEGIN, 1, keys), deadline=soon()) is Applied.FAILED
            assert index.lookup(keys, deadline=soon()) == Found(1200, answered=False)
            assert index.nodes(deadline=soon()) is None
    finally:
        server.kill()


def test_an_update_that_arrives_after_all_is_heard_once(server: Server, index: RedisResidency) -> None:
    keys = chain("a", 2)
    index.apply(said(UpdateKind.BEGIN, 1, keys), deadline=soon())
    index.apply(said(UpdateKind.END, 2, []), deadline=soon())
    server.signal(signal.SIGSTOP)
    try:
        gone = said(UpdateKind.CHANGE, 3, keys[1:], State.NONE)
        assert index.apply(gone, deadline=Deadline.after(0.1)) is Applied.FAILED
    finally:
        server.signal(signal.SIGCONT)
    assert index.apply(gone, deadline=soon()) in (Applied.STALE, Applied.APPLIED)
    assert index.apply(said(UpdateKind.CHANGE, 4, keys[1:]), deadline=soon()) is Applied.APPLIED
    assert held(index, keys) == {"a": (2, 2, 0, 0, 0)}


def test_a_full_server_fails_and_still_answers(tmp_path: Path) -> None:
    server = Server(tmp_path)
    try:
        server.start("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
        with RedisResidency(server.url) as index:
            sequence, answer = 0, Applied.APPLIED
            while answer is Applied.APPLIED:
                keys = chain(f"{sequence}", 500)
                sequence += 1
                kind = UpdateKind.CHANGE if sequence > 1 else UpdateKind.BEGIN
                answer = index.apply(said(kind, sequence, keys), deadline=soon())
            assert answer is Applied.FAILED
            assert sequence > 2
            assert held(index, chain("0", 500)) == {"a": (500, 500, 0, 0, 0)}
            with server.client() as client:
                client.config_set("maxmemory", "0")
            assert index.apply(said(UpdateKind.CHANGE, sequence, keys), deadline=soon()) is Applied.APPLIED
            assert held(index, keys) == {"a": (500, 500, 0, 0, 0)}
    finally:
        server.kill()


def test_many_nodes_speak_at_once(server: Server) -> None:
    """Each adds and removes blocks of one path; at the end the index has what each holds."""
    keys, num_nodes = chain("a", 64), 4
    publishers = [
        Publisher(RedisResidency(server.url), ResidencyConfig(url=server.url, node=f"n{i}", linger_s=0.0))
        for i in range(num_nodes)
    ]

    def work(number: int) -> None:
        for step in range(40):
            cut = (7 * step + 13 * number) % 64
            publishers[number].offer([Removed(tier="device", keys=tuple(keys[cut:]))])
            publishers[number].offer([Stored(tier="device", keys=tuple(keys[: cut + 1]), parent=ROOT, depth=0)])
            if step % 8 == number:
                publishers[number].resync()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(num_nodes)]
    with RedisResidency(server.url) as index:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(publisher.drain(30) for publisher in publishers)
        lengths = {f"n{i}": (7 * 39 + 13 * i) % 64 + 1 for i in range(num_nodes)}
        assert {node: num[1] for node, num in held(index, keys).items()} == lengths
        for publisher in publishers:
            assert publisher.close(20)
        assert held(index, keys) == {}


def test_nonsense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreUnavailable, match="no address of a Redis server"):
        RedisResidency("http://here")
    with pytest.raises(InvalidConfig, match="keep_s"):
        RedisResidency("redis://here", keep_s=0)
    index = RedisResidency("redis://127.0.0.1:1")
    index.close()
    index.close()
    with pytest.raises(ResourceClosed):
        index.lookup(chain("a", 1), deadline=soon())
    index = RedisResidency("redis://127.0.0.1:1")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(StoreForked):
        index.lookup(chain("a", 1), deadline=soon())


def test_the_benchmark_counts_and_leaves_nothing(server: Server) -> None:
    speed = bench_lookups(server.url, 200, num_nodes=2, num_paths=2, seconds=0.01)
    assert min(speed.blocks_per_s, speed.lookup_ms, speed.said_blocks_per_s) > 0
    assert (speed.num_blocks, speed.num_nodes) == (200, 2)
    with server.client() as client:
        assert client.dbsize() == 0
