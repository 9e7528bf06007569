"""Brings blocks from the stores to the device: asks who has what, loads what pays, and says why the rest was a miss.

Stores are asked once per request, all at the same time, for what is not on the device. Each answer is a hint. Loads go
from the first missing block on, row by row from the fastest store that has it, and count up to the first block that was
not to be had; what was loaded behind a hole is computed again. Where loading is slow, and the engine can compute
meanwhile, what is left is loaded from its end (`meeting.py`). While a request waits, what only a slower store has is
brought to the fastest.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from headwater.cache.accounts import Accounts
from headwater.cache.jobs import Jobs, reason_of
from headwater.cache.match import DEVICE
from headwater.cache.meeting import Meetings, leading_hits
from headwater.cache.placement import ComputeCost, how_much_to_load, patience_s
from headwater.cache.records import JobKind, JobRecord, RequestRecord, Why
from headwater.cache.whys import Whys
from headwater.core.breaker import BreakerState
from headwater.core.events import Cancel, Load, Probe, Promote
from headwater.core.keys import BlockKey
from headwater.core.results import PUT_HELD, Reason, Status
from headwater.index.base import PathIndex


class Enter(Protocol):
    """Finished blocks of a request get into the index."""

    def __call__(self, request: RequestRecord, keys: Sequence[BlockKey], now_s: float, *, seen: bool) -> None:
        """With `seen` they were not computed but loaded."""
        ...


class Loader:
    """Decides what is read, and takes in what came."""

    def __init__(
        self, index: PathIndex, jobs: Jobs, accounts: Accounts, whys: Whys, *, cost: ComputeCost, enter: Enter
    ) -> None:
        self._index = index
        self._whys = whys
        self._jobs = jobs
        self._accounts = accounts
        self._cost = cost
        self.promoting: dict[BlockKey, int] = {}  # by the first key of a row that is on its way: the job
        self._enter = enter
        self.meetings = Meetings(jobs, accounts, cost=cost, where=self.where, row_end=self.row_end)

    # --- asking -------------------------------------------------------------------------------------------------------

    def probe(self, request: RequestRecord, now_s: float) -> None:
        """Ask every store for what is not on the device. What they said before is forgotten."""
        self.stop_probing(request)
        request.held.clear()
        request.unasked.clear()
        request.asked_s, request.answered_s = now_s, None
        request.probe_start = start = request.hold.num_blocks
        rest = tuple(request.keys[start:])
        for tier in self._jobs.tiers.values() if rest else ():
            if not tier.breakers[JobKind.PROBE].would_allow(now_s):
                request.unasked[tier.name] = Reason.FAILED
                continue
            row: dict[str, Any] = {"keys": rest, "parent": request.before(start)}
            job = self._jobs.begin(JobKind.PROBE, tier, start, start + len(rest), now_s, request=request, **row)
            request.probes[tier.name] = job.job
            deadline_s = now_s + tier.config.probe_timeout_s
            self._jobs.out.append(Probe(job=job.job, store=tier.name, keys=rest, deadline_s=deadline_s))

    def probed(self, request: RequestRecord, job: JobRecord, results: Sequence[Status], failure: Reason | None) -> None:
        """A store answered, or did not."""
        request.probes.pop(job.store, None)
        if failure is None:
            request.held[job.store] = bytearray(map(Status.HELD.__eq__, results))
        else:
            request.unasked[job.store] = reason_of(
                Status.FAILED if failure in (Reason.FAILED, Reason.DOWN) else Status.LATE
            )

    def stop_probing(self, request: RequestRecord) -> None:
        """Who did not answer in time is not waited for."""
        for store, job in request.probes.items():
            request.unasked[store] = Reason.TOO_LATE
            self._jobs[job].request = None
            self._jobs.out.append(Cancel(job=job))
        request.probes.clear()

    def where(self, request: RequestRecord, at: int) -> str | None:
        """The fastest store that says it has a block."""
        if request.barred is not None and at >= request.barred:
            return None
        if at < request.probe_start:  # it was on the device when the stores were asked
            return None
        for name in self._jobs.tiers:
            held = request.held.get(name)
            if held is not None and held[at - request.probe_start]:
                return name
        return None

    def row_end(self, request: RequestRecord, at: int, end: int) -> int:
        """Where the row of blocks ends that one store has, or that none has. Reads bytes, not blocks."""
        first = request.probe_start
        if at < first:
            return min(first, end)
        ends = [end]
        if request.barred is not None:
            if at >= request.barred:
                return end
            ends.append(request.barred)
        for name in self._jobs.tiers:
            held = request.held.get(name)
            if held is None:
                continue
            there = bool(held[at - first])
            change = held.find(not there, at - first)
            if change >= 0:
                ends.append(first + change)
            if there:
                break  # what slower ones have does not matter
        return min(ends)

    # --- loading ------------------------------------------------------------------------------------------------------

    def load(
        self, request: RequestRecord, now_s: float, *, promised: str = "", agreed: bool = False, meet: bool = False
    ) -> None:
        """Load what stores say they have, from the first missing block on, as far as it pays.

        A store that is `promised` to have all of them need not say so, and computing is no alternative. `agreed`: what
        the request has slots for was found to pay, and whoever was told that counts on it. With `meet` the engine can
        compute while what lies behind is loaded.
        """
        request.may_meet = meet = meet and request.barred is None  # what it may load ends somewhere in its prompt
        head_s = 0.0  # until what is loaded first is there
        paused = [name for name in request.held if not self._jobs.tiers[name].breakers[JobKind.LOAD].would_allow(now_s)]
        for store in paused if meet and not promised else ():
            del request.held[store]
            request.unasked[store] = Reason.FAILED
        end = min(request.num_prompt, request.num_blocks)
        if promised:
            if request.base < request.probe_start:  # it had to give room since: what stores said is of other blocks
                request.held.clear()
                request.probe_start = request.base
            request.held[promised] = bytearray(b"\1") * (request.num_prompt - request.probe_start)
            request.unasked.pop(promised, None)
        at = request.load_end = request.base
        while at < end and (name := self.where(request, at)) is not None:
            tier, row_end = self._jobs.tiers[name], self.row_end(request, at, end)
            num_blocks = row_end - at
            if not (promised or agreed):
                size = self._jobs.block_bytes
                if meet and self.meetings.begin(request, at, end, now_s, head_s=head_s):
                    return
                head_s = max(head_s, tier.load_s(num_blocks * size, now_s))
                num_blocks = how_much_to_load(tier, self._cost, start=at, end=row_end, block_bytes=size, now_s=now_s)
                if num_blocks < row_end - at:
                    load_s, compute_s = tier.recall_s((row_end - at) * size), self._cost.row_s(at, row_end)
                    estimate = {"load_s": load_s, "compute_s": compute_s, "worth": tier.worth}
                    request.estimate = Why(at, row_end, name, Reason.NOT_WORTH_IT, estimate)
            if not num_blocks:
                return
            if not tier.breakers[JobKind.LOAD].would_allow(now_s):  # since it was asked: a slower store may have it too
                del request.held[name]
                request.unasked[name] = Reason.FAILED
                continue
            is_trial, row_end = at + num_blocks < row_end, at + num_blocks
            timeout_s = tier.config.load_timeout_s
            if not (promised or agreed):
                timeout_s = patience_s(tier, self._cost, at, row_end)
            row: dict[str, Any] = {"keys": tuple(request.keys[at:row_end]), "parent": request.before(at)}
            job = self._jobs.begin(JobKind.LOAD, tier, at, row_end, now_s, request=request, **row)
            request.loads.append(job)
            self._jobs.out.append(
                Load(
                    job=job.job,
                    store=name,
                    keys=job.keys,
                    slots=tuple(request.own[at - request.base : row_end - request.base]),
                    deadline_s=now_s + timeout_s,
                )
            )
            at = request.load_end = row_end
            if is_trial:
                self._accounts.add("trial_loads_total", 1, tier=name)
                return

    def settle(self, request: RequestRecord, now_s: float) -> int:
        """Take in what was loaded, in order. Returns how many blocks more the request has, once it may compute."""
        num_fresh = self._settle_front(request, now_s) if request.ready_s is None else 0
        while (found := self.meetings.next_row(request)) is not None:
            job, num_hit = found
            self._take_in(request, job, num_hit, now_s)
            num_fresh += num_hit
        self.meetings.go_on(request, now_s)
        self.meetings.end_if_over(request)
        return num_fresh

    def _take_in(self, request: RequestRecord, job: JobRecord, num_hit: int, now_s: float) -> None:
        end = job.start + num_hit
        self._enter(request, request.keys[job.start : end], now_s, seen=True)
        self._index.mark(request.hold, job.start, end, bit=self._jobs.tiers[job.store].bit, on=True)
        request.num_loaded[job.store] = request.num_loaded.get(job.store, 0) + num_hit
        request.loaded_bytes += num_hit * self._jobs.block_bytes
        request.whys.append(Why(job.start, end, job.store))

    def _settle_front(self, request: RequestRecord, now_s: float) -> int:
        """What is loaded before the request may compute; when that is over, the rest is explained."""
        while request.loads and (results := request.loads[0].results) is not None:
            job = request.loads.pop(0)
            if request.broken is not None:
                continue  # something in front of it is missing
            num_hit = leading_hits(results)
            if num_hit:
                self._take_in(request, job, num_hit, now_s)
            if num_hit < len(results):
                request.broken = reason_of(results[num_hit])
                at, found = job.start + num_hit, results[num_hit]
                request.culprit = Why(at, job.end, job.store, request.broken, {"found": str(found), "block": at})
                self._give_up_front(request)
        if request.loads:
            return 0
        if request.may_meet and request.broken is Reason.TOO_LATE and request.meeting is None:  # the rest from its end
            self.meetings.begin(request, request.hold.num_blocks, request.load_end, now_s, late=True)  # and no more
        request.ready_s = now_s
        self._explain(request)
        return sum(request.num_loaded.values())

    def give_up(self, request: RequestRecord) -> None:
        """Load no more for a request. What is under way ends with an event, and its slots are not to be used before."""
        request.may_meet = False
        self._give_up_front(request)
        self.meetings.give_up(request)

    def _give_up_front(self, request: RequestRecord) -> None:
        for job in request.loads:
            if job.results is None and not job.cancelled:
                job.cancelled = True
                self._jobs.out.append(Cancel(job=job.job))

    def _explain(self, request: RequestRecord) -> None:
        """Say of each block that has to be computed why; of those that may still come, a meeting says it at its end."""
        meeting = request.meeting
        hole: Why | None = None  # why the first block that no store has is a miss
        at = request.hold.num_blocks
        while at < request.num_prompt:
            if meeting is not None and meeting.start <= at < meeting.end:
                at = meeting.end
                continue
            end = self.row_end(request, at, request.num_prompt)
            if meeting is not None and at < meeting.start:
                end = min(end, meeting.start)
            if self.where(request, at) is not None:
                rows = [self._unread(request, hole)._replace(start=at, end=end)]
            else:
                rows = list(self._absent(request, at, end))
                hole = hole or rows[0]
            request.whys += rows
            for row in rows:
                self._count(request, row)
            at = end
        if request.num_unnamed:
            why = hole or request.culprit or Why(0, 0, "", Reason.NEVER_STORED)
            row = why._replace(start=request.num_prompt, end=request.num_prompt + request.num_unnamed)
            request.whys.append(row)
            self._count(request, row)

    def _count(self, request: RequestRecord, row: Why) -> None:
        if row.reason is not None:
            request.misses[row.reason] = request.misses.get(row.reason, 0) + row.end - row.start

    def _unread(self, request: RequestRecord, hole: Why | None) -> Why:
        """Why blocks that a store has are misses, wherever they are."""
        if hole is not None:
            return hole._replace(facts={**hole.facts, "behind": hole.start})
        return request.culprit or request.estimate or Why(0, 0, "", Reason.NOT_WORTH_IT, {"asked": "no load"})

    def _absent(self, request: RequestRecord, at: int, end: int) -> Iterator[Why]:
        """Why blocks that no store has are misses."""
        if request.unasked:
            store, silent = next(iter(request.unasked.items()))
            yield Why(at, end, store, silent, {"found": "no answer"})
            return
        if at < request.probe_start:
            yield Why(at, end, DEVICE, Reason.EVICTED, self._whys.eviction(request.keys[at]))
            return
        evicting = self._index.evicting()
        ghosts = evicting.ghosts if evicting is not None else ()
        known = bytearray(key in ghosts for key in request.keys[at:end]) if len(ghosts) else bytes(end - at)
        start = at
        while at < end:
            was_known = bool(known[at - start])
            change = known.find(not was_known, at - start)
            row_end = start + change if change >= 0 else end
            if was_known:
                yield Why(at, row_end, DEVICE, Reason.EVICTED, self._whys.eviction(request.keys[at]))
            else:
                yield Why(at, row_end, "", Reason.NEVER_STORED)
            at = row_end

    # --- while a request waits ----------------------------------------------------------------------------------------

    def prefetch(self, request: RequestRecord, now_s: float) -> None:
        """Bring the first row that only a slower store has to the fastest one."""
        target = next(iter(self._jobs.tiers.values()))
        at, end = request.probe_start, request.num_prompt
        while at < end and self.where(request, at) == target.name:
            at += 1
        source = self.where(request, at) if at < end else None
        if source is None or target.name not in request.held:
            return
        if at == request.probe_start and self._index.num_marked(request.hold, target.bit) < at:
            return  # the fastest store lacks what the row builds on
        row_end = self.row_end(request, at, end)
        tier = self._jobs.tiers[source]
        if max(tier.state, target.state) is not BreakerState.CLOSED or request.keys[at] in self.promoting:
            return  # no probe, and not what another request has begun to bring
        refusal = target.overloaded((row_end - at) * self._jobs.block_bytes, now_s)
        if refusal is not None:
            self._accounts.add("dropped_blocks_total", row_end - at, tier=target.name, reason=refusal)
            return
        keys = tuple(request.keys[at:row_end])
        row: dict[str, Any] = {"keys": keys, "parent": request.before(at), "target": target.name}
        job = self._jobs.begin(JobKind.PROMOTE, tier, at, row_end, now_s, request=request, **row)
        deadline_s = now_s + tier.config.load_timeout_s
        self.promoting[keys[0]] = job.job
        self._jobs.out.append(Promote(job=job.job, store=source, target=target.name, keys=keys, deadline_s=deadline_s))

    def promoted(self, job: JobRecord, request: RequestRecord | None, results: Sequence[Status]) -> None:
        """Blocks came to the fastest store. One that is being asked again meanwhile will say so itself."""
        self.promoting = {key: number for key, number in self.promoting.items() if number != job.job}
        held = request.held.get(job.target or "") if request is not None and not request.reserved else None
        if request is None or held is None:
            return
        for at, result in enumerate(results, job.start - request.probe_start):
            held[at] |= result in PUT_HELD
