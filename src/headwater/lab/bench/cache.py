"""`headwater bench cache`: what the brain costs an engine's thread.

A prompt whose blocks are all known is matched among ten thousand other blocks and among a million, as one run and, the
worst case, as one run per block; beside it the least a prefix cache can do in Python, one dict probe per block. Then
the rest of a request's life: reserve, commit, release, and evicting one block for each new one. No store and no bytes.
At last the threads beside the engine's: what a saved and a loaded block cost the interpreter (`interpreter.py`).
"""

import gc
import hashlib
import time
import tracemalloc
from typing import Final

from headwater.cache.cache import TieredCache
from headwater.cache.executor import NoExecutor
from headwater.cache.match import Match
from headwater.cache.state import Brain
from headwater.config.cache import CacheConfig, TierConfig
from headwater.core.errors import HeadwaterError, InvalidConfig
from headwater.core.keys import BlockKey
from headwater.lab.bench import interpreter
from headwater.lab.bench.patient import chain
from headwater.lab.bench.report import BenchReport, Samples, Tell

_ROOT: Final = BlockKey(hashlib.sha256(b"headwater bench cache").digest())
_RUN_BLOCKS: Final = 14  # of each other sequence: the mean request of a public trace
_MOST_ROUNDS: Final = 5  # through a store
_NOTES: Final = {
    "match_ms": "TieredCache.match of a prompt whose blocks are all on the device, among `others` other blocks, median",
    "match_best_ms": "the quietest repetition",
    "match_many_ms": "the same with `many` blocks known",
    "many_ratio": "match_many_ms / match_ms",
    "match_parted_ms": "the worst case: every block of the prompt is a run of its own, because other prompts end there",
    "dict_ms": "a bare dict: one probe per key until the first miss, and the list of slots, among `others`",
    "dict_ratio": "match_ms / dict_ms",
    "bytes_per_block": "memory per known block, all that the brain keeps, by tracemalloc, with a tenth of `many` known",
    "slots_ms": "reserve of one more slot by the same request, which hands out its whole table",
    "release_ms": "release of the same request",
    "save_us_per_block": "time of all our threads for a block of 16 tokens and 64 planes on its way into a store in "
    "memory, but for its bytes, with the brain's: what it takes of an interpreter that an engine shares with us",
    "load_us_per_block": "the same on its way out",
    "fill_us_per_block": "reserve and commit of a new prompt of the same length on a full device: evict, take, name",
}


