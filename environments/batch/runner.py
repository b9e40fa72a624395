"""The run itself: workers that take one prompt after another, and the files that they write."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Protocol

from environments.batch.attempts import PromptFailed, PromptRunner
from environments.batch.failures import BatchFailure, RunStopped, WriteFailed
from environments.batch.files.prompt_file import DatasetScan, Prompt, read_entries
from environments.batch.files.row_log import RowLog
from environments.batch.files.run_folder import EarlierRows, RunFolder
from environments.batch.model_client import ModelClient
from environments.batch.rows.statistics import RunStatistics
from environments.batch.rows.trajectory_row import Rollout, make_trajectory_row
from environments.batch.settings import BatchSettings, Duplicates
from environments.batch.slots import RunSlots, describe_pool_error
from environments.rollouts.service import PoolUnavailable

#: How long a row may be written and not flushed to the disk, in seconds.
FLUSH_INTERVAL_S = 1.0
#: How often the progress is shown while no prompt ends, in seconds.
REPORT_INTERVAL_S = 0.5
#: The longest text of an error that is kept in `errors.jsonl`, in characters.
MAX_ERROR_LENGTH = 2000


class Observer(Protocol):
    """Shows the progress of a run."""

    def update(self, statistics: RunStatistics, held_count: int) -> None:
        """Show the present state. Called after each change, so it must return quickly.

        Args:
            statistics: what the run has come to so far.
            held_count: how many slots are held.
        """

    def report_failure(self, prompt: Prompt, sentence: str) -> None:
        """Show that a prompt has no trajectory."""


class BatchRunner:
    """Runs the prompts of a dataset that have no trajectory yet.

    Args:
        settings: the settings of the run.
        folder: the folder of the run, locked by this process.
        scan: what the dataset holds.
        earlier: the trajectories that exist already.
        statistics: the statistics of these; the run adds its own.
        observer: shows the progress.
    """

    def __init__(
        self, settings: BatchSettings, folder: RunFolder, scan: DatasetScan, earlier: EarlierRows, statistics: RunStatistics, observer: Observer
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._scan = scan
        self._earlier = earlier
        self._statistics = statistics
        self._observer = observer
        self._unflushed_count = 0
        self._flush_wanted = asyncio.Event()
        self._flush_lock = threading.Lock()  # a flush goes on in its thread when its task is cancelled
        self._closed = False
        self._failures_in_a_row = 0
        self._held_s = 0.0
        self._began_s = time.monotonic()
        self._first_count = statistics.completed_count

    async def run(self, slots: RunSlots, model: ModelClient) -> None:
        """Run the prompts, and leave the files complete, however the run ends.

        Args:
            slots: the slots of the run.
            model: the model server.

        Raises:
            RunStopped: the run cannot go on; the error says what to do.
        """
        state, self._began_s = "stopped", time.monotonic()  # the start of the service is no part of the session's rate
        with RowLog(self._folder.trajectories_path) as rows, RowLog(self._folder.errors_path) as errors:
            try:
                await self._run_workers(slots, model, rows, errors)
                state = "finished"
            except BaseExceptionGroup as group:
                raise _first_failure(group) from None
            finally:
                self._close_files(state, rows, errors)

    def _close_files(self, state: str, rows: RowLog, errors: RowLog) -> None:
        """Flush what was written, and write the last checkpoint and the statistics."""
        with self._flush_lock:
            self._closed = True
            rows.sync()
            errors.sync()
            self._write_checkpoint(state)
            self._folder.write_statistics(
                {"run_name": self._settings.run_name, "state": state, **self._counts(), **self._statistics.document(), **self._session()}
            )

    async def _run_workers(self, slots: RunSlots, model: ModelClient, rows: RowLog, errors: RowLog) -> None:
        prompts = self._remaining_prompts()
        runner = PromptRunner(self._settings, slots, model, self._statistics.add_fault, self._folder.recordings_path)
        async with asyncio.TaskGroup() as tasks:
            flusher = tasks.create_task(self._flush_regularly(rows, errors))
            reporter = tasks.create_task(self._report_regularly(slots))
            async with asyncio.TaskGroup() as workers:
                for _ in range(self._settings.num_workers):
                    workers.create_task(self._work(prompts, runner, slots, rows, errors))
            flusher.cancel()
            reporter.cancel()

    async def _report_regularly(self, slots: RunSlots) -> None:
        """Show the present state also while no prompt ends, above all the slots that are held."""
        while True:
            self._observer.update(self._statistics, slots.held_count)
            await asyncio.sleep(REPORT_INTERVAL_S)

    def _remaining_prompts(self) -> Iterator[Prompt]:
        """Yield the prompts that have no trajectory yet. Broken lines were reported before."""
        settings = self._settings
        merges = settings.duplicates is Duplicates.MERGE
        for entry in read_entries(settings.dataset_file, merge_duplicates=merges, max_samples=settings.max_samples):
            if isinstance(entry, Prompt) and not self._earlier.has(entry.key):
                yield entry

    async def _work(self, prompts: Iterator[Prompt], runner: PromptRunner, slots: RunSlots, rows: RowLog, errors: RowLog) -> None:
        for prompt in prompts:  # shared by all workers
            try:
                await runner.run(prompt, partial(self._write_row, prompt, rows=rows))
                self._failures_in_a_row = 0
            except PromptFailed as failure:
                self._write_failure(prompt, failure, errors)
            except PoolUnavailable as error:
                raise RunStopped(describe_pool_error(error), "correct the cause") from error
            self._observer.update(self._statistics, slots.held_count)

    def _write_row(self, prompt: Prompt, rollout: Rollout, rows: RowLog) -> None:
        row = make_trajectory_row(prompt, rollout, run_name=self._settings.run_name, model=self._settings.model)
        rows.append(row)
        self._statistics.add_row(row)
        self._held_s += rollout.duration_s
        self._count_unflushed()

    def _write_failure(self, prompt: Prompt, failure: PromptFailed, errors: RowLog) -> None:
        sentence = failure.sentence[:MAX_ERROR_LENGTH]
        errors.append(
            {
                "prompt_id": prompt.prompt_id,
                "occurrence": prompt.occurrence,
                "line": prompt.line,
                "reason": failure.reason,
                "infra": failure.is_ours,
                "error": sentence,
                "at": time.time(),
            }
        )
        self._statistics.add_failure(failure.reason)
        self._count_unflushed()
        self._observer.report_failure(prompt, sentence)
        if not failure.is_ours:
            return
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self._settings.max_failures:
            raise RunStopped(f"{self._failures_in_a_row} prompts in a row failed because of the infrastructure; the last one: {sentence}", "correct the cause")

    def _count_unflushed(self) -> None:
        self._unflushed_count += 1
        if self._unflushed_count >= self._settings.batch_size:
            self._flush_wanted.set()

    async def _flush_regularly(self, rows: RowLog, errors: RowLog) -> None:
        """Flush the rows to the disk and replace the checkpoint after every `batch_size` rows, and at least once in `FLUSH_INTERVAL_S`."""
        while True:
            try:
                async with asyncio.timeout(FLUSH_INTERVAL_S):
                    await self._flush_wanted.wait()
            except TimeoutError:
                if not self._unflushed_count:
                    continue
            self._flush_wanted.clear()
            self._unflushed_count = 0
            await asyncio.to_thread(self._flush, rows, errors)

    def _flush(self, rows: RowLog, errors: RowLog) -> None:
        with self._flush_lock:
            if not self._closed:
                rows.sync()
                errors.sync()
                self._write_checkpoint("running")

    def _write_checkpoint(self, state: str) -> None:
        self._folder.write_checkpoint(self._settings, state, self._counts())

    def _counts(self) -> dict[str, int]:
        return {
            "prompts": self._scan.prompt_count,
            "completed": self._statistics.completed_count,
            "failed": self._statistics.failed_count,
            "broken_lines": self._scan.broken_count,
            "merged_lines": self._scan.merged_count,
        }

    def _session(self) -> dict[str, object]:
        """Return what is known of this session of the run alone."""
        took_s = max(time.monotonic() - self._began_s, 1e-9)
        completed = self._statistics.completed_count - self._first_count
        return {
            "session": {
                "took_s": round(took_s, 3),
                "completed": completed,
                "prompts_per_s": round(completed / took_s, 3),
                "slot_use": round(self._held_s / (took_s * self._settings.num_workers), 4),
            }
        }


def _first_failure(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that explains the end of the run: that of a file before others, and any failure of a run before other exceptions."""
    leaves = list(_leaves(group))
    for kind in (WriteFailed, BatchFailure):
        for error in leaves:
            if isinstance(error, kind):
                return error
    return leaves[0]


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
