"""Requests that are made to miss: a connector on a real cache, whose stores do what a scene tells them to.

Each *scene* arranges a world in which a request must miss for one reason, at one place; it says which, and where. It
knows because it made the world so, or saw what happened in it; it asks the cache for no reasons.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from headwater.cache.cache import TieredCache
from headwater.cache.executor import NoExecutor
from headwater.cache.explanations import LEAST_SHARED
from headwater.cache.state import Brain
from headwater.config.cache import CacheConfig, SaveWhen, TierConfig
from headwater.config.serve import ExplainLevel
from headwater.core import events as ev
from headwater.core.identity import CacheIdentity, config_digest
from headwater.core.keys import BlockKey, block_keys
from headwater.core.results import BAD_PAGE, Reason, Status
from headwater.engine.connector import Connector
from headwater.engine.request import Request, Sampling
from headwater.serve.explain import Explainer
from headwater.testing.clock import FakeClock

BLOCK: Final = 4
NUM_SLOTS: Final = 48
STORE: Final = "disk"
IDENTITY: Final = CacheIdentity(
    model="tape", weights=bytes(32), config=config_digest({}), layout=bytes(32), block_tokens=BLOCK
)


@dataclass
class Expected:
    """What is to be said of a request's misses: a row, the facts that are known of it, and what it hit before."""

    request: Request
    why: str
    start: int
    end: int
    facts: dict[str, Any] = field(default_factory=dict)
    tier: str | None = None
    loaded: int = 0  # blocks before `start` that came from the store
    behind: int = 0  # and behind `end`


class Script(NoExecutor):
    """An executor whose jobs end when they are told to, and how."""

    def __init__(self) -> None:
        self.jobs: list[ev.Job] = []

    def submit(self, instructions: Sequence[ev.Instruction]) -> None:
        self.jobs += [one for one in instructions if isinstance(one, ev.Job)]


