"""The thread that writes to the state file."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from sandbox_server.store.sqlite.batch import WriteBatch
from sandbox_server.store.sqlite.state_file import StateFile

log = logging.getLogger(__name__)

#: After this many commits, the work that can wait is done.
COMMITS_PER_CLEAN_UP = 64

Done = Callable[[Exception | None], object]
"""Called in the writer thread when a job is done, with the error if it failed."""


@dataclass(frozen=True, slots=True)
class _Commit:
    batch: WriteBatch
    done: Done


@dataclass(frozen=True, slots=True)
class _Check:
    done: Done


@dataclass(frozen=True, slots=True)
class _DeleteResults:
    lease_ids: list[str]


@dataclass(frozen=True, slots=True)
class _CleanUp:
    """Work that can wait is due, because of what another thread has committed."""


class WriterThread:
    """Carries out jobs on the state file in a thread of its own, in the order in which they were queued. The thread starts at once.

    A small commit may be done in the thread of the caller instead, with `try_commit`.

    Args:
        file: the state file. The thread closes it when it ends.
    """

    def __init__(self, file: StateFile) -> None:
        self._file = file
        self._jobs: SimpleQueue[_Commit | _Check | _DeleteResults | _CleanUp | None] = SimpleQueue()
        self._file_lock = threading.Lock()
        self._leases_to_clean_up: list[str] = []
        self._has_clean_up = False
        self._commit_count = 0
        self._commits_elsewhere = 0  # by `try_commit`, since the last `_CleanUp`
        self._thread = threading.Thread(target=self._run, name="state-file", daemon=True)
        self._thread.start()

    def commit(self, batch: WriteBatch, done: Done) -> None:
        """Queue a batch for one commit, and call `done` after it."""
        self._jobs.put(_Commit(batch, done))

    def try_commit(self, batch: WriteBatch) -> bool:
        """Commit a batch in the calling thread, if the file is free and the commit needs to wait for nothing. Only while no commit is queued.

        Returns:
            Whether it is committed. If not, `commit` is to be called.
        """
        if not self._file_lock.acquire(blocking=False):
            return False
        try:
            is_committed = self._file.try_commit(batch)
        finally:
            self._file_lock.release()
        self._commits_elsewhere += is_committed
        if self._commits_elsewhere >= COMMITS_PER_CLEAN_UP:
            self._commits_elsewhere = 0
            self._jobs.put(_CleanUp())
        return is_committed

    def check(self, done: Done) -> None:
        """Queue a check that the file is at its path, and call `done` after it."""
        self._jobs.put(_Check(done))

    def delete_results(self, lease_ids: list[str]) -> None:
        """Queue the deletion of the results of some leases. They are deleted when no other job waits."""
        self._jobs.put(_DeleteResults(lease_ids))

    def end(self) -> None:
        """Wait until every queued job is done and the file is closed. Blocks."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        # Each job is done in a call of its own, so that no local variable keeps a batch in memory while the thread waits for the next job.
        while self._do_next_job():
            pass
        self._file.close()

    def _do_next_job(self) -> bool:
        """Wait for a job and do it; where none waits, do one step of the work that can wait. Returns False for the end of the thread."""
        try:
            job = self._jobs.get(block=not self._has_clean_up)
        except Empty:
            with self._file_lock:
                self._has_clean_up = self._clean_up_step()
            return True
        if job is None:
            return False
        if isinstance(job, _DeleteResults):
            self._leases_to_clean_up += job.lease_ids
            self._has_clean_up = True
        elif isinstance(job, _CleanUp):
            self._has_clean_up = True
        else:
            self._commit_or_check(job)
        return True

    def _commit_or_check(self, job: _Commit | _Check) -> None:
        error: Exception | None = None
        try:
            with self._file_lock:
                if isinstance(job, _Commit):
                    self._file.commit(job.batch)
                else:
                    self._file.check()
        except Exception as caught:  # the edge of this thread: what waits for the job gets every error, and the thread continues
            error = caught
        with suppress(RuntimeError):  # the event loop is closed, and nobody waits for the job
            job.done(error)
        if isinstance(job, _Commit):
            self._commit_count += 1
            self._has_clean_up = self._has_clean_up or self._commit_count % COMMITS_PER_CLEAN_UP == 0

    def _clean_up_step(self) -> bool:
        try:
            return self._file.clean_up_step(self._leases_to_clean_up)
        except Exception as error:  # the edge of this thread: the jobs that come must be done, and the next commit reports what is wrong
            log.warning("the state file could not be cleaned up: %s", error)
            return False
