"""RankLink: the executor of a rank that lives in another process, as a group sees it.

Instructions go out and events come in over a socket (`ranks/wire.py`), each in its own thread, so that a process which
does not read holds nobody up. That the process is *dead* is told by the kernel (a pidfd), and not concluded from a
silence or a closed socket: only a dead process writes to no slot any more (rule 2). Deadlines are moments on the clock
of the machine, which both ends share.

Not here: what a group makes of it (`ranks.py`), the other end (`ranks/server.py`).
"""

import contextlib
import logging
import os
import queue
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, Final, Self

from headwater.core.encoding import decode, encode
from headwater.core.errors import InvalidInput, RankUnavailable, ResourceClosed
from headwater.core.events import Event, Instruction
from headwater.storage.base import SYSTEM_CLOCK, Deadline
from headwater.transfer.ranks.members import Page
from headwater.transfer.ranks.wire import Incoming, packed

log: Final = logging.getLogger("headwater")

_REVIVE_S: Final = 60.0  # for a store that is rebuilt
_LAST_S: Final = 1.0  # for threads that have nothing more to wait for


class RankLink:
    """One rank's process. Owns the socket, and two threads; the process is the caller's."""

    def __init__(self, sock: socket.socket, *, rank: int, pid: int, num_members: int, may_kill: bool = False) -> None:
        """`may_kill`: the group may kill the process if it stays silent. Raises RankUnavailable if there is none."""
        try:
            self._process = os.pidfd_open(pid)
        except OSError as error:
            raise RankUnavailable(f"there is no process {pid} for rank {rank}: {error}") from error
        self.rank = rank
        self.pid = pid
        self.death: str | None = None
        self.on_counted: Callable[[dict[str, float]], None] | None = None  # hears which counters grew over there
        self.executors = tuple(LinkExecutor(self, at) for at in range(num_members))
        self._may_kill = may_kill
        self._sock = sock
        self._wake = os.eventfd(0)
        self._fds = [self._process, self._wake]
        self._lock = threading.Lock()
        self._answered = threading.Condition(self._lock)  # an answer, or the end of all answers
        self._answers: dict[int, Any] = {}
        self._asks = count(1)
        self._outgoing: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.lost: str | None = None  # why nothing comes over the socket any more
        self._ended = False  # it said that it has closed its members
        sock.settimeout(None)
        self._threads = [
            threading.Thread(target=work, name=f"headwater rank {rank} {what}", daemon=True)
            for what, work in (("reader", self._read), ("writer", self._write))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, member: int, instructions: Iterable[Instruction]) -> None:
        """Send instructions. Does not block. Raises ResourceClosed when it is known that nobody gets them."""
        with self._lock:
            gone = self.death or self.lost
        if gone is not None:
            raise ResourceClosed(f"the process of rank {self.rank}: {gone}")
        self._outgoing.put({"do": list(instructions), "member": member})

    def ask(self, question: dict[str, Any], timeout_s: float) -> Any:
        """Ask the process and wait for its answer. Blocks. None: there is none in time, or will be none."""
        number = next(self._asks)
        self._outgoing.put({**question, "ask": number})
        with self._answered:
            self._answered.wait_for(lambda: number in self._answers or self._is_gone, timeout_s)
            return self._answers.pop(number, None)

    def kill(self) -> bool:
        """Kill the process, if that is allowed. Does not block. False: it was not, or could not be done."""
        with self._lock:
            if not (self._may_kill and self._fds) or self.death is not None:
                return self._may_kill
            try:
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            except OSError as error:
                log.warning("rank %d cannot be killed: %s", self.rank, error)
                return False
        return True

    def close(self, timeout_s: float) -> bool:
        """Have the process close its members, and end the link; idempotent. Blocks. False: it may still be at work.

        A process that is dead has closed everything. After False, ask again.
        """
        until = Deadline.after(timeout_s)
        if not (self._ended or self._is_gone):
            self._ended = self.ask({"close": timeout_s}, until.remaining_s) is True
        with self._answered:  # without a link, its death is what can be waited for
            gone = self._answered.wait_for(lambda: self._ended or self.death is not None, until.remaining_s)
        return gone and self.abandon()

    def abandon(self) -> bool:
        """End the link, whatever the process does: it closes its members by itself. Blocks, for moments. Idempotent."""
        self._lose("the link was closed")
        self._outgoing.put(None)
        with self._lock:
            if self._fds:  # they may be another's by now, if not
                os.eventfd_write(self._wake, 1)
        for thread in self._threads:
            thread.join(_LAST_S)
        if any(thread.is_alive() for thread in self._threads):  # in `deliver`, which is not ours
            return False
        self._sock.close()
        with self._lock:
            fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)
        return True

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def _is_gone(self) -> bool:
        return self.death is not None or self.lost is not None

    def _write(self) -> None:
        while (document := self._outgoing.get()) is not None:
            if "do" in document:  # made into text here, and not while whoever gave the order waits
                document["do"] = [encode(one) for one in document["do"]]
            try:
                self._sock.sendall(packed(document))
            except OSError as error:
                self._lose(f"the link broke: {error}")
                return

    def _read(self) -> None:
        """Until the process is dead or the link closed; what comes over the socket is handed on meanwhile."""
        incoming = Incoming()
        wire = self._sock.fileno()
        poll = select.poll()
        for fd in (wire, self._process, self._wake):
            poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if wire in ready:
                if not self._take(incoming):
                    poll.unregister(wire)
            elif self._process in ready:  # and all that it had said was heard
                self._die(f"its process {self.pid} is dead")
                return
            if self._wake in ready:
                return

    def _take(self, incoming: Incoming) -> bool:
        """Hand on what came. False: nothing more will."""
        try:
            if not incoming.read(self._sock):
                self._lose("it closed the link")
                return False
            for document in incoming.documents():
                self._hand_on(document)
        except Exception as error:  # noqa: BLE001  whatever it is: this thread has to see the process die
            self._lose(f"the link broke: {type(error).__name__}: {error}")
            return False
        return True

    def _hand_on(self, document: dict[str, Any]) -> None:
        if "answer" in document:
            with self._answered:
                self._answers[document["answer"]] = document["is"]
                self._answered.notify_all()
            return
        if "counted" in document and self.on_counted is not None:
            self.on_counted(document["counted"])
        event = decode(document["said"])
        deliver = self.executors[document["member"]].deliver
        if not isinstance(event, Event):
            raise InvalidInput(f"a rank says events, not {type(event).__name__}")
        if deliver is not None:
            deliver(event)

    def _lose(self, why: str) -> None:
        """Nothing goes over the socket any more; the process may live on."""
        with self._answered:
            if self.lost is None:
                self.lost = why
            self._answered.notify_all()
        with contextlib.suppress(OSError):  # it was closed before
            self._sock.shutdown(socket.SHUT_RDWR)  # whoever is stuck in it comes back

    def _die(self, why: str) -> None:
        with self._answered:
            self.death = why
            self._answered.notify_all()
        self._lose(why)
        for executor in self.executors:
            if executor.on_death is not None:
                executor.on_death(why)


