"""Recordings: whatever a brain heard can be handled again, to the same digest; bounded, and in nobody's way."""

import errno
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import test_events
from brain_kit import Injected, fail_at
from headwater.build import open_engine
from headwater.cache.cache import TieredCache
from headwater.cache.executor import NoExecutor
from headwater.cache.state import Brain
from headwater.cli import app
from headwater.config.cache import CacheConfig, SaveWhen, TierConfig
from headwater.config.serve import MIN_RECORD_BYTES, ServeConfig
from headwater.core import encoding
from headwater.core import events as ev
from headwater.core.errors import InvalidConfig, InvalidInput
from headwater.core.keys import BlockKey
from headwater.engine.make_model import make_model
from headwater.engine.request import Output, Request, Sampling
from headwater.integrations.vllm.settings import read_config
from headwater.lab.campaigns.virtual import ROOT, path_keys
from headwater.lab.replay.events import replay_events
from headwater.lab.replay.recording import Heard, _Reader, read
from headwater.metrics import Metrics
from headwater.storage import recording
from headwater.storage.recording import Began, FileRecorder, RecordingEnded
from headwater.testing.clock import FakeClock
from test_vllm_sides import engine_of, prompts, run
from vllm_kit import FakeRequest

WAIT_S = 60.0
CONFIG = CacheConfig(num_slots=8, block_tokens=4, block_bytes=64, tiers=(TierConfig(name="host", save=SaveWhen.NEVER),))


@contextmanager
def recorded(path: Path, config: CacheConfig = CONFIG, **options: Any) -> Iterator[TieredCache]:
    """A cache without an executor whose brain is recorded."""
    metrics = options.pop("metrics", Metrics())
    recorder = FileRecorder(path, metrics=metrics, **{"limit_bytes": 1 << 20, **options})
    try:
        with TieredCache(Brain(config), NoExecutor(), clock=FakeClock(), metrics=metrics, recorder=recorder) as cache:
            yield cache
    finally:
        assert recorder.close(WAIT_S)


def live(cache: TieredCache, name: str, *path: int) -> None:
    """A whole life of a request, without a store."""
    keys = path_keys(path)
    cache.match(name, keys, root=ROOT)
    assert cache.reserve(name, len(keys)) is not None
    ready = cache.poll(name).num_ready
    cache.commit(name, keys[ready:])
    cache.release(name)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


# --- the same again ---------------------------------------------------------------------------------------------------


@pytest.mark.fault("D3")
def test_what_was_recorded_ends_in_the_same_state_again(tmp_path: Path) -> None:
    path = tmp_path / "events"
    with recorded(path) as cache:
        for number in range(60):
            live(cache, f"{number}", number % 3, *range(number % 7))
        with pytest.raises(InvalidInput):
            cache.reserve("nobody", 1)
        cache.match("stays", path_keys([1, 2]), root=ROOT)
    digest = cache.brain.digest()
    found = replay_events(path)
    assert (found.same, found.digest, found.cut, found.num_brains, found.num_failed) == (True, digest, None, 1, 0)
    written = list(read(path))
    assert isinstance(written[0], Began)
    assert written[0].config == CONFIG
    assert sum(isinstance(line, Heard) for line in written) == found.num_events
    assert [line.event.request for line in written if isinstance(line, Heard) and line.refused] == ["nobody"]  # type: ignore[attr-defined]
    assert written[-1] == RecordingEnded(digest, found.num_events)
    assert cache.metrics.value("recorded_events_total", outcome="written") == found.num_events
    assert path.stat().st_mode & 0o777 == 0o600
    shown = CliRunner().invoke(app, ["replay", "--events", str(path), "--json"])
    assert shown.exit_code == 0
    assert json.loads(shown.stdout)["digest"] == digest


def test_a_prompt_that_comes_again_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "events"
    keys = path_keys(range(40))
    with recorded(path) as cache:
        for _ in range(50):
            cache.match("a", keys, root=ROOT)
        cache.release("a")
        cache.match("next turn", [*keys, *path_keys([*range(40), 7, 8])[40:]], root=ROOT)
    assert path.stat().st_size < 3 * 40 * 64 + 52 * 400
    assert replay_events(path).same


