"""The processes of a fault campaign (`chaos.py`): a router and nodes, which die, are started again and are found again.

They are forked by one process that has loaded everything (`chaos_node.py`), and run the commands that users run. Who
dies without having been told to is written down. Orders (`chaos_store.py`) go to a node by a file in the directory.

For one thread. Every wait is bounded, and raises TimeoutError that says what did not come.
"""

import http.client
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.parse import urlsplit

from headwater.core.node_key import NodeKey
from headwater.disagg.key_file import write_node_key
from headwater.lab.chaos.chaos_load import BLOCK_TOKENS
from headwater.lab.chaos.chaos_stage import LOOK_S, START_S, ForkServer

LEASE_S: Final = 1.5
_ASK_S: Final = 5.0
_NUM_BLOCKS: Final = 256


@dataclass(slots=True)
class FleetProcess:
    """A router or a node, as it runs now."""

    name: str
    pid: int
    log_at: int  # bytes of its log that others of its name wrote
    alive: bool = True
    doomed: bool = False  # its death is wanted
    url: str = ""
    code: int | None = None  # that it ended with


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSetup:
    """What to start."""

    directory: Path
    model: Path
    pool: str
    prefill: int = 2
    decode: int = 2
    seed: int = 0
    inject: str = ""
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # more of them, by node

    @property
    def nodes(self) -> list[str]:
        """Their names, by role and number."""
        return [f"prefill-{i}" for i in range(self.prefill)] + [f"decode-{i}" for i in range(self.decode)]


