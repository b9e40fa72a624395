"""Sentences for the person who runs the service, made from the errors of SQLite."""

from __future__ import annotations

import sqlite3
from pathlib import Path


class StoreUnusable(Exception):
    """The service cannot start with this state file. The message is one sentence that says why, and what to do."""


def describe_damage(path: Path, problem: str) -> str:
    """Return the sentence about a state file that cannot be read.

    Args:
        path: the state file.
        problem: what is wrong with its content.
    """
    return f"the state file {path} is damaged ({problem}): put a copy in its place, or move it away to start without its content"


def describe_foreign_file(path: Path) -> str:
    """Return the sentence about a file that another program wrote."""
    return f"the state file {path} is no state file of this service: move it away to start without its content"


def is_disk_full(error: sqlite3.Error) -> bool:
    """Return whether SQLite failed because the disk has no room."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and (code & 0xFF == sqlite3.SQLITE_FULL or code in (sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_WRITE))


def describe_open_error(path: Path, error: sqlite3.Error) -> str:
    """Return the sentence about a state file that could not be opened because of `error`."""
    if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
        return f"the state file {path} is locked by another process: end that process first"
    if is_disk_full(error):
        return f"the state file {path} cannot be written, its disk is full: make room first"
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
        return describe_damage(path, str(error))
    return f"the state file {path} cannot be used: {error}"
