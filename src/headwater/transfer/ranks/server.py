"""The far end of a link: a rank's process serves its workers to the group, until the group is gone.

Whoever runs a rank (an engine's process of that rank, or one beside it) makes its workers, and calls `serve_rank` in a
thread of its own. Jobs, threads and deadlines are the workers'; what is wanted and what became of it goes over the
socket. When the group is gone, everything is cancelled: nobody is left who would count it.
"""

import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from headwater.core.encoding import decode, encode
from headwater.core.errors import HeadwaterError, InvalidInput
from headwater.core.events import Event, Instruction, Job, JobFailed
from headwater.core.results import Reason
from headwater.storage.base import SYSTEM_CLOCK, Deadline
from headwater.transfer.ranks.members import Member
from headwater.transfer.ranks.wire import Incoming, packed

log: Final = logging.getLogger("headwater")

_CLOSE_S: Final = 10.0  # for the workers to end when the group is gone


def serve_rank(
    sock: socket.socket,
    members: Sequence[Member],
    *,
    identity: bytes,
    counted: Callable[[], Mapping[str, float]] = dict,
) -> bool:
    """Do what the group says with the members of one rank, until it says close or is gone. Blocks. Closes the members.

    Deadlines are on the machine's clock, as the group's are. `counted` says by how much which counters grew since it
    was last asked; the group hears that. False: a member did not end, and may still be at work.
    """
    return _RankServer(sock, members, identity, counted).run()


class _RankServer:
    def __init__(
        self,
        sock: socket.socket,
        members: Sequence[Member],
        identity: bytes,
        counted: Callable[[], Mapping[str, float]],
    ) -> None:
        self._sock = sock
        self._members = tuple(members)
        self._identity = identity
        self._counted = counted
        self._sending = threading.Lock()
        for at, member in enumerate(self._members):
            member.executor.deliver = partial(self._say, at)

    def run(self) -> bool:
        incoming = Incoming()
        self._sock.settimeout(None)
        try:
            while incoming.read(self._sock):
                for document in incoming.documents():
                    if self._handle(document):
                        return True
        except OSError as error:
            log.warning("the link to the group is lost: %s", error)
        except InvalidInput as error:
            log.warning("the group talks nonsense: %s", error)
        return self._close(_CLOSE_S)

    def _handle(self, document: dict[str, Any]) -> bool:
        """Do one thing. True: that was the last. Raises InvalidInput for what makes no sense."""
        try:
            if "do" in document:
                self._do(self._member(document), document["do"])
            elif "hello" in document:
                pages = [member.page for member in self._members]
                me = {"pages": pages, "identity": self._identity.hex(), "now_s": SYSTEM_CLOCK.monotonic()}
                self._answer(document["ask"], me)
            elif "revive" in document:
                # In a thread: it may take seconds, and jobs go on meanwhile.
                revive = partial(self._revive, self._member(document), document["revive"], document["ask"])
                try:
                    threading.Thread(target=revive, name="headwater revive", daemon=True).start()
                except RuntimeError as error:  # the machine has no more: jobs go on, and it can be asked again
                    log.warning("%s was not put right: %s", document["revive"], error)
                    self._answer(document["ask"], answer=False)
            elif "close" in document:
                ended = self._close(float(document["close"]))
                self._answer(document["ask"], ended)
                return ended
            else:
                raise InvalidInput(f"what is {sorted(document)}?")
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidInput(f"{type(error).__name__}: {error}") from error
        return False

    def _do(self, at: int, documents: Sequence[dict[str, Any]]) -> None:
        instructions = [decode(one) for one in documents]
        wanted = [one for one in instructions if isinstance(one, Instruction)]
        try:
            self._members[at].executor.submit(wanted)
        except HeadwaterError as error:  # with nothing taken: each job of it ends here
            for one in wanted:
                if isinstance(one, Job):
                    now_s, why = SYSTEM_CLOCK.monotonic(), f"{type(error).__name__}: {error}"
                    self._say(at, JobFailed(now_s=now_s, job=one.job, failure=Reason.FAILED, why=why))

    def _revive(self, at: int, store: str, ask: int) -> None:
        try:
            revived = self._members[at].executor.revive(store)
        except HeadwaterError as error:
            log.warning("%s could not be put right: %s", store, error)
            revived = False
        self._answer(ask, revived)

    def _close(self, timeout_s: float) -> bool:
        until = Deadline.after(timeout_s)
        ended = [member.executor.close(until.remaining_s) for member in self._members]
        return all(ended)

    def _member(self, document: dict[str, Any]) -> int:
        at = document["member"]
        if not (isinstance(at, int) and 0 <= at < len(self._members)):
            raise InvalidInput(f"there is no member {at!r}")
        return at

    def _say(self, at: int, event: Event) -> None:
        grown: Mapping[str, float] = {}
        try:
            with self._sending:
                grown = self._counted()
        except Exception:  # what became of a job is more important than what was counted
            log.exception("what was counted cannot be told")
        self._send({"said": encode(event), "member": at, **({"counted": grown} if grown else {})})

    def _answer(self, ask: int, answer: object) -> None:
        self._send({"answer": ask, "is": answer})

    def _send(self, document: dict[str, Any]) -> None:
        try:
            with self._sending:
                self._sock.sendall(packed(document))
        except OSError as error:  # the group is gone; `run` hears that too
            log.debug("nobody hears %s: %s", document, error)
