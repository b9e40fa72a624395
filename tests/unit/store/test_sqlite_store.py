"""The SQLite store: what was flushed survives SIGKILL, and what cannot be written is kept and written later."""

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
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox_server.core.errors import StorageUnavailable
from sandbox_server.core.types import LeaseState
from sandbox_server.store.sqlite.options import SqliteOptions
from sandbox_server.store.sqlite.state_file import DELETED_PER_STEP, RESERVE_FILE
from sandbox_server.store.sqlite.store import FAILURE_VALID_S
from tests.unit.store.conftest import opened, put_leases
from tests.unit.store.test_store import LEASE, RESULT

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


async def test_it_outlives_the_process_and_is_nobody_elses(path):
    await put_leases(path)

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
        file = store._file
        write = file._write
        file._write = lambda rows, **options: commits.append(len(rows.puts)) or write(rows, **options)

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


async def test_results_are_on_disk_with_their_outputs_and_are_deleted_with_their_lease(path):
    output = os.urandom(3 << 20)
    async with opened(path) as store:
        store.put(LEASE)
        for number in range(DELETED_PER_STEP * 2 + 10):
            store.record_result("l-1", f"c-{number}", b"id", RESULT)
        store.record_result("l-1", "big", b"id", replace(RESULT, output=output))
        assert store.find_result("l-1", "big").result.output == output
        await store.flush()
        assert store.find_result("l-1", "big").result.output == output
        assert store._pending.output_bytes == 0
    async with opened(path) as store:
        assert (store.find_result("l-1", "big").result.output, store.result_count("l-1")) == (output, DELETED_PER_STEP * 2 + 11)
        store.put(replace(LEASE, state=LeaseState.RELEASED))
        store.record_result("l-1", "late", b"id", RESULT)
        assert (store.find_result("l-1", "big"), store.result_count("l-1")) == (None, 0)
    async with opened(path) as store:
        assert (store.find_result("l-1", "big"), store.result_count("l-1")) == (None, 0)
        async with asyncio.timeout(10):
            while store._reader._connection.execute("SELECT count(*) FROM verdict").fetchone()[0]:
                await asyncio.sleep(0.001)


async def test_the_results_of_ended_leases_are_deleted_together_with_the_next_check(path):
    async with opened(path) as store:
        for number in range(3):
            lease = replace(LEASE, lease_id=f"l-{number}")
            store.put(lease)
            store.record_result(lease.lease_id, "c-1", b"id", RESULT)
            await store.flush()
            store.put(replace(lease, state=LeaseState.RELEASED))
            await store.flush()
            assert store.find_result(lease.lease_id, "c-1") is None
        count = "SELECT count(*) FROM verdict"
        assert store._reader._connection.execute(count).fetchone()[0] == 3

        await store.check_storage()
        async with asyncio.timeout(10):
            while store._reader._connection.execute(count).fetchone()[0]:
                await asyncio.sleep(0.001)


@contextlib.contextmanager
def write_locked(path):
    """Hold the write lock of the state file, as another process can. The block gets the connection; `ROLLBACK` releases the lock."""
    other = sqlite3.connect(path, isolation_level=None)
    with contextlib.closing(other):
        other.execute("BEGIN IMMEDIATE")
        yield other


async def put_in_vain(store, lease):
    """Put a lease that cannot be written because of the lock."""
    store.put(lease)
    with pytest.raises(StorageUnavailable, match="locked"):
        await store.flush()


async def test_a_lock_of_another_process_is_reported_and_waited_out(path):
    await put_leases(path)
    async with opened(path, SqliteOptions(busy_timeout_s=0.1)) as store:
        with write_locked(path) as other:
            await put_in_vain(store, replace(LEASE, lease_id="l-held-up"))
            began = time.monotonic()
            await put_in_vain(store, replace(LEASE, lease_id="l-too"))
            assert time.monotonic() - began < FAILURE_VALID_S
            other.execute("ROLLBACK")
        await asyncio.sleep(FAILURE_VALID_S)
        await store.flush()
    async with opened(path) as store:
        assert {"l-held-up", "l-too"} <= {lease.lease_id for lease in store.load().leases}


async def test_what_could_not_be_written_is_written_later_although_nobody_asks(path):
    async with opened(path, SqliteOptions(busy_timeout_s=0.1, retry_after_s=0.05)) as store:
        with write_locked(path) as other:
            await put_in_vain(store, LEASE)
            store.put(replace(LEASE, expires_at=99.0))
            other.execute("ROLLBACK")
            async with asyncio.timeout(5):
                while not other.execute("SELECT count(*) FROM record").fetchone()[0]:
                    await asyncio.sleep(0.001)
        (lease,) = [*store._reader.records("lease")]
        assert lease.expires_at == 99.0


async def test_outputs_that_cannot_be_written_do_not_fill_the_memory(path):
    async with opened(path, SqliteOptions(busy_timeout_s=0.1, max_unwritten_bytes=100_000)) as store:
        with write_locked(path) as other:
            await put_in_vain(store, LEASE)
            for number in range(20):
                store.record_result("l-1", f"c-{number}", b"id", replace(RESULT, output=b"x" * 10_000))
            assert store._pending.output_bytes <= 100_000
            assert (store.find_result("l-1", "c-0"), store.result_count("l-1")) == (None, 10)
            assert store.find_result("l-1", "c-19") is not None
            other.execute("ROLLBACK")
        await asyncio.sleep(FAILURE_VALID_S)
        await store.flush()
        assert store.find_result("l-1", "c-19") is not None


async def test_a_copy_taken_while_it_is_written_can_be_opened(path, tmp_path):
    """A service that is killed leaves a log beside the file: both together are the state."""
    async with opened(path) as store:
        store.put(LEASE)
        await store.flush()
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", f"{tmp_path}/copy{suffix}")

    async with opened(tmp_path / "copy") as store:
        assert store.load().leases == (LEASE,)
