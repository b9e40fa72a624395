"""The store that outlives the service: one SQLite file, written by one thread, many changes in one commit.

`put` only remembers what is to be written, the newest record of each thing. A `flush` has it written at the end of this turn of the loop; whoever
comes while that is under way is part of the next commit. What could not be written is kept and tried again, until the disk takes it.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue

from sandbox_server.core.clock import Clock, SystemClock
from sandbox_server.core.errors import StorageUnavailable
from sandbox_server.core.execution import Result
from sandbox_server.core.types import Lease, SandboxState
from sandbox_server.store.base import OVER, Deletion, Record, RecordedResult, SandboxRecord, SlotRecord, State
from sandbox_server.store.codec import name_of, name_of_key
from sandbox_server.store.output_files import OutputFiles
from sandbox_server.store.record_time import RecordTime, boot_id
from sandbox_server.store.sqlite.errors import StoreUnusable, damaged
from sandbox_server.store.sqlite.file_identity import StateFileReplaced
from sandbox_server.store.sqlite.state_file import Batch, SqliteFile, SqliteReader

log = logging.getLogger(__name__)

#: What nobody waits for is written after so long, in seconds.
UNHURRIED_S = 0.02
#: After a failure, who comes this soon is told the same at once, in seconds.
FAILED_FOR_S = 0.1
#: How long after a failure it is tried again although nobody asks, in seconds.
AGAIN_AFTER_S = 1.0
#: Outputs of verdicts that cannot be written, held in memory; beyond it the oldest go. Their agents' journals still have them.
MAX_UNWRITTEN_BYTES = 64 << 20
#: Where the large outputs are, beside the file.
OUTPUT_FOLDER = "outputs"
#: After so many commits the file is looked after.
TIDY_EVERY = 64

__all__ = ["SqliteStore", "StoreUnusable"]


class SqliteStore:
    """Keeps the promises of `Store` over the end of the process.

    Args:
        path: the state file; made if it is not there. Its folder must be there.
        clock: what the times of records are told by.
        boot: what this start of the machine is called.

    Raises:
        StoreUnusable: it is damaged, locked, of a newer version, or no state file at all.
    """

    durable = True

    def __init__(self, path: Path, clock: Clock | None = None, boot: str | None = None) -> None:
        self._path = path
        self._pending = Batch()
        self._writing: Batch | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._waiting_for_written: list[asyncio.Future[None]] = []
        self._failure: StorageUnavailable | None = None
        self._failed_at = float("-inf")
        self._timer: asyncio.TimerHandle | None = None
        self._soon = False
        self._generation = 0
        self._calls: dict[str, set[str]] = {}
        self._slots_of: dict[str, set[str]] = {}
        file = self._file = SqliteFile(path)
        try:
            self._reader = SqliteReader(path)
            self._state: State | None = self._read()
            self._time = RecordTime(clock or SystemClock(), boot_id() if boot is None else boot, self._state.clock)
            for lease_id, call_id in self._reader.calls():
                self._calls.setdefault(lease_id, set()).add(call_id)
        except (sqlite3.Error, ValueError) as error:
            file.close()
            raise StoreUnusable(damaged(path, str(error))) from error
        self._writer = Writer(file)
        if self._time.record != self._state.clock:
            self.put(self._time.record)
        for slot in self._state.slots:
            self._slots_of.setdefault(slot.ref.sandbox_id, set()).add(name_of(slot)[1])
        self.outputs = OutputFiles(path.parent / OUTPUT_FOLDER)
        #: leases whose calls' ends are told: those that hold, and those that were lost with their sandboxes
        self._judged = {lease.lease_id for lease in self._state.leases if lease.state not in OVER}
        for lease_id in {*self._calls, *self.outputs.leases()} - self._judged:
            self._forget_verdicts(lease_id)

    # Remembering.

    def put(self, record: Record) -> None:
        """Queue one record. Never waits, never fails."""
        records = self._pending.records
        if isinstance(record, Deletion):
            self._forget(record)
        elif isinstance(record, SandboxRecord) and record.state is SandboxState.GONE:
            records[name_of(record)] = None
            for key in self._slots_of.pop(record.sandbox_id, ()):
                records["slot", key] = None
        else:
            records[name_of(record)] = self._time.to_record(record)
            if isinstance(record, SlotRecord):
                self._slots_of.setdefault(record.ref.sandbox_id, set()).add(name_of(record)[1])
            elif isinstance(record, Lease):
                self._put_lease(record)
        self._write_later()

    def _put_lease(self, lease: Lease) -> None:
        if lease.state in OVER:
            self._judged.discard(lease.lease_id)
            self._forget_verdicts(lease.lease_id)
        else:
            self._judged.add(lease.lease_id)

    def _forget(self, record: Deletion) -> None:
        records = self._pending.records
        if record.lease_id is not None:
            records["lease", record.lease_id] = None
            self._judged.discard(record.lease_id)
            self._forget_verdicts(record.lease_id)
        if record.key is not None:
            records[name_of_key(*record.key)] = None
        if record.pool is not None:
            records["pool", record.pool] = None

    def record_result(self, lease_id: str, call_id: str, identity: bytes, result: Result) -> None:
        """Queue the end of a call; the first verdict stays, and one of a lease that is over is nobody's."""
        if lease_id not in self._judged or call_id in self._calls.get(lease_id, ()):
            return
        self._calls.setdefault(lease_id, set()).add(call_id)
        self._pending.judge(lease_id, call_id, RecordedResult(identity=identity, result=result))
        while self._pending.output_bytes > MAX_UNWRITTEN_BYTES and self._failure is not None:
            lost_lease, lost_call = self._pending.forget_oldest()
            self._calls[lost_lease].discard(lost_call)
        self._write_later()

    def _forget_verdicts(self, lease_id: str) -> None:
        self.outputs.forget(lease_id)
        if self._calls.pop(lease_id, None):
            self._pending.forget_results(lease_id)
            self._writer.sweep(lease_id)

    # Looking.

    def load(self) -> State:
        """What was remembered when the store was opened. Once: it is not kept."""
        state, self._state = self._state, None
        return self._time.from_record(state if state is not None else self._read())

    def _read(self) -> State:
        read = self._reader.records
        return State(
            sandboxes=tuple(read("sandbox")),
            slots=tuple(read("slot")),
            leases=tuple(read("lease")),
            keys=tuple(read("key")),
            pools=tuple(read("pool")),
            clock=next(read("clock"), None),
        )

    def lease(self, lease_id: str) -> Lease | None:
        """The newest record of a lease; from the file, unless it is on its way there.

        Raises:
            StorageUnavailable: it cannot be read.
        """
        name = ("lease", lease_id)
        for batch in (self._pending, self._writing):
            if batch is not None and name in batch.records:
                record = batch.records[name]
                break
        else:
            try:
                record = self._reader.record(*name)
            except UnicodeEncodeError:
                return None  # half of a surrogate pair: no lease has such an id
            except (sqlite3.Error, ValueError) as error:
                raise self._unavailable("read", error) from error
        return self._time.lease_from_record(record) if isinstance(record, Lease) else None

    def find_result(self, lease_id: str, call_id: str) -> RecordedResult | None:
        """What was recorded for this call; from the file, unless it is on its way there.

        Raises:
            StorageUnavailable: it is there and cannot be read.
        """
        if call_id not in self._calls.get(lease_id, ()):
            return None
        for batch in (self._pending, self._writing):
            recorded_result = batch.result_store.get(lease_id, {}).get(call_id) if batch is not None else None
            if recorded_result is not None:
                return recorded_result
        try:
            return self._with_output(self._reader.find_result(lease_id, call_id))
        except (sqlite3.Error, ValueError) as error:
            raise self._unavailable("read", error) from error

    def _with_output(self, recorded_result: RecordedResult | None) -> RecordedResult | None:
        if recorded_result is None or recorded_result.result.output_file is None:
            return recorded_result
        return replace(recorded_result, result=replace(recorded_result.result, output_file=self.outputs.known(recorded_result.result.output_file)))

    def result_count(self, lease_id: str) -> int:
        """How many calls of this lease have a verdict."""
        return len(self._calls.get(lease_id, ()))

    # Writing.

    async def flush(self) -> None:
        """Return once everything put so far is in the file.

        Raises:
            StorageUnavailable: it is not; it is kept, and tried again.
        """
        loop = asyncio.get_running_loop()
        if self._pending:
            if self._failure is not None and loop.time() - self._failed_at < FAILED_FOR_S:
                raise self._failure
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiting.append(waiter)
            self._write_soon()
        elif self._writing is not None:
            waiter = loop.create_future()
            self._waiting_for_written.append(waiter)
        else:
            return
        await waiter

    def _write_later(self) -> None:
        """In a moment; where no loop runs yet, with whatever comes next."""
        if self._timer is None and not self._soon and self._writing is None:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                return
            self._timer = loop.call_later(UNHURRIED_S if self._failure is None else AGAIN_AFTER_S, self._write)

    def _write_soon(self) -> None:
        """At the end of this turn, so that what else is decided in it is part of the commit."""
        if not self._soon and self._writing is None:
            self._soon = True
            asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._soon = False
        if self._writing is not None or not self._pending:
            return
        self._writing, self._pending = self._pending, Batch()
        self._waiting_for_written, self._waiting = self._waiting, []
        loop = asyncio.get_running_loop()
        self._writer.write(self._writing, lambda error: loop.call_soon_threadsafe(self._written, error))

    def _written(self, error: Exception | None) -> None:
        batch, self._writing = self._writing, None
        assert batch is not None, "something was being written"
        self._read_what_was_written_anew()
        waiting, self._waiting_for_written = self._waiting_for_written, []
        if error is None:
            if self._failure is not None:
                log.info("the state file can be written again")
            self._failure = None
        else:
            self._failed(batch, error)
            waiting += self._waiting
            self._waiting = []
        for waiter in waiting:
            if waiter.done():
                continue
            if self._failure is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(self._failure)
        if self._waiting:
            self._write_soon()
        elif self._pending:
            self._write_later()

    def _failed(self, batch: Batch, error: Exception) -> None:
        self._note_failure(error)
        for lease_id in [lease_id for lease_id in batch.result_store if lease_id not in self._calls]:
            batch.forget_results(lease_id)
        self._pending = self._pending.on_top_of(batch)

    def _note_failure(self, error: Exception) -> None:
        failure = self._unavailable("written", error)
        if self._failure is None or self._failure.detail != failure.detail:
            log.error(failure.detail)
        self._failure = failure
        self._failed_at = asyncio.get_running_loop().time()

    # Looking after the file.

    @property
    def problem(self) -> str | None:
        """Why nothing new should be begun, and what to do; None: it can."""
        if self._failure is not None:
            return self._failure.detail
        if not self._file.has_reserve:
            return f"the disk of the state file {self._path} is full: what is left is kept for releases; make room, and new leases are given again"
        return None

    async def check_storage(self) -> None:
        """See that the state file is still the one at its path, and that there is room in reserve. To be called every second."""
        loop = asyncio.get_running_loop()
        checked: asyncio.Future[Exception | None] = loop.create_future()

        def finish(error: Exception | None) -> None:
            if not checked.done():  # who waited may have been cancelled
                checked.set_result(error)

        self._writer.check(lambda error: loop.call_soon_threadsafe(finish, error))
        error = await checked
        self._read_what_was_written_anew()
        if error is not None:
            self._note_failure(error)
        elif self._failure is not None and not self._pending and self._writing is None:
            log.info("the state file can be written again")
            self._failure = None

    def _read_what_was_written_anew(self) -> None:
        generation = self._file.generation
        if generation == self._generation:
            return
        try:
            reader = SqliteReader(self._path)
        except sqlite3.Error as error:
            # The old one still reads what was written before; it is tried again with the next commit or check.
            log.warning("the state file that was written anew cannot be read: %s", error)
            return
        before, self._reader, self._generation = self._reader, reader, generation
        before.close()

    def _unavailable(self, done: str, error: Exception) -> StorageUnavailable:
        detail = str(error) if isinstance(error, StateFileReplaced) else f"the state file {self._path} cannot be {done}: {error}"
        return StorageUnavailable(detail, retry_after_s=2)

    async def close(self) -> None:
        """Write what is queued and let go."""
        try:
            while self._pending or self._writing is not None:
                await self.flush()
        except StorageUnavailable as error:
            log.error("what was decided last is not on record: %s", error.detail)
        if self._timer is not None:
            self._timer.cancel()
        self._reader.close()
        await asyncio.to_thread(self._writer.end)
        await asyncio.to_thread(self.outputs.close)


