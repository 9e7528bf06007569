"""ReshardedStore: what other tensor-parallel sizes wrote, as pages of the reader's own. A view of a store, read only.

A page of the reader's is put together from those pages of the writer's that its heads are in (`layout/reshard.py`).
Each of them is verified as what it is, on a private copy (rules 4, 5), and thrown out by force if it is bad (rule 8);
only then are its bytes copied, and the result is sealed under the reader's own name. So what comes out is read like a
page of any other store, and what cannot be put together from proven bytes is a miss.

Which size the writer had is found out by asking for the first block at all sizes in one call; the size that was found
last is tried first. Use it as a tier of its own behind the store it looks at, never written to (`SaveWhen.NEVER`): a
block that came from it is then saved at the reader's size by the ordinary rules, its prefix before it.

Not here: pages of the reader's own size (the store itself has them), threads, decisions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from headwater.core.errors import InvalidInput, ResourceClosed
from headwater.core.page import KEY_BYTES, PageName, page_name
from headwater.core.results import BAD_PAGE, Status
from headwater.layout.frame import PageMeta, frame_bytes, header_bytes, parse, seal
from headwater.layout.reshard import Plan, Source, copy_strips, part_number, plans
from headwater.layout.shard import Part
from headwater.layout.spec import KVLayout
from headwater.metrics import Metrics
from headwater.storage.base import SYSTEM_CLOCK, Clock, Deadline, Store
from headwater.storage.verified import VerifiedStore
from headwater.storage.wrappers import OpaqueStore

SIZES: Final = (1, 2, 4, 8)  # of the groups that are looked for, where nobody says
_SCRATCH_BYTES: Final = 64 << 20  # of pages that one call has in hand
_NEVER: Final = 1 << 62  # bad pages until a reader in here turns itself off: who reads the view does that


@dataclass(frozen=True, slots=True)
class _Lot:
    """Pages of one size that are read in one call, and their places among a plan's sources."""

    reader: VerifiedStore
    places: tuple[int, ...]