class LinkExecutor:
    """One member at the other end of a link."""

    def __init__(self, link: RankLink, at: int) -> None:
        self._link = link
        self._at = at
        self.deliver: Callable[[Event], None] | None = None
        self.on_death: Callable[[str], None] | None = None

    @property
    def death(self) -> str | None:
        """Why the process is known to be dead."""
        return self._link.death

    def kill(self) -> bool:
        """Kill the process, if that is allowed."""
        return self._link.kill()

    def submit(self, instructions: Iterable[Instruction]) -> None:
        """Send instructions. Does not block."""
        self._link.submit(self._at, instructions)

    def throttle_saves(self, *, on: bool) -> None:
        """Its process has an interpreter of its own: nobody is in the way."""

    def wait_layer(self, job: int, layer: int, timeout_s: float) -> bool:
        """False: which layers are there is known in the rank's own process, to whoever computes with them there."""
        return False

    def on_first_layer(self, wake: Callable[[], None]) -> None:
        """Never called: that is heard in the rank's own process, as in `wait_layer`."""

    def remote(self) -> Self:
        """Itself."""
        return self

    def revive(self, store: str) -> bool:
        """Put a store right on this member. Blocks."""
        return self._link.ask({"revive": store, "member": self._at}, _REVIVE_S) is True

    def close(self, timeout_s: float) -> bool:
        """Close the rank, all its members."""
        return self._link.close(timeout_s)


def connect_link(
    sock: socket.socket,
    *,
    rank: int,
    pid: int,
    pages: Sequence[Page],
    identity: bytes,
    timeout_s: float = 10.0,
    may_kill: bool = False,
) -> RankLink:
    """The link to a rank in another process, which runs `serve_rank` at the other end of the socket. Blocks.

    Its `executors` are those of the rank's members, in the order of `pages`.

    `pages` and `identity` are what it must serve: another rank's pages would be right bytes in the wrong place. Raises
    RankUnavailable if it does not answer in time or is another than wanted; the socket is closed then.
    """
    link = RankLink(sock, rank=rank, pid=pid, num_members=len(pages), may_kill=may_kill)
    before_s = SYSTEM_CLOCK.monotonic()
    found = link.ask({"hello": True}, timeout_s)
    try:
        if found is None:
            why = link.death or link.lost or f"it did not answer within {timeout_s:g} s"
            raise RankUnavailable(f"rank {rank}, process {pid}: {why}")
        if [tuple(page) for page in found["pages"]] != list(pages) or found["identity"] != identity.hex():
            raise RankUnavailable(f"process {pid} serves {found}, not rank {rank}'s {list(pages)} of {identity.hex()}")
        if not before_s <= found["now_s"] <= SYSTEM_CLOCK.monotonic():
            raise RankUnavailable(f"process {pid} has another clock: its deadlines would not be ours")
    except BaseException:
        link.abandon()
        raise
    return link