Done = Callable[[Exception | None], object]


class Writer:
    """The thread that writes.

    Args:
        file: what it writes to.
    """

    def __init__(self, file: SqliteFile) -> None:
        self._file = file
        self._work: SimpleQueue[tuple[Batch | None, Done] | str | None] = SimpleQueue()
        self._over: list[str] = []
        self._tidying = False
        self._commits = 0
        self._thread = threading.Thread(target=self._run, name="state-file", daemon=True)
        self._thread.start()

    def write(self, batch: Batch, done: Done) -> None:
        """Commit a batch; `done`, in this thread, is told of the error, if there was one."""
        self._work.put((batch, done))

    def check(self, done: Done) -> None:
        """See that the file is where it was; `done`, in this thread, is told of the error, if there was one."""
        self._work.put((None, done))

    def sweep(self, lease_id: str) -> None:
        """Delete the verdicts of a lease, when there is time."""
        self._work.put(lease_id)

    def end(self) -> None:
        """Write what is queued, and let go. Blocks."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while self._do_next():
            pass  # a step of its own, so that nothing holds what was written while the thread waits
        self._file.close()

    def _do_next(self) -> bool:
        """Wait for work and do it. Returns whether there is to be more."""
        try:
            work = self._work.get(block=not self._tidying)
        except Empty:
            self._tidying = self._tidy()
            return True
        if isinstance(work, str):
            self._over.append(work)
            self._tidying = True
        elif work is not None:
            self._commit(*work)
        return work is not None

    def _commit(self, batch: Batch | None, done: Done) -> None:
        error: Exception | None = None
        try:
            if batch is None:
                self._file.check()
            else:
                self._file.commit(batch)
        except Exception as caught:  # the edge of this thread: whatever it was, those who wait are told
            error = caught
        # A loop that is closed has nobody who waits.
        with suppress(RuntimeError):
            done(error)
        self._commits += batch is not None
        if batch is not None and self._commits % TIDY_EVERY == 0:
            self._tidying = True

    def _tidy(self) -> bool:
        try:
            return self._file.tidy(self._over)
        except (sqlite3.Error, StateFileReplaced) as error:
            log.warning("the state file could not be tidied: %s", error)
            return False
