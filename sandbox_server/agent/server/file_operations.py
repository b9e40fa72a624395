"""File routes: one operation each, done by a forked child of init inside the slot, its bytes streamed through."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from typing import Any, Mapping

from sandbox_server.agent.errors import Refused
from sandbox_server.agent.execution.descriptor_waits import wait_readable, wait_writable
from sandbox_server.agent.execution.framed import Framed
from sandbox_server.agent.execution.init_client.init_watchdog import Unanswered, ask_init, end_slot
from sandbox_server.agent.inslot.arguments import check_args
from sandbox_server.agent.server.connections import Handler, Stream
from sandbox_server.agent.slots.slots import Slot

FILE_OPS = {
    "file_get": "route_get",
    "file_put": "route_put",
    "file_list": "route_list",
    "archive_get": "route_archive_get",
    "archive_put": "route_archive_put",
}
_ARGS = ("path", "mode", "recursive", "max_entries")
_CHUNK_BYTES = 64 << 10
STALL_S = 60.0
_END_WITHIN_S = 2.0


class _Chunks:
    """What a child wrote, waiting to be sent on."""

    full = False

    def __init__(self) -> None:
        self.waiting: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.waiting.append(data)


class FileOp:
    """One operation. A child that makes no progress for `STALL_S` is ended; so is one nobody waits for."""

    def __init__(self, stream: Stream, slot: Slot, tool: str, args: Mapping[str, Any]) -> None:
        self._stream = stream
        self._slot = slot
        self._tool = tool
        self._loop = asyncio.get_event_loop()
        self._chunks = _Chunks()
        self._framed = Framed(self._chunks)
        self._status: asyncio.Future[int] = self._loop.create_future()
        self._incoming: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._out_fd = -1
        self._in_fd = -1
        self._number = 0
        self._moved_at = self._loop.time()
        self._wants_more = False  # the child has had all that has come so far
        self._body = slot.current_body()
        self._start(args)
        self._feeding = self._loop.create_task(self._feed()) if self._in_fd >= 0 else None
        self._task = self._loop.create_task(self._serve())

    def _start(self, args: Mapping[str, Any]) -> None:
        out_r, out_w = os.pipe2(os.O_CLOEXEC)
        theirs = [out_w]
        names = ["out"]
        try:
            os.set_blocking(out_r, False)
            if self._tool.endswith("_put"):
                in_r, self._in_fd = os.pipe2(os.O_CLOEXEC)
                os.set_blocking(self._in_fd, False)
                theirs.append(in_r)
                names.append("in")
            request = {"op": "fork", "tool": self._tool, "args": dict(args), "env": None, "fds": names}
            self._number = self._body.link.start(request, theirs, self)
        except BaseException:
            os.close(out_r)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        self._out_fd = out_r

    # What init says.

    def exited(self, status: int, cpu_s: float, max_rss_bytes: int) -> None:
        """See `init_link.Listener`."""
        if not self._status.done():
            self._status.set_result(status)

    def refused(self, number: int, where: str) -> None:
        """See `init_link.Listener`."""
        self._fail(Refused("file_error", "the slot cannot start anything: %s" % os.strerror(number), errno.errorcode.get(number, "EIO")))

    def init_lost(self, detail: str) -> None:
        """See `init_link.Listener`."""
        self._fail(Refused("slot_unavailable", "the slot's init has ended: %s" % detail))

    def _fail(self, error: Refused) -> None:
        if not self._status.done():
            self._status.set_exception(error)
            self._status.exception()  # mark as seen: the reading may end on its own

    # What the service says.

    def item(self, meta: dict[str, Any], body: bytes) -> None:
        """Content comes as data."""
        raise Refused("invalid", "a file stream takes no items")

    def data(self, body: bytes) -> None:
        """Content of a put."""
        if self._in_fd < 0:
            raise Refused("invalid", "this operation takes no data")
        self._incoming.put_nowait(body)

    def ended(self) -> None:
        """All content of a put has come."""
        self._incoming.put_nowait(None)

    def aborted(self) -> None:
        """Nobody waits any more: a put that is not complete must not land."""
        self._task.cancel()

    # The work.

    async def _feed(self) -> None:
        try:
            while True:
                self._wants_more = True
                data = await self._incoming.get()
                self._wants_more = False
                self._moved_at = self._loop.time()
                if data is None:
                    return
                await self._write(data)
                self._stream.consumed(data)
        finally:
            os.close(self._in_fd)

    async def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._in_fd, view) :]
                self._moved_at = self._loop.time()
            except BlockingIOError:
                await wait_writable(self._in_fd)
            except BrokenPipeError:
                return  # the child has answered already; the rest is taken and dropped

    async def _serve(self) -> None:
        try:
            await self._send_all()
            status = await asyncio.wait_for(asyncio.shield(self._status), STALL_S)
            self._finish(status)
        except Refused as error:
            self._stream.refuse(error)
        except asyncio.TimeoutError:
            self._stream.refuse(Refused("file_error", "nothing moved for %g s" % STALL_S, "ETIMEDOUT"))
        finally:
            os.close(self._out_fd)
            if not self._status.done():
                self._slot.spawn_task(self._end_child())
            elif self._feeding is not None:
                self._feeding.cancel()

    async def _end_child(self) -> None:
        """Only when the child has gone may its input be closed: it would take that for the end of the content, and put a part of it in place."""
        try:
            await ask_init(self._body, {"op": "signal", "id": self._number, "signal": int(signal.SIGKILL)})
            self._body.link.release(self._number)
            await asyncio.wait_for(asyncio.shield(self._status), _END_WITHIN_S)
        except (Unanswered, asyncio.TimeoutError) as error:
            await end_slot(self._body, str(error) or "a file operation did not end within %g s of SIGKILL" % _END_WITHIN_S)
        except Refused:
            pass  # the slot has ended as a whole
        finally:
            if self._feeding is not None:
                self._feeding.cancel()

    async def _send_all(self) -> None:
        while True:
            try:
                data = os.read(self._out_fd, _CHUNK_BYTES)
            except BlockingIOError:
                await self._readable()
                continue
            if not data:
                return
            self._moved_at = self._loop.time()
            self._framed.write(data)
            self._check_header()
            if self._tool != "route_list":
                for chunk in self._chunks.waiting:
                    if not await self._stream.send_data(chunk):
                        raise asyncio.CancelledError
                self._chunks.waiting.clear()

    async def _readable(self) -> None:
        """Wait for the child to say something. How long the sender of a put takes is the service's to limit."""
        if self._in_fd < 0:
            self._moved_at = self._loop.time()  # before this, it was we who had not read
        while True:
            left = STALL_S if self._wants_more else self._moved_at + STALL_S - self._loop.time()
            if left <= 0:
                raise asyncio.TimeoutError
            if await wait_readable(self._out_fd, left):
                return

    def _check_header(self) -> None:
        header = self._framed.header
        if self._framed.broken:
            raise Refused("internal", "the file operation answered nonsense")
        if header is not None and not header.get("ok"):
            code, detail, name = header.get("code"), header.get("detail"), header.get("errno")
            known = code if code in ("invalid", "path_outside", "file_not_found", "file_error", "internal") else "internal"
            raise Refused(str(known), str(detail), name if isinstance(name, str) else None)

    def _finish(self, status: int) -> None:
        header = self._framed.header
        if header is None or status != 0:
            raise Refused("file_error", "the operation broke off", "EIO")
        if self._tool == "route_list":
            self._stream.send_item({key: value for key, value in header.items() if key != "ok"})
            self._stream.end()
        else:
            self._stream.end({key: value for key, value in header.items() if key != "ok"})


def open_file_op(stream: Stream, slot: Slot, meta: Mapping[str, Any]) -> Handler:
    """Begin a file operation.

    Raises:
        Refused: its arguments do not fit.
    """
    tool = FILE_OPS[str(meta["op"])]
    args = {name: meta[name] for name in _ARGS if meta.get(name) is not None}
    fault = check_args(tool, args)
    if fault is not None:
        raise Refused("invalid", fault)
    return FileOp(stream, slot, tool, args)
