"""Thousands of mixed requests under vLLM, in too little memory: all answers are those of vLLM alone, nothing is kept.

    python -m headwater.lab.campaigns.vllm_mixed --requests 10000 --device cuda --json [--python PATH]

Prompts of mixed lengths share prefixes or are asked again; some are alone, some come in crowds; some are aborted. The
device has so few blocks that requests are preempted, the host tier so few pages that they leave for the disk. Between
rounds everything comes to rest, and is counted: blocks that vLLM has not got back, memory of the device and of all
processes.

The same requests go to a vLLM without a connector, beside it. Where ours differs, vLLM alone is asked again, with every
number of blocks in its own cache and in changing company: rounding depends on who is computed beside whom. An answer
that it never gives is wrong.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from headwater.engine.make_model import make_model
from headwater.lab.bench import vllm_worker
from headwater.lab.bench.vllm_client import EngineProcess, engine_settings, worker_command
from headwater.lab.campaigns.vllm_crowd import WIDTHS, Crowded, MixedRequest, requests_of
from headwater.lab.verify.vllm_scene import ModelKind, Places, VllmScene, kinds_of
from headwater.storage.scratch import disk_root, memory_root

_MODULE: Final = "headwater.lab.campaigns.vllm_mixed"
_ROUNDS: Final = 10
_UP_S: Final = 600.0
_LONG_S: Final = 3600.0
_BLOCKS: Final = 40  # of the device
_HOST_BYTES, _DISK_BYTES = 8 << 20, 64 << 20
_MOST_ASKED_AGAIN: Final = 40
_TRIES: Final = 12
# By which memory may grow beyond what it does without us before it is called a leak. VLLM's own process is not steady.
_SLACK_BYTES: Final = {"device_bytes": 4 << 20, "host_bytes": 64 << 20, "executor_bytes": 8 << 20}
_EVICTED: Final = "headwater local_evicted_pages_total"


@dataclass
class MixedReport:
    """What the campaign saw. `ok` is the verdict."""

    device: str
    requests: int
    seed: int
    asked: int = 0
    compared: int = 0
    unequal: int = 0
    given_by_vllm_too: int = 0  # other answers that vLLM alone gives, too, when it is asked again
    aborted: int = 0
    hung: int = 0
    preemptions: int = 0
    evicted_pages: int = 0
    brain_failures: int = 0
    hit_tokens: dict[str, int] = field(default_factory=dict)
    rests: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # without us, and with us
    leaks: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether everything was tried, and nothing was wrong, hung or kept."""
        tried = self.preemptions and self.aborted and self.evicted_pages and self.hit_tokens.get("host", 0)
        return (
            bool(tried)
            and self.asked == self.requests
            and not (self.unequal or self.hung or self.leaks or self.brain_failures)
        )


