"""What an adversarial review broke: engines held up by a store, breakers that never open, bills without the wait."""

import hashlib

import pytest

from headwater.cache.state import Brain
from headwater.config.cache import CacheConfig, SaveWhen, TierConfig
from headwater.core import events as ev
from headwater.core.breaker import BreakerState
from headwater.core.errors import InvalidInput
from headwater.core.keys import BlockKey
from headwater.core.results import Reason, Status

ROOT = BlockKey(hashlib.sha256(b"root").digest())


def chain(name: str, length: int) -> tuple[BlockKey, ...]:
    keys, key = [], name.encode()
    for _ in range(length):
        key = hashlib.sha256(key).digest()
        keys.append(BlockKey(key))
    return tuple(keys)


def brain(*tiers: TierConfig, num_slots: int = 10, **more: float) -> Brain:
    return Brain(CacheConfig(num_slots=num_slots, block_tokens=4, block_bytes=10, policy="lru", tiers=tiers, **more))  # type: ignore[arg-type]


class Desk:
    """Tells a brain events and keeps the jobs it gives."""

    def __init__(self, one: Brain) -> None:
        self.brain = one
        self.jobs: list[ev.Job] = []
        self.cancelled: list[int] = []
        self.now_s = 0.0

    def tell(self, kind: type[ev.Event], **fields: object) -> list[ev.Instruction]:
        out = self.brain.handle(kind(now_s=self.now_s, **fields))
        self.jobs += [one for one in out if isinstance(one, ev.Job)]
        self.cancelled += [one.job for one in out if isinstance(one, ev.Cancel)]
        self.brain.validate()
        return out

    def arrive(self, name: str, keys: tuple[BlockKey, ...]) -> None:
        self.tell(ev.Arrived, request=name, keys=keys, root=ROOT)

    def take(self, kind: type[ev.Job]) -> ev.Job:
        job = next(one for one in self.jobs if isinstance(one, kind))
        self.jobs.remove(job)
        return job

    def answer_probe(self, result: str) -> None:
        job = self.take(ev.Probe)
        self.tell(ev.JobDone, job=job.job, results=(result,) * len(job.keys))

    def want(self, name: str, num_blocks: int) -> bool:
        return any(isinstance(one, ev.Granted) for one in self.tell(ev.Wanted, request=name, num_blocks=num_blocks))


def test_saves_that_wait_for_a_slow_store_give_way_to_a_request() -> None:
    desk = Desk(brain(TierConfig(name="host")))
    keys = chain("a", 10)
    desk.arrive("a", keys)
    desk.answer_probe("absent")
    assert desk.want("a", 10)
    desk.tell(ev.Filled, request="a", keys=keys)
    desk.tell(ev.Left, request="a")
    save = desk.take(ev.Save)
    desk.arrive("b", chain("b", 1))
    assert not desk.want("b", 1)  # the executor has not read the blocks yet
    assert desk.cancelled == [save.job, *desk.cancelled[1:]]
    assert not desk.want("b", 1)
    assert desk.cancelled.count(save.job) == 1  # told once
    desk.tell(ev.JobFailed, job=save.job, failure=Reason.CANCELLED)
    assert desk.want("b", 1)


@pytest.mark.parametrize("results", [("failed", "miss", "miss"), ("late", "miss", "miss")])
def test_a_store_that_answers_and_cannot_be_read_is_left_alone(results: tuple[str, ...]) -> None:
    desk = Desk(brain(TierConfig(name="host", save=SaveWhen.NEVER, breaker_failures=3), num_slots=100))
    loads = 0
    for i in range(6):
        desk.arrive(f"{i}", chain(f"{i}", 3))
        desk.answer_probe("held")
        assert desk.want(f"{i}", 3)
        if desk.jobs:
            loads += 1
            desk.tell(ev.JobDone, job=desk.take(ev.Load).job, results=results)
    assert loads == 3
    assert desk.brain.tiers["host"].state is BreakerState.OPEN


def test_a_store_that_does_not_answer_is_left_alone_though_nobody_waits_for_it() -> None:
    desk = Desk(brain(TierConfig(name="host", breaker_failures=3), num_slots=100))
    for i in range(20):
        desk.arrive(f"{i}", chain(f"{i}", 1))
        probes, desk.jobs = desk.jobs, []
        desk.now_s += 0.15
        assert desk.want(f"{i}", 1)  # the engine goes on
        for job in probes:
            desk.tell(ev.JobFailed, job=job.job, failure=Reason.CANCELLED)
    assert desk.brain.tiers["host"].state is not BreakerState.CLOSED
    assert len(desk.cancelled) < 8


def test_a_tier_that_was_too_slow_is_tried_again() -> None:
    desk = Desk(brain(TierConfig(name="host", save=SaveWhen.NEVER), num_slots=1000, compute_base_s=0.01))
    loaded = []
    for i, seconds in enumerate((5.0, 0.001, 0.001)):
        desk.arrive(f"{i}", chain(f"{i}", 2))
        desk.answer_probe("held")
        assert desk.want(f"{i}", 2)
        loaded.append(bool(desk.jobs))
        for job in [one for one in desk.jobs if isinstance(one, ev.Load)]:
            desk.take(ev.Load)
            desk.tell(ev.JobDone, job=job.job, results=(Status.HIT, Status.HIT), num_bytes=20, seconds=seconds)
        desk.now_s += 1.0 if i == 0 else 60.0
    assert loaded == [True, False, True]


