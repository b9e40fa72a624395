"""The limits of the SQLite store."""

from __future__ import annotations

from dataclasses import dataclass

from sandbox_server.store.sqlite.disk_reserve import RESERVE_BYTES
from sandbox_server.store.sqlite.migrations import MIGRATIONS, Migrations


@dataclass(frozen=True, kw_only=True)
class SqliteOptions:
    """Limits of the SQLite store. The defaults are right for a service.

    Attributes:
        reserve_bytes: how much room on the disk is reserved for the state file.
        busy_timeout_s: how long a statement waits for a lock of another process, in seconds.
        retry_after_s: how long after a failed commit the store tries again by itself.
        max_unwritten_bytes: how much output of results that cannot be written is kept in memory. Beyond it the oldest results are dropped; the
            journals of the agents still have them.
        migrations: the statements that lead from each version of the schema to the next.
    """

    reserve_bytes: int = RESERVE_BYTES
    busy_timeout_s: float = 1.0
    retry_after_s: float = 1.0
    max_unwritten_bytes: int = 64 << 20
    migrations: Migrations = MIGRATIONS
