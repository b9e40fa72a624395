"""The state file: opens and checks it, and commits changes. Every method blocks; nothing here uses the event loop."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import sqlite3
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from sandbox_server.core.cleanup import cleanup_on_failure
from sandbox_server.store.base import RecordedResult, RunBatchItemRecord
from sandbox_server.store.codec import RecordId, encode, encode_result
from sandbox_server.store.sqlite.batch import WriteBatch
from sandbox_server.store.sqlite.disk_reserve import DiskReserve
from sandbox_server.store.sqlite.errors import StoreUnusable, describe_damage, describe_foreign_file, describe_open_error, is_disk_full
from sandbox_server.store.sqlite.file_identity import FileIdentityCheck, StateFileReplaced, side_path
from sandbox_server.store.sqlite.migrations import APPLICATION_ID, migrate
from sandbox_server.store.sqlite.options import SqliteOptions
from sandbox_server.store.sqlite.rewrite import finish_rewrite, rewrite_state_file

log = logging.getLogger(__name__)

SQLITE_MAGIC = b"SQLite format 3\0"
#: A write-ahead log of more bytes is copied into the file when nothing else is to be written; one of eight times as many, after any commit.
WAL_BYTES = 8 << 20
#: A batch whose records and results take at most so many characters in the file is committed in the event loop. A longer one would hold the loop up.
SHORT_BATCH_CHARS = 64 << 10
#: Every part of a value is counted as at least so many characters, because encoding it takes as long as that.
MIN_CHARS_PER_VALUE = 8
#: The number of results that one clean-up step deletes. A commit that arrives meanwhile waits for at most one step.
DELETED_PER_STEP = 100
#: At the start, a file of up to this many bytes is checked completely. In a larger file only the records are checked: outputs are checked when read.
FULL_CHECK_BYTES = 256 << 20
#: More free pages than this are returned to the disk, `PAGES_RETURNED_PER_STEP` in each clean-up step.
MAX_FREE_PAGES = 16_384
PAGES_RETURNED_PER_STEP = 1024
#: SQLite frees and allocates pages while it opens a file. On a full disk another program can take them in between, so opening is tried again.
OPEN_ATTEMPTS, OPEN_RETRY_S = 20, 0.05
RESERVE_FILE = "reserve"
#: SQLite's number for the auto_vacuum mode that returns free pages only on request.
AUTO_VACUUM_INCREMENTAL = 2

PUT_RECORD = "INSERT OR REPLACE INTO record VALUES (?, ?, ?)"
DELETE_RECORD = "DELETE FROM record WHERE kind = ? AND key = ?"
PUT_RESULT = "INSERT OR IGNORE INTO verdict VALUES (?, ?, ?, ?, ?, ?)"
DELETE_RESULTS = (
    "DELETE FROM verdict WHERE rowid IN"
    f" (SELECT verdict.rowid FROM json_each(?) CROSS JOIN verdict ON verdict.lease_id = json_each.value LIMIT {DELETED_PER_STEP})"
)


class StateFile:
    """The state file, opened for writing. Only one thread at a time may use it.

    Args:
        path: the path of the file. A missing file is created, readable for this user only.
        options: the limits of the store.

    Raises:
        StoreUnusable: the file is damaged, locked, written by a newer version, or not a state file.
    """

    def __init__(self, path: Path, options: SqliteOptions) -> None:
        self._path = path
        self._wal = str(side_path(path, "-wal"))
        self._reserve = DiskReserve(path.with_name(RESERVE_FILE), options.reserve_bytes)
        self._migrations = options.migrations
        self._busy_timeout_s = options.busy_timeout_s
        self._waits_for_locks = True
        self._log_was_copied = True  # SQLite syncs a log that it begins anew, which takes as long as the disk does
        #: how often the file was written again at its path; a reader that was opened before that reads a deleted file
        self.generation = 0
        try:
            finish_rewrite(path)
            is_new = self._check_header()
            self._identity_check = FileIdentityCheck(path)
            self._connection = self._open(attempts=1 if is_new else OPEN_ATTEMPTS)
            self.has_reserve = self._reserve.take()
        except sqlite3.Error as error:
            raise StoreUnusable(describe_open_error(path, error)) from error
        except OSError as error:
            raise StoreUnusable(f"the state file {path} cannot be opened: {error.strerror}") from error

    def _check_header(self) -> bool:
        """Check that the file is empty or a SQLite file. Returns whether it is empty."""
        with open(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "rb") as file:
            header = file.read(len(SQLITE_MAGIC))
        if header and header != SQLITE_MAGIC:
            raise StoreUnusable(describe_foreign_file(self._path))
        return not header

    def _open(self, attempts: int) -> sqlite3.Connection:
        """Connect, check and migrate. On a full disk the reserve is given up, and opening is tried again `attempts` times."""
        while True:
            connection: sqlite3.Connection | None = None
            try:
                connection = self._connect()
                self._check_and_migrate(connection)
                self._identity_check = FileIdentityCheck(self._path)
            except (sqlite3.Error, StoreUnusable) as error:
                _close_quietly(connection)
                if not isinstance(error, sqlite3.Error) or not is_disk_full(error) or not (self._give_up_reserve() or attempts > 0):
                    raise
                attempts -= 1
                time.sleep(OPEN_RETRY_S)
            else:
                return connection

    def _give_up_reserve(self) -> bool:
        self.has_reserve = False
        if not self._reserve.give_up():
            return False
        log.warning("the disk of the state file is full: the state file now uses the reserved room", extra={"path": str(self._path)})
        return True

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=self._busy_timeout_s, cached_statements=32)
        # Setting the mode writes to the file, which fails on a full disk. So it is set only where the file does not have it yet.
        if _read_value(connection, "PRAGMA auto_vacuum") != AUTO_VACUUM_INCREMENTAL:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        self._waits_for_locks, self._log_was_copied = True, True
        return connection

    def _check_and_migrate(self, connection: sqlite3.Connection) -> None:
        version, table_count = _read_value(connection, "PRAGMA user_version"), _read_value(connection, "SELECT count(*) FROM sqlite_master")
        if version > len(self._migrations):
            newer = f"schema {version}; this one knows {len(self._migrations)} and older"
            raise StoreUnusable(f"the state file {self._path} was written by a newer version of this service ({newer}): run that one, or move the file away")
        if table_count and _read_value(connection, "PRAGMA application_id") != APPLICATION_ID:
            raise StoreUnusable(describe_foreign_file(self._path))
        self._check_integrity(connection)
        migrate(connection, version, self._migrations)

    def _check_integrity(self, connection: sqlite3.Connection) -> None:
        expected_bytes = _read_value(connection, "PRAGMA page_count") * _read_value(connection, "PRAGMA page_size")
        # The file holds every page only after all of the log was copied into it. RESTART leaves the log at its size: on a full disk, other
        # programs would take the room of a log that was cut off.
        is_copied = self._checkpoint(connection, "RESTART")
        size_bytes = os.path.getsize(self._path)
        if is_copied and size_bytes < expected_bytes:
            raise StoreUnusable(describe_damage(self._path, f"it is cut off at {size_bytes} of {expected_bytes} bytes"))
        finding = _read_value(connection, "PRAGMA quick_check(1)" if size_bytes < FULL_CHECK_BYTES else "PRAGMA quick_check(record)")
        if finding != "ok":
            raise StoreUnusable(describe_damage(self._path, " ".join(str(finding).split())))

    def commit(self, batch: WriteBatch) -> None:
        """Write all of a batch, or nothing.

        Raises:
            sqlite3.Error: it could not be written.
            StateFileReplaced: another file is at the path.
        """
        rows = _rows_of(batch)
        try:
            self._write(rows, waits_for_locks=True)
        except sqlite3.Error as error:
            # The error may be a consequence of another file at the path, and then that is the error to report.
            self._is_in_place()
            if not is_disk_full(error):
                raise
            # The file may have room for what is in the log, and after that the room of the log can be used again.
            self._checkpoint(self._connection, "RESTART")
            if not self._give_up_reserve():
                raise
            self._write(rows, waits_for_locks=True)
        self._log_was_copied = False
        self.restore_if_deleted()
        if self._is_log_too_long():
            self._checkpoint(self._connection, "PASSIVE")

    def try_commit(self, batch: WriteBatch) -> bool:
        """Write all of a batch, if that needs nothing but writing to the page cache of the kernel: no waiting for a lock or for the disk, and no repair.

        Returns:
            Whether what is in the file at the path now includes the batch. If not, `commit` writes it, or says what is wrong.
        """
        if self._log_was_copied or _has_long_call(batch):
            return False
        try:
            rows = _rows_of(batch)
            if rows.text_chars > SHORT_BATCH_CHARS or self._is_log_too_long():
                return False
            self._write(rows, waits_for_locks=False)
            return self._is_in_place()
        except Exception:  # whatever it is: `commit` meets the same problem in the writer thread, deals with it, and reports it to those that wait
            return False

    def _write(self, rows: _Rows, *, waits_for_locks: bool) -> None:
        self._set_waiting_for_locks(waits_for_locks=waits_for_locks)
        connection = self._connection
        with cleanup_on_failure(self._roll_back):
            connection.execute("BEGIN IMMEDIATE")
            if rows.puts:
                connection.executemany(PUT_RECORD, rows.puts)
            if rows.deletions:
                connection.executemany(DELETE_RECORD, rows.deletions)
            if rows.results:
                connection.executemany(PUT_RESULT, rows.results)
            connection.execute("COMMIT")

    def _set_waiting_for_locks(self, *, waits_for_locks: bool) -> None:
        if waits_for_locks is not self._waits_for_locks:
            self._connection.execute(f"PRAGMA busy_timeout = {int(1000 * self._busy_timeout_s) if waits_for_locks else 0}")
            self._waits_for_locks = waits_for_locks

    def _roll_back(self) -> None:
        """Leave no transaction open. Where the rollback fails too, replace the connection by a new one."""
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            _close_quietly(self._connection)
            self._is_in_place()
            self._connection = self._connect()

    def check(self) -> None:
        """Check that the file is at its path, and reserve room on the disk again if there is enough. To be called every second.

        Raises:
            StateFileReplaced: another file is at the path.
            sqlite3.Error, OSError: the file was deleted, and could not be written again.
        """
        self._set_waiting_for_locks(waits_for_locks=True)
        self.restore_if_deleted()
        if not self.has_reserve and self._reserve.take():
            self.has_reserve = True
            log.info("the disk of the state file has room again, and some of it is reserved for the state file", extra={"path": str(self._path)})
        elif self.has_reserve:
            self.has_reserve = self._reserve.is_held

    def restore_if_deleted(self) -> None:
        """Check that what was committed is in the file at the path. Where the file or its log was deleted, write it again.

        Raises:
            StateFileReplaced: another file is at the path.
            sqlite3.Error, OSError: the file was deleted, and could not be written again.
        """
        if self._is_in_place():
            return
        log.error("the state file %s, or its log, was deleted while the service is running: the state is written to a new file", self._path)
        rewrite_state_file(self._connection, self._path, self._identity_check)
        old_connection, self._connection = self._connection, self._connect()
        old_connection.close()
        _read_value(self._connection, "SELECT count(*) FROM sqlite_master")  # SQLite creates the side files with the first read
        self._identity_check = FileIdentityCheck(self._path)
        self.generation += 1
        log.info("the state was written to a new state file", extra={"path": str(self._path)})

    def _is_in_place(self) -> bool:
        try:
            return self._identity_check.is_in_place()
        except StateFileReplaced:
            if self._identity_check.is_replaced:
                self._identity_check.delete_side_files()
            raise

    def clean_up_step(self, lease_ids: list[str]) -> bool:
        """Do one step of the work that can wait: delete results, copy the log into the file, return free pages to the disk.

        Args:
            lease_ids: the leases whose results are to be deleted. The list is emptied once all are deleted.

        Returns:
            Whether there is more to do.

        Raises:
            sqlite3.Error: it could not be done now.
            StateFileReplaced: another file is at the path.
        """
        self._set_waiting_for_locks(waits_for_locks=True)
        if not self._is_in_place():
            return False
        if lease_ids:
            if self._connection.execute(DELETE_RESULTS, (json.dumps(lease_ids),)).rowcount < DELETED_PER_STEP:
                lease_ids.clear()
            return True
        if self._wal_bytes() > WAL_BYTES:
            self._checkpoint(self._connection, "PASSIVE")
            return False
        if _read_value(self._connection, "PRAGMA freelist_count") > MAX_FREE_PAGES:
            self._connection.execute(f"PRAGMA incremental_vacuum({PAGES_RETURNED_PER_STEP})").fetchall()
            return True
        return False

    def _checkpoint(self, connection: sqlite3.Connection, mode: str) -> bool:
        """Copy the log into the file. Returns whether all of it was copied. A failure only leaves the log larger: its content is safe."""
        try:
            is_busy, log_pages, copied_pages = connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
        except sqlite3.OperationalError as error:
            log.warning("the log of the state file could not be copied into it: %s", error)
            return False
        finally:
            self._log_was_copied = True
            self._identity_check.note_own_write()
        return not is_busy and bool(log_pages == copied_pages)

    def _is_log_too_long(self) -> bool:
        return self._wal_bytes() > 8 * WAL_BYTES

    def _wal_bytes(self) -> int:
        try:
            return os.stat(self._wal).st_size
        except FileNotFoundError:
            return 0

    def close(self) -> None:
        """Close the connection."""
        if self._identity_check.is_overwritten:
            # Closing the connection would copy the log into the file, and damage what the other program wrote there. So it is never closed: the
            # additional reference keeps it from being freed.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._connection))
            return
        self._connection.close()


class _Rows(NamedTuple):
    """A batch as the statements take it."""

    puts: list[tuple[str, str, str]]
    deletions: list[RecordId]
    results: list[tuple[str, str, str, str, str, bytes]]

    @property
    def text_chars(self) -> int:
        """How many characters the documents have, without the outputs of the results."""
        return sum(len(document) for _, _, document in self.puts) + sum(len(document) for _, _, _, document, _, _ in self.results)


def _rows_of(batch: WriteBatch) -> _Rows:
    return _Rows(
        puts=[(*record_id, encode(record).decode()) for record_id, record in batch.records.items() if record is not None],
        deletions=[record_id for record_id, record in batch.records.items() if record is None],
        results=[_result_row(lease_id, call_id, recorded) for lease_id, calls in batch.results.items() for call_id, recorded in calls.items()],
    )


def _has_long_call(batch: WriteBatch) -> bool:
    """Return whether a batch has a call whose arguments alone are too long. They can be megabytes, of which even the encoding takes too long."""
    calls = (record.call for record in batch.records.values() if isinstance(record, RunBatchItemRecord) and record.call is not None)
    return any(_is_long(call.args) for call in calls)


def _is_long(value: Any) -> bool:
    """Return whether a JSON value has more characters than a short batch. Looks at no more of it than it needs to."""
    values, chars = [value], 0
    while values and chars <= SHORT_BATCH_CHARS:
        part = values.pop()
        chars += max(len(part), MIN_CHARS_PER_VALUE) if isinstance(part, str) else MIN_CHARS_PER_VALUE
        if isinstance(part, Mapping):
            values += part.keys()
            values += part.values()
        elif isinstance(part, list | tuple):
            values += part
    return chars > SHORT_BATCH_CHARS


def _read_value(connection: sqlite3.Connection, sql: str) -> Any:
    """Return the first column of the first row."""
    return connection.execute(sql).fetchone()[0]


def _close_quietly(connection: sqlite3.Connection | None) -> None:
    """Close a connection that failed: an error while closing adds nothing to the error that is being handled."""
    if connection is not None:
        with suppress(sqlite3.Error):
            connection.close()


def _result_row(lease_id: str, call_id: str, recorded_result: RecordedResult) -> tuple[str, str, str, str, str, bytes]:
    fields, outputs = encode_result(recorded_result.result)
    lengths = encode([None if output is None else len(output) for output in outputs]).decode()
    # A single output is not copied: it can be large.
    joined = outputs[0] if outputs[1] is None and outputs[2] is None else b"".join(output or b"" for output in outputs)
    return lease_id, call_id, recorded_result.identity.hex(), encode(fields).decode(), lengths, joined or b""
