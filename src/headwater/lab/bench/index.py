"""`headwater bench index`: what it costs to name the blocks of a long prompt.

Our chained keys beside the least that any chained SHA-256 can cost in Python: a bare hashlib loop over the same array.
"""

import hashlib
import struct
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from headwater.core.errors import HeadwaterError, InvalidConfig
from headwater.core.keys import BlockKey, Extra, block_keys
from headwater.lab.bench.report import BenchReport, Samples, Tell

_ROOT: Final = BlockKey(hashlib.sha256(b"headwater bench").digest())
_IMAGE_TOKENS: Final = 576
_NOTES: Final = {
    "hash_ms": "block_keys over a numpy u32 array, median",
    "hashlib_ms": "bare loop of chained hashlib.sha256 over the same array, median, interleaved with hash_ms",
    "ratio": "hash_ms / hashlib_ms",
    "ratio_best": "hash_best_ms / hashlib_best_ms, the quietest repetition of each",
    "hash_int64_ms": "block_keys over a numpy int64 array, which is checked and narrowed",
    "hash_list_ms": "block_keys over a Python list",
    "hash_extras_ms": f"block_keys over the u32 array with an image of {_IMAGE_TOKENS} tokens in every 4,096",
}


def run(
    *, num_tokens: int = 131_072, block_tokens: int = 64, rounds: int = 21, tell: Tell | None = None
) -> BenchReport:
    """Measure. Blocks for about a second; raises HeadwaterError if a key is not what the format says."""
    if block_tokens < 1 or num_tokens < block_tokens:
        raise InvalidConfig(f"a prompt of {num_tokens} tokens has no block of {block_tokens}")
    if rounds < 1:
        raise InvalidConfig(f"rounds must be positive, not {rounds}")
    ids = np.random.default_rng(0).integers(0, 128_000, num_tokens, dtype=np.uint32)
    listed: list[int] = ids.tolist()
    wide = ids.astype(np.int64)
    extras = [
        Extra("image", hashlib.sha256(b"%d" % start).digest(), start, min(_IMAGE_TOKENS, num_tokens - start))
        for start in range(0, num_tokens, 4096)
    ]
    ways: dict[str, Callable[[], Sequence[bytes]]] = {
        "hash": lambda: block_keys(ids, parent=_ROOT, block_tokens=block_tokens),
        "hashlib": lambda: _bare_loop(ids, block_tokens),
        "hash_int64": lambda: block_keys(wide, parent=_ROOT, block_tokens=block_tokens),
        "hash_list": lambda: block_keys(listed, parent=_ROOT, block_tokens=block_tokens),
        "hash_extras": lambda: block_keys(ids, parent=_ROOT, block_tokens=block_tokens, extras=extras),
    }
    samples = Samples()
    for done in range(rounds):
        if tell is not None:
            tell("hashing", done, rounds)
        for name, way in ways.items():
            begin_s = time.perf_counter()
            keys = way()
            samples.add(f"{name}_ms", (time.perf_counter() - begin_s) * 1e3)
            if len(keys) != num_tokens // block_tokens:
                raise HeadwaterError(f"{name} made {len(keys)} keys of {num_tokens} tokens")
    _check({name: way() for name, way in ways.items() if name != "hashlib"}, ids, block_tokens)
    results = samples.medians()
    best = {name.replace("_ms", "_best_ms"): min(values) for name, values in samples.values.items()}
    ratios = {
        "ratio": results["hash_ms"] / results["hashlib_ms"],
        "ratio_best": best["hash_best_ms"] / best["hashlib_best_ms"],
    }
    return BenchReport(
        command="bench index",
        options={"tokens": num_tokens, "block": block_tokens, "rounds": rounds},
        results={**results, **best, **ratios, "num_keys": num_tokens // block_tokens},
        notes=_NOTES,
        samples=samples.values,
    )


def _bare_loop(ids: npt.NDArray[np.uint32], block_tokens: int) -> list[bytes]:
    data = ids.view(np.uint8).data
    step = 4 * block_tokens
    key: bytes = _ROOT
    keys: list[bytes] = []
    for start in range(0, len(data) - step + 1, step):
        digest = hashlib.sha256(key)
        digest.update(data[start : start + step])
        key = digest.digest()
        keys.append(key)
    return keys


def _check(keys: dict[str, Sequence[bytes]], ids: npt.NDArray[np.uint32], block_tokens: int) -> None:
    """Every input names the same blocks, extras others, and the first key is what the format's documentation says."""
    first = hashlib.sha256(_ROOT + struct.pack("<II", block_tokens, 0) + ids[:block_tokens].tobytes()).digest()
    if keys["hash"][0] != first:
        raise HeadwaterError("a key is not the documented SHA-256")
    if keys["hash"] != keys["hash_list"] or keys["hash"] != keys["hash_int64"]:
        raise HeadwaterError("keys depend on the type of the input")
    if set(keys["hash"]) & set(keys["hash_extras"]):
        raise HeadwaterError("an image did not change the keys behind it")
