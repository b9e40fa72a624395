"""The store in a SQLite file, which outlives the service.

`put` adds a change to a batch in memory, which holds the newest record of each object. `flush` has the batch committed at once, or at the end of the
current iteration of the event loop. Everything that is put while a commit is under way belongs to the next commit. What could not be written is kept and
tried again until it is written.

A commit does not wait for the disk. A small one takes a tenth of a millisecond, and waking a thread for it takes longer. So a small batch is committed in
the event loop, as long as that takes little of the loop's time; every other batch, and whatever has to wait, is left to the writer thread.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from dataclasses import replace
from pathlib import Path

from sandbox_server.core.clock import Clock, SystemClock
from sandbox_server.core.errors import StorageUnavailable
from sandbox_server.core.execution import Result
from sandbox_server.core.types import Lease, SandboxState
from sandbox_server.store.base import STATES_WITHOUT_RESULTS, Deletion, Record, RecordedResult, SandboxRecord, SlotRecord, State
from sandbox_server.store.codec import record_id, request_key_record_id
from sandbox_server.store.output_files import OutputFiles
from sandbox_server.store.record_time import RecordTime, boot_id
from sandbox_server.store.sqlite.batch import WriteBatch
from sandbox_server.store.sqlite.errors import StoreUnusable, describe_damage
from sandbox_server.store.sqlite.file_identity import StateFileReplaced
from sandbox_server.store.sqlite.options import SqliteOptions
from sandbox_server.store.sqlite.reader import StateFileReader
from sandbox_server.store.sqlite.state_file import StateFile
from sandbox_server.store.sqlite.writer import WriterThread

log = logging.getLogger(__name__)

#: A change for which no `flush` waits is committed after this many seconds.
COMMIT_DELAY_S = 0.02
#: For this many seconds after a failed commit, `flush` raises the same error again without another attempt.
FAILURE_VALID_S = 0.1
#: A batch of at most so many records and results, with at most so many bytes of output, is small.
SMALL_BATCH_ITEMS, SMALL_BATCH_BYTES = 16, 64 << 10
#: After a commit in the event loop, there is none for this many times as long as it took, so that a slow disk or a high rate takes little of its time.
REST_FACTOR = 5
#: The results of so many ended leases are deleted together, those of fewer with the next check of the file: each deletion is a commit of its own.
LEASES_PER_DELETION = 32
#: The folder of the output files, beside the state file.
OUTPUT_FOLDER = "outputs"

__all__ = ["SqliteStore", "StoreUnusable"]


class SqliteStore:
    """A `Store` in a SQLite file.

    Args:
        path: the path of the state file. A missing file is created; its folder must exist.
        clock: the clock that the times in records refer to; None: the clock of the machine.
        boot: the id of this start of the machine; None: read it from the kernel.
        options: the limits of the store.

    Raises:
        StoreUnusable: the file is damaged, locked, written by a newer version, or not a state file.
    """

    durable = True

    def __init__(self, path: Path, clock: Clock | None = None, boot: str | None = None, options: SqliteOptions | None = None) -> None:
        self._path = path
        self._options = options or SqliteOptions()
        self._pending = WriteBatch()
        self._writing: WriteBatch | None = None
        self._waiting_for_pending: list[asyncio.Future[None]] = []
        self._waiting_for_writing: list[asyncio.Future[None]] = []
        self._failure: StorageUnavailable | None = None
        self._failed_at = float("-inf")
        self._commit_timer: asyncio.TimerHandle | None = None
        self._is_commit_scheduled = False
        self._rests_until = 0.0  # there is no commit in the event loop before, by `time.monotonic`
        self._reader_generation = 0
        self._recorded_calls: dict[str, set[str]] = {}
        self._slots_by_sandbox: dict[str, set[str]] = {}
        self._leases_to_clear: list[str] = []  # their results in the file are to be deleted
        file = self._file = StateFile(path, self._options)
        try:
            self._reader = StateFileReader(path)
            self._state: State | None = self._reader.read_state()
            self._time = RecordTime(clock or SystemClock(), boot_id() if boot is None else boot, self._state.clock)
            for lease_id, call_id in self._reader.recorded_calls():
                self._recorded_calls.setdefault(lease_id, set()).add(call_id)
        except (sqlite3.Error, ValueError) as error:
            file.close()
            raise StoreUnusable(describe_damage(path, str(error))) from error
        self._writer = WriterThread(file)
        if self._time.record != self._state.clock:
            self.put(self._time.record)
        for slot in self._state.slots:
            self._slots_by_sandbox.setdefault(slot.ref.sandbox_id, set()).add(record_id(slot)[1])
        self.outputs = OutputFiles(path.parent / OUTPUT_FOLDER)
        #: the leases whose results are kept: the held ones, and those that were lost with their sandboxes
        self._leases_with_results = {lease.lease_id for lease in self._state.leases if lease.state not in STATES_WITHOUT_RESULTS}
        for lease_id in {*self._recorded_calls, *self.outputs.lease_ids()} - self._leases_with_results:
            self._delete_results(lease_id)
        self._queue_deletion()

    # Putting records and results.

    def put(self, record: Record) -> None:
        """Queue one record for writing. Never waits and never raises."""
        records = self._pending.records
        if isinstance(record, Deletion):
            self._put_deletion(record)
        elif isinstance(record, SandboxRecord) and record.state is SandboxState.GONE:
            records[record_id(record)] = None
            for key in self._slots_by_sandbox.pop(record.sandbox_id, ()):
                records["slot", key] = None
        else:
            records[record_id(record)] = self._time.to_record(record)
            if isinstance(record, SlotRecord):
                self._slots_by_sandbox.setdefault(record.ref.sandbox_id, set()).add(record_id(record)[1])
            elif isinstance(record, Lease):
                self._keep_or_delete_results(record)
        self._commit_later()

    def _keep_or_delete_results(self, lease: Lease) -> None:
        if lease.state in STATES_WITHOUT_RESULTS:
            self._leases_with_results.discard(lease.lease_id)
            self._delete_results(lease.lease_id)
        else:
            self._leases_with_results.add(lease.lease_id)

    def _put_deletion(self, deletion: Deletion) -> None:
        records = self._pending.records
        if deletion.lease_id is not None:
            records["lease", deletion.lease_id] = None
            self._leases_with_results.discard(deletion.lease_id)
            self._delete_results(deletion.lease_id)
        if deletion.key is not None:
            records[request_key_record_id(*deletion.key)] = None
        if deletion.pool is not None:
            records["pool", deletion.pool] = None
        if deletion.run_batch is not None:
            records["run_batch", deletion.run_batch] = None
        if deletion.run_batch_item is not None:
            records["run_batch_item", deletion.run_batch_item] = None

    def record_result(self, lease_id: str, call_id: str, identity: bytes, result: Result) -> None:
        """Queue the result of a call for writing, unless the call has one already or the results of its lease were deleted."""
        if lease_id not in self._leases_with_results or call_id in self._recorded_calls.get(lease_id, ()):
            return
        self._recorded_calls.setdefault(lease_id, set()).add(call_id)
        self._pending.add_result(lease_id, call_id, RecordedResult(identity=identity, result=result))
        while self._pending.output_bytes > self._options.max_unwritten_bytes and self._failure is not None:
            dropped_lease_id, dropped_call_id = self._pending.remove_oldest_result()
            self._recorded_calls[dropped_lease_id].discard(dropped_call_id)
        self._commit_later()

    def _delete_results(self, lease_id: str) -> None:
        self.outputs.delete_files(lease_id)
        if self._recorded_calls.pop(lease_id, None):
            self._pending.remove_results(lease_id)
            self._leases_to_clear.append(lease_id)
            if len(self._leases_to_clear) >= LEASES_PER_DELETION:
                self._queue_deletion()

    def _queue_deletion(self) -> None:
        """Let the writer delete the results of the ended leases, after every commit that is queued and may have some of them."""
        if self._leases_to_clear:
            self._writer.delete_results(self._leases_to_clear)
            self._leases_to_clear = []

    # Reading.

    def load(self) -> State:
        """Return every record that was in the file when it was opened. Later calls read the file again."""
        state, self._state = self._state, None
        return self._time.from_record(state if state is not None else self._reader.read_state())

    def find_lease(self, lease_id: str) -> Lease | None:
        """Return the newest record of a lease, from a batch that is not committed yet or from the file; None if there is none.

        Raises:
            StorageUnavailable: it cannot be read.
        """
        key = ("lease", lease_id)
        for batch in (self._pending, self._writing):
            if batch is not None and key in batch.records:
                record = batch.records[key]
                break
        else:
            try:
                record = self._reader.record(*key)
            except UnicodeEncodeError:
                return None  # the id contains a lone surrogate, which no lease id does
            except (sqlite3.Error, ValueError) as error:
                raise self._unavailable("read", error) from error
        return self._time.lease_from_record(record) if isinstance(record, Lease) else None

    def find_result(self, lease_id: str, call_id: str) -> RecordedResult | None:
        """Return the result of a call, from a batch that is not committed yet or from the file; None if there is none.

        Raises:
            StorageUnavailable: there is one, and it cannot be read.
        """
        if call_id not in self._recorded_calls.get(lease_id, ()):
            return None
        for batch in (self._pending, self._writing):
            recorded_result = batch.results.get(lease_id, {}).get(call_id) if batch is not None else None
            if recorded_result is not None:
                return recorded_result
        try:
            return self._with_located_output(self._reader.find_result(lease_id, call_id))
        except (sqlite3.Error, ValueError) as error:
            raise self._unavailable("read", error) from error

    def _with_located_output(self, recorded_result: RecordedResult | None) -> RecordedResult | None:
        if recorded_result is None or recorded_result.result.output_file is None:
            return recorded_result
        return replace(recorded_result, result=replace(recorded_result.result, output_file=self.outputs.locate(recorded_result.result.output_file)))

    def result_count(self, lease_id: str) -> int:
        """Return how many calls of a lease have a recorded result."""
        return len(self._recorded_calls.get(lease_id, ()))

    # Committing.

    async def flush(self) -> None:
        """Wait until everything that was put so far is in the file.

        Raises:
            StorageUnavailable: it is not. It is kept, and writing it is tried again.
        """
        loop = asyncio.get_running_loop()
        if self._pending:
            if self._failure is not None and loop.time() - self._failed_at < FAILURE_VALID_S:
                raise self._failure
            if self._writing is None and not self._is_commit_scheduled and self._commit_here(self._pending):
                self._pending = WriteBatch()
                self._cancel_commit_timer()
                self._clear_failure()
                return
            committed: asyncio.Future[None] = loop.create_future()
            self._waiting_for_pending.append(committed)
            self._commit_soon()
        elif self._writing is not None:
            committed = loop.create_future()
            self._waiting_for_writing.append(committed)
        else:
            return
        await committed

    def _commit_later(self) -> None:
        """Commit after a short delay, during which a `flush` may come. Where no event loop runs yet, the next commit includes the change."""
        if self._commit_timer is None and not self._is_commit_scheduled and self._writing is None:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                return
            self._commit_timer = loop.call_later(COMMIT_DELAY_S if self._failure is None else self._options.retry_after_s, self._start_commit)

    def _commit_soon(self) -> None:
        """Commit at the end of this iteration of the event loop, so that the commit includes what else is put in it."""
        if not self._is_commit_scheduled and self._writing is None:
            self._is_commit_scheduled = True
            asyncio.get_running_loop().call_soon(self._start_commit)

    def _cancel_commit_timer(self) -> None:
        if self._commit_timer is not None:
            self._commit_timer.cancel()
            self._commit_timer = None

    def _start_commit(self) -> None:
        self._cancel_commit_timer()
        self._is_commit_scheduled = False
        if self._writing is not None or not self._pending:
            return
        self._writing, self._pending = self._pending, WriteBatch()
        self._waiting_for_writing, self._waiting_for_pending = self._waiting_for_pending, []
        if self._commit_here(self._writing):
            self._finish_commit(None)
            return
        loop = asyncio.get_running_loop()
        self._writer.commit(self._writing, lambda error: loop.call_soon_threadsafe(self._finish_commit, error))

    def _commit_here(self, batch: WriteBatch) -> bool:
        """Commit a small batch in this thread. Returns False if the writer thread must do it."""
        began = time.monotonic()
        if began < self._rests_until or batch.output_bytes > SMALL_BATCH_BYTES or len(batch) > SMALL_BATCH_ITEMS:
            return False
        is_committed = self._writer.try_commit(batch)
        ended = time.monotonic()
        self._rests_until = ended + REST_FACTOR * (ended - began)
        return is_committed

    def _finish_commit(self, error: Exception | None) -> None:
        batch, self._writing = self._writing, None
        assert batch is not None, "a commit was under way"
        self._reopen_reader_if_rewritten()
        waiting, self._waiting_for_writing = self._waiting_for_writing, []
        if error is None:
            self._clear_failure()
        else:
            self._keep_unwritten(batch, error)
            waiting += self._waiting_for_pending
            self._waiting_for_pending = []
        for committed in waiting:
            if committed.done():
                continue
            if self._failure is None:
                committed.set_result(None)
            else:
                committed.set_exception(self._failure)
        if self._waiting_for_pending:
            self._commit_soon()
        elif self._pending:
            self._commit_later()

    def _keep_unwritten(self, batch: WriteBatch, error: Exception) -> None:
        self._note_failure(error)
        for lease_id in [lease_id for lease_id in batch.results if lease_id not in self._recorded_calls]:
            batch.remove_results(lease_id)
        self._pending = self._pending.merged_onto(batch)

    def _note_failure(self, error: Exception) -> None:
        failure = self._unavailable("written", error)
        if self._failure is None or self._failure.detail != failure.detail:
            log.error(failure.detail)
        self._failure = failure
        self._failed_at = asyncio.get_running_loop().time()

    def _clear_failure(self) -> None:
        if self._failure is not None:
            log.info("the state file can be written again")
        self._failure = None

    # Checking the file.

    @property
    def problem(self) -> str | None:
        """One sentence that says why the service must not accept new work, and what to do about it; None if all is well."""
        if self._failure is not None:
            return self._failure.detail
        if not self._file.has_reserve:
            return f"the disk of the state file {self._path} is full: the room that is left is kept for releases; make room, and new leases are granted again"
        return None

    async def check_storage(self) -> None:
        """Check that the state file is at its path and that room on the disk is reserved. To be called every second."""
        self._queue_deletion()
        loop = asyncio.get_running_loop()
        checked: asyncio.Future[Exception | None] = loop.create_future()

        def finish(error: Exception | None) -> None:
            if not checked.done():  # the caller may have been cancelled
                checked.set_result(error)

        self._writer.check(lambda error: loop.call_soon_threadsafe(finish, error))
        error = await checked
        self._reopen_reader_if_rewritten()
        if error is not None:
            self._note_failure(error)
        elif not self._pending and self._writing is None:
            self._clear_failure()

    def _reopen_reader_if_rewritten(self) -> None:
        generation = self._file.generation
        if generation == self._reader_generation:
            return
        try:
            reader = StateFileReader(self._path)
        except sqlite3.Error as error:
            # The old reader still reads what was written before. The next commit or check tries again.
            log.warning("the new state file cannot be read: %s", error)
            return
        old_reader, self._reader, self._reader_generation = self._reader, reader, generation
        old_reader.close()

    def _unavailable(self, done: str, error: Exception) -> StorageUnavailable:
        detail = str(error) if isinstance(error, StateFileReplaced) else f"the state file {self._path} cannot be {done}: {error}"
        return StorageUnavailable(detail, retry_after_s=2)

    async def close(self) -> None:
        """Write what is queued, and end the threads. What cannot be written is lost, which is logged."""
        try:
            while self._pending or self._writing is not None:
                await self.flush()
        except StorageUnavailable as error:
            log.error("the last changes could not be written to the state file: %s", error.detail)
        self._cancel_commit_timer()
        self._queue_deletion()
        self._reader.close()
        await asyncio.to_thread(self._writer.end)
        await asyncio.to_thread(self.outputs.close)
