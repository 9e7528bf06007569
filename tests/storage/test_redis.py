"""RedisStore against real servers that each test starts itself: the conformance suite, and what goes wrong."""

import mmap
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis

from headwater.core.errors import InvalidConfig, ResourceClosed, StoreForked, StoreUnavailable
from headwater.core.results import Status
from headwater.storage.base import Deadline, Store
from headwater.storage.redis import RedisStore
from headwater.storage.redis.lines import Command, RedisLines
from headwater.storage.redis.protocol import MAX_VALUE_BYTES
from headwater.storage.verified import VerifiedStore
from headwater.testing.pages import IDENTITY, PLANE_BYTES, SamplePage, items, sample_chain, sample_page
from headwater.testing.stores import StoreTests, put, read, soon

LARGE = (1 << 20, 1 << 20)
PREFIX = b"headwater:"


class Server:
    """A redis-server on loopback."""

    def __init__(self, directory: Path) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            pytest.fail("these tests need a Redis server: apt-get install redis-server (`make servers` does it)")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}"
        self._command = [binary, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(directory)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *options: str) -> None:
        self._process = subprocess.Popen([*self._command, *options], stdout=subprocess.DEVNULL)
        wait = Deadline.after(20)
        while True:
            assert self._process.poll() is None, "redis-server ended at once"
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.ConnectionError:
                assert not wait.expired, "redis-server does not answer"
                time.sleep(0.02)

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """One that makes room as the documentation says; 8 MiB."""
    server = Server(tmp_path)
    try:
        server.start("--maxmemory", "8mb", "--maxmemory-policy", "volatile-ttl")
        yield server
    finally:
        server.kill()


@pytest.fixture
def roomy(tmp_path: Path) -> Iterator[Server]:
    """One without a limit."""
    server = Server(tmp_path)
    try:
        server.start()
        yield server
    finally:
        server.kill()


class TestRedisStore(StoreTests):
    prefix_closed = False  # the server evicts page by page
    expires_pages = True

    @pytest.fixture
    def store(self, server: Server) -> Iterator[Store]:
        with RedisStore(server.url) as store:
            yield store

    def test_a_full_store_makes_room_and_stays_right(self, store: Store) -> None:
        """As in the suite, but a server at its limit evicts for its answers too: reading may lose what was there."""
        chains = [sample_chain(100 + i, 10) for i in range(100)]
        for chain in chains:
            assert all(status.held for status in put(store, chain))
            assert read(store, chain) == [Status.HIT] * 10
        held = [store.contains([page.name for page in chain], deadline=soon()) for chain in chains]
        assert not all(all(chain) for chain in held)
        num_held = sum(map(sum, held))
        num_hits = 0
        for chain, there in zip(reversed(chains), reversed(held), strict=True):
            got = read(store, chain)
            num_hits += got.count(Status.HIT)
            assert all(status is Status.MISS for status, held_ in zip(got, there, strict=True) if not held_)
        assert 0.8 * num_held < num_hits <= num_held


# --- what the server keeps --------------------------------------------------------------------------------------------


def test_two_stores_share_a_server_and_prefixes_keep_them_apart(roomy: Server) -> None:
    pages = sample_chain(1, 4)
    with RedisStore(roomy.url) as one, RedisStore(roomy.url) as two, RedisStore(roomy.url, prefix="b:") as other:
        put(one, pages)
        assert read(two, pages) == [Status.HIT] * 4
        assert read(other, pages) == [Status.MISS] * 4


def test_large_pages_and_long_batches(roomy: Server) -> None:
    large, small = sample_chain(2, 5, plane_bytes=LARGE), sample_chain(3, 1100, plane_bytes=(8,))
    with RedisStore(roomy.url) as store:
        for pages in (large, small):
            assert put(store, pages) == [Status.STORED] * len(pages)
            assert put(store, pages) == [Status.EXISTS] * len(pages)
            assert read(store, pages) == [Status.HIT] * len(pages)
        names = [page.name for page in small]
        assert store.delete(names[:700], deadline=soon()) == [Status.REMOVED] * 700
        assert store.contains(names, deadline=soon()) == [False] * 700 + [True] * 400


