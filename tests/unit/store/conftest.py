"""Opens a store in a temporary folder, and mounts a small disk."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox_server.store.sqlite.options import SqliteOptions
from sandbox_server.store.sqlite.store import SqliteStore
from tests.support.small_disk import mounted_disk
from tests.unit.store.test_store import LEASE


@contextlib.asynccontextmanager
async def opened(path: Path, options: SqliteOptions | None = None) -> AsyncIterator[SqliteStore]:
    """A store that is closed at the end of the block."""
    store = SqliteStore(path, options=options)
    try:
        yield store
    finally:
        await store.close()


async def put_leases(path: Path, count: int = 3) -> None:
    """Write a state file with a number of leases."""
    async with opened(path) as store:
        for number in range(count):
            store.put(replace(LEASE, lease_id=f"l-{number}"))
        await store.flush()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.db"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    with mounted_disk(tmp_path / "small", "8m") as folder:
        yield folder
