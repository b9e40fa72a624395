"""The state file: what was flushed survives SIGKILL, what cannot be written is kept, what cannot be read stops the start with one sentence."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox_server.core.errors import StorageUnavailable
from sandbox_server.core.types import LeaseState
from sandbox_server.store.sqlite import state_file as sqlite_file
from sandbox_server.store.sqlite import store as sqlite_store
from sandbox_server.store.sqlite.state_file import RESERVE_FILE, SWEPT_AT_ONCE
from sandbox_server.store.sqlite.store import SqliteStore, StoreUnusable
from tests.unit.store.test_store import LEASE, RESULT, SLOT

ROOT = Path(__file__).parents[3]

WRITES_FOR_EVER = """
import asyncio, sys
from dataclasses import replace
from pathlib import Path
from sandbox_server.core.types import LeaseState
from sandbox_server.store.sqlite.store import SqliteStore
from tests.unit.store.test_store import LEASE, RESULT

async def work(store, name):
    number = 0
    while True:
        number += 1
        lease_id = f"{name}-{number}"
        for part in range(3):
            store.put(replace(LEASE, lease_id=f"{lease_id}-{part}"))
        store.record_result(f"{lease_id}-0", "c", b"id", replace(RESULT, output=b"x" * 20_000))
        await store.flush()
        sys.stdout.write(lease_id + chr(10))
        sys.stdout.flush()

async def main():
    store = SqliteStore(Path(sys.argv[1]))
    await asyncio.gather(*(work(store, name) for name in "abcdefgh"))

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def opened(path):
    store = SqliteStore(path)
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.db"


async def put_some(path, count=3):
    async with opened(path) as store:
        for number in range(count):
            store.put(replace(LEASE, lease_id=f"l-{number}"))
        await store.flush()


async def test_it_outlives_the_process_and_is_nobody_elses(path):
    await put_some(path)

    async with opened(path) as store:
        assert len(store.load().leases) == 3
        assert store.durable
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {leftover.name for leftover in path.parent.iterdir()} == {path.name, RESERVE_FILE}