@pytest.mark.parametrize("change", ["event", "said", "state", "refused"])
def test_the_first_difference_is_named(tmp_path: Path, change: str) -> None:
    path = tmp_path / "events"
    with recorded(path) as cache:
        for number in range(5):
            live(cache, f"{number}", 1, 2, number)
    documents = lines(path)
    at = next(i for i, one in enumerate(documents) if one.get("event", {}).get("is") == "Wanted")
    if change == "event":
        documents[at]["event"]["num_blocks"] = 2
    elif change == "said":
        documents[at]["said"] = "0" * 16
    elif change == "refused":
        documents[at].pop("said")
        documents[at]["refused"] = True
    else:
        documents[-1]["end"] = "0" * 64
    path.write_text("".join(json.dumps(one) + "\n" for one in documents))
    found = replay_events(path)
    assert not found.same
    assert found.difference is not None
    wanted = "after event" if change == "state" else f"event {at - 1}, a Wanted"
    assert found.difference.startswith(wanted)
    shown = CliRunner().invoke(app, ["replay", "--events", str(path)])
    assert shown.exit_code == 1
    assert "NOT the same" in shown.stdout


@pytest.mark.fault("D3")
def test_a_brain_that_failed_fails_at_the_same_event_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the fault is the brain's own; one that a test injected from outside is a difference, with its event."""
    path = tmp_path / "events"
    filled = Brain._filled

    def faulty(brain: Brain, event: ev.Filled) -> None:
        filled(brain, event)
        if type(brain) is Brain and event.request == "5":
            raise Injected("a fault of the brain's own")

    with monkeypatch.context() as patched:
        patched.setattr(Brain, "_filled", faulty)
        with recorded(path) as cache:
            for number in range(10):
                live(cache, f"{number}", 1, 2, number)
            assert cache.failed is not None
            assert cache.revive_brain()
            live(cache, "last", 1, 2)
        again = replay_events(path)
        assert (again.same, again.num_brains, again.num_failed) == (True, 3, 1)
        assert again.digest == cache.brain.digest()
    mended = replay_events(path)
    assert mended.difference is not None
    assert "a Filled: it failed (Injected: a fault of the brain's own" in mended.difference
    assert "takes it in now" in mended.difference


def test_hands_that_cannot_obey_are_no_difference(tmp_path: Path) -> None:
    """The brain heard the event and said what it said; what failed then is not in a recording."""

    class Refusing(NoExecutor):
        def submit(self, instructions: Sequence[ev.Instruction]) -> None:
            raise InvalidInput("not a job")

    path = tmp_path / "events"
    recorder = FileRecorder(path, limit_bytes=1 << 20)
    with TieredCache(Brain(CONFIG), Refusing(), clock=FakeClock(), recorder=recorder) as cache:
        live(cache, "a", 1, 2)
        assert cache.failed is not None
    assert recorder.close(WAIT_S)
    found = replay_events(path)
    assert (found.same, found.num_brains, found.cut) == (True, 2, None)


# --- bounded, and in nobody's way -------------------------------------------------------------------------------------


@pytest.mark.fault("D3")
def test_a_full_recording_says_that_it_is_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "events"
    with recorded(path, limit_bytes=MIN_RECORD_BYTES) as cache:
        for number in range(1000):
            live(cache, f"{number}", number)
    assert path.stat().st_size <= MIN_RECORD_BYTES
    found = replay_events(path)
    assert found.same
    assert found.cut == f"{MIN_RECORD_BYTES} bytes are full"
    assert cache.metrics.value("recorded_events_total", outcome="written") == found.num_events > 50
    assert cache.metrics.value("recorded_events_total", outcome="dropped") > 0
    assert len([record for record in caplog.records if "is cut" in record.getMessage()]) == 1
    shown = CliRunner().invoke(app, ["replay", "--events", str(path)])
    assert shown.exit_code == 0
    assert "the recording is cut" in shown.stdout


