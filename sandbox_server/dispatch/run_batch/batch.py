"""One run-batch: begins its items in order, at most so many at once, and appends their results to its log."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from sandbox_server.core.cleanup import cleanup_on_failure
from sandbox_server.core.clock import Clock
from sandbox_server.core.errors import PoolServiceError, StorageUnavailable
from sandbox_server.core.execution import Reason, ToolCall
from sandbox_server.core.types import AcquireRequest
from sandbox_server.dispatch.run_batch.artifact_reader import ArtifactBudget
from sandbox_server.dispatch.run_batch.item_runner import ItemRunner
from sandbox_server.dispatch.run_batch.item_slots import LeasePools, acquire_slot
from sandbox_server.dispatch.run_batch.program_spool import ProgramSpool
from sandbox_server.dispatch.run_batch.result_log import Follower, ResultLog
from sandbox_server.dispatch.run_batch.values import ItemResult, Program, RenderItem, RunBatchRequest, result_without_call
from sandbox_server.store.base import Deletion, RunBatchItemRecord, RunBatchRecord, Store

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""How often an item is started at most. It is started again only if its program has not begun."""
MAX_UNREAD_BYTES = 16 << 20
"""No item begins while the client has so many bytes of results to read."""
LABEL_OF_BATCH = "run_batch"
LABEL_OF_ITEM = "item"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchContext:
    """What every run-batch works with.

    Args:
        pools: leases slots.
        runner: runs the items.
        store: keeps the records of the items that have a slot.
        clock: gives the time.
        render: makes the line of a result.
        report_growth: called after a kept line was appended.
        report_unwritten: called when the result of a program that may have run could not be written, so that a repeated request must be refused.
        report_idle: called when nobody follows a run-batch and none of its items runs.
    """

    pools: LeasePools
    runner: ItemRunner
    store: Store
    clock: Clock
    render: RenderItem
    report_growth: Callable[[RunBatch], None]
    report_unwritten: Callable[[RunBatch], None]
    report_idle: Callable[[RunBatch], None]


