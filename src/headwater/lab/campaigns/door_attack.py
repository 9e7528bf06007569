"""The door under attack: a server, honest clients, and a thousand connections that keep it waiting.

    python -m headwater.lab.campaigns.door_attack --json                 # a node: quiet, 5 minutes of attack, quiet
    python -m headwater.lab.campaigns.door_attack --router --json        # a router with a prefill and a decode node
    python -m headwater.lab.campaigns.door_attack --seconds 20 --quiet 10
    python -m headwater.lab.campaigns.door_attack --elsewhere --json  # a control: on another node beside it

Real processes on loopback: the server, as `headwater serve` or `headwater pd` start it, with a tiny model; attackers
(`door_attackers.py`) in another. Honest clients ask all the time, each one request after the other, by new connections
and by ones they keep, streams and whole answers. What they wait for is compared with what they wait for in quiet
times, before and after the attack and in as many rounds as wanted, because machines have moods.

It is well if no honest client ever saw an error, or an answer that is not whole; if their p99 under attack is within
`MOST_TIMES` of the quiet one; if `/health` was true all the time; if every attacker was cut; and if the memory of the
server's processes stays within `MOST_BYTES` of what it was.

All of them share the machine's cores, so the report says who took how much of them; and `--elsewhere` says what honest
clients wait for when their own server is left alone, while all else goes on beside it.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from headwater.engine.make_model import make_model
from headwater.fleet import Child, Fleet, FleetOptions
from headwater.lab.campaigns.door_attackers import KINDS, NO_END, NO_END_S, PATH

PLAN: Final[Mapping[str, int]] = {  # a thousand and more: some of them do not get in
    "silent": 200,
    "slow_head": 250,
    "slow_body": 200,
    "half_body": 16,
    "unread": 4,
    "giant": 2,
    "bomb": 1,
    "crumbs": 2,
    "many_lines": 4,
    "linger": 150,
    "just_large": 200,
    "garbage": 4,
}
MOST_TIMES: Final = 3.0
MOST_BYTES: Final = 512 << 20

_START_S: Final = 120.0
_STOP_S: Final = 20.0
_ANSWER_S: Final = 60.0  # then an honest client calls it an error
_PAUSE_S: Final = 0.5  # between two requests of one, on average
_SETTLE_S: Final = 15.0  # after an attack, until the quiet is one
_TOKENS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackOptions:
    """How much of it."""

    router: bool = False
    seconds: float = 300.0  # of attack, in all rounds together
    quiet: float = 60.0  # before and after
    rounds: int = 1
    elsewhere: bool = False  # attack another node
    clients: int = 20
    plan: Mapping[str, int] = field(default_factory=lambda: dict(PLAN))
    seed: int = 0


@dataclass(slots=True)
class Seen:
    """What honest clients saw in one time."""

    waits_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    most_bytes: int = 0  # that the server's processes held
    seconds: float = 0.0
    core_s: dict[str, float] = field(default_factory=dict)  # of processors, by who took it

    def add(self, other: "Seen") -> None:
        """Take in what was seen at another time."""
        self.waits_s += other.waits_s
        self.health_s += other.health_s
        self.errors += other.errors
        self.most_bytes = max(self.most_bytes, other.most_bytes)
        self.seconds += other.seconds
        for who, spent_s in other.core_s.items():
            self.core_s[who] = self.core_s.get(who, 0.0) + spent_s

    def document(self) -> dict[str, Any]:
        """For people."""
        return {
            "requests": len(self.waits_s),
            "p50_s": percentile(self.waits_s, 50),
            "p99_s": percentile(self.waits_s, 99),
            "longest_s": max(self.waits_s, default=0.0),
            "health_p99_s": percentile(self.health_s, 99),
            "errors": len(self.errors),
            "examples": self.errors[:5],
            "cores": {who: round(spent_s / max(self.seconds, 1e-9), 3) for who, spent_s in self.core_s.items()},
        }


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which so many lie; 0 for none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


# --- who is attacked --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    """A server that answers, and its processes."""

    url: str
    pids: Sequence[int]

    def memory_bytes(self) -> int:
        """What its processes, and those they started, hold."""
        lines = "".join(_of_processes(self.pids, "status")).splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


def _of_processes(pids: Sequence[int], what: str) -> Iterator[str]:
    """A file that the kernel has of each of these processes, and of those they started."""
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        try:
            found = Path(f"/proc/{pid}/{what}").read_text()
            waiting += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        except OSError:
            continue
        yield found


def core_seconds(pids: Sequence[int]) -> float:
    """Time of processors that these processes, and those they started, have taken."""
    ticks = sum(sum(map(int, stat.rpartition(")")[2].split()[11:13])) for stat in _of_processes(pids, "stat"))
    return ticks / os.sysconf("SC_CLK_TCK")


# --- honest clients ---------------------------------------------------------------------------------------------------


class Honest:
    """A client that asks, reads, and asks again."""

    def __init__(self, url: str, chance: random.Random) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._chance = chance
        self._kept: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def run(self, seen: Seen, until_s: float) -> None:
        """Ask until then."""
        while time.monotonic() < until_s:
            begin_s = time.monotonic()
            try:
                async with asyncio.timeout(_ANSWER_S):
                    await self._ask()
                seen.waits_s.append(time.monotonic() - begin_s)
            except (OSError, EOFError, ValueError, TimeoutError) as error:
                seen.errors.append(f"{type(error).__name__}: {error}"[:300])
                self.close()
            await asyncio.sleep(self._chance.uniform(0.5, 1.5) * _PAUSE_S)
        self.close()

    async def watch(self, seen: Seen, until_s: float, memory_bytes: Callable[[], int]) -> None:
        """Ask for the server's health until then, and look at its memory."""
        while time.monotonic() < until_s:
            seen.most_bytes = max(seen.most_bytes, memory_bytes())
            begin_s = time.monotonic()
            try:
                async with asyncio.timeout(_ANSWER_S):
                    status, body = await self._exchange(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                if status != 200 or json.loads(body)["status"] != "ok":
                    raise ValueError(f"{status} {body!r}")
                seen.health_s.append(time.monotonic() - begin_s)
            except (OSError, EOFError, ValueError, TimeoutError) as error:
                seen.errors.append(f"health: {type(error).__name__}: {error}"[:300])
            self.close()
            await asyncio.sleep(_PAUSE_S)

    def close(self) -> None:
        """Keep no connection."""
        if self._kept is not None:
            self._kept[1].transport.abort()
            self._kept = None

    async def _ask(self) -> None:
        """One request. Raises ValueError for an answer that is not whole."""
        chance = self._chance
        words = " ".join(chance.choices(("river", "stones", "rain", "hills", "old", "time"), k=chance.randint(2, 20)))
        stream, keep = chance.random() < 0.5, chance.random() < 0.5
        body = {"prompt": words, "max_tokens": _TOKENS, "ignore_eos": True, "temperature": 0, "stream": stream}
        data = json.dumps(body).encode()
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(data)}\r\n" + ("" if keep else "Connection: close\r\n") + "\r\n"
        status, answer = await self._exchange(head.encode() + data)
        if status != 200:
            raise ValueError(f"{status} {answer[:200]!r}")
        if stream and not answer.rstrip().endswith(b"data: [DONE]"):
            raise ValueError(f"a stream that ends with {answer[-100:]!r}")
        if not stream and json.loads(answer)["usage"]["completion_tokens"] != _TOKENS:
            raise ValueError(f"an answer that is not whole: {answer[:200]!r}")
        if not keep:
            self.close()

    async def _exchange(self, request: bytes) -> tuple[int, bytes]:
        if self._kept is None or self._kept[0].at_eof() or self._kept[1].is_closing():
            self._kept = await asyncio.open_connection(*self._address)
        reader, writer = self._kept
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        if "content-length" in headers:
            body = await reader.readexactly(int(headers["content-length"]))
        else:
            body = b""
            while (size := int(await reader.readline(), 16)) > 0:
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readline()
        if headers.get("connection") == "close":
            self.close()
        return int(head[0].split(" ")[1]), body