def run(
    *, blocks: int = 2048, others: int = 10_000, many: int = 1_000_000, rounds: int = 51, tell: Tell | None = None
) -> BenchReport:
    """Measure. Blocks for about half a minute; raises HeadwaterError if an answer is wrong."""
    if min(blocks, others, many, rounds) < 1:
        raise InvalidConfig("blocks, others, many and rounds must be positive")
    samples = Samples()
    stages = (("few", others), ("many", many), ("parted", others))
    prompt = chain(b"%d" % 0, blocks)
    caches: dict[str, TieredCache] = {}
    for done, (stage, num_others) in enumerate(stages):
        if tell is not None:
            tell(f"{num_others:,} blocks", done, len(stages))
        caches[stage] = _cache(num_others + 2 * blocks)
        _fill(caches[stage], prompt, num_others, parted=stage == "parted")
    for i in range(rounds):  # in turns, so that all see the same machine
        for stage, cache in caches.items():
            _measure(cache, prompt, stage, f"measured {i}", samples)
    for cache in caches.values():
        cache.close()
    figures = {"bytes_per_block": _weigh(max(1, many // 10))}
    _measure_dict(prompt, others, rounds, samples)
    _measure_filling(blocks, rounds, samples)
    names = {"few": "match_ms", "many": "match_many_ms", "parted": "match_parted_ms"}
    figures |= {names[stage]: samples.median(f"{stage}_match_ms") for stage, _ in stages}
    figures["match_best_ms"] = min(samples.values["few_match_ms"])
    figures["many_ratio"] = figures["match_many_ms"] / figures["match_ms"]
    figures |= {name: samples.median(f"few_{name}") for name in ("slots_ms", "release_ms")}
    figures["dict_ms"] = samples.median("dict_ms")
    figures["dict_ratio"] = figures["match_ms"] / figures["dict_ms"]
    figures["fill_us_per_block"] = samples.median("fill_us_per_block")
    interpreter.measure(blocks, min(rounds, _MOST_ROUNDS), samples)
    figures |= {name: samples.median(name) for name in ("save_us_per_block", "load_us_per_block")}
    return BenchReport(
        command="bench cache",
        options={"blocks": blocks, "others": others, "many": many, "rounds": rounds},
        results=figures,
        notes=_NOTES,
        samples=samples.values,
    )


def _cache(num_slots: int) -> TieredCache:
    config = CacheConfig(
        num_slots=num_slots, block_tokens=64, block_bytes=1 << 20, policy="lru", tiers=(TierConfig(name="host"),)
    )
    return TieredCache(Brain(config), NoExecutor(), clock=time)


def _fill(cache: TieredCache, prompt: list[BlockKey], num_others: int, *, parted: bool) -> None:
    """Half of the others, the prompt, the other half: its blocks lie in the middle of everything."""
    starts = range(0, num_others, _RUN_BLOCKS)
    for start in starts[: len(starts) // 2]:
        _serve(cache, f"other {start}", chain(b"%d" % (start + 1), min(_RUN_BLOCKS, num_others - start)))
    if parted:
        for at in range(1, len(prompt)):
            _serve(cache, f"part {at}", prompt[:at])
    if prompt:
        _serve(cache, "prompt", prompt)
    for start in starts[len(starts) // 2 :]:
        _serve(cache, f"other {start}", chain(b"%d" % (start + 1), min(_RUN_BLOCKS, num_others - start)))


def _serve(cache: TieredCache, request: str, keys: list[BlockKey]) -> None:
    """One request from its first question to its end, everything computed that is not there."""
    match = cache.match(request, keys, root=_ROOT)
    if cache.reserve(request, len(keys), load=False) is None:
        raise HeadwaterError(f"no room for {len(keys)} blocks")
    cache.commit(request, keys[match.num_on_device :])
    cache.release(request)


def _measure(cache: TieredCache, prompt: list[BlockKey], stage: str, request: str, samples: Samples) -> None:
    keys = [BlockKey(bytes(bytearray(key))) for key in prompt]  # as a hash would give them: not the same objects
    begin_s = time.perf_counter()
    match = cache.match(request, keys, root=_ROOT)
    matched_s = time.perf_counter()
    slots = cache.reserve(request, len(prompt) + 1)
    reserved_s = time.perf_counter()
    cache.release(request)
    released_s = time.perf_counter()
    _check(match, slots, len(prompt))
    samples.add(f"{stage}_match_ms", (matched_s - begin_s) * 1e3)
    samples.add(f"{stage}_slots_ms", (reserved_s - matched_s) * 1e3)
    samples.add(f"{stage}_release_ms", (released_s - reserved_s) * 1e3)


def _check(match: Match, slots: tuple[int, ...] | None, num_blocks: int) -> None:
    if match.num_on_device != num_blocks:
        raise HeadwaterError(f"{match.num_on_device} blocks were found of {num_blocks} that are there")
    if slots is None or len(set(slots)) != num_blocks + 1:
        raise HeadwaterError("the slots of a request are not its own")


def _measure_dict(prompt: list[BlockKey], num_others: int, rounds: int, samples: Samples) -> None:
    known: dict[BlockKey, int] = {}
    for start in range(0, num_others, _RUN_BLOCKS):
        for key in chain(b"%d" % (start + 1), min(_RUN_BLOCKS, num_others - start)):
            known[key] = len(known)
    for key in prompt:
        known[key] = len(known)
    for _ in range(rounds):
        keys = [BlockKey(bytes(bytearray(key))) for key in prompt]
        begin_s = time.perf_counter()
        slots: list[int] = []
        for key in keys:
            slot = known.get(key)
            if slot is None:
                break
            slots.append(slot)
        samples.add("dict_ms", (time.perf_counter() - begin_s) * 1e3)
        if len(slots) != len(prompt):
            raise HeadwaterError("the dict lost a block")


def _measure_filling(num_blocks: int, rounds: int, samples: Samples) -> None:
    cache = _cache(4 * num_blocks)
    for i in range(rounds + 4):  # the first four fill the device
        request, keys = f"new {i}", chain(b"%d" % (-1 - i), num_blocks)
        cache.match(request, keys, root=_ROOT)
        begin_s = time.perf_counter()
        cache.reserve(request, num_blocks, load=False)
        cache.commit(request, keys)
        if i >= 4:
            samples.add("fill_us_per_block", (time.perf_counter() - begin_s) / num_blocks * 1e6)
        cache.release(request)
    cache.close()


def _weigh(num_blocks: int) -> float:
    gc.collect()
    tracemalloc.start()
    try:
        cache = _cache(num_blocks)
        _fill(cache, [], num_blocks, parted=False)
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / len(cache.brain.blocks())
    finally:
        tracemalloc.stop()
