"""The schema of the state file, and its migration from older versions."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

APPLICATION_ID = 0x53425058

Migrations = Sequence[Sequence[str]]

#: The SQL statements that lead from each version of the schema to the next. The first entry creates version 1 in an empty file.
MIGRATIONS: Migrations = (
    (
        "CREATE TABLE record (kind TEXT NOT NULL, key TEXT NOT NULL, doc TEXT NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID",
        "CREATE TABLE verdict (lease_id TEXT NOT NULL, call_id TEXT NOT NULL, identity TEXT NOT NULL, doc TEXT NOT NULL,"
        " lengths TEXT NOT NULL, outputs BLOB NOT NULL, PRIMARY KEY (lease_id, call_id))",
    ),
    # Since version 2, pools have owners. The pools of version 1 get no owner and are shared, because every tenant could use them.
    # A service that knows only version 1 would confuse pools of the same name that belong to two tenants. It refuses to open a file of version 2.
    ("UPDATE record SET doc = json_set(doc, '$.tenant', NULL, '$.spec.shared', json('true')) WHERE kind = 'pool'",),
)


def migrate(connection: sqlite3.Connection, from_version: int, migrations: Migrations) -> None:
    """Bring the schema to the newest version, with one transaction for each version.

    Args:
        connection: a connection without an open transaction.
        from_version: the version of the schema in the file; 0 for an empty file.
        migrations: the statements that lead from each version to the next.

    Raises:
        sqlite3.Error: a statement failed.
    """
    for version in range(from_version, len(migrations)):
        connection.execute("BEGIN IMMEDIATE")
        for statement in migrations[version]:
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {version + 1}")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("COMMIT")
