"""LentCache: the cache of an engine that allocates its device by itself, over the brain of `lent.py`.

    ask       what stores have of a prompt, behind the blocks that the engine has
    promise   how many of them would be loaded now
    lend      the engine says which slots a request has, and that so many blocks are to be loaded into them
    commit, release, pace, deliver: as of any cache (`cache.py`)

After the brain failed nothing is promised, loaded or saved; what is under way is answered for until it has ended.
"""

from collections.abc import Sequence
from typing import ClassVar

from headwater.cache.cache import TieredCache
from headwater.cache.lent import LentBrain
from headwater.cache.match import Match
from headwater.cache.misses import LentMissBrain
from headwater.cache.state import Brain
from headwater.core import events as ev
from headwater.core.keys import BlockKey
from headwater.core.results import Status


class LentCache(TieredCache):
    """The cache of an engine that allocates by itself."""

    brain: LentBrain
    misses: ClassVar[type[Brain]] = LentMissBrain

    def ask(
        self,
        request: str,
        keys: Sequence[BlockKey],
        *,
        num_local: int,
        root: BlockKey,
        tenant: bytes = ev.NO_TENANT,
        resumed: bool = False,
        num_unnamed: int = 0,
    ) -> Match:
        """What is there of a prompt of which the engine has the first `num_local` blocks. Does not block.

        Ask again to see what the stores answered since. `num_unnamed`: full blocks behind the keys, where no store has
        the last key (`lacks`). Raises InvalidInput.
        """
        with self._lock:
            arrived = ev.Arrived(
                now_s=self._now_s(),
                request=request,
                keys=tuple(keys),
                root=root,
                tenant=tenant,
                resumed=resumed,
                num_local=num_local,
                num_unnamed=num_unnamed,
            )
            return self._match(arrived)

    def lacks(self, key: BlockKey) -> bool:
        """Whether all stores say from memory that they have not got a block. Does not block."""
        with self._lock:
            now_s = self._now_s()
            probes = (ev.Probe(job=0, store=tier, keys=(key,), deadline_s=now_s) for tier in self.brain.tiers)
            return all(self._executor.contains_cached(probe) == (Status.ABSENT,) for probe in probes)

    def probing(self, request: str) -> bool:
        """Whether stores are still being asked."""
        with self._lock:
            record = self.brain.requests.get(request)
            return record is not None and bool(record.probes)

    def promise(self, request: str) -> tuple[int, tuple[tuple[str, int], ...]]:
        """How many blocks would be loaded now, and how many of them from which store."""
        with self._lock:
            now_s = self._now_s()
            if request in self._old.grants:
                return 0, ()
            num = self.brain.worth(request, now_s)
            record = self.brain.requests[request]
            at = record.hold.num_blocks
            until = at + num
            found: dict[str, int] = {}
            while at < until and (store := self.brain.loader.where(record, at)) is not None:
                end = self.brain.loader.row_end(record, at, until)
                found[store] = found.get(store, 0) + end - at
                at = end
            return num, tuple(found.items())

    def lend(self, request: str, slots: Sequence[int], *, num_load: int = 0) -> int:
        """Which slots a request's first blocks have. The first time, begin to load `num_load` of them.

        Returns how many are being loaded: fewer than asked for, if stores were lost meanwhile. Later calls add slots.
        """
        with self._lock:
            lent = ev.Lent(now_s=self._now_s(), request=request, slots=tuple(slots), num_load=num_load)
            if request not in self._old.grants:
                self._handle(lent)
            if request in self._old.grants:  # since now, perhaps
                self._old.granted(request, lent.slots)
                return 0
            record = self.brain.requests[request]
            self._custody.granted(request, lent.slots)
            self._custody.named(request, record.hold.num_blocks)
            return max(0, record.load_end - record.base)

    def loading(self, request: str) -> tuple[int, ...]:
        """Jobs that load blocks of a request now."""
        with self._lock:
            if request in self._old.grants:
                return self._old.loads(request)
            return tuple(job.job for job in self.brain.requests[request].loads if job.results is None)

    def broken(self, request: str) -> bool:
        """Whether blocks that were to be loaded for a request could not be had, or will not be had in time."""
        with self._lock:
            record = self.brain.requests.get(request)
            return record is not None and (record.broken is not None or record.stuck)

    def num_named(self, request: str) -> int:
        """Blocks of a request that have their names: loaded and verified, or committed."""
        with self._lock:
            return self._progress(request).num_ready

    def reading(self, request: str) -> tuple[int, ...]:
        """Jobs that may still read blocks of a request that is here."""
        with self._lock:
            record = self.brain.requests.get(request)
            return self.brain.reading(record) if record is not None else self._old.reads(request)