def test_a_page_without_its_parent_is_not_taken(roomy: Server) -> None:
    pages = sample_chain(4, 4)
    with RedisStore(roomy.url) as store:
        assert put(store, pages[2:]) == [Status.NO_PARENT] * 2
        assert put(store, pages[1::-1]) == [Status.NO_PARENT, Status.STORED]
        assert put(store, pages[1:]) == [Status.STORED] * 3


def test_what_is_larger_than_a_value_is_refused(roomy: Server) -> None:
    page = sample_page(5)
    with mmap.mmap(-1, MAX_VALUE_BYTES + 1) as memory, memoryview(memory) as frame, RedisStore(roomy.url) as store:
        assert store.put([(page.name, frame), page.item], deadline=soon()) == [Status.REFUSED, Status.STORED]


def test_a_full_server_that_may_not_evict_has_no_room(tmp_path: Path) -> None:
    server = Server(tmp_path)
    try:
        server.start("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
        pages = sample_chain(6, 600)
        with RedisStore(server.url) as store:
            results = put(store, pages)
            num_stored = results.count(Status.STORED)
            assert 10 < num_stored < 400
            assert results[num_stored] is Status.NO_ROOM
            assert set(results[num_stored:]) <= {Status.NO_ROOM, Status.NO_PARENT}
            held = store.contains([page.name for page in pages], deadline=soon())
            assert held == [status is Status.STORED for status in results]
            assert read(store, pages[:num_stored]) == [Status.HIT] * num_stored
    finally:
        server.kill()


def test_pages_carry_a_time_to_live_that_use_renews(roomy: Server) -> None:
    pages = sample_chain(7, 3)
    with RedisStore(roomy.url, keep_s=1000) as store, roomy.client() as client:
        put(store, pages)
        uses: list[Callable[[], list[Status]]] = [lambda: read(store, pages), lambda: put(store, pages)]
        for use in uses:
            for page in pages:
                client.pexpire(PREFIX + page.name, 60_000)
            use()
            left_ms = [client.pttl(PREFIX + page.name) for page in pages]
            assert all(900_000 < int(ms) <= 1_000_000 for ms in left_ms)
            ends_at = [client.execute_command("PEXPIRETIME", PREFIX + page.name) for page in pages]
            assert ends_at[0] >= ends_at[1] >= ends_at[2]


def test_what_expires_is_not_kept_by_use(roomy: Server) -> None:
    """A partial tail goes when its time is up, whoever reads it or puts it again."""
    at_ms = int(time.time() * 1000) + 60_000
    page = sample_page(1, expires_at_ms=at_ms)
    with RedisStore(roomy.url) as store, roomy.client() as client:
        for use in (put, read, put, read):
            assert use(store, [page])[0] in (Status.STORED, Status.EXISTS, Status.HIT)
            left_ms = int(client.pttl(PREFIX + page.name))
            assert 0 < left_ms <= 60_000
        gone = sample_page(2, expires_at_ms=1)
        put(store, [gone])
        read(store, [gone])  # within the last millisecond it may be there
        assert read(store, [gone]) == [Status.MISS]


def test_two_clients_race_for_one_name(roomy: Server) -> None:
    results: list[list[Status]] = [[], []]
    both = threading.Barrier(2)

    def write(who: int, store: Store) -> None:
        for chain in range(40):
            page = sample_page(chain, plane_bytes=(200_000,), variant=who)
            both.wait(30)
            results[who] += put(store, [page])

    with RedisStore(roomy.url) as one, RedisStore(roomy.url) as two:
        threads = [threading.Thread(target=write, args=(who, store)) for who, store in enumerate((one, two))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for chain, (first, second) in enumerate(zip(*results, strict=True)):
            assert {first, second} == {Status.STORED, Status.EXISTS}
            winner = sample_page(chain, plane_bytes=(200_000,), variant=int(second is Status.STORED))
            assert read(one, [winner]) == read(two, [winner]) == [Status.HIT]


# --- damage -----------------------------------------------------------------------------------------------------------


def test_what_was_damaged_in_the_server_is_thrown_out(roomy: Server) -> None:
    pages = [sample_page(chain) for chain in range(5)]
    with RedisStore(roomy.url) as store, roomy.client() as client:
        reader = VerifiedStore(store, identity=IDENTITY, plane_bytes=PLANE_BYTES)
        put(store, pages)
        client.setrange(PREFIX + pages[1].name, 5000, b"x" * 8)
        client.set(PREFIX + pages[2].name, pages[2].frame[:-1])
        client.set(PREFIX + pages[3].name, pages[0].frame)
        client.delete(PREFIX + pages[4].name)
        client.rpush(PREFIX + pages[4].name, b"not a value")
        assert put(store, [pages[2], pages[4]]) == [Status.FAILED] * 2
        faults = [Status.HIT, Status.CORRUPT, Status.SHORT, Status.FOREIGN, Status.FAILED]
        assert read(reader, pages) == faults
        assert store.delete([pages[4].name], deadline=soon()) == [Status.REMOVED]
        assert store.contains([page.name for page in pages], deadline=soon()) == [True, False, False, False, False]
        assert put(store, pages) == [Status.EXISTS] + [Status.STORED] * 4
        assert read(reader, pages) == [Status.HIT] * 5


# --- a server that is away --------------------------------------------------------------------------------------------


def _calls(store: Store, page: SamplePage) -> dict[str, Callable[[Deadline], object]]:
    return {
        "put": lambda deadline: store.put([page.item], deadline=deadline)[0],
        "get": lambda deadline: store.get_into([(page.name, page.buffer())], deadline=deadline)[0],
        "contains": lambda deadline: store.contains([page.name], deadline=deadline)[0],
        "delete": lambda deadline: store.delete([page.name], deadline=deadline)[0],
    }


def test_a_stopped_server_costs_no_more_than_the_deadline(roomy: Server) -> None:
    held, new = sample_page(20, plane_bytes=LARGE), sample_page(21, plane_bytes=LARGE)
    with RedisStore(roomy.url) as store:
        put(store, [held])
        roomy.signal(signal.SIGSTOP)
        late = {"put": Status.LATE, "get": Status.LATE, "contains": False, "delete": Status.LATE}
        for _ in range(2):  # with a connection that was there, and with a new one
            for call, work in _calls(store, new).items():
                start = time.monotonic()
                assert work(Deadline.after(0.3)) == late[call]
                assert 0.25 < time.monotonic() - start < 0.8, call
        roomy.signal(signal.SIGCONT)
        assert read(store, [held]) == [Status.HIT]
        assert read(store, [new])[0] in (Status.HIT, Status.MISS)  # whole or not there
        assert put(store, [new])[0].held
        assert read(store, [new]) == [Status.HIT]


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_server_that_goes_away_in_the_middle_of_a_put(
    number: signal.Signals, roomy: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = sample_chain(22, 6, plane_bytes=LARGE)  # a round trip each, after a look
    ask, num_trips = RedisLines.ask, 0

    def counted(self: RedisLines, commands: Sequence[Command], deadline: Deadline, **more: Any) -> list[object]:
        nonlocal num_trips
        num_trips += 1
        if num_trips == 4:
            roomy.signal(number)
        return ask(self, commands, deadline, **more)

    with RedisStore(roomy.url) as store:
        monkeypatch.setattr(RedisLines, "ask", counted)
        start = time.monotonic()
        results = store.put(items(pages), deadline=Deadline.after(0.7))
        assert time.monotonic() - start < 1.2
        gone = Status.LATE if number is signal.SIGSTOP else Status.FAILED
        # A signal takes its time: the server may have done one more.
        assert results[:2] == [Status.STORED] * 2
        assert results[4:] == [gone] * 2
        if number is signal.SIGSTOP:
            roomy.signal(signal.SIGCONT)
            got = read(store, pages)  # `read` fails on any wrong byte
            assert got[:2] == [Status.HIT] * 2
            assert set(got) <= {Status.HIT, Status.MISS}


def test_a_server_that_drips_does_not_stretch_the_deadline() -> None:
    hung_up = threading.Event()

    def drip(listener: socket.socket) -> None:
        while True:
            try:
                line, _ = listener.accept()
            except OSError:
                return
            with line:
                try:
                    while line.recv(4096):
                        line.sendall(b"$1000\r\n")
                        while not hung_up.wait(0.05):
                            line.sendall(b"x")
                except OSError:
                    continue

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        try:
            start = time.monotonic()
            with pytest.raises(StoreUnavailable, match="no Redis server answers"):
                RedisStore(f"redis://127.0.0.1:{listener.getsockname()[1]}", open_timeout_s=0.4)
            assert time.monotonic() - start < 0.9
        finally:
            hung_up.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_a_server_that_is_killed_and_comes_back(roomy: Server) -> None:
    page = sample_page(23)
    with RedisStore(roomy.url) as store:
        put(store, [page])
        roomy.kill()
        failed = {"put": Status.FAILED, "get": Status.FAILED, "contains": False, "delete": Status.FAILED}
        for call, work in _calls(store, page).items():
            start = time.monotonic()
            assert work(Deadline.after(5)) == failed[call]
            assert time.monotonic() - start < 2, "nobody listens: that is known at once"
        roomy.start()
        assert read(store, [page]) == [Status.MISS]
        assert put(store, [page]) == [Status.STORED]
        roomy.kill()
        roomy.start()  # the connection is dead, and nobody noticed
        assert put(store, [page]) == [Status.STORED]
        assert read(store, [page]) == [Status.HIT]


def test_a_server_that_is_killed_under_writers_and_readers(roomy: Server) -> None:
    stop = threading.Event()
    wrong: list[str] = []

    def work(seed: int, store: Store) -> None:
        step = 0
        while not stop.is_set():
            step += 1
            pages = sample_chain(30 + (seed + step) % 5, 6, plane_bytes=(100_000,))
            buffers = [page.buffer() for page in pages]
            start = time.monotonic()
            store.put(items(pages), deadline=Deadline.after(1))
            got = store.get_into([(p.name, b) for p, b in zip(pages, buffers, strict=True)], deadline=Deadline.after(1))
            if time.monotonic() - start > 3:
                wrong.append("past the deadline")
            for page, buffer, status in zip(pages, buffers, got, strict=True):
                if status is Status.HIT and buffer != page.frame:
                    wrong.append("other bytes")

    with RedisStore(roomy.url) as store:
        threads = [threading.Thread(target=work, args=(seed, store)) for seed in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(3):
                time.sleep(0.15)
                roomy.kill()
                time.sleep(0.05)
                roomy.start()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not wrong
        pages = sample_chain(40, 6)
        assert put(store, pages) == [Status.STORED] * 6
        assert read(store, pages) == [Status.HIT] * 6


# --- opening and closing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1", "", "redis://127.0.0.1:port", "redis://[", "redis://h?x=1", "redis://h/db", "unix://"]
)
def test_what_is_no_address_is_said(url: str) -> None:
    with pytest.raises(StoreUnavailable, match=r"redis://|not known in the URL"):
        RedisStore(url)


def test_no_server_says_what_to_do_and_no_password() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # and nobody listens
        with pytest.raises(StoreUnavailable, match="redis-server --save") as caught:
            RedisStore(f"redis://me:secret@127.0.0.1:{probe.getsockname()[1]}")
    assert "secret" not in str(caught.value)


def test_a_socket_and_a_password(tmp_path: Path, shm: Path) -> None:
    server = Server(tmp_path)
    path = shm / "redis.sock"
    try:
        server.start("--unixsocket", str(path))
        page = sample_page(50)
        with RedisStore(f"unix://{path}") as store:
            assert put(store, [page]) == [Status.STORED]
        with server.client() as client:
            client.config_set("requirepass", "s3cret")
        with pytest.raises(StoreUnavailable, match="credentials"):
            RedisStore(server.url)
        with RedisStore(f"redis://:s3cret@127.0.0.1:{server.port}/0") as store:
            assert read(store, [page]) == [Status.HIT]
    finally:
        server.kill()


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for this machine, signed by itself, and its key."""
    paths = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command += ["-out", str(paths[0]), "-keyout", str(paths[1])]
    subprocess.run(command, check=True, capture_output=True)
    return paths


def test_tls(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    server = Server(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cert, key = map(str, certificate)
    options = ["--tls-port", str(port), "--tls-cert-file", cert, "--tls-key-file", key, "--tls-auth-clients", "no"]
    pages = sample_chain(1, 6, plane_bytes=LARGE)
    try:
        server.start(*options)
        with pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
            RedisStore(f"rediss://localhost:{port}")  # nobody vouches for it
        for trust in (f"ssl_ca_certs={cert}", "ssl_cert_reqs=none"):
            with RedisStore(f"rediss://localhost:{port}/1?{trust}", prefix=trust) as store:
                assert put(store, pages) == [Status.STORED] * 6
                assert read(store, pages) == [Status.HIT] * 6
                assert store.contains([page.name for page in pages], deadline=soon()) == [True] * 6
                server.signal(signal.SIGSTOP)
                start = time.monotonic()
                assert store.contains([pages[0].name], deadline=Deadline.after(0.2)) == [False]
                assert time.monotonic() - start < 2
                server.signal(signal.SIGCONT)
                assert read(store, pages) == [Status.HIT] * 6
        with pytest.raises(StoreUnavailable, match="TLS"):
            RedisStore(f"rediss://localhost:{port}?ssl_ca_certs={tmp_path / 'none.pem'}")
        with pytest.raises(StoreUnavailable, match="no Redis server answers"):
            RedisStore(f"rediss://localhost:{server.port}", open_timeout_s=1.0)  # which speaks none
    finally:
        server.kill()


def test_a_server_that_does_not_shake_hands() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        start = time.monotonic()
        with pytest.raises(StoreUnavailable, match="no Redis server answers"):
            RedisStore(f"rediss://127.0.0.1:{listener.getsockname()[1]}", open_timeout_s=0.3)
        assert time.monotonic() - start < 2


def test_a_server_that_lets_us_not_read(roomy: Server) -> None:
    with roomy.client() as client:
        client.execute_command("ACL", "SETUSER", "guest", "on", ">pw", "~other:*", "+@all")
    url = f"redis://guest:pw@127.0.0.1:{roomy.port}"
    with pytest.raises(StoreUnavailable, match="refuses GETEX"):
        RedisStore(url)
    with RedisStore(url, prefix="other:") as store:
        assert put(store, [sample_page(51)]) == [Status.STORED]


def test_nonsense_is_refused() -> None:
    for keep_s in (0, -1, float("nan"), 1e12):
        with pytest.raises(InvalidConfig, match="keep_s"):
            RedisStore("redis://127.0.0.1", keep_s=keep_s)


def test_a_child_opens_its_own(roomy: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with RedisStore(roomy.url) as store:
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            with pytest.raises(StoreForked):
                store.contains([], deadline=soon())
        assert store.contains([], deadline=soon()) == []


def test_closing_under_a_call(roomy: Server) -> None:
    page = sample_page(52, plane_bytes=LARGE)
    store = RedisStore(roomy.url)
    roomy.signal(signal.SIGSTOP)
    answers: list[Status] = []
    thread = threading.Thread(target=lambda: answers.extend(store.put([page.item], deadline=Deadline.after(0.5))))
    thread.start()
    time.sleep(0.1)
    store.close()
    thread.join()
    roomy.signal(signal.SIGCONT)
    assert answers == [Status.LATE]
    with pytest.raises(ResourceClosed):
        store.put([page.item], deadline=soon())
