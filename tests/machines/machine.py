"""A hypothesis machine: several processes on one LocalStore directory against a plain model.

The model is a set of pages. With room for all of them the store must equal it after every step, in every process,
whatever was killed, stopped or reopened in between. In a tight store the model says what *may* be there, and that no
page is there without the one before it. `validate()` looks at index and slab after every step.
"""

import shutil
import tempfile
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from machines.processes import Helper, Ref

NUM_PROCESSES = 3
NUM_CHAINS = 8
MAX_DEPTH = 6
WHICH = st.integers(0, NUM_PROCESSES - 1)
CHAIN = st.integers(0, NUM_CHAINS - 1)
DEPTH = st.integers(0, MAX_DEPTH - 1)
ALL: list[Ref] = [(chain, depth) for chain in range(NUM_CHAINS) for depth in range(MAX_DEPTH)]


class LocalStoreMachine(RuleBasedStateMachine):
    """Roomy: the store holds every page of the model and no other."""

    limit_bytes = 8 << 20
    planes: tuple[int, ...] = (4096, 4096, 1000, 1000)  # 256 slots for 48 pages
    directory = "/dev/shm"
    most_kills = 6  # in an example: a process takes a second to start, and some seeds would kill and do nothing else
    _pool: ClassVar[list[Helper]] = []  # processes are costly to start: examples share them

    def __init__(self) -> None:
        super().__init__()
        self.parent = tempfile.mkdtemp(prefix="headwater-machine-", dir=self.directory)
        self.store = f"{self.parent}/store"
        while len(self._pool) < NUM_PROCESSES:
            self._pool.append(Helper())
        self.live: set[Ref] = set()
        self.held: list[set[Ref]] = [set() for _ in range(NUM_PROCESSES)]
        self.stopped: int | None = None
        self.asked = 0  # pages of the last put
        self.num_kills = 0

    @initialize()
    def open_all(self) -> None:
        """Everybody comes in; the first one makes the store."""
        for helper in self._pool:
            self.open(helper)

    def open(self, helper: Helper) -> None:
        """Have a process open the store."""
        helper("open", directory=self.store, limit_bytes=self.limit_bytes, planes=self.planes)

    def running(self, which: int) -> Helper:
        """The process asked for, or the next one if that is stopped."""
        return self._pool[(which + 1) % NUM_PROCESSES if which == self.stopped else which]

    # --- rules --------------------------------------------------------------------------------------------------------

    @rule(which=WHICH, chain=CHAIN, depth=DEPTH)
    def put(self, which: int, chain: int, depth: int) -> None:
        """Put a sequence from its start."""
        refs = [(chain, d) for d in range(depth + 1)]
        self.asked = len(refs)
        for ref, status in zip(refs, self.running(which)("put", refs=refs), strict=True):
            self.check_put(ref, status)

    @rule(which=WHICH, chain=CHAIN, more=st.integers(1, NUM_CHAINS - 1))
    def fill(self, which: int, chain: int, more: int) -> None:
        """Put several whole sequences in one batch."""
        refs = [((chain + i) % NUM_CHAINS, d) for i in range(more) for d in range(MAX_DEPTH)]
        self.asked = len(refs)
        for ref, status in zip(refs, self.running(which)("put", refs=refs), strict=True):
            self.check_put(ref, status)

    def check_put(self, ref: Ref, status: str) -> None:
        """The model's word on a put."""
        assert status == ("exists" if ref in self.live else "stored")
        self.live.add(ref)

    @rule(which=WHICH, chain=CHAIN, depth=DEPTH)
    def get(self, which: int, chain: int, depth: int) -> None:
        """Read a sequence."""
        refs = [(chain, d) for d in range(depth + 1)]
        for ref, status in zip(refs, self.running(which)("get", refs=refs), strict=True):
            self.check_get(ref, status)

    def check_get(self, ref: Ref, status: str) -> None:
        """The model's word on a read."""
        assert status == ("hit" if ref in self.live else "miss")

    @rule(which=WHICH, chain=CHAIN, depth=DEPTH)
    def delete(self, which: int, chain: int, depth: int) -> None:
        """Remove a page and all that builds on it."""
        status = self.running(which)("delete", refs=[(chain, depth)])
        self.check_delete((chain, depth), status[0])
        self.live -= {(chain, d) for d in range(depth, MAX_DEPTH)} if status[0] == "removed" else set()

    def check_delete(self, ref: Ref, status: str) -> None:
        """The model's word on a removal."""
        assert status == ("removed" if ref in self.live else "absent")

    @rule(which=WHICH, chain=CHAIN)
    def reserve(self, which: int, chain: int) -> None:
        """Hold a slot for the first page of a sequence, written but not published."""
        which = which if which != self.stopped else (which + 1) % NUM_PROCESSES
        ref = (chain, 0)
        if ref not in self.held[which]:
            status = self._pool[which]("reserve", refs=[ref])[0]
            self.check_reserve(ref, status)
            if status == "held":
                self.held[which].add(ref)

    def check_reserve(self, ref: Ref, status: str) -> None:
        """The model's word on a reservation."""
        assert status == ("exists" if ref in self.live else "held")

    @rule(which=WHICH, data=st.data())
    def settle(self, which: int, data: Any) -> None:
        """Publish or abandon a slot that is held."""
        which = which if which != self.stopped else (which + 1) % NUM_PROCESSES
        if not self.held[which]:
            return
        ref = data.draw(st.sampled_from(sorted(self.held[which])))
        self.held[which].remove(ref)
        if data.draw(st.booleans()):
            self.check_put(ref, self._pool[which]("publish", refs=[ref])[0])
        else:
            self._pool[which]("abandon", refs=[ref])

    @precondition(lambda self: self.num_kills < self.most_kills)
    @rule(which=WHICH)
    def kill(self, which: int) -> None:
        """Kill a process, with what it holds; another one takes its place."""
        self.num_kills += 1
        self._pool[which].kill()
        self.held[which].clear()
        self.stopped = None if self.stopped == which else self.stopped
        self._pool[which] = Helper()
        self.open(self._pool[which])

    @precondition(lambda self: self.stopped is None)
    @rule(which=WHICH)
    def stop(self, which: int) -> None:
        """Freeze a process between two calls; the others go on."""
        self._pool[which].stop()
        self.stopped = which

    @precondition(lambda self: self.stopped is not None)
    @rule()
    def go_on(self) -> None:
        """Thaw it."""
        if self.stopped is not None:
            self._pool[self.stopped].go_on()
            self.stopped = None

    @rule(which=WHICH)
    def reopen(self, which: int) -> None:
        """Close a store and open it again."""
        which = which if which != self.stopped else (which + 1) % NUM_PROCESSES
        self._pool[which]("close")
        self.held[which].clear()
        self.open(self._pool[which])

    @rule()
    def restart(self) -> None:
        """Everybody leaves; the first one back finds the directory as it was left."""
        self.go_on()
        for helper in self._pool:
            helper("close")
        for held in self.held:
            held.clear()
        for helper in self._pool:
            self.open(helper)

    # --- invariants ---------------------------------------------------------------------------------------------------

    @invariant()
    def everyone_sees_the_model(self) -> None:
        """What the processes believe to be there."""
        for which, helper in enumerate(self._pool):
            if which != self.stopped:
                there = helper("contains", refs=ALL)
                assert {ref for ref, held in zip(ALL, there, strict=True) if held} == self.live

    @invariant()
    def index_and_slab_agree(self) -> None:
        """The store's own view of itself."""
        assert self.running(0)("validate") == []

    def teardown(self) -> None:
        """Close the stores, keep the processes."""
        self.go_on()
        for helper in self._pool:
            helper("close")
        shutil.rmtree(self.parent, ignore_errors=True)

    @classmethod
    def end_processes(cls) -> None:
        """Kill the processes that the examples shared."""
        while cls._pool:
            cls._pool.pop().kill()


