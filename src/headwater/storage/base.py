"""The store interface: batched calls with deadlines and one result per page, and the addressable capability.

A store keeps *frames* (`layout/frame.py`) under page names. It moves bytes and takes no decisions about prefixes.
What it answers is a hint until the frame has been verified (`verified.py`). Rules every store keeps, checked by the
shipped conformance suite (`headwater.testing.stores`):

- One result per item, in the order asked; a bad item never spoils its neighbours; an empty batch is fine.
- No call outlives its deadline by more than one page's copy or one look at an index. What was not done by then is LATE,
  and published nothing. (One that is not `interruptible` cannot promise the first: executors give it up.)
- The first complete frame under a name stays until it is deleted or evicted; a second put of the name is EXISTS.
- `get_into` fills a destination of exactly the frame's size, or leaves the result at something other than HIT.
- A store that knows parents keeps no page without the one before it: a put answers NO_PARENT (pages of one put are
  taken in order), and deleting or evicting a page never leaves one behind that builds on it.
- A put that is not STORED or EXISTS is invisible, now and after a restart.
- `close` may be called twice. After it every call raises ResourceClosed.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, Self

from headwater.core.closing import Closing
from headwater.core.errors import StoreError
from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.layout.frame import PageMeta


class Clock(Protocol):
    """Where time comes from; tests bring their own (`headwater.testing.clock`)."""

    def monotonic(self) -> float:
        """Seconds that never go back, for deadlines."""
        ...

    def time(self) -> float:
        """Seconds since 1970, for recency and expiry; shared by all processes of a node."""
        ...


SYSTEM_CLOCK: Final[Clock] = time


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on a monotonic clock by which a call must have answered."""

    at_s: float
    clock: Clock = SYSTEM_CLOCK

    @classmethod
    def after(cls, seconds: float, clock: Clock = SYSTEM_CLOCK) -> Self:
        """The moment `seconds` from now."""
        return cls(clock.monotonic() + seconds, clock)

    @property
    def remaining_s(self) -> float:
        """Seconds left, never negative, and at most a day: that is what waiting can be told."""
        return min(max(0.0, self.at_s - self.clock.monotonic()), 86_400.0)

    @property
    def expired(self) -> bool:
        """Whether the moment has passed."""
        return self.clock.monotonic() >= self.at_s


class StoreFill(NamedTuple):
    """How full a store is."""

    used_bytes: int
    limit_bytes: int


class Store(Closing):
    """Keeps frames under names. All calls may come from several threads.

    What one can do besides is asked of it (`addressable`, `piecewise`, `cached_names`, `registering`, `damageable`,
    `listing`), and never of its class: what is wrapped can still do it. A store that can overrides the method, and
    answers itself.
    """

    @property
    def cheap_calls(self) -> bool:
        """Whether a call costs nothing worth batching: ask page by page, verify each while it is hot."""
        return False

    @property
    def portion_bytes(self) -> int:
        """If not 0: sealing and verifying go beside its calls, in portions from this size on."""
        return 0

    @property
    def interruptible(self) -> bool:
        """If not: what it stands on blocks as it likes, and deadlines are only looked at."""
        return True

    def addressable(self) -> "Addressable | None":
        """Its pages in place; None: they go by `put` and `get_into` alone."""
        return None

    def piecewise(self) -> "Piecewise | None":
        """Who reads pages with several threads, and says what has arrived while it does; None: they come whole."""
        return None

    def cached_names(self) -> "CachedNames | None":
        """Who says from memory what it has; None: it has to be asked."""
        return None

    def registering(self) -> "Registering | None":
        """Who may be shown memory that pages lie in; None: that is no help."""
        return None

    def damageable(self) -> "Damageable | None":
        """Who says whether it is damaged, and can be put right; None: it is as it is."""
        return None

    def listing(self) -> "Listing | None":
        """Who has a list of the pages; None: nobody, they can only be asked for by name."""
        return None

    def fill(self) -> StoreFill | None:
        """How full it is, as far as memory says; None: that would have to be asked. For people. Does not block."""
        return None

    @abstractmethod
    def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """Store sealed frames. Blocks while it copies; reads the frames only until it returns."""

    @abstractmethod
    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """Copy frames into buffers of exactly their size. The bytes are not verified: see `verified.py`."""

    def peek_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """The same as `get_into`, and counts as no use where the store keeps what is used: nobody asked for it."""
        return self.get_into(pages, deadline=deadline)

    @abstractmethod
    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> list[bool]:
        """Whether each page seems to be there. A hint: in doubt, or too late, False."""

    @abstractmethod
    def delete(self, names: Sequence[PageName], *, deadline: Deadline) -> list[Status]:
        """Remove pages by force, whatever protects them, and with each all pages that build on it."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. Idempotent."""


