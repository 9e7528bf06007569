"""The partial last block of a prompt on its way through the pool: one page, sealed with its valid tokens and an expiry.

Rule 9: what an engine left behind the last token is zeroed before the page is sealed, and looked at again before it is
used; nobody but the ticket's readers knows its name (`prompt.py`); it expires, and is never deleted, unless it is bad.
No index hears of it.

Runs in the caller's thread, on pages of the lane that it is given. After a call returned no slot is read or written
any more (rule 2), and the page comes back when the store's call has (rule 3).
"""

from collections.abc import Callable

import numpy as np

from headwater.core.errors import InvalidConfig, ResourceClosed
from headwater.core.results import Reason, Status
from headwater.disagg.lanes import Lane
from headwater.disagg.outcome import Moved, why_call, why_status
from headwater.layout.frame import PageMeta, parse, seal
from headwater.layout.spec import KVLayout
from headwater.layout.tail import zero_tail
from headwater.metrics import Metrics
from headwater.storage.base import Deadline
from headwater.storage.calls import Calls
from headwater.storage.verified import VerifiedStore
from headwater.transfer.executor.row import Lease


def require_tails(layout: KVLayout) -> None:
    """Raise InvalidConfig for a layout whose blocks cannot be cut between tokens: it has no tails to hand over."""
    blunt = [plane.name for plane in layout.planes if plane.token_axis is None]
    if blunt:
        raise InvalidConfig(
            f"plane {blunt[0]} does not say which axis its tokens are on, so a prompt's last block cannot be handed "
            "over: give its Plane a token_axis, or do not part prefill from decode"
        )


def write_tail(
    lane: Lane, calls: Calls, meta: PageMeta, slot: int, *, layout: KVLayout, now_ms: int, deadline: Deadline
) -> Moved:
    """Put one partial block from a device slot, sealed as `meta` says. Blocks; `num_blocks` is 1 or 0."""
    lease = _lease(lane, calls, load=False, deadline=deadline)
    if lease is None:
        return Moved(0, Reason.LATE if deadline.expired else Reason.DOWN, "no page for the tail")
    (page,) = lease.pages
    frame = lane.staging.frame(page)
    trouble = _guarded(lambda: _gather(lane, slot, page, frame, meta, layout, now_ms), lease)
    if trouble:
        return Moved(0, Reason.FAILED, trouble)
    call = calls.put([(meta.name, frame)], deadline=deadline, on_return=lease.end)  # its page from here on
    (status,) = call.wait()
    reason = why_call(call) or why_status(status)
    if reason is not None:
        return Moved(0, reason, _said(call.why, status))
    return Moved(1, num_bytes=len(frame) if status is Status.STORED else 0)


def read_tail(
    lane: Lane,
    calls: Calls,
    reader: VerifiedStore,
    meta: PageMeta,
    slot: int,
    *,
    layout: KVLayout,
    deadline: Deadline,
    metrics: Metrics,
) -> Moved:
    """Read one partial block into a device slot, verified. Blocks. The slot is written to only where it is right."""
    if reader.switched_off:
        return Moved(0, Reason.DOWN, "nothing but bad pages came from it")
    lease = _lease(lane, calls, load=True, deadline=deadline)
    if lease is None:
        return Moved(0, Reason.LATE if deadline.expired else Reason.DOWN, "no page for the tail")
    (page,) = lease.pages
    try:
        frame = lane.staging.frame(page)
        call = calls.get_into([(meta.name, frame)], deadline=deadline, on_return=lease.lend())
        (status,) = call.wait()
        status = _verified(reader, meta, frame, status, layout=layout, deadline=deadline, metrics=metrics)
        reason = why_call(call) or why_status(status)
        if reason is not None:
            return Moved(0, reason, _said(call.why, status))
        trouble = _guarded(lambda: lane.staging.scatter([page], [slot]))
        return Moved(0, Reason.FAILED, trouble) if trouble else Moved(1, num_bytes=len(frame))
    finally:
        lease.end()


def _verified(
    reader: VerifiedStore,
    meta: PageMeta,
    frame: memoryview,
    status: Status,
    *,
    layout: KVLayout,
    deadline: Deadline,
    metrics: Metrics,
) -> Status:
    """Whether what came is the tail. What is not is removed by force (rule 8)."""
    try:
        (status,) = reader.check([(meta.name, frame)], [status], deadline=deadline)
        if status is Status.HIT and not is_tail(frame, layout, meta.valid_tokens):
            status = Status.FOREIGN  # sealed by somebody who does not keep the rules
            metrics.count("bad_pages_total", fault=status.value)
            metrics.event("bad_page", fault=status.value, name=meta.name.hex())
            reader.delete([meta.name], deadline=deadline)
    except ResourceClosed:
        return Status.FAILED
    return status


def is_tail(frame: memoryview, layout: KVLayout, valid_tokens: int) -> bool:
    """Whether a verified frame is of a block of so many tokens, and nothing is behind them. Pure."""
    header = parse(frame)
    if isinstance(header, Status) or header.meta.valid_tokens != valid_tokens:
        return False
    payload = frame[header.header_bytes : header.frame_bytes]
    clean = bytearray(payload)
    zero_tail(memoryview(clean), layout, valid_tokens)
    return np.array_equal(np.frombuffer(payload, np.uint8), np.frombuffer(clean, np.uint8))


def _gather(lane: Lane, slot: int, page: int, frame: memoryview, meta: PageMeta, layout: KVLayout, now_ms: int) -> None:
    lane.staging.gather([slot], [page])  # digests of the whole block, if it makes some, are not the tail's
    seal(frame, meta, layout, now_ms=now_ms)


def _lease(lane: Lane, calls: Calls, *, load: bool, deadline: Deadline) -> Lease | None:
    """One page. The lane is this request's alone, so what is not there is with calls that do not return."""
    account = (calls.name, load)
    pages = lane.pool.take_now(account, 1)
    if not pages:
        pages = lane.pool.take(account, 1, deadline=deadline, stopped=lambda: calls.num_stuck > 0)
    return Lease(lane.pool, account, pages) if pages else None


def _guarded(work: Callable[[], None], lease: Lease | None = None) -> str:
    """Do what a device does: foreign code, whose errors end this handoff and nothing else. Says what it raised."""
    try:
        work()
    except Exception as error:  # noqa: BLE001  whatever it is, it is told
        if lease is not None:
            lease.end()
        return f"the device raised {type(error).__name__}: {error}"
    return ""


def _said(why: str, status: Status) -> str:
    return f"tail: {why or status.value}"
