"""`verify --vllm` without a vLLM: what counts as a problem, faulty stores, what it says of trouble, the kill tally.

The engines here are made up: they answer as they are told. The judging, the report and the stores are the real ones.
"""

import json
import mmap
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headwater.cli import app
from headwater.core.errors import InvalidConfig
from headwater.core.events import Event, Instruction, JobDone, Save
from headwater.core.keys import BlockKey
from headwater.core.results import Status
from headwater.lab.bench.vllm_client import WorkerFailed
from headwater.lab.campaigns.vllm_kills import KillReport, SaveTally
from headwater.lab.verify import vllm as verify_vllm
from headwater.lab.verify.vllm_cases import BOTH, FIRST, KILLED, LATER
from headwater.lab.verify.vllm_faults import VllmFault, VllmFaultyStore
from headwater.lab.verify.vllm_scene import KINDS, ModelKind, Places, VllmCase, VllmScene, kinds_of
from headwater.storage.base import Deadline
from headwater.storage.memory import MemoryStore
from headwater.testing.pages import items, sample_chain

RIGHT = list(range(100, 124))
ROOT = BlockKey(bytes(32))
LOADED = 'headwater jobs_total{tier="host",job="load",outcome="done"}'


class Fake:
    """A worker whose engine answers by the book, but for one thing."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        self.opened: dict[str, Any] = {}
        self.asked: list[list[int]] = []
        self.known: list[list[int]] = []
        self.flipped = False
        self.killed = False

    def kill(self) -> None:
        """It is gone."""
        self.killed = True

    def ask(self, do: str, *, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Answer a command."""
        return dict(getattr(self, f"_{do}")(**arguments))

    def _open(self, setup: dict[str, Any], fault: str | None, num_good: int) -> dict[str, Any]:
        self.opened = {**setup, "fault": fault, "num_good": num_good}
        self.flipped = False
        self.local: list[list[int]] = []
        return {"prefix_caching": True, "chunked_prefill": True}

    def _settle(self) -> dict[str, bool]:
        self.local = []
        return {"settled": "restless" not in self.wrong, "reset": True}

    def _flip(self, directory: str) -> dict[str, int]:
        assert directory == self.opened["transfer"]["kv_connector_extra_config"]["host_directory"]
        self.flipped = True
        return {"num_pages": 8}

    def _stats(self) -> dict[str, bool]:
        return {"up": True}

    def _ask(self, prompts: list[list[int]], max_tokens: int, give_up_s: float) -> dict[str, Any]:
        extra = self.opened.get("transfer", {}).get("kv_connector_extra_config")
        size = self.opened["engine"]["block_size"]
        fault = self.opened["fault"]
        counted: dict[str, float] = {}
        cached, tokens = [], []
        for prompt in prompts:
            device, stored = (_shared(prompt, kept, size) for kept in (self.local, self.known))
            source = "disk" if extra and not extra["host_directory"] else "host"
            source = "disk" if extra and extra.get("host_bytes") == 8 << 20 else source
            source = "host" if self.wrong == "elsewhere" else source
            source = "p2p" if extra and extra.get("pool") and not extra["host_directory"] else source
            hit = stored if extra else 0
            if device:
                source, hit = "device", device
            if hit:
                counted[f"source {source}"] = counted.get(f"source {source}", 0) + hit
            cached.append(hit)
            answer = [*RIGHT, *range(max_tokens - len(RIGHT))]
            if self.wrong == "tokens" and extra and hit:
                answer[-1] += 1
            if fault == "spoil" and hit and self.wrong != "deaf":
                answer[0] += 1
            tokens.append(answer)
        if fault in ("fail", "hang", "damage"):
            counted["external_prefix_cache_hits"] = cached[0]
            if self.wrong != "healthy":
                counted['headwater miss_tokens_total{reason="failed"}'] = cached[0] - size * self.opened["num_good"]
        if self.flipped:
            counted["external_prefix_cache_hits"] = cached[0]
            counted['headwater miss_tokens_total{reason="bad"}'] = 0 if self.wrong == "blind" else cached[0]
        if "num_gpu_blocks_override" in self.opened["engine"] and self.opened["engine"]["num_gpu_blocks_override"] < 20:
            counted |= {} if self.wrong == "roomy" else {"num_preemptions": 1, LOADED: 1}
        self.local += prompts
        self.known += prompts if extra else []
        return {
            "over": self.wrong != "endless" or fault is None or fault == "spoil",
            "seconds": 0.5,
            "tokens": tokens,
            "cached_tokens": [0 for _ in cached] if self.wrong == "uncached" else cached,
            "steps_to_first": 1 if self.wrong == "whole" else 9,
            "counted": counted,
        }


