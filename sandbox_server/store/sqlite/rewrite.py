"""Writing the state file anew at its path, from a connection whose own file was deleted under it."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path

from sandbox_server.store.sqlite.disk_reserve import free_bytes
from sandbox_server.store.sqlite.file_identity import SIDE_FILES, FileWatch, side_path

#: A copy that is being written, and one that is whole but not yet at the path of the state file.
PARTIAL, WHOLE = ".partial", ".new"


def write_anew(connection: sqlite3.Connection, path: Path, watch: FileWatch) -> None:
    """Write all that a connection reads to the path of its state file. Killed at any moment, it leaves a file that the next start finds.

    Args:
        connection: to the file that was deleted; no transaction is open.
        path: where the state file belongs.
        watch: knows which files are the connection's own.

    Raises:
        StateFileReplaced: another file has come to be there meanwhile.
        sqlite3.Error, OSError: it could not be written; nothing at the path has changed.
    """
    partial, whole = side_path(path, PARTIAL), side_path(path, WHOLE)
    partial.unlink(missing_ok=True)
    (pages,), (page_bytes,) = connection.execute("PRAGMA page_count").fetchone(), connection.execute("PRAGMA page_size").fetchone()
    if pages * page_bytes > free_bytes(path.parent):
        raise OSError(errno.ENOSPC, f"it was deleted, and writing it anew takes {pages * page_bytes} bytes: make room")
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        connection.execute("VACUUM INTO ?", (str(partial),))
        _sync(partial)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(whole)
    watch.is_in_place()
    # They belong to the file that was deleted. Beside the new one they would be taken for its own, and damage it.
    watch.take_side_files_away()
    put_in_place(path)


def put_in_place(path: Path) -> None:
    """Give a whole copy the name of the state file."""
    side_path(path, WHOLE).replace(path)
    _sync(path.parent)


def finish_writing_anew(path: Path) -> None:
    """At a start: put a whole copy in place where an earlier life was killed before it could, and delete what it left half-written.

    Raises:
        OSError: it could not be done.
    """
    side_path(path, PARTIAL).unlink(missing_ok=True)
    if path.exists():
        side_path(path, WHOLE).unlink(missing_ok=True)
    elif side_path(path, WHOLE).exists():
        for suffix in SIDE_FILES:
            side_path(path, suffix).unlink(missing_ok=True)
        put_in_place(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
