"""Brains that only miss: what a cache thinks with after its brain has failed.

They give slots out and take them back, and that is all: no block is known, no store is asked, nothing is written. So
an engine goes on computing, as without a cache.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from headwater.cache.lent import LentBrain
from headwater.cache.match import BlockStatus
from headwater.cache.records import RequestRecord
from headwater.cache.state import Brain
from headwater.config.cache import CacheConfig
from headwater.core import events as ev
from headwater.core.keys import BlockKey
from headwater.core.results import Reason
from headwater.index.base import PathIndex
from headwater.index.lent import LentIndex
from headwater.index.slots import DeviceSlots, SlotState


class MissBrain(Brain):
    """In place of a Brain. Slots are counted; blocks are their request's as long as it runs, and nobody else's."""

    def __init__(self, config: CacheConfig, *, withheld: Collection[int] = (), first_job: int = 1) -> None:
        super().__init__(replace(config, tiers=()), withheld=withheld, first_job=first_job)

    def _device(self, config: CacheConfig) -> tuple[PathIndex, DeviceSlots]:
        return LentIndex(num_marks=0), DeviceSlots(config.num_slots, None)

    def _arrived(self, event: ev.Arrived) -> None:
        super()._arrived(event)
        self.requests[event.request].unasked["brain"] = Reason.FAILED

    def _status(self, request: RequestRecord, at: int) -> tuple[BlockStatus, str | None]:
        return BlockStatus.MISS, None

    def _enter(self, request: RequestRecord, keys: Sequence[BlockKey], now_s: float, *, seen: bool = False) -> None:
        """They get their names for as long as the request runs; their slots stay its own."""
        start = request.hold.num_blocks - request.base
        self.index.extend(request.hold, keys, request.own[start : start + len(keys)], now_s=now_s)
        self._forget_pending(request.request, keys)

    def validate(self) -> None:
        """Raise AssertionError if the state contradicts itself. Reads everything."""
        self.index.validate()
        self.slots.validate()
        own = [slot for request in self.requests.values() for slot in request.own]
        counts = self.slots.counts()
        assert len(set(own)) == len(own) == counts[SlotState.OWN], "slots that are nobody's, or two requests'"
        assert counts[SlotState.QUARANTINED] == len(self.withheld), "slots that nobody will free"
        assert not list(self.jobs), "a job"


class LentMissBrain(LentBrain):
    """In place of a LentBrain."""

    def __init__(self, config: CacheConfig, *, withheld: Collection[int] = (), first_job: int = 1) -> None:
        super().__init__(replace(config, tiers=()), first_job=first_job)
