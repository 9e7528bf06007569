"""Removes blocks from the stores of a worker because somebody wants them gone: what a prefix leads to, or a tenant.

First what is being written now is waited for, in whatever thread: otherwise it might come after. The brain sees to it
that no such write begins meanwhile (`cache/purging.py`).

A store with a list of its pages says which of them build on a block. One without is told to remove those that any list
here has, or the caller knows of; that others may be there is said, and not hidden. Other processes may write the same
blocks to a shared store at any time: nothing here keeps them from it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from headwater.core.events import PurgeBegan
from headwater.core.keys import BlockKey
from headwater.core.page import KEY_BYTES, PageName
from headwater.core.results import Status, TierPurge
from headwater.storage.base import Clock, Deadline, Listing
from headwater.transfer.executor.ledger import Ledger
from headwater.transfer.executor.tier import Naming, TierStore
from headwater.transfer.executor.trouble import StoreTrouble, calling, require

_PORTION: Final = 4096  # pages of a list, at a time
_ANSWERS: Final = frozenset({Status.REMOVED, Status.ABSENT, Status.LATE, Status.FAILED})
_UNLISTED: Final = (
    "it keeps no list of its pages: those that other nodes wrote there, and nobody here knows of, stay until they leave"
)


class StorePurger:
    """Calls the stores in the caller's thread. Changes nothing of the worker's."""

    def __init__(self, tiers: Mapping[str, TierStore], ledger: Ledger, naming: Naming, *, clock: Clock) -> None:
        self._tiers = tiers
        self._ledger = ledger
        self._naming = naming
        self._clock = clock

    def purge(
        self, order: PurgeBegan, stores: Sequence[str], known: Iterable[BlockKey], timeout_s: float
    ) -> list[TierPurge]:
        """Remove an order's blocks from these stores; `known`: blocks among them that are known of. Blocks.

        Raises nothing: what could not be done is said, store by store.
        """
        deadline = Deadline.after(timeout_s, self._clock)
        writing = self._ledger.await_writes(deadline)
        listed: dict[str, list[PageName]] = {}
        trouble: dict[str, str] = {}
        names = dict.fromkeys(self._naming.names([*order.keys[-1:], *known]))
        for store in stores:
            tier = self._tiers[store]
            try:
                with calling(store):
                    listing = tier.store.listing()
                    if listing is not None:
                        listed[store] = self._listed(listing, order, deadline)
                        names |= dict.fromkeys(listed[store])
            except StoreTrouble as error:
                trouble[store] = str(error)
        found: list[TierPurge] = []
        for store in stores:
            if store in trouble:
                found.append(TierPurge(tier=store, unreached=trouble[store]))
                continue
            unreached = "" if store in listed else _UNLISTED
            if store in writing:
                unreached = "a write that began before has not ended: purge again when the store answers"
            found.append(self._remove(self._tiers[store], listed.get(store, list(names)), unreached, deadline))
        return found

    def _remove(self, tier: TierStore, names: Sequence[PageName], unreached: str, deadline: Deadline) -> TierPurge:
        if tier.damageable is not None and tier.damageable.down is not None:
            why = f"it is off ({tier.damageable.down}): what it holds is there again when it is revived, so purge again"
            return TierPurge(tier=tier.name, unreached=why)
        try:
            with calling(tier.name):
                results = list(tier.store.delete(names, deadline=deadline)) if names else []
            require(tier.name, results, len(names), _ANSWERS)
        except StoreTrouble as error:
            return TierPurge(tier=tier.name, num_left=len(names), unreached=str(error))
        num_left = sum(result in (Status.LATE, Status.FAILED) for result in results)
        return TierPurge(
            tier=tier.name, num_removed=results.count(Status.REMOVED), num_left=num_left, unreached=unreached
        )

    def _listed(self, listing: Listing, order: PurgeBegan, deadline: Deadline) -> list[PageName]:
        """The pages of a store that are to go."""
        if not order.keys:
            return listing.names(deadline=deadline, identity=self._naming.identity, tenant=order.tenant)
        target, depth = order.keys[-1], len(order.keys) - 1
        behind: dict[bytes, list[PageName]] = {}
        doomed: list[PageName] = []
        after, num_tokens = -1, self._naming.layout.block_tokens
        while rows := listing.paths(self._naming.identity, num_tokens, after=after, limit=_PORTION, deadline=deadline):
            after = rows[-1].slot
            for row in rows:
                if row.name[:KEY_BYTES] == target:
                    doomed.append(row.name)
                elif row.depth > depth:
                    behind.setdefault(row.parent[:KEY_BYTES], []).append(row.name)
        keys = [bytes(target)]
        for key in keys:  # it grows
            following = behind.pop(key, [])
            doomed += following
            keys += dict.fromkeys(name[:KEY_BYTES] for name in following)
        return doomed