@pytest.mark.fault("D3")
def test_a_disk_that_hangs_costs_no_request_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, go_on, write = tmp_path / "events", threading.Event(), os.write

    def hang(fd: int, data: bytes) -> int:
        assert go_on.wait(WAIT_S)
        return write(fd, data)

    monkeypatch.setattr(recording, "_MOST_QUEUED", 100)
    monkeypatch.setattr(os, "write", hang)
    try:
        with recorded(path) as cache:
            for number in range(200):
                live(cache, f"{number}", number)
            dropped = cache.metrics.value("recorded_events_total", outcome="dropped")
            assert dropped >= 600, "and every request was answered"
            go_on.set()
    finally:
        go_on.set()
    found = replay_events(path)
    assert found.same
    assert found.cut == "100 events came faster than they were written"
    written = cache.metrics.value("recorded_events_total", outcome="written")
    assert written == found.num_events
    assert written + cache.metrics.value("recorded_events_total", outcome="dropped") >= 800


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, write, left = tmp_path / "events", os.write, [3000]

    def fill(fd: int, data: bytes) -> int:
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        num = write(fd, data[: left[0]])
        left[0] -= num
        return num

    monkeypatch.setattr(os, "write", fill)
    with recorded(path) as cache:
        for number in range(200):
            live(cache, f"{number}", number)
            while number == 5 and left[0] > 0 and cache._recorder._queue.qsize():  # type: ignore[union-attr]
                time.sleep(0.001)
    assert cache.failed is None
    assert [record for record in caplog.records if "No space left on device" in record.getMessage()]
    found = replay_events(path)
    assert found.same
    assert found.cut == "who wrote it ended in the middle of a line"


def test_who_was_killed_leaves_what_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "events"
    with recorded(path) as cache:
        for number in range(20):
            live(cache, f"{number}", number)
    data = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    for cut in (ends[-2], ends[-2] + 7, ends[10], ends[10] - 3):
        path.write_bytes(data[:cut])
        found = replay_events(path)
        assert found.same
        assert found.cut is not None


def test_the_last_recording_is_kept_once(tmp_path: Path) -> None:
    path = tmp_path / "events"
    for name in ("first", "second", "third"):
        with recorded(path) as cache:
            live(cache, name, 1)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["events", "events.1"]
    heard = [line.event for line in read(tmp_path / "events.1") if isinstance(line, Heard)]
    assert {getattr(event, "request", "second") for event in heard} == {"second"}


def test_where_nothing_can_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path / "no" / "such", tmp_path, tmp_path / "link"):
        with pytest.raises(InvalidConfig, match="nothing can be recorded"):
            FileRecorder(path, limit_bytes=1 << 20)
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(InvalidConfig, match="at least"):
        FileRecorder(tmp_path / "small", limit_bytes=100)
    with pytest.raises(InvalidConfig, match="record_bytes"):
        ServeConfig(model=tmp_path, record=tmp_path / "small", record_bytes=100)
    with pytest.raises(InvalidConfig, match="record_bytes"):
        read_config({"record": str(tmp_path / "small"), "record_bytes": 100})


# --- lines ------------------------------------------------------------------------------------------------------------

EVENTS = st.one_of(*(test_events.values_of(kind) for kind in test_events.KINDS if issubclass(kind, ev.Event)))