class ChaosFleet:
    """A router and its nodes. As a context: none of them is left at its end."""

    def __init__(self, setup: FleetSetup, stage: ForkServer) -> None:
        """Starts nobody yet."""
        self.setup = setup
        self.processes: dict[str, FleetProcess] = {}
        self.kills: list[tuple[str, float]] = []
        self.died: list[str] = []
        self._stage = stage
        key_file = setup.directory / "node.key"
        if not key_file.exists():
            write_node_key(key_file, NodeKey.random())
        self._key = ("--node-key-file", str(key_file))
        self._by_pid: dict[int, FleetProcess] = {}
        self._num_orders = 0
        self._num_starts = 0

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        """End all."""
        for process in list(self._by_pid.values()):
            self.kill(process.name)
        self.wait(lambda: not self._by_pid, "somebody cannot be killed", START_S)

    @property
    def url(self) -> str:
        """The router's."""
        return self.processes["router"].url

    # --- coming -------------------------------------------------------------------------------------------------------

    def run(self, name: str, arguments: Iterable[str]) -> FleetProcess:
        """Fork one. It is there when this returns, and answers later."""
        log = self._log(name)
        size = log.stat().st_size if log.exists() else 0
        self._num_starts += 1
        pid = self._stage.fork(
            {
                "directory": str(self.setup.directory),
                "name": name,
                "arguments": list(arguments),
                "seed": self.setup.seed * 1000 + self._num_starts,
                "inject": self.setup.inject,
            }
        )
        process = self.processes[name] = self._by_pid[pid] = FleetProcess(name, pid, size)
        return process

    def start_router(self) -> None:
        """And wait until it answers."""
        options = ["--port", "0", "--queue-timeout", "10", "--silence", "3", "--timeout", "60", *self._key]
        self.run("router", ["router", "--host", "127.0.0.1", *options])
        self.until_there("router")

    def start(self, name: str) -> None:
        """Start a node, or start it again. `until_found` waits for it."""
        role = name.partition("-")[0]
        self.take_back(name)
        arguments = [
            *("serve", "--model", str(self.setup.model), "--name", "model", "--host", "127.0.0.1", "--port", "0"),
            *("--role", role, "--node", name, "--router", self.url, "--lease", str(LEASE_S)),
            *("--host-mib", "0", "--disk-mib", "0", "--pool", self.setup.pool),
            *("--num-blocks", str(_NUM_BLOCKS), "--block-tokens", str(BLOCK_TOKENS), "--pd-timeout", "5"),
            *self._key,
            *self.setup.options.get(name, ()),
        ]
        self.run(name, arguments)

    def start_single(self) -> None:
        """One engine that does everything itself, and caches nothing. Waits until it answers."""
        options = ["--num-blocks", str(_NUM_BLOCKS), "--block-tokens", str(BLOCK_TOKENS), "--no-cache"]
        place = ["--name", "model", "--host", "127.0.0.1", "--port", "0"]
        self.run("single", ["serve", "--model", str(self.setup.model), *place, *options])
        self.until_there("single")

    def until_there(self, name: str) -> None:
        """Until it has said where it answers."""
        process = self.processes[name]
        self.wait(lambda: bool(self._address(process)) or not process.alive, f"{name} does not answer", START_S)
        if not process.alive:
            raise TimeoutError(f"{name} ended: {self.last_words(name)}")

    def found(self, name: str) -> bool:
        """Whether the router knows this very process."""
        process = self.processes[name]
        known = {one["node"]: one["url"] for one in self.state()["nodes"]}
        return process.alive and bool(self._address(process)) and known.get(name) == process.url

    def _address(self, process: FleetProcess) -> str:
        """Where it answers, if it has said so."""
        place = self._log(process.name)
        if not process.url and place.exists():
            with place.open("rb") as log:
                log.seek(process.log_at)
                said = re.search(r"(?:answers|node) on (http://[^/\s]+)", log.read().decode(errors="replace"))
            process.url = said[1] if said is not None else ""
        return process.url

    def until_found(self, names: Iterable[str]) -> None:
        """Until the router knows them all; who died meanwhile is started again."""
        for name in names:
            self.wait(lambda name=name: self._up(name), f"{name} is not found again", START_S, every_s=0.02)  # type: ignore[misc]

    def _up(self, name: str) -> bool:
        self.poll()
        if not self.processes[name].alive:
            self.start(name)
        return self.found(name)

    # --- going --------------------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """At once."""
        process = self.processes[name]
        process.doomed = True
        if process.alive:
            os.kill(process.pid, signal.SIGKILL)

    def until_dead(self, name: str, seconds: float) -> bool:
        """Whether it died, by then."""
        process = self.processes[name]
        try:
            self.wait(lambda: not process.alive, "", seconds)
        except TimeoutError:
            return False
        return True

    def poll(self) -> None:
        """Hear who went."""
        self._stage.poll()
        for pid in self._by_pid.keys() & self._stage.ended.keys():
            process, code = self._by_pid.pop(pid), self._stage.ended.pop(pid)
            process.alive, process.code = False, code
            if process.doomed:
                self.kills.append((process.name, time.monotonic()))
            else:
                self.died.append(f"{process.name} ended with {code}: {self.last_words(process.name)}")

    def wait(self, holds: Callable[[], bool], problem: str, seconds: float, *, every_s: float = LOOK_S) -> None:
        """Until it holds. Raises TimeoutError with the problem."""
        until_s = time.monotonic() + seconds
        while True:
            self.poll()
            if holds():
                return
            if time.monotonic() >= until_s:
                raise TimeoutError(problem)
            time.sleep(every_s)

    # --- orders -------------------------------------------------------------------------------------------------------

    def order(self, name: str, do: str, **more: object) -> int:
        """Tell a node what to do wrong; the order's number."""
        self._num_orders += 1
        place = self.setup.directory / f"{name}.order"
        new = place.with_suffix(".new")
        new.write_text(json.dumps({"id": self._num_orders, "do": do, **more}), encoding="utf-8")
        new.replace(place)
        return self._num_orders

    def take_back(self, name: str) -> None:
        """Whatever it was told."""
        (self.setup.directory / f"{name}.order").unlink(missing_ok=True)

    def num_done(self, name: str, order: int) -> int:
        """How often a node has done what an order says."""
        place = self.setup.directory / f"{name}.done"
        if not place.exists():
            return 0
        lines = place.read_text(encoding="utf-8").splitlines()
        return sum(json.loads(line)["id"] == order for line in lines[-1000:])

    # --- looking ------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What the router shows. Raises OSError."""
        found: dict[str, Any] = json.loads(_get(self.url, "/state"))
        return found

    def held(self) -> Counter[str]:
        """What is held anywhere, by what it is: nothing, when nothing is under way."""
        state = self.state()
        found: Counter[str] = Counter({f"router {name}": number for name, number in state["queues"].items()})
        for node in state["nodes"]:
            found[f"router's slots of {node['node']}"] += node["requests_of_this_router"]
        for name in self.setup.nodes:
            numbers = _numbers(_get(self.processes[name].url, "/metrics"))
            for what, number in numbers.items():
                if what.startswith(_HELD):
                    found[f"{name} {what}"] += int(number)
        return +found

    def seen(self) -> dict[int, Counter[str]]:
        """What each process has counted of all that went wrong, by its pid."""
        found = {}
        for process in [self.processes[name] for name in ("router", *self.setup.nodes)]:
            numbers = _numbers(_get(process.url, "/metrics"))
            found[process.pid] = Counter({name: int(numbers[name]) for name in numbers if name.startswith(_SEEN)})
        return found

    def until_idle(self, seconds: float) -> Counter[str]:
        """What is still held after so long; nothing, mostly at once."""
        until_s = time.monotonic() + seconds
        while True:
            self.poll()
            held = self.held()
            if not held or time.monotonic() >= until_s:
                return held
            time.sleep(0.05)

    def num_tracebacks(self) -> int:
        """How often somebody was taken by surprise, so far."""
        logs = [self._log(name) for name in ("router", *self.setup.nodes)]
        return sum(log.read_bytes().count(b"Traceback (most recent call last)") for log in logs if log.exists())

    def end(self, seconds: float) -> list[str]:
        """Ask all nodes to end, and the router; who did not, or not well, by then."""
        wrong = []
        for names in (self.setup.nodes, ["router"]):
            for name in names:
                self.processes[name].doomed = True
                if self.processes[name].alive:
                    os.kill(self.processes[name].pid, signal.SIGTERM)
            until_s = time.monotonic() + seconds
            for name in names:
                if not self.until_dead(name, max(0.0, until_s - time.monotonic())):
                    wrong.append(f"{name} does not end: {self.last_words(name)}")
                elif self.processes[name].code != 0:
                    wrong.append(f"{name} ended with {self.processes[name].code}: {self.last_words(name)}")
        return wrong

    def last_words(self, name: str) -> str:
        """The end of a log."""
        place = self._log(name)
        return place.read_text(encoding="utf-8", errors="replace")[-800:] if place.exists() else ""

    def _log(self, name: str) -> Path:
        return self.setup.directory / f"{name}.log"


_HELD: Final = ("engine_requests", 'device_slots{state="own"}', 'device_slots{state="quarantined"}', "stuck_calls")
_SEEN: Final = ("bad_pages_total", "handoffs_total", "router_attempts_total", "router_requests_total")


def _numbers(text: str) -> dict[str, float]:
    found = re.finditer(r"^headwater_(\S+) (\S+)$", text, re.MULTILINE)
    return {one[1]: float(one[2]) for one in found}


def _get(url: str, path: str) -> str:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_ASK_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        text = response.read().decode()
        if response.status != 200:
            raise OSError(f"{path}: status {response.status}: {text[:200]}")
        return text
    finally:
        connection.close()
