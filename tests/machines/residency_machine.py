"""A hypothesis machine over a residency index: nodes commit, save, evict and crash, and what they say gets lost.

The model is what each node holds. Updates go through JSON over links that lose them, lose the answer, double them, or
bring them when their process is long dead. Checked after every move: the index claims no block of a node that was not
there in the epoch it has heard of, and knows nobody whose lease is over. Checked at the end, and now and then: when all
that live have said what they have to say, and were heard, it holds exactly what they hold.

`Ear` is the same for a real cache: what it says goes into a book and on to an index, without a thread.
"""

import json
import random
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Final

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from headwater.core.events import Removed, Stored, TierLost
from headwater.core.keys import BlockKey
from headwater.residency.base import Found, Residency
from headwater.residency.book import Book
from headwater.residency.events import TIERS, Applied, Update, decode, encode
from headwater.residency.memory import MemoryResidency
from headwater.residency.session import ResidencySession
from headwater.storage.base import Deadline
from headwater.testing.clock import FakeClock
from machines.index_machine import NOBODY, path_keys

NODES: Final = ("a", "b", "c d\u00e9")
STORES: Final = ("host", "disk", "pool")
LEASE_S: Final = 9.0
DEPTH: Final = 4
PATHS: Final = tuple("".join(path) for path in product("01", repeat=DEPTH))
MOVES: Final = (
    *("commit", "commit", "commit", "save", "save", "promote", "evict", "evict", "shed", "lose_tier"),
    *("speak", "speak", "speak", "speak", "speak_all", "speak_all", "late", "crash", "start", "start", "leave"),
    *("wait", "forget", "settle"),
)
moves = st.lists(
    st.tuples(st.sampled_from(MOVES), st.sampled_from(NODES), st.sampled_from(PATHS), st.integers(0, 1 << 16)),
    min_size=4,
    max_size=12,
)


class Backend(ABC):
    """An index whose time and memory the machine rules."""

    residency: Residency
    slowed: float = 1.0  # where its own clock cannot be stopped: how much longer leases are there

    @abstractmethod
    def advance(self, seconds: float) -> None:
        """Time passes for leases."""

    @abstractmethod
    def forget(self) -> None:
        """The index is restarted, and knows nothing."""


