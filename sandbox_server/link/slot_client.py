"""The requests about the calls and files of one slot in one epoch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from sandbox_server.agent import wire
from sandbox_server.core.execution import ToolCall
from sandbox_server.link.agent_link import AgentLink
from sandbox_server.link.agent_stream import AgentStream
from sandbox_server.link.call_messages import (
    OutputHeader,
    ResultMessage,
    RunningCall,
    call_message,
    read_content_size,
    read_output_header,
    read_result_message,
    read_running_call,
)
from sandbox_server.link.errors import AgentShutsDown, agent_refusal
from sandbox_server.link.port_connection import PortConnection
from sandbox_server.link.terminal_stream import TerminalRequest, TerminalStream


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderListing:
    """The entries of a folder, as the agent sent them, and whether there are more."""

    entries: tuple[dict[str, Any], ...]
    is_truncated: bool


class CallStream:
    """The calls of one lease on their way through its slot. Use it as an async context manager; leaving it early does not end the calls.

    Send calls with `send_call`, then `end_calls`; `next_result` returns one result for each, in the order of the calls.
    """

    def __init__(self, stream: AgentStream) -> None:
        self._stream = stream

    def send_call(self, call: ToolCall, timeout_s: float) -> None:
        """Queue one call.

        Args:
            call: the call.
            timeout_s: how long it may run, in seconds.

        Raises:
            LinkLost: the connection has ended.
        """
        self._stream.send_item(call_message(call, timeout_s))

    def end_calls(self) -> None:
        """Declare that no more calls follow."""
        self._stream.end()

    async def next_result(self) -> ResultMessage | None:
        """Wait for the result of the next call.

        Returns:
            The agent's message; None where the agent has ended the stream.

        Raises:
            LinkLost: the connection has ended.
            AgentRefused: the agent refused the calls that have no result yet.
        """
        async for event in self._stream:
            if isinstance(event, wire.Item):
                return read_result_message(event.meta, event.body)
        return None

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._stream.__aexit__(kind, error, trace)


class SlotClient:
    """The calls and files of one slot. Every request names the epoch: the agent refuses it once the slot is in a later one.

    Args:
        link: the connection to the agent.
        slot_id: the id of the slot at its agent.
        epoch: the epoch in which the caller holds the slot.
        response_timeout_s: for how long the agent may be silent while it owes a response, in seconds.

    Every request raises LinkLost where the connection ends, AgentSilent where the agent does not respond, and a subclass of AgentRefused where the
    agent refuses.
    """

    def __init__(self, link: AgentLink, slot_id: str, epoch: int, response_timeout_s: float) -> None:
        self._link = link
        self._slot_id = slot_id
        self._epoch = epoch
        self._response_timeout_s = response_timeout_s

    def open_calls(self) -> CallStream:
        """Open a stream of calls. The agent may send nothing on it for any time, because a call may run without output.

        Raises:
            LinkLost: the connection has ended.
            AgentShutsDown: the agent has said that it shuts down.
        """
        self._link.raise_if_lost()
        if self._link.agent_ends:
            raise AgentShutsDown({"code": "slot_unavailable", "detail": "its agent was told to end"})
        return CallStream(self._open("calls", None, fetches_outputs=True))

    async def answers_ping(self, within_s: float) -> bool:
        """Whether any data arrives from the agent within so many seconds of a ping."""
        return await self._link.answers_ping(within_s)

    async def wait_for_disconnect(self, within_s: float) -> None:
        """Wait until the connection to the agent has ended, at most so many seconds."""
        await asyncio.wait([self._link.closed], timeout=within_s)

    async def cancel_call(self, call_id: str) -> bool:
        """End a call. Returns whether the agent knows the call; one that has ended already stays as it is."""
        answer = await self._link.request(self._meta("cancel", call_id=call_id), self._response_timeout_s)
        return answer.get("found") is True

    async def call_status(self, call_id: str) -> RunningCall | ResultMessage:
        """Ask for the progress of a call, or for how it ended.

        Raises:
            CallUnknown: the agent has no such call.
        """
        message: RunningCall | ResultMessage | None = None
        async with self._open("call_status", self._response_timeout_s, call_id=call_id, fetches_outputs=True) as stream:
            stream.end()
            async for event in stream:
                if isinstance(event, wire.Item):
                    message = read_result_message(event.meta, event.body)
                elif isinstance(event, wire.Ended) and message is None:
                    message = read_running_call(event.meta)
        assert message is not None, "a stream that does not raise ends with an Ended event"
        return message

    async def follow_output(self, call_id: str, offset: int, *, may_be_silent: bool) -> AsyncGenerator[bytes | ResultMessage, None]:
        """Receive the output of a call as it comes, and the message that the call has ended as the last item.

        Args:
            call_id: the call.
            offset: where in the output to begin, in bytes.
            may_be_silent: whether the agent may send nothing for any time, as a call may run without output.

        Raises:
            CallUnknown: the agent has no such call.
        """
        silence_s = None if may_be_silent else self._response_timeout_s
        async with self._open("attach", silence_s, call_id=call_id, offset=offset, fetches_outputs=True) as stream:
            stream.end()
            async for event in stream:
                if isinstance(event, wire.Data):
                    yield event.body
                elif isinstance(event, wire.Item):
                    yield read_result_message(event.meta, event.body)

    async def fetch_output(self, call_id: str, offset: int) -> AsyncGenerator[OutputHeader | bytes, None]:
        """Receive the output of a call as far as it exists now: a header, then the bytes from the offset on.

        Raises:
            CallUnknown: the agent has no such call.
        """
        async with self._open("output", self._response_timeout_s, call_id=call_id, offset=offset) as stream:
            stream.end()
            async for event in stream:
                if isinstance(event, wire.Data):
                    yield event.body
                elif isinstance(event, wire.Item):
                    yield read_output_header(event.meta)

    def fetch_result_output(self, call_id: str) -> AsyncGenerator[bytes, None]:
        """Receive the output that belongs to the result of a call: standard output, then standard error where it is separate."""
        return self._receive_data("result_output", call_id=call_id)

    def read_file(self, path: str, on_size: Callable[[int], None] = lambda size_bytes: None) -> AsyncGenerator[bytes, None]:
        """Receive the content of a file.

        Args:
            path: the file.
            on_size: called with the size of the content in bytes before the first part of it. An older agent does not tell it, and it is not called.

        Raises:
            PathNotFound, FileOperationFailed, RequestInvalid: the file cannot be read, or its content is not as long as the agent has said.
        """
        return self._receive_sized("file_get", path, on_size, path=path)

    def read_recording(self, name: str, on_size: Callable[[int], None] = lambda size_bytes: None) -> AsyncGenerator[bytes, None]:
        """Receive the recording of a terminal, as it is now. The arguments and the errors are those of `read_file`."""
        return self._receive_sized("recording", name, on_size, name=name)

    async def _receive_sized(self, op: str, subject: str, on_size: Callable[[int], None], **fields: Any) -> AsyncGenerator[bytes, None]:
        """Receive content whose size the agent tells before it.

        Args:
            op: the operation.
            subject: what has the content, for the error sentence.
            on_size: see `read_file`.
            fields: further fields of the request.

        Raises:
            FileOperationFailed: the content is not as long as the agent has said.
        """
        left_bytes: int | None = None
        async with self._open(op, self._response_timeout_s, **fields) as stream:
            stream.end()
            async for event in stream:
                if isinstance(event, wire.Item) and left_bytes is None:
                    left_bytes = read_content_size(event.meta)
                    if left_bytes is not None:
                        on_size(left_bytes)
                elif isinstance(event, wire.Data):
                    left_bytes = None if left_bytes is None else left_bytes - len(event.body)
                    if left_bytes is not None and left_bytes < 0:
                        break
                    yield event.body
        if left_bytes:
            raise agent_refusal({"code": "file_error", "detail": f"{subject} does not have the size that the agent has said", "errno": "EIO"})

    def read_archive(self, path: str) -> AsyncGenerator[bytes, None]:
        """Receive a folder as a gzipped tar. Raises as `read_file` does."""
        return self._receive_data("archive_get", path=path)

    async def write_file(self, path: str, mode: int | None, chunks: AsyncIterator[bytes]) -> None:
        """Replace a file atomically.

        Args:
            path: the file.
            mode: its permission bits; None for the default.
            chunks: its content.

        Raises:
            FileOperationFailed, RequestInvalid: the file cannot be written.
        """
        more = {} if mode is None else {"mode": mode}
        await self._send_data("file_put", chunks, path=path, **more)

    async def write_archive(self, path: str, chunks: AsyncIterator[bytes]) -> None:
        """Unpack a gzipped tar into a folder. Raises as `write_file` does."""
        await self._send_data("archive_put", chunks, path=path)

    async def list_folder(self, path: str, *, recursive: bool, max_entries: int) -> FolderListing:
        """List the entries of a folder.

        Args:
            path: the folder.
            recursive: whether to list the folders below it, too.
            max_entries: the largest number of entries to return.

        Raises:
            PathNotFound, FileOperationFailed, RequestInvalid: the folder cannot be read.
        """
        entries: list[dict[str, Any]] = []
        is_truncated = False
        async with self._open("file_list", self._response_timeout_s, path=path, recursive=recursive, max_entries=max_entries) as stream:
            stream.end()
            async for event in stream:
                if isinstance(event, wire.Item):
                    found = event.meta.get("entries")
                    entries.extend(entry for entry in (found if isinstance(found, list) else ()) if isinstance(entry, dict))
                    is_truncated = is_truncated or event.meta.get("truncated") is True
        return FolderListing(entries=tuple(entries[:max_entries]), is_truncated=is_truncated or len(entries) > max_entries)

    def open_port(self, port: int) -> PortConnection:
        """Open a connection to a program that listens on a port of the slot. `PortConnection.wait_until_connected` says whether there is one."""
        return PortConnection(self._open("port", self._response_timeout_s, port=port))

    def open_terminal(self, request: TerminalRequest) -> TerminalStream:
        """Open a stream to a terminal. The agent may send nothing on it for any time, because a program may write nothing."""
        return TerminalStream(self._open("terminal", None, **request.fields()))

    async def _receive_data(self, op: str, **fields: Any) -> AsyncGenerator[bytes, None]:
        async with self._open(op, self._response_timeout_s, **fields) as stream:
            stream.end()
            async for event in stream:
                if isinstance(event, wire.Data):
                    yield event.body

    async def _send_data(self, op: str, chunks: AsyncIterator[bytes], **fields: Any) -> None:
        async with self._open(op, self._response_timeout_s, **fields) as stream:
            async for chunk in chunks:
                await stream.send_data(chunk)
            stream.end()
            async for _ in stream:
                pass

    def _open(self, op: str, silence_s: float | None, **fields: Any) -> AgentStream:
        return self._link.stream(self._meta(op, **fields), silence_s)

    def _meta(self, op: str, **fields: Any) -> dict[str, Any]:
        return {"op": op, "slot": self._slot_id, "epoch": self._epoch, **fields}
