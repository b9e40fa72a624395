"""The state file: its schema, many changes in one commit, and reading it back. Blocks, and knows nothing of the event loop."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox_server.pool.codec import Name, decode, decode_verdict, encode, encode_result
from sandbox_server.pool.store import Record, Verdict

log = logging.getLogger(__name__)

APPLICATION_ID = 0x53425058
BUSY_S = 1.0
MAGIC = b"SQLite format 3\0"
#: A write-ahead log beyond this is copied into the file once nothing else is to be written, and beyond eight times this in any case.
WAL_BYTES = 8 << 20
#: So many verdicts are deleted in one step, so that a commit that comes meanwhile does not wait for long.
SWEPT_AT_ONCE = 100
#: A bigger file is checked at the start only as far as records go: outputs are checked when they are read.
CHECKED_WHOLE_BYTES = 256 << 20
#: Free pages beyond this are given back to the disk, some at a time.
SPARE_PAGES = 16_384
GIVEN_BACK_AT_ONCE = 1024

#: What leads from each schema version to the next; the first makes an empty file the first version.
MIGRATIONS: Sequence[Sequence[str]] = (
    (
        "CREATE TABLE record (kind TEXT NOT NULL, key TEXT NOT NULL, doc TEXT NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID",
        "CREATE TABLE verdict (lease_id TEXT NOT NULL, call_id TEXT NOT NULL, identity TEXT NOT NULL, doc TEXT NOT NULL,"
        " lengths TEXT NOT NULL, outputs BLOB NOT NULL, PRIMARY KEY (lease_id, call_id))",
    ),
)
PUT = "INSERT OR REPLACE INTO record VALUES (?, ?, ?)"
DROP = "DELETE FROM record WHERE kind = ? AND key = ?"
JUDGE = "INSERT OR IGNORE INTO verdict VALUES (?, ?, ?, ?, ?, ?)"
SWEEP = (
    "DELETE FROM verdict WHERE rowid IN"
    f" (SELECT verdict.rowid FROM json_each(?) CROSS JOIN verdict ON verdict.lease_id = json_each.value LIMIT {SWEPT_AT_ONCE})"
)


class StoreUnusable(Exception):
    """The service cannot start with this state file; the message is one sentence that says why, and what to do."""


@dataclass(slots=True)
class Batch:
    """What one commit writes: the newest record of each thing (None: it is deleted), verdicts by lease and call."""

    records: dict[Name, Record | None] = field(default_factory=dict)
    verdicts: dict[str, dict[str, Verdict]] = field(default_factory=dict)
    output_bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.records or self.verdicts)

    def judge(self, lease_id: str, call_id: str, verdict: Verdict) -> None:
        """Add a verdict that is not there."""
        self.verdicts.setdefault(lease_id, {})[call_id] = verdict
        self.output_bytes += _size(verdict)

    def forget_verdicts(self, lease_id: str) -> None:
        """Its lease is over."""
        self.output_bytes -= sum(_size(verdict) for verdict in self.verdicts.pop(lease_id, {}).values())

    def forget_oldest(self) -> tuple[str, str]:
        """Let go of the verdict that has waited longest. Returns its lease and call."""
        lease_id, calls = next(iter(self.verdicts.items()))
        call_id = next(iter(calls))
        self.output_bytes -= _size(calls.pop(call_id))
        if not calls:
            del self.verdicts[lease_id]
        return lease_id, call_id

    def on_top_of(self, older: Batch) -> Batch:
        """Both in one, where they differ as this one says."""
        both = Batch({**older.records, **self.records}, older.verdicts, older.output_bytes)
        for lease_id, calls in self.verdicts.items():
            for call_id, verdict in calls.items():
                both.judge(lease_id, call_id, verdict)
        return both


def _size(verdict: Verdict) -> int:
    return verdict.result.held_bytes


class SqliteFile:
    """The file, opened for writing. Used by one thread at a time.

    Args:
        path: where it is; made if it is not there, for this user alone.

    Raises:
        StoreUnusable: it is damaged, locked, of a newer version, or no state file at all.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._wal = Path(f"{path}-wal")
        try:
            self._check_header()
            self._connection = self._connect()
            self._prepare()
        except sqlite3.Error as error:
            raise StoreUnusable(_unusable(path, error)) from error
        except OSError as error:
            raise StoreUnusable(f"the state file {path} cannot be opened: {error.strerror}") from error

    def _check_header(self) -> None:
        with open(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "rb") as file:
            header = file.read(len(MAGIC))
        if header and header != MAGIC:
            raise StoreUnusable(f"the state file {self._path} is no state file of this service: move it away to start without what it holds")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=BUSY_S, cached_statements=32)
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        return connection

    def _prepare(self) -> None:
        """Check what is there, and bring it to this version."""
        one = self._one
        version, tables = one("PRAGMA user_version"), one("SELECT count(*) FROM sqlite_master")
        if version > len(MIGRATIONS):
            newer = f"schema {version}; this one knows {len(MIGRATIONS)} and older"
            raise StoreUnusable(f"the state file {self._path} was written by a newer version of this service ({newer}): run that one, or move the file away")
        if tables and one("PRAGMA application_id") != APPLICATION_ID:
            raise StoreUnusable(f"the state file {self._path} is no state file of this service: move it away to start without what it holds")
        self._check_whole()
        for number in range(version, len(MIGRATIONS)):
            self._connection.execute("BEGIN IMMEDIATE")
            for statement in MIGRATIONS[number]:
                self._connection.execute(statement)
            self._connection.execute(f"PRAGMA user_version = {number + 1}")
            self._connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self._connection.execute("COMMIT")

    def _check_whole(self) -> None:
        # Only then do the pages count what the file must hold.
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        should_be = self._one("PRAGMA page_count") * self._one("PRAGMA page_size")
        size = os.path.getsize(self._path)
        if size < should_be:
            raise StoreUnusable(damaged(self._path, f"it is cut off at {size} of {should_be} bytes"))
        found = self._one("PRAGMA quick_check(1)" if size < CHECKED_WHOLE_BYTES else "PRAGMA quick_check(record)")
        if found != "ok":
            raise StoreUnusable(damaged(self._path, " ".join(str(found).split())))

    def _one(self, sql: str) -> Any:
        return self._connection.execute(sql).fetchone()[0]

    def commit(self, batch: Batch) -> None:
        """Write all of it, or nothing.

        Raises:
            sqlite3.Error: it could not be written.
        """
        puts = [(*name, encode(record).decode()) for name, record in batch.records.items() if record is not None]
        drops = [name for name, record in batch.records.items() if record is None]
        verdicts = [_row(lease_id, call_id, verdict) for lease_id, calls in batch.verdicts.items() for call_id, verdict in calls.items()]
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(PUT, puts)
            if drops:
                connection.executemany(DROP, drops)
            if verdicts:
                connection.executemany(JUDGE, verdicts)
            connection.execute("COMMIT")
        except BaseException as error:
            self._roll_back()
            if "full" in str(error):
                # What the log holds may find room in the file, and then the log's own room can be used again.
                self._checkpoint("RESTART")
            raise
        if self._wal_bytes() > 8 * WAL_BYTES:
            self._checkpoint("PASSIVE")

    def _roll_back(self) -> None:
        """Leave no transaction open; begin anew with another connection where not even that can be done."""
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = self._connect()

    def tidy(self, over: list[str]) -> bool:
        """Do some of what can wait: delete verdicts of leases that are over, copy the log into the file, give room back to the disk.

        Args:
            over: the leases; emptied when the last of their verdicts is gone.

        Returns:
            Whether there is more to do.

        Raises:
            sqlite3.Error: it could not be done now.
        """
        if over:
            if self._connection.execute(SWEEP, (json.dumps(over),)).rowcount < SWEPT_AT_ONCE:
                over.clear()
            return True
        if self._wal_bytes() > WAL_BYTES:
            self._checkpoint("PASSIVE")
            return False
        if self._one("PRAGMA freelist_count") > SPARE_PAGES:
            self._connection.execute(f"PRAGMA incremental_vacuum({GIVEN_BACK_AT_ONCE})").fetchall()
            return True
        return False

    def _checkpoint(self, mode: str) -> None:
        """Copy the log into the file. It matters to the size of the log alone: what is in the log is safe."""
        try:
            self._connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
        except sqlite3.Error as error:
            log.warning("the log of the state file could not be copied into it: %s", error)

    def _wal_bytes(self) -> int:
        try:
            return self._wal.stat().st_size
        except FileNotFoundError:
            return 0

    def close(self) -> None:
        """Let go of it."""
        self._connection.close()


