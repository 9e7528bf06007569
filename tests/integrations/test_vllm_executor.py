"""The executor: vLLM's blocks are moved by another process. Every byte is right, whatever becomes of that process.

The KV is in files here, which another process maps as it would a GPU's memory.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.core.errors import CopyStuck, InvalidLayout, RankUnavailable
from headwater.core.events import Cancel, Event, Instruction, JobFailed, Save
from headwater.core.keys import BlockKey
from headwater.core.results import Reason
from headwater.integrations.vllm import executor
from headwater.integrations.vllm import worker as worker_module
from headwater.integrations.vllm.executor import ExecutorProcess, Starting, begin_ahead, take_begun
from headwater.integrations.vllm.metadata import Orders
from headwater.integrations.vllm.registered import RegisteredCache, say_planes
from headwater.integrations.vllm.settings import ConnectorConfig, read_config
from headwater.integrations.vllm.worker import WorkerSide
from machines.processes import freeze
from test_vllm_sides import ROOM_S, engine_of, plane, prompts, run
from vllm_kit import FakeEngine, FakeRequest

PROMPT = list(range(1, 42))
IDENTITY = bytes(range(32))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ExecutorProcess]:
    """Those that work, as they come."""
    found: list[ExecutorProcess] = []
    wait = Starting.wait

    def kept(self: Starting, **options: Any) -> ExecutorProcess:
        found.append(wait(self, **options))
        return found[-1]

    monkeypatch.setattr(Starting, "wait", kept)
    return found


def loaded(engine: FakeEngine, name: str, prompt: list[int] = PROMPT) -> int:
    request = FakeRequest(name, prompt, 2)
    engine.add(request)
    run(engine)
    return request.num_loaded


def until(true: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + ROOM_S
    while not true():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_no_wrong_byte_while_requests_are_preempted_and_aborted(tmp_path: Path, mode: str) -> None:
    """The engine checks all that it computes with."""
    chance = random.Random(3)
    with engine_of(tmp_path / "disk", num_blocks=40, load=mode, executor="process", free_timeout_s=0.05) as engine:
        for turn in range(30):
            asked = prompts(turn // 2, 10)
            engine.add(*(FakeRequest(f"{turn}.{at}", one, 6) for at, one in enumerate(asked)))
            run(engine, chance=chance)
            hits = engine.scheduler.cache.metrics.value("hit_tokens_total")
            if turn >= 5 and hits and engine.num_preempted > 5:
                break
        assert hits > 0, "nothing was tested"
        assert engine.num_preempted > 5


def test_what_it_counts_is_counted_here(tmp_path: Path, started: list[ExecutorProcess]) -> None:
    with engine_of(tmp_path / "disk", executor="process") as engine:
        assert loaded(engine, "a") == 0
        assert started[0].executor.drain(ROOM_S)
        assert started[0].metrics.value("moved_bytes_total", tier="disk", direction="in") > 0
        assert loaded(engine, "b") == 40
        assert started[0].metrics.value("moved_bytes_total", tier="disk", direction="out") > 0
        assert started[0].metrics.value("jobs_total", job="load") > 0


@pytest.mark.parametrize("when", ["idle", "at work"])
def test_one_that_is_killed_costs_its_hits_and_nothing_else(
    tmp_path: Path, started: list[ExecutorProcess], when: str, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_of(tmp_path / "disk", executor="process") as engine:
        assert loaded(engine, "a") == 0
        assert started[0].executor.drain(ROOM_S)
        if when == "at work":
            killing = threading.Timer(0.02, started[0].process.kill)
            killing.start()
            engine.add(*(FakeRequest(f"{at}", one, 6) for at, one in enumerate([PROMPT, *prompts(1, 20)])))
            run(engine)
            killing.join()
        else:
            started[0].process.kill()
        until(lambda: "executor is gone" in caplog.text)
        run(engine)
        for name in ("b", "c"):  # what the brain hears, it hears with a step
            loaded(engine, name)
        assert loaded(engine, "d") == 0, "a tier without anybody to read it"
        assert engine.scheduler.cache.troubles().keys() >= {"disk"}
        assert caplog.text.count("executor is gone") == 1
    with engine_of(tmp_path / "disk", executor="process") as engine:
        assert loaded(engine, "e") == 40, "what was written before is there"


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_one_that_stands_still_is_shot(
    tmp_path: Path,
    started: list[ExecutorProcess],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: str,
) -> None:
    monkeypatch.setattr(executor, "_LOST_AFTER_S", 0.5)
    with engine_of(tmp_path / "disk", executor="process", load_timeout_s=0.5, load=mode) as engine:
        assert loaded(engine, "a") == 0
        assert started[0].executor.drain(ROOM_S)
        freeze(started[0].process.pid)
        request = FakeRequest("b", PROMPT, 2)
        engine.add(request)
        give_up_s = time.monotonic() + ROOM_S
        while engine.is_busy:  # blocks that it may write to are kept back meanwhile
            engine.step()
            assert time.monotonic() < give_up_s
        assert engine.num_failed == 1, "it is computed"
        until(lambda: "executor is gone" in caplog.text)
        assert loaded(engine, "c") == 0


def test_one_that_stands_still_at_the_end_is_killed(
    tmp_path: Path, started: list[ExecutorProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no thread, no socket and no process of it is left: see `no_leaks`."""
    monkeypatch.setattr(executor, "_DRAIN_S", 0.2)
    monkeypatch.setattr(executor, "_EXIT_S", 0.2)
    with engine_of(tmp_path / "disk", executor="process") as engine:
        assert loaded(engine, "a") == 0
        freeze(started[0].process.pid)
    assert started[0].process.returncode == -signal.SIGKILL


