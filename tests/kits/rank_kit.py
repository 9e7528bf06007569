"""What the tests of ranks share: a group with devices in numpy and an ear; executors that do as a test says."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

from headwater.core.events import (
    Cancel,
    Copied,
    Demote,
    Event,
    Instruction,
    Job,
    JobDone,
    JobFailed,
    Load,
    Probe,
    Promote,
    Save,
    Stuck,
)
from headwater.core.keys import BlockKey
from headwater.core.results import Status
from headwater.layout.spec import KVLayout
from headwater.metrics import Metrics
from headwater.storage.base import SYSTEM_CLOCK, Store
from headwater.transfer.ranks.group import Ranks
from headwater.transfer.ranks.members import Member
from machines.ranks import RankDevices, small_layouts, thread_rank, whole_block
from worker_kit import PATIENCE_S, TENANT, Ear, key, keys

StoresOf = Callable[[int], Mapping[str, Store]]
LAYOUTS = small_layouts()


class Jobs:
    """Gives a group jobs, hears what becomes of them, and checks at the end that each ended exactly once."""

    def __init__(self, members: Sequence[Member], stores: Iterable[str], **options: Any) -> None:
        self.ear = Ear()
        self.metrics = Metrics()
        self.jobs: list[int] = []
        self.ranks = Ranks(members, stores=list(stores), deliver=self.ear, metrics=self.metrics, **options)

    def submit(self, *instructions: Instruction) -> None:
        self.ranks.submit(instructions)
        self.jobs += [one.job for one in instructions if isinstance(one, Job)]

    def cancel(self, job: int) -> None:
        self.submit(Cancel(job=job))

    def job(self, kind: type[Job], wanted: Sequence[BlockKey], within_s: float, store: str, **facts: Any) -> int:
        number = len(self.jobs) + 1
        deadline_s = SYSTEM_CLOCK.monotonic() + within_s
        self.submit(kind(job=number, store=store, keys=tuple(wanted), deadline_s=deadline_s, **facts))
        return number

    def probe(
        self, num: int, *, chain: int = 1, start: int = 0, within_s: float = PATIENCE_S, store: str = "host"
    ) -> int:
        return self.job(Probe, keys(chain, num, start), within_s, store)

    def load(
        self,
        slots: Sequence[int],
        *,
        chain: int = 1,
        start: int = 0,
        within_s: float = PATIENCE_S,
        store: str = "host",
    ) -> int:
        return self.job(Load, keys(chain, len(slots), start), within_s, store, slots=tuple(slots))

    def save(
        self,
        slots: Sequence[int],
        *,
        chain: int = 1,
        start: int = 0,
        within_s: float = PATIENCE_S,
        store: str = "host",
    ) -> int:
        facts = {"slots": tuple(slots), "parent": key(chain, start - 1), "depth": start, "tenant": TENANT}
        return self.job(Save, keys(chain, len(slots), start), within_s, store, **facts)

    def demote(self, num: int, target: str, *, start: int = 0, after: int = 0, within_s: float = PATIENCE_S) -> int:
        facts = {"target": target, "parent": key(1, start - 1), "after": after}
        return self.job(Demote, keys(1, num, start), within_s, "host", **facts)

    def promote(self, num: int, target: str, *, chain: int = 1, store: str = "host") -> int:
        return self.job(Promote, keys(chain, num), PATIENCE_S, store, target=target)

    def check_ends(self) -> None:
        ends = Counter(event.job for event in self.ear.events if isinstance(event, JobDone | JobFailed))
        assert ends == Counter(self.jobs), "a job ended twice, or never"
        for job in self.jobs:
            *before, last = self.ear.of(job)
            assert isinstance(last, JobDone | JobFailed), "something was said of a job after its end"
            assert len(before) <= 1
            assert all(isinstance(event, Copied | Stuck) for event in before)
        times = [event.now_s for event in self.ear.events]
        assert times == sorted(times)

    def finish(self) -> None:
        assert self.ranks.close(PATIENCE_S)
        self.check_ends()


class Group(Jobs):
    """A group whose ranks are all threads of this process, on one store or one each."""

    def __init__(
        self,
        layout: KVLayout,
        tp_size: int,
        stores: Mapping[str, Store] | StoresOf,
        *,
        num_slots: int = 32,
        views: Mapping[str, str] | None = None,
        sizes: Sequence[int] = (1, 2, 4, 8),
        threads_per_store: int = 1,
        **options: Any,
    ) -> None:
        self.layout = layout
        self.tp_size = tp_size
        self.devices = [RankDevices(layout, rank, tp_size, num_slots=num_slots) for rank in range(tp_size)]
        self.by_rank: list[list[Member]] = []
        for devices in self.devices:
            mine = stores(devices.rank) if callable(stores) else stores
            members = thread_rank(devices, tp_size, mine, views=views, sizes=sizes, threads_per_store=threads_per_store)
            self.by_rank.append(members)
        names = [*(stores(0) if callable(stores) else stores), *(views or {})]
        super().__init__([member for members in self.by_rank for member in members], names, **options)

    def fill(self, slots: Sequence[int], *, chain: int = 1, start: int = 0) -> None:
        """Put the blocks of a chain into slots, on every rank."""
        for slot, name in zip(slots, keys(chain, len(slots), start), strict=True):
            for devices in self.devices:
                devices.fill(slot, whole_block(self.layout, name))

    def holds(self, slots: Sequence[int], *, chain: int = 1, start: int = 0) -> list[bool]:
        """Of each slot, whether it holds its block of a chain on every rank, byte for byte."""
        return [
            all(devices.holds(slot, whole_block(self.layout, name)) for devices in self.devices)
            for slot, name in zip(slots, keys(chain, len(slots), start), strict=True)
        ]

    def saved(self, slots: Sequence[int], **where: Any) -> None:
        """Fill blocks, save them, and insist that they are stored."""
        self.fill(slots, **{name: where[name] for name in ("chain", "start") if name in where})
        assert self.ear.results(self.save(slots, **where)) == ["stored"] * len(slots)

    def loaded(self, slots: Sequence[int], **where: Any) -> None:
        """Load blocks and insist that all are there and right."""
        assert self.ear.results(self.load(slots, **where)) == ["hit"] * len(slots)
        assert all(self.holds(slots, **{name: where[name] for name in ("chain", "start") if name in where}))


class ScriptedExecutor:
    """An executor that does nothing by itself: a test answers for it, or does not. May be mortal."""

    def __init__(self, *, mortal: bool = False) -> None:
        self.deliver: Callable[[Event], None] | None = None
        self.asked: list[Instruction] = []
        self.refuses: BaseException | None = None
        self.is_closable = True
        self.revives = True
        self.revived: list[str] = []
        self.mortal = mortal
        self.on_death: Callable[[str], None] | None = None
        self.death: str | None = None
        self.num_shots = 0

    def submit(self, instructions: Iterable[Instruction]) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.asked += instructions

    def throttle_saves(self, *, on: bool) -> None:
        self.hurried = on

    def wait_layer(self, job: int, layer: int, timeout_s: float) -> bool:
        return False

    def on_first_layer(self, wake: Callable[[], None]) -> None:
        pass

    def remote(self) -> Self | None:
        return self if self.mortal else None

    def revive(self, store: str) -> bool:
        self.revived.append(store)
        return self.revives

    def close(self, timeout_s: float) -> bool:
        return self.is_closable

    def kill(self) -> bool:
        self.num_shots += 1
        return False

    # --- what a test makes them say -----------------------------------------------------------------------------------

    def say(self, event: Event) -> None:
        assert self.deliver is not None
        self.deliver(event)

    def done(self, job: int, *results: str, num_bytes: int = 0) -> None:
        self.say(JobDone(now_s=0.0, job=job, results=tuple(map(Status, results)), num_bytes=num_bytes))

    def die(self, why: str) -> None:
        self.death = why
        assert self.on_death is not None
        self.on_death(why)

    def cancels(self) -> list[int]:
        return [one.job for one in self.asked if isinstance(one, Cancel)]


def groups() -> Iterator[Callable[..., Group]]:
    """For a fixture: makes groups, and finishes them."""
    made: list[Group] = []

    def make(layout: KVLayout | str = "gqa", tp_size: int = 2, *args: Any, **options: Any) -> Group:
        found = LAYOUTS[layout] if isinstance(layout, str) else layout
        made.append(Group(found, tp_size, *args, **options))
        return made[-1]

    yield make
    for group in made:
        group.finish()
