"""A store of very many small pages: what `contains` costs in it, and a restart. Part of `headwater bench store`."""

import hashlib
import time
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import StoreDamaged, StoreError
from headwater.core.page import PageName, page_name
from headwater.core.results import Status
from headwater.lab.bench.contenders import CALL_S, require
from headwater.lab.bench.pools import IDENTITY, Page, Pool, endless, seal_all
from headwater.lab.bench.report import Samples, Tell
from headwater.layout.spec import opaque_layout
from headwater.storage.base import Deadline
from headwater.storage.local import LocalStore
from headwater.storage.verified import VerifiedStore

SMALL: Final = opaque_layout([4096], block_tokens=16)
_SMALL_CHAIN: Final = 64
_SMALL_BATCH: Final = 1024
_KEYS_PER_CALL: Final = 2048
_REOPEN_ROUNDS: Final = 4


def reopen(path: Path, *, num_entries: int, limit_bytes: int, samples: Samples, tell: Tell | None) -> None:
    """Build the store in `path`, then open, ask and close it several times. Blocks for long."""
    pool = Pool(SMALL, _SMALL_BATCH)
    begin_s = time.perf_counter()
    with open_local(LocalStoreConfig(directory=path, limit_bytes=limit_bytes)) as store:
        names = _build(store, pool, num_entries, tell)
    samples.add("reopen_build_s", time.perf_counter() - begin_s)
    rng = np.random.default_rng(0)
    for done in range(_REOPEN_ROUNDS):
        if tell is not None:
            tell("reopening", done, _REOPEN_ROUNDS)
        number = int(rng.integers(num_entries))
        begin_s = time.perf_counter()
        with open_local(LocalStoreConfig(directory=path)) as store:
            verified = VerifiedStore(store, identity=IDENTITY, plane_bytes=SMALL.plane_bytes)
            answer = verified.get_into([(names[number], pool.frame(0))], deadline=Deadline.after(CALL_S))
            # The first time after it was made is told apart: a median would hide what only that one costs.
            samples.add("reopen_s" if done else "reopen_first_s", time.perf_counter() - begin_s)
            require(answer, Status.HIT)
            if pool.payload(0) != _small_payload(number):
                raise StoreDamaged("a reopened store gave back wrong bytes")
            if store.metrics.events("local_rebuilt"):
                raise StoreError("the index was rebuilt where it should have been opened")
            _contains(store, names, samples, rng)


def _build(store: LocalStore, pool: Pool, num_entries: int, tell: Tell | None) -> list[PageName]:
    metas = endless(SMALL, seed=1, chain=_SMALL_CHAIN)
    names: list[PageName] = []
    while len(names) < num_entries:
        pages: list[Page] = []
        for place, meta in enumerate(islice(metas, min(pool.num_pages, num_entries - len(names)))):
            pool.payload(place)[:] = _small_payload(len(names) + place)
            pages.append((meta, pool.frame(place)))
        seal_all(pages, SMALL)
        batch = [(meta.name, frame) for meta, frame in pages]
        require(store.put(batch, deadline=Deadline.after(CALL_S)), Status.STORED)
        names += [name for name, _ in batch]
        if tell is not None:
            tell(f"storing {num_entries:,} pages", len(names), num_entries)
    return names


def _contains(store: LocalStore, names: list[PageName], samples: Samples, rng: np.random.Generator) -> None:
    known = [names[i] for i in rng.integers(0, len(names), _KEYS_PER_CALL).tolist()]
    unknown = [page_name(hashlib.sha256(name).digest()) for name in known]
    for what, asked, expected in (("contains", known, True), ("contains_miss", unknown, False)):
        for _ in range(5):
            begin_s = time.perf_counter()
            answers = store.contains(asked, deadline=Deadline.after(CALL_S))
            samples.add(f"{what}_us_per_key", (time.perf_counter() - begin_s) / len(asked) * 1e6)
            if answers != [expected] * len(asked):
                raise StoreError(f"{what} answered {answers.count(expected)} of {len(asked)} keys right")


def _small_payload(number: int) -> bytes:
    return number.to_bytes(8, "little") * (SMALL.page_bytes // 8)
