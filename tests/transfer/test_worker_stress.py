"""Hundreds of jobs over four stores that hang, raise, lie and spoil: each ends once, and no byte is ever wrong.

The listener is an engine that waits for nothing: it scribbles over the slots of a save as soon as it hears that they
are not read any more, and remembers the slots of a load as they were when it heard the end. A gather after that puts
scribble under a key, and a later load finds it; a scatter after that changes what was remembered.
"""

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.events import (
    Cancel,
    Copied,
    Demote,
    Event,
    JobDone,
    JobFailed,
    Load,
    Probe,
    Promote,
    Save,
    StoreCopy,
    StoreOff,
)
from headwater.core.page import PageName
from headwater.core.results import Status
from headwater.storage.base import Deadline, Store
from headwater.storage.memory import MemoryStore
from headwater.storage.wrappers import OpaqueStore
from headwater.testing.faulty_stores import Faults, FaultyStore
from worker_kit import FRAME_BYTES, LAYOUT, PATIENCE_S, Rig, key, keys

NUM_JOBS = 300
CHAIN_BLOCKS = 10
NUM_CHAINS = 6


class WildStore(OpaqueStore):
    """Sometimes takes its time, past any deadline; sometimes raises; sometimes answers too little."""

    def __init__(self, store: Store, seed: int) -> None:
        super().__init__(store)
        self._chance = random.Random(seed)
        self.calm = False

    def _wild(self, answers: Sequence[Any]) -> list[Any]:
        dice = 1.0 if self.calm else self._chance.random()
        if dice < 0.05:
            time.sleep(self._chance.random() * 0.15)
        elif dice < 0.08:
            raise RuntimeError("wild")
        elif dice < 0.11:
            return list(answers[:-1])
        return list(answers)

    def put(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        return self._wild(self.store.put(pages, deadline=deadline))

    def get_into(self, pages: Sequence[tuple[PageName, memoryview]], *, deadline: Deadline) -> list[Status]:
        self._wild([])
        return self._wild(self.store.get_into(pages, deadline=deadline))

    def contains(self, names: Sequence[PageName], *, deadline: Deadline) -> list[bool]:
        return self._wild(self.store.contains(names, deadline=deadline))


def payload(chain: int, depth: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng([chain, depth]).integers(0, 256, LAYOUT.page_bytes, dtype=np.uint8)


def dawdle(slot: int, _: int) -> None:
    """Some blocks take a while to copy."""
    if slot % 7 == 0:
        time.sleep(0.002)


class Engine:
    """Uses each slot for one job, and reuses it the moment it may."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.orders: dict[int, Load | Save | Probe | StoreCopy] = {}
        self.where: dict[int, tuple[int, int]] = {}  # a job's chain and first depth
        self.left: dict[int, bytes] = {}  # slots of loads, as they were at the end
        self.wrong: list[str] = []
        self.next_slot = 0
        rig.ear.extra = self.hear

    def slots(self, number: int) -> tuple[int, ...]:
        self.next_slot += number
        return tuple(range(self.next_slot - number, self.next_slot))

    def hear(self, event: Event) -> None:
        if not isinstance(event, Copied | JobDone | JobFailed):
            return
        order = self.orders[event.job]
        device = self.rig.staging.device
        if isinstance(order, Save):
            device[list(order.slots)] = 0xEE
        if isinstance(order, Load):
            chain, start = self.where[event.job]
            if isinstance(event, JobDone):
                hits = [i for i, one in enumerate(event.results) if one == "hit"]
                if hits != list(range(len(hits))):
                    self.wrong.append(f"hits with a gap: {event.results}")
                for i in hits:
                    if not (device[order.slots[i]] == payload(chain, start + i)).all():
                        self.wrong.append(f"job {event.job}: block {i} holds wrong bytes")
            for slot in order.slots:
                self.left[slot] = bytes(device[slot])


@pytest.mark.parametrize("seed", range(4))
def test_each_job_ends_once_and_no_byte_is_wrong(seed: int, shm: Path, tmp_path: Path) -> None:
    chance = random.Random(seed)
    wild = WildStore(MemoryStore(40 * FRAME_BYTES), seed)  # evicts
    faults = Faults(
        put_fails=0.02, get_fails=0.02, flips_byte=0.03, cuts_tail=0.03, swaps_page=0.03, contains_lies=0.03
    )
    stores: dict[str, Store] = {
        "wild": wild,
        "faulty": FaultyStore(MemoryStore(64 << 20), faults, seed=seed),
        "host": open_local(LocalStoreConfig(directory=shm / "store", limit_bytes=8 << 20)),
        "disk": open_local(LocalStoreConfig(directory=tmp_path / "store", limit_bytes=8 << 20)),
    }
    rig = Rig(
        stores,
        num_slots=NUM_JOBS * CHAIN_BLOCKS,
        num_pages=12,
        slice_pages=4,
        threads_per_store=chance.choice([1, 2, 3]),
        max_extra_threads=1,
        grace_s=0.01,
    )
    rig.staging.on_gather = rig.staging.on_scatter = dawdle
    engine = Engine(rig)
    for number in range(1, NUM_JOBS + 1):
        chain, start = chance.randrange(NUM_CHAINS), chance.choice([0, 0, 0, 4])
        length = chance.randrange(0, CHAIN_BLOCKS - start + 1)
        engine.where[number] = (chain, start)
        store = chance.choice(list(stores))
        within_s = chance.choice([0.0, 0.01, 0.05, 0.2, 5.0, 5.0])
        facts: dict[str, Any] = {
            "job": number,
            "store": store,
            "keys": keys(chain, length, start),
            "deadline_s": time.monotonic() + within_s,
        }
        kind = chance.choice([Probe, Load, Load, Save, Save, Promote, Demote])
        if kind is Save:
            facts |= {"slots": engine.slots(length), "parent": key(chain, start - 1), "depth": start}
            facts["tenant"] = bytes(16)
            for i, slot in enumerate(facts["slots"]):
                rig.staging.device[slot] = payload(chain, start + i)
        elif kind is Load:
            facts["slots"] = engine.slots(length)
        elif kind in (Promote, Demote):
            facts["target"] = chance.choice([other for other in stores if other != store])
        if kind is Demote:
            facts["parent"] = key(chain, start - 1)
        if kind in (Save, Demote):
            facts["after"] = chance.choice([0, max(0, number - chance.randrange(1, 6))])
        engine.orders[number] = kind(**facts)
        rig.submit(engine.orders[number])
        if chance.random() < 0.1:
            rig.submit(Cancel(job=chance.randrange(max(1, number - 4), number + 1)))
        if chance.random() < 0.2:
            time.sleep(chance.random() * 0.01)
    if seed % 2:
        assert rig.worker.drain(PATIENCE_S)
    wild.calm = True
    rig.finish()  # counts the ends
    assert not engine.wrong, engine.wrong[:5]
    changed = [slot for slot, content in engine.left.items() if bytes(rig.staging.device[slot]) != content]
    assert not changed, "slots were written after the end of their load was told"
    hits = sum(event.results.count("hit") for event in rig.ear.events if isinstance(event, JobDone))
    assert hits or not seed % 2
    assert not any(isinstance(event, StoreOff) and event.store in ("host", "disk") for event in rig.ear.events)
