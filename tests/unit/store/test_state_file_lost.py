"""A state file that is deleted or replaced while the service is running: what was flushed is written to its path again, or reported as not written."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox_server.core.errors import StorageUnavailable
from sandbox_server.core.types import LeaseState
from sandbox_server.store.sqlite.rewrite import COMPLETE, PARTIAL
from sandbox_server.store.sqlite.store import FAILURE_VALID_S, SqliteStore
from tests.unit.store.test_store import LEASE, RESULT

LEASES = 50


@pytest.fixture
def path(tmp_path):
    folder = tmp_path / "state"
    folder.mkdir()
    return folder / "state.db"


@pytest.fixture
async def store(path):
    store = SqliteStore(path)
    for number in range(LEASES):
        store.put(replace(LEASE, lease_id=f"l-{number}"))
    store.record_result("l-0", "c", b"id", replace(RESULT, output=b"x" * 100_000))
    await store.flush()
    yield store
    await store.close()


async def put_one_more(store):
    await asyncio.sleep(FAILURE_VALID_S)
    store.put(replace(LEASE, lease_id="l-more"))
    await store.flush()


def remove(path, *suffixes):
    for suffix in suffixes:
        Path(f"{path}{suffix}").unlink()


async def what_a_crash_would_leave(path, tmp_path):
    """The leases and the output that a service finds which is started after this one was killed now."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for suffix in ("", "-wal"):
        shutil.copy(f"{path}{suffix}", copy / f"state.db{suffix}")
    found = SqliteStore(copy / "state.db")
    try:
        recorded_result = found.find_result("l-0", "c")
        return {lease.lease_id for lease in found.load().leases}, None if recorded_result is None else recorded_result.result.output
    finally:
        await found.close()


@pytest.mark.parametrize("suffixes", [("",), ("-wal",), ("-shm",), ("", "-wal"), ("-wal", "-shm"), ("", "-wal", "-shm")], ids=" ".join)
async def test_what_was_deleted_is_written_anew_with_all_that_is_on_record(store, path, tmp_path, suffixes):
    remove(path, *suffixes)

    await put_one_more(store)

    assert store.problem is None
    assert store.find_result("l-0", "c").result.output == b"x" * 100_000
    leases, output = await what_a_crash_would_leave(path, tmp_path)
    assert leases == {*(f"l-{number}" for number in range(LEASES)), "l-more"}
    assert output == b"x" * 100_000
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not [leftover for leftover in path.parent.iterdir() if leftover.suffix in (PARTIAL, COMPLETE)]


async def test_it_is_noticed_although_nobody_writes(store, path, tmp_path):
    remove(path, "", "-wal", "-shm")

    await store.check_storage()

    assert len((await what_a_crash_would_leave(path, tmp_path))[0]) == LEASES
    for number in range(3):  # and again, and what comes after is written to the new one
        remove(path, "")
        store.put(replace(LEASE, lease_id=f"later-{number}"))
        await store.flush()
    assert len((await what_a_crash_would_leave(path, tmp_path / ".."))[0]) == LEASES + 3


def another(path):
    """A state file of another service."""
    other = path.with_name("other.db")
    with contextlib.closing(sqlite3.connect(other)) as connection:
        connection.execute("CREATE TABLE t (x)")
        connection.commit()
    return other


async def test_another_file_in_its_place_is_left_alone_until_a_person_has_moved_it_away(store, path, tmp_path, caplog):
    other = another(path)
    content = other.read_bytes()
    other.replace(path)

    with pytest.raises(StorageUnavailable, match="was replaced by another file while the service is running: move that file away"):
        await put_one_more(store)
    assert "move that file away" in store.problem
    await store.check_storage()
    assert path.read_bytes() == content
    assert not Path(f"{path}-wal").exists(), "the log of the one would be taken for the other's"
    assert sum("was replaced" in record.message for record in caplog.records) == 1

    path.rename(tmp_path / "aside")
    await store.check_storage()
    await asyncio.sleep(FAILURE_VALID_S)
    await store.flush()
    assert store.problem is None
    assert "l-more" in (await what_a_crash_would_leave(path, tmp_path))[0]


async def test_a_path_that_cannot_be_looked_up_is_reported_to_whoever_waits_and_the_store_goes_on(store, path):
    """Neither the commit in the event loop nor the clean-up in the thread may leave later commits waiting for ever."""
    aside = path.with_name("aside")
    path.rename(aside)
    path.symlink_to(path)  # a lookup fails with ELOOP, as it fails with EACCES or EIO on other file systems

    async with asyncio.timeout(5):
        for number in range(2):
            store._rests_until = 0.0
            with pytest.raises(StorageUnavailable, match="Too many levels of symbolic links"):
                await put_one_more(store)
            store.put(replace(LEASE, lease_id=f"l-{number}", state=LeaseState.RELEASED))  # whose result is deleted in a clean-up
            await store.check_storage()
        path.unlink()
        aside.rename(path)
        await asyncio.sleep(FAILURE_VALID_S)
        await store.flush()

    assert store.problem is None
    assert store.find_lease("l-more") is not None
    assert store.find_result("l-0", "c") is None


async def test_another_file_in_its_place_outlives_the_service_unchanged(path):
    store = SqliteStore(path)
    store.put(LEASE)
    await store.flush()
    other = another(path)
    content = other.read_bytes()
    other.replace(path)
    store.put(replace(LEASE, expires_at=99.0))

    await store.close()

    assert path.read_bytes() == content


async def test_a_file_that_is_overwritten_is_said_and_not_written_to(path, tmp_path):
    store = SqliteStore(path)
    for number in range(LEASES):
        store.put(replace(LEASE, lease_id=f"l-{number}"))
    await store.flush()
    other = another(path)
    content = other.read_bytes()
    await asyncio.sleep(0.02)  # the time of the last write has a grain
    path.write_bytes(content)

    with pytest.raises(StorageUnavailable, match="was overwritten by another program"):
        await put_one_more(store)
    await store.check_storage()
    assert "stop the service, remove state.db-wal and state.db-shm" in store.problem
    await store.close()

    assert path.read_bytes() == content


async def test_a_folder_that_is_gone_is_said_and_goes_on_when_it_is_back(store, path, tmp_path):
    path.parent.rename(tmp_path / "aside")
    with pytest.raises(StorageUnavailable, match="does not exist any more while the service is running: put the old one back"):
        await put_one_more(store)

    path.parent.mkdir()
    await store.check_storage()
    assert "was replaced by another folder" in store.problem
    assert not list(path.parent.iterdir())

    path.parent.rmdir()
    (tmp_path / "aside").rename(path.parent)
    await store.check_storage()
    await asyncio.sleep(FAILURE_VALID_S)
    await store.flush()
    assert store.problem is None
    assert "l-more" in (await what_a_crash_would_leave(path, tmp_path))[0]


@pytest.mark.parametrize("is_whole", [True, False])
async def test_a_start_finds_what_a_killed_service_was_writing_anew(path, is_whole):
    first = SqliteStore(path)
    first.put(LEASE)
    await first.close()
    name = COMPLETE if is_whole else PARTIAL
    path.rename(f"{path}{name}")
    Path(f"{path}-wal").write_bytes(b"of the file that was deleted")

    second = SqliteStore(path)
    try:
        assert len(second.load().leases) == is_whole
        assert not Path(f"{path}{name}").exists()
    finally:
        await second.close()
