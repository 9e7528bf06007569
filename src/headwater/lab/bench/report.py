"""What a benchmark hands over: figures by name, their samples, what they mean, and the machine they are of."""

import datetime
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

Tell = Callable[[str, int, int], None]  # stage, done, total


@dataclass(slots=True)
class Samples:
    """Measured values by name, in the order they were taken."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        """Keep one more."""
        self.values.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        """Return the median of a name's values."""
        return statistics.median(self.values[name])

    def medians(self) -> dict[str, float]:
        """Return all medians."""
        return {name: statistics.median(values) for name, values in self.values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """One run of one benchmark. `results` are the figures, `notes` say what those mean that a name cannot say."""

    command: str
    options: Mapping[str, Any]
    results: Mapping[str, Any]
    notes: Mapping[str, str]
    samples: Mapping[str, Sequence[float]]

    def document(self) -> dict[str, Any]:
        """Return all of it as plain JSON values: the figures by name, and where and how they were taken."""
        figures = {name: _rounded(value) for name, value in self.results.items()}
        return figures | {
            "command": self.command,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "options": dict(self.options),
            "notes": dict(self.notes),
            "samples": {name: [_rounded(value) for value in values] for name, values in self.samples.items()},
        }


def machine() -> dict[str, Any]:
    """Say where the figures come from. Reads /proc."""
    return {
        "cpu": _cpu_model(),
        "num_cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_1min": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "xxhash": xxhash.VERSION,
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