def _shared(prompt: list[int], kept: list[list[int]], size: int) -> int:
    def common(other: list[int]) -> int:
        least = min(len(prompt), len(other))
        num = next((at for at in range(least) if prompt[at] != other[at]), least)
        return min(num, len(prompt) - 1) // size * size

    return max(map(common, kept), default=0)


def _play(wrong: str = "", *, inject: bool = False, kind: ModelKind = KINDS["gqa"]) -> dict[str, VllmCase]:
    fake, first = Fake(wrong), Fake()
    first.known = fake.known = []
    places = Places(host=Path("host"), disk=Path("disk"), pool="redis://x")
    scene = VllmScene(fake, kind, places, Path("model"), {}, inject=inject)  # type: ignore[arg-type]
    other = VllmScene(first, kind, places, Path("model"), scene.right, inject=inject)  # type: ignore[arg-type]
    found = {}
    for name, check in {**FIRST, **BOTH, **KILLED, **LATER}.items():
        try:
            found[name] = check(replace(scene, other=other) if name in (*BOTH, *KILLED) else scene)
        except WorkerFailed as error:
            found[name] = VllmCase(model="gqa", case=name, problem=str(error))
    assert first.killed
    return found


def test_all_is_well_where_everything_is_as_it_should_be() -> None:
    cases = _play()
    assert {name: case.problem for name, case in cases.items() if case.problem} == {}
    assert cases["host"].hits == {"host": 256}
    assert cases["disk"].hits == {"disk": 256}
    assert cases["pool from another process"].hits == {"p2p": 256}
    assert cases["crowd"].hits == {"host": 16 * 128}
    assert cases["host full, disk behind it"].hits == {"disk": 256}
    assert cases["two engines, one slab"].hits == {"host": 256}


def test_rounding_is_compared_with_every_number_of_blocks_in_vllm_s_own_cache() -> None:
    kind = kinds_of("cuda")["gqa-bf16"]
    assert kind.rounds
    cases = _play(kind=kind)
    alone = ("cold", "host", "disk", "flipped bits in the slab", "two engines, one slab", "killed while it saves")
    assert [name for name in alone if cases[name].problem] == []
    assert _play("tokens", kind=kind)["host"].problem == "other tokens"


def test_a_model_that_vllm_cannot_open_is_one_problem() -> None:
    class Closed(Fake):
        def _open(self, setup: dict[str, Any], fault: str | None, num_good: int) -> dict[str, Any]:
            raise WorkerFailed("no room for the KV cache")

    places = Places(host=Path("host"), disk=Path("disk"), pool="redis://x")
    scene = VllmScene(Closed(), KINDS["gqa"], places, Path("model"), {})  # type: ignore[arg-type]
    report = verify_vllm.VllmReport(inject=False)
    for cases in (FIRST, BOTH, LATER):
        assert len(list(verify_vllm._play(scene, cases, None, report, None))) == (cases is FIRST)
    assert [(case.case, case.problem) for case in report.cases] == [("cold", "no room for the KV cache")]
    assert not report.ok


def test_another_device_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="cpu or cuda"):
        kinds_of("tpu")
    with pytest.raises(InvalidConfig, match="no model moe on cuda; there are: gqa, gqa-bf16, gqa-fp8, mla"):
        verify_vllm.run(python="nowhere", device="cuda", kinds=("moe",))


@pytest.mark.parametrize(
    ("wrong", "seen"),
    [
        ("tokens", {"crowd", "two engines, one slab", "killed while it saves"}),
        ("tokens", {"host", "disk", "batch of 8", "sync load", "chunked prefill", "restarted process"}),
        ("uncached", {"local hit", "host", "disk", "batch of 8", "chunked prefill", "restarted process", "control"}),
        ("deaf", {"control"}),
        ("elsewhere", {"disk", "host full, disk behind it"}),
        ("blind", {"flipped bits in the slab"}),
        ("healthy", {"load fails half-way, sync", "load hangs half-way, async", "damaged pages, async"}),
        ("endless", {"load fails half-way, sync", "load fails half-way, async", "load hangs half-way, async"}),
        ("roomy", {"preemption"}),
        ("whole", {"chunked prefill"}),
        ("restless", {"cold", "host", "batch of 8"}),
    ],
)
def test_what_is_wrong_is_seen_in_the_cases_that_it_touches(wrong: str, seen: set[str]) -> None:
    bad = {name for name, case in _play(wrong).items() if case.problem}
    assert seen <= bad
    if wrong in ("deaf", "blind", "elsewhere", "roomy", "whole"):
        assert bad == seen


