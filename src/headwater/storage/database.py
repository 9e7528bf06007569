"""The index file as SQLite sees it: connection, schema, transactions with deadlines, and errors in our words.

Tables are STRICT, so that SQLite's own check of the file also looks at what is in the columns.

WAL, so that readers and the one writer do not wait for each other. A process that is stopped while it holds the write
lock costs the others an error at their deadline, never a hang. Not here: what the rows mean (`catalog.py`).
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from headwater.core.errors import StoreDamaged
from headwater.storage.base import Deadline

VERSION: Final = 1
FREE: Final = 0  # written out in the SQL: a partial index serves only a query that names the same literal
RESERVED: Final = 1
LIVE: Final = 2

SCHEMA: Final = """
CREATE TABLE meta(name TEXT PRIMARY KEY, value ANY) STRICT, WITHOUT ROWID;
CREATE TABLE owners(owner INTEGER PRIMARY KEY AUTOINCREMENT, token TEXT NOT NULL) STRICT;
CREATE TABLE families(family INTEGER PRIMARY KEY, identity BLOB NOT NULL, tenant BLOB NOT NULL, label TEXT NOT NULL,
    UNIQUE(identity, tenant)) STRICT;
CREATE TABLE extents(extent INTEGER PRIMARY KEY, slot_bytes INTEGER NOT NULL) STRICT;
CREATE TABLE slots(
    slot INTEGER PRIMARY KEY,       -- offset in the slab, in sectors
    slot_bytes INTEGER NOT NULL, state INTEGER NOT NULL, generation INTEGER NOT NULL, owner INTEGER NOT NULL,
    name BLOB, parent BLOB, family INTEGER NOT NULL DEFAULT 0, depth INTEGER NOT NULL DEFAULT 0,
    num_bytes INTEGER NOT NULL DEFAULT 0, valid_tokens INTEGER NOT NULL DEFAULT 0,
    expires_ms INTEGER NOT NULL DEFAULT 0, hits INTEGER NOT NULL DEFAULT 0, used_s REAL NOT NULL DEFAULT 0,
    priority REAL NOT NULL DEFAULT 0) STRICT;
CREATE TABLE log(seq INTEGER PRIMARY KEY, slot INTEGER NOT NULL) STRICT;
CREATE UNIQUE INDEX live_name ON slots(name) WHERE state = 2;
CREATE INDEX live_expiry ON slots(expires_ms) WHERE state = 2 AND expires_ms > 0;
CREATE INDEX free_slot ON slots(slot_bytes) WHERE state = 0;
CREATE INDEX reserved_slot ON slots(owner) WHERE state = 1;
"""


class CatalogBusy(Exception):
    """The lock was not to be had by the deadline. Internal: becomes a LATE result."""


class CatalogFull(Exception):
    """The medium has no room for the index. Internal: becomes a NO_ROOM result."""


class Database:
    """One connection. Not safe from several threads."""

    def __init__(self, path: Path, *, power_safe: bool) -> None:
        """Connect. Raises StoreDamaged if the file cannot be read as an index, CatalogBusy if it is locked."""
        self.path = path
        with self.translated():
            self.db = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=0, cached_statements=64
            )
        try:
            with self.translated():
                self.db.execute("PRAGMA journal_mode = WAL")
                self.db.execute(f"PRAGMA synchronous = {'FULL' if power_safe else 'OFF'}")
                self.db.execute("PRAGMA wal_autocheckpoint = 256")
                self.db.execute("PRAGMA journal_size_limit = 1048576")
        except BaseException:
            self.db.close()
            raise
        self._inode = path.stat().st_ino

    def create(self, meta: dict[str, Any]) -> None:
        """Write an empty index, all of it or nothing."""
        with self.writing(Deadline.after(10.0)):
            for statement in SCHEMA.split(";"):
                self.db.execute(statement)
            self.set_meta(**meta)

    def meta(self) -> dict[str, Any]:
        """All settings of the directory. Raises StoreDamaged if they cannot be read."""
        with self.translated():
            return dict(self.db.execute("SELECT name, value FROM meta").fetchall())

    def set_meta(self, **values: Any) -> None:
        """Change settings."""
        with self.translated():
            self.db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())

    def sound(self) -> bool:
        """Whether SQLite finds the file well formed. Reads all of it."""
        try:
            rows = self.db.execute("PRAGMA quick_check(1)").fetchall()
        except sqlite3.Error:
            return False
        return bool(rows == [("ok",)])

    def close(self) -> None:
        """Disconnect."""
        self.db.close()

    def fold_log(self) -> bool:
        """Fold SQLite's log into the index file. False while another process still reads from the log."""
        with self.translated():
            self.db.execute("PRAGMA busy_timeout = 0")
            busy, _, _ = self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return not busy

    @contextmanager
    def writing(self, deadline: Deadline) -> Iterator[None]:
        """Hold the write lock; commit at the end, roll back on an error.

        Raises CatalogBusy at the deadline, CatalogFull without room, StoreDamaged for all else that SQLite reports.
        """
        self._require_same_file()
        with self.translated():
            self._wait_until(deadline)
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.db.execute("COMMIT")
            except BaseException:
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")
                raise

    @contextmanager
    def reading(self, deadline: Deadline) -> Iterator[None]:
        """One snapshot for several questions. Raises as `writing` does."""
        with self.translated():
            self._wait_until(deadline)
            self.db.execute("BEGIN")
            try:
                yield
            finally:
                self.db.execute("COMMIT")

    @contextmanager
    def translated(self) -> Iterator[None]:
        """SQLite's errors in our words."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte is the primary code
            # PROTOCOL: a process was stopped in the middle of SQLite's own bookkeeping; the index is none the worse.
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL):
                raise CatalogBusy from error
            if code == sqlite3.SQLITE_FULL:
                raise CatalogFull from error
            raise StoreDamaged(f"{self.path}: {error}") from error

    def _wait_until(self, deadline: Deadline) -> None:
        self.db.execute(f"PRAGMA busy_timeout = {int(deadline.remaining_s * 1000)}")

    def _require_same_file(self) -> None:
        try:
            inode = os.stat(self.path).st_ino
        except OSError:
            inode = 0
        if inode != self._inode:
            raise StoreDamaged(f"{self.path} was removed or replaced under this process")
