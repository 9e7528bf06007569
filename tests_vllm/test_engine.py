"""The connector in a real vLLM: equal tokens whatever a prompt was served from, and nothing left behind."""

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from headwater.core.events import Load
from headwater.core.results import Status
from headwater.transfer.device.wire import Direction

HEAD = [3 + (at * 7) % 250 for at in range(192)]
PROMPT = [*HEAD, 5, 6, 7, 8, 9, 10, 11, 12]


def _shared(number: int) -> list[list[int]]:
    """Prompts that share their first blocks, and go on differently."""
    chance = random.Random(7)
    return [HEAD[: 64 + 32 * (at % 3)] + [chance.randrange(3, 250) for _ in range(40 + at)] for at in range(number)]


BATCH = _shared(8)
CHUNKS = {"max_num_batched_tokens": 64, "enable_chunked_prefill": True}


@pytest.fixture(scope="module")
def alone(model_of: Callable[[str], Any]) -> dict[str, list[list[int]]]:
    """What vLLM says without a connector."""
    from conftest import Engine

    found = {}
    for kind in ("gqa", "mla"):
        engine = Engine(model_of(kind), kind, None)
        found[kind] = engine.tokens([PROMPT]) + (engine.tokens(BATCH) if kind == "gqa" else [])
        engine.close()
    return found


def test_gqa_from_every_tier(engine: Any, alone: Any, tiers: dict[str, Any]) -> None:
    expected, batch = alone["gqa"][0], alone["gqa"][1:]
    with engine("gqa", tiers) as one:
        cold = one.ask([PROMPT])[0]
        assert list(cold.outputs[0].token_ids) == expected
        assert cold.num_cached_tokens == 0
        one.empty_device()
        hit = one.ask([PROMPT])[0]
        assert list(hit.outputs[0].token_ids) == expected
        assert hit.num_cached_tokens == 192
        assert one.scheduler.metrics.value("hit_tokens_total", tier="host") == 192
        one.empty_device()
        assert one.tokens(BATCH) == batch, "a batch, of which one has a part in the host tier"
        one.empty_device()
        again = one.ask(BATCH)
        assert [list(answer.outputs[0].token_ids) for answer in again] == batch
        assert all(answer.num_cached_tokens >= 96 for answer in again)
        one.settle()
        one.scheduler.cache.brain.validate()
        stored = one.scheduler.metrics.counters()
    assert not [name for name in stored if name.startswith("events_total")], stored
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("headwater")]
    # another process would find the same; here, another engine, which has only the disk
    with engine("gqa", {**tiers, "host_directory": None}) as two:
        hit = two.ask([PROMPT])[0]
        assert list(hit.outputs[0].token_ids) == expected
        assert hit.num_cached_tokens == 192
        assert two.scheduler.metrics.value("hit_tokens_total", tier="disk") == 192


@pytest.mark.fault("C5")
def test_after_a_reset_of_the_connector_nothing_of_before_is_served(
    engine: Any, alone: Any, tiers: dict[str, Any]
) -> None:
    expected = alone["gqa"][0]
    with engine("gqa", tiers) as one:
        one.tokens([PROMPT])
        one.empty_device()
        assert one.ask([PROMPT])[0].num_cached_tokens == 192
        one.settle()
        assert one.llm.reset_prefix_cache(reset_connector=True)
        for num_cached in (0, 192):
            answer = one.ask([PROMPT])[0]
            assert list(answer.outputs[0].token_ids) == expected
            assert answer.num_cached_tokens == num_cached
            one.empty_device()
        one.scheduler.cache.brain.validate()


def test_mla_from_the_host(engine: Any, alone: Any, tiers: dict[str, Any]) -> None:
    with engine("mla", {**tiers, "disk_directory": None, "load": "sync"}) as one:
        assert one.tokens([PROMPT]) == alone["mla"]
        one.empty_device()
        hit = one.ask([PROMPT])[0]
        assert hit.num_cached_tokens == 192
        assert [list(hit.outputs[0].token_ids)] == alone["mla"]


