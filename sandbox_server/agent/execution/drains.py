"""Pipes that outlive their call: read into nothing, slowly, so that what holds the other end neither blocks for ever nor dies of SIGPIPE."""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict

_PAUSE_S = 0.1
_READ_BYTES = 64 << 10


class Drains:
    """The drained pipes of one slot. At most one read per pipe and pause, so a background `yes` cannot eat the agent's time.

    Beyond the most the oldest is closed: a slot can only lose its own pipes.

    Args:
        loop: the event loop.
        most: how many there may be.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, most: int) -> None:
        self._loop = loop
        self._most = most
        self._fds: OrderedDict[int, asyncio.TimerHandle | None] = OrderedDict()

    def add(self, fd: int) -> None:
        """Own a non-blocking descriptor from now on."""
        if len(self._fds) >= self._most:
            self._close(next(iter(self._fds)))
        self._fds[fd] = None
        self._loop.add_reader(fd, self._readable, fd)

    def _readable(self, fd: int) -> None:
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(fd)
            return
        self._loop.remove_reader(fd)
        self._fds[fd] = self._loop.call_later(_PAUSE_S, self._resume, fd)

    def _resume(self, fd: int) -> None:
        self._fds[fd] = None
        self._loop.add_reader(fd, self._readable, fd)

    def _close(self, fd: int) -> None:
        timer = self._fds.pop(fd)
        if timer is not None:
            timer.cancel()
        else:
            self._loop.remove_reader(fd)
        os.close(fd)

    def close(self) -> None:
        """The slot has ended."""
        while self._fds:
            self._close(next(iter(self._fds)))
