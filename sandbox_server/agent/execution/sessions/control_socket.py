"""The agent's end of the socket that the shell of a session has as its standard input."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Callable

from sandbox_server.agent.execution.sessions.shell_protocol import READY, parse_reports

_READ_BYTES = 4096
_MAX_STRAY = 64
_PERIOD_S = 0.1
_MAX_REPORTS_PER_PERIOD = 200
_CREDENTIALS = struct.Struct("iII")


class ControlSocket:
    """Sends lines to a shell and receives its reports.

    The kernel says which process has sent what arrives. Reports count only if the shell itself has sent them: neither a program nor a subshell can send any.

    Args:
        on_report: called with the number and the status of each report of the shell.
        on_broken: called once when more arrives that is no report of the shell than can be an accident.
    """

    def __init__(self, on_report: Callable[[int, int], None], on_broken: Callable[[], None]) -> None:
        self._on_report = on_report
        self._on_broken = on_broken
        self._loop = asyncio.get_event_loop()
        self._sock, self._shell_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.setblocking(False)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._rest = b""
        self._stray_count = 0
        self._is_open = True
        self._is_reading = True
        self._period_began = 0.0
        self._period_reports = 0
        self._resume_timer: asyncio.TimerHandle | None = None
        self.shell_pid = 0  # as the agent sees it; 0: the shell is not ready
        self._loop.add_reader(self._sock.fileno(), self._read_reports)

    def shell_fd(self) -> int:
        """The end of the shell."""
        return self._shell_end.fileno()

    def close_shell_end(self) -> None:
        """Close the agent's copy of the end of the shell, which init has received."""
        self._shell_end.close()

    def send_lines(self, lines: bytes) -> bool:
        """Send lines to the shell. Returns False if it has not read so many that there is no room for more, or if it has gone."""
        try:
            return self._is_open and self._sock.send(lines) == len(lines)
        except OSError:
            return False  # init reports the end of the shell, and whoever waits for its answer has a deadline

    def close_control(self) -> None:
        """Close the socket. A shell that still reads sees the end of its input, and ends."""
        self._shell_end.close()
        if self._is_open:
            self._stop_reading()
            self._is_open = False
            self._sock.close()

    def _stop_reading(self) -> None:
        if self._is_reading:
            self._loop.remove_reader(self._sock.fileno())
        self._is_reading = False
        if self._resume_timer is not None:
            self._resume_timer.cancel()
            self._resume_timer = None

    def _limit_rate(self, report_count: int) -> None:
        """Pause after more reports than commands can cause: a command can make its shell send them without end."""
        now = self._loop.time()
        if now - self._period_began > _PERIOD_S:
            self._period_began, self._period_reports = now, 0
        self._period_reports += report_count
        if self._period_reports > _MAX_REPORTS_PER_PERIOD and self._is_reading and self._resume_timer is None:
            self._loop.remove_reader(self._sock.fileno())
            self._resume_timer = self._loop.call_later(_PERIOD_S, self._resume_reading)

    def _resume_reading(self) -> None:
        self._resume_timer = None
        self._loop.add_reader(self._sock.fileno(), self._read_reports)

    def _read_reports(self) -> None:
        try:
            data, ancillary, _, _ = self._sock.recvmsg(_READ_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        if not data:
            self._stop_reading()  # the shell has closed its standard input; init reports its end
            return
        sender = _CREDENTIALS.unpack(ancillary[0][2][: _CREDENTIALS.size])[0] if ancillary else 0
        if self.shell_pid and sender != self.shell_pid:
            self._count_stray(1)
            return
        reports, bad_count, self._rest = parse_reports(self._rest + data)
        self._count_stray(bad_count)
        for number, status in reports:
            if number == READY and not self.shell_pid:
                self.shell_pid = sender
            if not self._is_open:
                return
            self._on_report(number, status)
        self._limit_rate(len(reports))

    def poll_reports(self) -> None:
        """Process what has arrived and the event loop has not processed yet."""
        if self._is_open:
            self._read_reports()

    def _count_stray(self, count: int) -> None:
        is_broken = self._stray_count > _MAX_STRAY
        self._stray_count += count
        if self._stray_count > _MAX_STRAY and not is_broken:
            self._stop_reading()
            self._on_broken()
