"""`headwater verify --pd`: what a prefill and a decode node answer together equals what one engine answers alone.

For every attention family, on a pool of each sort: LocalStore, and real Mooncake and Redis servers that are started on
loopback for it. A pool whose server cannot be had is told as absent, and then not everything was proven.

Engines are the reference engine's, all in this process, and compute on one device each. Tensor parallelism is that of
the pages: see `pd_ranks.py`.
"""

import datetime
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from headwater.build import open_local, open_pool
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import InvalidConfig, NotInstalled, StoreError, StoreUnavailable
from headwater.core.role import Role
from headwater.engine.loader import load_model
from headwater.engine.make_model import make_model
from headwater.engine.models.base import Model
from headwater.lab.verify.cases import BLOCK_TOKENS, FAMILIES, Tell
from headwater.lab.verify.pd_cases import PdCase, Suite
from headwater.lab.verify.pd_nodes import PdNode, Spoiling, open_node
from headwater.lab.verify.pd_ranks import open_ranks
from headwater.lab.verify.pd_request import Comparison, Nodes
from headwater.pool import local as mooncake
from headwater.storage.base import Store
from headwater.storage.scratch import disk_root, memory_root
from headwater.testing.redis import redis_server

POOLS: Final = ("local", "mooncake", "redis")
_ROOM_BYTES: Final = 64 << 20
_NOTES: Final = {
    "equal": "tokens and, where they are told, log-probabilities to the last bit",
    "engines": "the reference engine, in one process, each with a model of its own; tickets pass as text",
    "TP 2 to 1": "computed on one device; the pages are those of two ranks, cut from its planes. Where nothing is "
    "divided by heads (mla, dsa) they are the same pages at every size",
    "no seed of the client's": "compared with one engine that is given the seed which prefill chose, from the ticket",
}


@dataclass(frozen=True, slots=True)
class PoolRun:
    """One pool that was asked for. `absent`: why it could not be had; then there are no cases of it."""

    pool: str
    absent: str
    seconds: float


@dataclass(slots=True)
class PdReport:
    """All that was compared."""

    device: str
    inject: bool
    pools: list[PoolRun] = field(default_factory=list)
    cases: list[PdCase] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether nothing that was compared differs."""
        return all(case.equal for case in self.cases)

    @property
    def ok(self) -> bool:
        """Whether all that was asked for was compared, and is equal."""
        return self.equal and bool(self.cases) and not any(run.absent for run in self.pools)

    def document(self) -> dict[str, Any]:
        """Plain JSON values."""
        asked = [run.pool for run in self.pools]
        line = f"verify --pd --pool {'all' if asked == list(POOLS) else ','.join(asked)} --device {self.device}"
        return {
            "command": line + " --inject" * self.inject,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "ok": self.ok,
            "equal": self.equal,
            "device": self.device,
            "inject": self.inject,
            "pools": [asdict(run) for run in self.pools],
            "num_cases": len(self.cases),
            "cases": [asdict(case) | {"equal": case.equal} for case in self.cases],
            "notes": _NOTES,
        }


def run(
    *,
    pools: Sequence[str] = POOLS,
    model: Path | None = None,
    device: str = "cpu",
    inject: bool = False,
    tell: Tell | None = None,
) -> PdReport:
    """Verify every family, or one model's directory, on these pools. Blocks for minutes. Raises InvalidConfig."""
    strange = [pool for pool in pools if pool not in POOLS]
    if strange or not pools:
        raise InvalidConfig(f"--pool is one of {', '.join(POOLS)} or all, not {', '.join(strange) or 'none'}")
    families = FAMILIES if model is None else {"model": ("", "auto")}
    report = PdReport(device, inject)
    with tempfile.TemporaryDirectory(prefix="headwater-verify-", dir=disk_root()) as scratch:
        models = [_Family(name, model or Path(scratch) / name, kv, device) for name, (_, kv) in families.items()]
        for family in models:
            if model is None:
                make_model(families[family.name][0], family.path)
        for number, pool in enumerate(pools):
            begin_s = time.monotonic()

            def tell_case(what: str, done: int, pool: str = pool, number: int = number) -> None:
                if tell is not None:
                    tell(f"{pool}, {what}", number * len(models) + done, len(pools) * len(models))

            absent = _verify(pool, models, report.cases, inject=inject, tell=tell_case)
            report.pools.append(PoolRun(pool, absent, round(time.monotonic() - begin_s, 1)))
    return report


@dataclass(frozen=True, slots=True)
class _Family:
    """A checkpoint, and how its KV is kept."""

    name: str
    path: Path
    kv: str
    device: str

    def load(self) -> Model:
        """The model, once more. Blocks."""
        return load_model(self.path, device=self.device, dtype="float32", kv=self.kv, block_tokens=BLOCK_TOKENS)


def _verify(
    pool: str,
    families: Sequence[_Family],
    cases: list[PdCase],
    *,
    inject: bool,
    tell: Callable[[str, int], None],
) -> str:
    """Add what was found on one pool to `cases`; else why it cannot be had."""
    with ExitStack() as stack:
        try:
            url = stack.enter_context(_OPENERS[pool]())
            store = stack.enter_context(open_pool(url))
        except (StoreError, NotInstalled) as error:
            return str(error)
        for number, family in enumerate(families):
            with _open_suite(family, pool, url, store=store, inject=inject) as suite:
                for case, check in suite.cases().items():
                    tell(f"{family.name}: {case}", number)
                    cases.append(check())
    return ""


@contextmanager
def _open_suite(family: _Family, pool: str, url: str, *, store: Store, inject: bool) -> Iterator[Suite]:
    with ExitStack() as stack:

        def node(name: str, role: Role, *, spoilt: bool = False) -> PdNode:
            model = family.load()
            where = None if role is Role.MIXED else url
            opened = open_node(name, Spoiling(model) if spoilt else model, family.path, role=role, pool=where)
            return stack.enter_context(opened)

        model = family.load()
        nodes = Nodes(
            alone=node("alone", Role.MIXED),
            prefill=node("prefill", Role.PREFILL),
            other=node("the other prefill", Role.PREFILL),
            ranks=stack.enter_context(open_ranks("prefill of two ranks", model, url)),
            decode=node("decode", Role.DECODE, spoilt=inject),
        )
        yield Suite(family.name, pool, Comparison(model, nodes, store))


@contextmanager
def _local_pool() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="headwater-verify-", dir=memory_root(2 * _ROOM_BYTES)) as path:
        directory = Path(path) / "pool"
        open_local(LocalStoreConfig(directory=directory, limit_bytes=_ROOM_BYTES)).close()
        yield f"local:{directory}"


@contextmanager
def _mooncake_pool() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="headwater-verify-") as path:
        try:
            found = mooncake.up(Path(path), segment_bytes=_ROOM_BYTES)
            if found.url is None:
                raise StoreUnavailable(found.why)
            yield found.url
        finally:
            mooncake.down(Path(path))


_OPENERS: Final[dict[str, Callable[[], AbstractContextManager[str]]]] = {
    "local": _local_pool,
    "mooncake": _mooncake_pool,
    "redis": lambda: redis_server(_ROOM_BYTES),
}
