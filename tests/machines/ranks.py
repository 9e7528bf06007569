"""Ranks for tests: blocks cut into what each rank holds, devices in numpy, and ranks in processes of their own.

`cut` says what a rank's page of a block must be, by `byte_ranges` alone: the oracle for whoever puts pages together in
another way. `RankProcesses` starts processes that serve a rank each, quickly: one that has imported everything forks.
Their devices are files, so that a test sees what they write, and when.
"""

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from headwater.build import open_local, open_rank
from headwater.config.stores import LocalStoreConfig
from headwater.layout.dsa import dsa_layout
from headwater.layout.gqa import gqa_fp8_layout, gqa_layout
from headwater.layout.mla import mla_layout
from headwater.layout.reshard import part_number
from headwater.layout.shard import Part, Shard, byte_ranges, parts
from headwater.layout.spec import DType, KVLayout, combine
from headwater.storage.base import Store
from headwater.testing.device import BytesStaging
from headwater.testing.pages import IDENTITY
from headwater.transfer.ranks.link import connect_link
from headwater.transfer.ranks.members import Member, Page
from headwater.transfer.ranks.server import serve_rank
from machines.processes import freeze

TOKENS: Final = 4
_MODULE: Final = "machines.ranks"  # this one, run in a process of its own, beside the tests
_PATIENCE_S: Final = 60.0


def small_layouts() -> dict[str, KVLayout]:
    """A layout of every sort that ranks divide or share, small enough to try all sizes with each."""
    gqa = gqa_layout(num_layers=2, num_kv_heads=8, head_dim=3, block_tokens=TOKENS, dtype=DType.BF16)
    latent = mla_layout(num_layers=2, block_tokens=TOKENS, lora_rank=6, rope_dim=2)
    draft = gqa_layout(num_layers=1, num_kv_heads=2, head_dim=3, block_tokens=TOKENS, dtype=DType.BF16)
    return {
        "gqa": gqa,
        "few heads": gqa_layout(num_layers=2, num_kv_heads=2, head_dim=3, block_tokens=TOKENS, dtype=DType.FP16),
        "fp8 with scales": gqa_fp8_layout(num_layers=2, num_kv_heads=8, head_dim=3, block_tokens=TOKENS),
        "mla": latent,
        "dsa": dsa_layout(num_layers=2, block_tokens=TOKENS, lora_rank=128, rope_dim=2),
        "mixed": combine(gqa, latent.with_layer_offset(2)),
        "three sorts": combine(gqa, draft.with_layer_offset(2), latent.with_layer_offset(3)),
    }


def whole_block(layout: KVLayout, key: bytes) -> bytes:
    """What all ranks together hold of a block: bytes that follow from its key."""
    return hashlib.shake_128(b"block" + key).digest(layout.page_bytes)


def cut(layout: KVLayout, part: Part, block: bytes) -> bytes:
    """What one part of a rank holds of a block."""
    found = b""
    for local in part.layout.planes:
        at = layout.index(local.role.name, local.layer)
        plane, start = layout.planes[at], layout.offsets[at]
        for offset, length in byte_ranges(plane, part.shard):
            found += block[start + offset : start + offset + length]
    return found


