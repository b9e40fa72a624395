"""The agent's end of a pseudo-terminal in a slot: it is received from init, sized, written and read.

A forked child of init opens the terminal as the slot, and sends the master over a socket (`agent/init/pseudo_terminal.py`). The slot gets only the other end.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import os
import socket
import stat
import struct
import termios
from typing import Callable

from sandbox_server.agent.execution.processes.descriptor_waits import wait_readable
from sandbox_server.agent.execution.processes.stdin_pipe import StdinPipe

_PTMX = (5, 2)  # the device of every master
_TIOCGPTN = 0x80045430  # the number of the terminal of a master; other devices refuse it
_MESSAGE_BYTES = 64
_MAX_DESCRIPTORS = 4
_READ_BYTES = 4096  # the kernel returns no more at once
_READS_AT_ONCE = 16
_FLOOD_PAUSE_S = 0.002
_HUNG_UP_PAUSE_S = 0.2


class NoTerminal(Exception):
    """No usable master was received. The text says why."""


async def receive_master(sock: socket.socket, cols: int, rows: int, timeout_s: float) -> int:
    """Receive the master of a new terminal, and set the size of its window. The program starts after that.

    Args:
        sock: the agent's socket to the child of init, which does not block.
        cols: the width of the window in columns.
        rows: its height in rows.
        timeout_s: how long to wait for it, in seconds.

    Returns:
        The descriptor of the master, which does not block.

    Raises:
        NoTerminal: the child has ended, or it sent nothing in time, or something else.
    """
    if not await wait_readable(sock.fileno(), timeout_s):
        raise NoTerminal("it was not opened within %g s" % timeout_s)
    fds = _receive_descriptors(sock)
    try:
        if len(fds) != 1 or not _is_master(fds[0]):
            raise NoTerminal("the slot sent no terminal" if fds else "the process ended first, or the agent has no descriptors left")
        os.set_blocking(fds[0], False)
        set_window_size(fds[0], cols, rows)
        sock.send(b"1")
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, OSError):
            raise NoTerminal(os.strerror(error.errno or 0)) from None
        raise
    return fds[0]


def _receive_descriptors(sock: socket.socket) -> list[int]:
    fds = array.array("i")
    try:
        _, ancillary, _, _ = sock.recvmsg(_MESSAGE_BYTES, socket.CMSG_SPACE(_MAX_DESCRIPTORS * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    except OSError as error:
        raise NoTerminal(os.strerror(error.errno or 0)) from None
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) // fds.itemsize * fds.itemsize])
    return list(fds)


def _is_master(fd: int) -> bool:
    status = os.fstat(fd)
    if not stat.S_ISCHR(status.st_mode) or (os.major(status.st_rdev), os.minor(status.st_rdev)) != _PTMX:
        return False
    try:
        fcntl.ioctl(fd, _TIOCGPTN, bytes(4))
    except OSError:
        return False
    return True


def set_window_size(fd: int, cols: int, rows: int) -> None:
    """Set the size of the window of a terminal. If it changes, the program in the foreground gets SIGWINCH.

    Args:
        fd: the master.
        cols: the width in columns.
        rows: the height in rows.
    """
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))


class TerminalMaster:
    """Reads a terminal in the event loop, and writes to it without blocking. While nothing is read, the program waits as soon as its terminal is full.

    Args:
        fd: the master, which does not block. This object closes it.
        on_output: called with each piece of output.
    """

    def __init__(self, fd: int, on_output: Callable[[bytes], None]) -> None:
        self._fd = fd
        self._on_output = on_output
        self._loop = asyncio.get_event_loop()
        self._pause_timer: asyncio.TimerHandle | None = None
        self._is_reading = False
        self._is_wanted = False
        self.input = StdinPipe(fd)

    def set_size(self, cols: int, rows: int) -> None:
        """Set the size of the window, see `set_window_size`."""
        if self._fd >= 0:
            set_window_size(self._fd, cols, rows)

    def set_reading(self, is_wanted: bool) -> None:
        """Read from now on, or no more."""
        self._is_wanted = is_wanted and self._fd >= 0
        self._update_reader()

    def _update_reader(self) -> None:
        reads = self._is_wanted and self._pause_timer is None
        if reads and not self._is_reading:
            self._loop.add_reader(self._fd, self._read_some)
        elif not reads and self._is_reading:
            self._loop.remove_reader(self._fd)
        self._is_reading = reads

    def _read_some(self) -> None:
        for _ in range(_READS_AT_ONCE):
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:  # No process has the terminal open. One of the session may open it again.
                self._pause(_HUNG_UP_PAUSE_S)
                return
            self._on_output(data)
            if not self._is_wanted:
                return
        self._pause(_FLOOD_PAUSE_S)  # limits the time that the agent spends on a program that writes without end

    def _pause(self, pause_s: float) -> None:
        self._pause_timer = self._loop.call_later(pause_s, self._end_pause)
        self._update_reader()

    def _end_pause(self) -> None:
        self._pause_timer = None
        self._update_reader()

    def read_rest(self, most_bytes: int) -> None:
        """Read what the terminal still holds after its program has ended, at most so many bytes."""
        left_bytes = most_bytes
        while self._fd >= 0 and left_bytes > 0:
            try:
                data = os.read(self._fd, _READ_BYTES)
            except OSError:  # EIO after the last byte, or EAGAIN while another process has the terminal open
                return
            left_bytes -= len(data)
            self._on_output(data)

    def close_master(self) -> None:
        """Close the terminal. The processes that it controls get SIGHUP."""
        if self._fd < 0:
            return
        self.set_reading(False)
        if self._pause_timer is not None:
            self._pause_timer.cancel()
            self._pause_timer = None
        self._fd = -1
        self.input.close_stdin()
