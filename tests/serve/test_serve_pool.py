"""Servers that share a pool: what one computed, the next one's first request finds, and says the same."""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from headwater.build import open_residency
from headwater.cache.cache import TieredCache
from headwater.config.residency import ResidencyConfig
from headwater.config.serve import ServeConfig
from headwater.core.errors import InvalidConfig
from headwater.core.keys import BlockKey
from headwater.engine.models.base import Model
from headwater.lab import doctor, finding
from headwater.lab.bench.serve import _COMMAND, _address
from headwater.storage.base import Deadline
from headwater.testing.mooncake import MooncakePool
from serve_kit import WAIT_S, directory, model, serving
from test_redis import Server

__all__ = ["directory", "model"]

PROMPT = "All of this was said before, by somebody else, to another server. " * 4


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def process(arguments: list[str], log: Path) -> Iterator[str]:
    """`headwater serve` in a process of its own, ended as an operator would end it."""
    command = [*_COMMAND, "--port", "0", *arguments]
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as running,
    ):
        try:
            yield _address(running, log)
        finally:
            running.send_signal(signal.SIGTERM)
            assert running.wait(WAIT_S) == 0


def ask(url: str) -> tuple[str, dict[str, Any]]:
    body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "max_tokens": 12}
    with httpx2.Client(base_url=url, timeout=WAIT_S) as client:
        found = client.post("/v1/completions", json=body)
    assert found.status_code == 200, found.text
    answer = found.json()
    return answer["choices"][0]["text"], answer["usage"]


def by_tier(usage: dict[str, Any]) -> dict[str, int]:
    return {tier: num for tier, num in usage["headwater"]["cached_tokens"].items() if num}


def test_two_processes_on_one_mooncake_pool(directory: Path, tmp_path: Path) -> None:
    with MooncakePool(segment_bytes=64 << 20, lease_ms=2000) as pool:
        plain = ["--model", str(directory), "--host-mib", "0", "--disk-mib", "0", "--num-blocks", "64"]
        patient = ["--probe-timeout", str(WAIT_S), "--load-timeout", str(WAIT_S)]
        shared = [*plain, *patient, "--pool", pool.config().url]
        with process(shared, tmp_path / "first.log") as url:
            text, usage = ask(url)
            assert by_tier(usage) == {}
        with process(shared, tmp_path / "second.log") as url:
            again, usage = ask(url)
            counted = httpx2.get(f"{url}/metrics", timeout=WAIT_S).text
    assert again == text
    told = [line for line in counted.splitlines() if "miss_tokens" in line or "jobs_total" in line]
    assert by_tier(usage).get("pool", 0) >= usage["prompt_tokens"] - 16, told


@pytest.mark.parametrize("kind", ["local", "redis"])
def test_what_one_server_computed_the_next_finds_in_the_pool(
    kind: str, directory: Path, model: Model, tmp_path: Path, redis: Server
) -> None:
    pool = f"local:{tmp_path / 'pool'}" if kind == "local" else redis.url
    texts, tiers = [], []
    for _ in range(2):
        with serving(directory, model, pool=pool) as one:
            text, usage = ask(one.url)
            texts.append(text)
            tiers.append(by_tier(usage))
            assert one.running.cache.drain(WAIT_S)
    assert texts[0] == texts[1]
    assert tiers[0] == {}
    assert tiers[1]["pool"] >= 200


def test_what_is_read_from_the_pool_comes_to_the_local_tier(directory: Path, model: Model, tmp_path: Path) -> None:
    pool, host = f"local:{tmp_path / 'pool'}", tmp_path / "host"
    with serving(directory, model, pool=pool) as one:
        text, _ = ask(one.url)
        assert one.running.cache.drain(WAIT_S)
    with serving(directory, model, pool=pool, disk_directory=host) as two:
        assert ask(two.url)[0] == text
        assert two.running.cache.drain(WAIT_S)
    with serving(directory, model, disk_directory=host) as three:  # without the pool
        again, usage = ask(three.url)
    assert again == text
    assert by_tier(usage)["disk"] >= 200


