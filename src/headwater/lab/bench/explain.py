"""What explanations cost: per request while nobody looks, in memory with as many as are kept, and when somebody looks.

    python -m headwater.lab.bench.explain --json

A connector on a real cache of the device alone, without a model: requests ask, take slots, name their blocks, leave.
Half of each prompt was there before, half is new. Not measured: HTTP, and what an engine computes.
"""

import argparse
import json
import random
import statistics
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable
from typing import Final

from headwater.cache.cache import TieredCache
from headwater.cache.executor import NoExecutor
from headwater.cache.explanations import MOST, Explanations, Text
from headwater.cache.state import Brain
from headwater.cache.whys import Whys
from headwater.config.cache import CacheConfig
from headwater.config.serve import ExplainLevel
from headwater.core.identity import CacheIdentity, config_digest
from headwater.core.keys import BlockKey
from headwater.engine.connector import Connector
from headwater.engine.request import Request, Sampling
from headwater.index.base import Victim
from headwater.index.radix import RadixIndex
from headwater.policy import policy_by_name
from headwater.serve.explain import Explainer
from headwater.storage.base import SYSTEM_CLOCK

_BLOCK_TOKENS: Final = 16
_IDENTITY: Final = CacheIdentity(
    model="none", weights=bytes(32), config=config_digest({}), layout=bytes(32), block_tokens=_BLOCK_TOKENS
)
_TIMES: Final = 1000


class _Engine:
    """A connector that computes nothing."""

    def __init__(self, num_tokens: int) -> None:
        num_slots = 64 * num_tokens // _BLOCK_TOKENS
        config = CacheConfig(num_slots=num_slots, block_tokens=_BLOCK_TOKENS, block_bytes=1)
        self.cache = TieredCache(Brain(config), NoExecutor(), clock=SYSTEM_CLOCK)
        self.connector = Connector(self.cache, _IDENTITY)
        self._num_tokens = num_tokens
        self._dice = random.Random(1)  # noqa: S311  no secret
        self._known = self._text()

    def _text(self) -> list[int]:
        return [self._dice.randrange(1 << 17) for _ in range(self._num_tokens // 2)]

    def begin(self, number: int) -> Request:
        """A request asks and gets slots."""
        prompt = [*self._known, *self._text()]
        request = Request(name=f"req-{number}/{number:024x}", prompt=prompt, sampling=Sampling(), listen=_hears_nothing)
        self.connector.ask(request, time.monotonic())
        if not (self.connector.admit(request) and self.connector.loaded(request)):
            raise AssertionError("there is room for one")
        return request

    def end(self, request: Request) -> None:
        """Its blocks get their names, and it leaves."""
        request.num_computed = len(request.tokens)
        self.connector.commit(request)
        self.connector.release(request)


def _hears_nothing(output: object) -> None:
    pass


def _us(call: Callable[[], object]) -> float:
    """Microseconds of a call, the median of many."""
    taken = []
    for _ in range(_TIMES):
        begin_s = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin_s)
    return statistics.median(taken) * 1e6


def evictions(num_blocks: int, together: int) -> tuple[float, float]:
    """Microseconds and bytes of each evicted block that is remembered, where so many leave together."""
    index = RadixIndex(policy_by_name("lru"), block_bytes=1, num_ghosts=num_blocks)
    whys = Whys(index, "lru", {})
    rows = [
        [Victim(BlockKey(number.to_bytes(32)), 0, 0, 0, 0.0, 0) for number in range(at, at + together)]
        for at in range(0, 2 * num_blocks, together)
    ]
    tracemalloc.start()
    for at, row in enumerate(rows):
        whys.evicted(row, "req", float(at))
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    begin_s = time.perf_counter()
    for at, row in enumerate(rows):
        whys.evicted(row, "req", float(at))
    return (time.perf_counter() - begin_s) / (2 * num_blocks) * 1e6, num_bytes / num_blocks


def measure(num_tokens: int, num_requests: int) -> dict[str, float]:
    """All figures, for prompts of so many tokens."""
    engine = _Engine(num_tokens)
    tracemalloc.start()
    for number in range(num_requests):
        engine.end(engine.begin(number))
    with engine.cache.still() as brain:
        engine.cache._explanations = Explanations()
        brain.whys._evictions.clear()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(num_requests):
        engine.end(engine.begin(number))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    request = engine.begin(num_requests)
    with engine.cache.still() as brain:
        record, whys = brain.requests[f"{request.name}#0"], brain.whys
        left_us = _us(lambda: whys.left(record, 1.0))
        explained = whys.explained
    if explained is None:
        raise AssertionError("nothing was explained")
    known, text = Explanations(), Text(array("I", request.tokens), num_tokens, _IDENTITY)
    add_us = _us(lambda: known.add(explained, text))
    text_us = _us(lambda: Text(array("I", request.tokens), num_tokens, _IDENTITY))
    engine.end(request)
    asking = Explainer(
        engine.cache, block_tokens=_BLOCK_TOKENS, level=ExplainLevel.TOKENS, decode=lambda tokens: str(len(tokens))
    )
    begin_s = time.perf_counter()
    asking.explained(request.name)
    look_s = time.perf_counter() - begin_s
    begin_s = time.perf_counter()
    asking.listed(None)
    list_s = time.perf_counter() - begin_s
    evicted_us, evicted_bytes = evictions(1 << 16, 16)
    return {
        "tokens": num_tokens,
        "requests_known": min(num_requests, MOST),
        "note_us": left_us,
        "keep_us": add_us,
        "text_us": text_us,
        "request_us": left_us + add_us + text_us,
        "request_bytes": (after - before) / min(num_requests, MOST),
        "evicted_block_us": evicted_us,
        "evicted_block_bytes": evicted_bytes,
        "explain_ms": look_s * 1e3,
        "list_ms": list_s * 1e3,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256], help="of a prompt")
    parser.add_argument("--requests", type=int, default=MOST, help="that are known")
    parser.add_argument("--json", action="store_true", help="one line")
    options = parser.parse_args()
    found = [measure(tokens, options.requests) for tokens in options.tokens]
    sys.stdout.write(json.dumps(found, indent=None if options.json else 2) + "\n")


if __name__ == "__main__":
    main()
