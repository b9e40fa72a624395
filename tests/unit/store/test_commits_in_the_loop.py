"""Small batches are committed in the event loop; whatever has to wait for something is left to the writer thread."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox_server.core.execution import ToolCall
from sandbox_server.core.types import Lease
from sandbox_server.store.base import RunBatchItemRecord
from sandbox_server.store.sqlite.batch import WriteBatch
from sandbox_server.store.sqlite.options import SqliteOptions
from sandbox_server.store.sqlite.state_file import SHORT_BATCH_CHARS, WAL_BYTES, StateFile
from sandbox_server.store.sqlite.store import SMALL_BATCH_BYTES, SMALL_BATCH_ITEMS, SqliteStore
from tests.unit.store.conftest import opened
from tests.unit.store.test_store import LEASE, RESULT


class Commits:
    """Notes for each commit of a store whether it was made in this thread."""

    def __init__(self, store: SqliteStore) -> None:
        self.were_here: list[bool] = []
        self._store = store
        file = store._file
        write = file._write

        def noted_write(*args: object, **kwargs: object) -> None:
            write(*args, **kwargs)  # type: ignore[arg-type]
            self.were_here.append(threading.current_thread() is threading.main_thread())

        file._write = noted_write  # type: ignore[method-assign]

    async def commit(self, count: int = 1, output: bytes = b"") -> bool:
        """Commit so many leases, and a result with this output. Returns whether the commit was made in this thread."""
        self._store._rests_until = 0.0
        for number in range(count):
            self._store.put(replace(LEASE, lease_id=f"l-{len(self.were_here)}-{number}"))
        if output:
            self._store.record_result(f"l-{len(self.were_here)}-0", "c", b"id", replace(RESULT, output=output))
        await self._store.flush()
        return self.were_here[-1]


async def test_a_small_batch_is_committed_in_the_loop_and_a_large_one_is_not(path: Path) -> None:
    async with opened(path) as store:
        commits = Commits(store)
        assert not await commits.commit(), "the first commit begins the log anew, which SQLite syncs"
        assert await commits.commit()
        assert await commits.commit(SMALL_BATCH_ITEMS)
        assert not await commits.commit(SMALL_BATCH_ITEMS + 1)
        assert await commits.commit(output=b"x" * 100)
        assert not await commits.commit(output=b"x" * (SMALL_BATCH_BYTES + 1))

    async with opened(path) as store:
        assert len(store.load().leases) == sum((1, 1, SMALL_BATCH_ITEMS, SMALL_BATCH_ITEMS + 1, 1, 1))


def item(args: dict[str, object]) -> RunBatchItemRecord:
    """An item of a run-batch whose call has these arguments."""
    call = ToolCall(call_id="c", lease_id="l-1", tool="python", args=args)
    return RunBatchItemRecord(batch_id="b", index=0, tenant="t", lease_id="l-1", call=call)


@pytest.mark.parametrize(
    ("record", "is_short"),
    [
        (item({"code": "x" * (SHORT_BATCH_CHARS // 2)}), True),
        (item({"code": "x" * SHORT_BATCH_CHARS}), False),
        (item({"files": {"a": ["x" * SHORT_BATCH_CHARS]}}), False),
        (item({"numbers": [0] * SHORT_BATCH_CHARS}), False),
        (replace(LEASE, end_detail="x" * SHORT_BATCH_CHARS), False),
    ],
)
async def test_a_long_record_is_left_to_the_thread(path: Path, record: RunBatchItemRecord | Lease, is_short: bool) -> None:
    """Encoding and writing eight megabytes of arguments would hold every request up."""
    async with opened(path) as store:
        commits = Commits(store)
        await commits.commit()
        store._rests_until = 0.0
        store.put(record)
        await store.flush()
        assert commits.were_here[-1] is is_short

    async with opened(path) as store:
        state = store.load()
        assert record in (*state.run_batch_items, *state.leases)


async def test_a_log_that_is_too_long_is_left_to_the_thread_which_copies_it(path: Path) -> None:
    async with opened(path) as store:
        commits = Commits(store)
        await commits.commit()
        store._file._wal_bytes = lambda: 8 * WAL_BYTES + 1  # type: ignore[method-assign]
        assert not await commits.commit()
        assert store._file._log_was_copied


async def test_commits_in_the_loop_take_a_small_part_of_its_time(path: Path) -> None:
    async with opened(path) as store:
        commits = Commits(store)
        await commits.commit()
        assert await commits.commit()
        store.put(replace(LEASE, lease_id="next"))
        await store.flush()
        assert commits.were_here[-1] is False, "the loop rests after a commit"


async def test_the_loop_does_not_wait_for_a_lock_of_another_process(path: Path) -> None:
    async with opened(path) as store:
        commits = Commits(store)
        await commits.commit()
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            store._rests_until = 0.0
            store.put(replace(LEASE, lease_id="waits"))
            store._start_commit()
            assert store._writing is not None, "the writer thread waits for the lock"
            other.execute("COMMIT")
        await store.flush()
        assert commits.were_here[-1] is False
        assert await commits.commit()


@pytest.mark.parametrize("work", [StateFile.check, lambda file: file.clean_up_step(["l-1"])], ids=["check", "clean-up"])
def test_the_work_of_the_thread_waits_for_locks_after_a_commit_in_the_loop(path: Path, work: Callable[[StateFile], object]) -> None:
    file = StateFile(path, SqliteOptions(busy_timeout_s=0.5))
    with closing(file):
        batch = WriteBatch({("lease", LEASE.lease_id): LEASE})
        file.commit(batch)
        assert file.try_commit(batch)
        work(file)
        assert file._connection.execute("PRAGMA busy_timeout").fetchone() == (500,)


async def test_a_deleted_state_file_is_written_anew_by_the_thread(path: Path) -> None:
    async with opened(path) as store:
        commits = Commits(store)
        await commits.commit()
        assert await commits.commit()
        path.unlink()
        assert not await commits.commit()
        assert path.exists()

    async with opened(path) as store:
        assert len(store.load().leases) == 3


async def test_no_timer_is_left_after_a_commit_in_the_loop(path: Path) -> None:
    async with opened(path) as store:
        commits = Commits(store)
        await commits.commit()
        assert await commits.commit()
        assert store._commit_timer is None