class Stage:
    """A cache of few slots with one store."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = FakeClock()
        self.script = Script()
        tier = TierConfig(name=STORE, save=SaveWhen.NEVER, breaker_failures=1 << 30)
        sizes: dict[str, Any] = {"num_slots": NUM_SLOTS, "block_tokens": BLOCK, "block_bytes": 100}
        config = CacheConfig(tiers=(tier,), policy="lru", prefetch=False, **sizes)
        self.cache = TieredCache(Brain(config), self.script, clock=self.clock)
        self.connector = Connector(self.cache, IDENTITY)
        self.stored: set[BlockKey] = set()
        self.explainer = Explainer(
            self.cache, block_tokens=BLOCK, level=ExplainLevel.TOKENS, decode=lambda tokens: str(list(tokens))
        )
        self._num_requests = 0

    # --- requests -----------------------------------------------------------------------------------------------------

    def text(self, num_blocks: int) -> list[int]:
        """Tokens that nobody said before."""
        return [self.random.randrange(1 << 31) for _ in range(num_blocks * BLOCK)]

    def begin(self, tokens: list[int], *, salt: bytes = b"", connector: Connector | None = None) -> Request:
        """A request asks."""
        self.clock.advance(0.25)
        self._num_requests += 1
        name = f"req-{self._num_requests}/a{self._num_requests}"
        sampling = Sampling(max_tokens=1)
        request = Request(name=name, prompt=tokens, sampling=sampling, listen=lambda output: None, salt=salt)
        (connector or self.connector).ask(request, self.clock.monotonic())
        return request

    def end(self, kind: type[ev.Job], words: Sequence[Status] | None = None, *, seconds: float = 0.001) -> None:
        """Jobs of a kind end; `words`: how, if not as the store would have it."""
        while mine := [job for job in self.script.jobs if isinstance(job, kind)]:
            self.end_one(mine[0], words, seconds=seconds)

    def end_one(self, job: ev.Job, words: Sequence[Status] | None = None, *, seconds: float) -> None:
        """A job ends."""
        self.script.jobs.remove(job)
        self.clock.advance(seconds)
        there, absent = (Status.HIT, Status.MISS) if isinstance(job, ev.Load) else (Status.HELD, Status.ABSENT)
        honest = tuple(there if key in self.stored else absent for key in job.keys)
        results = honest if words is None else tuple(words)
        num_bytes, now_s = 100 * results.count(Status.HIT), self.clock.monotonic()
        self.cache.deliver(ev.JobDone(now_s=now_s, job=job.job, results=results, num_bytes=num_bytes, seconds=seconds))

    def fail(self, kind: type[ev.Job], failure: Reason) -> None:
        """Jobs of a kind come to nothing."""
        for job in [job for job in self.script.jobs if isinstance(job, kind)]:
            self.script.jobs.remove(job)
            self.cache.deliver(ev.JobFailed(now_s=self.clock.monotonic(), job=job.job, failure=failure))

    def finish(self, request: Request, connector: Connector | None = None) -> Request:
        """A request that has slots computes what it lacks, and leaves."""
        connector = connector or self.connector
        assert connector.loaded(request)
        request.num_computed = len(request.tokens)
        connector.commit(request)
        connector.release(request)
        return request

    def live(self, tokens: list[int], *, salt: bytes = b"", connector: Connector | None = None) -> Request:
        """A whole life, in which all goes well."""
        request = self.begin(tokens, salt=salt, connector=connector)
        self.end(ev.Probe)
        assert (connector or self.connector).admit(request)
        self.end(ev.Load)
        return self.finish(request, connector)

    def on_device(self) -> set[BlockKey]:
        with self.cache.still() as brain:
            return {key for key, _, _ in brain.blocks()}

    def keys(self, tokens: list[int]) -> list[BlockKey]:
        return block_keys(tokens, parent=IDENTITY.root, block_tokens=BLOCK)

    def known_prefix(self, salt: bytes = b"", connector: Connector | None = None) -> list[int]:
        """Some text that is on the device."""
        tokens = self.text(self.random.randrange(5))
        if tokens:
            self.live(tokens + self.text(1)[:-1], salt=salt, connector=connector)
        return tokens

    def explained(self, request: Request) -> list[dict[str, Any]]:
        (one,) = self.explainer.explained(request.name)["requests"]
        return list(one["rows"])

    # --- scenes -------------------------------------------------------------------------------------------------------

    def never_stored(self) -> Expected:
        known = self.known_prefix()
        tokens = known + self.text(self.random.randrange(1, 5))
        return _expect(self.live(tokens), "never_stored", len(known))

    def text_differs(self) -> Expected:
        known = self.known_prefix()
        first = known + self.text(self.random.randrange(1, 5))
        near = self.live(first)
        at = self.random.randrange(len(known), len(first))
        second = [*first[:at], first[at] ^ 1, *first[at + 1 :]]
        start = at // BLOCK * BLOCK
        if at < LEAST_SHARED:
            return _expect(self.live(second), "never_stored", start)
        return _expect(self.live(second), "text_differs", start, {"token": at, "nearest": near.name})

    def another_salt(self) -> Expected:
        salt = self.random.choice([b"", b"one", b"two"])
        other = self.random.choice([one for one in (b"", b"one", b"three") if one != salt])
        known = self.known_prefix(salt)
        tokens = known + self.text(self.random.randrange(1, 5))
        self.live(tokens, salt=other)
        return _expect(self.live(tokens, salt=salt), "another_salt", len(known), {})

    def another_identity(self) -> Expected:
        names = self.random.sample(("weights", "adapter", "tokenizer", "quantisation"), self.random.randrange(1, 3))
        number = self.random.randrange(1 << 30)
        values = {name: hashlib.sha256(b"%d" % number).digest() for name in names}
        told = {name: value.hex()[:8] for name, value in values.items()}
        changed: dict[str, Any] = dict(values)
        if "quantisation" in names:
            changed["quantisation"] = told["quantisation"] = f"scheme {number}"
        other = Connector(self.cache, replace(IDENTITY, **changed))
        known = self.known_prefix()
        tokens = known + self.text(self.random.randrange(1, 5))
        near = self.live(tokens, connector=other)
        facts = {"differs_in": told, "nearest": near.name}
        return _expect(self.live(tokens), "another_identity", len(known), facts)

    def being_computed(self) -> Expected:
        known = self.known_prefix()
        tokens = known + self.text(self.random.randrange(1, 5))
        first, second = self.begin(tokens), self.begin(tokens)
        self.end(ev.Probe)
        assert self.connector.admit(first)
        assert self.connector.admit(second)
        self.finish(first)
        return _expect(self.finish(second), "being_computed", len(known), {"nearest": first.name})

    def evicted(self) -> Expected:
        """From the device, because others needed slots; a store may have had it then, and lost it since."""
        tokens = self.text(self.random.randrange(1, 6))
        keys, stored = self.keys(tokens), self.random.random() < 0.5
        self.stored.update(keys if stored else ())
        self.live(tokens)
        gone: dict[BlockKey, tuple[str, float]] = {}
        while not gone:
            before = self.on_device()
            by = self.live(self.text(self.random.randrange(1, 9)))
            gone = dict.fromkeys(before.intersection(keys) - self.on_device(), (by.name, by.arrived_s))
        self.stored.difference_update(keys)
        start = min(map(keys.index, gone))
        facts = {"for": gone[keys[start]][0], "policy": "lru", "was_stored_in": STORE if stored else ""}
        return _expect(self.live(tokens), "evicted", start * BLOCK, facts, tier="device")

    def evicted_from_a_store(self) -> Expected:
        return self._bad_load((Status.MISS,), "evicted")

    def corrupt(self) -> Expected:
        return self._bad_load(tuple(BAD_PAGE), "corrupt")

    def load_too_late(self) -> Expected:
        return self._bad_load((Status.LATE,), "too_late")

    def load_failed(self) -> Expected:
        return self._bad_load((Status.FAILED,), "failed")

    def _bad_load(self, found: tuple[Status, ...], why: str) -> Expected:
        """A store says it has blocks, and at one of them it does not give what it should."""
        known = self.known_prefix()
        num = self.random.randrange(1, 5)
        tokens = known + self.text(num)
        self.stored.update(self.keys(tokens))
        request = self.begin(tokens)
        self.end(ev.Probe)
        assert self.connector.admit(request)
        good, bad = self.random.randrange(num), self.random.choice(found)
        self.end(ev.Load, (Status.HIT,) * good + (bad,) + (Status.MISS,) * (num - good - 1))
        start = len(known) + good * BLOCK
        facts = {"found": str(bad), "block": start // BLOCK}
        return _expect(self.finish(request), why, start, facts, tier=STORE, loaded=good)

    def probe_too_late(self) -> Expected:
        known = self.known_prefix()
        request = self.begin(known + self.text(self.random.randrange(1, 5)))
        assert self.connector.admit(request)
        self.fail(ev.Probe, Reason.CANCELLED)
        return _expect(self.finish(request), "too_late", len(known), {"found": "no answer"}, tier=STORE)

    def probe_failed(self) -> Expected:
        known = self.known_prefix()
        request = self.begin(known + self.text(self.random.randrange(1, 5)))
        self.fail(ev.Probe, Reason.FAILED)
        assert self.connector.admit(request)
        return _expect(self.finish(request), "failed", len(known), {"found": "no answer"}, tier=STORE)

    def no_load(self) -> Expected:
        """The store has it, and the engine does not want it."""
        known = self.known_prefix()
        tokens = known + self.text(self.random.randrange(1, 5))
        self.stored.update(self.keys(tokens))
        request = self.begin(tokens)
        self.end(ev.Probe)
        request.computes_all = True
        assert self.connector.admit(request)
        return _expect(self.finish(request), "not_worth_it", len(known), {"asked": "no load"})

    def not_worth_it(self) -> Expected:
        """Loads take a second, and computing takes a millisecond for each block. A few may be loaded as a trial."""
        for _ in range(3):
            tokens = self.text(2)
            self.stored.update(self.keys(tokens))
            request = self.begin(tokens)
            self.end(ev.Probe)
            assert self.connector.admit(request)
            self.end(ev.Load, seconds=1.0)
            self.finish(request)
        known = self.known_prefix()
        num = self.random.randrange(2, 5)
        tokens = known + self.text(num)
        self.stored.update(self.keys(tokens))
        request = self.begin(tokens)
        self.end(ev.Probe)
        self.cache.pace(0.001, 0.0)
        assert self.connector.admit(request)
        self.cache.pace(0.0, 0.0)
        tried = sum(len(job.keys) for job in self.script.jobs if isinstance(job, ev.Load))
        self.end(ev.Load)
        start = len(known) + tried * BLOCK
        facts = {"compute_s": 0.001 * num}
        return _expect(self.finish(request), "not_worth_it", start, facts, tier=STORE, loaded=tried)

    def computed_meanwhile(self) -> Expected:
        """On a stage of its own: a load takes a second for each block, and so does computing."""
        self.stored.update(self.keys(one := self.text(1)))
        request = self.begin(one)
        self.end(ev.Probe)
        assert self.connector.admit(request)
        self.end(ev.Load, seconds=1.0)
        self.finish(request)
        self.cache.pace(1.0, 0.0)
        num = self.random.randrange(10, 16)
        tokens = self.text(num)
        self.stored.update(self.keys(tokens))
        request = self.begin(tokens)
        self.end(ev.Probe)
        assert self.connector.admit(request)
        assert self.connector.loaded(request)
        assert request.meets
        computed = set[int]()
        while request.num_committed < num:
            for job in self.script.jobs[: self.random.randrange(2)]:
                self.end_one(job, seconds=1.0 * len(job.keys))
            before = request.num_computed // BLOCK
            end = self.connector.reach(request, 2 * BLOCK) // BLOCK
            begun = max(before, request.num_committed)
            self.clock.advance(max(0.5, 1.0 * (end - begun)))
            computed.update(range(begun, end))
            request.num_computed = max(request.num_computed, end * BLOCK)
            self.connector.commit(request)
        self.connector.release(request)
        end = max(computed) + 1
        assert computed == set(range(end))
        return replace(_expect(request, "computed_meanwhile", 0), end=end, behind=num - end)


def _expect(request: Request, why: str, start_token: int, facts: dict[str, Any] | None = None, **more: Any) -> Expected:
    return Expected(request, why, start_token // BLOCK, len(request.prompt) // BLOCK, facts or {}, **more)


SCENES: Final = tuple(
    name
    for name, scene in vars(Stage).items()
    if getattr(scene, "__annotations__", {}).get("return") is Expected and not name.startswith("_")
)
