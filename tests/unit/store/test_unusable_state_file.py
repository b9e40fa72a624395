"""A state file that cannot be read: the service does not start, and says why in one sentence."""

from __future__ import annotations

import contextlib
import os
import sqlite3

import pytest

from sandbox_server.core.errors import StorageUnavailable
from sandbox_server.store.sqlite.options import SqliteOptions
from sandbox_server.store.sqlite.store import SqliteStore, StoreUnusable
from tests.unit.store.conftest import opened, put_leases
from tests.unit.store.test_store import LEASE, RESULT


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.write_bytes(b"not a database, " * 512), "no state file of this service"),
        (lambda path: os.truncate(path, path.stat().st_size - 4096), "damaged"),
        (lambda path: os.truncate(path, 5000), "damaged"),
        (lambda path: overwrite(path, 4096 * 4), "damaged"),
        (lambda path: change(path, "PRAGMA user_version = 99"), "newer version of this service .schema 99"),
        (lambda path: change(path, "PRAGMA application_id = 7"), "no state file of this service"),
        (lambda path: change(path, "UPDATE record SET doc = '[]'"), "damaged"),
        (lambda path: (path.unlink(), path.mkdir()), "cannot be opened"),
    ],
)
async def test_a_file_that_cannot_be_read_stops_the_start_with_a_sentence(path, spoil, said):
    await put_leases(path, 2000)
    spoil(path)

    with pytest.raises(StoreUnusable, match=said) as caught:
        SqliteStore(path)

    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def overwrite(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(b"\xff" * 4096)


def change(path, sql):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(sql)
        connection.commit()


async def test_a_file_that_is_locked_at_the_start_is_said(path):
    await put_leases(path)
    other = sqlite3.connect(path, isolation_level=None)
    with contextlib.closing(other):
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreUnusable, match="locked by another process"):
            SqliteStore(path, options=SqliteOptions(busy_timeout_s=0.1))


async def test_damage_found_while_it_runs_is_an_error_of_who_asks(path):
    async with opened(path) as store:
        store.put(LEASE)
        store.record_result("l-1", "c", b"id", RESULT)
        await store.flush()
        change(path, "UPDATE verdict SET doc = 'x'")

        with pytest.raises(StorageUnavailable, match="cannot be read"):
            store.find_result("l-1", "c")
