"""The agent's end of a slot's control socket: requests go out with file descriptors, reports come back as numbers."""

from __future__ import annotations

import array
import asyncio
import collections
import marshal
import os
import socket
import struct
from typing import Any, Callable, Deque, Protocol, Sequence

from sandbox_server.agent.errors import StartFailed

REPORT = struct.Struct("<cIiQQ")
READY, FAILED, EXITED, REFUSED, SIGNALLED, MOVED = b"R", b"F", b"X", b"E", b"S", b"M"
_CREDENTIALS = struct.Struct("iII")
_LARGE_BYTES = 100_000
_REPORT_BYTES = 4096
_QUEUE_LIMIT = 20_000


class Listener(Protocol):
    """Who asked init for a run and hears how it went."""

    def exited(self, status: int, cpu_s: float, max_rss_bytes: int) -> None:
        """The first process of the run has ended; `status` is as `wait4` gives it."""

    def refused(self, number: int, where: str) -> None:
        """Init could not start it: the errno, and at which step (`cgroup`, `cwd`, `fork`, `spawn`)."""

    def init_lost(self, detail: str) -> None:
        """Init has gone; nothing more will be heard."""


def memfd(name: str, content: bytes) -> int:
    """A file in memory holding `content`, read from its start. The caller closes it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
    except BaseException:
        os.close(fd)
        raise
    return fd


class InitLink:
    """One control socket. Owned by a slot's body; every callback runs in the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self._loop = loop
        self._sock = sock
        self._fd = sock.fileno()
        self._next = 1
        self._listeners: dict[int, Listener] = {}
        self._answers: dict[int, asyncio.Future[int]] = {}
        self._waiting: Deque[tuple[bytes, list[int]]] = collections.deque()
        self._ready: asyncio.Future[int] = loop.create_future()
        self.closed = False
        self.own_work = False  # it is the slot's own doing that init goes
        self.on_lost: Callable[[str], None] | None = None
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        loop.add_reader(self._fd, self._receive_first)

    async def ready(self, config: dict[str, Any], fds: Sequence[int], timeout_s: float) -> int:
        """Send init its configuration, with the groups it joins as descriptors, and wait until it serves.

        Returns:
            Init's pid as this process sees it.

        Raises:
            StartFailed: init said why it cannot serve, or said nothing in time.
        """
        self._send(config, fds)
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), timeout_s)
        except asyncio.TimeoutError:
            raise StartFailed("init did not answer within %g s" % timeout_s) from None

    def start(self, request: dict[str, Any], fds: Sequence[int], listener: Listener) -> int:
        """Ask for a run; `fds` are duplicated by the kernel, the caller keeps and closes its own.

        Returns:
            The run's number on this link.
        """
        number = self._next
        self._next += 1
        self._listeners[number] = listener
        request["id"] = number
        if self.closed:
            self._loop.call_soon(self._never_began, number)
        else:
            self._send(request, fds)
        return number

    def _never_began(self, number: int) -> None:
        self._listeners.pop(number).init_lost("init had ended before")

    def ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> asyncio.Future[int]:
        """Ask something about a run (`signal`, `move`); the future gets init's number."""
        number = request["id"]
        old = self._answers.pop(number, None)
        if old is not None:
            old.cancel()
        answer: asyncio.Future[int] = self._loop.create_future()
        self._answers[number] = answer
        if self.closed:
            answer.set_result(0)
        else:
            self._send(request, fds)
        return answer

    def release(self, number: int) -> None:
        """Nothing more will be asked about a run that was signalled."""
        if not self.closed:
            self._send({"op": "release", "id": number}, [])

    def close(self, detail: str = "the slot has ended") -> None:
        """End the link; a living init ends its slot when it notices. Who still waits for a run hears that init has gone."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._sock.close()
        for _, fds in self._waiting:
            for fd in fds:
                os.close(fd)
        self._waiting.clear()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result(0)
        if not self._ready.done():
            self._ready.set_exception(StartFailed("init ended before it served"))
            self._ready.exception()  # mark as seen: nobody may be waiting
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.init_lost(detail)

    def lose(self, detail: str) -> None:
        """Init is gone, or as good as gone."""
        if self.closed:
            return
        if self.on_lost is not None:
            self.on_lost(detail)  # first: who hears of the end of a run goes on to the next call at once, and must find the slot broken
        self.close(detail)

    def poll(self) -> None:
        """Hear now what init has said and this process has not yet come to."""
        if not self.closed:
            self._receive()

    def _send(self, request: dict[str, Any], fds: Sequence[int]) -> None:
        data = marshal.dumps(request, 4)
        if len(data) > _LARGE_BYTES:
            fd = memfd("request", data)
            try:
                self._write(marshal.dumps({"op": "large"}, 4), [fd, *fds])
            finally:
                os.close(fd)
        else:
            self._write(data, fds)

    def _write(self, data: bytes, fds: Sequence[int]) -> None:
        if not self._waiting:
            try:
                self._transmit(data, fds)
            except BlockingIOError:
                pass
            except OSError as error:
                self._loop.call_soon(self.lose, "its control socket failed: %s" % error)
                return
            else:
                return
        if len(self._waiting) >= _QUEUE_LIMIT:
            self._loop.call_soon(self.lose, "init has stopped reading")
            return
        if not self._waiting:
            self._loop.add_writer(self._fd, self._flush)
        self._waiting.append((data, [os.dup(fd) for fd in fds]))

    def _transmit(self, data: bytes, fds: Sequence[int]) -> None:
        if fds:
            self._sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
        else:
            self._sock.send(data)

    def _flush(self) -> None:
        while self._waiting:
            data, fds = self._waiting[0]
            try:
                self._transmit(data, fds)
            except BlockingIOError:
                return
            except OSError as error:
                self.lose("its control socket failed: %s" % error)
                return
            self._waiting.popleft()
            for fd in fds:
                os.close(fd)
        self._loop.remove_writer(self._fd)

    def _receive_first(self) -> None:
        """The first report carries the sender's pid, said by the kernel."""
        try:
            data, ancillary, _, _ = self._sock.recvmsg(_REPORT_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
        except BlockingIOError:
            return
        except OSError as error:
            self.lose("its control socket failed: %s" % error)
            return
        if not data:
            self.lose("init has ended")
            return
        kind = data[:1]
        if kind == READY and ancillary:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
            self._loop.remove_reader(self._fd)
            self._loop.add_reader(self._fd, self._receive)
            if not self._ready.done():
                self._ready.set_result(_CREDENTIALS.unpack(ancillary[0][2][: _CREDENTIALS.size])[0])
        else:
            text = data[REPORT.size :].decode("utf-8", "replace") if kind == FAILED else "init said something else than that it serves"
            if not self._ready.done():
                self._ready.set_exception(StartFailed(text))
            self.lose(text)

    def _receive(self) -> None:
        while not self.closed:
            try:
                data = self._sock.recv(_REPORT_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self.lose("its control socket failed: %s" % error)
                return
            if len(data) < REPORT.size:
                self.lose("init has ended" if not data else "init broke its protocol")
                return
            self._report(data)

    def _report(self, data: bytes) -> None:
        kind, number, status, cpu_us, rss_kb = REPORT.unpack_from(data)
        if kind == EXITED and (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
            listener = self._listeners.pop(number, None)
            if listener is not None:
                listener.exited(status, cpu_us / 1e6, rss_kb << 10)
        elif kind == REFUSED:
            listener = self._listeners.pop(number, None)
            if listener is not None:
                listener.refused(status, data[REPORT.size :].decode("ascii", "replace"))
        elif kind in (SIGNALLED, MOVED):
            answer = self._answers.pop(number, None)
            if answer is not None and not answer.done():
                answer.set_result(status)
        else:
            self.lose("init broke its protocol")
