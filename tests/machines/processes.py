"""Processes that each hold a LocalStore open and do as they are told, one line of JSON at a time.

A test drives several of them on one directory: puts, reads, holds reservations, is killed, is stopped. The process
checks what it reads against the sample pages itself and answers with statuses only.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import HeadwaterError
from headwater.core.results import Status
from headwater.storage.base import Deadline, Reservation
from headwater.storage.local import LocalStore, MappedStore
from headwater.storage.verified import VerifiedStore
from headwater.testing.pages import IDENTITY, PLANE_BYTES, SamplePage, items, sample_page

Ref = tuple[int, int]  # chain, depth


class Helper:
    """The driver's end of one process."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "machines.processes"]
        tests = Path(__file__).resolve().parent.parent
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tests)

    def __call__(self, call: str, **arguments: Any) -> Any:
        """Have the process do something and wait for its answer. Raises RuntimeError with what it raised."""
        self.send(call, **arguments)
        return self.receive()

    def send(self, call: str, **arguments: Any) -> None:
        """Have the process do something, without waiting."""
        stdin = self._process.stdin
        if stdin is None:
            raise RuntimeError("the process has no input")
        stdin.write(json.dumps({"call": call, **arguments}) + "\n")
        stdin.flush()

    def receive(self) -> Any:
        """The answer to the oldest question."""
        stdout = self._process.stdout
        line = stdout.readline() if stdout is not None else ""
        if not line:
            raise RuntimeError(f"the process died with {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def stop(self) -> None:
        """Freeze it, whatever it holds."""
        freeze(self._process.pid)

    def go_on(self) -> None:
        """Thaw it."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def freeze(pid: int) -> None:
    """Stop a process, and wait until none of its threads runs any more: where cores are few that takes its time."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    while any(one.read_text().rpartition(")")[2].split()[0] not in "TZX" for one in tasks.glob("*/stat")):
        time.sleep(0.001)


class _StoreServer:
    def __init__(self) -> None:
        self.store: LocalStore | None = None
        self.held: dict[Ref, Reservation] = {}
        self.planes: tuple[int, ...] = PLANE_BYTES

    def open(self, directory: str, limit_bytes: int | None = None, planes: list[int] | None = None) -> None:
        self.planes = tuple(planes or PLANE_BYTES)
        self.store = open_local(LocalStoreConfig(directory=Path(directory), limit_bytes=limit_bytes))

    def close(self) -> None:
        if self.store is not None:
            self.abandon(list(self.held))
            self.store.close()
            self.store = None

    def put(self, refs: list[Ref], timeout_s: float = 20.0) -> list[str]:
        return [status.value for status in self._store.put(items(self.pages(refs)), deadline=Deadline.after(timeout_s))]

    def get(self, refs: list[Ref], timeout_s: float = 20.0) -> list[str]:
        reader = VerifiedStore(self._store, identity=IDENTITY, plane_bytes=self.planes)
        pages = self.pages(refs)
        wanted = [(page.name, page.buffer()) for page in pages]
        results = reader.get_into(wanted, deadline=Deadline.after(timeout_s))
        right = [bytes(buffer) == page.frame for page, (_, buffer) in zip(pages, wanted, strict=True)]
        return [
            "wrong" if status is Status.HIT and not good else status.value
            for status, good in zip(results, right, strict=True)
        ]

    def contains(self, refs: list[Ref]) -> list[bool]:
        return self._store.contains([page.name for page in self.pages(refs)], deadline=Deadline.after(20))

    def delete(self, refs: list[Ref]) -> list[str]:
        names = [page.name for page in self.pages(refs)]
        return [status.value for status in self._store.delete(names, deadline=Deadline.after(20))]

    def reserve(self, refs: list[Ref]) -> list[str]:
        store, pages = self._store, self.pages(refs)
        if not isinstance(store, MappedStore):
            return ["failed"] * len(refs)
        taken = store.reserve([(page.meta, len(page.frame)) for page in pages], deadline=Deadline.after(20))
        for ref, page, one in zip(refs, pages, taken, strict=True):
            if isinstance(one, Reservation):
                one.view[:] = page.frame
                self.held[ref[0], ref[1]] = one
        return ["held" if isinstance(one, Reservation) else one.value for one in taken]

    def publish(self, refs: list[Ref]) -> list[str]:
        store = self._store
        held = [self.held.pop((chain, depth)) for chain, depth in refs]
        if not isinstance(store, MappedStore):
            return []
        return [status.value for status in store.publish(held, deadline=Deadline.after(20))]

    def abandon(self, refs: list[Ref]) -> None:
        held = [self.held.pop((chain, depth)) for chain, depth in refs]
        if isinstance(self.store, MappedStore):
            self.store.abandon(held, deadline=Deadline.after(20))

    def validate(self) -> list[str]:
        return self._store.validate(deadline=Deadline.after(20))

    def slots(self) -> dict[int, int]:
        return self._store.slots(deadline=Deadline.after(20))

    def pages(self, refs: list[Ref]) -> list[SamplePage]:
        return [sample_page(chain, depth, plane_bytes=self.planes) for chain, depth in refs]

    @property
    def _store(self) -> LocalStore:
        if self.store is None:
            raise RuntimeError("no store is open")
        return self.store


def main() -> None:
    """Serve until the input ends."""
    server = _StoreServer()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": getattr(server, request.pop("call"))(**request)}
        except (HeadwaterError, RuntimeError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
