"""Runs one item in its slot: writes its files, runs its program, and reads its artifacts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

from sandbox_server.core.clock import Clock
from sandbox_server.core.errors import BackendUnavailable, FileError, FileNotFound, InvalidRequest, LeaseLost, PoolServiceError, QuotaExceeded
from sandbox_server.core.execution import Reason, Result, ToolCall
from sandbox_server.dispatch.batch import Batch
from sandbox_server.dispatch.dispatcher import Dispatcher
from sandbox_server.dispatch.files import SlotFiles
from sandbox_server.dispatch.limits.response_budget import ResponseReservation
from sandbox_server.dispatch.results import invalid_field_result, lease_error_result, service_result, with_refusal_time
from sandbox_server.dispatch.run_batch.artifact_reader import ArtifactBudget, ArtifactReader
from sandbox_server.dispatch.run_batch.file_archive import FILE_MODE, content_chunks, pack_files
from sandbox_server.dispatch.run_batch.values import ItemResult, Program
from sandbox_server.dispatch.slot_locator import SlotLocator

WORKSPACE = "."
BUSY_WAIT_S = 0.5
"""How long an item waits before it asks again whether its call may start, while too many calls of its tenant run."""
LARGE_ARCHIVE_BYTES = 256 << 10
"""The files of a program are packed in a thread if they are larger together."""


class ItemRunner:
    """Runs items in slots that are leased already.

    Args:
        slot_locator: finds the slot of a lease.
        dispatcher: runs the calls.
        files: writes and reads files of slots.
        clock: gives the times of results that the service makes itself.
    """

    def __init__(self, slot_locator: SlotLocator, dispatcher: Dispatcher, files: SlotFiles, clock: Clock) -> None:
        self._slot_locator = slot_locator
        self._dispatcher = dispatcher
        self._files = files
        self._clock = clock
        self._artifacts = ArtifactReader(slot_locator, files)

    def refuse_arguments(self, program: Program, index: int) -> ItemResult | None:
        """The result of a program whose arguments cannot be sent to an agent; None if they can."""
        if program.args_problem is None:
            return None
        evidence = {"field": "args", "detail": program.args_problem}
        return self._item_result(service_result(program.call(index, ""), Reason.INVALID_ARGS, program.args_problem, evidence=evidence))

    @contextmanager
    def lease_in_use(self, lease_id: str) -> Iterator[None]:
        """Let a lease not expire during a `with` block: an item may wait for longer than its lease lasts before its call is sent."""
        self._slot_locator.record_call_start(lease_id)
        try:
            yield
        finally:
            self._slot_locator.record_call_end(lease_id)

    async def prepare(self, tenant: str, call: ToolCall, program: Program) -> ItemResult | None:
        """Write the files of a program into its slot.

        Args:
            tenant: the tenant of the lease.
            call: the call that will run the program.
            program: the program.

        Returns:
            The result of the item if they cannot be written; else None.
        """
        if not program.files:
            return None
        try:
            await self._write_files(tenant, call.lease_id, program.files)
        except (FileError, FileNotFound, InvalidRequest) as error:
            problem = f"files: they cannot be written: {error.detail}"
            return self._item_result(invalid_field_result(call, "files", problem))
        except (LeaseLost, BackendUnavailable) as error:
            return self._item_result(_not_run(call, error))
        except PoolServiceError as error:
            return self._item_result(service_result(call, Reason.BACKEND_ERROR, error.detail, may_have_run=False))
        return None

    async def _write_files(self, tenant: str, lease_id: str, files: Mapping[str, bytes]) -> None:
        """Write files: one as it is, which takes half as long as unpacking an archive of it; several in one archive."""
        if len(files) == 1:
            ((path, content),) = files.items()
            await self._files.write_file(tenant, lease_id, path, FILE_MODE, content_chunks(content))
            return
        is_large = sum(map(len, files.values())) > LARGE_ARCHIVE_BYTES
        archive = await asyncio.to_thread(pack_files, files) if is_large else pack_files(files)
        await self._files.write_archive(tenant, lease_id, WORKSPACE, content_chunks(archive))

    @asynccontextmanager
    async def run(
        self, tenant: str, call: ToolCall, artifacts: tuple[str, ...], reservation: ResponseReservation, budget: ArtifactBudget, *, can_be_repeated: bool
    ) -> AsyncIterator[ItemResult]:
        """Run a call and read the artifacts of its item. The result can be read until the end of the block.

        Args:
            tenant: the tenant of the lease.
            call: the call. One that has run, or runs, is not run again.
            artifacts: the paths of the files to read.
            reservation: what the result may hold. It is released at the end.
            budget: how large the artifacts may be.
            can_be_repeated: whether the same call may be sent again later, so that its result must be recorded.
        """
        batch = await self._start_call(tenant, call, reservation, can_be_repeated=can_be_repeated)
        try:
            (result,) = await batch.all_results()
            finished = ItemResult(result=result)
            if not artifacts or finished.has_not_run or finished.is_stopping:
                yield finished
                return
            async with self._artifacts.permits:
                yield ItemResult(result=result, artifacts=await self._artifacts.read_artifacts(tenant, call.lease_id, artifacts, budget))
        finally:
            batch.discard_results()

    async def _start_call(self, tenant: str, call: ToolCall, reservation: ResponseReservation, *, can_be_repeated: bool) -> Batch:
        """Start a call; where too many calls of the tenant run, wait until it may start."""
        while True:
            try:
                return self._dispatcher.start_calls(tenant, [call], reservation=reservation, records_results=can_be_repeated)
            except QuotaExceeded:
                await asyncio.sleep(BUSY_WAIT_S)

    async def reserve(self, tenant: str, call: ToolCall) -> ResponseReservation:
        """Reserve what the result of a call may hold, and wait for it as long as necessary."""
        while True:
            try:
                return await self._dispatcher.response_budget.reserve(tenant, [call])
            except QuotaExceeded:
                await asyncio.sleep(BUSY_WAIT_S)

    def _item_result(self, result: Result) -> ItemResult:
        return ItemResult(result=with_refusal_time(result, self._clock))


def _not_run(call: ToolCall, error: PoolServiceError) -> Result:
    """The result of a program whose slot was lost before the program began."""
    result = lease_error_result(call, error)
    return replace(result, metadata={**result.metadata, "may_have_run": False}) if result.reason is Reason.SANDBOX_LOST else result