@given(st.lists(EVENTS, max_size=12), st.lists(st.integers(0, 3), max_size=20))
def test_every_event_survives_its_line(heard: list[ev.Event], steps: list[int]) -> None:
    """Also those whose keys are no chain: others' lists are only begun with where all of them are the same."""
    keys = [BlockKey(bytes([step]) * 32) for step in steps]
    for end in range(len(keys)):
        heard.append(ev.Filled(now_s=0.0, request="a", keys=tuple(keys[end // 2 : end])))
        heard.append(ev.Filled(now_s=0.0, request="a", keys=tuple(keys[:end])))
    out, back = recording._RecordingLines(), _Reader()
    for event in heard:
        for raw, wanted in (
            ((event, (), ""), Heard(event, encoding.fingerprint(()))),
            ((event, None, ""), Heard(event, refused=True)),
            ((event, None, "why"), Heard(event, failed="why")),
        ):
            document = json.loads(recording._packed(out.document(raw)))
            assert back.line(document) == wanted


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"{}\n",
        b"[]\n",
        b"nothing\n",
        b'{"recording": "another"}\n',
        b'{"recording": "headwater recording 2"}\n{"event": {}}\n',
        b'{"recording": "headwater recording 2"}\n{"event": {"is": "Left", "now_s": 0.0, "request": "a"}}\n',
        b'{"recording": "headwater recording 2"}\n{"brain": "Brain"}\n',
        b'{"recording": "headwater recording 2"}\n{"brain": "Brain", "config": {}, "withheld": [], "first_job": 1}\n',
        b'{"recording": "headwater recording 2"}\n' + b"[" * 100_000 + b"\n",
    ],
)
def test_what_is_no_recording_is_said(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "events"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=r"no recording|before there was a brain"):
        replay_events(path)
    shown = CliRunner().invoke(app, ["replay", "--events", str(path)])
    assert shown.exit_code == 1
    assert "Traceback" not in shown.stderr


def test_a_recording_of_another_version_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """Events had other names then: what it says would be taken for something else, or for a difference."""
    path = tmp_path / "events"
    first = {"recording": "headwater recording 1", "headwater": "0.0.9"}
    path.write_text(json.dumps(first) + '\n{"event": {"is": "Looked", "now_s": 0.0}}\n')
    shown = CliRunner().invoke(app, ["replay", "--events", str(path)])
    assert shown.exit_code == 1
    said = " ".join(shown.stderr.split())
    assert (
        "'headwater recording 1', written by Headwater 0.0.9, and this one reads 'headwater recording 2' only" in said
    )
    assert "Traceback" not in said
    assert said.count("recording 1") == 1


def test_fingerprints_tell_values_apart() -> None:
    probe = ev.Probe(job=1, store="host", keys=(BlockKey(b"a" * 32), BlockKey(b"b" * 32)), deadline_s=1.0)
    others: list[ev.Event | ev.Instruction] = [
        ev.Probe(job=2, store="host", keys=probe.keys, deadline_s=1.0),
        ev.Probe(job=1, store="host", keys=probe.keys[:1], deadline_s=1.0),
        ev.Probe(job=1, store="host", keys=probe.keys, deadline_s=1.0 + 1e-12),
        ev.Load(job=1, store="host", keys=probe.keys, deadline_s=1.0, slots=(1, 2)),
        ev.Cancel(job=1),
    ]
    found = {encoding.fingerprint([one]) for one in (probe, *others)}
    assert len(found) == 6
    assert encoding.fingerprint([probe]) == encoding.fingerprint(iter([probe]))
    assert encoding.fingerprint([probe, others[0]]) != encoding.fingerprint([others[0], probe])


# --- servers and connectors -------------------------------------------------------------------------------------------


def test_a_server_records_its_brain(tmp_path: Path, shm: Path) -> None:
    make_model("llama", tmp_path / "model")
    path = tmp_path / "events"
    config = ServeConfig(
        model=tmp_path / "model",
        num_blocks=64,
        host_directory=shm / "host",
        host_bytes=8 << 20,
        record=path,
    )
    over: list[threading.Event] = []
    with open_engine(config) as running:
        for number in range(12):
            ended = threading.Event()
            over.append(ended)

            def listen(output: Output, ended: threading.Event = ended) -> None:
                if output.finish is not None:
                    ended.set()

            sampling = Sampling(max_tokens=8, temperature=0, ignore_eos=True)
            prompt = [number % 3 + 1] * 40 + [number] * 30
            running.engine.submit(Request(name=f"{number}", prompt=prompt, sampling=sampling, listen=listen))
        assert all(one.wait(WAIT_S) for one in over)
        assert running.cache.drain(WAIT_S)
    found = replay_events(path)
    assert (found.same, found.cut, found.num_brains) == (True, None, 1)
    assert found.num_events > 50
    kinds = {type(line.event).__name__ for line in read(path) if isinstance(line, Heard)}
    assert {"Arrived", "Wanted", "Filled", "Left", "JobDone", "Copied", "Paced"} <= kinds


@pytest.mark.parametrize("fails", [False, True])
def test_a_connector_records_its_brain(tmp_path: Path, fails: bool) -> None:
    path = tmp_path / "events"
    with engine_of(tmp_path / "disk", record=str(path)) as engine:
        engine.add(*(FakeRequest(f"{i}", prompt, 3) for i, prompt in enumerate(prompts(1, 10))))
        run(engine)
        if fails:
            fail_at(engine.scheduler.cache.brain, 0)
        engine.add(*(FakeRequest(f"again {i}", prompt, 3) for i, prompt in enumerate(prompts(1, 4))))
        run(engine, may_fail=fails)
    (written,) = tmp_path.glob("events.*")
    assert written.name == f"events.{os.getpid()}"
    found = replay_events(written)
    began = [line.kind for line in read(written) if isinstance(line, Began)]
    assert began == ["LentBrain", *(["LentMissBrain"] if fails else [])]
    assert found.same is not fails, "nobody injects it when it is replayed"
