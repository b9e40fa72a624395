"""The agent's end of the control socket of a slot. Requests are sent to init together with file descriptors; init sends fixed-size reports back."""

from __future__ import annotations

import asyncio
import functools
import marshal
import os
import socket
import struct
from typing import Any, Callable, Protocol, Sequence

from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.execution.init_client.descriptors import TEMPORARY_ERRORS
from sandbox_server.agent.execution.init_client.init_sender import InitSender
from sandbox_server.agent.init.reports import EXITED, FAILED, MARSHAL_VERSION, MOVED, READY, REFUSED, REPORT, REQUEST_BYTES, SIGNALLED

_CREDENTIALS = struct.Struct("iII")
_LARGE_CONFIG_BYTES, _LARGE_REQUEST_BYTES = 100_000, REQUEST_BYTES - 1000  # longer ones are sent as files in memory
_REPORT_BYTES = 4096


class SpawnListener(Protocol):
    """Receives what happens to one process that init was asked to start. Exactly one of the methods is called, once."""

    def on_process_ended(self, status: int, cpu_s: float, max_rss_bytes: int) -> None:
        """The process has ended.

        Args:
            status: as `os.wait4` returns it.
            cpu_s: the processor time of the process and of the children that it has waited for, in seconds.
            max_rss_bytes: the largest resident set of one of them, in bytes.
        """

    def on_process_refused(self, errno: int, step: str) -> None:
        """The process could not be started.

        Args:
            errno: the error.
            step: where it occurred: `send` (the request did not reach init), `cgroup`, `cwd`, `fork` or `spawn`.
        """

    def on_init_lost(self, detail: str) -> None:
        """Init has ended, so no report will come."""