def test_dropped_blocks_are_counted_once() -> None:
    desk = Desk(brain(TierConfig(name="host"), num_slots=100))
    desk.tell(ev.StoreOff, store="host", why="a test")
    keys = chain("a", 50)
    desk.arrive("a", keys)
    assert desk.want("a", 50)
    for key in keys:
        desk.tell(ev.Filled, request="a", keys=(key,))
    totals = desk.brain.accounts.totals
    assert totals["dropped_blocks_total", (("reason", "store_down"), ("tier", "host"))] == 50


def test_a_store_that_comes_back_may_be_empty() -> None:
    desk = Desk(brain(TierConfig(name="host")))
    desk.arrive("a", chain("a", 2))
    desk.answer_probe("absent")
    desk.want("a", 3)
    desk.tell(ev.Filled, request="a", keys=chain("a", 2))
    desk.tell(ev.JobDone, job=desk.take(ev.Save).job, results=(Status.STORED, Status.STORED))
    desk.tell(ev.StoreOff, store="host", why="damaged")
    desk.tell(ev.StoreOn, store="host")
    desk.tell(ev.Filled, request="a", keys=chain("a", 3)[2:])
    save = desk.take(ev.Save)
    assert isinstance(save, ev.Save)
    assert (save.depth, len(save.keys)) == (0, 3)


def test_what_was_saved_behind_a_hole_is_saved_again() -> None:
    desk = Desk(brain(TierConfig(name="host")))
    keys = chain("a", 4)
    desk.arrive("a", keys)
    desk.answer_probe("absent")
    desk.want("a", 5)
    desk.tell(ev.Filled, request="a", keys=keys[:2])
    desk.tell(ev.Filled, request="a", keys=keys[2:])
    first, second = desk.take(ev.Save), desk.take(ev.Save)
    desk.tell(ev.JobDone, job=second.job, results=(Status.STORED, Status.STORED))  # by a store that knows no parents
    desk.tell(ev.JobFailed, job=first.job, failure=Reason.FAILED)
    desk.tell(ev.Filled, request="a", keys=chain("a", 5)[4:])
    save = desk.take(ev.Save)
    assert isinstance(save, ev.Save)
    assert (save.depth, len(save.keys)) == (0, 5)


def test_the_bill_counts_the_wait_for_answers() -> None:
    desk = Desk(brain(TierConfig(name="host"), compute_base_s=0.02))
    desk.arrive("a", chain("a", 2))
    desk.now_s = 0.4
    desk.answer_probe("held")
    desk.now_s = 7.0  # it was not its turn before
    desk.want("a", 2)
    desk.now_s = 7.1
    desk.tell(ev.JobDone, job=desk.take(ev.Load).job, results=(Status.HIT, Status.HIT))
    (bill,) = [one for one in desk.tell(ev.Left, request="a") if isinstance(one, ev.Finished)]
    assert bill.waited_s == pytest.approx(0.5)
    assert bill.saved_s == pytest.approx(0.04 - 0.5)


def test_requests_that_wait_for_one_prefix_promote_it_once() -> None:
    desk = Desk(brain(TierConfig(name="host"), TierConfig(name="disk"), num_slots=100))
    for i in range(5):
        desk.arrive(f"{i}", chain("a", 3))
        desk.answer_probe("absent")
        desk.answer_probe("held")
    assert [type(job) for job in desk.jobs] == [ev.Promote]
    desk.tell(ev.JobDone, job=desk.take(ev.Promote).job, results=(Status.LATE,) * 3)
    desk.arrive("again", chain("a", 3))
    desk.answer_probe("absent")
    desk.answer_probe("held")
    assert [type(job) for job in desk.jobs] == [ev.Promote]  # the first did not come through


def test_giving_way_and_coming_back_is_no_hit() -> None:
    desk = Desk(brain(TierConfig(name="host", save=SaveWhen.HITS, save_after_hits=3), num_slots=4))
    desk.arrive("a", chain("a", 2))
    desk.want("a", 2)
    desk.tell(ev.Filled, request="a", keys=chain("a", 2))
    desk.tell(ev.Left, request="a")
    desk.arrive("waits", chain("a", 2))
    for i in range(10):
        desk.arrive(f"runs {i}", chain(f"{i}", 3))
        desk.want(f"runs {i}", 3)
        desk.tell(ev.Left, request=f"runs {i}")
        desk.arrive("waits", chain("a", 2))
    assert not any(isinstance(job, ev.Save) for job in desk.jobs)


def test_a_tenant_is_sixteen_bytes() -> None:
    one = brain(TierConfig(name="host"))
    with pytest.raises(InvalidInput, match="a tenant is 16 bytes"):
        one.handle(ev.Arrived(now_s=0.0, request="a", keys=chain("a", 1), root=ROOT, tenant=b"acme"))


def test_a_digest_covers_what_comes_next() -> None:
    def half(results: tuple[str, ...]) -> Brain:
        desk = Desk(brain(TierConfig(name="host"), TierConfig(name="disk"), prefetch=False))
        desk.arrive("a", chain("a", 4))
        for answers in (("held", "held", "absent", "absent"), ("absent", "absent", "held", "held")):
            desk.tell(ev.JobDone, job=desk.take(ev.Probe).job, results=answers)
        desk.want("a", 4)
        desk.take(ev.Load)
        desk.tell(ev.JobDone, job=desk.take(ev.Load).job, results=results)  # the second row came first
        return desk.brain

    assert half(("hit", "hit")).digest() == half(("hit", "hit")).digest()
    assert half(("hit", "hit")).digest() != half(("hit", "miss")).digest()