class RankDevices:
    """The device of one rank: a numpy staging for each of its parts, with the same slots."""

    def __init__(
        self, layout: KVLayout, rank: int, tp_size: int, *, num_slots: int = 64, num_pages: int = 16, seed: int = 0
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.parts = parts(layout, rank, tp_size)
        self.stagings = [
            BytesStaging(part.layout, num_slots=num_slots, num_pages=num_pages, seed=seed + 100 * rank + at)
            for at, part in enumerate(self.parts)
        ]

    @property
    def pages(self) -> list[Page]:
        """What the rank's pages are called."""
        return pages_of(self.layout, self.parts)

    def fill(self, slot: int, block: bytes) -> None:
        """Put the rank's share of a block into a slot."""
        for part, staging in zip(self.parts, self.stagings, strict=True):
            staging.device[slot] = np.frombuffer(cut(self.layout, part, block), np.uint8)

    def holds(self, slot: int, block: bytes) -> bool:
        """Whether a slot holds the rank's share of a block, whole."""
        shares = zip(self.parts, self.stagings, strict=True)
        return all(staging.block(slot) == cut(self.layout, part, block) for part, staging in shares)

    def snapshot(self) -> list[bytes]:
        """All bytes of the device."""
        return [staging.device.tobytes() for staging in self.stagings]


def pages_of(layout: KVLayout, mine: tuple[Part, ...]) -> list[Page]:
    """What the pages of a rank are called."""
    return [(part.shard.index, part.shard.count, part_number(part, layout)) for part in mine]


def thread_rank(devices: RankDevices, tp_size: int, stores: Mapping[str, Store], **options: Any) -> list[Member]:
    """The members of a rank in this process."""
    return open_rank(
        devices.rank, tp_size, stores, devices.stagings, layout=devices.layout, identity=IDENTITY, **options
    )


# --- ranks in processes of their own ----------------------------------------------------------------------------------


@dataclass(slots=True)
class RankProcess:
    """A rank that a process serves. `devices` are files: what is seen here is what it wrote."""

    rank: int
    pid: int
    members: list[Member]
    devices: list[npt.NDArray[np.uint8]]
    pages: list[Page]

    def kill(self) -> None:
        """End it at once, whatever it does."""
        os.kill(self.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Freeze it, whatever it does."""
        freeze(self.pid)

    def go_on(self) -> None:
        """Thaw it."""
        os.kill(self.pid, signal.SIGCONT)


class RankProcesses:
    """Starts ranks, all on one LocalStore, with small layouts by name. Ends them all at the end."""

    def __init__(self, directory: Path, *, layout: str, tp_size: int, num_slots: int = 64) -> None:
        """`directory` is on tmpfs; the store is in it, under `store`, and was made by somebody else."""
        self._directory = directory
        self._facts = {"directory": str(directory), "layout": layout, "tp_size": tp_size, "num_slots": num_slots}
        self._layout = small_layouts()[layout]
        self._tp_size = tp_size
        self._num_slots = num_slots
        self._num_started = 0
        self._pids: list[int] = []
        self._control, theirs = socket.socketpair()
        with theirs:
            self._template = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=Path(__file__).resolve().parent.parent,
            )
        self._control.settimeout(_PATIENCE_S)

    def start(self, rank: int, *, may_kill: bool = False, **facts: Any) -> RankProcess:
        """A process that serves a rank.

        `pause`: two paths; it makes the first when it writes to a slot, and waits for the second. `rank_there`: the
        rank that it really is.
        """
        self._num_started += 1
        mine = parts(self._layout, rank, self._tp_size)
        files = [str(self._directory / f"device-{self._num_started}-{at}") for at in range(len(mine))]
        devices: list[npt.NDArray[np.uint8]] = [
            np.memmap(name, np.uint8, "w+", shape=(self._num_slots, part.layout.page_bytes))
            for name, part in zip(files, mine, strict=True)
        ]
        ours, theirs = socket.socketpair()
        with theirs:
            order = {**self._facts, "rank": rank, "files": files, **facts}
            socket.send_fds(self._control, [json.dumps(order).encode()], [theirs.fileno()])
            pid = int(self._control.recv(64))
        self._pids.append(pid)
        pages = pages_of(self._layout, mine)
        members = connect_rank(
            ours, rank=rank, pid=pid, pages=pages, identity=IDENTITY, may_kill=may_kill, timeout_s=_PATIENCE_S
        )
        return RankProcess(rank, pid, members, devices, pages)

    def close(self) -> None:
        """End them."""
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._control.close()
        self._template.wait(_PATIENCE_S)


def connect_rank(
    sock: socket.socket, *, rank: int, pid: int, pages: Sequence[Page], identity: bytes, **options: Any
) -> list[Member]:
    """The members of a rank in another process: see `connect_link`, which takes the `options` too."""
    link = connect_link(sock, rank=rank, pid=pid, pages=pages, identity=identity, **options)
    return [
        Member(rank, Shard(index, count_), part, executor)
        for (index, count_, part), executor in zip(pages, link.executors, strict=True)
    ]


@contextlib.contextmanager
def rank_processes(directory: Path, **options: Any) -> Iterator[RankProcesses]:
    """Rank processes for as long as the block lasts."""
    started = RankProcesses(directory, **options)
    try:
        yield started
    finally:
        started.close()


def main() -> None:
    """Fork a rank for each order that comes in, until nobody is there to give one."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    with socket.socket(fileno=int(sys.argv[1])) as control:
        while True:
            order, fds, _, _ = socket.recv_fds(control, 1 << 16, 1)
            if not order:
                return
            pid = os.fork()
            if pid == 0:
                control.close()
                _serve(json.loads(order), socket.socket(fileno=fds[0]))
                os._exit(0)
            os.close(fds[0])
            control.sendall(str(pid).encode())


def _serve(order: dict[str, Any], sock: socket.socket) -> None:
    layout, tp_size = small_layouts()[order["layout"]], order["tp_size"]
    devices = RankDevices(layout, order.get("rank_there", order["rank"]), tp_size, num_slots=order["num_slots"])
    for staging, name in zip(devices.stagings, order["files"], strict=True):
        staging.device = np.memmap(name, np.uint8, "r+", shape=staging.device.shape)
        if "pause" in order:
            staging.on_scatter = lambda _slot, _page: _pause(*map(Path, order["pause"]))
    with open_local(LocalStoreConfig(directory=Path(order["directory"]) / "store")) as store:
        members = thread_rank(devices, tp_size, {"host": store})
        serve_rank(sock, members, identity=IDENTITY)


def _pause(here: Path, until: Path) -> None:
    here.touch()
    until_s = time.monotonic() + _PATIENCE_S
    while not until.exists() and time.monotonic() < until_s:
        time.sleep(0.001)


if __name__ == "__main__":
    main()
