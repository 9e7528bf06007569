"""An engine that behaves to a connector as vLLM 0.32 does, without a model: blocks, steps, preemptions, delayed frees.

A block's bytes are a function of all tokens up to its end, so that every byte that was loaded can be checked where it
is used; blocks that were given back are scribbled over as soon as vLLM's worker could: who still reads them stores
rubbish. With `shares` it has a prefix cache of its own, as vLLM has: a block has several owners, is found by who comes
later while its first owner runs or after it has ended, and is lost when another needs it.
"""

import hashlib
import pickle
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch

from headwater.integrations.vllm.metadata import Orders, Report
from headwater.integrations.vllm.scheduler import SchedulerSide
from headwater.integrations.vllm.worker import WorkerSide

SIZE = 4  # tokens of a block
WIDTHS = (96, 160)  # bytes of its planes


def content(tokens: list[int], width: int) -> torch.Tensor:
    seed = hashlib.sha256(repr(tokens).encode()).digest()
    return torch.frombuffer(bytearray((seed * (width // 32 + 1))[:width]), dtype=torch.uint8)


@dataclass(eq=False)
class FakeRequest:
    """What the connector sees of a request."""

    request_id: str
    prompt: list[int]
    num_output: int
    all_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_preemptions: int = 0
    prompt_embeds: Any = None
    lora_request: Any = None
    cache_salt: str | None = None
    mm_features: tuple[Any, ...] = ()
    block_hashes: tuple[Any, ...] = ()
    blocks: list[int] = field(default_factory=list)
    num_loaded: int = 0
    status: str = "waiting"  # waiting, loading, running, over

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def next_token(self) -> int:
        return int.from_bytes(hashlib.sha256(repr(self.all_token_ids).encode()).digest()[:2], "big")


class Group:
    """The workers of several ranks, as vLLM adds up what they say."""

    def __init__(self, sides: list[WorkerSide]) -> None:
        self.sides = sides
        self._said: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        self._failed: set[str] = set()

    def begin(self, orders: Orders) -> None:
        for side in self.sides:
            side.begin(pickle.loads(pickle.dumps(orders)))  # they are in other processes

    def load(self) -> None:
        for side in self.sides:
            side.load()

    def save(self) -> None:
        for side in self.sides:
            side.save()

    def finished(self) -> tuple[set[str], set[str]]:
        """Who was named by every rank by now."""
        for side in self.sides:
            for said, names in zip(self._said, side.finished(), strict=True):
                said.update(names)
        over = tuple({name for name, num in said.items() if num == len(self.sides)} for said in self._said)
        for said, names in zip(self._said, over, strict=True):
            for name in names:
                del said[name]
        return over[0], over[1]

    def take_failed(self, received: set[str]) -> set[str]:
        """Who must begin anew, of those that have received all they will."""
        self._failed = self._failed.union(*(side.take_failed() for side in self.sides))
        over = self._failed & received
        self._failed -= over
        return over

    def take_bad(self) -> set[int]:
        return set().union(*(side.take_bad() for side in self.sides))

    def report(self) -> Report | None:
        reports = [report for side in self.sides if (report := side.report()) is not None]
        return reduce(Report.with_other, pickle.loads(pickle.dumps(reports))) if reports else None


class FakeEngine:
    """vLLM's scheduler and its workers, step by step."""

    def __init__(
        self,
        scheduler: SchedulerSide,
        worker: Group,
        planes: list[torch.Tensor],
        *,
        sync: bool,
        chunk: int = 12,
        shares: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.worker = worker
        self.planes = planes
        self.free = list(range(len(planes[0])))
        self.freed: list[int] = []  # since the last step began
        self.pinned: set[int] = set()  # blocks that are not given to anybody
        self.ownerless: set[int] = set()  # those of them that nobody has
        scheduler.pins = self
        self.sync = sync
        self.chunk = chunk
        self.requests: list[FakeRequest] = []
        self.delayed: dict[str, FakeRequest] = {}
        self.num_preempted = self.num_loaded = self.num_failed = self.num_shared = 0
        self.shares = shares
        self.owners: Counter[int] = Counter()
        self.cached: dict[tuple[int, ...], int] = {}  # by all tokens up to its end
        self.names: dict[int, tuple[int, ...]] = {}

    def add(self, *requests: FakeRequest) -> None:
        self.requests += requests

    @property
    def is_busy(self) -> bool:
        return bool(self.requests or self.delayed)

    # --- one step -----------------------------------------------------------------------------------------------------

    def step(self, preempt: FakeRequest | None = None) -> None:
        if preempt is not None:
            self._preempt(preempt)
        for one in [one for one in self.requests if one.status == "waiting"]:
            self._admit(one)
        scheduled: list[tuple[FakeRequest, int]] = []
        for one in [one for one in self.requests if one.status == "running"]:
            num = min(self.chunk, one.num_tokens - one.num_computed_tokens)
            while not self._grow(one, one.num_computed_tokens + num):
                victim = next(o for o in reversed(self.requests) if o.status == "running")
                self._preempt(victim)
                scheduled = [(o, n) for o, n in scheduled if o is not victim]
                if victim is one:
                    break
            if one.status == "running":
                scheduled.append((one, num))
        for one, num in scheduled:
            self._remember(one, one.num_computed_tokens + num)
        orders = self.scheduler.orders(lambda name: next(o for o in self.requests if o.request_id == name).blocks)
        self.worker.begin(orders)
        for block in self.freed:  # from here on vLLM may write to them
            for plane in self.planes:
                plane[block] = random.randrange(256)
        self.freed = []
        if self.sync:
            self.worker.load()
        bad_now = self.worker.take_bad() if self.sync else set()
        for one, num in scheduled:
            one.num_computed_tokens += num
            one.num_in_flight_tokens += num
            self._compute(one, one.num_computed_tokens - num, one.num_computed_tokens, bad_now)
        if not self.sync:
            self.worker.load()
        self.worker.save()
        sent, received = self.worker.finished()
        failed_now = self._failed_now = self.worker.take_failed(received)
        for name in failed_now:
            for one in self.requests:
                if one.request_id == name and one.status == "loading":
                    one.num_computed_tokens = 0
                    self.num_failed += 1
        self._update(scheduled, bad_now | self.worker.take_bad(), sent, received, self.worker.report())

    def _admit(self, one: FakeRequest) -> None:
        if one.num_computed_tokens == 0 and not one.blocks:
            local = self._find(one)
            here = len(local) * SIZE
            num, beside = self.scheduler.matched(one, here)
            if num is None:
                return
            assert beside == (num > 0 and not self.sync)
            self._share(one, local)
            wanted = here + (num if beside else min(one.num_tokens - here, num + self.chunk))
            if not self._grow(one, max(wanted, 1)):
                self._give_back(one)
                return
            self.scheduler.allocated(one, one.blocks, num)
            one.num_computed_tokens, one.num_loaded = here + num, num
            self.num_shared += here
            one.status = "loading" if beside else "running"
        else:
            self.scheduler.allocated(one, one.blocks, 0)
            one.status = "running"

    def _compute(self, one: FakeRequest, start: int, end: int, bad: set[int]) -> None:
        """Fill blocks; what was there before must be right, unless it was reported."""
        if bad.intersection(one.blocks[: start // SIZE]):
            return  # rubbish comes of it, and is thrown away
        for at in range(start // SIZE):
            for plane in self.planes:
                right = content(one.all_token_ids[: (at + 1) * SIZE], plane.shape[1])
                assert torch.equal(plane[one.blocks[at]], right), f"{one.request_id}: wrong bytes in block {at}"
        for at in range(start // SIZE, end // SIZE):
            for plane in self.planes:
                plane[one.blocks[at]] = content(one.all_token_ids[: (at + 1) * SIZE], plane.shape[1])

    def _update(
        self,
        scheduled: list[tuple[FakeRequest, int]],
        bad: set[int],
        sent: set[str],
        received: set[str],
        report: Report | None,
    ) -> None:
        failed = set()
        for one in self.requests:
            if one.status not in ("running", "loading"):
                continue
            before = one.num_computed_tokens - {id(o): n for o, n in scheduled}.get(id(one), 0)
            first = next((at for at in range(-(-before // SIZE)) if one.blocks[at] in bad), None)
            if first is not None:
                one.num_computed_tokens = first * SIZE
                failed.add(one.request_id)
                self.num_failed += 1
        for one, num in scheduled:
            one.num_in_flight_tokens -= num
            if one.request_id in failed or one.num_computed_tokens < one.num_tokens:
                continue
            one.all_token_ids.append(one.next_token)
            if one.num_tokens - len(one.prompt) >= one.num_output:
                self.finish(one)
        self.scheduler.heard(report, tuple(sent), tuple(self._failed_now))
        for name in received:
            self._received(name)
        for name in sent:
            self._give_back(self.delayed.pop(name))

    def _received(self, name: str) -> None:
        aborted = self.delayed.pop(name, None)
        if aborted is not None:
            self._give_back(aborted)
            return
        one = next(o for o in self.requests if o.request_id == name)
        assert one.status == "loading", "it was not waiting"
        self.num_loaded += one.num_computed_tokens
        if one.num_computed_tokens == 0:
            self._give_back(one)
        one.status = "waiting"

    # --- ends ---------------------------------------------------------------------------------------------------------

    def finish(self, one: FakeRequest) -> None:
        """It is over, or was aborted."""
        self.requests.remove(one)
        loading, one.status = one.status == "loading", "over"
        delay = self.scheduler.finished(one, one.blocks[: one.num_computed_tokens // SIZE])
        assert not (delay and loading), "vLLM would free its blocks twice"
        if delay or loading:
            self.delayed[one.request_id] = one
        else:
            self._give_back(one)

    def _preempt(self, one: FakeRequest) -> None:
        self.num_preempted += 1
        self._give_back(one)
        one.num_computed_tokens = 0
        one.num_preemptions += 1
        one.status = "waiting"
        self.requests.remove(one)
        self.requests.insert(0, one)

    def _grow(self, one: FakeRequest, num_tokens: int) -> bool:
        missing = -(-num_tokens // SIZE) - len(one.blocks)
        if missing > len(self.free):
            return False
        new = [self.free.pop(0) for _ in range(missing)]
        for block in new:
            self.owners[block] += 1
            if self.shares:  # what was in it is lost now, and not before
                self.cached.pop(self.names.pop(block, ()), None)
                self.freed.append(block)
        one.blocks += new
        return True

    def _give_back(self, one: FakeRequest) -> None:
        self.owners.subtract(one.blocks)
        left = [block for block in one.blocks if not self.owners[block]]
        self.ownerless |= self.pinned.intersection(left)
        self._free([block for block in left if block not in self.pinned])
        one.blocks = []

    def _free(self, blocks: list[int]) -> None:
        if not self.shares:
            self.freed += blocks
        self.free += blocks

    # --- its own prefix cache -----------------------------------------------------------------------------------------

    def _find(self, one: FakeRequest) -> list[int]:
        found: list[int] = []
        while self.shares and (len(found) + 1) * SIZE < one.num_tokens:
            block = self.cached.get(tuple(one.all_token_ids[: (len(found) + 1) * SIZE]))
            if block is None:
                break
            found.append(block)
        return found

    def _share(self, one: FakeRequest, local: list[int]) -> None:
        for block in local:
            if not self.owners[block]:
                self.free.remove(block)
            self.owners[block] += 1
        one.blocks += local

    def _remember(self, one: FakeRequest, num_tokens: int) -> None:
        """Blocks that are full after this step can be found by the next one."""
        for at in range(num_tokens // SIZE if self.shares else 0):
            name, block = tuple(one.all_token_ids[: (at + 1) * SIZE]), one.blocks[at]
            if name not in self.cached:
                self.cached[name], self.names[block] = block, name

    # --- what the connector keeps from use ----------------------------------------------------------------------------

    def hold(self, blocks: Sequence[int]) -> None:
        assert self.pinned.isdisjoint(blocks), "held twice"
        assert set(self.free).isdisjoint(blocks), "too late: another may have them"
        self.pinned.update(blocks)

    def let_go(self, blocks: Sequence[int]) -> None:
        assert self.pinned.issuperset(blocks), "not held"
        self.pinned.difference_update(blocks)
        over = self.ownerless.intersection(blocks)
        self.ownerless -= over
        self._free(sorted(over))
