"""The brain and the index of an engine that allocates by itself: what is remembered of stores beyond a request."""

import random
from pathlib import Path

import pytest

from headwater.core.keys import BlockKey
from headwater.core.results import Status
from headwater.index.base import Hold
from headwater.index.lent import LentIndex
from headwater.storage.base import Deadline
from headwater.testing.mooncake import MooncakePool
from headwater.testing.redis import redis_server
from test_vllm_sides import ROOM_S, engine_of, request_keys, run
from vllm_kit import SIZE, FakeEngine, FakeRequest

POOL, DISK = 1, 2
KEYS = [BlockKey(bytes([i]) * 32) for i in range(10)]


def path_of(index: LentIndex, num_blocks: int = 10) -> Hold:
    hold = index.hold([], now_s=0.0)
    index.extend(hold, KEYS[:num_blocks], range(num_blocks), now_s=0.0)
    return hold


@pytest.mark.fault("D1")
def test_writing_begins_at_the_first_hole() -> None:
    index = LentIndex(num_marks=100)
    hold = path_of(index)
    index.mark(hold, 0, 10, bit=POOL, on=True)
    index.forget([KEYS[3], KEYS[7]], POOL)
    assert index.num_marked(hold, POOL) == 3
    assert index.num_lacking(hold, 3, POOL) == 2
    index.mark(hold, 3, 10, bit=POOL, on=True)
    assert index.num_marked(hold, POOL) == 10


def test_what_is_whole_is_what_reading_all_marks_says() -> None:
    """The count that is kept beside a path, against one that is made anew, whatever is lost in between."""
    chance = random.Random(1)
    index = LentIndex(num_marks=1000)
    hold = path_of(index, 0)
    for step in range(3000):
        held = hold.num_blocks
        start = chance.randrange(held + 1)
        end = chance.randrange(start, held + 1)
        bit = chance.choice((POOL, DISK))
        match chance.randrange(20):
            case 0:
                index.unmark(bit)
            case 1 | 2:
                index.forget(chance.sample(KEYS, 2), bit)
            case 3 | 4:
                index.mark(hold, start, end, bit=bit, on=False)
            case 5 if held == 10:
                hold = path_of(index, chance.randrange(4))
            case 6 | 7 if held < 10:
                index.extend(hold, [KEYS[held]], [held], now_s=0.0)
            case _:
                index.mark(index.pin(hold, end), start, end, bit=bit, on=True)
        pin = index.pin(hold, chance.randrange(hold.num_blocks + 1))
        marks = {key: index._marks.get(key, 0) for key in KEYS}
        for one, of in ((pin, POOL), (hold, POOL), (hold, DISK)):
            keys = index.keys(one)
            wanted = next((i for i, key in enumerate(keys) if not marks[key] & of), len(keys))
            assert index.num_marked(one, of) == wanted, step
            assert index.num_lacking(one, wanted, of) == sum(not marks[key] & of for key in keys[wanted:])


def _lose_one(engine: FakeEngine, prompt: list[int], at: int) -> None:
    """A pool that evicts page by page evicts one block of a prompt."""
    executor = engine.worker.sides[0]._executor
    assert executor.drain(ROOM_S)  # type: ignore[attr-defined]
    name = executor._runner._naming.name(request_keys(engine, prompt)[at])  # type: ignore[attr-defined]
    store = executor._tiers["pool"].store  # type: ignore[attr-defined]
    until = Deadline.after(ROOM_S)
    while store.delete([name], deadline=Deadline.after(5.0)) != [Status.REMOVED]:
        assert not until.expired  # a page that was just read has a lease
    assert store.contains([name], deadline=Deadline.after(5.0)) == [False]


def _ask(engine: FakeEngine, name: str, prompt: list[int]) -> int:
    """A request comes and goes; what it saved has arrived. Returns how many blocks it loaded."""
    request = FakeRequest(name, prompt, 2)
    engine.add(request)
    run(engine)
    assert engine.worker.sides[0]._executor.drain(ROOM_S)  # type: ignore[attr-defined]
    return request.num_loaded // SIZE


def _a_hole_is_mended(url: str, directory: Path) -> None:
    prompt = list(range(1, 42))
    with engine_of(directory, disk_directory=None, disk_bytes=None, pool=url) as engine:
        assert _ask(engine, "first", prompt) == 0
        assert _ask(engine, "whole", prompt) == 10
        _lose_one(engine, prompt, 3)
        assert _ask(engine, "who mends", prompt) == 3
        found = _ask(engine, "again", prompt)
        metrics = engine.scheduler.cache.metrics
        assert found == 10, f"{engine.num_failed} failed: {metrics.counters()}, {metrics.events()}"
        brain = engine.scheduler.cache.brain
        assert not brain.tiers["pool"].queued_save_bytes


@pytest.mark.fault("D1")
def test_a_hole_in_redis_is_written_again_by_who_computes_it(tmp_path: Path) -> None:
    with redis_server(64 << 20) as url:
        _a_hole_is_mended(url, tmp_path)


class TestMooncake:
    @pytest.fixture(autouse=True)
    def no_leaks(self) -> None:
        """In place of the one for all tests: its engine keeps files open for as long as the process lasts."""

    @pytest.mark.fault("D1")
    def test_a_hole_is_written_again_by_who_computes_it(self, tmp_path: Path) -> None:
        with MooncakePool(segment_bytes=64 << 20) as pool:
            _a_hole_is_mended(f"mooncake://{pool.config().master}", tmp_path)
