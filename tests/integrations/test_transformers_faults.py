"""A store under `HeadwaterCache` that fails, hangs or lies, and a user who presses Ctrl-C: the answer is the same."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import transformers_kit
from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.integrations.transformers import HeadwaterCache
from headwater.storage.base import Deadline, Store
from headwater.storage.local.directory import SLAB
from headwater.storage.memory import MemoryStore
from headwater.storage.wrappers import OpaqueStore
from headwater.testing.faulty_stores import Faults, FaultyStore
from test_transformers_exact import BLOCK, SMALL_GIB, cold, hits
from transformers_kit import ask, digest, model_of, prompt

LENGTH = 100


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def right() -> str:
    """The answer, computed."""
    torch.set_num_threads(1)
    return cold(model_of("llama"), prompt(LENGTH))


class TroubledStore(OpaqueStore):
    """Does something before a call of the store inside."""

    def __init__(self, store: Store, trouble: Callable[[str], None]) -> None:
        super().__init__(store)
        self.trouble = trouble

    def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        self.trouble("put")
        return super().put(pages, deadline=deadline)

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        self.trouble("get_into")
        return super().get_into(pages, deadline=deadline)

    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> list[bool]:
        self.trouble("contains")
        return super().contains(names, deadline=deadline)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A process that was started in the background, and its children, ignore Ctrl-C otherwise."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("at", [0, 1, -1])
@pytest.mark.parametrize("block", [0, 2, 5])
def test_one_flipped_byte_is_computed_again(block: int, at: int, place: Path, right: str) -> None:
    where = place / "store"
    model = model_of("llama")
    with HeadwaterCache.open(model, where, limit_gib=SMALL_GIB, block_tokens=BLOCK) as headwater:
        cache = ask(headwater, prompt(LENGTH)).past_key_values
    values = cache.layers[1].values[0, :, block * BLOCK : (block + 1) * BLOCK].contiguous()
    wanted = values.view(torch.uint8).numpy().tobytes()
    with (where / SLAB).open("r+b") as slab:
        start = slab.read().index(wanted) + at % len(wanted)
        slab.seek(start)
        byte = slab.read(1)[0]
        slab.seek(start)
        slab.write(bytes([byte ^ 0x10]))
    with HeadwaterCache.open(model, where, block_tokens=BLOCK) as headwater:
        assert digest(ask(headwater, prompt(LENGTH))) == right
        assert hits(headwater) == block * BLOCK
        assert headwater.usage is not None
        assert "corrupt" in headwater.usage.missed
        assert digest(ask(headwater, prompt(LENGTH))) == right
        assert hits(headwater) == 96  # it was saved again


@pytest.mark.parametrize("seed", range(12))
def test_a_store_that_lies_and_fails(seed: int, right: str) -> None:
    faults = Faults(
        put_fails=0.1, get_fails=0.1, get_misses=0.1, flips_byte=0.1, cuts_tail=0.1, swaps_page=0.1, contains_lies=0.1
    )
    store = FaultyStore(MemoryStore(16 << 20), faults, seed=seed)
    with store, HeadwaterCache(model_of("llama"), store, block_tokens=BLOCK) as headwater:
        for _ in range(5):
            assert digest(ask(headwater, prompt(LENGTH))) == right
            hits(headwater)
    assert store.num_injected > 0


@pytest.mark.parametrize("call", ["contains", "get_into", "put"])
def test_a_store_that_raises(call: str, right: str) -> None:
    def trouble(now: str) -> None:
        if now == call:
            raise OSError("the network is gone")

    with (
        MemoryStore(16 << 20) as inner,
        HeadwaterCache(model_of("llama"), inner, block_tokens=BLOCK) as filling,
        TroubledStore(inner, trouble) as store,
        HeadwaterCache(model_of("llama"), store, block_tokens=BLOCK) as headwater,
    ):
        if call != "put":
            ask(filling, prompt(LENGTH))
        for _ in range(4):
            assert digest(ask(headwater, prompt(LENGTH))) == right
            assert hits(headwater) == 0
            assert headwater.usage is not None
            assert (headwater.usage.not_saved if call == "put" else headwater.usage.missed) not in (
                "",
                "not in the store",
            )


@pytest.mark.parametrize("call", ["contains", "get_into", "put"])
def test_a_store_that_hangs(call: str, right: str) -> None:
    """The answers are there while the store still hangs."""
    goes_on = threading.Event()

    def trouble(now: str) -> None:
        if now == call:
            goes_on.wait()

    with (
        MemoryStore(16 << 20) as inner,
        HeadwaterCache(model_of("llama"), inner, block_tokens=BLOCK) as filling,
        TroubledStore(inner, trouble) as store,
        HeadwaterCache(
            model_of("llama"), store, block_tokens=BLOCK, read_timeout_s=0.2, write_timeout_s=0.2
        ) as headwater,
    ):
        if call != "put":
            ask(filling, prompt(LENGTH))
        try:
            for _ in range(3):
                assert digest(ask(headwater, prompt(LENGTH))) == right
                assert hits(headwater) == 0
        finally:
            assert not goes_on.is_set()
            goes_on.set()


def test_a_store_that_was_closed_under_us(right: str) -> None:
    store = MemoryStore(16 << 20)
    with HeadwaterCache(model_of("llama"), store, block_tokens=BLOCK) as headwater:
        ask(headwater, prompt(LENGTH))
        store.close()
        assert digest(ask(headwater, prompt(LENGTH))) == right
        assert hits(headwater) == 0


def test_a_store_without_room(right: str) -> None:
    with MemoryStore(64 << 10) as store, HeadwaterCache(model_of("llama"), store, block_tokens=BLOCK) as headwater:
        for _ in range(2):
            assert digest(ask(headwater, prompt(LENGTH))) == right


@pytest.mark.parametrize("call", ["contains", "get_into", "put"])
def test_ctrl_c_while_the_store_is_at_it(call: str, right: str, interruptible: None) -> None:
    """The job goes on without its caller; the next call has other slots, and everything is right."""
    at_it, goes_on = threading.Event(), threading.Event()

    def trouble(now: str) -> None:
        if now == call and not at_it.is_set():
            at_it.set()
            os.kill(os.getpid(), signal.SIGINT)
            goes_on.wait(1.0)

    with MemoryStore(16 << 20) as inner, HeadwaterCache(model_of("llama"), inner, block_tokens=BLOCK) as filling:
        if call == "get_into":
            ask(filling, prompt(LENGTH))
        store = TroubledStore(inner, trouble)
        with HeadwaterCache(model_of("llama"), store, block_tokens=BLOCK) as headwater:
            with pytest.raises(KeyboardInterrupt):
                ask(headwater, prompt(LENGTH))
            goes_on.set()
            for _ in range(2):
                assert digest(ask(headwater, prompt(LENGTH))) == right
            assert hits(headwater) == 96
        assert digest(ask(filling, prompt(LENGTH))) == right
        assert hits(filling) == 96


def test_ctrl_c_at_any_time_leaves_the_directory_sound(tmp_path: Path, right: str, interruptible: None) -> None:
    where = tmp_path / "llama"
    open_local(LocalStoreConfig(directory=where, limit_bytes=32 << 20)).close()
    command = [sys.executable, str(Path(transformers_kit.__file__)), str(tmp_path), "llama", str(BLOCK)]
    for number in range(2):
        running = subprocess.Popen(
            [*command, *(str(length) for length in range(20, 900, 7 + number))],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert running.stdout is not None
        for _ in range(2 + 9 * number):
            running.stdout.readline()
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=120)
        assert "KeyboardInterrupt" in said
        with HeadwaterCache.open(model_of("llama"), where, block_tokens=BLOCK) as headwater:
            assert digest(ask(headwater, prompt(LENGTH))) == right
    with open_local(LocalStoreConfig(directory=where)) as store:
        names: Any = store
        assert names.down is None


def test_a_cache_that_is_closed_meanwhile(right: str) -> None:
    """Another thread closes it while the model computes: the answer is there, and nothing is opened again."""
    with MemoryStore(16 << 20) as store:
        headwater = HeadwaterCache(model_of("llama"), store, block_tokens=BLOCK)

        def stops(*_: Any) -> torch.Tensor:
            headwater.close()
            return torch.tensor([False])

        output = ask(headwater, prompt(LENGTH), stopping_criteria=[stops])
        assert digest(output) == right
        assert headwater.usage is not None
        assert "closed" in headwater.usage.not_saved
        assert not store.names()
