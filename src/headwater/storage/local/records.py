"""What the index of a LocalStore says of a slot: its record and its use, as values, and as columns of many.

Where a record lies, and whether it can be believed, is `table.py`'s.
"""

import enum
import struct
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from headwater.core.page import NAME_BYTES, PageName
from headwater.storage.local.geometry import RECORD_BYTES

RECORD: Final = struct.Struct("<QQIIQQ40s40s32s16sIIQ")
COLUMNS: Final = np.dtype(
    {
        "names": ["check", "generation", "state", "owner", "slot_bytes", "num_bytes", "depth", "expires_ms"],
        "formats": ["<u8", "<u8", "<u4", "<u4", "<u8", "<u8", "<u4", "<u8"],
        "offsets": [0, 8, 16, 20, 24, 32, 168, 176],
        "itemsize": RECORD_BYTES,
    }
)
ROW: Final = np.dtype(  # a record, where there are many; as RECORD
    [
        *(("check", "<u8"), ("generation", "<u8"), ("state", "<u4"), ("owner", "<u4"), ("slot_bytes", "<u8")),
        *(("num_bytes", "<u8"), ("name", f"V{NAME_BYTES}"), ("parent", f"V{NAME_BYTES}"), ("identity", "V32")),
        *(("tenant", "V16"), ("depth", "<u4"), ("valid_tokens", "<u4"), ("expires_ms", "<u8")),
    ]
)
USES: Final = np.dtype([("used_s", "<f8"), ("priority", "<f8"), ("hits", "<u8"), ("check", "<u8")])
PADDED: Final = struct.Struct(f"<QQIIQQ40s40s32s16sIIQ{RECORD_BYTES - 184}x")
USE: Final = struct.Struct("<ddQQ")
NO_PAGE: Final = PageName(bytes(NAME_BYTES))
_NO_KEY: Final = bytes(32)
_NO_TENANT: Final = bytes(16)

RecordRows: TypeAlias = npt.NDArray[np.void]  # of ROW
UseRows: TypeAlias = npt.NDArray[np.void]  # of USES


class RecordState(enum.IntEnum):
    """Who may touch a slot's bytes."""

    FREE = 0  # nobody
    RESERVED = 1  # its owner alone, until published, abandoned, or the owner is dead (never because time passed)
    LIVE = 2  # readable; the page of `name`


class Record(NamedTuple):
    """What a slot holds. The fields behind `slot_bytes` are a page's, and empty for others."""

    state: int
    owner: int
    generation: int  # how often the slot was given out
    slot_bytes: int
    num_bytes: int = 0
    name: PageName = NO_PAGE
    parent: PageName = NO_PAGE
    identity: bytes = _NO_KEY
    tenant: bytes = _NO_TENANT
    depth: int = 0
    valid_tokens: int = 0
    expires_ms: int = 0


class PageUse(NamedTuple):
    """When a page was used last, how often after it was stored, and its priority then."""

    used_s: float
    priority: float
    hits: int


def record_rows(state: RecordState, number: int) -> RecordRows:
    """So many records of slots without a page, to be filled in."""
    rows = np.zeros(number, ROW)
    rows["state"] = state.value
    return rows


def in_state(rows: RecordRows, state: RecordState) -> npt.NDArray[np.bool_]:
    """Which records are in a state.

    To compare an array with a member of an enum runs Python code of the enum inside of numpy, which takes what that
    raises for an answer: an interrupt would be lost.
    """
    found: npt.NDArray[np.bool_] = rows["state"] == state.value
    return found


def use_rows(number: int) -> UseRows:
    """So many uses, to be filled in."""
    return np.zeros(number, USES)


def in_time(uses: UseRows, known: npt.NDArray[np.bool_], now_s: float) -> npt.NDArray[np.float64]:
    """Priorities of uses that are not ahead of the clock; of a use of now, where they are not known."""
    with np.errstate(invalid="ignore", over="ignore"):
        in_time = uses["priority"] - np.maximum(uses["used_s"] - now_s, 0.0)
    return np.where(known, in_time, now_s)
