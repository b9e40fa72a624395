"""The agent's end of a slot's control socket: requests go out with file descriptors, reports come back as numbers."""

from __future__ import annotations

import asyncio
import functools
import marshal
import os
import socket
import struct
from typing import Any, Callable, Protocol, Sequence

from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.execution.init_client.init_sender import InitSender

REPORT = struct.Struct("<cIiQQ")
READY, FAILED, EXITED, REFUSED, SIGNALLED, MOVED = b"R", b"F", b"X", b"E", b"S", b"M"
_CREDENTIALS = struct.Struct("iII")
_LARGE_BYTES = 100_000
_REPORT_BYTES = 4096


class Listener(Protocol):
    """Who asked init for a run and hears how it went."""

    def exited(self, status: int, cpu_s: float, max_rss_bytes: int) -> None:
        """The first process of the run has ended; `status` is as `wait4` gives it."""

    def refused(self, number: int, where: str) -> None:
        """It could not be started: the errno, and at which step (`send`: init was never asked; `cgroup`, `cwd`, `fork`, `spawn`)."""

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
        self._ready: asyncio.Future[int] = loop.create_future()
        self.closed = False
        self._used_s: dict[int, float] = {}
        self._hears = True
        self.self_inflicted = False  # it is the slot's own doing that init goes
        self.on_lost: Callable[[str], None] | None = None
        self.on_in_flight_full: Callable[[], None] | None = None
        self._sender = InitSender(loop, sock, self.lose, self._in_flight_full)
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        loop.add_reader(self._fd, self._receive_first)

    async def ready(self, config: dict[str, Any], timeout_s: float) -> int:
        """Send init its configuration, and wait until it serves.

        Returns:
            Init's pid as this process sees it.

        Raises:
            StartFailed: init said why it cannot serve, or said nothing in time.
        """
        self._send(config, [], 0, self._config_refused)
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), timeout_s)
        except asyncio.TimeoutError:
            raise StartFailed("init did not answer within %g s" % timeout_s) from None

    def start(self, request: dict[str, Any], fds: Sequence[int], listener: Listener) -> int:
        """Ask for a run; `fds` are duplicated by the kernel, the caller keeps and closes its own.

        Returns:
            The run's number on this link.

        Raises:
            OSError: nothing was asked, for want of descriptors; the listener hears nothing.
        """
        number = self._next
        self._next += 1
        request["id"] = number
        self._listeners[number] = listener
        if self.closed:
            self._loop.call_soon(self._never_began, number)
            return number
        try:
            self._send(request, fds, number, functools.partial(self._start_refused, number))
        except OSError:
            del self._listeners[number]
            raise
        return number

    def _never_began(self, number: int) -> None:
        self._listeners.pop(number).init_lost("init had ended before")

    def _start_refused(self, number: int, errno: int) -> None:
        listener = self._listeners.pop(number, None)
        if listener is not None:
            listener.refused(errno, "send")

    def _config_refused(self, errno: int) -> None:
        self.lose("its configuration could not be sent: %s" % os.strerror(errno))

    def _in_flight_full(self) -> None:
        if self.on_in_flight_full is not None:
            self.on_in_flight_full()

    def ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> asyncio.Future[int]:
        """Ask something about a run (`signal`, `move`); the future gets init's number, or the OSError with which the request could not be sent.

        A run that init has not been told to start yet never starts.
        """
        number = request["id"]
        old = self._answers.pop(number, None)
        if old is not None:
            old.cancel()
        answer: asyncio.Future[int] = self._loop.create_future()
        self._answers[number] = answer
        if self.closed or self._sender.withdraw(number):
            answer.set_result(0)
        else:
            self._send(request, fds, 0, functools.partial(self._ask_refused, answer))
        return answer

    @staticmethod
    def _ask_refused(answer: asyncio.Future[int], errno: int) -> None:
        if not answer.done():
            answer.set_exception(OSError(errno, os.strerror(errno)))

    def release(self, number: int) -> float:
        """Nothing more will be asked about a run that was signalled.

        Returns:
            The processor time, in seconds, that init has counted for what it signalled and reaped of the run.
        """
        if not self.closed:
            self._send({"op": "release", "id": number}, [], 0, lambda _: None)
        return self._used_s.pop(number, 0.0)

    def close(self, detail: str = "the slot has ended") -> None:
        """End the link; a living init ends its slot when it notices. Who still waits for a run hears that init has gone."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._fd)
        self._sender.close()
        self._sock.close()
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

    def stop_hearing(self) -> None:
        """The slot is being ended: what its processes come to on the way is no end of their own."""
        self._hears = False
        if not self.closed:
            self._loop.remove_reader(self._fd)

    def poll(self) -> None:
        """Hear now what init has said and this process has not yet come to."""
        if not self.closed and self._hears:
            self._receive()

    def _send(self, request: dict[str, Any], fds: Sequence[int], number: int, refused: Callable[[int], None]) -> None:
        data = marshal.dumps(request, 4)
        if len(data) > _LARGE_BYTES:
            fd = memfd("request", data)
            try:
                self._sender.send(marshal.dumps({"op": "large"}, 4), [fd, *fds], number, refused)
            finally:
                os.close(fd)
        else:
            self._sender.send(data, fds, number, refused)

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
            if kind == SIGNALLED:
                self._used_s[number] = cpu_us / 1e6
            answer = self._answers.pop(number, None)
            if answer is not None and not answer.done():
                answer.set_result(status)
        else:
            self.lose("init broke its protocol")
