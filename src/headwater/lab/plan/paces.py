"""What computing a prompt takes and how fast tiers give blocks back: measured, given, or assumed, and which of these.

Files that our own benchmarks wrote are understood (`bench store`, `bench pool`, `bench ttft`, each with --json).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from headwater.cache.placement import ComputeCost
from headwater.core.errors import InvalidConfig, InvalidInput

Points: TypeAlias = tuple[tuple[int, float], ...]  # measured prompts: tokens, milliseconds

TIERS: Final = ("host", "disk", "pool")
#: A model of `bill.LAYOUT` on an H200: tokens of a prompt, milliseconds to its first token (docs/VLLM.md).
H200_8B: Final[Points] = ((2_048, 47.0), (8_192, 204.0), (32_768, 1_223.0))
#: GB/s. Host: hits of 32,768 tokens on that H200; disk: a usual NVMe drive; pool: a network of 25 Gbit/s.
ASSUMED_GBS: Final = {"host": 40.0, "disk": 3.0, "pool": 3.0}
ASSUMED: Final = "assumed"
GIVEN: Final = "given"
H200_SHAPE: Final = "8b"  # what the benchmarks call that model's shape
_MOST_TOKENS: Final = 1 << 31
_MOST_MS: Final = 1e9


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a tier gives blocks back, and takes them."""

    gbs: float
    source: str = ASSUMED


@dataclass(slots=True)
class Measured:
    """What files of measurements say."""

    prefill: Points = ()
    prefill_source: str = ""
    shape: str = ""  # of the model that was measured
    tiers: dict[str, Pace] = field(default_factory=dict)


def pace(tier: str, given: float | None, measured: Measured) -> Pace:
    """Of a tier: as somebody said, or else as it was measured, or else as we assume. Raises InvalidConfig."""
    if given is None:
        return measured.tiers.get(tier, Pace(ASSUMED_GBS[tier]))
    if not 0 < given < math.inf:
        raise InvalidConfig(f"--{tier}-gbs is a positive number of GB/s, not {given:g}")
    return Pace(given, GIVEN)


def fit(points: Points, *, block_tokens: int) -> ComputeCost:
    """Of blocks, from measured prompts. Least squares of the relative error. Raises InvalidConfig."""
    if not points:
        raise InvalidConfig("what computing takes needs one measured prompt at least")
    rows = []
    for tokens, ms in points:
        if not (1 <= tokens < _MOST_TOKENS and 0 < ms < _MOST_MS):
            raise InvalidConfig(f"a measured prompt has tokens and milliseconds, not {tokens!s:.20}:{ms:g}")
        blocks, seconds = tokens / block_tokens, ms / 1e3
        rows.append((blocks / seconds, blocks * (blocks - 1) / 2 / seconds))
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    det = aa * bb - ab * ab
    base, slope = ((a * bb - b * ab) / det, (b * aa - a * ab) / det) if det > 1e-9 * aa * bb else (a / aa, 0.0)
    if slope < 0:  # noise: a longer prompt is not cheaper by the token
        base, slope = a / aa, 0.0
    if base < 0:
        base, slope = 0.0, b / bb
    return ComputeCost(base, slope)


def read_points(text: str) -> Points:
    """Of `TOKENS:MS,...`. Raises InvalidConfig."""
    try:
        pairs = [one.split(":") for one in text.split(",")]
        return tuple((int(tokens), float(ms)) for tokens, ms in pairs)
    except ValueError:
        raise InvalidConfig(f"--prefill is TOKENS:MS with commas between, not {text!r}") from None


def read_files(paths: Sequence[Path]) -> Measured:
    """Results of our benchmarks, the later over the earlier. Raises InvalidInput with the file's name, OSError."""
    measured = Measured()
    for path in paths:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{path}: not JSON: {error}") from error
        command = str(found.get("command", "")) if isinstance(found, dict) else ""
        kind = next((kind for kind in _READERS if f"bench {kind}" in command), None)
        if kind is None:
            raise InvalidInput(f"{path}: what bench {', bench '.join(_READERS)} print with --json is understood")
        try:
            _READERS[kind](found, str(path), measured)
        except InvalidInput:
            raise
        except (KeyError, TypeError, ValueError, OverflowError):
            raise InvalidInput(f"{path}: not what bench {kind} prints with --json") from None
    return measured


def _store(found: Mapping[str, Any], source: str, measured: Measured) -> None:
    measured.tiers["host"] = Pace(_speed(found["read_gbs"]), source)
    measured.tiers["disk"] = Pace(_speed(found["disk_read_gbs"]), source)


def _pool(found: Mapping[str, Any], source: str, measured: Measured) -> None:
    shared = [
        _speed(row["get_gbs"]) for row in found["rows"] if row["store"] in ("mooncake", "redis") and row["get_gbs"]
    ]
    if not shared:
        raise InvalidInput(f"{source}: no pool was measured there")
    measured.tiers["pool"] = Pace(max(shared), source)


def _ttft(found: Mapping[str, Any], source: str, measured: Measured) -> None:
    measured.prefill = tuple((int(row["tokens"]), float(row["cold_ms"])) for row in found["lengths"])
    if not measured.prefill:
        raise InvalidInput(f"{source}: no prompt was measured there")
    measured.prefill_source, measured.shape = source, str(found["options"]["shape"])


def _speed(value: object) -> float:
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError("a speed is a positive number")
    return float(value)


_READERS: Final = {"store": _store, "pool": _pool, "ttft": _ttft}
