"""The file operations of the service: reading, writing and listing files, and archives of folders.

A forked child of init does each of them inside the slot, with the rights of the slot. The content streams through the agent.
"""

from __future__ import annotations

import asyncio
import errno as errno_names
import os
from typing import Any, Awaitable, Callable, Mapping

from sandbox_server.agent.errors import Refused
from sandbox_server.agent.execution.processes.slot_process import SlotProcess
from sandbox_server.agent.execution.processes.spawn_spec import forked_tool_spec
from sandbox_server.agent.execution.processes.stdin_pipe import StdinPipe
from sandbox_server.agent.execution.reply_parser import ReplyParser
from sandbox_server.agent.inslot.arguments import MAX_SIZE_BYTES, check_args
from sandbox_server.agent.server.connections import Stream, StreamHandler
from sandbox_server.agent.slots.slots import AgentSlot

FILE_OPERATIONS = {
    "file_get": "route_get",
    "file_put": "route_put",
    "file_list": "route_list",
    "archive_get": "route_archive_get",
    "archive_put": "route_archive_put",
}
"""Operation of the service -> tool of `agent.inslot`."""
_ARGS = ("path", "mode", "recursive", "max_entries")
_KNOWN_CODES = ("invalid", "path_outside", "file_not_found", "file_error", "internal")
STALL_S = 60.0
_END_WITHIN_S = 2.0
_SMALL_WITHIN_S = 0.003


class _Chunks:
    """Content that the child has written and that is still to be sent.

    Attributes:
        unsent: the content.
        written_bytes: how much the child has written so far.
    """

    is_full = False

    def __init__(self) -> None:
        self.unsent: list[bytes] = []
        self.written_bytes = 0

    def write(self, data: bytes) -> None:
        self.unsent.append(data)
        self.written_bytes += len(data)