class RunBatch:
    """The items of one run-batch.

    Items begin only while somebody follows the run-batch. When the last follower leaves, running items go on if the request can be repeated;
    otherwise they end.

    Args:
        context: what to work with.
        batch_id: the id of the run-batch.
        tenant: the tenant that sent the request.
        run_id: the run that owns the leases of its items.
        record: its record, if the request can be repeated; else None.
        results: its lines, opened.
        budget: how large its artifacts may be.
    """

    def __init__(
        self, context: BatchContext, batch_id: str, tenant: str, run_id: str | None, record: RunBatchRecord | None, results: ResultLog, budget: ArtifactBudget
    ) -> None:
        self.batch_id = batch_id
        self.tenant = tenant
        self.run_id = run_id
        self.record = record
        self.results = results
        self.error: PoolServiceError | None = None
        self.item_count = 0
        self._context = context
        self._budget = budget
        self._request: RunBatchRequest | None = None
        self._spool: ProgramSpool | None = None
        self._max_parallel = 1
        self._finished = {line.index for line in results.lines}
        self._appending: set[int] = set()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._to_retry: set[int] = set()
        self._retries: deque[int] = deque()
        self._attempts: Counter[int] = Counter()
        self._next_index = 0
        self._beginning: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._has_begun = False
        self._is_cancelled = record is not None and record.is_cancelled
        self._is_stopping = False

    @property
    def has_begun(self) -> bool:
        """Whether an item has begun or has its line, or the response has. From then on, errors are results of items."""
        return bool(self._has_begun or self._finished or self.results.lines)

    def begin_response(self) -> None:
        """Take note that a client has the head of its response, so that the request cannot fail as a whole any more."""
        self._has_begun = True

    @property
    def is_complete(self) -> bool:
        """Whether every item has its line."""
        return len(self.results.lines) >= self.item_count

    @property
    def is_idle(self) -> bool:
        """Whether nobody follows and no item runs."""
        return not self.results.is_followed and not self._running

    def has_result(self, index: int) -> bool:
        """Whether an item has its line."""
        return index in self._finished

    def stop_keeping(self) -> None:
        """Keep the results for a repeated request no more. From now on the run-batch is like one without a `request_key`."""
        self.record = None
        self.results.stop_keeping()

    # Followers.

    def attach(self, request: RunBatchRequest, spool: ProgramSpool, max_parallel: int, *, reads_at_end: bool) -> Follower:
        """Follow the run-batch, and let the items begin that have not.

        Args:
            request: the request.
            spool: its programs, which belong to the run-batch from now on.
            max_parallel: how many items may have a slot at once.
            reads_at_end: whether the results are read when all are there, so that items do not wait until some have been read.
        """
        if self.results.is_followed:
            spool.close()
            return self.results.follow(reads_at_end=reads_at_end)
        self.results.remove_unkept()
        self._finished = self._appending | {line.index for line in self.results.lines}
        self._request, self._spool, self._max_parallel, self.item_count = request, spool, max_parallel, len(spool)
        self._has_begun = bool(self._running)
        self._next_index = 0
        self._retries.clear()
        self._attempts.clear()
        follower = self.results.follow(reads_at_end=reads_at_end)
        if self._is_cancelled:
            self._end_unbegun(Reason.CANCELLED, "the run of the run-batch was released", may_have_run=None)
        elif not self.is_complete:
            self._beginning = asyncio.create_task(self._begin_items())
        return follower

    def detach(self, follower: Follower) -> None:
        """Take note that a follower has gone. A second call does nothing."""
        self.results.unfollow(follower)
        if self.results.is_followed:
            return
        self._stop_beginning()
        if self._ending is not None:
            self._ending.cancel()
        if self.record is None:
            for task in self._running.values():
                task.cancel()
        if self._spool is not None:
            self._spool.close()
        self._report_if_idle()

    def _stop_beginning(self) -> None:
        if self._beginning is not None:
            self._beginning.cancel()
            self._beginning = None

    def _report_if_idle(self) -> None:
        if self.is_idle:
            self._context.report_idle(self)

    # Ends of all items.

    def cancel(self) -> None:
        """Let no item begin any more, because the run was released. Those that run end with their leases."""
        self._is_cancelled = True
        if self.record is not None and not self.record.is_cancelled:
            self.record = replace(self.record, is_cancelled=True)
        self._end_unbegun(Reason.CANCELLED, "the run of the run-batch was released before this item began", may_have_run=None)

    def begin_stop(self) -> None:
        """Let no item begin any more, because the service stops."""
        self._is_stopping = True
        self._end_unbegun(Reason.BACKEND_ERROR, "the service stopped before this item began: send the request again when it is back", may_have_run=False)

    async def stop(self) -> None:
        """End the items that still run. If the request can be repeated, the next process of the service finishes them."""
        self._is_stopping = True
        self._stop_beginning()
        tasks = [*self._running.values(), *((self._ending,) if self._ending is not None and self.results.is_followed else ())]
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.results.is_followed:
            error = "the service stopped while this item ran: send the request again when it is back"
            await self._append_ends(Reason.BACKEND_ERROR, error, may_have_run=True)

    def _end_unbegun(self, reason: Reason, error: str, may_have_run: bool | None) -> None:
        self._stop_beginning()
        if self.results.is_followed:
            self._ending = asyncio.create_task(self._append_ends(reason, error, may_have_run))

    async def _append_ends(self, reason: Reason, error: str, may_have_run: bool | None) -> None:
        for index in range(self.item_count):
            if index not in self._finished and index not in self._running:
                self._finished.add(index)
                await self._append_unkept(index, self._own_result(index, reason, error, may_have_run))
                await asyncio.sleep(0)  # other requests run in between

    def _own_result(self, index: int, reason: Reason, error: str, may_have_run: bool | None) -> ItemResult:
        return result_without_call(index, reason, error, self._context.clock, may_have_run=may_have_run, stopping=self._is_stopping)

    # Beginning items.

    async def _begin_items(self) -> None:
        try:
            while (index := await self._next_to_begin()) is not None:
                await self._begin_item(index)
        except PoolServiceError as error:
            self._fail_unbegun(error)
        except Exception:  # the edge of this task: a bug costs this run-batch its items, and the client must be told
            log.exception("the items of a run-batch cannot begin", extra={"batch_id": self.batch_id})
            self._fail_unbegun(StorageUnavailable("the service failed; its log has the details"))

    def _fail_unbegun(self, error: PoolServiceError) -> None:
        self._beginning = None
        if not self.has_begun:
            self.error = error
            self.results.notify()
        else:
            self._end_unbegun(Reason.BACKEND_ERROR, error.detail, may_have_run=False)

    async def _next_to_begin(self) -> int | None:
        """Wait until an item may begin. Returns None when all have begun and none is to begin again."""
        while True:
            changed = self.results.changed
            if len(self._running) < self._max_parallel and self.results.unread_bytes() < MAX_UNREAD_BYTES:
                if self._retries:
                    return self._retries.popleft()
                while self._next_index < self.item_count:
                    index, self._next_index = self._next_index, self._next_index + 1
                    if index not in self._finished and index not in self._running:
                        return index
                if not self._running:
                    return None
            await changed.wait()

    async def _begin_item(self, index: int) -> None:
        assert self._spool is not None, "items begin after `attach`"
        program = await self._spool.read(index)
        refused = self._context.runner.refuse_arguments(program, index)
        if refused is not None:
            await self._finish(index, refused)
            return
        lease_id = await acquire_slot(self._context.pools, self._context.clock, self._slot_request(index, program), lambda: self.has_begun)
        record = RunBatchItemRecord(batch_id=self.batch_id, index=index, tenant=self.tenant, lease_id=lease_id)
        self._context.store.put(record)
        self._start_task(record, lambda: self._run_program(record, program))

    def _slot_request(self, index: int, program: Program) -> AcquireRequest:
        assert self._request is not None, "items begin after `attach`"
        return AcquireRequest(
            tenant=self.tenant,
            pool=self._request.pool,
            run_id=self.run_id,
            allow_network=program.allow_network,
            labels={LABEL_OF_BATCH: self.batch_id, LABEL_OF_ITEM: str(index)},
        )

    # Running items.

    def resume_item(self, record: RunBatchItemRecord) -> None:
        """Finish an item that an earlier process of the service has started. Its call is sent again, which joins it."""
        call = record.call
        assert call is not None, "only an item whose call may have been sent is resumed"
        self._start_task(record, lambda: self._run_call(record, call, record.artifacts))

    def _start_task(self, record: RunBatchItemRecord, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._has_begun = True
        task = self._running[record.index] = asyncio.create_task(self._run_item(record, run))
        task.add_done_callback(lambda _: self._end_item(record))
        self.results.notify()

    async def _run_item(self, record: RunBatchItemRecord, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        running = run()
        del run  # it holds the program, whose files are to leave the memory when they are written
        try:
            await running
        except Exception:  # the edge of this task: a bug costs this item its result, and no other item anything
            log.exception("an item of a run-batch failed", extra={"batch_id": self.batch_id, "lease_id": record.lease_id})
            error = "the service failed; its log has the details"
            await self._finish(record.index, self._own_result(record.index, Reason.BACKEND_ERROR, error, may_have_run=True))

    def _end_item(self, record: RunBatchItemRecord) -> None:
        """Give the slot of an item back. A service that stops leaves it to the next one, if the request can be repeated."""
        if not (self._is_stopping and self.record is not None):
            self._release(record.lease_id)
            self._context.store.put(Deletion(run_batch_item=record.key))
        del self._running[record.index]
        if record.index in self._to_retry:
            self._to_retry.discard(record.index)
            self._retries.append(record.index)
        self.results.notify()
        self._report_if_idle()

    def _release(self, lease_id: str) -> None:
        self._context.pools.release(self.tenant, lease_ids=[lease_id])

    async def _run_program(self, record: RunBatchItemRecord, program: Program) -> None:
        call = program.call(record.index, record.lease_id)
        artifacts = program.artifacts
        unwritten = await self._context.runner.prepare(self.tenant, call, program)
        del program  # its files are in the slot; only the call is needed while it runs
        if unwritten is not None:
            await self._finish_or_retry(record.index, unwritten)
            return
        if self.record is not None:
            self._context.store.put(replace(record, call=call, artifacts=artifacts))
        try:
            await self._context.store.flush()  # No program runs in a slot that the next process of the service could not give back.
        except StorageUnavailable as error:
            await self._finish_or_retry(record.index, self._own_result(record.index, Reason.BACKEND_ERROR, error.detail, may_have_run=False))
            return
        await self._run_call(record, call, artifacts)

    async def _run_call(self, record: RunBatchItemRecord, call: ToolCall, artifacts: tuple[str, ...]) -> None:
        runner = self._context.runner
        with runner.lease_in_use(record.lease_id):
            reservation = await runner.reserve(self.tenant, call)
            try:
                async with runner.run(self.tenant, call, artifacts, reservation, self._budget, can_be_repeated=self.record is not None) as finished:
                    if self.record is None:
                        self._release(record.lease_id)  # the slot is reset while the result is written
                    await self._finish_or_retry(record.index, finished)
            finally:
                reservation.release()

    async def _finish_or_retry(self, index: int, finished: ItemResult) -> None:
        if self._is_cancelled and (finished.has_not_run or finished.result.reason is Reason.LEASE_LOST):
            finished = self._own_result(index, Reason.CANCELLED, "the run of the run-batch was released before this item began", may_have_run=None)
        elif finished.has_not_run and self._beginning is not None and self._attempts[index] < MAX_ATTEMPTS - 1:
            self._attempts[index] += 1
            self._to_retry.add(index)
            return
        await self._finish(index, finished)

    async def _finish(self, index: int, finished: ItemResult) -> None:
        """Append the line of an item. A result that a repeated request does not get stays in memory, as does that of an item which cannot be written."""
        if index in self._finished:
            return
        self._finished.add(index)
        if self.record is not None and not finished.is_final:
            await self._append_unkept(index, finished)
            return
        self._appending.add(index)
        try:
            with cleanup_on_failure(lambda: self._finished.discard(index)):
                await self.results.append(index, self._context.render(index, finished))
        except StorageUnavailable as error:
            self._finished.add(index)
            if self.record is not None:
                self._context.report_unwritten(self)
            lost = self._own_result(index, Reason.BACKEND_ERROR, f"the program ended, but {error.detail}", may_have_run=True)
            await self._append_unkept(index, lost)
            return
        finally:
            self._appending.discard(index)
        if self.record is not None:
            self._context.report_growth(self)

    async def _append_unkept(self, index: int, finished: ItemResult) -> None:
        if self.results.is_followed:
            self.results.append_unkept(index, b"".join([piece async for piece in self._context.render(index, finished)]))
