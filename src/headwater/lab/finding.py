"""What was found of a machine or a pool, in lines: ok, to be noted, or broken, and what to do."""

from dataclasses import dataclass
from typing import Final

OK: Final = "ok"
WARN: Final = "warn"
FAIL: Final = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One line: what was looked at, how it is, what was found, what to do."""

    name: str
    state: str
    found: str
    hint: str = ""