def test_one_ends_when_vllm_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever kills vLLM's worker closes its socket, and sends no signal to anybody else."""
    monkeypatch.setattr(executor, "_DRAIN_S", 0.2)
    starting = begin(tmp_path)
    link = starting.wait(timeout_s=ROOM_S)
    assert starting.process.poll() is None
    for polite in (signal.SIGINT, signal.SIGTERM):  # to all processes of a terminal, or of a service
        starting.process.send_signal(polite)
    time.sleep(0.1)
    assert starting.process.poll() is None
    starting._sock.close()
    link.executor._members[0].executor._link.abandon()  # type: ignore[attr-defined]
    assert starting.process.wait(ROOM_S) == 0
    link.close(0.0)


def test_one_ends_with_its_parent_though_a_fork_of_that_holds_its_socket(tmp_path: Path) -> None:
    """As a pool of processes does, which was forked and not started anew."""
    code = f"""
import os, sys, time
sys.path[:0] = {[str(Path(__file__).parents[1] / one) for one in ("", "kits", "integrations")]!r}
from pathlib import Path
from test_vllm_executor import begin
starting = begin(Path({str(tmp_path)!r}))
starting.wait()
if os.fork() == 0:
    time.sleep(1000)
print(starting.process.pid, flush=True)
time.sleep(1000)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as one:
        try:
            assert one.stdout is not None
            pid = int(one.stdout.readline())
            os.kill(one.pid, signal.SIGKILL)
            until(lambda: not Path(f"/proc/{pid}").exists())
        finally:
            os.killpg(one.pid, signal.SIGKILL)


def config_of(tmp_path: Path, name: str = "disk") -> ConnectorConfig:
    return read_config({"host_directory": None, "disk_directory": str(tmp_path / name), "disk_bytes": 16 << 20})


def show(starting: Starting, tmp_path: Path, **options: Any) -> None:
    cache = RegisteredCache({"a": plane(8, 64, tmp_path / "kv")}, num_blocks=8, block_tokens=4)
    starting.show({**say_planes(cache), **options}, identity=IDENTITY, rank=0, world=1)


def begin(tmp_path: Path, **options: Any) -> Starting:
    starting = Starting(config_of(tmp_path))
    show(starting, tmp_path, **options)
    return starting


def test_one_is_begun_before_there_is_any_kv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_EXIT_S", ROOM_S)  # a busy machine takes longer to end a process than users wait
    config = config_of(tmp_path)
    begin_ahead(config)
    (ahead,) = executor._ahead
    starting = take_begun(config_of(tmp_path), on_gpu=False)
    assert starting is ahead
    assert not executor._ahead
    with pytest.raises(RankUnavailable, match="no executor"):
        starting.wait(timeout_s=1.0)  # it has not been shown any
    begin_ahead(config)
    starting = take_begun(config, on_gpu=False)
    show(starting, tmp_path)
    found = starting.wait(timeout_s=ROOM_S)
    assert found.executor.drain(ROOM_S)
    found.close()
    assert found.process.returncode == 0


def test_one_that_was_begun_for_other_options_is_ended(tmp_path: Path) -> None:
    begin_ahead(config_of(tmp_path))
    (first,) = executor._ahead
    begin_ahead(config_of(tmp_path, "other"))
    (second,) = executor._ahead
    assert first.process.returncode is not None
    third = take_begun(config_of(tmp_path), on_gpu=False)
    assert second.process.returncode is not None
    assert third is not first
    third.give_up()
    begin_ahead(read_config({"executor": "threads"}))
    assert not executor._ahead


def test_one_that_died_before_it_was_wanted_is_replaced(tmp_path: Path) -> None:
    begin_ahead(config_of(tmp_path))
    (dead,) = executor._ahead
    dead.process.kill()
    dead.process.wait(ROOM_S)
    starting = take_begun(config_of(tmp_path), on_gpu=False)
    assert starting is not dead
    show(starting, tmp_path)
    starting.wait(timeout_s=ROOM_S).close()


def test_one_that_dies_before_it_is_shown_anything_is_said(tmp_path: Path) -> None:
    starting = Starting(config_of(tmp_path))
    starting.process.kill()
    starting.process.wait(ROOM_S)
    show(starting, tmp_path)
    with pytest.raises(RankUnavailable, match="no executor"):
        starting.wait(timeout_s=ROOM_S)


def test_one_whose_other_end_is_closed_ends_quietly(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    starting = Starting(config_of(tmp_path))
    starting._sock.close()
    assert starting.process.wait(ROOM_S) == 0
    assert "cannot begin" not in capfd.readouterr().err


def test_one_that_cannot_begin_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gone = {"storages": [{"file": str(tmp_path / "nowhere" / "x"), "num_bytes": 512}]}
    starting = begin(tmp_path, **gone)
    with pytest.raises(RankUnavailable, match="no executor"):
        starting.wait(timeout_s=ROOM_S)
    assert starting.process.returncode is not None
    assert "it cannot begin: InvalidLayout: vLLM's KV cannot be mapped" in capfd.readouterr().err


def test_one_that_nobody_waits_for_ends(tmp_path: Path) -> None:
    starting = begin(tmp_path)
    starting.give_up()
    starting.give_up()
    assert starting.process.returncode is not None


def test_memory_of_this_process_alone_is_refused() -> None:
    cache = RegisteredCache({"a": torch.zeros(8, 64, dtype=torch.uint8)}, num_blocks=8, block_tokens=4)
    with pytest.raises(InvalidLayout, match="cannot be shared with another process"):
        say_planes(cache)


def test_its_configuration_is_the_connectors(tmp_path: Path) -> None:
    """Word for word, through JSON."""
    config = ConnectorConfig(disk_directory=tmp_path, disk_bytes=16 << 20, pool=None, layout=None)
    plain = {name: executor._plain(value) for name, value in asdict(config).items()}
    assert read_config(plain) == config


class SilentExecutor:
    """An executor of another process: what it is told, and what a test has it say."""

    def __init__(self) -> None:
        self.deliver: Callable[[Event], None] | None = None
        self.heard: list[Instruction] = []

    def submit(self, instructions: Iterable[Instruction]) -> None:
        self.heard += instructions

    def throttle_saves(self, *, on: bool) -> None:
        pass

    def say(self, event: Event) -> None:
        assert self.deliver is not None
        self.deliver(event)


KEY = BlockKey(bytes(32))
SAVE = Save(job=1, store="disk", parent=KEY, depth=1, tenant=b"", keys=(KEY,), slots=(3,), deadline_s=1e9)


@pytest.mark.parametrize("answers", [True, False])
def test_blocks_are_not_written_to_before_who_reads_them_has_said_that_it_does_not(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would save, as one block, what is then another. Without an answer it is killed."""
    monkeypatch.setattr(worker_module, "_FLUSH_S", 0.01)
    monkeypatch.setattr(worker_module, "_CANCEL_S", ROOM_S if answers else 0.05)
    silent, killed = SilentExecutor(), threading.Event()

    def kill() -> bool:
        killed.set()
        return True

    side = WorkerSide(silent, kill=kill)
    side.begin(Orders(jobs=(SAVE,)))
    side.load()
    side.save()
    begun = threading.Thread(target=side.begin, args=(Orders(vacated=(1,)),))
    begun.start()
    until(lambda: Cancel(job=1) in silent.heard)
    if answers:
        assert begun.is_alive()
        assert not killed.is_set()
        silent.say(JobFailed(now_s=0.0, job=1, failure=Reason.CANCELLED, why="it was cancelled"))
    begun.join(ROOM_S)
    assert not begun.is_alive()
    assert killed.is_set() is not answers


