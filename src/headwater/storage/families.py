"""Whose pages a LocalStore holds, as people ask: identities and tenants. A part of the index (`catalog.py`)."""

import sqlite3
from dataclasses import dataclass
from typing import NamedTuple

from headwater.core.page import PageName


@dataclass(frozen=True, slots=True)
class FamilyUse:
    """What one identity and tenant keep in the store."""

    identity: bytes
    tenant: bytes
    label: str
    num_pages: int
    num_bytes: int
    num_tokens: int
    max_depth: int
    last_used_s: float


class PagePath(NamedTuple):
    """A page, the one before it, and its depth; `slot` is where it lies."""

    slot: int
    name: PageName
    parent: PageName
    depth: int


class Families:
    """Identities with one tenant each, numbered. Runs inside the catalog's transactions and snapshots."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._numbers: dict[tuple[bytes, bytes], int] = {}

    def forget(self) -> None:
        """A transaction was rolled back: what it numbered may not be so."""
        self._numbers.clear()

    def number(self, identity: bytes, tenant: bytes) -> int:
        """The number of a family, new if need be. Inside a transaction."""
        family = self._numbers.get((identity, tenant))
        if family is None:
            self._db.execute("INSERT OR IGNORE INTO families VALUES (NULL, ?, ?, '')", (identity, tenant))
            row = self._db.execute("SELECT family FROM families WHERE identity = ? AND tenant = ?", (identity, tenant))
            family = self._numbers[identity, tenant] = int(row.fetchone()[0])
        return family

    def label(self, identity: bytes, tenant: bytes, label: str) -> None:
        """Give an identity a name for people."""
        self._db.execute("UPDATE families SET label = ? WHERE family = ?", (label, self.number(identity, tenant)))

    def names(self, identity: bytes | None, tenant: bytes | None) -> list[PageName]:
        """All pages of an identity, a tenant, both, or the whole store."""
        rows = self._db.execute(
            "SELECT name FROM slots JOIN families USING (family) WHERE state = 2 "
            "AND (:identity IS NULL OR identity = :identity) AND (:tenant IS NULL OR tenant = :tenant)",
            {"identity": identity, "tenant": tenant},
        ).fetchall()
        return [PageName(row[0]) for row in rows]

    def paths(self, identity: bytes, num_tokens: int, *, after: int, limit: int) -> list[PagePath]:
        """Pages of an identity's blocks of so many tokens that do not expire, by slot, from behind a slot on."""
        rows = self._db.execute(
            "SELECT slot, name, parent, depth FROM slots JOIN families USING (family) WHERE state = 2 AND slot > ? "
            "AND identity = ? AND valid_tokens = ? AND expires_ms = 0 ORDER BY slot LIMIT ?",
            (after, identity, num_tokens, limit),
        )
        return [PagePath(*row) for row in rows]

    def usage(self) -> list[FamilyUse]:
        """What each identity and tenant keep."""
        rows = self._db.execute(
            "SELECT identity, tenant, label, COUNT(*), SUM(num_bytes), SUM(valid_tokens), MAX(depth), MAX(used_s) "
            "FROM slots JOIN families USING (family) WHERE state = 2 GROUP BY family ORDER BY 5 DESC"
        ).fetchall()
        return [FamilyUse(*row) for row in rows]
