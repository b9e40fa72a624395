"""The outputs of results. A small output comes with its result; a large one is fetched from the agent into a file, piece by piece."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

from sandbox_server.core.errors import BackendUnavailable, StorageUnavailable
from sandbox_server.core.execution import OutputFile, Reason, Result
from sandbox_server.dispatch.limits.response_budget import ResponseReservation
from sandbox_server.dispatch.results import call_reference, service_result
from sandbox_server.dispatch.slot_locator import SlotLocation
from sandbox_server.link.call_messages import ResultMessage
from sandbox_server.link.errors import AgentRefused
from sandbox_server.store.output_files import OutputFiles, WrongSize

MAX_FETCHES_OF_TENANT = 4
"""How many outputs of one tenant are fetched at the same time; the others wait at their agents."""
MAX_FETCHES = 16
"""How many outputs are fetched at the same time. Each takes half a MiB of memory: a stream's window and one write."""

PIECE_BYTES = 24 << 10
"""How much of an output is read, encoded and sent at a time. JSON may need six bytes for one. A multiple of three, for base64."""


class ResultOutputs:
    """Moves the outputs of results into files where they must not stay in memory.

    Args:
        files: where the files are.
    """

    def __init__(self, files: OutputFiles) -> None:
        self._files = files
        self._fetch_limit = asyncio.Semaphore(MAX_FETCHES)
        self._fetch_limit_by_tenant: dict[str, asyncio.Semaphore] = {}
        self._fetches_in_progress: dict[tuple[str, str], asyncio.Task[Result]] = {}
        self._fetched_files: weakref.WeakValueDictionary[tuple[str, str], OutputFile] = weakref.WeakValueDictionary()

    async def complete_result(self, result: Result, message: ResultMessage, location: SlotLocation) -> Result:
        """Fetch the output of a result from its agent, if the message does not carry it.

        Args:
            result: the result that the message reports.
            message: the agent's message.
            location: the slot of the call.

        Returns:
            The result with its output. Where the agent has the output no more, the result says so in its metadata; where the output cannot be
            stored, the result is a `backend_error`.

        Raises:
            LinkLost: the connection ended meanwhile; the agent still has the output.
            AgentSilent: the agent does not respond; it still has the output.
        """
        sizes_bytes = message.waiting_sizes_bytes
        if sizes_bytes is None or result.reason is Reason.BACKEND_ERROR:
            return result
        try:
            file = await self._fetch_output(location, result.call_id, sum(sizes_bytes), sizes_bytes[0] if len(sizes_bytes) == 2 else None)
        except AgentRefused as refused:
            # The slot was reset for another lease, which deleted the output. The rest of the result is known.
            metadata = {**result.metadata, "output_evicted": True, "output_lost": refused.detail}
            return replace(result, truncated=True, metadata=metadata)
        except (StorageUnavailable, WrongSize) as error:
            return _output_not_stored_result(result, str(error))
        return replace(result, output_file=file)

    async def complete_unrecorded_result(self, result: Result, message: ResultMessage, location: SlotLocation) -> Result:
        """Do what `complete_result` does, for a result that is not recorded: requests that ask at the same time share one fetch and one file.

        The file is deleted when the last result that refers to it is gone.

        Raises:
            LinkLost, AgentSilent: see `complete_result`.
        """
        if message.waiting_sizes_bytes is None or result.reason is Reason.BACKEND_ERROR:
            return result
        key = (result.lease_id, result.call_id)
        file = self._fetched_files.get(key)
        if file is not None:
            return replace(result, output_file=file)
        task = self._fetches_in_progress.get(key)
        if task is None:
            task = self._fetches_in_progress[key] = asyncio.create_task(self.complete_result(result, message, location))
            task.add_done_callback(lambda done: self._keep_fetched_file(key, done))
        return await asyncio.shield(task)

    def _keep_fetched_file(self, key: tuple[str, str], task: asyncio.Task[Result]) -> None:
        del self._fetches_in_progress[key]
        if not task.cancelled() and task.exception() is None:
            file = self.delete_file_when_unused(task.result()).output_file
            if file is not None:
                self._fetched_files[key] = file

    async def limit_memory(self, result: Result, reservation: ResponseReservation) -> Result:
        """Move the output of a result into a file, if there is no room for it in memory.

        Args:
            result: a complete result.
            reservation: what the request holds of the budget; the output is added to it.
        """
        if reservation.try_reserve_output(result.held_bytes):
            return result
        parts = [result.stdout or b"", result.stderr or b""] if result.is_separate else [result.output]
        try:
            file = await self._files.write_bytes(result.lease_id, parts, len(parts[0]) if result.is_separate else None)
        except StorageUnavailable as error:
            return _output_not_stored_result(result, error.detail)
        return replace(result, output=b"", stdout=None, stderr=None, output_file=file)

    def delete_file_when_unused(self, result: Result) -> Result:
        """Have the file of a result that is not recorded deleted once nothing refers to it. Returns the result."""
        if result.output_file is not None:
            self._files.delete_when_unused(result.output_file)
        return result

    async def _fetch_output(self, location: SlotLocation, call_id: str, size_bytes: int, stdout_bytes: int | None) -> OutputFile:
        async with self._fetch_permit(location.lease.tenant), aclosing(location.slot.fetch_result_output(call_id)) as chunks:
            return await self._files.write(location.lease.lease_id, chunks, size_bytes, stdout_bytes)

    @asynccontextmanager
    async def _fetch_permit(self, tenant: str) -> AsyncIterator[None]:
        async with self._fetch_limit_by_tenant.setdefault(tenant, asyncio.Semaphore(MAX_FETCHES_OF_TENANT)), self._fetch_limit:
            yield


def _output_not_stored_result(result: Result, problem: str) -> Result:
    """The result of a call whose output could not be stored. The agent still has it, so that the same call may get it later."""
    call = call_reference(result.lease_id, result.call_id, result.encoding)
    error = f"the call ended, but its output could not be stored: {problem}; send the same call_id again"
    return replace(service_result(call, Reason.BACKEND_ERROR, error, may_have_run=True), started_at=result.started_at, duration_s=result.duration_s)


def output_bytes(result: Result) -> int:
    """The size of the output of a result, in bytes."""
    return result.output_file.size_bytes if result.output_file is not None else result.held_bytes


async def output_pieces(result: Result, start: int = 0, end: int | None = None, piece_bytes: int = PIECE_BYTES) -> AsyncGenerator[bytes, None]:
    """Read the output of a result from memory or from its file: standard output, then standard error where it is separate.

    Args:
        result: the result.
        start: where to begin, in bytes.
        end: where to end, in bytes; None for the end of the output.
        piece_bytes: the size of a piece.

    Raises:
        BackendUnavailable: the file is shorter than its record says.
    """
    end = output_bytes(result) if end is None else end
    if result.output_file is None:
        held = result.output or (result.stdout or b"") + (result.stderr or b"")
        for at in range(start, end, piece_bytes):
            yield held[at : min(at + piece_bytes, end)]
        return
    path = result.output_file.path
    with await asyncio.to_thread(open, path, "rb", buffering=0) as file:
        for at in range(start, end, piece_bytes):
            piece = await asyncio.to_thread(os.pread, file.fileno(), min(piece_bytes, end - at), at)
            if not piece:
                raise BackendUnavailable(f"the output file {path} is shorter than its record says")
            yield piece