def portions(num_pages: int, smallest: int) -> list[int]:
    """How many pages go together where something else is done beside: few first, then twice as many, up to eight times.

    So the work beside starts early, or (backwards) ends early, and the store is seldom asked for little. The last
    portion takes what is left as well.
    """
    size = smallest = max(1, smallest)
    sizes: list[int] = []
    left = num_pages
    while left >= size + (following := min(2 * size, 8 * smallest)):
        sizes.append(size)
        left -= size
        size = following
    return [*sizes, left] if left else sizes


class Reservation(NamedTuple):
    """A slot that is this writer's alone until it is published or abandoned. `view` is the slot's memory."""

    meta: PageMeta
    view: memoryview
    slot: int
    generation: int
    lease: object  # the store's own: what keeps the slot ours


class Borrow(NamedTuple):
    """A page's memory in place. Valid only if `still_valid` says so *after* the bytes were copied out."""

    name: PageName
    view: memoryview
    slot: int
    stamp: bytes  # the header as it was when borrowed


class Piecewise(Protocol):
    """A store that reads pages with several threads at once, each page in pieces."""

    def read_pieces(
        self,
        pages: Sequence[tuple[PageName, memoryview]],
        *,
        ends: Sequence[int],
        arrived: Callable[[int, int], None],
        use: bool,
        deadline: Deadline,
    ) -> list[Status]:
        """As `get_into` (or, without `use`, `peek_into`), for pages of one size, in pieces that end at `ends`.

        `arrived(page, piece)`, by number, is called by whichever thread has just read a piece, while it is hot in that
        core's cache; in any order, and again where a page was moved meanwhile. When this returns, nobody calls it, and
        nobody writes to the buffers any more. Raises what `arrived` raises.
        """
        ...


class Registering(Protocol):
    """A store that moves pages faster where it was shown the memory that they lie in."""

    def register(self, memory: memoryview) -> bool:
        """Let it reach pages in this memory where they lie, until it is closed. False: it copies them, as before."""
        ...


class CachedNames(Protocol):
    """A store that can often say from memory what it has."""

    def contains_cached(self, names: Sequence[PageName]) -> list[bool] | None:
        """What `contains` would say, if that is in memory and up to date; None: ask. Never waits for anybody."""
        ...


class Damageable(Protocol):
    """A store that turns itself off when it finds itself damaged, and can be put right."""

    @property
    def down(self) -> StoreError | None:
        """Why it is off, or None. Looks at memory only."""
        ...

    def revive(self) -> bool:
        """Come in again. Blocks. True if the store is up."""
        ...


class PagePath(NamedTuple):
    """A page, the one before it, and its depth; `slot` is where it lies."""

    slot: int
    name: PageName
    parent: PageName
    depth: int


class Listing(Protocol):
    """A store that keeps a list of its pages."""

    def names(
        self, *, deadline: Deadline, identity: bytes | None = None, tenant: bytes | None = None
    ) -> list[PageName]:
        """Its pages, all or those of an identity, a tenant, or both. Raises StoreError."""
        ...

    def paths(self, identity: bytes, num_tokens: int, *, after: int, limit: int, deadline: Deadline) -> list[PagePath]:
        """Pages of an identity's full blocks, by slot, from behind the slot `after` on. Raises StoreError."""
        ...


class Addressable(ABC):
    """A store whose pages can be written and read in place, by a copy engine or a plain copy."""

    @abstractmethod
    def memory(self) -> memoryview | None:
        """All memory that pages lie in, to be registered with a device; None while the store is down.

        It changes when a damaged store is put right, so ask again.
        """

    @abstractmethod
    def reserve(self, pages: Sequence[tuple[PageMeta, int]], *, deadline: Deadline) -> list[Reservation | Status]:
        """Take a slot for each (page, frame bytes). Nobody else writes there until publish or abandon."""

    @abstractmethod
    def publish(self, reservations: Sequence[Reservation], *, deadline: Deadline) -> list[Status]:
        """Make written frames visible: payload first, header last, then this. Consumes the reservations."""

    @abstractmethod
    def abandon(self, reservations: Sequence[Reservation], *, deadline: Deadline) -> None:
        """Give slots back unpublished. Consumes the reservations."""

    @abstractmethod
    def borrow(self, names: Sequence[PageName], *, deadline: Deadline) -> list[Borrow | Status]:
        """Addresses of pages, without a lock: copy out, verify the copy, then ask `still_valid`."""

    @abstractmethod
    def still_valid(self, borrow: Borrow) -> bool:
        """Whether the slot has held the same page since it was borrowed."""