async def ask(target: Target, seconds: float, *, clients: int, seed: int) -> Seen:
    """Have honest clients ask for so long."""
    seen, until_s = Seen(), time.monotonic() + seconds
    *honest, watcher = (Honest(target.url, random.Random(f"{seed} {number}")) for number in range(clients + 1))
    await asyncio.gather(
        watcher.watch(seen, until_s, target.memory_bytes), *(client.run(seen, until_s) for client in honest)
    )
    return seen


# --- the campaign -----------------------------------------------------------------------------------------------------


@contextmanager
def node(place: Path, *options: str) -> Iterator[Target]:
    """A node as `headwater serve` starts it. Its log goes to `place`."""
    command = [sys.executable, "-c", "from headwater.cli import app; app()", "serve", "--port", "0"]
    tiers = ["--host-mib", "0", "--disk-mib", "0", "--num-blocks", "4096"]
    child = Child("node", None, [*command, "--model", str(_model(place)), *tiers, *options], place / "node.log")
    try:
        child.wait_for_url(time.monotonic() + _START_S)
        yield Target(child.url, [child.pid])
    finally:
        child.signal(signal.SIGTERM)
        child.end(time.monotonic() + _STOP_S)


@contextmanager
def router(place: Path) -> Iterator[Target]:
    """A router with a prefill and a decode node. Their logs go to `place`."""
    options = FleetOptions(prefill=1, decode=1, node=["--model", str(_model(place)), "--num-blocks", "4096"])
    with Fleet(options, directory=place) as fleet:
        yield Target(fleet.url, [child.pid for child in fleet.children.values()])