@pytest.mark.parametrize("after_lines", [1, 50, 400])
def test_what_was_flushed_survives_sigkill_and_a_commit_is_whole(path, after_lines):
    writer = subprocess.Popen([sys.executable, "-c", WRITES_FOR_EVER, str(path)], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    promised = [writer.stdout.readline().strip() for _ in range(after_lines)]
    writer.send_signal(signal.SIGKILL)
    promised += writer.stdout.read().split("\n")[:-1]
    writer.wait()
    writer.stdout.close()

    async def check():
        async with opened(path) as store:
            kept = {lease.lease_id for lease in store.load().leases}
            assert {f"{lease_id}-{part}" for lease_id in promised for part in range(3)} <= kept
            assert len(kept) % 3 == 0, "a half of what was decided in one step"
            assert all(store.find_result(f"{lease_id}-0", "c").result.output == b"x" * 20_000 for lease_id in promised)

    asyncio.run(check())


async def test_many_who_wait_share_a_commit(path):
    async with opened(path) as store:
        await store.flush()
        commits = []
        commit = store._writer._file.commit
        store._writer._file.commit = lambda batch: commits.append(len(batch.records)) or commit(batch)

        async def one(number):
            store.put(replace(LEASE, lease_id=f"l-{number}"))
            await store.flush()

        await asyncio.gather(*(one(number) for number in range(200)))

        assert sum(commits) == 200
        assert len(commits) <= 3


async def test_what_nobody_waits_for_is_written_soon_too(path):
    async with opened(path) as store:
        store.put(LEASE)
        reader = sqlite3.connect(path)
        with contextlib.closing(reader):
            async with asyncio.timeout(5):
                while not reader.execute("SELECT count(*) FROM record").fetchone()[0]:
                    await asyncio.sleep(0.001)


async def test_a_flush_that_is_cancelled_hurts_nobody(path):
    async with opened(path) as store:
        store.put(LEASE)
        one, two = asyncio.create_task(store.flush()), asyncio.create_task(store.flush())
        await asyncio.sleep(0)
        one.cancel()
        await two


async def test_verdicts_are_on_disk_with_their_outputs_and_go_with_their_lease(path):
    output = os.urandom(3 << 20)
    async with opened(path) as store:
        store.put(LEASE)
        for number in range(SWEPT_AT_ONCE * 2 + 10):
            store.record_result("l-1", f"c-{number}", b"id", RESULT)
        store.record_result("l-1", "big", b"id", replace(RESULT, output=output))
        assert store.find_result("l-1", "big").result.output == output
        await store.flush()
        assert store.find_result("l-1", "big").result.output == output
        assert store._pending.output_bytes == 0
    async with opened(path) as store:
        assert (store.find_result("l-1", "big").result.output, store.result_count("l-1")) == (output, SWEPT_AT_ONCE * 2 + 11)
        store.put(replace(LEASE, state=LeaseState.RELEASED))
        store.record_result("l-1", "late", b"id", RESULT)
        assert (store.find_result("l-1", "big"), store.result_count("l-1")) == (None, 0)
    async with opened(path) as store:
        assert (store.find_result("l-1", "big"), store.result_count("l-1")) == (None, 0)
        async with asyncio.timeout(10):
            while store._reader._connection.execute("SELECT count(*) FROM verdict").fetchone()[0]:
                await asyncio.sleep(0.001)


async def test_a_lock_held_by_another_process_is_told_and_waited_out(path, monkeypatch):
    await put_some(path)
    async with opened(path) as store:
        other = sqlite3.connect(path, isolation_level=None)
        with contextlib.closing(other):
            other.execute("BEGIN IMMEDIATE")
            store.put(replace(LEASE, lease_id="l-held-up"))
            with pytest.raises(StorageUnavailable, match="locked"):
                await store.flush()
            began = time.monotonic()
            store.put(replace(LEASE, lease_id="l-too"))
            with pytest.raises(StorageUnavailable, match="locked"):
                await store.flush()
            assert time.monotonic() - began < sqlite_store.FAILED_FOR_S
            other.execute("ROLLBACK")
        await asyncio.sleep(sqlite_store.FAILED_FOR_S)
        await store.flush()
    async with opened(path) as store:
        assert {"l-held-up", "l-too"} <= {lease.lease_id for lease in store.load().leases}


async def test_what_could_not_be_written_is_written_later_although_nobody_asks(path, monkeypatch):
    monkeypatch.setattr(sqlite_store, "AGAIN_AFTER_S", 0.05)
    async with opened(path) as store:
        other = sqlite3.connect(path, isolation_level=None)
        with contextlib.closing(other):
            other.execute("BEGIN IMMEDIATE")
            store.put(LEASE)
            with pytest.raises(StorageUnavailable):
                await store.flush()
            store.put(replace(LEASE, expires_at=99.0))
            other.execute("ROLLBACK")
            async with asyncio.timeout(5):
                while not other.execute("SELECT count(*) FROM record").fetchone()[0]:
                    await asyncio.sleep(0.001)
        (lease,) = [*store._reader.records("lease")]
        assert lease.expires_at == 99.0


async def test_outputs_that_cannot_be_written_do_not_fill_the_memory(path, monkeypatch):
    monkeypatch.setattr(sqlite_store, "MAX_UNWRITTEN_BYTES", 100_000)
    async with opened(path) as store:
        other = sqlite3.connect(path, isolation_level=None)
        with contextlib.closing(other):
            other.execute("BEGIN IMMEDIATE")
            store.put(LEASE)
            with pytest.raises(StorageUnavailable):
                await store.flush()
            for number in range(20):
                store.record_result("l-1", f"c-{number}", b"id", replace(RESULT, output=b"x" * 10_000))
            assert store._pending.output_bytes <= 100_000
            assert (store.find_result("l-1", "c-0"), store.result_count("l-1")) == (None, 10)
            assert store.find_result("l-1", "c-19") is not None
            other.execute("ROLLBACK")
        await asyncio.sleep(sqlite_store.FAILED_FOR_S)
        await store.flush()
        assert store.find_result("l-1", "c-19") is not None


@pytest.fixture
def small_disk(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


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
    await asyncio.sleep(sqlite_store.FAILED_FOR_S)
    with pytest.raises(StorageUnavailable):
        await store.flush()

    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    await asyncio.sleep(sqlite_store.FAILED_FOR_S)
    await store.flush()
    await store.close()

    async with opened(path) as store:
        state = store.load()
        assert {lease.lease_id for lease in state.leases} == {*written, f"l-{len(written)}"}
        assert [slot.epoch for slot in state.slots] == [9]


def fill(folder):
    """Leave no room at all."""
    with suppress(OSError), open(folder / "fill", "wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass


def crash(path, folder):
    """Put what a service that was killed now would leave into a folder; the new path."""
    folder.mkdir()
    for suffix in ("", "-wal", "-shm"):
        shutil.copy(f"{path}{suffix}", folder / f"{path.name}{suffix}")
    return folder / path.name


@pytest.mark.privileged
@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_a_start_on_a_full_disk_finds_everything_and_writes_when_there_is_room(small_disk, tmp_path, monkeypatch, how):
    monkeypatch.setattr(sqlite_file, "RESERVE_BYTES", 1 << 20)
    async with opened(tmp_path / "state.db") as store:
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
    fill(small_disk)

    store = SqliteStore(path)
    assert len(store.load().leases) == 500
    store.put(SLOT)
    await asyncio.sleep(sqlite_store.FAILED_FOR_S)
    with suppress(StorageUnavailable):  # where there was no reserve
        await store.flush()
    assert store.problem is not None
    (small_disk / "fill").unlink()
    await asyncio.sleep(sqlite_store.FAILED_FOR_S)
    await store.flush()
    await store.check_storage()
    assert store.problem is None
    await store.close()

    async with opened(path) as store:
        assert (len(store.load().leases), path.with_name(RESERVE_FILE).stat().st_size) == (500, 1 << 20)


@pytest.mark.privileged
async def test_the_room_in_reserve_is_for_records_until_there_is_other_room(small_disk, monkeypatch):
    monkeypatch.setattr(sqlite_file, "RESERVE_BYTES", 1 << 20)
    store = SqliteStore(small_disk / "state.db")
    store.put(LEASE)
    await store.flush()
    assert store.problem is None
    fill(small_disk)

    for number in range(100):
        store.put(replace(LEASE, state=LeaseState.RELEASED, lease_id=f"l-{number}"))
        await store.flush()
    assert "is full: what is left is kept for releases" in store.problem
    await store.check_storage()
    assert store.problem is not None

    (small_disk / "fill").unlink()
    await store.check_storage()
    assert store.problem is None
    assert (small_disk / RESERVE_FILE).stat().st_size == 1 << 20
    await store.close()


@pytest.mark.privileged
async def test_what_was_deleted_on_a_full_disk_is_written_anew_when_there_is_room(small_disk, monkeypatch):
    monkeypatch.setattr(sqlite_file, "RESERVE_BYTES", 1 << 20)
    store = SqliteStore(small_disk / "state.db")
    store.put(LEASE)
    await store.flush()
    fill(small_disk)
    (small_disk / "state.db").unlink()

    await store.check_storage()
    assert "make room" in store.problem
    (small_disk / "fill").unlink()
    await store.check_storage()
    assert store.problem is None
    await store.close()

    async with opened(small_disk / "state.db") as store:
        assert store.load().leases == (LEASE,)


@pytest.mark.privileged
async def test_a_disk_that_is_full_at_the_start_is_said(small_disk):
    fill(small_disk)

    with pytest.raises(StoreUnusable, match="make room"):
        SqliteStore(small_disk / "state.db")


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
    await put_some(path, 2000)
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
    await put_some(path)
    other = sqlite3.connect(path, isolation_level=None)
    with contextlib.closing(other):
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreUnusable, match="locked by another process"):
            SqliteStore(path)


async def test_a_copy_taken_while_it_is_written_can_be_opened(path, tmp_path):
    """A service that is killed leaves a log beside the file: both together are the state."""
    async with opened(path) as store:
        store.put(LEASE)
        await store.flush()
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", f"{tmp_path}/copy{suffix}")

    async with opened(tmp_path / "copy") as store:
        assert store.load().leases == (LEASE,)


async def test_damage_found_while_it_runs_is_an_error_of_who_asks(path):
    async with opened(path) as store:
        store.put(LEASE)
        store.record_result("l-1", "c", b"id", RESULT)
        await store.flush()
        change(path, "UPDATE verdict SET doc = 'x'")

        with pytest.raises(StorageUnavailable, match="cannot be read"):
            store.find_result("l-1", "c")
