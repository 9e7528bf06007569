"""Who gives way when a request that would run finds too few slots. Decides that, and evicts nothing itself."""

from typing import Final

from headwater.cache.pinning import Pins
from headwater.cache.records import RequestRecord
from headwater.cache.saver import Saver
from headwater.index.base import PathIndex
from headwater.index.slots import DeviceSlots


class Room:
    """Makes room, in order: requests that only wait, saves of a slow store, and pins where it would never do."""

    def __init__(
        self, index: PathIndex, slots: DeviceSlots, requests: dict[str, RequestRecord], saver: Saver, pins: Pins
    ) -> None:
        self._index: Final = index
        self._slots = slots
        self._requests = requests
        self._saver = saver
        self._pins = pins

    def make(self, request: RequestRecord, num_wanted: int, now_s: float) -> None:
        """Before a request is refused so many slots, who only waits gives up its hold, the newest first.

        Then saves that wait for a slow store give up their blocks; that takes effect when the executor has heard it.
        """
        if num_wanted > self._slots.num_slots - sum(len(one.own) for one in self._requests.values()):
            return  # it could not be had if all of them gave way
        if num_wanted > self._slots.num_available:
            num_blocks = request.num_blocks if request.reserved else request.hold.num_blocks
            self._pins.make_way(num_blocks + num_wanted, request.keys, now_s)
        for other in reversed(self._requests.values()):
            if self._slots.num_available >= num_wanted:
                return
            if not other.reserved and other is not request and other.hold.num_blocks:
                self._index.release(other.hold, now_s=now_s)
                other.hold = self._index.hold([], now_s=now_s, hint=other.hold.hint)
                other.gave_way = True
        self._saver.make_way(num_wanted - self._slots.num_available)