class TightStoreMachine(LocalStoreMachine):
    """Tight: pages are evicted, so the model says what may be there."""

    planes = (200_000, 7)  # 32 slots for 48 pages, of which up to 24 may be reserved

    def check_put(self, ref: Ref, status: str) -> None:
        """Held, unless the call and what is reserved come near the whole store."""
        if status in ("no_room", "no_parent"):
            assert self.asked + sum(map(len, self.held)) > 16
            return
        assert status == "stored" or (status == "exists" and ref in self.live)
        self.live.add(ref)

    def check_get(self, ref: Ref, status: str) -> None:
        """A hit only for what was put."""
        assert status == "miss" or (status == "hit" and ref in self.live)

    def check_delete(self, ref: Ref, status: str) -> None:
        """Removed only what was put."""
        assert status == "absent" or ref in self.live

    def check_reserve(self, ref: Ref, status: str) -> None:
        """There is room, or the page is there."""
        assert status == "held" or (status == "exists" and ref in self.live)

    @invariant()
    def everyone_sees_the_model(self) -> None:
        """A subset of the model, the same everywhere, and no page without the one before it."""
        views = [
            {ref for ref, held in zip(ALL, helper("contains", refs=ALL), strict=True) if held}
            for which, helper in enumerate(self._pool)
            if which != self.stopped
        ]
        assert all(view == views[0] for view in views)
        assert views[0] <= self.live
        assert all(depth == 0 or (chain, depth - 1) in views[0] for chain, depth in views[0])
