"""Several caches on shared stores, with faults, from one seed: every choice, delay and fault comes out of it.

    python -m headwater.lab.campaigns.simulation --requests 10000 --caches 3 --seed 1 --json

Conversations come back, part, and are served by whichever cache has a hand free; jobs run in any order and at any time;
stores lose pages, lie, spoil bytes, fail, and are slow. Every byte a request reads is compared with what its key says,
every state is validated now and then, and at the end nothing may be held. The same seed ends in the same `state_hash`,
over all brains, devices and stores.
"""

import argparse
import hashlib
import json
import logging
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

from headwater.config.cache import SaveWhen, TierConfig
from headwater.core.page import PageName
from headwater.lab.campaigns.virtual import LAYOUT, SimulatedEngine, VirtualExecutor
from headwater.layout.frame import frame_bytes
from headwater.storage.base import Deadline
from headwater.storage.memory import MemoryStore
from headwater.testing.clock import FakeClock
from headwater.testing.device import BytesStaging
from headwater.testing.faulty_stores import Faults, FaultyStore

FAULTS = Faults(
    put_fails=0.02,
    get_fails=0.02,
    get_misses=0.02,
    flips_byte=0.01,
    cuts_tail=0.01,
    swaps_page=0.01,
    contains_lies=0.02,
)


@dataclass(frozen=True, slots=True)
class SimulationOutcome:
    """What a simulation ended with."""

    requests: int
    steps: int
    state_hash: str
    injected_faults: int
    hit_tokens: dict[str, int]
    miss_tokens: dict[str, int]
    refused: int


