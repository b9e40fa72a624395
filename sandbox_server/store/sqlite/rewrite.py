"""Restores the state file at its path after it was deleted, from the connection that still has the deleted file open."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

from sandbox_server.core.cleanup import cleanup_on_failure
from sandbox_server.store.sqlite.disk_reserve import free_bytes
from sandbox_server.store.sqlite.file_identity import SIDE_FILES, FileIdentityCheck, side_path

#: The suffix of a copy that is being written.
PARTIAL = ".partial"
#: The suffix of a complete copy that does not have the name of the state file yet.
COMPLETE = ".new"


def rewrite_state_file(connection: sqlite3.Connection, path: Path, identity_check: FileIdentityCheck) -> None:
    """Write everything that a connection reads to a new file at the path of the state file.

    If the process is killed at any point, the next start finds either the new file or a complete copy, which `finish_rewrite` puts in place.

    Args:
        connection: a connection to the deleted file, without an open transaction.
        path: the path of the state file.
        identity_check: the check of the files that the connection opened.

    Raises:
        StateFileReplaced: another file has appeared at the path in the meantime.
        sqlite3.Error, OSError: the copy could not be written. Nothing at the path has changed.
    """
    partial, complete = side_path(path, PARTIAL), side_path(path, COMPLETE)
    partial.unlink(missing_ok=True)
    (page_count,), (page_bytes,) = connection.execute("PRAGMA page_count").fetchone(), connection.execute("PRAGMA page_size").fetchone()
    if page_count * page_bytes > free_bytes(path.parent):
        raise OSError(errno.ENOSPC, f"it was deleted, and writing it again takes {page_count * page_bytes} bytes: make room")
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with cleanup_on_failure(lambda: partial.unlink(missing_ok=True)):
        connection.execute("VACUUM INTO ?", (str(partial),))
        _fsync(partial)
    partial.replace(complete)
    identity_check.is_in_place()
    # The side files belong to the deleted file. SQLite would apply them to the new file, and damage it.
    identity_check.delete_side_files()
    put_complete_copy_in_place(path)


def put_complete_copy_in_place(path: Path) -> None:
    """Rename a complete copy to the path of the state file."""
    side_path(path, COMPLETE).replace(path)
    _fsync(path.parent)


def finish_rewrite(path: Path) -> None:
    """Finish a rewrite during which an earlier process was killed. To be called at the start, before the state file is opened.

    A complete copy is put in place if there is no state file; a partial copy is deleted.

    Raises:
        OSError: a file could not be renamed or deleted.
    """
    side_path(path, PARTIAL).unlink(missing_ok=True)
    if path.exists():
        side_path(path, COMPLETE).unlink(missing_ok=True)
    elif side_path(path, COMPLETE).exists():
        for suffix in SIDE_FILES:
            side_path(path, suffix).unlink(missing_ok=True)
        put_complete_copy_in_place(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