class _Sabotage:
    """Makes a worker's loads fail, in a way."""

    def __init__(self, worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.way = ""
        self.tried = 0
        self.released = threading.Event()
        runner = worker.executor._runner
        way = runner.way

        def sabotaged(order: Any) -> Any:
            if not self.way or not isinstance(order, Load):
                return way(order)
            return partial(self._load, load=way(order))

        monkeypatch.setattr(runner, "way", sabotaged)

    def _load(self, job: Any, *, load: Any) -> Any:
        self.tried += 1
        if self.way == "raise":
            raise OSError("the disk went away")
        if self.way == "hang":
            self.released.wait(60)
            raise OSError("too late anyway")
        got = load(job)
        return [*got[:2], *[Status.CORRUPT] * (len(got) - 2)]  # half of it came, the rest was damaged


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_load_that_fails_is_computed_once(
    engine: Any, alone: Any, tiers: dict[str, Any], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**tiers, "load": mode, "load_timeout_s": 0.5}
    with engine("gqa", options) as one:
        assert one.tokens([PROMPT]) == [alone["gqa"][0]]  # perhaps from a test before
        saboteur = _Sabotage(one.worker, monkeypatch)
        for way in ("raise", "half", "hang"):
            one.empty_device()
            one.scheduler.side._executor._dropped.clear()
            for tier in one.scheduler.cache.brain.tiers.values():
                for breaker in tier.breakers.values():
                    breaker.on()
            saboteur.way, saboteur.tried = way, 0
            assert one.tokens([PROMPT]) == [alone["gqa"][0]], way
            assert saboteur.tried == 1, f"{way}: a request is told of a hit once"
            saboteur.way = ""
            saboteur.released.set()
            one.settle()
            one.scheduler.cache.brain.validate()


def test_a_copy_that_hangs_costs_its_deadline_and_its_blocks(engine: Any, alone: Any, tiers: dict[str, Any]) -> None:
    """VLLM computes the request in other blocks, and gives those that may still be written to to nobody."""
    with engine("gqa", {**tiers, "load_timeout_s": 3.0}) as one:
        assert one.tokens([PROMPT]) == [alone["gqa"][0]]
        one.empty_device()
        pool = one.scheduler.side.pins._pool
        num_free = pool.get_num_free_blocks()
        wire = one.worker.staging.engine._queues[Direction.IN].wire
        go_on, finish = threading.Event(), wire.finish

        def hang(place: int, *, hurry: bool = False) -> Any:
            assert go_on.wait(60)
            return finish(place, hurry=hurry)

        wire.finish = hang
        try:
            assert one.tokens([PROMPT]) == [alone["gqa"][0]]
            pinned = one.scheduler.side._pinned
            assert pinned
            assert all(pool.blocks[block].ref_cnt == 1 for block in pinned), "nobody's but ours"
            assert pool.get_num_free_blocks() == num_free - len(pinned)
            assert one.tokens(BATCH) == alone["gqa"][1:], "others go on"
            assert one.scheduler.side._pinned >= pinned  # and blocks of who wanted to load meanwhile, behind that copy
        finally:
            go_on.set()
        assert one.worker.executor.drain(20)
        one.tokens([[5] * 20])  # the news come with a step
        assert not one.scheduler.side._pinned
        one.settle()
        assert pool.get_num_free_blocks() == num_free
        one.scheduler.cache.brain.validate()
        one.empty_device()
        assert one.tokens([PROMPT]) == [alone["gqa"][0]]


def test_preempted_requests_and_chunks(engine: Any, alone: Any, tiers: dict[str, Any]) -> None:
    """Far too few blocks for the batch: vLLM preempts, and takes blocks away that are being saved."""
    with engine("gqa", tiers, num_gpu_blocks_override=24, max_model_len=512, max_num_seqs=8, **CHUNKS) as one:
        for _ in range(2):
            assert one.tokens(BATCH, 40)[0][:12] == alone["gqa"][1][:12]
            tokens = [answer[:12] for answer in one.tokens(BATCH, 40)]
            assert tokens == alone["gqa"][1:]
            one.settle()
            one.scheduler.cache.brain.validate()
        preemptions = sum(m.value for m in one.llm.get_metrics() if m.name == "vllm:num_preemptions")
        assert preemptions > 0, "nothing was tested"


def test_salts_do_not_share(engine: Any, alone: Any, tiers: dict[str, Any]) -> None:
    with engine("gqa", tiers) as one:
        one.tokens([PROMPT], cache_salt="a")
        one.empty_device()
        assert one.ask([PROMPT], cache_salt="b")[0].num_cached_tokens == 0
        one.empty_device()
        hit = one.ask([PROMPT], cache_salt="a")[0]
        assert hit.num_cached_tokens == 192
        assert list(hit.outputs[0].token_ids) == alone["gqa"][0]


def test_blocks_are_kept_while_they_are_read_and_not_for_ever(
    engine: Any, alone: Any, tiers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine("gqa", {**tiers, "host_directory": None, "free_timeout_s": 1.0}) as one:
        executor = one.worker.executor._runner
        held = threading.Event()
        save = executor._save

        def slow(job: Any, order: Any) -> Any:
            held.wait(20)
            return save(job, order)

        monkeypatch.setattr(executor, "_save", slow)
        prompt = [9, *PROMPT]
        tokens = one.tokens([prompt])
        scheduler = one.core.scheduler
        assert scheduler.has_finished_requests(), "the blocks were given away while they are to be read"
        assert scheduler.connector.has_pending_block_frees()
        until = time.monotonic() + 15  # of the 20 s that the save is held
        while scheduler.has_finished_requests():
            one.llm.llm_engine.step()
            assert time.monotonic() < until, "the blocks are never given back"
        held.set()
        one.empty_device()
        assert one.ask([prompt])[0].num_cached_tokens == 0, "a save that was cancelled published something"
        assert one.tokens([prompt]) == tokens


def test_what_cannot_be_cached_is_refused(model_of: Callable[[str], Any]) -> None:
    from conftest import Engine

    with pytest.raises(Exception, match="no option 'host_dir'"):
        Engine(model_of("gqa"), "gqa", {"host_dir": "/dev/shm/x"})
    with pytest.raises(Exception, match="dummy"):
        Engine(model_of("gqa"), "gqa", {}, load_format="dummy")
    with pytest.raises(Exception, match="executor=process: another process can map a GPU's"):
        Engine(model_of("gqa"), "gqa", {"executor": "process"})


def test_what_others_hear(engine: Any, tiers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """KV events by vLLM's hashes, our counters at vLLM's Prometheus endpoint, blocks in the residency index."""
    import prometheus_client
    from vllm.config import KVEventsConfig
    from vllm.distributed.kv_events import BlockStored

    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    prompt = [17, *HEAD]
    with engine("gqa", {**tiers, "residency": "memory:"}, kv_events_config=events) as one:
        heard: list[Any] = []
        publisher = one.core.scheduler.kv_event_publisher
        monkeypatch.setattr(publisher, "publish", lambda batch: heard.extend(batch.events))
        one.tokens([prompt])
        one.settle()
        one.tokens([[5, 6, 7]])  # a step, with which the last news travel
        stored: dict[str, set[Any]] = {medium: set() for medium in ("GPU", "CPU", "STORAGE")}
        for event in heard:
            if isinstance(event, BlockStored):
                stored[event.medium] |= set(event.block_hashes)
        assert len(stored["GPU"]) >= 6
        assert stored["CPU"] == stored["STORAGE"] != set()
        assert stored["CPU"] <= stored["GPU"], "our tiers speak of blocks by vLLM's names"
        tellers = one.scheduler.side.teller
        keys = one.scheduler.side._namer.prompt(_request()).extend(prompt, 6)
        assert tellers._listener.drain(10)
        assert all({"device", "host", "disk"} <= _tiers(tellers._listener.state(key)) for key in keys)
        one.empty_device()
        one.tokens([[5, 6, 7]])
        assert tellers._listener.drain(10)
        assert not any("device" in _tiers(tellers._listener.state(key)) for key in keys), "vLLM has forgotten them"
        assert one.ask([prompt])[0].num_cached_tokens == 192
        one.settle()
        metrics = prometheus_client.generate_latest().decode()
        shown = {metric.name for metric in one.llm.get_metrics()}
    line = next(line for line in metrics.splitlines() if line.startswith("headwater_moved_bytes_total{"))
    assert "tier=" in line
    assert 'engine="0"' in line
    assert "vllm:headwater_moved_bytes" in shown, sorted(shown)


def _request() -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(prompt_embeds=None, lora_request=None, mm_features=(), cache_salt=None)


def _tiers(state: Any) -> set[str]:
    return set(state.tiers)