def test_a_pool_that_is_not_there_changes_nothing_but_hits(
    directory: Path, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(directory, model) as one:
        text, _ = ask(one.url)
    with serving(directory, model, pool="redis://127.0.0.1:1") as one:
        assert ask(one.url)[0] == text
    assert "tier disabled" in caplog.text


def test_a_pool_that_goes_away_changes_nothing_but_hits(directory: Path, model: Model, redis: Server) -> None:
    with ExitStack() as stack:
        one = stack.enter_context(serving(directory, model, pool=redis.url))
        text, _ = ask(one.url)
        assert one.running.cache.drain(WAIT_S)
        redis.kill()
        assert ask(one.url)[0] == text
        assert one.complete("Something else that nobody has said yet.", max_tokens=4)["choices"]


def test_a_server_tells_what_it_holds(directory: Path, model: Model, redis: Server, tmp_path: Path) -> None:
    options: dict[str, Any] = {"residency": redis.url, "node": "here", "disk_directory": tmp_path / "disk"}
    with serving(directory, model, **options) as one, open_residency(ResidencyConfig(url=redis.url)) as index:
        ask(one.url)
        assert one.running.cache.drain(WAIT_S)
        keys = _keys(one.running.cache)

        def told() -> bool:
            found = index.lookup(keys, deadline=Deadline.after(5))
            return any(holder.node == "here" and holder.device >= 8 and holder.disk >= 8 for holder in found.holders)

        one.until(told)


def _keys(cache: TieredCache) -> list[BlockKey]:
    """The one path that the cache knows."""
    with cache.still() as brain:
        after = {parent: key for key, parent, _ in brain.blocks()}
    path = [after[None]]
    while path[-1] in after:
        path.append(after[path[-1]])
    return path


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pool": "ftp://somewhere"}, "mooncake://HOST:PORT, redis://HOST:PORT or local:DIR"),
        ({"pool": "local:"}, "local:DIR"),
        ({"pool": 5}, "pool must be text"),
        ({"residency": "http://somewhere"}, "redis://"),
        ({"node": "here"}, "residency"),
        ({"residency": "redis://127.0.0.1:1", "node": "two words"}, "without spaces"),
        ({"index_only": True}, "residency"),
        ({"index_only": True, "residency": "redis://127.0.0.1:1", "pool": "redis://127.0.0.1:1"}, "leave the pool out"),
        ({"index_only": True, "residency": "memory:"}, "for others to read"),
        ({"cache": False, "pool": "redis://127.0.0.1:1"}, "without a cache"),
        ({"cache": False, "residency": "redis://127.0.0.1:1"}, "without a cache"),
    ],
)
def test_what_makes_no_sense_is_refused_at_the_door(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        ServeConfig(model=Path("somewhere"), **options)


def test_a_password_is_not_shown() -> None:
    config = ServeConfig(
        model=Path("somewhere"), pool="redis://me:sesame@127.0.0.1:1", residency="redis://me:sesame@127.0.0.1:1"
    )
    assert "sesame" not in repr(config)
    with pytest.raises(InvalidConfig) as raised:
        ServeConfig(model=Path("somewhere"), pool="http://me:sesame@127.0.0.1:1")
    assert "sesame" not in str(raised.value)


def test_the_doctor_tries_a_pool(redis: Server, tmp_path: Path) -> None:
    def line(url: str) -> tuple[str, str]:
        check = doctor._pool(url)[-1]
        return check.state, check.found

    for url in (redis.url, f"local:{tmp_path / 'pool'}"):
        assert line(url) == (finding.OK, "a page was written, read back and verified")
    with redis.client() as client:
        assert client.dbsize() == 0  # nothing is left
    assert line("ftp://somewhere")[0] == finding.FAIL
    assert "mooncake://" in line("ftp://somewhere")[1]
    redis.kill()
    assert line(redis.url)[0] == finding.FAIL
    assert any(check.state == finding.FAIL for check in doctor._pool("mooncake://127.0.0.1:1"))
