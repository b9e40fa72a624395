"""The outputs of results on their way from the agents: a small one comes with its result, a large one is fetched into a file, piece by piece."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

from sandbox_server.agent import wire
from sandbox_server.core.errors import BackendUnavailable, StorageUnavailable
from sandbox_server.core.execution import OutputFile, Reason, Result, ToolCall
from sandbox_server.dispatch.answer_budget import Reservation
from sandbox_server.dispatch.results import own_result, waiting_output
from sandbox_server.dispatch.slot_location import SlotLocation, slot_meta
from sandbox_server.link.agent_link import RESPONSE_TIMEOUT_S
from sandbox_server.link.errors import AgentRefused, LinkLost
from sandbox_server.store.output_files import OutputFiles, WrongSize

FETCHES_OF_TENANT = 4
"""How many outputs of one tenant are fetched at once; the others wait at their agents."""
FETCHES = 16
"""How many are fetched at once in all. Each takes a stream's window of memory and one write, half a MiB."""

PIECE_BYTES = 24 << 10
"""How much of an output is read, made text and sent at a time: JSON makes up to six bytes of each. A multiple of three, for base64."""


class ResultOutputs:
    """Sees to it that a result holds no more memory than it may.

    Args:
        files: where large outputs go.
    """

    def __init__(self, files: OutputFiles) -> None:
        self._files = files
        self._turns = asyncio.Semaphore(FETCHES)
        self._fetches: dict[tuple[str, str], asyncio.Task[Result]] = {}
        self._fetched: weakref.WeakValueDictionary[tuple[str, str], OutputFile] = weakref.WeakValueDictionary()
        self._turns_of: dict[str, asyncio.Semaphore] = {}

    async def complete(self, result: Result, meta: Mapping[str, Any], route: SlotLocation) -> Result:
        """The result with its output, fetched from its agent if it waits there.

        Args:
            result: as the agent's message says.
            meta: that message.
            route: the way to the agent.

        Raises:
            LinkLost: the connection ended meanwhile; the output still waits.
            AgentSilent: nothing was heard of the agent for `RESPONSE_TIMEOUT_S` meanwhile; the output still waits.
        """
        lengths = waiting_output(meta)
        if lengths is None or result.reason is Reason.BACKEND_ERROR:
            return result
        try:
            file = await self._fetch(route, result.call_id, sum(lengths), lengths[0] if len(lengths) == 2 else None)
        except AgentRefused as refused:
            # Its slot has moved on. How the call ended is known all the same.
            metadata = {**result.metadata, "output_evicted": True, "output_lost": refused.detail}
            return replace(result, truncated=True, metadata=metadata)
        except (StorageUnavailable, WrongSize) as error:
            return _not_kept(result, str(error))
        return replace(result, output_file=file)

    async def complete_for_now(self, result: Result, meta: Mapping[str, Any], route: SlotLocation) -> Result:
        """As `complete`, of a call that is not on record: however many look at it, its output is fetched once, and its file goes when they do.

        Raises:
            LinkLost, AgentSilent: as `complete`.
        """
        if waiting_output(meta) is None or result.reason is Reason.BACKEND_ERROR:
            return result
        key = (result.lease_id, result.call_id)
        file = self._fetched.get(key)
        if file is not None:
            return replace(result, output_file=file)
        task = self._fetches.get(key)
        if task is None:
            task = self._fetches[key] = asyncio.create_task(self.complete(result, meta, route))
            task.add_done_callback(lambda done: self._is_fetched(key, done))
        return await asyncio.shield(task)

    def _is_fetched(self, key: tuple[str, str], task: asyncio.Task[Result]) -> None:
        del self._fetches[key]
        if not task.cancelled() and task.exception() is None:
            file = self.only_for_now(task.result()).output_file
            if file is not None:
                self._fetched[key] = file

    async def within(self, result: Result, reservation: Reservation) -> Result:
        """The result with its output in a file, if there is no room for it in memory."""
        if reservation.keep(result.held_bytes):
            return result
        parts = [result.stdout or b"", result.stderr or b""] if result.is_separate else [result.output]
        try:
            file = await self._files.write_bytes(result.lease_id, parts, len(parts[0]) if result.is_separate else None)
        except StorageUnavailable as error:
            return _not_kept(result, error.detail)
        return replace(result, output=b"", stdout=None, stderr=None, output_file=file)

    def only_for_now(self, result: Result) -> Result:
        """No record tells of this result: its file goes when it does."""
        if result.output_file is not None:
            self._files.delete_when_unused(result.output_file)
        return result

    async def _fetch(self, route: SlotLocation, call_id: str, size_bytes: int, stdout_bytes: int | None) -> OutputFile:
        meta = slot_meta(route, "result_output", call_id=call_id)
        async with self._turn(route.lease.tenant), route.agent.link.stream(meta, RESPONSE_TIMEOUT_S) as stream:
            stream.end()
            async with aclosing(_bytes_of(stream)) as chunks:
                return await self._files.write(route.lease.lease_id, chunks, size_bytes, stdout_bytes)

    @asynccontextmanager
    async def _turn(self, tenant: str) -> AsyncIterator[None]:
        async with self._turns_of.setdefault(tenant, asyncio.Semaphore(FETCHES_OF_TENANT)), self._turns:
            yield


async def _bytes_of(stream: Any) -> AsyncGenerator[bytes, None]:
    async for event in stream:
        if isinstance(event, wire.Data):
            yield event.body
        elif isinstance(event, wire.Ended):
            return
    raise LinkLost("the agent broke an output off")


def _not_kept(result: Result, why: str) -> Result:
    """What the call came to instead: its agent still has it, so that asking again may fetch it."""
    call = ToolCall(call_id=result.call_id, lease_id=result.lease_id, tool="", args={}, encoding=result.encoding)
    error = f"the call ended, and its output could not be kept: {why}; ask again with the same call_id"
    return replace(own_result(call, Reason.BACKEND_ERROR, error, may_have_run=True), started_at=result.started_at, duration_s=result.duration_s)


def output_bytes(result: Result) -> int:
    """How much output a result has."""
    return result.output_file.size_bytes if result.output_file is not None else result.held_bytes


async def output_pieces(result: Result, start: int = 0, end: int | None = None, piece_bytes: int = PIECE_BYTES) -> AsyncGenerator[bytes, None]:
    """The output of a result, wherever it is; standard error, where it is apart, after standard output.

    Args:
        result: whose output.
        start: where in it to begin, in bytes.
        end: where to end; None: at its end.
        piece_bytes: how much is given at a time.
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
