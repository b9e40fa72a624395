"""A full disk: no promise is given, nothing that was promised is lost, and the store goes on when there is room."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from contextlib import suppress
from dataclasses import replace

import pytest

from sandbox_server.core.errors import StorageUnavailable
from sandbox_server.core.types import LeaseState
from sandbox_server.store.sqlite.options import SqliteOptions
from sandbox_server.store.sqlite.state_file import RESERVE_FILE
from sandbox_server.store.sqlite.store import FAILURE_VALID_S, SqliteStore, StoreUnusable
from tests.support.small_disk import fill_disk
from tests.unit.store.conftest import opened
from tests.unit.store.test_store import LEASE, SLOT

SMALL_RESERVE = SqliteOptions(reserve_bytes=1 << 20)


@pytest.mark.privileged
async def test_a_full_disk_promises_nothing_loses_nothing_and_is_got_over(small_disk):
    path = small_disk / "state.db"
    store = SqliteStore(path)
    written = []

    async def write_until_full():
        for number in range(10_000):
            store.put(replace(LEASE, lease_id=f"l-{number}", end_detail=os.urandom(1000).hex()))
            await store.flush()
            written.append(f"l-{number}")

    with pytest.raises(StorageUnavailable, match=r"full|I/O"):
        await write_until_full()
    assert len(written) > 100
    store.put(replace(SLOT, epoch=9))
    await asyncio.sleep(FAILURE_VALID_S)
    with pytest.raises(StorageUnavailable):
        await store.flush()

    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    await asyncio.sleep(FAILURE_VALID_S)
    await store.flush()
    await store.close()

    async with opened(path) as store:
        state = store.load()
        assert {lease.lease_id for lease in state.leases} == {*written, f"l-{len(written)}"}
        assert [slot.epoch for slot in state.slots] == [9]


def crash(path, folder):
    """Put what a service that was killed now would leave into a folder; the new path."""
    folder.mkdir()
    for suffix in ("", "-wal", "-shm"):
        shutil.copy(f"{path}{suffix}", folder / f"{path.name}{suffix}")
    return folder / path.name


@pytest.mark.privileged
@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_a_start_on_a_full_disk_finds_everything_and_writes_when_there_is_room(small_disk, tmp_path, how):
    async with opened(tmp_path / "state.db", SMALL_RESERVE) as store:
        for number in range(500):
            store.put(replace(LEASE, lease_id=f"l-{number}"))
        await store.flush()
        if how == "killed":
            path = crash(tmp_path / "state.db", small_disk / "state")
    if how == "stopped":
        path = small_disk / "state" / "state.db"
        path.parent.mkdir()
        shutil.copy(tmp_path / "state.db", path)
        shutil.copy(tmp_path / RESERVE_FILE, path.parent)
    fill_disk(small_disk)

    store = SqliteStore(path, options=SMALL_RESERVE)
    assert len(store.load().leases) == 500
    store.put(SLOT)
    await asyncio.sleep(FAILURE_VALID_S)
    with suppress(StorageUnavailable):  # where there was no reserve
        await store.flush()
    assert store.problem is not None
    (small_disk / "fill").unlink()
    await asyncio.sleep(FAILURE_VALID_S)
    await store.flush()
    await store.check_storage()
    assert store.problem is None
    await store.close()

    async with opened(path, SMALL_RESERVE) as store:
        assert (len(store.load().leases), path.with_name(RESERVE_FILE).stat().st_size) == (500, 1 << 20)


@pytest.mark.privileged
async def test_the_room_in_reserve_is_for_records_until_there_is_other_room(small_disk):
    store = SqliteStore(small_disk / "state.db", options=SMALL_RESERVE)
    store.put(LEASE)
    await store.flush()
    assert store.problem is None
    fill_disk(small_disk)

    for number in range(100):
        store.put(replace(LEASE, state=LeaseState.RELEASED, lease_id=f"l-{number}"))
        await store.flush()
    assert "is full: the room that is left is kept for releases" in store.problem
    await store.check_storage()
    assert store.problem is not None

    (small_disk / "fill").unlink()
    await store.check_storage()
    assert store.problem is None
    assert (small_disk / RESERVE_FILE).stat().st_size == 1 << 20
    await store.close()


@pytest.mark.privileged
async def test_what_was_deleted_on_a_full_disk_is_written_anew_when_there_is_room(small_disk):
    store = SqliteStore(small_disk / "state.db", options=SMALL_RESERVE)
    store.put(LEASE)
    await store.flush()
    fill_disk(small_disk)
    (small_disk / "state.db").unlink()

    await store.check_storage()
    assert "make room" in store.problem
    (small_disk / "fill").unlink()
    await store.check_storage()
    assert store.problem is None
    await store.close()

    async with opened(small_disk / "state.db", SMALL_RESERVE) as store:
        assert store.load().leases == (LEASE,)


@pytest.mark.privileged
async def test_a_disk_that_is_full_at_the_start_is_said(small_disk):
    fill_disk(small_disk)

    with pytest.raises(StoreUnusable, match="make room"):
        SqliteStore(small_disk / "state.db")