class MemoryBackend(Backend):
    """The index in this process."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.residency = MemoryResidency(clock=clock)

    def advance(self, seconds: float) -> None:
        """The index has our clock."""

    def forget(self) -> None:
        self.residency = MemoryResidency(clock=self._clock)


def soon() -> Deadline:
    """Enough time for any call."""
    return Deadline.after(20)


def states(residency: Residency, keys: Sequence[BlockKey]) -> dict[tuple[str, BlockKey], int]:
    """What an index claims of each block by itself: tiers, by node and block."""
    claimed: dict[tuple[str, BlockKey], int] = {}
    for key in keys:
        found = residency.lookup([key], deadline=soon())
        assert found.answered
        for one in found.holders:
            claimed[one.node, key] = sum(bit for name, bit in TIERS.items() if getattr(one, name))
    return claimed


class NodeLife:
    """One life of a node."""

    def __init__(self, node: str, epoch: int) -> None:
        self.book = Book()
        self.session = ResidencySession(
            self.book, node=node, epoch=epoch, lease_s=LEASE_S, round_every_s=10 * LEASE_S, slice_blocks=4
        )


class Ear:
    """Stands in for a Publisher: tells an index what a cache says, when it is told to."""

    def __init__(self, residency: Residency, clock: FakeClock, node: str = "ear") -> None:
        self.residency = residency
        self.process = NodeLife(node, 1)
        self.heard: list[Stored | Removed | TierLost] = []
        self._clock = clock

    def offer(self, moves: Sequence[Stored | Removed | TierLost]) -> None:
        """Write it down."""
        self.heard += moves
        book = self.process.book
        for move in moves:
            if isinstance(move, Stored):
                book.came(TIERS[move.tier], move.keys, move.parent, move.depth)
            elif isinstance(move, Removed):
                book.went(TIERS[move.tier], move.keys)
            else:
                book.went(TIERS[move.tier], book.blocks())

    def tell(self) -> None:
        """Say everything that is to be said."""
        session = self.process.session
        while (update := session.next(self._clock.monotonic())) is not None:
            session.heard(self.residency.apply(update, deadline=soon()), self._clock.monotonic())


class ResidencyMachine(RuleBasedStateMachine):
    """Three nodes, an index, and links between them."""

    def __init__(self, backend: type[Backend] | None = None) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.backend = backend() if backend is not None else MemoryBackend(self.clock)
        self.processes: dict[str, NodeLife] = {}
        self.epochs: defaultdict[str, set[int]] = defaultdict(set)  # that were used
        self.truth: dict[tuple[str, str], set[BlockKey]] = {(n, tier): set() for n in NODES for tier in TIERS}
        self.ever: defaultdict[tuple[str, int, BlockKey], int] = defaultdict(int)  # by node, epoch, block
        self.under_way: list[Update] = []
        self.quiet_s: defaultdict[str, float] = defaultdict(float)  # since a node was last heard
        self.where: dict[BlockKey, tuple[BlockKey, int]] = {}
        for path in PATHS:
            keys = path_keys([int(token) for token in path])
            for depth, key in enumerate(keys):
                self.where[key] = (keys[depth - 1] if depth else NOBODY, depth)

    @rule(moves=moves)
    def bustle(self, moves: list[tuple[str, str, str, int]]) -> None:
        """Several moves, each at a node, on a path; the dice decide the rest."""
        for name, node, path, number in moves:
            getattr(self, name)(node, path, random.Random(number))
            self.check()

    # --- what nodes hold ----------------------------------------------------------------------------------------------

    def came(self, node: str, tier: str, keys: Sequence[BlockKey]) -> None:
        """Blocks in a row came to a tier; the process says so."""
        self.truth[node, tier].update(keys)
        process = self.processes[node]
        for key in keys:
            self.ever[node, process.session.epoch, key] |= TIERS[tier]
        if keys:
            parent, depth = self.where[keys[0]]
            process.book.came(TIERS[tier], keys, parent, depth)

    def went(self, node: str, tier: str, keys: Sequence[BlockKey]) -> None:
        """Blocks left a tier; the process says so."""
        self.truth[node, tier].difference_update(keys)
        self.processes[node].book.went(TIERS[tier], keys)

    def commit(self, node: str, path: str, dice: random.Random) -> None:
        """A request computed the rest of its path, or some of it; that it ends is nobody's business."""
        if node not in self.processes:
            return self.start(node, path, dice)
        keys = path_keys([int(token) for token in path[: dice.randint(1, DEPTH)]])
        there = self.truth[node, "device"]
        return self.came(node, "device", [key for key in keys if key not in there])

    def save(self, node: str, path: str, dice: random.Random) -> None:
        """A store took what is on the device of a path."""
        if node in self.processes:
            there = self.truth[node, "device"]
            keys = [key for key in path_keys([int(token) for token in path]) if key in there]
            self.came(node, dice.choice(STORES), keys)

    def promote(self, node: str, path: str, dice: random.Random) -> None:
        """What a store has comes to the device, up to the first hole."""
        if node in self.processes:
            store, there = self.truth[node, dice.choice(STORES)], self.truth[node, "device"]
            for key in path_keys([int(token) for token in path]):
                if key not in store and key not in there:
                    break
                if key not in there:
                    self.came(node, "device", [key])

    def evict(self, node: str, path: str, dice: random.Random) -> None:
        """Leaves leave the device."""
        for _ in range(dice.randint(1, 6)):
            there = self.truth[node, "device"]
            leaves = sorted(there - {self.where[key][0] for key in there})
            if node in self.processes and leaves:
                self.went(node, "device", [dice.choice(leaves)])

    def shed(self, node: str, path: str, dice: random.Random) -> None:
        """A store lost some blocks, and the process found out."""
        tier = dice.choice(STORES)
        there = sorted(self.truth[node, tier])
        if node in self.processes and there:
            self.went(node, tier, dice.sample(there, dice.randint(1, len(there))))

    def lose_tier(self, node: str, path: str, dice: random.Random) -> None:
        """A store was lost whole."""
        if node in self.processes and dice.random() < 0.3:
            self.went(node, "host", sorted(self.truth[node, "host"]))

    # --- what they say ------------------------------------------------------------------------------------------------

    def speak(self, node: str, path: str, dice: random.Random) -> None:
        """A node says one thing: it arrives or not, once or twice, and the answer comes back or not."""
        process = self.processes.get(node)
        update = process.session.next(self.clock.monotonic()) if process is not None else None
        if process is None or update is None:
            return
        how = dice.choice(("well", "well", "well", "lost", "answer lost", "twice", "delayed", "lied"))
        answer = Applied.FAILED
        if how in ("well", "answer lost", "twice"):
            answer = self.deliver(update)
        if how == "twice":
            assert self.deliver(update) is not Applied.APPLIED
        if how == "delayed":
            self.under_way.append(update)
        if how == "answer lost":
            answer = Applied.FAILED
        if how == "lied":  # the link says that it was heard, and it was not: the next thing that is heard shows it
            answer = Applied.APPLIED
        self.hear(process, answer)

    def speak_all(self, node: str, path: str, dice: random.Random) -> None:
        """A node says everything it has to say; most of it arrives."""
        for _ in range(dice.randint(2, 12)):
            self.speak(node, path, dice)

    def hear(self, process: NodeLife, answer: Applied) -> None:
        """A process hears an answer; if somebody was here with a later epoch, it goes on under a newer one."""
        session = process.session
        session.heard(answer, self.clock.monotonic())
        if session.fenced and not session.accepted:
            known = self.backend.residency.last_epoch(session.node, deadline=soon())
            self.rename(process, max(known or 0, session.epoch) + 1)

    def rename(self, process: NodeLife, epoch: int) -> None:
        """A process takes a newer epoch: what it holds was there in that one too."""
        node, before = process.session.node, process.session.epoch
        process.session.outbid(epoch)
        self.epochs[node].add(epoch)
        for (name, old, key), bits in list(self.ever.items()):
            if (name, old) == (node, before):
                self.ever[node, epoch, key] |= bits

    def deliver(self, update: Update) -> Applied:
        """An update arrives."""
        copy = decode(json.loads(json.dumps(encode(update))))
        assert copy == update
        patient = replace(copy, lease_s=copy.lease_s * self.backend.slowed)
        answer = self.backend.residency.apply(patient, deadline=soon())
        assert answer is not Applied.FAILED
        if answer in (Applied.APPLIED, Applied.RESYNC):
            self.quiet_s[update.node] = 0.0
        return answer

    def late(self, node: str, path: str, dice: random.Random) -> None:
        """Something arrives long after it was said, perhaps of a process that is dead."""
        if self.under_way:
            self.deliver(self.under_way.pop(dice.randrange(len(self.under_way))))

    # --- who lives ----------------------------------------------------------------------------------------------------

    def crash(self, node: str, path: str, dice: random.Random) -> None:
        """A process dies: its device is gone, its stores keep what they have."""
        if dice.random() < 0.5 and self.processes.pop(node, None) is not None:
            self.truth[node, "device"].clear()

    def start(self, node: str, path: str, dice: random.Random) -> None:
        """A process starts, and asks its stores what they hold. Its clock may be behind."""
        if node in self.processes:
            return
        used = self.epochs[node]
        epoch = max(used, default=100) + dice.choice((10, 10, 10, 50, -3))
        self.processes[node] = NodeLife(node, epoch if epoch not in used else max(used) + 1)
        used.add(self.processes[node].session.epoch)
        for tier in STORES:
            for key in sorted(self.truth[node, tier], key=lambda key: self.where[key][1]):
                self.came(node, tier, [key])

    def leave(self, node: str, path: str, dice: random.Random) -> None:
        """A process ends in good order."""
        process = self.processes.get(node)
        if process is None or dice.random() < 0.7:
            return
        process.session.leave()
        answer = Applied.STALE
        while (update := process.session.next(self.clock.monotonic())) is not None:
            answer = self.deliver(update)
            process.session.heard(answer, self.clock.monotonic())
        del self.processes[node]
        self.truth[node, "device"].clear()
        if answer is Applied.APPLIED:
            assert not any(one.name == node for one in self.backend.residency.nodes(deadline=soon()) or ())

    def wait(self, node: str, path: str, dice: random.Random) -> None:
        """Time passes: a moment, or more than a lease."""
        self.pass_time(dice.choice((1.0, LEASE_S / 3, LEASE_S + 1.0)))

    def pass_time(self, seconds: float) -> None:
        """Time passes for everybody."""
        self.clock.advance(seconds)
        self.backend.advance(seconds)
        for name in NODES:
            self.quiet_s[name] += seconds

    def forget(self, node: str, path: str, dice: random.Random) -> None:
        """The index is restarted."""
        if dice.random() < 0.3:
            self.backend.forget()

    # --- what must be true --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """No claim of what was never there, none of a node that is silent."""
        residency = self.backend.residency
        epochs = {node: residency.last_epoch(node, deadline=soon()) or 0 for node in NODES}
        for (node, key), bits in states(residency, list(self.where)).items():
            assert not bits & ~self.ever[node, epochs[node], key], "a claim of what was never there"
            assert self.quiet_s[node] < LEASE_S, "a claim of a node that is silent"

    def settle(self, node: str, path: str, dice: random.Random) -> None:
        """Everybody who lives says everything, and is heard: then the index is the truth."""
        self.pass_time(LEASE_S / 3)  # so that nobody has nothing to say
        for process in self.processes.values():
            while (update := process.session.next(self.clock.monotonic())) is not None:
                self.hear(process, self.deliver(update))
            assert process.session.settled or process.session.fenced
        self.check_whole()

    def check_whole(self) -> None:
        """Of live nodes the index claims what is there, block by block and path by path."""
        claimed = states(self.backend.residency, list(self.where))
        for node in [name for name, process in self.processes.items() if not process.session.fenced]:
            for key in self.where:
                there = sum(bit for tier, bit in TIERS.items() if key in self.truth[node, tier])
                assert claimed.get((node, key), 0) == there, "the index is not the truth"
        for path in PATHS[:: DEPTH + 1]:
            keys = path_keys([int(token) for token in path])
            _check_prefixes(self.backend.residency.lookup(keys, deadline=soon()), keys, claimed)
        nodes = {one.name: one for one in self.backend.residency.nodes(deadline=soon()) or ()}
        assert all(not nodes[name].doubtful for name, one in self.processes.items() if not one.session.fenced)

    def teardown(self) -> None:
        """Everything is put right; then the dead are forgotten."""
        self.settle("a", "", random.Random(0))
        self.processes.clear()
        self.pass_time(LEASE_S + 1.0)
        assert states(self.backend.residency, list(self.where)) == {}
        self.backend.residency.close()


def _check_prefixes(found: Found, keys: Sequence[BlockKey], claimed: dict[tuple[str, BlockKey], int]) -> None:
    """A look-up of a path says the same as one of each block."""

    def longest(tiers: int, nodes: Sequence[str]) -> int:
        held = [any(claimed.get((node, key), 0) & tiers for node in nodes) for key in keys]
        return next((i for i, one in enumerate(held) if not one), len(held))

    nodes = sorted({node for node, _ in claimed})
    assert found.num_blocks == len(keys)
    assert {one.node for one in found.holders} == {node for node in nodes if claimed.get((node, keys[0]))}
    assert [one.num_blocks for one in found.holders] == sorted((one.num_blocks for one in found.holders), reverse=True)
    for one in found.holders:
        assert one.num_blocks == longest(sum(TIERS.values()), [one.node])
        for tier, bit in TIERS.items():
            assert getattr(one, tier) == longest(bit, [one.node])
    assert found.pool == longest(TIERS["pool"], nodes)
