"""What an error of SQLite means for whoever runs the service."""

from __future__ import annotations

import sqlite3
from pathlib import Path


class StoreUnusable(Exception):
    """The service cannot start with this state file; the message is one sentence that says why, and what to do."""


def damaged(path: Path, what: str) -> str:
    """What to tell a person of a state file that cannot be read."""
    return f"the state file {path} is damaged ({what}): put a copy in its place, or move it away to start without what it holds"


def is_full(error: sqlite3.Error) -> bool:
    """Whether there was no room on the disk for what SQLite wanted to write."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and (code & 0xFF == sqlite3.SQLITE_FULL or code in (sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_WRITE))


def unusable(path: Path, error: sqlite3.Error) -> str:
    """What to tell a person of a state file that the service cannot start with."""
    if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
        return f"the state file {path} is locked by another process: end that one first"
    if is_full(error):
        return f"the state file {path} cannot be written, its disk is full: make room first"
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
        return damaged(path, str(error))
    return f"the state file {path} cannot be used: {error}"
