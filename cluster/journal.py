"""The router's memory on disk: a small SQLite database that outlives it."""

import json
import logging
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from cluster.network_storage import is_shared
from lora_core.errors import ConfigError, LoRAFleetError, RouterReplaced

logger = logging.getLogger(__name__)

FORMAT = 5
"""`PRAGMA user_version` of the tables below. What an earlier format lacks is added when a journal is opened: format 1
had no fingerprints, format 2 no content hashes, pins and reports, format 3 no least copies and aliases, format 4 no
times of loads."""

TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS adapters (
    name TEXT PRIMARY KEY, path TEXT NOT NULL, generation INTEGER NOT NULL, state TEXT NOT NULL,
    static INTEGER NOT NULL, fingerprint TEXT, content_hash TEXT, pinned INTEGER NOT NULL DEFAULT 0, report BLOB,
    min_copies INTEGER NOT NULL DEFAULT 1, created INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS withdrawn (name TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS aliases (
    name TEXT NOT NULL, epoch INTEGER NOT NULL, targets TEXT NOT NULL, PRIMARY KEY (name, epoch)
) WITHOUT ROWID;
"""

LATER_COLUMNS = {
    "fingerprint": "TEXT",
    "content_hash": "TEXT",
    "pinned": "INTEGER NOT NULL DEFAULT 0",
    "report": "BLOB",
    "min_copies": "INTEGER NOT NULL DEFAULT 1",
    "created": "INTEGER NOT NULL DEFAULT 0",
}
"""Columns of `adapters` that format 1 did not have."""

BUSY_TIMEOUT_S = 5.0
"""How long a write waits for another process's."""


class AdapterRow(NamedTuple):
    """An adapter as the journal keeps it."""

    name: str
    path: str
    generation: int
    state: str
    static: bool
    fingerprint: str | None
    """Of the files in `path` when it was loaded; None where unknown."""
    content_hash: str | None = None
    """Identity of what was loaded; None where unknown."""
    pinned: bool = False
    report: bytes | None = None
    """JSON of the `LoadReport` of its load; None where unknown."""
    min_copies: int = 1
    created: int = 0
    """Unix time of its load; 0 where unknown."""


class AliasRow(NamedTuple):
    """What an alias stood for from one epoch on."""

    name: str
    epoch: int
    targets: dict[str, float]
    """Adapter name -> share."""


def session_journal(session: Path, app: str, deployment: str) -> Path:
    """Where a deployment's journal is in a Ray session's folder: one file, whatever version of its code runs."""
    return session / f"adapter_router-{quote(app, safe='')}+{quote(deployment, safe='')}.sqlite"


class Journal:
    """Epoch counter, adapters, aliases, and static adapters withdrawn at run time.

    The last process to open a journal owns it; an earlier owner's writes are refused, so that two routers never hand
    out one epoch twice.

    It is written ahead (WAL) on this machine's own storage. On storage that other machines share it keeps a rollback
    journal instead: a WAL's readers and writers share memory, which machines do not, while a rollback journal needs no
    more than the file locks of POSIX.

    Args:
        path: Database file; unset keeps everything in memory.

    Raises:
        ConfigError: the file cannot be opened, or is not such a database.
    """

    def __init__(self, path: Path | None) -> None:
        self._where = "memory" if path is None else str(path)
        self._owner = uuid.uuid4().hex
        self.on_replaced: Callable[[str], None] = lambda run: None
        """Called with the run of a later owner when a write is refused for its sake."""
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            # The owner may be built on one thread and used on another, never at once.
            self._database = sqlite3.connect(
                ":memory:" if path is None else path,
                timeout=BUSY_TIMEOUT_S,
                isolation_level=None,
                check_same_thread=False,
            )
            self._open("TRUNCATE" if path is not None and is_shared(path) else "WAL")
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(
                f"the adapter journal {self._where} cannot be opened ({error}); "
                "name a writable SQLite file in `router.journal`, or set it to ':memory:' to keep no file"
            ) from error

    @property
    def epoch(self) -> int:
        """The last epoch given out."""
        return int(self._meta("epoch"))

    @property
    def run(self) -> str:
        """Name of the run that last used the journal; empty for a new one."""
        return str(self._meta("run") or "")

    def adapters(self) -> list[AdapterRow]:
        """All adapters, in the order of their generations."""
        rows = self._database.execute(f"SELECT {', '.join(AdapterRow._fields)} FROM adapters ORDER BY generation")
        return [row._replace(static=bool(row.static), pinned=bool(row.pinned)) for row in map(AdapterRow._make, rows)]

    def withdrawn(self) -> set[str]:
        """Static adapters that were unloaded in the journal's run."""
        return {name for (name,) in self._database.execute("SELECT name FROM withdrawn")}

    def aliases(self) -> list[AliasRow]:
        """All that aliases stood for, in the order of the epochs."""
        rows = self._database.execute("SELECT name, epoch, targets FROM aliases ORDER BY epoch")
        return [AliasRow(name, epoch, json.loads(targets)) for name, epoch, targets in rows]

    @contextmanager
    def transaction(self) -> Iterator["JournalWriter"]:
        """Commit what is written in the block, or nothing.

        Raises:
            RouterReplaced: the database belongs to a later router.
            LoRAFleetError: it cannot be written.
        """
        try:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                if self._meta("owner") != self._owner:
                    self.on_replaced(self.run)
                    raise RouterReplaced(
                        "this router has been replaced: another process opened the adapter journal "
                        f"{self._where}; send the request again"
                    )
                yield JournalWriter(self._database)
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise LoRAFleetError(
                f"nothing was changed: the adapter journal {self._where} cannot be written ({error}); "
                "free space, or name another file in `router.journal`"
            ) from error

    def close(self) -> None:
        """Close the database; the journal is unusable afterwards."""
        self._database.close()

    def _open(self, mode: str) -> None:
        try:
            self._database.execute(f"PRAGMA journal_mode = {mode}")
        except sqlite3.OperationalError as error:
            # Another process has it open in its other mode, as a version before this one may; it goes on in that.
            logger.warning("the adapter journal %s stays in the mode it is in: %s", self._where, error)
        # A change is acknowledged only once it is safe from a power cut.
        self._database.execute("PRAGMA synchronous = FULL")
        (found,) = self._database.execute("PRAGMA user_version").fetchone()
        if not 0 <= found <= FORMAT:
            raise ConfigError(
                f"the adapter journal {self._where} has format {found}, this version writes {FORMAT}; "
                "name another file in `router.journal`"
            )
        self._database.executescript(TABLES)
        self._database.execute("BEGIN IMMEDIATE")
        columns = {column for _, column, *_ in self._database.execute("PRAGMA table_info(adapters)")}
        for column, kind in LATER_COLUMNS.items():
            if column not in columns:
                self._database.execute(f"ALTER TABLE adapters ADD COLUMN {column} {kind}")
        # Epochs start anew at the time of day, so that no generation is given out twice, even where replicas have lived
        # on while the file was removed, or was taken from a backup.
        self._database.execute(
            "INSERT INTO meta VALUES ('epoch', ?) ON CONFLICT (key) DO UPDATE SET value = MAX(value, excluded.value)",
            (time.time_ns() // 1_000_000,),
        )
        self._database.execute("INSERT OR REPLACE INTO meta VALUES ('owner', ?)", (self._owner,))
        self._database.execute("COMMIT")
        self._database.execute(f"PRAGMA user_version = {FORMAT}")

    def _meta(self, key: str) -> Any:
        row = self._database.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]


class JournalWriter:
    """Writes of one transaction."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def next_epoch(self, after: int = 0) -> int:
        """Give out the next epoch, one above both the last given out here and `after`."""
        self._database.execute("UPDATE meta SET value = MAX(value, ?) + 1 WHERE key = 'epoch'", (after,))
        (epoch,) = self._database.execute("SELECT value FROM meta WHERE key = 'epoch'").fetchone()
        return int(epoch)

    def put(self, adapter: AdapterRow) -> None:
        """Add or replace an adapter."""
        self._database.execute(
            f"INSERT OR REPLACE INTO adapters ({', '.join(AdapterRow._fields)}) "
            f"VALUES ({', '.join('?' for _ in adapter)})",
            adapter,
        )

    def remove(self, name: str) -> None:
        """Forget an adapter."""
        self._database.execute("DELETE FROM adapters WHERE name = ?", (name,))

    def put_alias(self, alias: AliasRow) -> None:
        """Add what an alias stands for from an epoch on."""
        self._database.execute(
            "INSERT INTO aliases VALUES (?, ?, ?)", (alias.name, alias.epoch, json.dumps(alias.targets))
        )

    def remove_alias(self, name: str, epoch: int) -> None:
        """Forget what an alias stood for from this epoch on."""
        self._database.execute("DELETE FROM aliases WHERE name = ? AND epoch = ?", (name, epoch))

    def cut_alias(self, name: str, epoch: int) -> None:
        """Forget what an alias stood for before this epoch."""
        self._database.execute("DELETE FROM aliases WHERE name = ? AND epoch < ?", (name, epoch))

    def withdraw(self, name: str) -> None:
        """Remember that a static adapter was unloaded in this run."""
        self._database.execute("INSERT OR IGNORE INTO withdrawn VALUES (?)", (name,))

    def begin_run(self, run: str) -> None:
        """Enter a new run: what was withdrawn in the last one no longer counts."""
        self._database.execute("DELETE FROM withdrawn")
        self._database.execute("INSERT OR REPLACE INTO meta VALUES ('run', ?)", (run,))