def memfd(name: str, content: bytes) -> int:
    """Return the descriptor of a file in memory with this content, positioned at its start. The caller closes it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
    except OSError:
        os.close(fd)
        raise
    return fd


class InitLink:
    """The control socket of one slot runtime. All methods and callbacks run in the event loop.

    Args:
        loop: the event loop.
        sock: the agent's end of the socket. This object closes it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self._loop = loop
        self._sock = sock
        self._fd = sock.fileno()
        self._next_id = 1
        self._listeners: dict[int, SpawnListener] = {}
        self._answers: dict[int, asyncio.Future[int]] = {}
        self._ready: asyncio.Future[int] = loop.create_future()
        self.closed = False
        self._killed_cpu_s: dict[int, float] = {}  # the processor time of what init has killed and reaped, by spawn id
        self._is_reading = True
        self.own_work = False  # the slot itself has caused the end of init
        self.on_lost: Callable[[str], None] | None = None  # called when init is lost, before any listener is
        self.on_in_flight_full: Callable[[], None] | None = None  # called when the kernel refuses to send more descriptors
        self._sender = InitSender(loop, sock, self.close_as_lost, self._report_in_flight_full)
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        loop.add_reader(self._fd, self._read_first_report)

    async def wait_until_ready(self, config: dict[str, Any], timeout_s: float) -> int:
        """Send init its configuration, and wait until it is ready for requests.

        Args:
            config: the configuration.
            timeout_s: how long to wait, in seconds.

        Returns:
            The process id of init as the agent sees it.

        Raises:
            StartFailed: init reported an error, or did not answer in time.
        """
        self._send_request(config, [], 0, self._on_config_unsent, _LARGE_CONFIG_BYTES)
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), timeout_s)
        except asyncio.TimeoutError:
            raise StartFailed("init did not answer within %g s" % timeout_s) from None

    def start_process(self, request: dict[str, Any], fds: Sequence[int], listener: SpawnListener) -> int:
        """Ask init to start a process.

        Args:
            request: the request, without `id`.
            fds: descriptors for the process. The kernel duplicates them; the caller still closes its own.
            listener: receives what happens to the process.

        Returns:
            The spawn id: the number of the process on this link.

        Raises:
            OSError: the request could not be sent for want of descriptors. The listener is not called.
        """
        number = self._next_id
        self._next_id += 1
        request["id"] = number
        self._listeners[number] = listener
        if self.closed:
            self._loop.call_soon(self._report_lost_before_start, number)
            return number
        try:
            self._send_request(request, fds, number, functools.partial(self._on_start_unsent, number))
        except OSError:
            del self._listeners[number]
            raise
        return number

    def _report_lost_before_start(self, number: int) -> None:
        self._listeners.pop(number).on_init_lost("init had ended before")

    def _on_start_unsent(self, number: int, errno: int) -> None:
        listener = self._listeners.pop(number, None)
        if listener is not None:
            listener.on_process_refused(errno, "send")

    def _on_config_unsent(self, errno: int) -> None:
        text = "its configuration could not be sent: %s" % os.strerror(errno)
        if not self._ready.done():
            self._ready.set_exception(StartFailed(text, temporary=errno in TEMPORARY_ERRORS, errno=errno))
            self._ready.exception()  # retrieved here, as in `close_link`
        self.close_as_lost(text)

    def _report_in_flight_full(self) -> None:
        if self.on_in_flight_full is not None:
            self.on_in_flight_full()

    def ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> asyncio.Future[int]:
        """Ask init to act on a process tree.

        If the request to start the process has not been sent yet, it is withdrawn, and the process never starts.

        Args:
            request: `signal` or `move`, with the spawn id as `id`.
            fds: the descriptors that it needs.

        Returns:
            A future of the number that init answers with. It fails with an OSError if the request could not be sent.
        """
        number = request["id"]
        old = self._answers.pop(number, None)
        if old is not None:
            old.cancel()
        answer: asyncio.Future[int] = self._loop.create_future()
        self._answers[number] = answer
        if self.closed or self._sender.withdraw_message(number):
            answer.set_result(0)
        else:
            self._send_request(request, fds, 0, functools.partial(self._on_ask_unsent, answer))
        return answer

    @staticmethod
    def _on_ask_unsent(answer: asyncio.Future[int], errno: int) -> None:
        if not answer.done():
            answer.set_exception(OSError(errno, os.strerror(errno)))

    def release_spawn(self, number: int) -> float:
        """Let init forget a process tree that was signalled; `number` is its spawn id.

        Returns:
            The processor time that init has counted for the processes of the tree that it killed and reaped, in seconds.
        """
        if not self.closed:
            self._send_request({"op": "release", "id": number}, [], 0, lambda _: None)
        return self._killed_cpu_s.pop(number, 0.0)

    def pin_slot(self, processors: Sequence[int]) -> None:
        """Let init run on these processors alone, and with it all that it starts from now on."""
        if not self.closed:
            self._send_request({"op": "pin", "processors": list(processors)}, [], 0, self._on_pin_unsent)

    def _on_pin_unsent(self, errno: int) -> None:
        self.close_as_lost("the slot could not be pinned to its processors: %s" % os.strerror(errno))

    def close_link(self, detail: str = "the slot has ended") -> None:
        """Close the socket. Init ends itself and with it the slot when it reads the end of the socket. All listeners get `on_init_lost`."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._fd)
        self._sender.close_sender()
        self._sock.close()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result(0)
        if not self._ready.done():
            self._ready.set_exception(StartFailed("init ended before it served"))
            self._ready.exception()  # retrieved here, because asyncio logs an exception that is never retrieved, and nothing may be waiting for this one
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.on_init_lost(detail)

    def close_as_lost(self, detail: str) -> None:
        """Close the link because init has ended, or does not follow the protocol."""
        if self.closed:
            return
        if self.on_lost is not None:
            self.on_lost(detail)  # before the listeners: when a call ends, the next one begins at once, and must find the slot broken
        self.close_link(detail)

    def stop_reading(self) -> None:
        """Ignore further reports. The agent is ending the slot, so the way its processes end now says nothing about them."""
        self._is_reading = False
        if not self.closed:
            self._loop.remove_reader(self._fd)

    def poll_reports(self) -> None:
        """Process the reports that have arrived and that the event loop has not processed yet."""
        while not self.closed and self._is_reading and self._read_report():
            pass

    def _send_request(
        self, request: dict[str, Any], fds: Sequence[int], number: int, on_unsent: Callable[[int], None], most_bytes: int = _LARGE_REQUEST_BYTES
    ) -> None:
        data = marshal.dumps(request, MARSHAL_VERSION)
        if len(data) > most_bytes:
            fd = memfd("request", data)
            try:
                self._sender.send_message(marshal.dumps({"op": "large"}, MARSHAL_VERSION), [fd, *fds], number, on_unsent)
            finally:
                os.close(fd)
        else:
            self._sender.send_message(data, fds, number, on_unsent)

    def _read_first_report(self) -> None:
        """Read the first report. The kernel adds the process id of the sender to it."""
        try:
            data, ancillary, _, _ = self._sock.recvmsg(_REPORT_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
        except BlockingIOError:
            return
        except OSError as error:
            self.close_as_lost("its control socket failed: %s" % error)
            return
        if not data:
            self.close_as_lost("init has ended")
            return
        kind = data[:1]
        if kind == READY and ancillary:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
            self._loop.remove_reader(self._fd)
            self._loop.add_reader(self._fd, self._read_report)
            if not self._ready.done():
                self._ready.set_result(_CREDENTIALS.unpack(ancillary[0][2][: _CREDENTIALS.size])[0])
        else:
            text = data[REPORT.size :].decode("utf-8", "replace") if kind == FAILED else "the first report of init was not that it is ready"
            if not self._ready.done():
                self._ready.set_exception(StartFailed(text))
            self.close_as_lost(text)

    def _read_report(self) -> bool:
        """Process one report; the event loop calls this again while there are more. Returns False if there was none."""
        try:
            data = self._sock.recv(_REPORT_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            self.close_as_lost("its control socket failed: %s" % error)
            return False
        if len(data) < REPORT.size:
            self.close_as_lost("init has ended" if not data else "init broke its protocol")
            return False
        self._handle_report(data)
        return True

    def _handle_report(self, data: bytes) -> None:
        kind, number, status, cpu_us, rss_kb = REPORT.unpack_from(data)
        if kind == EXITED and (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
            listener = self._listeners.pop(number, None)
            if listener is not None:
                listener.on_process_ended(status, cpu_us / 1e6, rss_kb << 10)
        elif kind == REFUSED:
            listener = self._listeners.pop(number, None)
            if listener is not None:
                listener.on_process_refused(status, data[REPORT.size :].decode("ascii", "replace"))
        elif kind in (SIGNALLED, MOVED):
            if kind == SIGNALLED:
                self._killed_cpu_s[number] = cpu_us / 1e6
            answer = self._answers.pop(number, None)
            if answer is not None and not answer.done():
                answer.set_result(status)
        else:
            self.close_as_lost("init broke its protocol")