class MixedCampaign:
    """Two engines, which are asked the same at once."""

    def __init__(self, root: Path, memory: Path, report: MixedReport, *, python: str) -> None:
        self._root = root
        self._report = report
        self._python = python
        self._kind: ModelKind = kinds_of(report.device)["gqa"]
        self._places = Places(host=memory / "host", disk=root / "disk", pool="")
        make_model(self._kind.family, root / "model", overrides=self._kind.overrides)

    def run(self, seconds: float, tell: Callable[[str], None]) -> None:
        """Ask vLLM alone, and with us; begin no more rounds after so many seconds. Blocks for minutes."""
        report = self._report
        until_s = time.monotonic() + seconds
        size = -(-report.requests // _ROUNDS)
        unlike: list[tuple[int, list[int]]] = []
        with _Open(self, ()) as alone, _Open(self, ("host", "disk")) as ours, ThreadPoolExecutor(2) as both:
            for worker in (alone, ours):
                worker.ask("begin", timeout_s=_UP_S, seed=report.seed, number=report.requests)
            for start in range(0, report.requests, size):
                if time.monotonic() > until_s:
                    break
                what = {"start": start, "end": min(start + size, report.requests)}
                asking = [both.submit(worker.ask, "play", timeout_s=_LONG_S, **what) for worker in (alone, ours)]
                right, said = (one.result() for one in asking)
                unlike += self._compare(start, right, said)
                tell(f"{what['end']} of {report.requests} requests, {len(unlike)} to be asked again")
            if unlike:
                self._ask_again(alone, unlike)
        if report.rests:
            report.leaks = [*_leaks(report.rests["ours"], report.rests["none"])]

    def _compare(
        self, start: int, right: Mapping[str, Any], said: Mapping[str, Any]
    ) -> Iterator[tuple[int, list[int]]]:
        """Take a round in; yields answers of ours that are not vLLM's."""
        report, counted = self._report, said["counted"]
        report.asked += len(said["answers"])
        report.aborted, report.hung = said["num_aborted"], said["num_hung"]
        report.preemptions = int(counted.get("num_preemptions", 0))
        report.brain_failures = int(counted.get("headwater brain_failures_total", 0))
        report.evicted_pages = int(sum(value for name, value in counted.items() if name.startswith(_EVICTED)))
        report.hit_tokens = {
            name.removeprefix("source "): int(value) for name, value in counted.items() if name.startswith("source ")
        }
        for name, one in (("none", right), ("ours", said)):
            report.rests.setdefault(name, []).append(one["rest"])
            report.seconds[name] = report.seconds.get(name, 0.0) + one["seconds"]
        for at, (wanted, answer) in enumerate(zip(right["answers"], said["answers"], strict=True), start):
            if wanted is None or answer is None:
                continue  # aborted
            report.compared += 1
            if answer != wanted:
                yield at, answer

    def _ask_again(self, alone: EngineProcess, unlike: Sequence[tuple[int, list[int]]]) -> None:
        """Whether vLLM alone ever gives these answers."""
        report = self._report
        asked = requests_of(report.seed, report.requests, self._kind.block_tokens)
        report.unequal = max(0, len(unlike) - _MOST_ASKED_AGAIN)
        for at, answer in unlike[:_MOST_ASKED_AGAIN]:
            given = answer in self._ways(alone, asked[at], asked)
            report.given_by_vllm_too += given
            report.unequal += not given

    def _ways(self, alone: EngineProcess, one: MixedRequest, asked: Sequence[MixedRequest]) -> Iterator[list[int]]:
        """What vLLM alone answers, with so many blocks in its own cache, and in so much company."""
        chance, size = random.Random(self._report.seed), self._kind.block_tokens
        for num_blocks in range((len(one.prompt) - 1) // size + 1):
            for company in range(_TRIES):
                if num_blocks:
                    self._ask(alone, [one.prompt[: num_blocks * size + 1]], 1)
                others = [chance.choice(asked).prompt for _ in range(4 * company)]
                yield self._ask(alone, [one.prompt, *others], one.num_answer)[0]
                alone.ask("settle", timeout_s=_UP_S)

    @staticmethod
    def _ask(worker: EngineProcess, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        said = worker.ask("ask", timeout_s=_UP_S, prompts=prompts, max_tokens=max_tokens, give_up_s=_UP_S)
        tokens: list[list[int]] = said["tokens"]
        return tokens


class _Open:
    """A worker with an engine."""

    def __init__(self, campaign: MixedCampaign, tiers: tuple[str, ...]) -> None:
        settings = engine_settings(campaign._report.device) | {"TRITON_F32_DEFAULT": "ieee"}  # or it has ten bits
        command = worker_command(campaign._python, (), {}, module=_MODULE)
        self._worker = EngineProcess("vLLM", command, settings=settings, log=campaign._root / f"vllm-{len(tiers)}.log")
        self._scene = VllmScene(
            self._worker,
            campaign._kind,
            campaign._places,
            campaign._root / "model",
            {},
            host_bytes=_HOST_BYTES,
            disk_bytes=_DISK_BYTES,
        )
        self._tiers = tiers

    def __enter__(self) -> EngineProcess:
        self._worker.wait_up(_UP_S)
        self._scene.open(*self._tiers, options={"num_gpu_blocks_override": _BLOCKS, "max_num_seqs": max(WIDTHS)})
        return self._worker

    def __exit__(self, *error: object) -> None:
        self._worker.close()


def _leaks(rests: Sequence[Mapping[str, Any]], alone: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """What was kept, in words. Memory may grow as it does without us, from the first rest on: all was used once."""
    for number, rest in enumerate(rests):
        if not (rest["settled"] and rest["emptied"]):
            yield f"round {number}: it did not come to rest"
        for what in ("blocks_held", "requests_kept"):
            if rest[what]:
                yield f"round {number}: {what} {rest[what]}"
    for what, slack in _SLACK_BYTES.items():
        if what in rests[0]:
            grown, usual = (max(0, last.get(what, 0) - first.get(what, 0)) for first, last in _ends(rests, alone))
            if grown > usual + slack:
                yield f"{what} grew by {grown}, without us by {usual}"


def _ends(*several: Sequence[Mapping[str, Any]]) -> Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    return ((rests[0], rests[-1]) for rests in several)


def main() -> None:
    """Serve the pipes that the campaign holds."""
    vllm_worker.main(Crowded)


def command() -> None:
    """The command above."""
    parser = argparse.ArgumentParser(description="thousands of mixed requests under vLLM")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=_LONG_S, help="begin no round after so many")
    parser.add_argument("--python", default=sys.executable, help="an interpreter that has vLLM")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report = MixedReport(options.device, options.requests, options.seed)

    def tell(what: str) -> None:
        sys.stderr.write(f"{what}\n")

    with (
        tempfile.TemporaryDirectory(prefix="headwater-mixed-", dir=disk_root()) as root,
        tempfile.TemporaryDirectory(prefix="headwater-mixed-", dir=memory_root(2 * _HOST_BYTES)) as memory,
    ):
        try:
            MixedCampaign(Path(root), Path(memory), report, python=options.python).run(options.seconds, tell)
        except BaseException:
            for log in sorted(Path(root).glob("vllm-*.log")):
                tell(log.read_text(errors="replace")[-3000:])
            raise
    found = {"command": "vllm_mixed", "ok": report.ok, **asdict(report)}
    text = json.dumps(found, indent=2) if options.json else "\n".join(f"{key}: {found[key]}" for key in found)
    sys.stdout.write(text + "\n")
    sys.exit(0 if report.ok else 1)


if __name__ == "__main__":
    command()
