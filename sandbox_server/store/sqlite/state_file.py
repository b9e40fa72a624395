"""The state file: its schema, many changes in one commit, and reading it back. Blocks, and knows nothing of the event loop."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox_server.store.base import Record, RecordedResult
from sandbox_server.store.codec import Name, decode, decode_verdict, encode, encode_result
from sandbox_server.store.sqlite.disk_reserve import RESERVE_BYTES, DiskReserve
from sandbox_server.store.sqlite.errors import StoreUnusable, damaged, is_full, unusable
from sandbox_server.store.sqlite.file_identity import FileWatch, StateFileReplaced
from sandbox_server.store.sqlite.rewrite import finish_writing_anew, write_anew

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
#: What else writes to a full disk may be quicker than SQLite, which frees and takes some pages when it opens a file: then it is tried again.
OPEN_ATTEMPTS, OPEN_AGAIN_S = 20, 0.05
RESERVE_FILE = "reserve"
#: What SQLite calls the kind of auto_vacuum that gives room back only when it is asked to.
INCREMENTAL = 2

#: What leads from each schema version to the next; the first makes an empty file the first version.
MIGRATIONS: Sequence[Sequence[str]] = (
    (
        "CREATE TABLE record (kind TEXT NOT NULL, key TEXT NOT NULL, doc TEXT NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID",
        "CREATE TABLE verdict (lease_id TEXT NOT NULL, call_id TEXT NOT NULL, identity TEXT NOT NULL, doc TEXT NOT NULL,"
        " lengths TEXT NOT NULL, outputs BLOB NOT NULL, PRIMARY KEY (lease_id, call_id))",
    ),
    # From here on pools have owners. Those without one belong to the admins, and every tenant may use them, as every tenant could before.
    # A service that knows no owners would take same-named pools of two tenants for one: the new version keeps it from opening the file.
    ("UPDATE record SET doc = json_set(doc, '$.tenant', NULL, '$.spec.shared', json('true')) WHERE kind = 'pool'",),
)
PUT = "INSERT OR REPLACE INTO record VALUES (?, ?, ?)"
DROP = "DELETE FROM record WHERE kind = ? AND key = ?"
JUDGE = "INSERT OR IGNORE INTO verdict VALUES (?, ?, ?, ?, ?, ?)"
SWEEP = (
    "DELETE FROM verdict WHERE rowid IN"
    f" (SELECT verdict.rowid FROM json_each(?) CROSS JOIN verdict ON verdict.lease_id = json_each.value LIMIT {SWEPT_AT_ONCE})"
)


@dataclass(slots=True)
class Batch:
    """What one commit writes: the newest record of each thing (None: it is deleted), verdicts by lease and call."""

    records: dict[Name, Record | None] = field(default_factory=dict)
    result_store: dict[str, dict[str, RecordedResult]] = field(default_factory=dict)
    output_bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.records or self.result_store)

    def judge(self, lease_id: str, call_id: str, recorded_result: RecordedResult) -> None:
        """Add a verdict that is not there."""
        self.result_store.setdefault(lease_id, {})[call_id] = recorded_result
        self.output_bytes += _size(recorded_result)

    def forget_results(self, lease_id: str) -> None:
        """Its lease is over."""
        self.output_bytes -= sum(_size(recorded_result) for recorded_result in self.result_store.pop(lease_id, {}).values())

    def forget_oldest(self) -> tuple[str, str]:
        """Let go of the verdict that has waited longest. Returns its lease and call."""
        lease_id, calls = next(iter(self.result_store.items()))
        call_id = next(iter(calls))
        self.output_bytes -= _size(calls.pop(call_id))
        if not calls:
            del self.result_store[lease_id]
        return lease_id, call_id

    def on_top_of(self, older: Batch) -> Batch:
        """Both in one, where they differ as this one says."""
        both = Batch({**older.records, **self.records}, older.result_store, older.output_bytes)
        for lease_id, calls in self.result_store.items():
            for call_id, recorded_result in calls.items():
                both.judge(lease_id, call_id, recorded_result)
        return both


def _size(recorded_result: RecordedResult) -> int:
    return recorded_result.result.held_bytes


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
        self._reserve = DiskReserve(path.with_name(RESERVE_FILE), RESERVE_BYTES)
        #: how often the file was written anew: a reader of an earlier one reads what is not there any more
        self.generation = 0
        try:
            finish_writing_anew(path)
            is_new = self._check_header()
            self._watch = FileWatch(path)
            self._open(attempts=1 if is_new else OPEN_ATTEMPTS)
            self.has_reserve = self._reserve.take()
        except sqlite3.Error as error:
            raise StoreUnusable(unusable(path, error)) from error
        except OSError as error:
            raise StoreUnusable(f"the state file {path} cannot be opened: {error.strerror}") from error

    def _check_header(self) -> bool:
        """See that it may be a state file. Returns whether it is a new one."""
        with open(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "rb") as file:
            header = file.read(len(MAGIC))
        if header and header != MAGIC:
            raise StoreUnusable(f"the state file {self._path} is no state file of this service: move it away to start without what it holds")
        return not header

    def _open(self, attempts: int) -> None:
        """Connect and check; on a full disk with the room of the reserve, and more than once."""
        for left in reversed(range(attempts + 1)):
            try:
                self._connection = self._connect()
                self._prepare()
                self._watch = FileWatch(self._path)
            except sqlite3.Error as error:
                self._let_go()
                if not is_full(error) or not (self._give_up_reserve() or left):
                    raise
                time.sleep(OPEN_AGAIN_S)
            except StoreUnusable:
                self._let_go()
                raise
            else:
                return

    def _let_go(self) -> None:
        with suppress(AttributeError, sqlite3.Error):  # there may be no connection yet
            self._connection.close()

    def _give_up_reserve(self) -> bool:
        self.has_reserve = False
        if not self._reserve.give_up():
            return False
        log.warning("the disk of the state file is full: the room that was kept in reserve is used now", extra={"path": str(self._path)})
        return True

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=BUSY_S, cached_statements=32)
        # Only where it is not so already: it is a write, for which a full disk has no room.
        if connection.execute("PRAGMA auto_vacuum").fetchone() != (INCREMENTAL,):
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
        should_be = self._one("PRAGMA page_count") * self._one("PRAGMA page_size")
        # Only with all of the log in it does the file hold every page. The log keeps its room, which on a full disk others would take.
        is_copied = self._checkpoint("RESTART")
        size = os.path.getsize(self._path)
        if is_copied and size < should_be:
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
        result_store = [
            _row(lease_id, call_id, recorded_result) for lease_id, calls in batch.result_store.items() for call_id, recorded_result in calls.items()
        ]
        try:
            self._write(puts, drops, result_store)
        except sqlite3.Error as error:
            self._check_not_replaced()
            if not is_full(error):
                raise
            # What the log holds may find room in the file, and then the log's own room can be used again.
            self._checkpoint("RESTART")
            if not self._give_up_reserve():
                raise
            self._write(puts, drops, result_store)
        self.check_in_place()
        if self._wal_bytes() > 8 * WAL_BYTES:
            self._checkpoint("PASSIVE")

    def _write(self, puts: list[Any], drops: list[Name], result_store: list[Any]) -> None:
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(PUT, puts)
            if drops:
                connection.executemany(DROP, drops)
            if result_store:
                connection.executemany(JUDGE, result_store)
            connection.execute("COMMIT")
        except BaseException:
            self._roll_back()
            raise

    def check(self) -> None:
        """See that the file is where it was, and keep room in reserve again if there is any. To be called every second.

        Raises:
            StateFileReplaced: another file is there.
            sqlite3.Error, OSError: it was deleted, and could not be written anew.
        """
        self.check_in_place()
        if not self.has_reserve and self._reserve.take():
            self.has_reserve = True
            log.info("there is room on the disk of the state file again, and some of it is kept in reserve", extra={"path": str(self._path)})
        elif self.has_reserve:
            self.has_reserve = self._reserve.is_held

    def check_in_place(self) -> None:
        """See that what was committed is in the file at the path; where that was deleted, write it anew.

        Raises:
            StateFileReplaced: another file is there.
            sqlite3.Error, OSError: it was deleted, and could not be written anew.
        """
        if self._is_in_place():
            return
        log.error("the state file %s, or its log, was deleted while the service runs: it is written anew", self._path)
        write_anew(self._connection, self._path, self._watch)
        before, self._connection = self._connection, self._connect()
        before.close()
        self._one("SELECT count(*) FROM sqlite_master")  # SQLite makes the files beside it when it first reads
        self._watch = FileWatch(self._path)
        self.generation += 1
        log.info("the state file has been written anew", extra={"path": str(self._path)})

    def _is_in_place(self) -> bool:
        try:
            return self._watch.is_in_place()
        except StateFileReplaced:
            if self._watch.is_replaced:
                self._watch.take_side_files_away()
            raise

    def _check_not_replaced(self) -> None:
        """An error may come of another file in its place: then that is what is to be said."""
        self._is_in_place()

    def _roll_back(self) -> None:
        """Leave no transaction open; begin anew with another connection where not even that can be done."""
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            self._let_go()
            self._is_in_place()
            self._connection = self._connect()

    def tidy(self, over: list[str]) -> bool:
        """Do some of what can wait: delete verdicts of leases that are over, copy the log into the file, give room back to the disk.

        Args:
            over: the leases; emptied when the last of their verdicts is gone.

        Returns:
            Whether there is more to do.

        Raises:
            sqlite3.Error: it could not be done now.
            StateFileReplaced: another file is there.
        """
        if not self._is_in_place():
            return False
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

    def _checkpoint(self, mode: str) -> bool:
        """Copy the log into the file. It matters to the size of the log alone: what is in the log is safe. Returns whether all of it is copied."""
        try:
            is_busy, logged, copied = self._connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
        except sqlite3.OperationalError as error:
            log.warning("the log of the state file could not be copied into it: %s", error)
            return False
        finally:
            self._watch.note_own_write()
        return not is_busy and bool(logged == copied)

    def _wal_bytes(self) -> int:
        try:
            return self._wal.stat().st_size
        except FileNotFoundError:
            return 0

    def close(self) -> None:
        """Let go of it."""
        if self._watch.is_overwritten:
            # Closing it would copy the log into what another program wrote there, and spoil that.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))
            return
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

    def record(self, kind: str, key: str) -> Any:
        """The record of one thing; None: there is none."""
        row = self._connection.execute("SELECT doc FROM record WHERE kind = ? AND key = ?", (kind, key)).fetchone()
        return None if row is None else decode(kind, row[0])

    def calls(self) -> Iterable[tuple[str, str]]:
        """The lease and call of every verdict."""
        return self._connection.execute("SELECT lease_id, call_id FROM verdict")

    def find_result(self, lease_id: str, call_id: str) -> RecordedResult | None:
        """A verdict, with its outputs."""
        sql = "SELECT identity, doc, lengths, outputs FROM verdict WHERE lease_id = ? AND call_id = ?"
        row = self._connection.execute(sql, (lease_id, call_id)).fetchone()
        return None if row is None else decode_verdict(*row)

    def close(self) -> None:
        """Let go of it."""
        self._connection.close()


def _row(lease_id: str, call_id: str, recorded_result: RecordedResult) -> tuple[str, str, str, str, str, bytes]:
    fields, outputs = encode_result(recorded_result.result)
    lengths = json.dumps([None if output is None else len(output) for output in outputs])
    whole = outputs[0] if outputs[1] is None and outputs[2] is None else b"".join(output or b"" for output in outputs)
    return lease_id, call_id, recorded_result.identity.hex(), encode(fields).decode(), lengths, whole or b""