def test_blocks_that_cannot_be_had_stop_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that a driver holds reads on: whatever vLLM wrote to its blocks could be saved as another's."""
    monkeypatch.setattr(worker_module, "_FLUSH_S", 0.01)
    monkeypatch.setattr(worker_module, "_CANCEL_S", 0.05)
    side = WorkerSide(SilentExecutor(), kill=lambda: False)
    side.begin(Orders(jobs=(SAVE,)))
    side.load()
    side.save()
    with pytest.raises(CopyStuck, match="cannot be killed"):
        side.begin(Orders(vacated=(1,)))


def test_blocks_of_ended_requests_are_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_CANCEL_S", 0.05)
    silent, killed = SilentExecutor(), threading.Event()

    def kill() -> bool:
        killed.set()
        silent.say(JobFailed(now_s=0.0, job=1, failure=Reason.FAILED, why="dead"))
        return True

    side = WorkerSide(silent, kill=kill)
    side.begin(Orders(jobs=(SAVE,), leaving=(("a", (1,), 0.0),)))
    side.load()
    side.save()
    left: set[str] = set()
    give_up_s = time.monotonic() + ROOM_S
    while not left and time.monotonic() < give_up_s:
        left, _ = side.finished()
        time.sleep(0.01)
    assert left == {"a"}
    assert killed.is_set()


def test_a_process_is_waited_for_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_EXIT_S", 0.05)
    process = subprocess.Popen(["sleep", "1000"])
    executor._end(process)
    assert process.returncode == -signal.SIGKILL
