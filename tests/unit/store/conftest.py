"""Opens a store in a temporary folder, and mounts a small disk."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox_server.store.sqlite.options import SqliteOptions
from sandbox_server.store.sqlite.store import SqliteStore
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
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)
