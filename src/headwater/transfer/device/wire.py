"""A wire: one direction of copies between a device's blocks and host frames, a fixed number of pieces at a time.

    OUT    frame payload <- block        IN    block <- frame payload

A piece is some planes of some blocks. `launch` begins one at a *place* and returns; `finish` waits for it and gives the
digests of the bytes that passed. Places are numbered, and a place holds one piece from launch to finish: that bounds
the memory. Who uses which place when is the copy engine's business (`copy_engine.py`).

For a GPU there are `StagedWire` and `RunWire` (`cuda_wire.py`), for a CPU `TorchWire` (`torch_wire.py`).

Invariants: everything is checked before a byte moves. Nothing is allocated and no device synchronised after the
beginning. A digest is of the bytes on the device: as they arrived there, or as they were when they were copied.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Digests: TypeAlias = npt.NDArray[np.uint64]  # [blocks, planes]
MAX_ROWS: Final = 1024  # blocks of one piece


class Direction(enum.Enum):
    """Which way the bytes go."""

    OUT = "out"  # from the device
    IN = "in"


@dataclass(frozen=True, slots=True)
class WirePiece:
    """Planes `planes` of the blocks in `slots`, and the frames whose payload they are."""

    slots: npt.NDArray[np.int64]
    frames: Sequence[memoryview]
    planes: range
    addresses: Sequence[int] = ()  # where the frames begin; none, for a wire that does not ask for them


class DirectCopies(Protocol):
    """A wire that has two ways: through its buffers, or small pieces straight over the bus."""

    direct_bytes: int  # pieces up to this size go straight


class Wire(Protocol):
    """One direction. Calls of one place come from one thread at a time; several places may be in use at once."""

    @property
    def num_places(self) -> int:
        """How many pieces can be under way."""
        ...

    @property
    def place_bytes(self) -> int:
        """The largest piece."""
        ...

    @property
    def by_address(self) -> bool:
        """Whether it has to know where frames lie."""
        ...

    @property
    def in_stages(self) -> bool:
        """Whether a piece is copied twice, so that small ones at the ends let both stages begin early."""
        ...

    def direct(self) -> DirectCopies | None:
        """Where it is set which pieces go straight; None: there is one way."""
        ...

    def launch(self, place: int, piece: WirePiece) -> None:
        """Begin. Does not wait. Raises what the device raises; the place is to be finished all the same."""
        ...

    def finish(self, place: int, *, hurry: bool) -> Digests | None:
        """Wait until the piece is over; then its digests, if this wire makes them. Raises what the device raises.

        `hurry`: somebody waits for just this, so microseconds count more than a core.
        """
        ...

    def close(self) -> None:
        """Give memory back; nothing is under way. Idempotent."""
        ...


def frame_address(frame: memoryview) -> int:
    """Where a frame's memory begins."""
    address: int = np.frombuffer(frame, np.uint8).__array_interface__["data"][0]
    return address