class Simulation:
    """One run. Raises AssertionError when a promise is broken."""

    def __init__(self, seed: int, *, num_caches: int = 3, policy: str = "lru") -> None:
        self._rng = rng = random.Random(seed)
        self._clock = FakeClock()
        size = frame_bytes(LAYOUT.plane_bytes)
        self._stores = {
            name: FaultyStore(MemoryStore(num * size, clock=self._clock), FAULTS, seed=rng.randrange(1 << 30))
            for name, num in (("host", 150), ("pool", 400))
        }
        whens = [SaveWhen.COMMIT, SaveWhen.EVICTION, SaveWhen.HITS]
        self.engines: list[SimulatedEngine] = []
        self._executor: dict[str, VirtualExecutor] = {}
        for i in range(num_caches):
            staging = BytesStaging(LAYOUT, num_slots=60, num_pages=8)
            executor = self._executor[f"cache {i}"] = VirtualExecutor(self._stores, staging, clock=self._clock)
            tiers = [TierConfig(name="host", save=whens[i % 3]), TierConfig(name="pool", max_queued_bytes=1 << 12)]
            engine = SimulatedEngine(f"cache {i}", staging, executor, tiers, clock=self._clock, policy=policy)
            executor.ledger.deliver = engine.cache.deliver
            self.engines.append(engine)
        self._conversations: list[list[int]] = []
        self._num_arrived = 0
        self._num_steps = 0

    def run(self, num_requests: int, *, check_every: int = 50) -> SimulationOutcome:
        """Serve so many requests by each cache, then let everything end."""
        total = num_requests * len(self.engines)
        actions: list[tuple[Callable[[SimulatedEngine], None], int]] = [
            (self._arrive, 3),
            (self._go_on, 14),
            (self._work, 30),
            (self._disturb, 1),
        ]
        choices, weights = [action for action, _ in actions], [weight for _, weight in actions]
        while self._num_arrived < total or any(engine.running for engine in self.engines):
            self._num_steps += 1
            engine = self._rng.choice(self.engines)
            action = self._rng.choices(choices, weights)[0]
            if action == self._arrive and self._num_arrived >= total:
                action = self._go_on
            action(engine)
            self._executor[engine.name].tell()
            self._clock.advance(self._rng.choice((0.0, 0.001, 0.01)))
            if self._num_steps % check_every == 0:
                engine.check()
        for engine in self.engines:
            engine.finish()
        return self._outcome()

    def _arrive(self, engine: SimulatedEngine) -> None:
        if len(engine.running) >= 6:
            return
        self._num_arrived += 1
        rng = self._rng
        if self._conversations and rng.random() < 0.7:
            path = list(rng.choice(self._conversations[-40:]))  # it comes back, with more to say
            path += [rng.randrange(3) for _ in range(rng.randint(0, 4))]
        else:
            path = [rng.randrange(2), *(rng.randrange(4) for _ in range(rng.randint(0, 12)))]
        path = path[:30]
        self._conversations.append(path)
        engine.arrive(path)

    def _go_on(self, engine: SimulatedEngine) -> None:
        """One running request takes its next step, or gives up."""
        if not engine.running:
            return
        rng = self._rng
        request = rng.choice(list(engine.running))
        one = engine.running[request]
        chance = rng.random()
        if chance < 0.05:
            engine.leave(request)
        elif chance < 0.1:
            engine.cache.give_up(request)
        elif not one.slots:
            waits = chance < 0.9 and not engine.settled(request)
            if waits or chance < 0.2:
                engine.ask(request)
            elif not engine.reserve(request, rng.randint(0, 3), load=rng.random() < 0.95) and rng.random() < 0.3:
                engine.leave(request)
        elif engine.compute(request, rng.randint(1, 6)):
            engine.check_request(request)
            if one.num_computed == len(one.slots) and rng.random() < 0.7:
                self._conversations.append(list(one.path))
                engine.leave(request)

    def _work(self, engine: SimulatedEngine) -> None:
        """The executor does one of its jobs, not the first in the queue and not at once."""
        executor = self._executor[engine.name]
        if executor.queued:
            slow = self._rng.random() < 0.02
            self._clock.advance(0.6 if slow else self._rng.choice((0.0, 0.001)))
            executor.run(self._rng.choice(executor.queued), fail=self._rng.random() < 0.02)

    def _disturb(self, engine: SimulatedEngine) -> None:
        """A store loses pages; one that gave nothing but bad ones is put right."""
        store = self._rng.choice(list(self._stores.values()))
        held = sorted(_names(store))
        doomed = self._rng.sample(held, min(len(held), self._rng.randint(0, 10)))
        store.delete(doomed, deadline=Deadline.after(1, self._clock))
        self._executor[engine.name].switched_off()

    def _outcome(self) -> SimulationOutcome:
        state = hashlib.sha256()
        hits: dict[str, int] = {}
        misses: dict[str, int] = {}
        for engine in self.engines:
            state.update(engine.cache.brain.digest().encode())
            state.update(engine.staging.device.tobytes())
            for sums, parts in ((hits, engine.tally.hit_tokens), (misses, engine.tally.miss_tokens)):
                for name, tokens in parts.items():
                    sums[name] = sums.get(name, 0) + tokens
        for store in self._stores.values():
            state.update(b"".join(sorted(_names(store))))
        return SimulationOutcome(
            requests=self._num_arrived,
            steps=self._num_steps,
            state_hash=state.hexdigest(),
            injected_faults=sum(store.num_injected for store in self._stores.values()),
            hit_tokens=hits,
            miss_tokens=misses,
            refused=sum(engine.tally.refused for engine in self.engines),
        )


def _names(store: FaultyStore) -> list[PageName]:
    assert isinstance(store.store, MemoryStore)
    return store.store.names()


def main() -> None:
    """Command line: run it, twice if asked, and print the outcome."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=10_000, help="per cache")
    parser.add_argument("--caches", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--policy", default="lru")
    parser.add_argument("--once", action="store_true", help="do not run it a second time to compare")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.getLogger("headwater").setLevel(logging.ERROR)  # stores fail here all the time
    outcomes = [
        Simulation(options.seed, num_caches=options.caches, policy=options.policy).run(options.requests)
        for _ in range(1 if options.once else 2)
    ]
    same = all(outcome == outcomes[0] for outcome in outcomes)
    result = {"ok": same, "runs": len(outcomes), "seed": options.seed, **asdict(outcomes[0])}
    sys.stdout.write(json.dumps(result, indent=None if options.json else 2) + "\n")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
