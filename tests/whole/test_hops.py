"""docs/HOPS.md is what a run passes, function by function: no layer comes or goes without being seen there."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headwater.engine.connector import Connector
from headwater.engine.models.base import Model
from headwater.transfer.device.copy_queue import CopyQueue
from headwater.transfer.executor.watchdog import Watchdog
from hops_kit import traced
from router_kit import world
from serve_kit import directory, model, serving

__all__ = ["directory", "model"]

PAGE = Path(__file__).parents[2] / "docs" / "HOPS.md"
PROMPT = list(range(5, 25))  # a block, and some

OUT = (
    "RadixIndex.extend",
    "Saver.commit > Jobs.begin",
    "TieredCache.commit > StoreQueue.push",
    "StoreQueue.take",
    "MappedStore.reserve",
    "CopyQueue.submit",
    "TorchWire.launch",
    "TorchWire.finish",
    "Transfer._collect",
    "write_headers",
    "MappedStore.publish",
)
IN = (
    "Scheduler._admit > Jobs.begin",
    "Scheduler._admit > StoreQueue.push",
    "StoreQueue.take",
    "MappedStore.borrow",
    "CopyQueue.submit",
    "TorchWire.launch",
    "TorchWire.finish",
    "Transfer._collect",
    "VerifiedStore.settle",
    "Ledger.done",
    "Ledger.flush > Brain._end",
)
SERVE = (
    "Connection.data_received",
    "Service.arriving",
    "Bodies._read",
    "_ReaderThreads.read",
    "read_asked",
    "encode",
    "Answer.add",
    "Engine.submit",
    "Scheduler.add",
    "Connector.ask",
    "Connector.admit",
    "Engine._step > Decoder.forward",
    "choose",
    "Answer._listen",
    "Connector.commit",
    "Answer._put",
    "Transcript.push",
    "WholeAnswer.add",
    "WholeAnswer.body",
    "Guard.__call__.<locals>.sending",
)
ROUTER = (
    "Connection.data_received",
    "Bodies._read",
    "_ReaderThreads.read",
    "routable",
    "Routed._route",
    "Looker.look",
    "Router._take > NodeTable.facts",
    "choose_entry",
    "_order",
    "NodeTable.take_slot",
    "Asker._attempting",
    "SignedBy.auth_flow > Signer.sign",
    "SignedBy.auth_flow > Signer.check",
    "RelayedAnswer.body",
    "RoutedRequest.told",
    "Router._take > NodeTable.facts",
    "choose_decode",
    "_order",
    "NodeTable.take_slot",
    "Asker._attempting",
    "SignedBy.auth_flow > Signer.sign",
    "SignedBy.auth_flow > Signer.check",
    "RelayedAnswer.body",
    "WholeNodeAnswer.read",
    "with_usage",
    "Client.whole",
    "Guard.__call__.<locals>.sending",
)


def documented(chain: str) -> list[str]:
    """The numbered lines below a heading."""
    part = PAGE.read_text().split(f"\n## {chain}\n")[1].split("\n## ")[0]
    found = re.findall(r"^(\d+)\. (.*)$", part, re.MULTILINE)
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    return [line for _, line in found]


def check(chain: str, passed: Sequence[str]) -> None:
    listed = "\n".join(f"{number}. {line}" for number, line in enumerate(passed, 1))
    assert documented(chain) == list(passed), f"{chain}, as it is:\n{listed}"
    row = re.search(rf"^\| \[{chain.lower()}\].*\| (\d+) \|$", PAGE.read_text(), re.MULTILINE)
    assert row is not None
    assert int(row[1]) == len(passed)


def test_a_block_out_and_in(directory: Path, model: Model, shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connector, "measured", lambda *_: None)  # however fast it computes, it loads
    monkeypatch.setattr(CopyQueue, "_wake_thread", lambda *_: None)  # who waits drives, and not the thread
    monkeypatch.setattr(Watchdog, "_keep_watch", lambda *_: None)  # nor does it tell what became of a job
    tier: dict[str, Any] = {"host_directory": shm / "host", "host_bytes": 64 << 20}
    with traced(OUT) as trace, serving(directory, model, **tier) as served:
        trace.forget()
        served.complete(PROMPT, max_tokens=1)
        served.until(lambda: trace.passed("MappedStore.publish"))
    check("A block out", trace.way(OUT, first="Engine._run"))
    with traced(IN) as trace, serving(directory, model, **tier) as served:
        trace.forget()
        served.complete(PROMPT, max_tokens=1)
    check("A block in", trace.way(IN, first="Scheduler._admit"))


def test_a_request_through_serve(directory: Path, model: Model) -> None:
    with traced(SERVE) as trace, serving(directory, model) as served:
        trace.forget()
        served.complete("A prompt that is short.", max_tokens=1)
    check("A request through serve", trace.way(SERVE))


def test_a_request_through_the_router() -> None:
    with traced(ROUTER) as trace, world() as router:
        router.add("p", "prefill")
        router.add("d", "decode")
        trace.forget()
        assert router.complete().status_code == 200
    check("A request through the router", trace.way(ROUTER))