class ReshardedStore(OpaqueStore):
    """One page of one rank, out of what groups of other sizes wrote: nowhere does it lie as it is read.

    Does not own the store inside.
    """

    def __init__(
        self,
        store: Store,
        layout: KVLayout,
        part: Part,
        *,
        identity: bytes,
        sizes: Sequence[int] = SIZES,
        metrics: Metrics | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`layout` is the unsharded one, `part` what the reader reads as. `sizes`: the writers', without the reader's.

        Sizes at which ranks cannot share the layout are left out. Raises InvalidLayout if `part` is no part of it.
        """
        super().__init__(store)
        self._part = part
        self._number = part_number(part, layout)
        self._header_bytes = header_bytes(len(part.layout.planes))
        self._frame_bytes = frame_bytes(part.layout.plane_bytes)
        self._identity = identity
        self._metrics = metrics if metrics is not None else Metrics()
        self._clock = clock
        self._plans = plans(layout, part, sizes)
        self._lots = [self._cut_into_lots(plan) for plan in self._plans]
        self._found = 0  # the plan that was right last
        self._closed = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that are looked for; of those that write the same pages, the first."""
        return tuple(plan.tp_size for plan in self._plans)

    def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """REFUSED for each page: a view is not written to."""
        self._require_open()
        return [Status.REFUSED] * len(pages)

    def delete(self, names: Sequence[PageName], *, deadline: Deadline) -> list[Status]:
        """ABSENT for each page: bad ones were thrown out where they are, and the rest is not ours to remove."""
        self._require_open()
        return [Status.ABSENT] * len(names)

    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> list[bool]:
        """Whether all pages that each is made of seem to be there, at one size. One call, and one more for a row."""
        self._require_open()
        ours = [name for name in names if self._is_ours(name)]
        if not ours:
            return [False] * len(names)
        (sizes,) = self._held(ours[:1], range(len(self._plans)), deadline)  # those at which the first block is there
        self._remember(sizes)
        held = {ours[0]: bool(sizes)}
        if sizes:
            held.update(zip(ours[1:], map(bool, self._held(ours[1:], sizes, deadline)), strict=True))
        return [held.get(name, False) for name in names]

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        """Put pages together in buffers of exactly their frames' size. One call of the store per shape of source page.

        Where the size is another than was found last: that try in vain, and one call to find out.
        """
        self._require_open()
        for _, buffer in pages:
            if len(buffer) != self._frame_bytes:
                raise InvalidInput(f"a page of this layout has a frame of {self._frame_bytes} bytes, not {len(buffer)}")
        results = [Status.MISS] * len(pages)
        todo = [i for i, (name, _) in enumerate(pages) if self._is_ours(name)]
        tried: set[int] = set()
        while todo and len(tried) < len(self._plans):
            at = self._found
            if at in tried:  # the blocks that are left were written at another size, or not at all
                others = [i for i in range(len(self._plans)) if i not in tried]
                (held,) = self._held([pages[todo[0]][0]], others, deadline)
                if not held:
                    break
                self._remember(held)
                at = held[0]
            tried.add(at)
            for i, status in zip(todo, self._read(at, [pages[i] for i in todo], deadline), strict=True):
                results[i] = status
            todo = [i for i in todo if results[i] is Status.MISS]
        return results

    def close(self) -> None:
        """Read no more. The store inside stays open: others use it."""
        self._closed = True

    # --- finding ------------------------------------------------------------------------------------------------------

    def _is_ours(self, name: PageName) -> bool:
        key, shard = name[:KEY_BYTES], self._part.shard
        return name == page_name(key, shard.index, shard.count, part=self._number)

    def _held(self, names: Sequence[PageName], sizes: Sequence[int], deadline: Deadline) -> list[list[int]]:
        """For each page the plans whose sources are all there. One call of the store."""
        wanted = [_name(name, source) for name in names for at in sizes for source in self._plans[at].sources]
        there = dict(zip(wanted, self.store.contains(wanted, deadline=deadline), strict=True)) if wanted else {}
        return [
            [at for at in sizes if all(there[_name(name, source)] for source in self._plans[at].sources)]
            for name in names
        ]

    def _remember(self, found: Sequence[int]) -> None:
        if found and self._found not in found:
            self._found = found[0]

    # --- reading ------------------------------------------------------------------------------------------------------

    def _cut_into_lots(self, plan: Plan) -> list[_Lot]:
        """Sources of one shape are read together: all shards of a size are."""
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for place, source in enumerate(plan.sources):
            by_shape.setdefault(source.part.layout.plane_bytes, []).append(place)
        return [
            # What it finds is counted once, by who reads the view.
            _Lot(
                VerifiedStore(
                    self.store, identity=self._identity, plane_bytes=shape, clock=self._clock, max_bad=_NEVER
                ),
                tuple(places),
            )
            for shape, places in by_shape.items()
        ]

    def _read(self, at: int, pages: Sequence[tuple[PageName, memoryview]], deadline: Deadline) -> list[Status]:
        per_page = sum(frame_bytes(source.part.layout.plane_bytes) for source in self._plans[at].sources)
        portion = max(1, _SCRATCH_BYTES // per_page)
        results: list[Status] = []
        for start in range(0, len(pages), portion):
            results += self._read_portion(at, pages[start : start + portion], deadline)
        return results

    def _read_portion(self, at: int, pages: Sequence[tuple[PageName, memoryview]], deadline: Deadline) -> list[Status]:
        results = [Status.HIT] * len(pages)
        metas: list[list[PageMeta]] = [[] for _ in pages]
        for lot in self._lots[at]:
            going = [i for i, status in enumerate(results) if status is Status.HIT]
            # Fresh memory each time: a store that writes to a buffer after it answered spoils nobody's.
            asked = [
                (i, self._plans[at].sources[place], memoryview(bytearray(lot.reader.frame_bytes)))
                for i in going
                for place in lot.places
            ]
            wanted = [(_name(pages[i][0], source), frame) for i, source, frame in asked]
            got = lot.reader.get_into(wanted, deadline=deadline)
            for (i, source, frame), (name, _), status in zip(asked, wanted, got, strict=True):
                if status in BAD_PAGE:
                    self._metrics.event("bad_source_page", fault=status.value, name=name.hex())
                if status is not Status.HIT:
                    results[i] = status if results[i] is Status.HIT else results[i]
                elif not isinstance(header := parse(frame), Status):  # it was verified, in memory that is only ours
                    metas[i].append(header.meta)
                    copy_strips(frame[header.header_bytes :], pages[i][1][self._header_bytes :], source.strips)
        for i, status in enumerate(results):
            if status is Status.HIT:
                results[i] = self._seal(pages[i][1], metas[i], len(self._plans[at].sources))
                if results[i] is not Status.HIT:  # intact pages that contradict each other: nobody knows which lies
                    doomed = [_name(pages[i][0], source) for source in self._plans[at].sources]
                    self.store.delete(doomed, deadline=deadline)
        return results

    def _seal(self, frame: memoryview, metas: Sequence[PageMeta], num_sources: int) -> Status:
        """Seal what was put together under the reader's name, if all that it is made of say the same of the block."""
        said = {(meta.parent, meta.depth, meta.valid_tokens, meta.tenant) for meta in metas}
        if len(metas) != num_sources or len(said) != 1 or metas[0].valid_tokens > self._part.layout.block_tokens:
            return Status.FOREIGN
        expiries = [meta.expires_at_ms for meta in metas if meta.expires_at_ms]
        meta = replace(
            metas[0],
            shard_index=self._part.shard.index,
            shard_count=self._part.shard.count,
            part=self._number,
            expires_at_ms=min(expiries, default=0),
        )
        seal(frame, meta, self._part.layout, now_ms=int(self._clock.time() * 1000))
        return Status.HIT

    def _require_open(self) -> None:
        if self._closed:
            raise ResourceClosed("the view is closed")


def _name(name: PageName, source: Source) -> PageName:
    """The page of a source that belongs to the block of one of the reader's pages."""
    shard = source.part.shard
    return page_name(name[:KEY_BYTES], shard.index, shard.count, part=source.number)