class SqliteReader:
    """The same file, for reading only; another connection, so that reading never waits for writing.

    Args:
        path: where it is.
    """

    def __init__(self, path: Path) -> None:
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=0.0)
        self._connection.execute("PRAGMA query_only = ON")

    def records(self, kind: str) -> Iterator[Any]:
        """All records of a kind."""
        for (document,) in self._connection.execute("SELECT doc FROM record WHERE kind = ?", (kind,)):
            yield decode(kind, document)

    def calls(self) -> Iterable[tuple[str, str]]:
        """The lease and call of every verdict."""
        return self._connection.execute("SELECT lease_id, call_id FROM verdict")

    def verdict(self, lease_id: str, call_id: str) -> Verdict | None:
        """A verdict, with its outputs."""
        sql = "SELECT identity, doc, lengths, outputs FROM verdict WHERE lease_id = ? AND call_id = ?"
        row = self._connection.execute(sql, (lease_id, call_id)).fetchone()
        return None if row is None else decode_verdict(*row)

    def close(self) -> None:
        """Let go of it."""
        self._connection.close()


def _row(lease_id: str, call_id: str, verdict: Verdict) -> tuple[str, str, str, str, str, bytes]:
    fields, outputs = encode_result(verdict.result)
    lengths = json.dumps([None if output is None else len(output) for output in outputs])
    whole = outputs[0] if outputs[1] is None and outputs[2] is None else b"".join(output or b"" for output in outputs)
    return lease_id, call_id, verdict.identity.hex(), encode(fields).decode(), lengths, whole or b""


def damaged(path: Path, what: str) -> str:
    """What to tell a person of a state file that cannot be read."""
    return f"the state file {path} is damaged ({what}): put a copy in its place, or move it away to start without what it holds"


def _unusable(path: Path, error: sqlite3.Error) -> str:
    if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
        return f"the state file {path} is locked by another process: end that one first"
    if isinstance(error, sqlite3.OperationalError) and "full" in str(error):
        return f"the state file {path} cannot be written, its disk is full: make room first"
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
        return damaged(path, str(error))
    return f"the state file {path} cannot be used: {error}"
