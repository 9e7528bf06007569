"""Who does harm to a pool in the fault campaign (`pool_faults.py`): bare clients, past every rule that our store keeps.

    vandal    does one thing for each line on its input, and answers how often it did it
    putter    removes and puts chains of the world, one whole batch after the other, until it is killed in the middle
    donor     gives memory to the pool, and is killed

The frames that a vandal puts are damaged, cut, grown, another page's, another identity's: everything but a frame that
was sealed under this very name with other contents, which digests cannot tell (rule 12).
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from headwater.lab.campaigns.pool_fault_worker import DEPTH, FRAME_BYTES, NUM_CHAINS, PLANES, world
from headwater.storage.base import Deadline
from headwater.storage.mooncake.config import MooncakeConfig, parse_url
from headwater.storage.mooncake.engine import MooncakeEngine, address_of
from headwater.testing.pages import SamplePage, sample_page

_UNFINISHED: Final = -703
_CALL_S: Final = 5.0
_JUNK: Final = "headwater-junk:"


class Vandal:
    """A bare client of a pool. Every method blocks and says how often it did what it is for."""

    def __init__(self, config: MooncakeConfig, seed: int) -> None:
        self._engine = MooncakeEngine(config)
        self._prefix = config.prefix
        self._rng = random.Random(seed)

    def damage(self, epoch: int, seconds: float) -> int:
        """Put bad bytes in the place of good ones, and pages in the place of others, one after the other."""
        until, number = Deadline.after(seconds), 0
        while not until.expired:
            page, other = self._page(epoch), self._page(epoch)
            if self._rng.random() < 0.3:
                pair = [(page, other.frame), (other, page.frame)] if page is not other else []
                number += self._replace(pair)
            else:
                number += self._replace([(page, self._spoilt(page))])
            time.sleep(0.002)
        return number

    def bad_first(self, epoch: int, share: float) -> int:
        """Bad first values for a share of the pages of a world in which nobody lives yet."""
        pages = [page for chain in range(NUM_CHAINS) for page in world(epoch, chain) if self._rng.random() < share]
        number = sum(self._replace([(page, self._spoilt(page))]) for page in pages)
        sample_page.cache_clear()
        return number

    def hog(self, seconds: float) -> int:
        """Fill all memory with junk that the master may not evict, for a while, and take it away again."""
        until, keys = Deadline.after(seconds), list[str]()
        junk = bytes(FRAME_BYTES)
        while not until.expired:
            new = [f"{_JUNK}{len(keys) + i}" for i in range(16)]
            self._put([(key, junk) for key in new])
            keys += new
            self._engine.exist(keys, _soon())  # which keeps what is there from being evicted
        removed = self._engine.remove(keys, _soon())
        return removed.count(0)

    def unfinished(self, epoch: int) -> int:
        """How many pages somebody began to put and did not finish."""
        keys = [self._key(page) for chain in range(NUM_CHAINS) for page in world(epoch, chain)]
        return sum(self._engine.size(key, _soon()) == _UNFINISHED for key in keys)

    def put_for_ever(self) -> None:
        """Remove a chain, put it, and so on: killed in the middle of a put, most of the time."""
        parent = os.getppid()
        while os.getppid() == parent:
            pages = world(0, self._rng.randrange(NUM_CHAINS))
            self._replace([(page, page.frame) for page in pages])

    def _page(self, epoch: int) -> SamplePage:
        return world(epoch, self._rng.randrange(NUM_CHAINS))[self._rng.randrange(DEPTH)]

    def _spoilt(self, page: SamplePage) -> bytes:
        rng, frame = self._rng, bytearray(page.frame)
        kinds: list[Callable[[], bytes]] = [
            lambda: _flipped(frame, rng.randrange(len(frame))),
            lambda: _flipped(frame, rng.randrange(200)),  # in the header
            lambda: bytes(frame[: rng.randrange(1, len(frame))]),
            lambda: bytes(frame) + bytes(rng.randrange(1, 5000)),
            lambda: bytes(len(frame)),
            lambda: bytes(frame[: len(frame) // 2]) + bytes(len(frame) - len(frame) // 2),  # half written
            lambda: sample_page(0, 0, plane_bytes=PLANES, identity=bytes(32)).frame,
        ]
        return rng.choice(kinds)()

    def _replace(self, pages: Sequence[tuple[SamplePage, bytes]]) -> int:
        self._engine.remove([self._key(page) for page, _ in pages], _soon())
        return self._put([(self._key(page), frame) for page, frame in pages]) if pages else 0

    def _put(self, objects: Sequence[tuple[str, bytes]]) -> int:
        views = [memoryview(frame) for _, frame in objects]
        codes = self._engine.put(
            [key for key, _ in objects], list(map(address_of, views)), list(map(len, views)), _soon()
        )
        return codes.count(0)

    def _key(self, page: SamplePage) -> str:
        return self._prefix + page.name.hex()


def _flipped(frame: bytearray, at: int) -> bytes:
    frame[at] ^= 0x40
    return bytes(frame)


def _soon() -> Deadline:
    return Deadline.after(_CALL_S)


def main() -> None:
    """Be one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["vandal", "putter", "donor"], help="how the process list shall call it")
    parser.add_argument("url")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    vandal = Vandal(parse_url(options.url), options.seed)
    sys.stdout.write('"ready"\n')
    sys.stdout.flush()
    for line in sys.stdin:  # a donor is told nothing; all of them end with their parent
        call, *arguments = json.loads(line)
        sys.stdout.write(json.dumps(getattr(vandal, call)(*arguments)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