def test_injected_damage_makes_the_whole_fail() -> None:
    cases = _play(inject=True)
    bad = {name for name, case in cases.items() if case.problem}
    assert {"host", "disk", "batch of 8", "restarted process", "pool from another process"} <= bad
    assert "control" not in bad, "that has to differ"


def test_a_report_without_a_case_is_not_ok() -> None:
    skipped = VllmCase(model="mla", case="local hit", skipped="vLLM cannot")
    right, wrong = VllmCase(model="mla", case="host"), VllmCase(model="mla", case="disk", problem="other tokens")
    for cases, ok in (([], False), ([skipped], False), ([skipped, right], True), ([skipped, right, wrong], False)):
        report = verify_vllm.VllmReport(inject=False, cases=cases)
        assert report.document()["ok"] is ok
        assert [case["equal"] for case in report.document()["cases"]] == [case is not wrong for case in cases]


def test_an_interpreter_without_vllm_is_one_line() -> None:
    done = CliRunner().invoke(app, ["verify", "--vllm", "--python", sys.executable, "--json"])
    assert done.exit_code == 1
    assert "has no vLLM" in done.output or "has no vLLM" in str(done.exception)


@pytest.mark.parametrize(
    ("fault", "says"),
    [(VllmFault.FAIL, [Status.HIT] * 2 + [Status.FAILED] * 4), (VllmFault.DAMAGE, [Status.HIT] * 6)],
)
def test_a_faulty_store_gives_the_first_pages_as_they_are(fault: VllmFault, says: list[Status]) -> None:
    store = VllmFaultyStore(MemoryStore(limit_bytes=64 << 20), fault, num_good=2)
    pages = items(sample_chain(1, 6))
    assert set(store.put(pages, deadline=Deadline.after(10))) == {Status.STORED}
    got = [(name, memoryview(bytearray(len(frame)))) for name, frame in pages]
    assert store.get_into(got, deadline=Deadline.after(10)) == says
    same = [bytes(mine) == bytes(frame) for (_, mine), (_, frame) in zip(got, pages, strict=True)]
    assert same == [True, True, False, False, False, False]
    again = [(name, memoryview(bytearray(len(frame)))) for name, frame in pages[:1]]
    said = store.get_into(again, deadline=Deadline.after(10))
    assert said == [Status.FAILED] or bytes(again[0][1]) != bytes(pages[0][1]), "only the first ones are good"


def test_a_hanging_store_answers_when_it_is_let_go() -> None:
    store = VllmFaultyStore(MemoryStore(limit_bytes=64 << 20), VllmFault.HANG, num_good=0)
    pages = items(sample_chain(1, 2))
    store.let_go()
    assert store.get_into(pages, deadline=Deadline.after(1)) == [Status.FAILED] * 2


class Listening:
    """An executor that only listens."""

    def __init__(self) -> None:
        self.deliver: Any = None
        self.heard: list[Instruction] = []

    def submit(self, instructions: list[Instruction]) -> None:
        """Take them down."""
        self.heard += instructions


def test_the_tally_counts_saves_that_have_not_ended() -> None:
    class Side:
        def __init__(self) -> None:
            self._executor = Listening()
            self.told: list[Event] = []
            self._executor.deliver = self.told.append

    side, shared = Side(), mmap.mmap(-1, mmap.PAGESIZE)
    executor = side._executor
    tally = SaveTally(side, shared)

    def storing() -> int:
        return int(struct.unpack("<q", shared[:8])[0])

    saves = [
        Save(job=at, store="disk", keys=(), deadline_s=1.0, slots=(), parent=ROOT, depth=0, tenant=b"")
        for at in range(3)
    ]
    tally.submit(saves)
    assert storing() == 3
    assert executor.heard == saves
    over: Event = JobDone(now_s=0.0, job=1, results=())
    executor.deliver(over)
    assert storing() == 2
    assert side.told == [over]
    shared.close()


def test_a_campaign_is_ok_only_with_kills_and_hits_and_nothing_wrong() -> None:
    good = KillReport(2, kills=2, kills_while_storing=2, hit_tokens=5)
    assert good.ok
    for name in ("wrong_answers", "lives_without_hit", "over_limit", "bad_pages", "reserved_at_end"):
        bad = KillReport(2, kills=2, kills_while_storing=2, hit_tokens=5)
        setattr(bad, name, 1)
        assert not bad.ok
    assert not KillReport(2, kills=2, kills_while_storing=1, hit_tokens=5).ok
    assert not KillReport(2, kills=2, kills_while_storing=2).ok
    json.dumps(vars(good))