def _model(place: Path) -> Path:
    make_model("llama", place / "model")
    return place / "model"


@contextmanager
def attackers(url: str, plan: Mapping[str, int]) -> Iterator[tuple[int, Callable[[], dict[str, dict[str, int]]]]]:
    """Attack in the block. Yields who does it, and what ends it and says what they heard."""
    command = [sys.executable, "-m", "headwater.lab.campaigns.door_attackers", url, json.dumps(dict(plan))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def end() -> dict[str, dict[str, int]]:
            heard: dict[str, dict[str, int]] = json.loads(process.communicate(timeout=NO_END_S + 60)[0])
            return heard

        try:
            yield process.pid, end
        finally:
            process.kill()


def campaign(
    target: Target,
    options: AttackOptions,
    *,
    attacked_url: str = "",
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Quiet, attack, quiet, in rounds. Blocks. `ok` is the verdict. `attacked_url`: another server's, for a control."""
    quiet, attacked, heard = Seen(), Seen(), {kind: dict[str, int]() for kind in options.plan}

    def time_of(name: str, seconds: float, seen: Seen, number: int, attacker: int | None = None) -> None:
        def taken() -> dict[str, float]:
            attack = {"attackers": core_seconds([attacker])} if attacker is not None else {}
            return {"server": core_seconds(target.pids), "clients": time.process_time(), **attack}

        begin_s, before = time.monotonic(), taken()
        found = asyncio.run(ask(target, seconds, clients=options.clients, seed=options.seed + number))
        found.seconds = time.monotonic() - begin_s
        found.core_s = {who: now_s - before[who] for who, now_s in taken().items()}
        seen.add(found)
        tell(f"{name}: {json.dumps(found.document())}")

    asyncio.run(ask(target, min(5.0, options.quiet), clients=options.clients, seed=options.seed))  # warm
    before_bytes = target.memory_bytes()
    for number in range(options.rounds):
        time_of("quiet", options.quiet / (options.rounds + 1), quiet, 2 * number)
        with attackers(attacked_url or target.url, options.plan) as (pid, end):
            time_of("attack", options.seconds / options.rounds, attacked, 2 * number + 1, pid)
            for kind, counted in end().items():
                for what, number_heard in counted.items():
                    heard[kind][what] = heard[kind].get(what, 0) + number_heard
        time.sleep(min(_SETTLE_S, options.quiet))
    time_of("quiet", options.quiet / (options.rounds + 1), quiet, 2 * options.rounds)
    after_bytes = target.memory_bytes()
    times = percentile(attacked.waits_s, 99) / max(percentile(quiet.waits_s, 99), 1e-9)
    endless = sum(counted.get(NO_END, 0) for counted in heard.values())
    checks = {
        "no_errors": not quiet.errors and not attacked.errors,
        "p99": times <= MOST_TIMES,
        "all_were_cut": not endless,
        "memory": after_bytes - before_bytes <= MOST_BYTES,
    }
    return {
        "ok": all(checks.values()),
        "checks": checks,
        "options": asdict(options),
        "quiet": quiet.document(),
        "attack": attacked.document(),
        "p99_times": times,
        "memory_mib": {
            "before": before_bytes >> 20,
            "under_attack": attacked.most_bytes >> 20,
            "after": after_bytes >> 20,
        },
        "attackers": heard,
    }


def _place() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="headwater-door-")


def main() -> int:
    """The command line. Exit code 1 if it is not well."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--router", action="store_true", help="a router with two nodes, instead of a node")
    parser.add_argument("--seconds", type=float, default=300.0, help="of attack")
    parser.add_argument("--quiet", type=float, default=60.0, help="seconds without")
    parser.add_argument("--elsewhere", action="store_true", help="attack another node, as a control")
    parser.add_argument("--rounds", type=int, default=1, help="in so many parts")
    parser.add_argument("--clients", type=int, default=20, help="honest ones")
    parser.add_argument("--kind", action="append", choices=sorted(KINDS), help="only these attackers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    given = parser.parse_args()
    options = AttackOptions(
        router=given.router,
        seconds=given.seconds,
        quiet=given.quiet,
        rounds=given.rounds,
        elsewhere=given.elsewhere,
        clients=given.clients,
        plan={kind: number for kind, number in PLAN.items() if not given.kind or kind in given.kind},
        seed=given.seed,
    )

    def tell(text: str) -> None:
        sys.stderr.write(text + "\n")

    start = router if options.router else node
    with ExitStack() as stack:
        place, another = (Path(stack.enter_context(_place())) for _ in range(2))
        target = stack.enter_context(start(place))
        attacked_url = stack.enter_context(node(another)).url if options.elsewhere else ""
        report = campaign(target, options, attacked_url=attacked_url, tell=tell)
    sys.stdout.write(json.dumps(report, indent=None if given.json else 2) + "\n")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