class FileOperation:
    """One file operation. Its child is killed when it makes no progress for `stall_s` seconds, and when the stream is aborted.

    Args:
        stream: the stream of the operation.
        slot: the slot.
        tool: the tool of `agent.inslot`.
        args: its arguments, checked.
        stall_s: see above.
    """

    def __init__(self, stream: Stream, slot: AgentSlot, tool: str, args: Mapping[str, Any], stall_s: float) -> None:
        self._stream = stream
        self._slot = slot
        self._tool = tool
        self._stall_s = stall_s
        self._loop = asyncio.get_event_loop()
        self._chunks = _Chunks()
        self._reply = ReplyParser(self._chunks)
        self._size_bytes: int | None = None  # of the content, as the service has been told before it
        self._status: asyncio.Future[int] = self._loop.create_future()
        self._incoming: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._progress_at = self._loop.time()
        self._waits_for_service = False  # the child has read all content that has arrived so far
        self._process = SlotProcess(slot.current_runtime(), slot.drains, (), self)
        self._process.start_process(forked_tool_spec(tool, args, has_stdin_pipe=tool.endswith("_put"), has_own_group=False))
        self._stdin = self._process.stdin
        self._feeding = self._loop.create_task(self._feed_child(self._stdin)) if self._stdin is not None else None
        self._serving = self._loop.create_task(self._serve())

    # The reports of the process.

    def on_still_running(self) -> None:
        """See `ProcessListener`. This object reads the output itself."""

    def on_output(self) -> None:
        """See `ProcessListener`. This object reads the output itself."""

    def on_process_ended(self, status: int, cpu_s: float, max_rss_bytes: int) -> None:
        """See `ProcessListener`."""
        if not self._status.done():
            self._status.set_result(status)

    def on_process_refused(self, errno: int, step: str) -> None:
        """See `ProcessListener`."""
        self._fail(Refused("file_error", "the slot cannot start anything: %s" % os.strerror(errno), errno_names.errorcode.get(errno, "EIO")))

    def on_init_lost(self, detail: str) -> None:
        """See `ProcessListener`."""
        self._fail(Refused("slot_unavailable", "the slot's init has ended: %s" % detail))

    def _fail(self, error: Refused) -> None:
        if not self._status.done():
            self._status.set_exception(error)
            self._status.exception()  # retrieved here, because asyncio logs an exception that is never retrieved, and reading the output may fail first

    # The messages of the service.

    def on_item(self, meta: dict[str, Any], body: bytes) -> None:
        """See `StreamHandler`. Content is sent as data."""
        raise Refused("invalid", "a file stream takes no items")

    def on_data(self, body: bytes) -> None:
        """See `StreamHandler`. The data is content to write."""
        if self._stdin is None:
            raise Refused("invalid", "this operation takes no data")
        self._incoming.put_nowait(body)

    def on_end(self) -> None:
        """See `StreamHandler`. All content has arrived."""
        self._incoming.put_nowait(None)

    def on_abort(self) -> None:
        """See `StreamHandler`. Content that is not complete must not be put in place."""
        self._serving.cancel()

    # Both directions.

    async def _feed_child(self, stdin: StdinPipe) -> None:
        stdin.on_progress = self._record_progress
        try:
            while True:
                self._waits_for_service = True
                data = await self._incoming.get()
                self._waits_for_service = False
                self._record_progress()
                if data is None:
                    return
                stdin.write_stdin(data)
                await stdin.wait_until_written()
                self._stream.acknowledge(data)
        finally:
            stdin.close_stdin()

    def _record_progress(self) -> None:
        self._progress_at = self._loop.time()

    async def _serve(self) -> None:
        try:
            # Once the child has ended, all of its reply is in the pipe: one wake-up replaces those for the parts of the reply and for its end.
            if self._stdin is not None:
                await self._wait_for_progress(self._wait_for_status)  # It has no content to send, so its reply fits into the pipe.
            else:
                await asyncio.wait([self._status], timeout=_SMALL_WITHIN_S)
            await self._send_content()
            status = await asyncio.wait_for(asyncio.shield(self._status), self._stall_s)
            self._send_end(status)
        except Refused as error:
            self._stream.refuse(error)
        except asyncio.TimeoutError:
            self._stream.refuse(Refused("file_error", "nothing moved for %g s" % self._stall_s, "ETIMEDOUT"))
        finally:
            self._process.close_output()
            if not self._status.done():
                self._slot.tasks.start_task(self._kill_child())
            elif self._feeding is not None:
                self._feeding.cancel()

    async def _kill_child(self) -> None:
        """Kill the child, then close its input. In the other order, the child would see the end of its input and put incomplete content in place."""
        try:
            await self._process.kill_process(_END_WITHIN_S)
        finally:
            if self._feeding is not None:
                self._feeding.cancel()

    async def _send_content(self) -> None:
        while True:
            data = self._process.try_read_output()
            if data is None:
                await self._wait_for_output()
                continue
            if not data:
                return
            self._record_progress()
            self._reply.write(data)
            self._check_header()
            if self._tool == "route_get" and self._reply.header is not None:
                self._check_size(self._reply.header)
            if self._tool != "route_list":
                for chunk in self._chunks.unsent:
                    if not await self._stream.send_data(chunk):
                        raise asyncio.CancelledError
                self._chunks.unsent.clear()

    def _check_size(self, header: Mapping[str, Any]) -> None:
        """Tell the service the size of the content before the content, and refuse more of it than that. The service passes the size on to its client."""
        if self._size_bytes is None:
            size_bytes = header.get("size_bytes")
            if type(size_bytes) is not int or not 0 <= size_bytes <= MAX_SIZE_BYTES:  # a bool is an int, too
                raise Refused("internal", "the answer of the file operation has no valid size")
            self._size_bytes = size_bytes
            self._stream.send_item({"size_bytes": size_bytes})
        if self._chunks.written_bytes > self._size_bytes:
            raise Refused("internal", "the file operation wrote more than the %d bytes of the file" % self._size_bytes)

    async def _wait_for_output(self) -> None:
        """Wait until the child has written something."""
        if self._stdin is None:
            self._record_progress()  # until now, the child may have waited for the agent to read
        await self._wait_for_progress(self._process.wait_for_output)

    async def _wait_for_status(self, timeout_s: float) -> bool:
        """Wait until the child has ended. Returns False if that takes more than `timeout_s` seconds."""
        await asyncio.wait([self._status], timeout=timeout_s)
        return self._status.done()

    async def _wait_for_progress(self, wait: Callable[[float], Awaitable[bool]]) -> None:
        """Wait for something that the child does. The time that it waits for content of the service does not count.

        Args:
            wait: waits for it, for so many seconds at most, and returns whether it has happened.

        Raises:
            asyncio.TimeoutError: the child has made no progress for too long.
        """
        while True:
            left_s = self._stall_s if self._waits_for_service else self._progress_at + self._stall_s - self._loop.time()
            if left_s <= 0:
                raise asyncio.TimeoutError
            if await wait(left_s):
                return

    def _check_header(self) -> None:
        header = self._reply.header
        if self._reply.is_invalid:
            raise Refused("internal", "the answer of the file operation has no valid header")
        if header is not None and not header.get("ok"):
            code, detail, errno = header.get("code"), header.get("detail"), header.get("errno")
            raise Refused(str(code) if code in _KNOWN_CODES else "internal", str(detail), errno if isinstance(errno, str) else None)

    def _send_end(self, status: int) -> None:
        header = self._reply.header
        if header is None or status != 0 or (self._size_bytes is not None and self._chunks.written_bytes < self._size_bytes):
            raise Refused("file_error", "the operation ended before it had finished", "EIO")
        meta = {key: value for key, value in header.items() if key != "ok"}
        if self._tool == "route_list":
            self._stream.send_item(meta)
            self._stream.end_stream()
        else:
            self._stream.end_stream(meta)


def open_file_operation(stream: Stream, slot: AgentSlot, meta: Mapping[str, Any], stall_s: float = STALL_S) -> StreamHandler:
    """Begin a file operation.

    Args:
        stream: the stream of the operation.
        slot: the slot.
        meta: names the operation as `op`, and its arguments.
        stall_s: after how many seconds without progress the operation is given up.

    Raises:
        Refused: its arguments are not valid.
    """
    tool = FILE_OPERATIONS[str(meta["op"])]
    args = {name: meta[name] for name in _ARGS if meta.get(name) is not None}
    problem = check_args(tool, args)
    if problem is not None:
        raise Refused("invalid", problem)
    return FileOperation(stream, slot, tool, args, stall_s)
