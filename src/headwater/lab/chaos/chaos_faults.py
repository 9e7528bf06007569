"""How a fault campaign (`chaos.py`) breaks things: one class for each fault, struck again and again under load.

A strike returns when the fault was injected and whoever died is being started again; it says whether it came to that.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from headwater.lab.campaigns.pool_fault_kinds import CampaignChild
from headwater.lab.chaos.chaos_fleet import ChaosFleet
from headwater.lab.chaos.chaos_stage import START_S
from headwater.lab.chaos.chaos_store import HARMS
from headwater.testing.mooncake import MooncakePool

SLOW_S: Final = 2.0  # that each call of a slow pool takes
_MOST_S: Final = 20.0  # for an order to be carried out; the load is what makes that happen
_QUIET_S: Final = 0.1
_VANDAL: Final = "headwater.lab.campaigns.pool_fault_vandal"


class ChaosFault:
    """One way to break things."""

    timeouts_s: tuple[float, ...] = (6.0, 12.0, 12.0)  # that clients wait

    def __init__(self, fleet: ChaosFleet, rng: random.Random, *, pool: MooncakePool | None = None) -> None:
        self.fleet = fleet
        self.rng = rng
        self.pool = pool
        self.notes: Counter[str] = Counter()
        self.num_right: Callable[[], int] = lambda: 0  # of the load, so far

    def strike(self) -> bool:
        """Inject it once. Blocks. False: it did not come to that."""
        raise NotImplementedError

    def close(self) -> None:
        """End what it started."""

    def names(self, role: str) -> list[str]:
        return [name for name in self.fleet.setup.nodes if name.startswith(role)]

    def one_of(self, role: str) -> str:
        """A node of a role that is there; waits for one, and has those started again that died. Raises TimeoutError."""
        names = self.names(role)
        self.rng.shuffle(names)
        there: list[str] = []

        def look() -> bool:
            for name in names:
                if not self.fleet.processes[name].alive:
                    self.fleet.start(name)
            there.extend(name for name in names if self.fleet.found(name))
            return bool(there)

        self.fleet.wait(look, f"no {role} node is found again", START_S, every_s=0.02)
        return there[0]

    @contextmanager
    def ordered(self, names: list[str], do: str, **more: object) -> Iterator[Callable[[], int]]:
        """While nodes do as they are told; how often they have."""
        orders = {name: self.fleet.order(name, do, **more) for name in names}
        try:
            yield lambda: sum(self.fleet.num_done(name, order) for name, order in orders.items())
        finally:
            for name in names:
                self.fleet.take_back(name)


class Dies(ChaosFault):
    """A node kills itself at some call of its pool."""

    role = "prefill"
    when = ""

    def strike(self) -> bool:
        name = self.one_of(self.role)
        process = self.fleet.processes[name]
        process.doomed = True
        self.fleet.order(name, self.when)
        dead = self.fleet.until_dead(name, _MOST_S)
        self.fleet.take_back(name)
        process.doomed = not dead
        if dead:
            self.fleet.start(name)
        return dead


class DiesBefore(Dies):
    """Prefill, before its write."""

    when = "before"


class DiesDuring(Dies):
    """Prefill, in the middle of its write."""

    when = "during"


class DiesAfter(Dies):
    """Prefill, after its write: before the ticket left, or when decode has it already."""

    when = "after"


class DiesReading(Dies):
    """Decode, while it reads."""

    role = "decode"
    when = "reading"


class ChosenDies(ChaosFault):
    """Whoever the router has just chosen for a request, of whatever role."""

    def strike(self) -> bool:
        until_s = time.monotonic() + _MOST_S
        while time.monotonic() < until_s:
            self.fleet.poll()
            for name in self.fleet.setup.nodes:
                if not self.fleet.processes[name].alive:
                    self.fleet.start(name)
            chosen = self._chosen()
            if chosen is not None:
                self.fleet.kill(chosen)
                self.fleet.until_dead(chosen, _MOST_S)
                self.notes[chosen.partition("-")[0]] += 1
                self.fleet.start(chosen)
                self.one_of(chosen.partition("-")[0])
                return True
        return False

    def _chosen(self) -> str | None:
        attempts = [one["attempts"][-1] for one in self.fleet.state()["under_way"] if one["attempts"]]
        nodes: list[str] = [one["node"] for one in attempts if one["outcome"] == "under way"]
        roles = {one.partition("-")[0] for one in nodes if self.fleet.processes[one].alive}
        if not roles:
            return None
        role = self.rng.choice(sorted(roles))
        return self.rng.choice([one for one in nodes if one.startswith(role) and self.fleet.processes[one].alive])


class PoolFull(ChaosFault):
    """No page is taken, for a while."""

    def strike(self) -> bool:
        seconds = self.rng.uniform(0.2, 0.8)
        with self.ordered(self.names("prefill"), "full") as num_done:
            self.fleet.wait(lambda: num_done() > 0, "nothing was written to a full pool", _MOST_S)
            self._hold(seconds)
            self.notes["puts_refused"] += num_done()
        self._hold(_QUIET_S)
        return True

    def _hold(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        self.fleet.wait(lambda: time.monotonic() >= until_s, "", seconds + 60)


class PoolSlow(PoolFull):
    """Each call takes two seconds, for a while."""

    timeouts_s = (3.0, 8.0, 20.0)

    def strike(self) -> bool:
        with self.ordered(self.fleet.setup.nodes, "slow", seconds=SLOW_S) as num_done:
            self.fleet.wait(lambda: num_done() > 0, "nobody called a slow pool", _MOST_S)
            self._hold(SLOW_S * self.rng.uniform(1.0, 1.6))
            self.notes["slow_calls"] += num_done()
        self._hold(2 * _QUIET_S)
        return True


class Harmed(ChaosFault):
    """A page that decode is about to read is not what prefill wrote."""

    kind = ""

    def strike(self) -> bool:
        name = self.one_of("decode")
        with self.ordered([name], self.kind) as num_done:
            self.fleet.wait(lambda: num_done() > 0, f"no page was {self.kind}", _MOST_S)
        return True


class MasterDies(ChaosFault):
    """The Mooncake master is killed, is down for a moment, and starts again with an empty memory."""

    def strike(self) -> bool:
        if self.pool is None:
            raise RuntimeError("there is no master to kill")
        before = self.num_right()
        self.pool.kill_master()
        self._wait(self.rng.uniform(0.1, 1.0))
        self.pool.start_master()
        try:
            self.fleet.wait(lambda: self.num_right() > before + 5, "", _MOST_S)
        except TimeoutError:
            self.notes["slow_to_recover"] += 1
        return True

    def _wait(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        self.fleet.wait(lambda: time.monotonic() >= until_s, "", seconds + 60)


class MooncakeFull(MasterDies):
    """A real pool is full of what may not be evicted, for a while."""

    def __init__(self, fleet: ChaosFleet, rng: random.Random, *, pool: MooncakePool | None = None) -> None:
        super().__init__(fleet, rng, pool=pool)
        self._vandal = CampaignChild(_VANDAL, "vandal", fleet.setup.pool, errors=fleet.setup.directory / "vandal.err")
        self._vandal.answer()

    def strike(self) -> bool:
        seconds = self.rng.uniform(0.8, 1.6)
        self._vandal.tell("hog", seconds)
        self._wait(seconds)
        num_junk = self._vandal.answer()
        self.notes["junk_objects"] += num_junk
        return bool(num_junk > 0)

    def close(self) -> None:
        self._vandal.kill()


def _harmed(kind: str) -> type[ChaosFault]:
    return type(f"Harmed_{kind}", (Harmed,), {"kind": kind, "__doc__": f"A page is {kind}."})


FAULTS: Final[dict[str, type[ChaosFault]]] = {
    "prefill_dies_before_write": DiesBefore,
    "prefill_dies_during_write": DiesDuring,
    "prefill_dies_after_write": DiesAfter,
    "decode_dies_reading": DiesReading,
    "chosen_node_dies": ChosenDies,
    "pool_full": PoolFull,
    "pool_slow": PoolSlow,
    **{f"object_{kind}": _harmed(kind) for kind in HARMS},
    "mooncake_full": MooncakeFull,
    "mooncake_master_dies": MasterDies,
}
ON_LOCAL: Final = frozenset(f"object_{kind}" for kind in HARMS)
ON_MOONCAKE: Final = frozenset({"mooncake_full", "mooncake_master_dies"})
